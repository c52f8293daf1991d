//! The slot whose engine has most of the prompt in its cache, as far as routing can know.

use super::{Candidate, LeastLoaded, LoadCap, Policy, RequestKey, load_cap};

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
    fn choose(&mut self, candidates: &[Candidate], key: &RequestKey) -> usize {
        let chosen = self
            .warm(candidates, key)
            .unwrap_or_else(|| self.emptiest.choose(candidates, key));
        self.clock = self.clock.wrapping_add(1);
        for prefix in key.prefixes() {
            self.remember(*prefix, short(candidates[chosen].identity));
        }
        chosen
    }

    fn known_bytes(&self, candidates: &[Candidate], key: &RequestKey) -> usize {
        self.warmest(candidates, key).map_or(0, |(bytes, _)| bytes)
    }
}

impl PrefixAware {
    /// The least loaded of the slots that served the longest beginning, if its load is in bounds;
    /// else of those that served the next longest.
    pub(super) fn warm(&self, candidates: &[Candidate], key: &RequestKey) -> Option<usize> {
        self.warmest(candidates, key).map(|(_, slot)| slot)
    }

    /// The same, and how long that beginning is.
    fn warmest(&self, candidates: &[Candidate], key: &RequestKey) -> Option<(usize, usize)> {
        let cap = load_cap(candidates);
        key.long_prefixes().find_map(|(bytes, prefix)| {
            let tag = tag(prefix);
            let mut served = self.sets[set(prefix)]
                .iter()
                .filter(|served| served.prefix == tag)
                .map(|served| served.slot);
            let first = served.next()?;
            // Fewer than all ways: the first fills the rest.
            let mut slots = [first; WAYS];
            slots
                .iter_mut()
                .zip(served)
                .for_each(|(slot, next)| *slot = next);
            emptiest_of(candidates, slots, cap).map(|slot| (bytes, slot))
        })
    }

    /// Notes the pair as used now, in the place of the one of its set that was used longest ago.
    fn remember(&mut self, prefix: u64, slot: u32) {
        let now = self.clock;
        let tag = tag(prefix);
        let ways = &mut self.sets[set(prefix)];
        let mut oldest = 0;
        for (at, way) in ways.iter().enumerate() {
            if way.prefix == tag && way.slot == slot {
                oldest = at;
                break;
            }
            if now.wrapping_sub(way.at) > now.wrapping_sub(ways[oldest].at) {
                oldest = at;
            }
        }
        ways[oldest] = Served {
            prefix: tag,
            slot,
            at: now,
        };
    }
}

/// The candidate with the fewest legs in flight for its weight, below `cap`, of those in `slots`.
fn emptiest_of(candidates: &[Candidate], slots: [u32; WAYS], cap: LoadCap) -> Option<usize> {
    let mut found: Option<usize> = None;
    for (at, candidate) in candidates.iter().enumerate() {
        let identity = short(candidate.identity);
        // Without an early end: all ways are compared in one step.
        let known = slots
            .iter()
            .fold(false, |known, slot| known | (*slot == identity));
        let fewer = |at: usize| candidate.load_beside(&candidates[at]).is_lt();
        if known && cap.admits(candidate) && found.is_none_or(fewer) {
            found = Some(at);
        }
    }
    found
}

fn set(prefix: u64) -> usize {
    (prefix % SETS as u64) as usize
}

fn tag(prefix: u64) -> u32 {
    (prefix >> 32) as u32
}

fn short(identity: u64) -> u32 {
    (identity >> 32) as u32
}
