//! What push mode stands on: batches written into a peer's memory, and the peer told of each.
//!
//! A batch counts as a read one does: when all of its bytes are there, the peer's lease page is read,
//! and the lease has to stand. The peer itself learns of a write by a message that the engine sends
//! behind the data on each of its queue pairs ([`super::MoriArrivals`]). The two are apart: the
//! message comes before the lease page is read, and a write that is well here can have lost its
//! message.
//!
//! Two memories have to become quiet when a batch is given up. This side's is, when
//! [`MoriWriter::cancel_and_quiesce`] says so: nothing reads it any more. The peer's is the peer's to
//! make quiet ([`super::MoriHolder::revoke`]): what this side's device has sent may be on its way.

use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::memory::Run;
use hetero_kv_core::time::Time;

use super::MoriTransport;
use super::connection::MoriConnection;
use super::failure::local;
use super::generation::Direction;
use crate::error::TransportError;
use crate::memory::LocalMemory;
use crate::transport::{Completion, Connection, Source};
use crate::waker::Waker;

/// Runs to write under one lease of the peer.
#[derive(Clone, Debug)]
pub struct WriteBatch {
    /// The caller's number; the completion carries it.
    pub ticket: u64,
    /// Lease of the peer to fence by.
    pub lease: LeaseRef,
    /// Sources are regions of this process, destinations those of the peer.
    pub runs: Vec<Run>,
}

/// A relation to one peer that is written to, used by one thread. It keeps to what
/// [`Connection`] says, with the peer's memory for the destination.
pub struct MoriWriter {
    connection: MoriConnection,
}

impl MoriWriter {
    /// Reaches the peer and proves that it is the one announced, as
    /// [`crate::transport::Transport::connect`] does. Without notifications on both sides the peer
    /// is told nothing.
    pub fn open(
        transport: &MoriTransport,
        peer: &Source,
        memory: Arc<LocalMemory>,
        deadline: Time,
    ) -> Result<Self, TransportError> {
        let connection = transport.open(peer, memory, deadline)?;
        Ok(Self { connection })
    }

    /// Packed descriptor of this side's engine: by it the peer asks for what has arrived.
    pub fn descriptor(&self) -> Result<Vec<u8>, TransportError> {
        self.connection.descriptor().map_err(|error| local(error.0))
    }

    /// Takes a batch, within [`crate::transport::Transport::capabilities`]. The numbers of its
    /// transfers: the peer has all of the batch when each of them has arrived.
    pub fn post(&mut self, batch: &WriteBatch) -> Result<Vec<u64>, TransportError> {
        self.connection
            .queue(Direction::Write, batch.ticket, batch.lease, &batch.runs)
    }

    /// See [`Connection::poll`].
    pub fn poll(
        &mut self,
        timeout: Duration,
        waker: &Waker,
        completions: &mut Vec<Completion>,
    ) -> Result<(), TransportError> {
        self.connection.poll(timeout, waker, completions)
    }

    /// Gives up everything posted. On `Ok` nothing reads this side's memory any more; otherwise see
    /// [`Connection::cancel_and_quiesce`].
    pub fn cancel_and_quiesce(&mut self, deadline: Time) -> Result<(), TransportError> {
        self.connection.cancel_and_quiesce(deadline)
    }
}
