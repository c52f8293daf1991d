//! The slot with the fewest legs in flight.

use super::{Candidate, Policy, RequestKey};

/// Fewest legs in flight; the search starts one further each time, so that ties go round.
#[derive(Debug, Default)]
pub struct LeastLoaded {
    turn: usize,
}

impl Policy for LeastLoaded {
    fn choose(&mut self, candidates: &[Candidate], _: &RequestKey) -> usize {
        let start = self.turn % candidates.len();
        let mut best = start;
        for at in (start + 1..candidates.len()).chain(0..start) {
            if candidates[at].in_flight < candidates[best].in_flight {
                best = at;
            }
        }
        // The next search starts behind the chosen one: equal loads are then served in turn.
        self.turn = best + 1;
        best
    }
}
