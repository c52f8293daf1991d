//! What policies look at: the slots of a pool in the order of their round, and which of them may be
//! chosen.
//!
//! It stays between choices, and what changes is changed in place: a choice then looks at the few
//! numbers that it needs, each kind of which lies side by side, and copies none of them.

use super::LoadCap;

/// Slots whose bits share a word.
const WORD: usize = u64::BITS as usize;
/// Bits of fraction in [`Round::burden`]: two different fractions with denominators of 1,000 at most
/// differ by more than 2^-20.
const BURDEN_FRACTION: u32 = 20;
/// Bits of a slot's work behind its burden.
const CACHE_BITS: u32 = 12;
/// Steps of a KV cache in use, in thousandths: smaller differences say nothing of the next moment.
const CACHE_STEP: u16 = 250;

/// When a slot's turn is: by weights, and of equals who was chosen longest ago. The smallest is next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    /// When it is due, where each gets turns by its weight.
    pub due: u64,
    /// Number of the pick at which it was last chosen; 0 before the first.
    pub picked: u64,
}

/// What is known of one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotFacts {
    /// Legs that it is serving, and what it does for others as far as it is known.
    pub load: u32,
    /// Share of its KV cache that was in use when it was last asked, in thousandths; 0 where that is
    /// not known.
    pub cache_used: u16,
    /// How much it gets beside others, 1 to 1,000.
    pub weight: u32,
    /// When its turn is.
    pub turn: Turn,
    /// Whether it may take one more leg.
    pub has_room: bool,
}

/// The slots of a pool, by their position in the round.
#[derive(Debug, Default)]
pub struct Round {
    loads: Vec<u32>,
    weights: Vec<u32>,
    /// Of each its burden and, of equal ones, how full its KV cache is, in quarters.
    works: Vec<u64>,
    turns: Vec<Turn>,
    /// See [`super::slot_identity`].
    identities: Vec<u64>,
    /// The shorts of all identities with their positions, in order.
    by_short: Vec<(u32, u32)>,
    /// A bit for each slot that a leg may go to, were there room.
    reach: Vec<u64>,
    /// A bit for each slot that has room.
    room: Vec<u64>,
    /// A bit for each slot within reach that has room.
    open: Vec<u64>,
    /// Of the open ones.
    count: usize,
    load_sum: u64,
    weight_sum: u64,
}

impl Round {
    /// A round of slots with these identities; none is within reach.
    pub fn new(identities: Vec<u64>) -> Self {
        let count = identities.len();
        let words = vec![0; count.div_ceil(WORD)];
        let shorts = identities.iter().map(|identity| short(*identity));
        let mut by_short: Vec<(u32, u32)> = shorts.zip(0..).collect();
        by_short.sort_unstable();
        Self {
            loads: vec![0; count],
            weights: vec![1; count],
            works: vec![0; count],
            turns: vec![Turn::default(); count],
            identities,
            by_short,
            reach: words.clone(),
            room: words.clone(),
            open: words,
            count: 0,
            load_sum: 0,
            weight_sum: 0,
        }
    }

    /// What is known of a slot from here on.
    pub fn set(&mut self, at: usize, facts: &SlotFacts) {
        let SlotFacts {
            load,
            cache_used,
            weight,
            turn,
            has_room,
        } = *facts;
        if self.is_open(at) {
            self.count_out(at);
        }
        self.loads[at] = load;
        self.weights[at] = weight;
        let burden = match weight {
            1 => u64::from(load) << BURDEN_FRACTION,
            _ => (u64::from(load) << BURDEN_FRACTION) / u64::from(weight),
        };
        self.works[at] = (burden << CACHE_BITS) | u64::from(cache_used / CACHE_STEP);
        self.turns[at] = turn;
        let (word, bit) = (at / WORD, 1 << (at % WORD));
        match has_room {
            true => self.room[word] |= bit,
            false => self.room[word] &= !bit,
        }
        self.open[word] = self.reach[word] & self.room[word];
        if self.is_open(at) {
            self.count_in(at);
        }
    }

    /// Puts those slots within reach of which `reached` says so, and no others.
    pub fn set_reach(&mut self, reached: impl Fn(usize) -> bool) {
        let (mut count, mut load_sum, mut weight_sum) = (0, 0, 0);
        let words = self.room.iter().zip(&mut self.reach).zip(&mut self.open);
        let slots = self.loads.chunks(WORD).zip(self.weights.chunks(WORD));
        for ((begin, ((room, reach), open)), (loads, weights)) in
            (0..).step_by(WORD).zip(words).zip(slots)
        {
            *reach = 0;
            for (bit, (load, weight)) in loads.iter().zip(weights).enumerate() {
                let is_reached = u64::from(reached(begin + bit));
                let is_open = is_reached & (room >> bit);
                *reach |= is_reached << bit;
                load_sum += is_open * u64::from(*load);
                weight_sum += is_open * u64::from(*weight);
            }
            *open = *reach & room;
            count += open.count_ones() as usize;
        }
        (self.count, self.load_sum, self.weight_sum) = (count, load_sum, weight_sum);
    }

    fn count_out(&mut self, at: usize) {
        self.count -= 1;
        self.load_sum -= u64::from(self.loads[at]);
        self.weight_sum -= u64::from(self.weights[at]);
    }

    fn count_in(&mut self, at: usize) {
        self.count += 1;
        self.load_sum += u64::from(self.loads[at]);
        self.weight_sum += u64::from(self.weights[at]);
    }

