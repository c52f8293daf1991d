//! `process`: reads another process of the same host by `process_vm_readv(2)`, straight from its
//! KV memory into ours: one copy, no staging, no thread on the holder's side.
//!
//! The kernel allows it to a process of the same user that may ptrace the holder. What forbids it
//! in practice: another user, Yama (`kernel.yama.ptrace_scope`), a container without
//! `CAP_SYS_PTRACE` in a shared pid namespace, a seccomp filter. The permission is probed at
//! connect; [`endpoint::of_this_process`] lifts Yama's limit where the operator agrees.

mod connection;
mod endpoint;
mod probe;
mod vm_read;

use std::sync::Arc;

use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::Endpoints;

pub use endpoint::{ProcessHolder, of_this_process};

use crate::error::{ReadFailureKind, TransportError};
use crate::memory::LocalMemory;
use crate::transport::{
    Capabilities, Connection, Interrupt, POLL_BYTES_MAX, Source, Transport, TransportName,
};

/// Batched `process_vm_readv`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessTransport;

impl Transport for ProcessTransport {
    fn name(&self) -> TransportName {
        TransportName::Process
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: true,
            batch_runs_max: 2048,
            batch_bytes_max: POLL_BYTES_MAX as u64,
            // The work is done by the polling thread: more than one batch queued gains nothing.
            in_flight_max: 1,
        }
    }

    fn offered(&self, endpoints: &Endpoints) -> bool {
        endpoints.process.is_some()
    }

    fn connect(
        &self,
        source: &Source,
        memory: Arc<LocalMemory>,
        _deadline: Time,
        _interrupt: &Interrupt<'_>,
    ) -> Result<Box<dyn Connection>, TransportError> {
        let endpoint = source.endpoints.process.as_ref().ok_or_else(|| {
            TransportError::new(
                ReadFailureKind::Unreachable,
                "connect",
                "the source does not offer process memory",
            )
        })?;
        // No step of the probe waits for the peer, so neither deadline nor interrupt is needed.
        let peer = probe::reach(endpoint)?;
        Ok(Box::new(connection::ProcessConnection::new(
            peer,
            source.regions.clone(),
            memory,
        )))
    }
}

#[cfg(test)]
mod tests;
