//! The reference model of one prefill engine's leases: what docs/session-protocol.md says of each
//! message and of each moment, in a few dozen lines and without the machine's means.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hetero_kv_core::ids::{BlockId, LeaseRef, PpRank, PromptDigest, TpRank, TransferId};
use hetero_kv_core::producer::{ConsumerKey, FinishedPrefill, LeaseTimes, ReleaseOrder};
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::message::Message;

use crate::book::{Book, Invariant};
use crate::scenario::Shape;

/// What a release is justified by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// This consumer's set is complete, or it was the last to give the lease back.
    Settled(ConsumerKey),
    /// Its time and the grace are over.
    Expired,
    /// The engine's cache was reset.
    Revoked,
}

/// Longest time of the two steps that an order waits for and is carried out in.
const STEPS_TIME_MAX: Duration = Duration::from_secs(8);

#[derive(Clone, Debug)]
struct Entry {
    request_id: String,
    fence: LeaseRef,
    digest: PromptDigest,
    block_ids: Vec<Vec<BlockId>>,
    num_tokens: u32,
    until: Time,
    consumers: BTreeMap<ConsumerKey, BTreeSet<(TpRank, PpRank)>>,
    /// Of each engine that ever claimed it: the highest number of what it said.
    newest: BTreeMap<ConsumerKey, u64>,
    end: Option<End>,
    ordered_at: Option<Time>,
}

#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    times: LeaseTimes,
    entries: BTreeMap<TransferId, Entry>,
    /// Ids that belong to somebody for good.
    known: BTreeSet<TransferId>,
}

/// What a claim proves.
pub(crate) type Proof = (u64, PromptDigest);

impl Ledger {
    pub(crate) fn new(times: LeaseTimes) -> Self {
        Self {
            times,
            entries: BTreeMap::new(),
            known: BTreeSet::new(),
        }
    }

    pub(crate) fn granted(
        &mut self,
        book: &mut Book,
        now: Time,
        prefill: &FinishedPrefill,
        fence: LeaseRef,
    ) {
        let id = prefill.transfer_id;
        if !self.known.insert(id) {
            book.broken(
                Invariant::IdTaken,
                format!("{} takes transfer id {id} again", prefill.request_id),
            );
        }
        self.entries.insert(
            id,
            Entry {
                request_id: prefill.request_id.clone(),
                fence,
                digest: prefill.digest,
                block_ids: prefill.block_ids.clone(),
                num_tokens: prefill.num_tokens,
                until: now + self.times.lease,
                consumers: BTreeMap::new(),
                newest: BTreeMap::new(),
                end: None,
                ordered_at: None,
            },
        );
    }

    /// Whether an engine that has claimed a lease says something of it that is older than what it has
    /// been heard to say: such a thing changes nothing and has no answer.
    fn outdated(&self, who: &ConsumerKey, id: TransferId, number: u64) -> bool {
        self.entries
            .get(&id)
            .and_then(|entry| entry.newest.get(who))
            .is_some_and(|newest| number < *newest)
    }

    /// A claim (with its proof) or a renewal has come, and this is the machine's answer.
    pub(crate) fn answered(
        &mut self,
        book: &mut Book,
        now: Time,
        who: &ConsumerKey,
        (id, number): (TransferId, u64),
        proof: Option<Proof>,
        answer: Option<&Message>,
    ) {
        if self.outdated(who, id, number) {
            if answer.is_some() {
                book.broken(
                    Invariant::AnsweredWrongly,
                    format!("transfer {id}: {} asked it long ago: {answer:?}", who.0),
                );
            }
            return;
        }
        let entitled = self.entries.get_mut(&id).filter(|entry| {
            let proven = match proof {
                Some((epoch, digest)) => entry.fence.epoch.0 == epoch && entry.digest == digest,
                None => entry.consumers.contains_key(who),
            };
            proven && entry.ordered_at.is_none() && entry.end.is_none() && now < entry.until
        });
        let right = match (entitled, answer) {
            (None, Some(Message::Gone(gone))) => gone.transfer_id == id,
            (Some(entry), Some(Message::Granted(granted))) => {
                entry.until = entry.until.max(now + self.times.renewal);
                entry.consumers.entry(who.clone()).or_default();
                entry.newest.insert(who.clone(), number);
                let left = u64::try_from(entry.until.since(now).as_millis()).unwrap_or(u64::MAX);
                granted.transfer_id == id
                    && granted.granted_ms == left
                    && granted.lease == entry.fence
                    && granted.block_ids == entry.block_ids
                    && granted.num_tokens == entry.num_tokens
            }
            (None | Some(_), _) => false,
        };
        if !right {
            book.broken(
                Invariant::AnsweredWrongly,
                format!("transfer {id}, asked by {}: answered {answer:?}", who.0),
            );
        }
    }

