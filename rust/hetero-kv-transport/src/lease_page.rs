//! The holder's lease page: what readers of its memory fence by.
//!
//! [`hetero_kv_core::lease_page`] says how it is laid out and why. Readers of other processes see
//! it as memory, the `tcp` server of this process through [`LeasePage::holds`].
#![allow(unsafe_code)]

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use hetero_kv_core::ids::{Epoch, LeaseRef, Slot};
use hetero_kv_core::lease_page::{FIRST_EPOCH, page_bytes, slot_offset_bytes};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// A slot that the page does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("lease slot {slot} is not on a page of {slots} slots")]
pub struct NoSuchSlot {
    /// What was asked for.
    pub slot: Slot,
    /// Slots of the page.
    pub slots: u32,
}

/// One worker's lease page, at one address for as long as it lives.
#[derive(Debug)]
pub struct LeasePage {
    start: NonNull<AtomicU64>,
    slots: u32,
}

// SAFETY: the page is only reached through shared references to its `AtomicU64` words, which any
// thread may use, and the mapping is not tied to the thread that made it.
unsafe impl Send for LeasePage {}
// SAFETY: as above; all access is atomic.
unsafe impl Sync for LeasePage {}

impl LeasePage {
    /// A page of `slots` slots at their first epoch, with a nonce of this start. Fails when the
    /// system has no memory or no random bytes.
    pub fn new(slots: u32) -> io::Result<Self> {
        let nonce = loop {
            // 0 stands for "no page": a reader that reads zeroed memory must not match.
            match getrandom::u64().map_err(io::Error::other)? {
                0 => {}
                nonce => break nonce,
            }
        };
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                page_bytes(slots),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::POPULATE,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        let page = Self { start, slots };
        for slot in 0..slots {
            page.word(slot_offset_bytes(Slot(slot)))
                .store(FIRST_EPOCH.0, Ordering::Relaxed);
        }
        page.word(0).store(nonce, Ordering::Release);
        Ok(page)
    }

    /// Address of the page in this process.
    pub fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Slots of the page.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Random word of this start, never 0.
    pub fn nonce(&self) -> u64 {
        self.word(0).load(Ordering::Relaxed)
    }

    /// Epoch that stands in a slot; `None` for a slot that the page does not have.
    pub fn epoch(&self, slot: Slot) -> Option<Epoch> {
        let word = self.slot_word(slot).ok()?;
        Some(Epoch(word.load(Ordering::Acquire)))
    }

    /// Raises a slot's epoch to `to`; a value that is not above the standing one changes nothing.
    /// Blocks of the lease may be re-used only after this returns: every write that follows in any
    /// thread is seen later than the new epoch. Returns whether the epoch changed.
    pub fn bump(&self, slot: Slot, to: Epoch) -> Result<bool, NoSuchSlot> {
        let before = self.slot_word(slot)?.fetch_max(to.0, Ordering::AcqRel);
        // A release store orders what comes before it, not what comes after. Writes to the freed
        // blocks come after, so they are kept behind the store by a full fence.
        fence(Ordering::SeqCst);
        Ok(before < to.0)
    }

    /// Whether the lease stands. For a holder that copies by itself: the bytes copied between two
    /// calls that answered true were alive.
    pub fn holds(&self, lease: LeaseRef) -> bool {
        // The copies that came before must not sink below the load.
        fence(Ordering::SeqCst);
        self.epoch(lease.slot) == Some(lease.epoch)
    }

    fn slot_word(&self, slot: Slot) -> Result<&AtomicU64, NoSuchSlot> {
        if slot.0 >= self.slots {
            return Err(NoSuchSlot {
                slot,
                slots: self.slots,
            });
        }
        Ok(self.word(slot_offset_bytes(slot)))
    }

    /// The word at a byte offset, which is 0 or that of a slot below `self.slots`.
    fn word(&self, offset_bytes: usize) -> &AtomicU64 {
        assert!(offset_bytes.is_multiple_of(8) && offset_bytes + 8 <= page_bytes(self.slots));
        // SAFETY: the offset is a multiple of 8 inside the mapping (asserted), which starts at a
        // page boundary, is zeroed or holds valid words, and lives as long as `self`; every
        // process only ever loads and stores whole words there.
        unsafe { self.start.byte_add(offset_bytes).as_ref() }
    }
}

impl Drop for LeasePage {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this address and length, and no reference
        // into it outlives `self`. A reader in another process gets an error, or memory without
        // the nonce.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), page_bytes(self.slots)) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "cannot unmap the lease page");
        }
    }
}

#[cfg(test)]
mod tests;
