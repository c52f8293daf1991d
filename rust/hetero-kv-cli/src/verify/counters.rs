//! The counters that tell whether KV moved.

use std::collections::BTreeMap;

use super::exposition::{Sample, samples};

/// Counted by our connector where KV arrives.
pub(super) const BYTES_READ: &str = "hetero_kv_bytes_read_total";
/// Counted by our connector where KV is held.
pub(super) const LEASES_ALIVE: &str = "hetero_kv_leases_alive";
/// Counted by vLLM, by where a prompt's tokens came from.
pub(super) const PROMPT_TOKENS: &str = "vllm:prompt_tokens_by_source_total";

/// A rank that was read, as the reader's counter names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SourceRank {
    pub(super) engine: String,
    pub(super) tp: String,
}

/// One server's counters, summed over its engines. Absent: not exposed, which for vLLM's counters
/// and the lease gauge is not the same as 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) bytes_by_source: BTreeMap<SourceRank, u64>,
    pub(super) external_tokens: Option<u64>,
    pub(super) computed_tokens: Option<u64>,
    pub(super) leases_alive: Option<u64>,
}

impl Counters {
    pub(super) fn parse(text: &str) -> Self {
        let mut counters = Self::default();
        for sample in samples(text) {
            let Some(value) = count(sample.value) else {
                continue;
            };
            let slot = match (sample.name, sample.label("source")) {
                (BYTES_READ, _) => {
                    let source = counters.bytes_by_source.entry(source_rank(&sample));
                    *source.or_default() += value;
                    continue;
                }
                (LEASES_ALIVE, _) => &mut counters.leases_alive,
                (PROMPT_TOKENS, Some("external_kv_transfer")) => &mut counters.external_tokens,
                (PROMPT_TOKENS, Some("local_compute")) => &mut counters.computed_tokens,
                _ => continue,
            };
            *slot.get_or_insert(0) += value;
        }
        counters
    }
}

fn source_rank(sample: &Sample<'_>) -> SourceRank {
    let label = |name| sample.label(name).unwrap_or("?").to_owned();
    SourceRank {
        engine: label("source_engine"),
        tp: label("source_tp"),
    }
}

/// Counters are sent as floating point numbers, exact up to 2^53.
fn count(value: f64) -> Option<u64> {
    (0.0..=9_007_199_254_740_992.0)
        .contains(&value)
        .then_some(value as u64)
}
