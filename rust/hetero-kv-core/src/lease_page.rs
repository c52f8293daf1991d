//! How a lease page is laid out, for the holder that writes it and the reader that fences by it.
//!
//! ```text
//! offset            bytes  field
//! 0                 8      nonce of this start, native endian, never 0
//! 8 + 8 * slot      8      epoch of that slot, native endian, starting at [`FIRST_EPOCH`]
//! ```
//!
//! The holder stores `epoch + 1` into a slot *before* the blocks of its lease may be re-used. A
//! reader copies the data first and this page afterwards: it keeps the data only when the nonce
//! and its lease's epoch still stand there. Native endian is right: the page is read by other
//! processes of the same host, or by RDMA between machines of one kind.

use crate::ids::{Epoch, Slot};

/// Slots of a page: how many leases one engine holds at once. 16,384 prompts waiting for decode
/// are far more than any cache holds; the page is 128 KiB.
pub const LEASE_SLOTS: u32 = 16_384;

/// Epoch of a slot that was never used. Not 0, so that zeroed memory fences every lease.
pub const FIRST_EPOCH: Epoch = Epoch(1);

/// Length in bytes of a page of `slots` slots.
pub fn page_bytes(slots: u32) -> usize {
    8 + 8 * slots as usize
}

/// Byte offset of a slot's epoch.
pub fn slot_offset_bytes(slot: Slot) -> usize {
    8 + 8 * slot.0 as usize
}

#[cfg(test)]
mod tests;
