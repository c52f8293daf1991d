//! `hetero_kv._core`: converts between Python and the Rust crates, and decides nothing.
//!
//! Importing it starts nothing. Calls that may wait release the interpreter lock, and no thread of
//! ours takes it, but for the `mori` transport, whose engine is Python's.

mod detached;
mod error;
mod logging;
mod mori;
mod options;
mod push;
mod raw;
mod scheduler;
mod worker;

use pyo3::prelude::*;

/// Names that the Python package re-exports or wraps.
#[pymodule(gil_used = false)]
mod _core {
    use hetero_kv_core::failure::FailureReason;
    use hetero_kv_core::layout::KvGroup;
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::push::MemoryWriter;
    #[pymodule_export]
    use super::raw::{MemoryReader, MemorySource};
    #[pymodule_export]
    use super::scheduler::Scheduler;
    #[pymodule_export]
    use super::worker::Worker;

    /// Version of the crates this extension was built from.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// SHA-256 that names a prompt, in hexadecimal: over its token ids and, in order, every further
    /// ingredient (`name`, `value`) that shapes its KV.
    #[pyfunction]
    fn prompt_digest(token_ids: Vec<u32>, ingredients: Vec<(String, Vec<u8>)>) -> String {
        super::digest(&token_ids, &ingredients).to_string()
    }

    /// Every value of the `reason` label of failed loads.
    #[pyfunction]
    fn failure_reasons() -> Vec<&'static str> {
        FailureReason::ALL
            .iter()
            .map(|reason| reason.label())
            .collect()
    }

    /// The compatibility field `group_kinds` of KV cache groups, given as (first layer, kind). Raises
    /// `ValueError` naming the group whose kind cannot be moved.
    #[pyfunction]
    fn group_kinds(groups: Vec<(String, String)>) -> PyResult<String> {
        let groups: Vec<KvGroup<'_>> = groups
            .iter()
            .map(|(name, kind)| KvGroup { name, kind })
            .collect();
        hetero_kv_core::layout::group_kinds(&groups)
            .map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))
    }

    /// Versions of `amd-mori` that the `mori` transport is for: from the first, below the second.
    #[pyfunction]
    fn mori_versions() -> (&'static str, &'static str) {
        super::mori::versions()
    }

    /// Starts the log of our threads on standard error; once per process, later calls change
    /// nothing. `filter` is a `tracing` filter such as `info` or `hetero_kv_transport=debug`.
    #[pyfunction]
    fn init_logging(filter: &str) -> PyResult<()> {
        super::logging::init(filter)
    }
}

fn digest(
    token_ids: &[u32],
    ingredients: &[(String, Vec<u8>)],
) -> hetero_kv_core::ids::PromptDigest {
    let mut hasher = hetero_kv_core::digest::PromptHasher::new(token_ids);
    for (name, value) in ingredients {
        hasher.add(name, value);
    }
    hasher.finish()
}
