//! What traffic says of one instance: whether legs fail one after the other.

/// When an instance is kept out, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerRules {
    /// Failures in a row that keep an instance out; 0 is never.
    pub failures_max: u32,
    /// For how long at first, in milliseconds. Each failed trial doubles it, up to eight times this.
    pub open_ms: u64,
}

/// Doublings of [`BreakerRules::open_ms`].
const DOUBLINGS_MAX: u32 = 3;

/// How a leg failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegFault {
    /// No connection. A probe that is answered disproves it.
    Unreachable,
    /// The connection broke, or the answer is the engine's failure: 500, 502, 503, 504, no KV. An
    /// engine that answers its probe may do so for ever.
    Failed,
}

/// Where the instance is between in and out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// In use.
    Closed,
    /// Kept out.
    Open,
    /// One leg may try it.
    HalfOpen,
    /// That leg runs.
    Trying,
}

/// Counts failures in a row.
///
/// In a row means one after the other in time. Legs that ran at the same moment meet the same fault
/// many times, which is one piece of evidence: a leg counts only if it began after the last one that
/// counted had failed. And it does not count if another was served since it began: a connection
/// that timed out in a burst says nothing while others get through.
#[derive(Debug, Clone, Default)]
pub struct Breaker {
    failures: u32,
    /// When the last failure that counted was seen.
    failed_ms: Option<u64>,
    served_ms: Option<u64>,
    /// Whether all failures in the row were [`LegFault::Unreachable`].
    unreachable: bool,
    /// Times opened in a row; 0 while closed.
    opened: u32,
    until_ms: u64,
    trying: bool,
}

impl Breaker {
    /// Where it is at `now_ms`.
    pub fn phase(&self, now_ms: u64) -> Phase {
        if self.opened == 0 {
            Phase::Closed
        } else if now_ms < self.until_ms {
            Phase::Open
        } else if self.trying {
            Phase::Trying
        } else {
            Phase::HalfOpen
        }
    }

    /// When the time ends, or ended, for which it is kept out; `None` while it is in use.
    pub(super) fn edge_ms(&self) -> Option<u64> {
        (self.opened > 0).then_some(self.until_ms)
    }

    /// Whether one leg tries it.
    pub(super) fn is_trying(&self) -> bool {
        self.trying
    }

    /// A leg begins; true where it is the trial, which ends with [`Breaker::on_trial_ended`].
    pub fn on_begin(&mut self, now_ms: u64) -> bool {
        let trial = self.phase(now_ms) == Phase::HalfOpen;
        self.trying |= trial;
        trial
    }

    /// The trial has ended, with a verdict before or without.
    pub fn on_trial_ended(&mut self) {
        self.trying = false;
    }

    /// A leg that began at `began_ms` failed.
    pub fn on_failed(&mut self, rules: &BreakerRules, fault: LegFault, began_ms: u64, now_ms: u64) {
        // Within one millisecond a leg may follow another, and then it was not served since.
        let served_since = self.served_ms.is_some_and(|served| served > began_ms);
        let same_moment = self.failed_ms.is_some_and(|failed| failed > began_ms);
        if served_since || same_moment {
            return;
        }
        let unreachable = fault == LegFault::Unreachable;
        self.unreachable = unreachable && (self.failures == 0 || self.unreachable);
        self.failed_ms = Some(now_ms);
        self.failures = self.failures.saturating_add(1);
        let opens = match self.phase(now_ms) {
            Phase::Closed => rules.failures_max > 0 && self.failures >= rules.failures_max,
            // The last resort: it is out already.
            Phase::Open => false,
            Phase::HalfOpen | Phase::Trying => true,
        };
        if opens {
            let doublings = self.opened.min(DOUBLINGS_MAX);
            self.opened = self.opened.saturating_add(1);
            self.until_ms = now_ms.saturating_add(rules.open_ms << doublings);
        }
    }

    /// A leg that began at `began_ms` was served.
    pub fn on_served(&mut self, began_ms: u64, now_ms: u64) {
        self.served_ms = Some(now_ms);
        // One that began before the fault does not show that the fault has gone.
        let after_fault = self.failed_ms.is_none_or(|failed| began_ms >= failed);
        if self.opened == 0 || after_fault {
            self.close();
        }
    }

    /// A probe was answered well.
    pub fn on_probe_answered(&mut self) {
        if self.unreachable {
            self.close();
        }
    }

    fn close(&mut self) {
        self.failures = 0;
        self.unreachable = false;
        self.opened = 0;
    }
}

#[cfg(test)]
mod tests;
