//! By which transports bytes came, and why by those.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::ipc::{RankName, SourceRead};
use super::trace::EnginePlace;

/// Reasons shown of each transport.
const SHOWN_MAX: usize = 10;

/// A reading rank (instance, dp, tp, pp) and the rank it reads.
type Pair = ((u32, u32, u32, u32), RankName);

/// All reads of a run by their transport.
#[derive(Debug, Default)]
pub(super) struct Transports(BTreeMap<String, Reads>);

#[derive(Debug, Default)]
struct Reads {
    reads: u64,
    bytes: u64,
    /// By the reason for which this transport was taken.
    pairs: BTreeMap<String, BTreeSet<Pair>>,
}

impl Transports {
    /// Reads of one request by ranks of the engine at `reader`.
    pub(super) fn note(&mut self, reader: EnginePlace, reads: &[SourceRead]) {
        for read in reads {
            let found = self.0.entry(read.transport.clone()).or_default();
            found.reads += 1;
            found.bytes += read.bytes;
            if let Some(why) = &read.why {
                let (tp, pp) = read.reader;
                let pair = ((reader.instance, reader.dp, tp, pp), read.source.clone());
                found.pairs.entry(nameless(why)).or_default().insert(pair);
            }
        }
    }

    pub(super) fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    /// By name of the transport: `reads`, `bytes`, and `why`, pairs of ranks by reason.
    pub(super) fn json(&self) -> Value {
        let by_name = self.0.iter().map(|(name, found)| {
            let why: BTreeMap<&str, usize> = found
                .pairs
                .iter()
                .map(|(why, pairs)| (why.as_str(), pairs.len()))
                .collect();
            let value = json!({"reads": found.reads, "bytes": found.bytes, "why": why});
            (name.clone(), value)
        });
        Value::Object(by_name.collect())
    }

    /// Lines of the table. `asked`: the value of `--transport`.
    pub(super) fn rows(&self, asked: &str) -> Vec<String> {
        let mut rows = Vec::new();
        for (name, found) in &self.0 {
            rows.push(format!(
                "transport   {asked}: {} reads of {} bytes together by {name}",
                found.reads, found.bytes
            ));
            let mut reasons: Vec<(usize, &str)> = found
                .pairs
                .iter()
                .map(|(why, pairs)| (pairs.len(), why.as_str()))
                .collect();
            reasons.sort_by_key(|(pairs, _)| Reverse(*pairs));
            for (pairs, why) in reasons.iter().take(SHOWN_MAX) {
                rows.push(format!("  {pairs:>6} pairs of ranks by {name}: {why}"));
            }
            if let Some(more) = reasons
                .len()
                .checked_sub(SHOWN_MAX)
                .filter(|more| *more > 0)
            {
                rows.push(format!("         {more} reasons more, by --json"));
            }
        }
        rows
    }
}

/// The reason without the source's process id, so that what all sources have in common is one
/// reason.
fn nameless(why: &str) -> String {
    let mut text = String::with_capacity(why.len());
    let mut of_process = false;
    for word in why.split_inclusive(' ') {
        let rest = word.trim_start_matches(|digit: char| digit.is_ascii_digit());
        if of_process && rest.len() < word.len() {
            text.push('N');
            text.push_str(rest);
        } else {
            text.push_str(word);
        }
        of_process = matches!(word.trim_end(), "pid" | "process");
    }
    text
}

#[cfg(test)]
mod tests;
