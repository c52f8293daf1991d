//! The holder's side: an engine of its own, with the KV cache and the lease page registered.

use std::sync::Arc;

use hetero_kv_core::lease_page::page_bytes;
use hetero_kv_core::wire::card::{MoriEndpoint, MoriStorage};

use super::binding::{MoriEngine, MoriError, MoriLibrary};
use super::endpoint::{MoriHost, storages};
use crate::lease_page::LeasePage;
use crate::memory::LocalMemory;

/// What keeps a process readable by MoRI-IO.
pub struct MoriHolder {
    // Ends before the memory that it has registered.
    engine: Box<dyn MoriEngine>,
    endpoint: MoriEndpoint,
    _page: Arc<LeasePage>,
    _memory: Arc<LocalMemory>,
}

impl MoriHolder {
    /// Offers `memory` to readers that fence by `page`.
    pub fn start(
        library: &dyn MoriLibrary,
        host: &MoriHost,
        memory: Arc<LocalMemory>,
        page: Arc<LeasePage>,
    ) -> Result<Self, MoriError> {
        let engine = host.start_engine(library)?;
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
            },
            _page: page,
            _memory: memory,
        })
    }

    /// What to announce.
    pub fn endpoint(&self) -> &MoriEndpoint {
        &self.endpoint
    }
}

impl Drop for MoriHolder {
    fn drop(&mut self) {
        // Readers only read, so a registration that stays is no danger to anybody's bytes here.
        if let Err(error) = self.engine.deregister_all() {
            tracing::warn!(%error, "mori: the holder's memory could not be deregistered");
        }
    }
}
