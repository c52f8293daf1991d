//! Which source ranks of one peer are avoided for a while, because reads from them failed.
//!
//! A rank that failed is in quarantine: its weight is 0, so that another holder of the same heads
//! is read where there is one. When the quarantine ends it is tried like any other; failing again
//! soon doubles the time.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::TpRank;
use crate::time::Time;

/// First quarantine.
pub(super) const QUARANTINE: Duration = Duration::from_secs(5);

/// Longest quarantine.
pub(super) const QUARANTINE_MAX: Duration = Duration::from_secs(60);

/// A rank that has not failed for so long after its quarantine starts anew.
pub(super) const FORGIVEN_AFTER: Duration = Duration::from_secs(60);

const WEIGHT: u16 = 1;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Health {
    ranks: BTreeMap<TpRank, Quarantine>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Quarantine {
    /// In a row.
    failures: u32,
    until: Time,
}

impl Health {
    /// A read from this rank has failed. Several reads that fail within one quarantine are one
    /// failure: they were under way together. Whether a quarantine has begun.
    pub(super) fn failed(&mut self, now: Time, rank: TpRank) -> bool {
        self.ranks
            .retain(|_, quarantine| now < quarantine.until + FORGIVEN_AFTER);
        let known = self.ranks.get(&rank);
        if known.is_some_and(|quarantine| now < quarantine.until) {
            return false;
        }
        let failures = known.map_or(0, |quarantine| quarantine.failures);
        let time = QUARANTINE
            .saturating_mul(1 << failures.min(8))
            .min(QUARANTINE_MAX);
        let quarantine = Quarantine {
            failures: failures.saturating_add(1),
            until: now + time,
        };
        self.ranks.insert(rank, quarantine);
        true
    }

    /// Weights of the ranks of a group of `tp_size`; empty when all weigh the same.
    pub(super) fn weights(&self, now: Time, tp_size: u32) -> Vec<u16> {
        let avoided = |rank: u32| {
            self.ranks
                .get(&TpRank(rank))
                .is_some_and(|quarantine| now < quarantine.until)
        };
        if !(0..tp_size).any(avoided) {
            return Vec::new();
        }
        (0..tp_size)
            .map(|rank| if avoided(rank) { 0 } else { WEIGHT })
            .collect()
    }

    /// Ranks in quarantine.
    pub(super) fn avoided(&self, now: Time) -> usize {
        self.ranks
            .values()
            .filter(|quarantine| now < quarantine.until)
            .count()
    }
}
