//! The less loaded of two slots drawn at random.

use std::cmp::Ordering;

use super::hash::mix;
use super::{Policy, RequestKey, Round};

/// Draws two different slots and takes the one with fewer legs in flight for its weight.
///
/// Beside other proxies in front of the same engines it is steadier than least-loaded: proxies
/// that each see the same slot as the emptiest send to it together, two random slots are seldom
/// the same.
#[derive(Debug)]
pub struct PowerOfTwo {
    state: u64,
}

/// Where the draws begin.
const START: u64 = 0x2545_f491_4f6c_dd1d;
/// An odd step passes through every state before the first comes again (Weyl's sequence).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const STIR: u64 = 0xd6e8_feb8_6659_fd93;

impl Default for PowerOfTwo {
    fn default() -> Self {
        Self { state: START }
    }
}

impl PowerOfTwo {
    /// A number below `below`, which is not 0; its bias is that of 64 bits over a few thousand.
    fn draw(&mut self, below: usize) -> usize {
        self.state = self.state.wrapping_add(STEP);
        let drawn = mix(self.state ^ STIR, STIR);
        ((u128::from(drawn) * below as u128) >> 64) as usize
    }
}

impl Policy for PowerOfTwo {
    fn choose(&mut self, round: &Round, _: &RequestKey) -> usize {
        let count = round.open_count();
        let drawn = self.draw(count);
        let first = round.nth_open(drawn);
        if count == 1 {
            return first;
        }
        // One of the others.
        let second = round.nth_open((drawn + 1 + self.draw(count - 1)) % count);
        let (one, other) = (round.weight(first), round.weight(second));
        match round.burden(second).cmp(&round.burden(first)) {
            Ordering::Less => second,
            Ordering::Greater => first,
            Ordering::Equal if one == other => first,
            // Idle slots get their shares, too.
            Ordering::Equal => {
                let both = one.saturating_add(other);
                match self.draw(both as usize) < other as usize {
                    true => second,
                    false => first,
                }
            }
        }
    }
}