    /// Number of slots that may be chosen. Policies are asked where there is one at least.
    pub fn open_count(&self) -> usize {
        self.count
    }

    /// Whether a slot may be chosen.
    pub fn is_open(&self, at: usize) -> bool {
        self.open[at / WORD] >> (at % WORD) & 1 == 1
    }

    /// The slots that may be chosen, in order.
    pub fn open(&self) -> impl Iterator<Item = usize> + '_ {
        let words = (0..).step_by(WORD).zip(&self.open);
        words.flat_map(|(begin, word)| bits(*word).map(move |bit| begin + bit))
    }

    /// The slot that has `before` open ones before it, and is open; `before` is below
    /// [`Round::open_count`].
    pub fn nth_open(&self, before: usize) -> usize {
        let mut left = before;
        for (begin, word) in (0..).step_by(WORD).zip(&self.open) {
            let here = word.count_ones() as usize;
            if left < here {
                return begin + bits(*word).nth(left).unwrap_or_default();
            }
            left -= here;
        }
        debug_assert!(false, "{before} of {}", self.count);
        0
    }

    /// Number of open slots before this one.
    pub fn open_before(&self, at: usize) -> usize {
        let whole = self.open[..at / WORD].iter();
        let part = self.open[at / WORD] & ((1 << (at % WORD)) - 1);
        whole
            .chain([&part])
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// The load of a slot.
    pub fn load(&self, at: usize) -> u32 {
        self.loads[at]
    }

    /// The least load of all open slots.
    pub fn load_min(&self) -> Option<u32> {
        self.open().map(|at| self.loads[at]).min()
    }

    /// The weight of a slot.
    pub fn weight(&self, at: usize) -> u32 {
        self.weights[at]
    }

    /// What a slot has to do for its weight: its order is that of load by weight, and two are equal
    /// where those are.
    pub fn burden(&self, at: usize) -> u64 {
        self.works[at] >> CACHE_BITS
    }

    /// The slots with the least work of all open ones, as words of bits.
    fn idlest(&self) -> impl Iterator<Item = u64> + '_ {
        let words = || self.open.iter().zip(self.works.chunks(WORD));
        let mut least = u64::MAX;
        for (word, works) in words() {
            match *word {
                0 => {}
                u64::MAX => least = least.min(least_of(works)),
                word => least = bits(word).fold(least, |least, bit| least.min(works[bit])),
            }
        }
        words().map(move |(word, works)| {
            let equal = works
                .iter()
                .rev()
                .fold(0, |equal, work| equal << 1 | u64::from(*work == least));
            word & equal
        })
    }

    /// The open slot with the least work and, of equal ones, the next turn; of those that had none
    /// the first from the position `start` on and around.
    pub fn least_loaded(&self, start: usize) -> usize {
        self.next_of(self.idlest(), start)
    }

    /// The open slot with the next turn, as in [`Round::least_loaded`].
    pub fn next_in_turn(&self, start: usize) -> usize {
        self.next_of(self.open.iter().copied(), start)
    }

    fn next_of(&self, words: impl Iterator<Item = u64>, start: usize) -> usize {
        let mut next = (
            Turn {
                due: u64::MAX,
                picked: u64::MAX,
            },
            true,
            start,
        );
        for (begin, word) in (0..).step_by(WORD).zip(words) {
            let mut left = word;
            while left != 0 {
                let at = begin + left.trailing_zeros() as usize;
                left &= left - 1;
                let turn = &self.turns[at];
                // Seldom true, which a processor foresees.
                if *turn <= next.0 && (*turn < next.0 || (next.1 && at >= start)) {
                    next = (*turn, at < start, at);
                }
            }
        }
        next.2
    }

    /// When a slot's turn is.
    pub fn turn(&self, at: usize) -> Turn {
        self.turns[at]
    }

    /// Who a slot is, whatever its position.
    pub fn identity(&self, at: usize) -> u64 {
        self.identities[at]
    }

    /// The short of [`Round::identity`].
    pub fn short(&self, at: usize) -> u32 {
        short(self.identities[at])
    }

    /// The slots with this short, open or not, in order.
    pub fn of_short(&self, short: u32) -> impl Iterator<Item = usize> + '_ {
        let from = self.by_short.partition_point(|known| known.0 < short);
        let same = self.by_short[from..].iter();
        same.take_while(move |known| known.0 == short)
            .map(|known| known.1 as usize)
    }

    /// Up to which load a preferred slot takes more.
    pub fn load_cap(&self) -> LoadCap {
        LoadCap::new(self.load_sum, self.weight_sum)
    }
}

fn short(identity: u64) -> u32 {
    (identity >> 32) as u32
}

fn least_of(works: &[u64]) -> u64 {
    let mut least = [u64::MAX; 4];
    let (fours, rest) = works.as_chunks::<4>();
    for four in fours {
        for (least, work) in least.iter_mut().zip(four) {
            *least = (*least).min(*work);
        }
    }
    let all = least.iter().chain(rest);
    all.fold(u64::MAX, |least, work| least.min(*work))
}

/// The bits of a word that are set, from the lowest.
fn bits(word: u64) -> impl Iterator<Item = usize> {
    let mut left = word;
    std::iter::from_fn(move || {
        let bit = left.trailing_zeros() as usize;
        let any = left != 0;
        left &= left.wrapping_sub(1);
        any.then_some(bit)
    })
}

#[cfg(test)]
mod tests;
