//! The sets of labels, and the values of those that have fixed ones.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;

/// How a leg can end.
pub const LEG_OUTCOMES: [&str; 11] = [
    "ok",
    "status_3xx",
    "status_4xx",
    "status_5xx",
    "connect",
    "reset",
    "broken",
    "unsent",
    "bootstrap",
    "malformed",
    "cancelled",
];

/// Labels of a request from a client.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// The path, from a fixed set.
    pub route: &'static str,
    /// HTTP status; 499 for a client that left before its answer began.
    pub status: u16,
}

/// Labels of a leg.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LegLabels {
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// Base URL of the instance.
    pub instance: Arc<str>,
    /// How it ended, one of [`LEG_OUTCOMES`].
    pub outcome: &'static str,
}

/// Labels of a slot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SlotLabels {
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// Base URL of the instance.
    pub instance: Arc<str>,
    /// DP rank within the instance.
    pub rank: u32,
}

/// Labels of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct InstanceLabels {
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// Base URL of the instance.
    pub instance: Arc<str>,
}

/// Labels of an instance of a metric that one role has.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WorkerLabels {
    /// Base URL of the instance.
    pub instance: Arc<str>,
}

/// The label of a route.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RouteLabels {
    /// The path, from a fixed set.
    pub route: &'static str,
}

/// One label that says where in a request's life something happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PhaseLabels {
    /// The phase, from a fixed set.
    pub phase: &'static str,
}

/// One label that says why.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabels {
    /// The reason, from a fixed set.
    pub reason: &'static str,
}

/// One label that says what requests wait for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WaitLabels {
    /// `requests` or `slots`.
    pub wait: &'static str,
}

/// One label that says what became of something.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabels {
    /// The outcome, from a fixed set.
    pub outcome: &'static str,
}

/// One label for a revision.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RevisionLabels {
    /// As its workers tell it.
    pub revision: Arc<str>,
}

/// One label for the leg.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RoleLabels {
    /// `prefill` or `decode`.
    pub role: &'static str,
}

/// Labels of a prefill worker and a decode worker that had to do with each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PairLabels {
    /// Base URL of the prefill instance, or `other`.
    pub prefill: Arc<str>,
    /// Base URL of the decode instance, or `other`.
    pub decode: Arc<str>,
}
