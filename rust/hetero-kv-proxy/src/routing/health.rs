//! What is known about one instance: a state machine over probes and connect errors.

/// When an instance counts as failed, and for how long a good probe counts as recent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthRules {
    /// Failed probes in a row that make an instance `Unhealthy`.
    pub failures_max: u32,
    /// Age in milliseconds up to which the last good answer makes an instance ready.
    pub fresh_ms: u64,
}

/// How much an instance is trusted. The order is the order of preference when routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HealthState {
    /// Answered its last probe, or traffic since.
    Healthy,
    /// Not probed to an end yet: routed to like a healthy one, but not ready.
    Unknown,
    /// Refused a connection, or never answered so far: used when nothing better is there.
    Suspect,
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
            Self::Unhealthy => "unhealthy",
        }
    }

    /// Rank in the order of preference; equal numbers share the load.
    pub(super) fn tier(self) -> u8 {
        match self {
            Self::Healthy | Self::Unknown => 0,
            Self::Suspect => 1,
            Self::Unhealthy => 2,
        }
    }
}

/// Health of one instance. An HTTP status below 500 never counts against it: a client's mistake
/// says nothing about the engine.
#[derive(Debug, Clone)]
pub struct Health {
    state: HealthState,
    failures: u32,
    last_ok_ms: Option<u64>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            state: HealthState::Unknown,
            failures: 0,
            last_ok_ms: None,
        }
    }
}

impl Health {
    /// The present state.
    pub fn state(&self) -> HealthState {
        self.state
    }

    /// Whether it has ever answered.
    pub fn has_answered(&self) -> bool {
        self.last_ok_ms.is_some()
    }

    /// Whether the instance is healthy and its last good answer is recent.
    pub fn is_ready(&self, rules: &HealthRules, now_ms: u64) -> bool {
        self.state == HealthState::Healthy
            && self
                .last_ok_ms
                .is_some_and(|at| now_ms.saturating_sub(at) <= rules.fresh_ms)
    }

    /// A probe was answered well, or a leg of real traffic got a response head.
    pub fn on_answer(&mut self, now_ms: u64) {
        self.state = HealthState::Healthy;
        self.failures = 0;
        self.last_ok_ms = Some(now_ms);
    }

    /// A probe failed: no answer in time, no connection, or a status other than 2xx.
    pub fn on_probe_failed(&mut self, rules: &HealthRules) {
        self.failures = self.failures.saturating_add(1);
        if self.failures >= rules.failures_max {
            self.state = HealthState::Unhealthy;
            return;
        }
        match self.state {
            // One lost probe of a busy engine is no reason to move its traffic.
            HealthState::Healthy => {}
            HealthState::Unknown | HealthState::Suspect => self.state = HealthState::Suspect,
            HealthState::Unhealthy => {}
        }
    }

    /// Traffic could not connect, or the connection broke before a response head.
    ///
    /// Only the probe makes an instance `Unhealthy`: a burst of traffic meets the same fault many
    /// times at once, which is one piece of evidence and not many.
    pub fn on_connect_failed(&mut self) {
        match self.state {
            HealthState::Healthy | HealthState::Unknown => self.state = HealthState::Suspect,
            HealthState::Suspect | HealthState::Unhealthy => {}
        }
    }
}
