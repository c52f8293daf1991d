//! Histograms of durations without a lock: a chunk of a stream must not wait for a scrape.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Seconds; from a cached one-token prefill to a long prompt in a full queue.
const SECONDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];
/// Seconds; from chunks that came in one read to an engine that stands still.
const GAP_SECONDS: [f64; 15] = [
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0,
];
/// Gaps that a stream keeps to itself, so that a scrape lags by a few seconds of tokens at most.
const GAPS_KEPT_MAX: u32 = 64;

/// A histogram of durations, in seconds; clones count as one.
#[derive(Debug, Clone, Default)]
pub struct Durations(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    bounds_s: &'static [f64],
    /// One for each bound, and one for what is longer than all.
    counts: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

impl Durations {
    fn new(bounds_s: &'static [f64]) -> Self {
        Self(Arc::new(Counts {
            bounds_s,
            counts: (0..=bounds_s.len()).map(|_| AtomicU64::new(0)).collect(),
            sum_ns: AtomicU64::new(0),
        }))
    }

    /// For parts of a request: 5 ms to 300 s.
    pub fn parts() -> Self {
        Self::new(SECONDS)
    }

    /// For the time between two chunks: 1 ms to 10 s. Takes [`Gaps`].
    pub fn gaps() -> Self {
        Self::new(&GAP_SECONDS)
    }

    /// Counts one.
    pub fn observe(&self, took: Duration) {
        self.add(bucket(self.0.bounds_s, took), 1);
        self.0.sum_ns.fetch_add(nanos(took), Ordering::Relaxed);
    }

    fn add(&self, bucket: usize, count: u64) {
        if let Some(counted) = self.0.counts.get(bucket) {
            counted.fetch_add(count, Ordering::Relaxed);
        }
    }
}

/// The first bucket that has room for a duration. A bound belongs to the bucket below it.
fn bucket(bounds_s: &[f64], took: Duration) -> usize {
    let seconds = took.as_secs_f64();
    let fits = bounds_s.iter().position(|bound| seconds <= *bound);
    fits.unwrap_or(bounds_s.len())
}

fn nanos(took: Duration) -> u64 {
    u64::try_from(took.as_nanos()).unwrap_or(u64::MAX)
}

impl TypedMetric for Durations {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Durations {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        // The last bucket is spelled `+Inf`.
        let bounds = self.0.bounds_s.iter().copied().chain([f64::INFINITY]);
        let counts = self.0.counts.iter();
        let counts = counts.map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum_s = self.0.sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        encoder.encode_histogram::<NoLabelSet>(sum_s, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// The times between the chunks of one stream until they are counted together.
#[derive(Debug, Default)]
pub struct Gaps {
    counts: [u32; GAP_SECONDS.len() + 1],
    sum_ns: u64,
    kept: u32,
}

impl Gaps {
    /// Keeps one, and says whether there are so many that they should be counted.
    pub fn keep(&mut self, took: Duration) -> bool {
        self.counts[bucket(&GAP_SECONDS, took)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(nanos(took));
        self.kept += 1;
        self.kept >= GAPS_KEPT_MAX
    }

    /// Counts those that were kept, in a histogram of [`Durations::gaps`].
    pub fn count_in(&mut self, histogram: &Durations) {
        if self.kept == 0 {
            return;
        }
        for (bucket, count) in self.counts.iter().enumerate() {
            if *count > 0 {
                histogram.add(bucket, u64::from(*count));
            }
        }
        histogram.0.sum_ns.fetch_add(self.sum_ns, Ordering::Relaxed);
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests;
