//! Lease slots: which are free, and the epoch each stands at.

use crate::ids::{Epoch, LeaseRef, Slot};
use crate::lease_page::FIRST_EPOCH;

/// Hands out each slot to one lease at a time. A slot given back moves on by one epoch, exactly as
/// every worker's lease page has by then.
#[derive(Debug)]
pub(super) struct Slots {
    epochs: Vec<Epoch>,
    free: Vec<Slot>,
    slots_max: u32,
}

impl Slots {
    pub(super) fn new(slots_max: u32) -> Self {
        Self {
            epochs: Vec::new(),
            free: Vec::new(),
            slots_max,
        }
    }

    pub(super) fn take(&mut self) -> Option<LeaseRef> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let next = u32::try_from(self.epochs.len()).ok()?;
                if next >= self.slots_max {
                    return None;
                }
                self.epochs.push(FIRST_EPOCH);
                Slot(next)
            }
        };
        let epoch = *self.epochs.get(slot.0 as usize)?;
        Some(LeaseRef { slot, epoch })
    }

    pub(super) fn give_back(&mut self, lease: LeaseRef) {
        if let Some(epoch) = self.epochs.get_mut(lease.slot.0 as usize)
            && *epoch == lease.epoch
        {
            *epoch = lease.epoch.next();
            self.free.push(lease.slot);
        }
    }
}
