//! MoRI-IO for the transport: calls `hetero_kv.mori`, whose objects hold the engine.
//!
//! The one place where threads that move KV take the interpreter lock, for one call per batch.

use std::sync::Arc;
use std::time::Duration;

use hetero_kv_transport::mori::{
    MoriEngine, MoriEngineAddress, MoriError, MoriLibrary, MoriMemory, MoriPart, MoriPeer,
    MoriTransfer, Notifications, TransferState,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// Versions of `amd-mori` that the transport is written for.
pub(crate) fn versions() -> (&'static str, &'static str) {
    hetero_kv_transport::mori::MORI_VERSIONS
}

/// `hetero_kv.mori.Library`, or whatever has its methods.
pub(crate) fn library(object: Py<PyAny>) -> Arc<dyn MoriLibrary> {
    Arc::new(Library(object))
}

/// Runs `call` under the interpreter lock; an error while the interpreter ends.
fn attached<T>(call: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, MoriError> {
    let done = Python::try_attach(|py| {
        call(py).map_err(|error| {
            let kind = error
                .get_type(py)
                .name()
                .map_or_else(|_| "an exception".into(), |name| name.to_string());
            let text = error.value(py).to_string();
            MoriError(if kind == "MoriError" {
                text
            } else {
                format!("{kind}: {text}")
            })
        })
    });
    done.unwrap_or_else(|| Err(MoriError("the Python interpreter is ending".into())))
}

/// Calls `close` of an object that is given up.
fn close(object: &Py<PyAny>) {
    if let Err(error) = attached(|py| object.call_method0(py, "close")) {
        tracing::warn!(%error, "mori: close");
    }
}

struct Library(Py<PyAny>);

impl MoriLibrary for Library {
    fn start(
        &self,
        host: &str,
        port: u16,
        notifications: Notifications,
    ) -> Result<Box<dyn MoriEngine>, MoriError> {
        let notify = match notifications {
            Notifications::Off => false,
            Notifications::On => true,
        };
        let engine = attached(|py| self.0.call_method1(py, "start", (host, port, notify)))?;
        Ok(Box::new(Engine(engine)))
    }
}

struct Engine(Py<PyAny>);

impl MoriEngine for Engine {
    fn address(&self) -> Result<MoriEngineAddress, MoriError> {
        let (descriptor, host, port, version) =
            attached(|py| self.0.call_method0(py, "address")?.extract(py))?;
        Ok(MoriEngineAddress {
            descriptor,
            host,
            port,
            version,
        })
    }

    fn register(&self, base: u64, bytes: u64) -> Result<MoriMemory, MoriError> {
        let arguments = (base, bytes);
        let (id, descriptor) =
            attached(|py| self.0.call_method1(py, "register", arguments)?.extract(py))?;
        Ok(MoriMemory { id, descriptor })
    }

    fn deregister_all(&self) -> Result<(), MoriError> {
        attached(|py| self.0.call_method0(py, "deregister_all"))?;
        Ok(())
    }

    fn learn(&self, descriptor: &[u8], memories: &[&[u8]]) -> Result<Box<dyn MoriPeer>, MoriError> {
        let peer = attached(|py| {
            let memories = memories.iter().map(|memory| PyBytes::new(py, memory));
            let arguments = (PyBytes::new(py, descriptor), PyList::new(py, memories)?);
            self.0.call_method1(py, "learn", arguments)
        })?;
        Ok(Box::new(Peer(peer)))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        close(&self.0);
    }
}

struct Peer(Py<PyAny>);

impl Peer {
    /// Calls `read` or `write`.
    fn begin(
        &self,
        method: &str,
        parts: Vec<MoriPart>,
    ) -> Result<Box<dyn MoriTransfer>, MoriError> {
        let transfer = attached(|py| {
            let mut columns: [Vec<Bound<'_, PyAny>>; 6] = Default::default();
            for part in parts {
                let [uids, locals, local_offsets, remotes, remote_offsets, bytes] = &mut columns;
                uids.push(part.uid.into_pyobject(py)?.into_any());
                locals.push(part.local.into_pyobject(py)?.into_any());
                local_offsets.push(PyList::new(py, part.local_offsets)?.into_any());
                remotes.push(part.remote.into_pyobject(py)?.into_any());
                remote_offsets.push(PyList::new(py, part.remote_offsets)?.into_any());
                bytes.push(PyList::new(py, part.bytes)?.into_any());
            }
            let [uids, locals, local_offsets, remotes, remote_offsets, bytes] = columns;
            let arguments = (uids, locals, local_offsets, remotes, remote_offsets, bytes);
            self.0.call_method1(py, method, arguments)
        })?;
        Ok(Box::new(Transfer(transfer)))
    }
}

impl MoriPeer for Peer {
    fn read(&self, parts: Vec<MoriPart>) -> Result<Box<dyn MoriTransfer>, MoriError> {
        self.begin("read", parts)
    }

    fn write(&self, parts: Vec<MoriPart>) -> Result<Box<dyn MoriTransfer>, MoriError> {
        self.begin("write", parts)
    }

    fn arrived(&self, uid: u64) -> Result<bool, MoriError> {
        attached(|py| self.0.call_method1(py, "arrived", (uid,))?.extract(py))
    }

    fn failure(&self) -> Option<String> {
        attached(|py| self.0.call_method0(py, "failure")?.extract(py)).ok()?
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        close(&self.0);
    }
}

struct Transfer(Py<PyAny>);

impl MoriTransfer for Transfer {
    fn wait(&mut self, timeout: Duration) -> TransferState {
        // Rounded up: a wait of nothing would turn a loop around it into a spin.
        let timeout_ms = u32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(u32::MAX);
        let state: Result<(bool, Option<String>), _> =
            attached(|py| self.0.call_method1(py, "wait", (timeout_ms,))?.extract(py));
        match state {
            Ok((true, None)) => TransferState::Done,
            Ok((false, None)) => TransferState::Running,
            Ok((_, Some(text))) | Err(MoriError(text)) => TransferState::Failed(text),
        }
    }
}
