//! How many log lines a peer may cause. Pure: time is an argument.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use tokio::time::Instant;

/// Lines of one address in one interval: the workers of a host may each have a reason of their own.
const LINES_MAX: u32 = 8;
/// Longer than a peer that dials again and again takes, and short enough to be seen while somebody
/// looks for a fault.
const INTERVAL: Duration = Duration::from_secs(60);
/// Addresses told apart; further ones share one allowance.
const ADDRESSES_MAX: usize = 1_024;

/// What each address has caused in its interval.
#[derive(Debug, Default)]
pub(super) struct Lines(HashMap<IpAddr, Caused>);

#[derive(Debug)]
struct Caused {
    since: Instant,
    lines: u32,
    /// Not logged since the last line.
    unlogged: u64,
}

impl Lines {
    /// How many lines about `from` were left out since its last one, where one is due; `None` where
    /// this one is left out too.
    pub(super) fn due(&mut self, from: IpAddr, now: Instant) -> Option<u64> {
        let from = match self.0.contains_key(&from) {
            true => from,
            false => self.place_for(from, now),
        };
        let caused = self.0.entry(from).or_insert(Caused {
            since: now,
            lines: 0,
            unlogged: 0,
        });
        if now - caused.since >= INTERVAL {
            (caused.since, caused.lines) = (now, 0);
        }
        if caused.lines >= LINES_MAX {
            caused.unlogged += 1;
            return None;
        }
        caused.lines += 1;
        Some(std::mem::take(&mut caused.unlogged))
    }

    /// Under which address a new one is kept.
    fn place_for(&mut self, from: IpAddr, now: Instant) -> IpAddr {
        if self.0.len() >= ADDRESSES_MAX {
            self.0.retain(|_, caused| now - caused.since < INTERVAL);
        }
        match self.0.len() >= ADDRESSES_MAX {
            true => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            false => from,
        }
    }
}

#[cfg(test)]
mod tests;
