//! The engine of the side that begins transfers, shared by its connections to all peers, and its
//! end.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use hetero_kv_core::memory::MemoryRegion;

use super::binding::{
    MoriEngine, MoriError, MoriLibrary, MoriMemory, MoriPart, MoriPeer, MoriTransfer, Notifications,
};
use super::endpoint::{MoriHost, contains, storages};
use crate::memory::LocalMemory;

/// Connections at once, and words of scratch memory for each: two to fence by.
const SCRATCH_SLOTS: usize = 1024;
/// Words of one slot.
pub(super) const SCRATCH_WORDS: usize = 2;

/// Which way the bytes of a batch go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the peer.
    Read,
    /// To the peer.
    Write,
}

/// Registered memory of this process: where it lies, and the engine's number for it.
struct Storage {
    region: MemoryRegion,
    memory: MoriMemory,
}

/// One engine with the memory of this process registered.
pub(super) struct Generation {
    /// `None` after it was leaked.
    engine: Option<Box<dyn MoriEngine>>,
    storages: Vec<Storage>,
    scratch: Arc<[AtomicU64]>,
    scratch_memory: MoriMemory,
    free_slots: Mutex<Vec<usize>>,
    memory: Arc<LocalMemory>,
    /// The next transfer's number.
    next_uid: AtomicU64,
    retired: AtomicBool,
    /// Whether registrations have been taken back. Read while a transfer is begun, written while
    /// they are: the engine registers anew what it is asked to move.
    deregistered: RwLock<bool>,
}

impl Generation {
    pub(super) fn start(
        library: &dyn MoriLibrary,
        host: &MoriHost,
        memory: &Arc<LocalMemory>,
        notifications: Notifications,
    ) -> Result<Self, MoriError> {
        let engine = host.start_engine(library, notifications)?;
        let scratch: Arc<[AtomicU64]> = (0..SCRATCH_SLOTS * SCRATCH_WORDS)
            .map(|_| AtomicU64::new(0))
            .collect();
        let address = scratch.as_ptr().expose_provenance() as u64;
        let scratch_memory = engine.register(address, mem::size_of_val(&*scratch) as u64)?;
        let mut registered = Vec::new();
        for region in storages(memory.regions()) {
            registered.push(Storage {
                region,
                memory: engine.register(region.base, region.bytes)?,
            });
        }
        Ok(Self {
            engine: Some(engine),
            storages: registered,
            scratch,
            scratch_memory,
            free_slots: Mutex::new((0..SCRATCH_SLOTS).rev().collect()),
            memory: Arc::clone(memory),
            next_uid: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            deregistered: RwLock::new(false),
        })
    }

    /// The engine.
    pub(super) fn engine(&self) -> Result<&dyn MoriEngine, MoriError> {
        let engine = self.engine.as_deref();
        engine.ok_or_else(|| MoriError("the engine has ended".into()))
    }

    /// Whether it has this memory registered.
    pub(super) fn serves(&self, memory: &Arc<LocalMemory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// Where a piece of a region lies in registered memory: the engine's number for it, and the
    /// offset of the region in it.
    pub(super) fn locate(&self, region: &MemoryRegion) -> Option<(usize, u64)> {
        self.storages
            .iter()
            .find(|storage| contains(storage.region.base, storage.region.bytes, region))
            .map(|storage| (storage.memory.id, region.base - storage.region.base))
    }

    /// Scratch memory for a connection.
    pub(super) fn take_slot(self: &Arc<Self>) -> Option<ScratchSlot> {
        let index = self.slots().pop()?;
        Some(ScratchSlot {
            generation: Arc::clone(self),
            index,
            quiet: true,
        })
    }

    /// A number for a transfer. The engine's own numbers have 32 bits and would come again.
    pub(super) fn next_uid(&self) -> u64 {
        self.next_uid.fetch_add(1, Ordering::Relaxed)
    }

    /// Begins to read from or write to a peer of this engine, unless its registrations are taken
    /// back.
    pub(super) fn begin(
        &self,
        direction: Direction,
        peer: &dyn MoriPeer,
        parts: Vec<MoriPart>,
    ) -> Result<Box<dyn MoriTransfer>, MoriError> {
        let deregistered = self
            .deregistered
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if *deregistered || self.retired() {
            return Err(MoriError("the engine is given up".into()));
        }
        match direction {
            Direction::Read => peer.read(parts),
            Direction::Write => peer.write(parts),
        }
    }

    /// Whether it may not be used any more.
    pub(super) fn retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Takes back every registration: after `Ok` nothing that was posted over this engine reads or
    /// writes any memory of this process.
    pub(super) fn retire(&self, why: &str) -> Result<(), MoriError> {
        if !self.retired.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                why,
                "mori: the engine is given up, the next read starts another"
            );
        }
        self.deregister()
    }

    fn deregister(&self) -> Result<(), MoriError> {
        // One at a time, and whoever comes second knows how it ended; no transfer begins meanwhile,
        // and none afterwards.
        let mut done = self
            .deregistered
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if !*done {
            self.engine()?.deregister_all()?;
            *done = true;
        }
        Ok(())
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.free_slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // Its last connection is gone, and quiet; the registrations go before the memory does.
        if let Err(error) = self.deregister() {
            tracing::warn!(%error, "mori: memory stays registered until the process ends");
            mem::forget(self.engine.take());
            mem::forget(Arc::clone(&self.scratch));
        }
    }
}

/// Two words that one connection's reads of the lease page arrive in.
pub(super) struct ScratchSlot {
    generation: Arc<Generation>,
    index: usize,
    /// Nothing is on its way into it.
    quiet: bool,
}

impl ScratchSlot {
    /// The engine's number for the memory it is in.
    pub(super) fn memory_id(&self) -> usize {
        self.generation.scratch_memory.id
    }

    /// Byte offset in that memory.
    pub(super) fn offset(&self) -> u64 {
        (self.index * SCRATCH_WORDS * size_of::<u64>()) as u64
    }

    /// Sets both words to 0, which is neither a nonce nor an epoch, and marks it as written to.
    pub(super) fn clear(&mut self) {
        self.quiet = false;
        for word in self.cells() {
            word.store(0, Ordering::SeqCst);
        }
    }

    /// What has arrived, after the transfer into it is done.
    pub(super) fn words(&mut self) -> [u64; SCRATCH_WORDS] {
        self.quiet = true;
        let mut words = [0; SCRATCH_WORDS];
        for (word, cell) in words.iter_mut().zip(self.cells()) {
            *word = cell.load(Ordering::SeqCst);
        }
        words
    }

    fn cells(&self) -> &[AtomicU64] {
        let first = self.index * SCRATCH_WORDS;
        &self.generation.scratch[first..first + SCRATCH_WORDS]
    }
}

impl Drop for ScratchSlot {
    fn drop(&mut self) {
        // A slot that something may still arrive in is not given to another connection.
        if self.quiet {
            self.generation.slots().push(self.index);
        }
    }
}
