//! What is known about one instance: a state machine over probes, connect errors and failed legs.

use super::breaker::{Breaker, BreakerRules, LegFault, Phase};

/// When an instance counts as failed, and for how long a good probe counts as recent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthRules {
    /// Failed probes in a row that make an instance `Unhealthy`.
    pub failures_max: u32,
    /// Age in milliseconds up to which the last good probe makes an instance ready.
    pub fresh_ms: u64,
    /// When failed legs keep an instance out.
    pub breaker: BreakerRules,
}

/// How much an instance is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthState {
    /// Its probes are answered.
    Healthy,
    /// Not probed to an end yet, or its legs are answered and its probes are not: routed to like a
    /// healthy one, but not ready.
    Unknown,
    /// Refused a connection, or never answered so far: used when nothing better is there.
    Suspect,
    /// Legs failed one after the other: kept out for a time, though its probe may be answered.
    Open,
    /// That time is over: one leg tries it.
    HalfOpen,
    /// Failed [`HealthRules::failures_max`] probes in a row: the last resort.
    Unhealthy,
}

impl HealthState {
    /// The word used in `/workers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unknown => "unknown",
            Self::Suspect => "suspect",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// Health of one instance. An HTTP status below 500 never counts against it: a client's mistake
/// says nothing about the engine.
#[derive(Debug, Clone)]
pub struct Health {
    probed: Probed,
    /// Probes that failed since the last answer, of a probe or of a leg.
    failures: u32,
    has_answered: bool,
    /// When a probe was answered last, while that counts: until enough failed in a row.
    last_probe_ms: Option<u64>,
    /// Probes that failed since then, whatever legs said.
    probes_failed: u32,
    breaker: Breaker,
}

/// What probes and connect errors say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probed {
    Healthy,
    Unknown,
    Suspect,
    Unhealthy,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            probed: Probed::Unknown,
            failures: 0,
            has_answered: false,
            last_probe_ms: None,
            probes_failed: 0,
            breaker: Breaker::default(),
        }
    }
}

impl Health {
    /// The state at `now_ms`.
    pub fn state(&self, now_ms: u64) -> HealthState {
        match (self.probed, self.breaker.phase(now_ms)) {
            (Probed::Unhealthy, _) => HealthState::Unhealthy,
            (_, Phase::Open) => HealthState::Open,
            (_, Phase::HalfOpen | Phase::Trying) => HealthState::HalfOpen,
            (Probed::Healthy, Phase::Closed) => HealthState::Healthy,
            (Probed::Unknown, Phase::Closed) => HealthState::Unknown,
            (Probed::Suspect, Phase::Closed) => HealthState::Suspect,
        }
    }

    /// Rank in the order of preference; equal numbers share the load. No number is too bad to be
    /// the best one present, so the last instance of a role is never kept out.
    pub(super) fn tier(&self, now_ms: u64) -> u8 {
        let probed = match self.probed {
            Probed::Healthy | Probed::Unknown => 0,
            Probed::Suspect => 1,
            Probed::Unhealthy => 3,
        };
        let breaker = match self.breaker.phase(now_ms) {
            // Half-open it takes its turn, or no leg would ever try it.
            Phase::Closed | Phase::HalfOpen => 0,
            Phase::Open | Phase::Trying => 2,
        };
        probed.max(breaker)
    }

    /// When time alone changes its rank; `None` where it does not.
    pub(super) fn edge_ms(&self) -> Option<u64> {
        self.breaker.edge_ms()
    }

    /// All that its rank comes from, but for the time: while this stays, so does the rank on either
    /// side of [`Health::edge_ms`].
    pub(super) fn grade(&self) -> impl PartialEq + use<> {
        (
            self.probed,
            self.breaker.edge_ms(),
            self.breaker.is_trying(),
        )
    }

    /// Whether probes have failed so often that it does not count as there.
    pub fn is_unhealthy(&self) -> bool {
        self.probed == Probed::Unhealthy
    }

    /// Whether it has ever answered.
    pub fn has_answered(&self) -> bool {
        self.has_answered
    }

    /// Whether its last good probe is recent, and no leg failed to connect since. What legs answer
    /// makes nobody ready: a server that is no engine answers them too. Failed legs do not count:
    /// who asks whether the proxy is ready could keep from it the leg that would show the end of
    /// the fault.
    pub fn is_ready(&self, rules: &HealthRules, now_ms: u64) -> bool {
        self.probed == Probed::Healthy
            && self
                .last_probe_ms
                .is_some_and(|at| now_ms.saturating_sub(at) <= rules.fresh_ms)
    }

    /// A probe was answered well.
    pub fn on_probe_answered(&mut self, now_ms: u64) {
        self.last_probe_ms = Some(now_ms);
        self.probes_failed = 0;
        self.on_answer();
        self.breaker.on_probe_answered();
    }

    /// A leg of real traffic got a response head with a status below 500: it is routed to like one
    /// whose probes are answered, which a busy engine may be late with.
    pub fn on_answer(&mut self) {
        self.probed = match self.last_probe_ms {
            Some(_) => Probed::Healthy,
            None => Probed::Unknown,
        };
        self.failures = 0;
        self.has_answered = true;
    }

    /// A probe failed: no answer in time, no connection, or a status other than 2xx.
    pub fn on_probe_failed(&mut self, rules: &HealthRules) {
        self.failures = self.failures.saturating_add(1);
        self.probes_failed = self.probes_failed.saturating_add(1);
        if self.probes_failed >= rules.failures_max {
            self.last_probe_ms = None;
        }
        if self.failures >= rules.failures_max {
            self.probed = Probed::Unhealthy;
            return;
        }
        match self.probed {
            // One lost probe of a busy engine is no reason to move its traffic.
            Probed::Healthy => {}
            // Its legs are answered.
            Probed::Unknown if self.has_answered => {}
            Probed::Unknown | Probed::Suspect => self.probed = Probed::Suspect,
            Probed::Unhealthy => {}
        }
    }

    /// Traffic could not connect, or the connection broke before a response head.
    ///
    /// Only the probe makes an instance `Unhealthy`: a burst of traffic meets the same fault many
    /// times at once, which is one piece of evidence and not many.
    pub fn on_connect_failed(&mut self) {
        match self.probed {
            Probed::Healthy | Probed::Unknown => self.probed = Probed::Suspect,
            Probed::Suspect | Probed::Unhealthy => {}
        }
    }

    /// A leg begins; true where it is the one that tries an instance that was kept out.
    pub(super) fn on_begin(&mut self, now_ms: u64) -> bool {
        self.breaker.on_begin(now_ms)
    }

    /// That leg has ended.
    pub(super) fn on_trial_ended(&mut self) {
        self.breaker.on_trial_ended();
    }

    /// A leg that began at `began_ms` failed by the engine's fault.
    pub fn on_failed(&mut self, rules: &HealthRules, fault: LegFault, began_ms: u64, now_ms: u64) {
        self.breaker
            .on_failed(&rules.breaker, fault, began_ms, now_ms);
    }

    /// A leg that began at `began_ms` was served.
    pub fn on_served(&mut self, began_ms: u64, now_ms: u64) {
        self.breaker.on_served(began_ms, now_ms);
    }
}
