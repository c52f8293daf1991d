//! Weights: how much an instance gets beside others.
//!
//! Each slot has a time at which it is due, on a line that all share. A turn moves it on by a step
//! that is the shorter the more it weighs, and who is due first is next: so turns of one slot are
//! spread among those of the others, whichever of them may serve a request.

use super::super::InstanceIndex;
use super::Pool;

/// Largest weight.
pub const WORKER_WEIGHT_MAX: u32 = 1_000;
/// Step of weight 1: fine enough for the largest weight, and 2^40 rounds without an end.
const STEP: u64 = 1 << 24;

/// The weight of each rank of an instance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weight {
    weight: u32,
    step: u64,
}

impl Default for Weight {
    fn default() -> Self {
        Self::new(1)
    }
}

impl Weight {
    fn new(weight: u32) -> Self {
        Self {
            weight,
            // Where there are only such, weights of 0 are equal.
            step: STEP / u64::from(weight.max(1)),
        }
    }

    pub(super) fn is_zero(self) -> bool {
        self.weight == 0
    }

    /// Beside others of its kind: with weight or without.
    pub(super) fn share(self) -> u32 {
        self.weight.max(1)
    }

    /// When a slot is due that begins at `turned`: in the middle of its step.
    pub(super) fn first_due(self, turned: u64) -> u64 {
        turned + self.step / 2
    }

    /// When it is due again after a turn at `turned`.
    pub(super) fn next_due(self, turned: u64) -> u64 {
        turned + self.step
    }
}

impl Pool {
    /// Gives each rank of an instance this weight, 0 to [`WORKER_WEIGHT_MAX`]. With 0 it gets no leg while
    /// an instance as well that has a weight may serve it.
    pub fn set_weight(&mut self, instance: InstanceIndex, weight: u32) {
        let all = self.turned;
        if let Some(at) = self.position(instance) {
            let known = &mut self.instances[at];
            known.weight = Weight::new(weight);
            // The long step of a small weight does not keep it from the turns that it has now.
            for rank in &mut known.ranks {
                rank.due = rank.due.min(known.weight.first_due(all));
            }
            self.show_ranks(at);
            self.reach.forget();
        }
    }
}

#[cfg(test)]
mod tests;
