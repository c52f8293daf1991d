//! Writes into another process's memory by `mori`, without an engine around them. For the tests of
//! what push mode will stand on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hetero_kv_core::ids::{Epoch, LeaseRef, Slot};
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::TransportError;
use hetero_kv_transport::memory::LocalMemory;
use hetero_kv_transport::mori::{MoriHost, MoriTransport, MoriWriter, Notifications, WriteBatch};
use hetero_kv_transport::net::listen::ListenAddress;
use hetero_kv_transport::tcp::ServerOptions;
use hetero_kv_transport::transport::Completion;
use hetero_kv_transport::waker::Waker;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::json;

use crate::detached::Detached;
use crate::error;
use crate::raw::{peer_of, register, runs_of};

struct Writing {
    // Dropped first: it is over the transport's engine.
    open: Mutex<Option<MoriWriter>>,
    transport: MoriTransport,
    memory: Arc<LocalMemory>,
    waker: Waker,
}

impl Writing {
    fn open(&self) -> MutexGuard<'_, Option<MoriWriter>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `step` of the writer that is open.
    fn with<T>(&self, step: impl FnOnce(&mut MoriWriter) -> T) -> PyResult<T> {
        let mut open = self.open();
        let writer = open.as_mut();
        let writer = writer.ok_or_else(|| error::value("open", "was not called, or failed"))?;
        Ok(step(writer))
    }
}

/// Writes this process's memory into that of a [`crate::raw::MemorySource`], one peer at a time. The
/// caller keeps it mapped until the object is gone.
#[pyclass(frozen, module = "hetero_kv._core")]
pub(crate) struct MemoryWriter {
    writing: Detached<Writing>,
}

#[pymethods]
impl MemoryWriter {
    /// Writes from `regions` (address and length) by a `hetero_kv.mori.Library`.
    #[new]
    #[pyo3(signature = (regions, mori, host="127.0.0.1", notifications=true))]
    fn new(
        py: Python<'_>,
        regions: Vec<(u64, u64)>,
        mori: Py<PyAny>,
        host: &str,
        notifications: bool,
    ) -> PyResult<Self> {
        let memory = register(regions)?;
        let library = crate::mori::library(mori);
        let notifications = if notifications {
            Notifications::On
        } else {
            Notifications::Off
        };
        let host = MoriHost::new(&ListenAddress {
            host: host.into(),
            ..ServerOptions::default().address
        });
        let host = host.map_err(|e| error::value("host", e))?;
        let started = py.detach(|| MoriTransport::start(library, host, &memory, notifications));
        Ok(Self {
            writing: Detached::new(Writing {
                open: Mutex::default(),
                transport: started.map_err(|e| error::system("mori", e))?,
                memory,
                waker: Waker::new().map_err(|e| error::system("waker", e))?,
            }),
        })
    }

    /// Reaches the memory of a card, in place of the one before. How it went, as JSON: `kind` and
    /// `text` of the failure, or null.
    fn open(&self, py: Python<'_>, card: &[u8], deadline_s: f64) -> PyResult<String> {
        let peer = peer_of(card)?;
        let writing: &Writing = &self.writing;
        py.detach(|| {
            let mut open = writing.open();
            *open = None;
            let memory = Arc::clone(&writing.memory);
            let deadline = now() + seconds(deadline_s);
            let made = MoriWriter::open(&writing.transport, &peer, memory, deadline);
            let failure = made.map(|writer| *open = Some(writer)).err();
            Ok(failed(failure.as_ref()).to_string())
        })
    }

    /// Descriptor of this side's engine, for [`crate::raw::MemorySource::arrived`].
    fn descriptor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.writing.with(|writer| writer.descriptor()))?;
        let bytes = bytes.map_err(|e| error::system("descriptor", e))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Begins to write `runs` (own region, offset, peer's region, offset, bytes) under the lease of a
    /// slot's epoch. As JSON: the numbers (`uids`) that the peer learns of it by, and the failure.
    #[pyo3(signature = (ticket, runs, slot=0, epoch=1))]
    fn post(
        &self,
        py: Python<'_>,
        ticket: u64,
        runs: Vec<(u32, u64, u32, u64, u64)>,
        slot: u32,
        epoch: u64,
    ) -> PyResult<String> {
        let batch = WriteBatch {
            ticket,
            lease: LeaseRef {
                slot: Slot(slot),
                epoch: Epoch(epoch),
            },
            runs: runs_of(runs),
        };
        let posted = py.detach(|| self.writing.with(|writer| writer.post(&batch)))?;
        let mut told = failed(posted.as_ref().err());
        told["uids"] = json!(posted.unwrap_or_default());
        Ok(told.to_string())
    }

    /// Moves bytes until a batch ends or the time is over. As JSON: the batches that have ended
    /// (`done`, each with its `ticket` and failure), and the connection's failure.
    fn poll(&self, py: Python<'_>, timeout_s: f64) -> PyResult<String> {
        let mut done = Vec::new();
        let polled = py.detach(|| {
            let waker = &self.writing.waker;
            self.writing
                .with(|writer| writer.poll(seconds(timeout_s), waker, &mut done))
        })?;
        let mut told = failed(polled.err().as_ref());
        told["done"] = done.iter().map(ended).collect();
        Ok(told.to_string())
    }

    /// Gives up everything posted. As JSON, the failure: without one nothing reads this process's
    /// memory any more.
    fn quiesce(&self, py: Python<'_>, timeout_s: f64) -> PyResult<String> {
        let deadline = now() + seconds(timeout_s);
        let quiet = py.detach(|| {
            self.writing
                .with(|writer| writer.cancel_and_quiesce(deadline))
        })?;
        Ok(failed(quiet.err().as_ref()).to_string())
    }
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}

fn failed(failure: Option<&TransportError>) -> serde_json::Value {
    json!({
        "kind": failure.map(|failure| failure.kind.as_str()),
        "text": failure.map(ToString::to_string),
    })
}

fn ended(completion: &Completion) -> serde_json::Value {
    let mut told = failed(completion.outcome.as_ref().err());
    told["ticket"] = json!(completion.ticket);
    told
}
