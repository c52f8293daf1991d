//! One slot for requests that belong together, while its load is within bounds.

use super::hash::mix;
use super::{LeastLoaded, Policy, RequestKey, Round};

/// Rendezvous hashing with bounded load: each key ranks the slots in an order of its own, and goes
/// to the first whose load allows it.
///
/// A slot that goes takes only its own keys away, each to the slot that is next in that key's
/// order; one that comes takes only the keys that rank it first. There is no ring to keep up: slots
/// are ranked by identity, so the order is the same in every proxy. Requests without a key go to
/// the least loaded slot.
#[derive(Debug, Default)]
pub struct ConsistentHash {
    unkeyed: LeastLoaded,
}

/// Keys are stirred before they meet an identity: either may be 0.
const STIR: u64 = 0xc2b2_ae3d_27d4_eb4f;

impl Policy for ConsistentHash {
    fn choose(&mut self, round: &Round, key: &RequestKey) -> usize {
        let Some(group) = key.group() else {
            return self.unkeyed.choose(round, key);
        };
        let cap = round.load_cap();
        // Some open slot is below the cap.
        let mut first = 0;
        let mut highest = None;
        for at in round.open() {
            let rank = Some(mix(group ^ round.identity(at), STIR));
            if rank >= highest && cap.admits(round.load(at), round.weight(at)) {
                (first, highest) = (at, rank);
            }
        }
        first
    }
}
