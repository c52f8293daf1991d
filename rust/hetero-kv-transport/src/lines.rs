//! How many lines of the log strangers and standing faults may cause: whoever reaches a port could
//! fill it, and hide what somebody looks for.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use hetero_kv_core::time::Time;

/// Lines of one cause in one interval.
const LINES_MAX: u32 = 8;

/// Longer than a peer that dials again and again takes, and short enough to be seen while somebody
/// looks for a fault.
const INTERVAL: Duration = Duration::from_secs(60);

/// Causes told apart; further ones share one allowance.
const CAUSES_MAX: usize = 1024;

/// Who or what makes a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cause {
    /// Whoever dials from this address; `None` where it could not be told.
    Peer(Option<IpAddr>),
    /// The system has no descriptor, memory or random bytes for a peer.
    System,
    /// Everybody together: there are too many.
    Crowd,
    /// The one source that a session reads from, which each load may find away.
    Source,
    /// Those who found no place of their own here.
    Others,
}

/// What each cause has made in its interval.
#[derive(Debug, Default)]
pub(crate) struct Lines(HashMap<Cause, Made>);

#[derive(Debug)]
struct Made {
    since: Time,
    lines: u32,
    /// Not logged since the last line.
    unlogged: u64,
}

impl Lines {
    /// How many lines of `cause` were left out since its last one, where one is due; `None` where
    /// this one is left out too.
    pub(crate) fn due(&mut self, cause: Cause, now: Time) -> Option<u64> {
        let cause = self.place_for(cause, now);
        let made = self.0.entry(cause).or_insert(Made {
            since: now,
            lines: 0,
            unlogged: 0,
        });
        if now.since(made.since) >= INTERVAL {
            (made.since, made.lines) = (now, 0);
        }
        if made.lines >= LINES_MAX {
            made.unlogged += 1;
            return None;
        }
        made.lines += 1;
        Some(std::mem::take(&mut made.unlogged))
    }

    /// Under what a cause is kept.
    fn place_for(&mut self, cause: Cause, now: Time) -> Cause {
        if self.0.contains_key(&cause) {
            return cause;
        }
        if self.0.len() >= CAUSES_MAX {
            self.0.retain(|_, made| now.since(made.since) < INTERVAL);
        }
        if self.0.len() >= CAUSES_MAX {
            return Cause::Others;
        }
        cause
    }
}

#[cfg(test)]
mod tests;
