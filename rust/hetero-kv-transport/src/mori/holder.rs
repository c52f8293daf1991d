//! The holder's side: an engine of its own, with the KV cache and the lease page registered.
//!
//! MoRI-IO knows no memory that peers may read and not write: whoever has the descriptors can do
//! both.

use std::sync::Arc;

use hetero_kv_core::lease_page::page_bytes;
use hetero_kv_core::wire::card::{MoriEndpoint, MoriStorage};

use super::binding::{MoriEngine, MoriError, MoriLibrary, MoriPeer, Notifications};
use super::endpoint::{MoriHost, storages};
use crate::lease_page::LeasePage;
use crate::memory::LocalMemory;

/// What keeps a process within reach of MoRI-IO.
pub struct MoriHolder {
    // Ends before the memory that it has registered.
    engine: Arc<dyn MoriEngine>,
    endpoint: MoriEndpoint,
    _page: Arc<LeasePage>,
    _memory: Arc<LocalMemory>,
}

impl MoriHolder {
    /// Offers `memory` to peers that fence by `page`.
    pub fn start(
        library: &dyn MoriLibrary,
        host: &MoriHost,
        memory: Arc<LocalMemory>,
        page: Arc<LeasePage>,
        notifications: Notifications,
    ) -> Result<Self, MoriError> {
        let engine: Arc<dyn MoriEngine> = host.start_engine(library, notifications)?.into();
        let mut memories = Vec::new();
        for storage in storages(memory.regions()) {
            memories.push(MoriStorage {
                base: storage.base,
                bytes: storage.bytes,
                descriptor: engine.register(storage.base, storage.bytes)?.descriptor,
            });
        }
        let page_memory = engine.register(page.address(), page_bytes(page.slots()) as u64)?;
        let address = engine.address()?;
        Ok(Self {
            engine,
            endpoint: MoriEndpoint {
                version: address.version,
                host: address.host,
                port: address.port,
                engine: address.descriptor,
                memories,
                lease_page: page_memory.descriptor,
                lease_slots: page.slots(),
                lease_page_nonce: page.nonce(),
                notifications: notifications == Notifications::On,
            },
            _page: page,
            _memory: memory,
        })
    }

    /// What to announce.
    pub fn endpoint(&self) -> &MoriEndpoint {
        &self.endpoint
    }

    /// What this side learns of the writes of one peer, by [`super::MoriWriter::descriptor`] of it.
    pub fn arrivals(&self, writer: &[u8]) -> Result<MoriArrivals, MoriError> {
        Ok(MoriArrivals {
            peer: self.engine.learn(writer, &[])?,
            _engine: Arc::clone(&self.engine),
        })
    }

    /// Takes back every registration: after `Ok` no peer reads or writes any of the memory, whatever
    /// it has begun. For blocks that a writer may still write to, which is never told otherwise.
    pub fn revoke(&self) -> Result<(), MoriError> {
        self.engine.deregister_all()
    }
}

/// Writes of one peer that have arrived.
pub struct MoriArrivals {
    // Dropped first: it belongs to the engine.
    peer: Box<dyn MoriPeer>,
    _engine: Arc<dyn MoriEngine>,
}

impl MoriArrivals {
    /// Whether the write of this number is here with all of its bytes. Once true it stays true.
    /// `false` may stay for ever: a writer's message can be lost although its bytes came, so the
    /// caller has a deadline, and after it [`MoriHolder::revoke`].
    pub fn arrived(&self, uid: u64) -> Result<bool, MoriError> {
        self.peer.arrived(uid)
    }
}

impl Drop for MoriHolder {
    fn drop(&mut self) {
        if let Err(error) = self.engine.deregister_all() {
            tracing::warn!(%error, "mori: the holder's memory could not be deregistered");
        }
    }
}
