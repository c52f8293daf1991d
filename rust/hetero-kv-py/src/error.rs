//! Every mapping of our errors to Python's exceptions.

use std::fmt;

use pyo3::PyErr;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};

/// A value from Python that cannot be used.
pub(crate) fn value(what: &str, error: impl fmt::Display) -> PyErr {
    PyValueError::new_err(format!("hetero_kv: {what}: {error}"))
}

/// The operating system refused.
pub(crate) fn system(what: &str, error: impl fmt::Display) -> PyErr {
    PyOSError::new_err(format!("hetero_kv: {what}: {error}"))
}

/// A state that only a mistake in our own code brings about.
pub(crate) fn broken(what: &str) -> PyErr {
    PyRuntimeError::new_err(format!("hetero_kv: {what}"))
}
