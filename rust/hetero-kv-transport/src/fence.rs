//! What a reader makes of a holder's lease page, whichever way the page's words came to it: the one
//! place where bytes that have been read are judged to be of a lease that stood.

use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::lease_page::slot_offset_bytes;

use crate::error::{ReadFailureKind, TransportError};

/// A lease page as its holder announced it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AnnouncedPage {
    /// Its first word, drawn at random at each start of the holder.
    pub(crate) nonce: u64,
    /// How many slots it has.
    pub(crate) slots: u32,
}

impl AnnouncedPage {
    /// Byte offset of the lease's slot. A slot that the page does not have was never leased.
    pub(crate) fn offset_bytes(&self, lease: LeaseRef) -> Result<usize, TransportError> {
        if lease.slot.0 < self.slots {
            return Ok(slot_offset_bytes(lease.slot));
        }
        Err(gone(format!(
            "slot {} is not on the source's page of {} slots",
            lease.slot, self.slots
        )))
    }

    /// Whether a page read is the announced one, and not what a later process has in its place.
    pub(crate) fn check_nonce(&self, found: u64) -> Result<(), TransportError> {
        if found == self.nonce {
            return Ok(());
        }
        Err(TransportError::new(
            ReadFailureKind::Incarnation,
            "lease page",
            "the page's nonce is not the one the source announced",
        ))
    }

    /// Whether the lease stood when the page's words were read, which has to be after its data.
    pub(crate) fn check_lease(
        &self,
        lease: LeaseRef,
        nonce: u64,
        epoch: u64,
    ) -> Result<(), TransportError> {
        self.check_nonce(nonce)?;
        if epoch == lease.epoch.0 {
            return Ok(());
        }
        Err(gone(format!(
            "slot {} is at epoch {epoch}, the lease was of epoch {}",
            lease.slot, lease.epoch.0
        )))
    }
}

/// The lease does not stand, or nobody can tell.
pub(crate) fn gone(problem: impl Into<String>) -> TransportError {
    TransportError::new(ReadFailureKind::LeaseGone, "lease page", problem)
}

#[cfg(test)]
mod tests;
