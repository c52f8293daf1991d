//! Says when the control thread stood still, for how long and where.
//!
//! Peers notice no more than silence. Whether this engine had no processor, waited for its own lock
//! or hung in a call is known here alone, and only afterwards.

use std::time::Duration;

use hetero_kv_core::time::Time;

use crate::clock;

/// Longest sleep. Whatever failed to wake the thread costs this long and no peer's patience.
pub(super) const SLEEP_MAX: Duration = Duration::from_secs(1);

/// A step that takes longer is told. Peers wait for ten seconds and more by default.
const STANDSTILL: Duration = Duration::from_secs(2);

/// Measures the steps of one thread, one after another.
#[derive(Debug)]
pub(super) struct Steps {
    begun: Time,
}

impl Steps {
    /// The first step begins now.
    pub(super) fn new() -> Self {
        Self {
            begun: clock::now(),
        }
    }

    /// Ends a step that had nothing to wait for, and begins the next one.
    pub(super) fn end(&mut self, step: &str) {
        self.end_after(step, Duration::ZERO);
    }

    /// Ends a step that was to take `planned` at most, and begins the next one.
    pub(super) fn end_after(&mut self, step: &str, planned: Duration) {
        let now = clock::now();
        let taken = now.since(self.begun);
        self.begun = now;
        let late = taken.saturating_sub(planned);
        if late < STANDSTILL {
            return;
        }
        tracing::warn!(
            "control plane: stood still for {:.1} s while {step}; peers were not answered",
            late.as_secs_f64()
        );
    }
}

#[cfg(test)]
mod tests;
