//! What slots have to do: this proxy's legs, and what engines say that they do for others.

use super::super::policy::{SlotFacts, Turn};
use super::super::{EngineLoad, InstanceIndex};
use super::Pool;
use super::span::Span;

/// The load of an instance that is not this proxy's.
#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    /// When it was asked.
    asked_ms: u64,
    /// Requests and cache in use, by DP rank; empty while it was not asked.
    ranks: Vec<(u32, u16)>,
    /// Of all ranks together.
    sums: (u64, u64),
    /// The round goes by it.
    counts: bool,
}

impl Elsewhere {
    /// From when on it says nothing: an answer older than `fresh_ms`. `None` where it never said
    /// anything.
    fn stale_ms(&self, fresh_ms: u64) -> Option<u64> {
        let last_ms = self.asked_ms.saturating_add(fresh_ms);
        (!self.ranks.is_empty()).then_some(last_ms.saturating_add(1))
    }

    fn is_known(&self, now_ms: u64, fresh_ms: u64) -> bool {
        self.stale_ms(fresh_ms).is_some_and(|edge| now_ms < edge)
    }

    /// Requests by DP rank, where that is known at `now_ms`.
    pub(super) fn known(&self, now_ms: u64, fresh_ms: u64) -> Option<Vec<u32>> {
        let ranks = || self.ranks.iter().map(|(requests, _)| *requests).collect();
        self.is_known(now_ms, fresh_ms).then(ranks)
    }
}

/// For when the round says what slots have to do.
#[derive(Debug)]
pub(super) struct Told {
    span: Span,
    /// Stands for what a slot does for others where that is not known.
    mean: (u32, u16),
    /// There are slots of which it is not known.
    guesses: bool,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            span: Span::NONE,
            mean: (0, 0),
            guesses: false,
        }
    }
}

impl Told {
    /// Something changed that the round does not show yet.
    pub(super) fn forget(&mut self) {
        self.span = Span::NONE;
    }
}

impl Pool {
    /// The same pool with at most `legs_max` legs in flight for each slot.
    #[must_use]
    pub fn with_legs_max(mut self, legs_max: u32) -> Self {
        self.legs_max = legs_max;
        self.told.forget();
        self
    }

    /// The same pool, in which what engines say of their load is good for `fresh_ms`.
    #[must_use]
    pub fn with_load_fresh_ms(mut self, fresh_ms: u64) -> Self {
        self.load_fresh_ms = fresh_ms;
        self.told.forget();
        self
    }

    /// Whether the policy, or somebody else, goes by load.
    pub fn reads_load(&self) -> bool {
        self.reads_load
    }

    /// An instance was asked for its load at `asked_ms` and said `loads`, one for each DP rank. Of
    /// these requests `own` are this proxy's, which are counted here anyhow, and better.
    pub fn on_scraped(
        &mut self,
        instance: InstanceIndex,
        loads: &[EngineLoad],
        own: &[u32],
        asked_ms: u64,
    ) {
        let Some(at) = self.position(instance) else {
            return;
        };
        let known = &mut self.instances[at];
        if loads.len() != known.ranks.len() || own.len() != loads.len() {
            return;
        }
        let elsewhere = &mut known.elsewhere;
        elsewhere.asked_ms = asked_ms;
        elsewhere.ranks.clear();
        let ranks = loads.iter().zip(own);
        elsewhere
            .ranks
            .extend(ranks.map(|(load, own)| (load.requests.saturating_sub(*own), load.cache_used)));
        elsewhere.sums = (elsewhere.ranks.iter()).fold((0, 0), |(requests, used), rank| {
            (requests + u64::from(rank.0), used + u64::from(rank.1))
        });
        if !self.reads_load {
            return;
        }
        if !elsewhere.counts {
            self.told.forget();
            return;
        }
        let stale_ms = elsewhere.stale_ms(self.load_fresh_ms).unwrap_or_default();
        self.told.span.end_at(stale_ms);
        self.show_ranks(at);
        let mean = match self.told.guesses {
            true => self.elsewhere_mean(),
            false => self.told.mean,
        };
        if mean != self.told.mean {
            self.told.mean = mean;
            let silent = |at: &usize| !self.instances[*at].elsewhere.counts;
            let silent: Vec<usize> = (0..self.instances.len()).filter(silent).collect();
            silent.into_iter().for_each(|at| self.show_ranks(at));
        }
    }

    /// Brings the loads in the round to `now_ms`.
    pub(super) fn bring_loads(&mut self, now_ms: u64) {
        if self.told.span.holds(now_ms) {
            return;
        }
        let mut span = Span::ALL;
        let mut guesses = false;
        for known in &mut self.instances {
            let elsewhere = &mut known.elsewhere;
            let stale_ms = elsewhere.stale_ms(self.load_fresh_ms);
            if let Some(edge_ms) = stale_ms.filter(|_| self.reads_load) {
                span.cut(edge_ms, now_ms);
            }
            elsewhere.counts = self.reads_load && elsewhere.is_known(now_ms, self.load_fresh_ms);
            guesses |= !elsewhere.counts;
        }
        self.told = Told {
            span,
            mean: self.elsewhere_mean(),
            guesses,
        };
        for at in 0..self.instances.len() {
            self.show_ranks(at);
        }
    }

    /// The mean of what slots do for others, over those of which it is known: a slot of which it is
    /// not is neither a haven nor shunned.
    fn elsewhere_mean(&self) -> (u32, u16) {
        let told = self.instances.iter().map(|known| &known.elsewhere);
        let (mut requests, mut used, mut count) = (0_u64, 0_u64, 0_u64);
        for elsewhere in told.filter(|elsewhere| elsewhere.counts) {
            requests = requests.saturating_add(elsewhere.sums.0);
            used += elsewhere.sums.1;
            count += elsewhere.ranks.len() as u64;
        }
        let mean = |sum: u64| sum.checked_div(count).unwrap_or(0);
        (
            u32::try_from(mean(requests)).unwrap_or(u32::MAX),
            u16::try_from(mean(used)).unwrap_or(u16::MAX),
        )
    }

    /// Shows the round what there is of an instance.
    pub(super) fn show_ranks(&mut self, at: usize) {
        for rank in 0..self.instances[at].ranks.len() {
            self.show(at, rank);
        }
    }

    /// Shows the round what there is of one slot.
    pub(super) fn show(&mut self, at: usize, rank: usize) {
        let known = &self.instances[at];
        let own = known.ranks[rank];
        let (elsewhere, cache_used) = match known.elsewhere.counts {
            true => known.elsewhere.ranks[rank],
            false => self.told.mean,
        };
        let facts = SlotFacts {
            load: own.in_flight.saturating_add(elsewhere),
            cache_used,
            weight: known.weight.share(),
            turn: Turn {
                due: own.due,
                picked: own.picked,
            },
            has_room: own.in_flight < self.legs_max,
        };
        self.round.set(own.place, &facts);
    }
}
