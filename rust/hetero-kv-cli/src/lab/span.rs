//! When reads were under way.

use std::collections::BTreeMap;
use std::time::Duration;

use hetero_kv_core::time::Time;
use serde::{Deserialize, Serialize};

/// Separate spans that are kept. With more, the earliest are summed up: nothing that is still under
/// way began before them.
const SPANS_MAX: usize = 1 << 16;

/// From a rank's order to read to the end of the read, on the monotonic clock that the processes of a
/// host share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Span {
    begin_ns: u64,
    end_ns: u64,
}

impl Span {
    pub(super) fn new(begin: Time, end: Time) -> Self {
        let ns = |time: Time| u64::try_from(time.since_origin().as_nanos()).unwrap_or(u64::MAX);
        Self {
            begin_ns: ns(begin),
            end_ns: ns(end),
        }
    }

    pub(super) fn elapsed(self) -> Duration {
        Duration::from_nanos(self.end_ns.saturating_sub(self.begin_ns))
    }
}

/// The union of spans: the time in which at least one read was under way.
#[derive(Debug, Default)]
pub(super) struct Union {
    /// Ends by begin; no two touch.
    spans: BTreeMap<u64, u64>,
    /// Of spans that are no longer kept, which ended at `summed_to` or before.
    summed_ns: u64,
    summed_to: u64,
}

impl Union {
    pub(super) fn add(&mut self, span: Span) {
        let mut begin = span.begin_ns.max(self.summed_to);
        let mut end = span.end_ns;
        if begin >= end {
            return;
        }
        // From the last that begins before this one ends, backwards.
        while let Some((&other, &other_end)) = self.spans.range(..=end).next_back()
            && other_end >= begin
        {
            self.spans.remove(&other);
            begin = begin.min(other);
            end = end.max(other_end);
        }
        self.spans.insert(begin, end);
        while self.spans.len() > SPANS_MAX
            && let Some((begin, end)) = self.spans.pop_first()
        {
            self.summed_ns += end - begin;
            self.summed_to = end;
        }
    }

    pub(super) fn total(&self) -> Duration {
        let kept: u64 = self.spans.iter().map(|(begin, end)| end - begin).sum();
        Duration::from_nanos(self.summed_ns + kept)
    }
}

#[cfg(test)]
mod tests;
