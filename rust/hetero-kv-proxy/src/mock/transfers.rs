//! What prefill has pinned for decode, under a lease.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::lock;

/// More pinned prompts than any engine has blocks for.
const PINNED_MAX: usize = 1 << 20;

/// The pinned prompts of all prefill workers of this process.
#[derive(Debug)]
pub struct Transfers {
    lease: Duration,
    /// Marks params of this process; those of another can only be checked in form.
    pub incarnation: String,
    pinned: Mutex<Pinned>,
    epoch: AtomicU64,
    /// Freed by a decode leg.
    pub freed: AtomicU64,
    /// Freed by time.
    pub expired: AtomicU64,
}

#[derive(Debug, Default)]
struct Pinned {
    by_id: HashMap<String, Pin>,
    /// In the order of their ends, since all leases are equally long.
    ends: VecDeque<(Instant, String, u64)>,
}

#[derive(Debug)]
struct Pin {
    prompt_hash: u64,
    epoch: u64,
}

/// Why a prompt was not pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PinRefusal {
    /// The id is pinned already.
    Taken,
    /// So many prompts are pinned that no more are taken.
    Full,
}

/// What became of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// The blocks were there, for this prompt; they are freed.
    Same,
    /// They were there, for another prompt; they are freed.
    OtherPrompt,
    /// They are not pinned, or under another epoch.
    Gone,
}

impl Transfers {
    /// Nothing pinned.
    pub fn new(lease: Duration) -> Self {
        let mut random = [0; 8];
        // Without randomness two processes look alike; claims of the other are then `Gone`.
        let _filled = getrandom::fill(&mut random);
        Self {
            lease,
            incarnation: hex::encode(random),
            pinned: Mutex::default(),
            epoch: AtomicU64::new(1),
            freed: AtomicU64::new(0),
            expired: AtomicU64::new(0),
        }
    }

    /// Pins a prompt, and returns the epoch of its lease.
    ///
    /// # Errors
    /// [`PinRefusal`].
    pub fn pin(&self, id: &str, prompt_hash: u64) -> Result<u64, PinRefusal> {
        let mut pinned = lock(&self.pinned);
        self.expire(&mut pinned);
        if pinned.by_id.len() >= PINNED_MAX {
            return Err(PinRefusal::Full);
        }
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed);
        match pinned.by_id.entry(id.to_owned()) {
            Entry::Occupied(_) => return Err(PinRefusal::Taken),
            Entry::Vacant(place) => place.insert(Pin { prompt_hash, epoch }),
        };
        let end = Instant::now() + self.lease;
        pinned.ends.push_back((end, id.to_owned(), epoch));
        Ok(epoch)
    }

    /// Frees what a decode leg names.
    pub fn claim(&self, id: &str, epoch: u64, prompt_hash: u64) -> Claim {
        let mut pinned = lock(&self.pinned);
        self.expire(&mut pinned);
        if pinned.by_id.get(id).is_none_or(|pin| pin.epoch != epoch) {
            return Claim::Gone;
        }
        let pin = pinned.by_id.remove(id);
        self.freed.fetch_add(1, Ordering::Relaxed);
        match pin {
            Some(pin) if pin.prompt_hash == prompt_hash => Claim::Same,
            Some(_) => Claim::OtherPrompt,
            None => Claim::Gone,
        }
    }

    /// How many prompts are pinned.
    pub fn pinned(&self) -> usize {
        let mut pinned = lock(&self.pinned);
        self.expire(&mut pinned);
        pinned.by_id.len()
    }

    fn expire(&self, pinned: &mut Pinned) {
        let now = Instant::now();
        while pinned.ends.front().is_some_and(|(end, ..)| *end <= now) {
            let Some((_, id, epoch)) = pinned.ends.pop_front() else {
                return;
            };
            // The id may be pinned anew, under a lease of its own.
            if pinned.by_id.get(&id).is_some_and(|pin| pin.epoch == epoch) {
                pinned.by_id.remove(&id);
                self.expired.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
