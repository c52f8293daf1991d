//! Log lines of our threads, without the interpreter.

use std::io::stderr;
use std::sync::OnceLock;

use pyo3::PyResult;
use tracing_subscriber::EnvFilter;

use crate::error;

static STARTED: OnceLock<()> = OnceLock::new();

/// Starts the subscriber once. A subscriber that another extension has installed stays.
pub(crate) fn init(filter: &str) -> PyResult<()> {
    let filter = EnvFilter::try_new(filter).map_err(|error| error::value("log filter", error))?;
    STARTED.get_or_init(|| {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(stderr)
            .with_ansi(false)
            .with_target(false)
            .try_init();
    });
    Ok(())
}