    pub(crate) fn acknowledged(
        &mut self,
        who: &ConsumerKey,
        (id, number): (TransferId, u64),
        ranks: &[(TpRank, PpRank)],
        shape: Shape,
    ) {
        if self.outdated(who, id, number) {
            return;
        }
        let Some(entry) = self.alive(id) else {
            return;
        };
        let Some(set) = entry.consumers.get_mut(who) else {
            return;
        };
        entry.newest.insert(who.clone(), number);
        set.extend(
            ranks
                .iter()
                .filter(|(tp, pp)| tp.0 < shape.tp && pp.0 < shape.pp)
                .copied(),
        );
        if set.len() == shape.ranks().count() {
            entry.end = Some(End::Settled(who.clone()));
        }
    }

    pub(crate) fn released(&mut self, who: &ConsumerKey, (id, number): (TransferId, u64)) {
        if self.outdated(who, id, number) {
            return;
        }
        if let Some(entry) = self.alive(id) {
            entry.consumers.remove(who);
            if let Some(newest) = entry.newest.get_mut(who) {
                *newest = number;
            }
            if entry.consumers.is_empty() {
                entry.end = Some(End::Settled(who.clone()));
            }
        }
    }

    pub(crate) fn revoked(&mut self) {
        for entry in self.entries.values_mut() {
            if entry.ordered_at.is_none() {
                entry.end.get_or_insert(End::Revoked);
            }
        }
    }

    /// The machine has decided a release.
    pub(crate) fn ordered(
        &mut self,
        book: &mut Book,
        now: Time,
        order: &ReleaseOrder,
    ) -> Option<End> {
        let grace = self.times.grace;
        let Some((id, entry)) = self
            .entries
            .iter_mut()
            .find(|(_, entry)| entry.request_id == order.request_id)
        else {
            book.broken(
                Invariant::ReleasedEarly,
                format!("{order:?}: there is no such lease"),
            );
            return None;
        };
        if entry.ordered_at.is_some() {
            book.broken(Invariant::ReleasedEarly, format!("{order:?}: twice"));
        }
        if entry.end.is_none() && entry.until + grace <= now {
            entry.end = Some(End::Expired);
        }
        if entry.end.is_none() {
            book.broken(
                Invariant::ReleasedEarly,
                format!(
                    "transfer {id} of {}: {:?} are left, acknowledged {:?}",
                    entry.request_id,
                    (entry.until + grace).since(now),
                    entry.consumers
                ),
            );
        }
        entry.ordered_at = Some(now);
        entry.end.clone()
    }

    /// After an event and its timers: everything due is ordered, and what was ordered is carried out
    /// within a few steps, so that what is pinned is bounded by the time of leases. `slack`: how late
    /// a timer or a step may be beyond that.
    pub(crate) fn check_due(&self, book: &mut Book, now: Time, slack: Duration) {
        for (id, entry) in &self.entries {
            let overdue = match entry.ordered_at {
                Some(at) => at + STEPS_TIME_MAX + slack < now,
                None => entry.end.is_some() || entry.until + self.times.grace + slack < now,
            };
            if overdue {
                book.broken(
                    Invariant::ReleasedLate,
                    format!(
                        "transfer {id} of {}: {:?}, ordered {:?} ago",
                        entry.request_id,
                        entry.end,
                        entry.ordered_at.map(|at| now.since(at))
                    ),
                );
            }
        }
    }

    /// Its blocks are free.
    pub(crate) fn freed(&mut self, request_id: &str) {
        self.entries
            .retain(|_, entry| entry.request_id != request_id);
    }

    /// Requests whose blocks are under a lease.
    pub(crate) fn requests(&self) -> impl Iterator<Item = (&str, LeaseRef, bool)> {
        self.entries.values().map(|entry| {
            (
                entry.request_id.as_str(),
                entry.fence,
                entry.ordered_at.is_some(),
            )
        })
    }

    fn alive(&mut self, id: TransferId) -> Option<&mut Entry> {
        self.entries
            .get_mut(&id)
            .filter(|entry| entry.ordered_at.is_none() && entry.end.is_none())
    }
}
