//! How many lines of the log one cause may make: what strangers and standing faults cause without
//! end must not fill it. Pure: time is an argument.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// Longer than a peer that dials again and again takes, and short enough to be seen while somebody
/// looks for a fault.
const INTERVAL: Duration = Duration::from_secs(60);
/// Causes told apart; further ones share one allowance.
const CAUSES_MAX: usize = 1_024;

/// What each cause, told apart by a `K`, has made in its interval.
#[derive(Debug)]
pub(crate) struct Lines<K> {
    /// Lines of one cause in one interval.
    lines_max: u32,
    /// `None` is all those that found no place.
    caused: HashMap<Option<K>, Caused>,
}

#[derive(Debug)]
struct Caused {
    since: Instant,
    lines: u32,
    /// Not logged since the last line.
    unlogged: u64,
}

impl<K: Hash + Eq> Lines<K> {
    /// At most `lines_max` a minute for each cause.
    pub(crate) fn new(lines_max: u32) -> Self {
        Self {
            lines_max,
            caused: HashMap::new(),
        }
    }

    /// How many lines of `cause` were left out since its last one, where one is due; `None` where
    /// this one is left out too.
    pub(crate) fn due(&mut self, cause: K, now: Instant) -> Option<u64> {
        let cause = self.place_for(cause, now);
        let caused = self.caused.entry(cause).or_insert(Caused {
            since: now,
            lines: 0,
            unlogged: 0,
        });
        if now - caused.since >= INTERVAL {
            (caused.since, caused.lines) = (now, 0);
        }
        if caused.lines >= self.lines_max {
            caused.unlogged += 1;
            return None;
        }
        caused.lines += 1;
        Some(std::mem::take(&mut caused.unlogged))
    }

    /// Under what a cause is kept.
    fn place_for(&mut self, cause: K, now: Instant) -> Option<K> {
        let cause = Some(cause);
        if self.caused.contains_key(&cause) {
            return cause;
        }
        if self.caused.len() >= CAUSES_MAX {
            self.caused
                .retain(|_, caused| now - caused.since < INTERVAL);
        }
        match self.caused.len() >= CAUSES_MAX {
            true => None,
            false => cause,
        }
    }
}

#[cfg(test)]
mod tests;
