//! Pairs of a prefill and a decode instance between which KV does not get over.
//!
//! A fault between two engines, such as a path of the network, is neither's own: both serve others.
//! Such a pair is avoided for a time, as long as another pair exists.

use std::collections::BTreeMap;

use super::{InstanceIndex, Role};

/// For how long a pair is avoided at first, in milliseconds; each further failure doubles it.
pub const AVOID_MS: u64 = 5_000;
/// The longest time.
pub const AVOID_MS_MAX: u64 = 60_000;
/// Age up to which a leg that a decode engine served shows that it serves others.
const EVIDENCE_MS: u64 = 60_000;
/// Time after its end at which a pair's failures are forgotten.
const FORGET_MS: u64 = 2 * AVOID_MS_MAX;
/// Pairs that are remembered; what would come on top is not avoided.
const PAIRS_MAX: usize = 4_096;

type Pair = (InstanceIndex, InstanceIndex);

#[derive(Debug, Clone, Copy)]
struct Avoided {
    failures: u32,
    until_ms: u64,
}

/// Where the KV of a decode leg came from; `None` for one without.
type Source = Option<InstanceIndex>;

/// What is known of pairs, prefill first.
#[derive(Debug, Default)]
pub struct BadPairs {
    avoided: BTreeMap<Pair, Avoided>,
    /// For each decode instance the last two sources that it served, and when.
    served: BTreeMap<InstanceIndex, Vec<(Source, u64)>>,
}

impl BadPairs {
    /// A decode leg was served.
    pub fn on_served(&mut self, prefill: Source, decode: InstanceIndex, now_ms: u64) {
        if let Some(prefill) = prefill {
            self.avoided.remove(&(prefill, decode));
        }
        let known = self.served.entry(decode).or_default();
        known.retain(|(source, _)| *source != prefill);
        known.push((prefill, now_ms));
        if known.len() > 2 {
            known.remove(0);
        }
    }

    /// A decode leg with KV of `prefill` failed at `decode`. It is the pair's fault where the failure
    /// names KV, or where the decode instance has served others of late. True where the pair is
    /// avoided from now on.
    pub fn on_failed(
        &mut self,
        prefill: InstanceIndex,
        decode: InstanceIndex,
        names_kv: bool,
        now_ms: u64,
    ) -> bool {
        let serves_others = self.served.get(&decode).is_some_and(|known| {
            known.iter().any(|(source, at)| {
                *source != Some(prefill) && now_ms.saturating_sub(*at) <= EVIDENCE_MS
            })
        });
        if !names_kv && !serves_others {
            return false;
        }
        self.avoided
            .retain(|_, known| now_ms <= known.until_ms.saturating_add(FORGET_MS));
        let full = self.avoided.len() >= PAIRS_MAX;
        let known = match self.avoided.get_mut(&(prefill, decode)) {
            // One that went out before, or the last resort.
            Some(known) if now_ms < known.until_ms => return false,
            Some(known) => known,
            None if full => return false,
            None => self.avoided.entry((prefill, decode)).or_insert(Avoided {
                failures: 0,
                until_ms: 0,
            }),
        };
        let doublings = known.failures.min(4);
        known.failures = known.failures.saturating_add(1);
        known.until_ms = now_ms.saturating_add((AVOID_MS << doublings).min(AVOID_MS_MAX));
        true
    }

    /// Whether nothing needs to be asked.
    pub fn is_empty(&self) -> bool {
        self.avoided.is_empty()
    }

    /// The instances of the other role that are not to be paired with this one, and for how many
    /// more milliseconds.
    pub fn with(
        &self,
        role: Role,
        instance: InstanceIndex,
        now_ms: u64,
    ) -> Vec<(InstanceIndex, u64)> {
        let avoided = self
            .avoided
            .iter()
            .filter_map(|((prefill, decode), known)| {
                let (this, other) = match role {
                    Role::Prefill => (prefill, decode),
                    Role::Decode => (decode, prefill),
                };
                let left = known.until_ms.saturating_sub(now_ms);
                (*this == instance && left > 0).then_some((*other, left))
            });
        avoided.collect()
    }

    /// The prefill instances that have no one left to pair with among `decode`.
    pub fn hopeless(&self, decode: &[InstanceIndex], now_ms: u64) -> Vec<InstanceIndex> {
        let mut prefill: Vec<InstanceIndex> = self.avoided.keys().map(|pair| pair.0).collect();
        prefill.dedup();
        prefill.retain(|prefill| {
            decode.iter().all(|decode| {
                let known = self.avoided.get(&(*prefill, *decode));
                known.is_some_and(|known| now_ms < known.until_ms)
            })
        });
        prefill
    }

    /// An instance is removed.
    pub fn forget(&mut self, role: Role, instance: InstanceIndex) {
        match role {
            Role::Prefill => {
                self.avoided.retain(|(prefill, _), _| *prefill != instance);
                for known in self.served.values_mut() {
                    known.retain(|(source, _)| *source != Some(instance));
                }
            }
            Role::Decode => {
                self.avoided.retain(|(_, decode), _| *decode != instance);
                self.served.remove(&instance);
            }
        }
    }
}

#[cfg(test)]
mod tests;
