//! The slot whose engine has most of the prompt in its cache, as far as routing can know.

use super::{LeastLoaded, Policy, RequestKey, Round};

/// Ways of one set. A beginning that every request has fills its set with the slots that serve it.
const WAYS: usize = 8;
/// Sets of a table; with [`WAYS`] and 12 bytes a way, 3 MiB.
const SETS: usize = 1 << 15;

/// That a slot served a prompt with some beginning. Of both only 32 bits are kept: a false match
/// costs one request its warm cache.
#[derive(Debug, Clone, Copy, Default)]
struct Served {
    prefix: u32,
    slot: u32,
    /// The policy's clock when that was last so.
    at: u32,
}

/// Remembers which slots served which beginnings of prompts, and sends a request to the one that
/// served the longest, while its load is within bounds; else to the least loaded slot, which is
/// then known to have that beginning too.
///
/// Only a beginning that is a substantial part of the prompt counts: a short system prompt in front
/// of everything must not gather all traffic on one slot. Memory is one table of fixed size, in
/// which the pairs used last stay. An engine that lost its cache costs one miss: the request that
/// finds out fills the cache again.
#[derive(Debug)]
pub struct PrefixAware {
    sets: Box<[[Served; WAYS]]>,
    clock: u32,
    emptiest: LeastLoaded,
}

impl Default for PrefixAware {
    fn default() -> Self {
        Self {
            sets: vec![[Served::default(); WAYS]; SETS].into_boxed_slice(),
            clock: 0,
            emptiest: LeastLoaded::default(),
        }
    }
}

impl Policy for PrefixAware {
    fn choose(&mut self, round: &Round, key: &RequestKey) -> usize {
        let chosen = self
            .warm(round, key)
            .unwrap_or_else(|| self.emptiest.choose(round, key));
        self.clock = self.clock.wrapping_add(1);
        for prefix in key.prefixes() {
            self.remember(*prefix, round.short(chosen));
        }
        chosen
    }

    fn known_bytes(&self, round: &Round, key: &RequestKey) -> usize {
        self.warmest(round, key).map_or(0, |(bytes, _)| bytes)
    }
}

impl PrefixAware {
    /// The least loaded of the slots that served the longest beginning, if its load is in bounds;
    /// else of those that served the next longest.
    pub(super) fn warm(&self, round: &Round, key: &RequestKey) -> Option<usize> {
        self.warmest(round, key).map(|(_, slot)| slot)
    }

    /// The same, and how long that beginning is.
    fn warmest(&self, round: &Round, key: &RequestKey) -> Option<(usize, usize)> {
        let cap = round.load_cap();
        let may = |at: &usize| round.is_open(*at) && cap.admits(round.load(*at), round.weight(*at));
        key.long_prefixes().find_map(|(bytes, prefix)| {
            let tag = tag(prefix);
            let ways = self.sets[set(prefix)].iter();
            let served = ways.filter(|served| served.prefix == tag);
            let slots = served.flat_map(|served| round.of_short(served.slot));
            let emptiest = slots.filter(may).min_by_key(|at| (round.burden(*at), *at));
            emptiest.map(|slot| (bytes, slot))
        })
    }

    /// Notes the pair as used now, in the place of the one of its set that was used longest ago.
    fn remember(&mut self, prefix: u64, slot: u32) {
        let now = self.clock;
        let tag = tag(prefix);
        let ways = &mut self.sets[set(prefix)];
        // Without an early end, which no processor foresees: the pair itself is older than any age.
        let age = |way: &Served| match (way.prefix == tag) & (way.slot == slot) {
            true => u64::MAX,
            false => u64::from(now.wrapping_sub(way.at)),
        };
        let mut oldest = (age(&ways[0]), 0);
        for (at, way) in ways.iter().enumerate().skip(1) {
            let next = (age(way), at);
            oldest = match next.0 > oldest.0 {
                true => next,
                false => oldest,
            };
        }
        ways[oldest.1] = Served {
            prefix: tag,
            slot,
            at: now,
        };
    }
}

fn set(prefix: u64) -> usize {
    (prefix % SETS as u64) as usize
}

fn tag(prefix: u64) -> u32 {
    (prefix >> 32) as u32
}
