//! The slot with the least to do.

use super::{Policy, RequestKey, Round};

/// Least load for its weight, and of equals the one whose KV cache is emptier by a quarter: in a full one requests
/// are pushed out and computed again. Ties go to the one whose turn it is; those that never
/// were begin in their order.
#[derive(Debug, Default)]
pub struct LeastLoaded {
    turn: usize,
}

impl Policy for LeastLoaded {
    fn choose(&mut self, round: &Round, _: &RequestKey) -> usize {
        let start = round.nth_open(self.turn % round.open_count());
        let best = round.least_loaded(start);
        // Those that were never chosen are served in turn.
        self.turn = round.open_before(best) + 1;
        best
    }
}
