//! The slot with the least to do.

use std::cmp::Ordering;

use super::{Candidate, Policy, RequestKey};

/// Least load for its weight, and of equals the one whose KV cache is emptier by a quarter: in a full one requests
/// are pushed out and computed again. Ties go to the one whose turn it is; those that never
/// were begin in their order.
#[derive(Debug, Default)]
pub struct LeastLoaded {
    turn: usize,
}

impl Policy for LeastLoaded {
    fn choose(&mut self, candidates: &[Candidate], _: &RequestKey) -> usize {
        let start = self.turn % candidates.len();
        let mut best = start;
        for at in (start + 1..candidates.len()).chain(0..start) {
            if order(&candidates[at], &candidates[best]).is_lt() {
                best = at;
            }
        }
        // Those that were never chosen are served in turn.
        self.turn = best + 1;
        best
    }
}

/// Quarters of a KV cache: smaller differences say nothing of the next moment.
const CACHE_STEP: u16 = 250;

fn order(one: &Candidate, other: &Candidate) -> Ordering {
    let cache = |candidate: &Candidate| candidate.cache_used / CACHE_STEP;
    one.load_beside(other)
        .then_with(|| cache(one).cmp(&cache(other)))
        .then_with(|| one.turn().cmp(&other.turn()))
}
