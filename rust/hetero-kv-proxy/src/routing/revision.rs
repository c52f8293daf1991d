//! Which revision of a model serves a request: a draw by weight.

use super::policy::stir;

/// Revisions that may have a weight at once: a rollout has two, and each has counters.
pub const REVISIONS_MAX: usize = 16;
/// The largest weight.
pub const WEIGHT_MAX: u32 = 1_000_000;

/// The shares of revisions; at least one is over 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weights(Vec<(Box<str>, u32)>);

/// What a request was drawn to, and where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drawn {
    /// Position in [`Weights::entries`] of the revision that serves it.
    pub revision: usize,
    /// Position of the one that it was drawn to, where workers of that are away.
    pub instead_of: Option<usize>,
}

impl Weights {
    /// Shares of these revisions; `None` where there are none.
    ///
    /// # Errors
    /// A sentence that names the revision at fault.
    pub fn new(entries: Vec<(String, u32)>) -> Result<Option<Self>, String> {
        if entries.is_empty() {
            return Ok(None);
        }
        if entries.len() > REVISIONS_MAX {
            let count = entries.len();
            return Err(format!(
                "{count} revisions; at most {REVISIONS_MAX} have a weight"
            ));
        }
        let mut checked: Vec<(Box<str>, u32)> = Vec::new();
        for (name, weight) in entries {
            let plain = name.bytes().all(|byte| byte.is_ascii_graphic());
            if name.is_empty() || name.len() > 512 || !plain {
                return Err("a revision is 1 to 512 visible ASCII characters".to_owned());
            }
            if weight > WEIGHT_MAX {
                return Err(format!(
                    "`{name}`: a weight is 0 to {WEIGHT_MAX}, not {weight}"
                ));
            }
            if checked.iter().any(|(known, _)| **known == *name) {
                return Err(format!("`{name}` is given twice"));
            }
            checked.push((name.into(), weight));
        }
        if checked.iter().all(|(_, weight)| *weight == 0) {
            return Err("some revision needs a weight over 0".to_owned());
        }
        Ok(Some(Self(checked)))
    }

    /// Reads `a=95,b=5`; empty is none.
    ///
    /// # Errors
    /// As [`Weights::new`].
    pub fn parse(text: &str) -> Result<Option<Self>, String> {
        let parts = text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty());
        let entry = |part: &str| {
            let (name, weight) = part
                .rsplit_once('=')
                .ok_or_else(|| format!("`{part}` is not REVISION=WEIGHT"))?;
            let weight = weight
                .parse()
                .map_err(|_| format!("`{name}`: a weight is 0 to {WEIGHT_MAX}, not `{weight}`"))?;
            Ok::<_, String>((name.to_owned(), weight))
        };
        Self::new(parts.map(entry).collect::<Result<_, _>>()?)
    }

    /// Revisions and their weights, as given.
    pub fn entries(&self) -> &[(Box<str>, u32)] {
        &self.0
    }

    /// Draws for a request; `draw` is any number, and equal ones fall on equal revisions for as long
    /// as their workers are there. `tiers` has, for each revision, how good the worst of its roles
    /// is, lower being better, and `None` where a role has no worker. The share of a revision that
    /// is not among the best goes to those that are, by their weights; those of weight 0 get none.
    ///
    /// `None` where no revision with a weight has workers.
    pub fn draw(&self, draw: u64, tiers: &[Option<u8>]) -> Option<Drawn> {
        let weighted = |at: usize| self.0[at].1 > 0;
        let best = (0..self.0.len())
            .filter(|at| weighted(*at))
            .filter_map(|at| tiers.get(at).copied().flatten())
            .min()?;
        let served = |at: usize| tiers.get(at).copied().flatten() == Some(best);
        let first = self.fall(draw, |_| true)?;
        if served(first) {
            return Some(Drawn {
                revision: first,
                instead_of: None,
            });
        }
        // Drawn anew: who falls on the others keeps his place among them.
        let revision = self.fall(stir(draw), served)?;
        Some(Drawn {
            revision,
            instead_of: Some(first),
        })
    }

    /// On which of those that are `in_it` a number falls.
    fn fall(&self, draw: u64, in_it: impl Fn(usize) -> bool) -> Option<usize> {
        let weight = |at: usize| u64::from(self.0[at].1) * u64::from(in_it(at));
        let total: u64 = (0..self.0.len()).map(weight).sum();
        let mut place = ((u128::from(draw) * u128::from(total)) >> 64) as u64;
        (0..self.0.len()).find(|at| {
            let weight = weight(*at);
            let falls = place < weight;
            place = place.saturating_sub(weight);
            falls
        })
    }
}

/// The draw of the n-th request without a session. Consecutive ones spread over the whole range as
/// evenly as can be, so that shares are right after few requests.
pub fn draw_of_turn(turn: u64) -> u64 {
    // The golden ratio's fraction of 2^64 (Weyl's sequence).
    turn.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests;
