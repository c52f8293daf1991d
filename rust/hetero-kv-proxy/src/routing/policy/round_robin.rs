//! Each slot in turn, by its weight.

use super::{Policy, RequestKey, Round};

/// The slot that is due first; of equal weights, the one whose last turn was longest ago.
///
/// What is remembered is each slot's turn, and not a place in the round: requests that may go to
/// some of the slots only leave the order of the others as it was, and the turn of a skipped slot is
/// shared out instead of falling to its neighbour.
#[derive(Debug, Default)]
pub struct RoundRobin {
    turn: usize,
}

impl Policy for RoundRobin {
    fn choose(&mut self, round: &Round, _: &RequestKey) -> usize {
        // Those that had no turn begin in their order.
        let start = round.nth_open(self.turn % round.open_count());
        self.turn = self.turn.wrapping_add(1);
        round.next_in_turn(start)
    }
}
