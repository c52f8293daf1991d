//! Each slot in turn.

use super::{Candidate, Policy, RequestKey};

/// One counter over the slots that may be chosen.
///
/// The counter indexes the candidates and not all slots, so that the turn of a skipped slot is
/// shared out instead of falling to its neighbour.
#[derive(Debug, Default)]
pub struct RoundRobin {
    turn: usize,
}

impl Policy for RoundRobin {
    fn choose(&mut self, candidates: &[Candidate], _: &RequestKey) -> usize {
        let chosen = self.turn % candidates.len();
        // Where there is no choice no turn is used up: with every other request bound to one slot,
        // the rest would always meet the same one.
        if candidates.len() > 1 {
            self.turn = self.turn.wrapping_add(1);
        }
        chosen
    }
}
