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
    /// Acknowledged ranks per consumer engine; present from its claim on.
    pub(super) consumers: BTreeMap<ConsumerKey, BTreeSet<(TpRank, PpRank)>>,
}

impl Lease {
    /// Adds acknowledged ranks; true when that consumer engine's set is complete.
    pub(super) fn acknowledge(
        &mut self,
        consumer: &ConsumerKey,
        ranks: impl IntoIterator<Item = (TpRank, PpRank)>,
        (tp_size, pp_size): (u32, u32),
    ) -> bool {
        let set = self.consumers.entry(consumer.clone()).or_default();
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
