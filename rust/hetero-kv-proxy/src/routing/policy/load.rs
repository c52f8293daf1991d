//! How much load a preferred slot may have before it yields.

use super::Candidate;

/// Legs that a slot may always serve at once: an engine computes requests in batches, and so few
/// are no load worth losing a warm cache for.
pub const LEGS_FREE: u32 = 4;
/// A preferred slot may have this share of the mean: 5/4.
const MEAN_SHARE: (u64, u64) = (5, 4);

/// Legs in flight from which on a slot takes no more by preference: [`LEGS_FREE`], or a quarter
/// above the mean of `candidates` with the leg to place. Some candidate is always below it.
pub fn load_cap(candidates: &[Candidate]) -> u32 {
    let total: u64 = candidates
        .iter()
        .map(|candidate| u64::from(candidate.load))
        .sum();
    let (over, under) = MEAN_SHARE;
    let cap = ((total + 1) * over).div_ceil(under * candidates.len().max(1) as u64);
    u32::try_from(cap).unwrap_or(u32::MAX).max(LEGS_FREE)
}
