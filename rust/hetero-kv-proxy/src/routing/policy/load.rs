//! How much load a preferred slot may have before it yields.

use super::Candidate;

/// Legs that a slot may always serve at once: an engine computes requests in batches, and so few
/// are no load worth losing a warm cache for.
pub const LEGS_FREE: u32 = 4;
/// A preferred slot may have this share of the mean: 5/4.
const MEAN_SHARE: (u64, u64) = (5, 4);

/// Legs in flight from which on a slot takes no more by preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadCap {
    /// For weight 1, as a fraction.
    over: u64,
    under: u64,
}

impl LoadCap {
    /// Whether a slot is below it.
    pub fn admits(&self, candidate: &Candidate) -> bool {
        let (load, weight) = (u64::from(candidate.load), u64::from(candidate.weight));
        candidate.load < LEGS_FREE
            || load.saturating_mul(self.under) < self.over.saturating_mul(weight)
    }

    /// The legs of a slot of this weight.
    pub fn legs(&self, weight: u32) -> u32 {
        let legs = self.over.saturating_mul(u64::from(weight));
        u32::try_from(legs.div_ceil(self.under))
            .unwrap_or(u32::MAX)
            .max(LEGS_FREE)
    }
}

/// [`LEGS_FREE`], or a quarter above a slot's share by weight of what all `candidates` have, with
/// the leg to place. Some candidate is always below it.
pub fn load_cap(candidates: &[Candidate]) -> LoadCap {
    let sum = |of: fn(&Candidate) -> u32| -> u64 {
        let each = candidates.iter().map(|candidate| u64::from(of(candidate)));
        each.sum()
    };
    let total = sum(|candidate| candidate.load);
    let weights = sum(|candidate| candidate.weight);
    let (over, under) = MEAN_SHARE;
    LoadCap {
        over: (total + 1) * over,
        under: under * weights.max(1),
    }
}
