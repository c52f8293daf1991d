//! Durations in bounded memory: values to 0.8 %, sum and maximum exact.

use std::time::Duration;

/// Below this many microseconds each value has a bucket of its own.
const EXACT: u64 = 256;
/// Buckets of each power of two above.
const PER_OCTAVE: usize = 128;
const OCTAVES: usize = 56;

/// A distribution of durations.
#[derive(Debug, Clone)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: Duration,
    max: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: vec![0; EXACT as usize + OCTAVES * PER_OCTAVE],
            count: 0,
            sum: Duration::ZERO,
            max: Duration::ZERO,
        }
    }
}

impl Histogram {
    /// Adds one.
    pub fn add(&mut self, value: Duration) {
        let micros = u64::try_from(value.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket(micros)] += 1;
        self.count += 1;
        self.sum += value;
        self.max = self.max.max(value);
    }

    /// How many.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Milliseconds; none of nothing.
    pub fn mean_ms(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum.as_secs_f64() * 1e3 / self.count as f64)
    }

    /// Milliseconds of the value that `part` (0 to 1) of all are not above; none of nothing.
    pub fn quantile_ms(&self, part: f64) -> Option<f64> {
        if self.count == 0 {
            return None;
        }
        let wanted = ((part * self.count as f64).ceil() as u64).max(1);
        let mut seen = 0;
        let max_ms = self.max.as_secs_f64() * 1e3;
        for (at, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return Some((middle(at) / 1e3).min(max_ms));
            }
        }
        Some(max_ms)
    }
}

fn bucket(micros: u64) -> usize {
    if micros < EXACT {
        return micros as usize;
    }
    let octave = micros.ilog2() as usize - 8;
    let within = (micros >> (octave + 1)) as usize - PER_OCTAVE;
    EXACT as usize + octave * PER_OCTAVE + within
}

/// Microseconds in the middle of a bucket.
fn middle(at: usize) -> f64 {
    let Some(above) = at.checked_sub(EXACT as usize) else {
        return at as f64;
    };
    let (octave, within) = (above / PER_OCTAVE, above % PER_OCTAVE);
    let width = (1_u64 << (octave + 1)) as f64;
    ((PER_OCTAVE + within) as f64 + 0.5) * width
}

#[cfg(test)]
mod tests;
