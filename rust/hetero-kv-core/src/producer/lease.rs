//! One lease: the right of a consumer to find a prompt's blocks unchanged, for a while.
//!
//! ```text
//!            claim, renew (never shortens)
//!              +---+
//!              v   |
//! finish -> [Held] +--- read out, released -----------------> [Ordered] -> sent -> gone
//!              |                                                  ^
//!              +-- time is up -> [Expiring] -- grace is over -----+
//! ```
//!
//! *Ordered* means the release is on its way to every worker, which bumps its lease page and then
//! reports `finished_sending`; only then does vLLM free the blocks.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{
    BlockId, EngineId, Incarnation, LeaseRef, PpRank, PromptDigest, TpRank, TransferId,
};
use crate::time::Time;
use crate::wire::message::GoneReason;

/// A consumer engine's start: what acknowledgements are counted by.
pub type ConsumerKey = (EngineId, Incarnation);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Claimable and renewable until `expires`.
    Held { expires: Time },
    /// Time is up: refused from here on, released at `release_at`, which gives readers that
    /// checked their deadline a moment ago the time to finish.
    Expiring { release_at: Time },
    /// Handed to the workers.
    Ordered,
}

#[derive(Clone, Debug)]
pub(super) struct Lease {
    pub(super) request_id: String,
    pub(super) transfer_id: TransferId,
    pub(super) fence: LeaseRef,
    pub(super) digest: PromptDigest,
    pub(super) block_ids: Vec<Vec<BlockId>>,
    pub(super) num_tokens: u32,
    pub(super) granted_at: Time,
    pub(super) state: State,
    /// Why it ended, once it has.
    pub(super) ended: Option<GoneReason>,
    /// Consumer engines that have claimed it, also those that gave it back.
    pub(super) consumers: BTreeMap<ConsumerKey, Claimant>,
}

/// One consumer engine's part in a lease, from its first claim on.
#[derive(Clone, Debug, Default)]
pub(super) struct Claimant {
    /// Highest number of a message of its about this lease.
    newest: u64,
    /// Whether it has given the lease back since it claimed it last.
    left: bool,
    /// Ranks that have read.
    acknowledged: BTreeSet<(TpRank, PpRank)>,
}

impl Lease {
    /// Whether a message of this number is older than one that has come before it, and may not
    /// change anything: a consumer engine may have two connections, one that it gave up or one by
    /// another name of the same host, and what it says on one overtakes what it said on the other.
    pub(super) fn is_late(&self, consumer: &ConsumerKey, number: Option<u64>) -> bool {
        self.consumers
            .get(consumer)
            .zip(number)
            .is_some_and(|(claimant, number)| number < claimant.newest)
    }

    /// Whether this consumer engine has claimed it and not given it back.
    pub(super) fn is_read_by(&self, consumer: &ConsumerKey) -> bool {
        self.consumers
            .get(consumer)
            .is_some_and(|claimant| !claimant.left)
    }

    /// A claim or a renewal was granted.
    pub(super) fn granted_to(&mut self, consumer: &ConsumerKey, number: u64) {
        let claimant = self.consumers.entry(consumer.clone()).or_default();
        claimant.newest = number;
        claimant.left = false;
    }

    /// A consumer engine gives it back; true when no other reads under it.
    pub(super) fn give_back(&mut self, consumer: &ConsumerKey, number: Option<u64>) -> bool {
        if let Some(claimant) = self.consumers.get_mut(consumer) {
            claimant.newest = number.unwrap_or(claimant.newest);
            claimant.left = true;
            claimant.acknowledged.clear();
        }
        self.consumers.values().all(|claimant| claimant.left)
    }

    /// Adds acknowledged ranks; true when that consumer engine's set is complete.
    pub(super) fn acknowledge(
        &mut self,
        consumer: &ConsumerKey,
        number: Option<u64>,
        ranks: impl IntoIterator<Item = (TpRank, PpRank)>,
        (tp_size, pp_size): (u32, u32),
    ) -> bool {
        let Some(claimant) = self.consumers.get_mut(consumer) else {
            return false;
        };
        claimant.newest = number.unwrap_or(claimant.newest);
        let set = &mut claimant.acknowledged;
        set.extend(
            ranks
                .into_iter()
                .filter(|(tp, pp)| tp.0 < tp_size && pp.0 < pp_size),
        );
        set.len() as u64 == u64::from(tp_size) * u64::from(pp_size)
    }

    /// When this lease next needs a sweep.
    pub(super) fn due(&self) -> Option<Time> {
        match self.state {
            State::Held { expires } => Some(expires),
            State::Expiring { release_at } => Some(release_at),
            State::Ordered => None,
        }
    }
}
