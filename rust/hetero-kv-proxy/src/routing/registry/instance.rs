//! One instance, as a pool knows it.

use std::collections::VecDeque;

use super::super::{Health, InstanceIndex, KindId};
use super::{Elsewhere, Weight};

/// One instance as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceSpec {
    /// Base URL as the user wrote it.
    pub url: String,
    /// DP ranks behind this URL, at least 1.
    pub dp: u32,
    /// Header value of the first rank.
    pub rank0: u32,
}

/// Whether an instance takes legs at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It does, as far as its health allows.
    Serving,
    /// An operator keeps it from new legs.
    Drained,
    /// It takes no leg any more and is removed when the last one has ended.
    Leaving,
}

/// Which evidence an instance needs before it takes a leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// None: an operator named it, and a wrong verdict of the probe must not turn into an outage.
    Given,
    /// Its probe has answered and does not fail: a worker that says itself that it is there says
    /// nothing of whether it can be reached.
    Probed,
}

/// One DP rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rank {
    /// Legs under way.
    pub(super) in_flight: u32,
    /// Number of the pick at which it was last chosen.
    pub(super) picked: u64,
    /// When it is due, where turns go by weight.
    pub(super) due: u64,
    /// Position of its slot in the round.
    pub(super) place: usize,
}

#[derive(Debug)]
pub(super) struct Instance {
    pub(super) index: InstanceIndex,
    pub(super) spec: InstanceSpec,
    pub(super) kind: KindId,
    pub(super) trust: Trust,
    pub(super) standing: Standing,
    pub(super) health: Health,
    /// Rank 0 first.
    pub(super) ranks: Vec<Rank>,
    /// How much each rank gets beside those of others.
    pub(super) weight: Weight,
    /// Transfers whose blocks it keeps for a decode leg.
    pub(super) kept: u32,
    /// When those of them count no more that decode was not seen to take, by the clock of routing.
    pub(super) left: VecDeque<u64>,
    /// What it does for others, by its own words.
    pub(super) elsewhere: Elsewhere,
}

impl Instance {
    pub(super) fn is_routable(&self) -> bool {
        let trusted = match self.trust {
            Trust::Given => true,
            Trust::Probed => self.health.has_answered() && !self.health.is_unhealthy(),
        };
        trusted && self.standing == Standing::Serving
    }

    pub(super) fn in_flight(&self) -> Vec<u32> {
        self.ranks.iter().map(|rank| rank.in_flight).collect()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.kept == 0 && self.ranks.iter().all(|rank| rank.in_flight == 0)
    }
}
