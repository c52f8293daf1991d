//! `mori`: reads by AMD's MoRI-IO engine (`amd-mori`), whose interface is Python's. Writes too, which
//! no connector uses.
//!
//! | part | what it answers for |
//! |---|---|
//! | `binding` | what this crate asks of the engine; the extension module implements it |
//! | `holder` | a rank that can be read: its own engine, its memory registered, its lease page too |
//! | `generation` | the reading side's engine, and its end |
//! | `connection` | batches with one peer: data, then the lease page, then the completion |
//! | `failure` | the engine's words as our errors |
//! | `writer` | what push mode stands on: batches that are written, and told to the peer |
//!
//! The engine tells of each transfer whether it is under way, well or failed, and cannot call one
//! back. A transfer that failed is no proof that the rest of it will not arrive: the engine also
//! calls failed what it has only stopped to wait for. What does prove it is that the memory is not
//! registered any more, because a device writes through registrations only. So a connection that
//! is to be quiet waits for its transfers first, and where one is not well in time, the whole
//! engine is retired: all its registrations are taken back, and every connection over it is lost
//! and made anew over the next one. Reads have no side effects, so what was in flight is read
//! again. Of a write it proves that this process's memory is not read any more; the peer's is the
//! peer's to take back.
//!
//! The engine spins one thread on a processor for as long as it lives, so a process has one for
//! each side and not one for each source.

mod binding;
mod connection;
mod endpoint;
mod failure;
mod generation;
mod holder;
mod writer;

use std::sync::{Arc, Mutex, PoisonError};

use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::Endpoints;

pub use binding::{
    MoriEngine, MoriEngineAddress, MoriError, MoriLibrary, MoriMemory, MoriPart, MoriPeer,
    MoriTransfer, Notifications, TransferState,
};
pub use endpoint::{MORI_VERSIONS, MoriHost, MoriHostError};
pub use holder::{MoriArrivals, MoriHolder};
pub use writer::{MoriWriter, WriteBatch};

use crate::clock::time_left;
use crate::error::{ReadFailureKind, TransportError};
use crate::memory::LocalMemory;
use crate::transport::{Capabilities, Connection, Interrupt, Source, Transport, TransportName};
use connection::MoriConnection;
use generation::Generation;

/// Runs of a batch: three batches and their reads of the lease page fit the engine's send queue of
/// 8192 requests, also when no run is merged with another.
const BATCH_RUNS_MAX: usize = 2048;

/// Bytes of a batch: some milliseconds of a fast link, so that waiting for the lease page after
/// each costs little, and a fraction of a second of a slow one, so that a cancel is soon over.
const BATCH_BYTES_MAX: u64 = 64 << 20;

/// Batches in flight: the link is busy while the lease page is read for the one before.
const IN_FLIGHT_MAX: usize = 3;

/// Reads by a MoRI-IO engine of this process.
pub struct MoriTransport {
    library: Arc<dyn MoriLibrary>,
    host: MoriHost,
    notifications: Notifications,
    /// The engine that new connections use.
    current: Mutex<Option<Arc<Generation>>>,
}

impl MoriTransport {
    /// Starts the engine and registers `memory`, so that whatever is missing on this machine is
    /// told at start. `host` is this process's own address.
    ///
    /// # Errors
    /// [`MoriError`]: the package or ROCm is missing, no device, memory that cannot be registered.
    pub fn start(
        library: Arc<dyn MoriLibrary>,
        host: MoriHost,
        memory: &Arc<LocalMemory>,
        notifications: Notifications,
    ) -> Result<Self, MoriError> {
        let first = Generation::start(library.as_ref(), &host, memory, notifications)?;
        Ok(Self {
            library,
            host,
            notifications,
            current: Mutex::new(Some(Arc::new(first))),
        })
    }

    /// The engine for a new connection; a new one after the last was retired.
    fn generation(&self, memory: &Arc<LocalMemory>) -> Result<Arc<Generation>, TransportError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(generation) = current.as_ref()
            && !generation.retired()
            && generation.serves(memory)
        {
            return Ok(Arc::clone(generation));
        }
        // The old one ends with its last connection.
        *current = None;
        let library = self.library.as_ref();
        let next = Generation::start(library, &self.host, memory, self.notifications)
            .map_err(|error| TransportError::new(ReadFailureKind::Local, "mori engine", error.0))?;
        let next = Arc::new(next);
        *current = Some(Arc::clone(&next));
        Ok(next)
    }

    /// The engine's handshake with a peer, see [`Transport::connect`].
    fn open(
        &self,
        peer: &Source,
        memory: Arc<LocalMemory>,
        deadline: Time,
    ) -> Result<MoriConnection, TransportError> {
        let Some(endpoint) = peer.endpoints.mori.as_ref() else {
            return Err(TransportError::new(
                ReadFailureKind::Unreachable,
                "connect",
                "the source does not offer mori",
            ));
        };
        endpoint::check(endpoint, &peer.regions, self.notifications)?;
        if time_left(deadline).is_zero() {
            return Err(TransportError::new(
                ReadFailureKind::Unreachable,
                "connect",
                "no time is left",
            ));
        }
        let generation = self.generation(&memory)?;
        MoriConnection::open(generation, endpoint, peer, memory, deadline)
    }
}

impl Transport for MoriTransport {
    fn name(&self) -> TransportName {
        TransportName::Mori
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: true,
            batch_runs_max: BATCH_RUNS_MAX,
            batch_bytes_max: BATCH_BYTES_MAX,
            in_flight_max: IN_FLIGHT_MAX,
        }
    }

    fn offered(&self, endpoints: &Endpoints) -> bool {
        endpoints.mori.is_some()
    }

    /// The engine's own handshake cannot be interrupted, and may outlast the deadline: it ends by
    /// the engine's own timeout (`MORI_IO_CP_TIMEOUT_MS`, 1.5 s unless set).
    fn connect(
        &self,
        source: &Source,
        memory: Arc<LocalMemory>,
        deadline: Time,
        _interrupt: &Interrupt<'_>,
    ) -> Result<Box<dyn Connection>, TransportError> {
        Ok(Box::new(self.open(source, memory, deadline)?))
    }
}

#[cfg(test)]
mod tests;
