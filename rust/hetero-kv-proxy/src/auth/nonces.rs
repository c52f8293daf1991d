//! Which nonces were used, for as long as their timestamps are good. Pure: time is an argument.

use std::collections::HashSet;

/// Nonces of one generation: with two, 8 MiB. 1,024 workers that beat every second stay below it.
pub(super) const PER_GENERATION_MAX: usize = 128 << 10;

/// Why a nonce is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// It was used before.
    Replayed,
    /// As many as can be remembered came within [`Nonces::kept_s`].
    Full,
}

/// The nonces of the last `kept_s` to `2 * kept_s` seconds.
#[derive(Debug)]
pub(super) struct Nonces {
    kept_s: u64,
    begun_s: u64,
    young: HashSet<u128>,
    old: HashSet<u128>,
}

impl Nonces {
    /// Remembers each for at least `kept_s`.
    pub(super) fn new(kept_s: u64) -> Self {
        Self {
            kept_s,
            begun_s: 0,
            young: HashSet::new(),
            old: HashSet::new(),
        }
    }

    /// Takes a nonce that was not used before. `now_s` is a clock that never goes back.
    pub(super) fn take(&mut self, nonce: u128, now_s: u64) -> Result<(), Refused> {
        let age_s = now_s.saturating_sub(self.begun_s);
        if age_s > self.kept_s {
            self.old = std::mem::take(&mut self.young);
            if age_s > 2 * self.kept_s {
                self.old = HashSet::new();
            }
            self.begun_s = now_s;
        }
        if self.young.contains(&nonce) || self.old.contains(&nonce) {
            return Err(Refused::Replayed);
        }
        if self.young.len() >= PER_GENERATION_MAX {
            return Err(Refused::Full);
        }
        self.young.insert(nonce);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
