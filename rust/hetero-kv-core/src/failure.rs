//! Why one request's load fails: a code and a field to count by, and a text for the log.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What went wrong, branched on and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureReason {
    /// `kv_transfer_params` cannot be used.
    BadParams,
    /// The prompt is not the one that was prefilled, and `require_kv` is set.
    DigestMismatch,
    /// The prefill engine cannot be reached.
    Unreachable,
    /// The pair was refused in the handshake.
    PairRefused,
    /// The prefill engine does not know the lease, or it is over.
    LeaseGone,
    /// No answer to the claim in time.
    ClaimTimeout,
    /// The lease ran out while the load waited or ran.
    LeaseExpired,
    /// The load took too long.
    LoadTimeout,
    /// The prefill engine or its connection died.
    PeerLost,
    /// The holder's lease page says the blocks are not the lease's any more.
    Fenced,
    /// The plan cannot be carried out on this pair of caches.
    Plan,
    /// The transport failed.
    Transport,
    /// The request was aborted.
    Cancelled,
}

impl FailureReason {
    /// Every reason, for metrics that exist from the start.
    pub const ALL: &[Self] = &[
        Self::BadParams,
        Self::DigestMismatch,
        Self::Unreachable,
        Self::PairRefused,
        Self::LeaseGone,
        Self::ClaimTimeout,
        Self::LeaseExpired,
        Self::LoadTimeout,
        Self::PeerLost,
        Self::Fenced,
        Self::Plan,
        Self::Transport,
        Self::Cancelled,
    ];

    /// As a metric label.
    pub fn label(self) -> &'static str {
        match self {
            Self::BadParams => "bad_params",
            Self::DigestMismatch => "digest_mismatch",
            Self::Unreachable => "unreachable",
            Self::PairRefused => "pair_refused",
            Self::LeaseGone => "lease_gone",
            Self::ClaimTimeout => "claim_timeout",
            Self::LeaseExpired => "lease_expired",
            Self::LoadTimeout => "load_timeout",
            Self::PeerLost => "peer_lost",
            Self::Fenced => "fenced",
            Self::Plan => "plan",
            Self::Transport => "transport",
            Self::Cancelled => "cancelled",
        }
    }
}

/// One load's failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For branching and counting.
    pub reason: FailureReason,
    /// The params key or compatibility field at fault; empty where none is.
    pub field: String,
    /// For people.
    pub text: String,
}

impl Failure {
    /// A failure without a field at fault.
    pub fn new(reason: FailureReason, text: impl Into<String>) -> Self {
        Self {
            reason,
            field: String::new(),
            text: text.into(),
        }
    }

    /// A failure of one field.
    pub fn of_field(
        reason: FailureReason,
        field: impl Into<String>,
        text: impl Into<String>,
    ) -> Self {
        Self {
            reason,
            field: field.into(),
            text: text.into(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason.label(), self.text)
    }
}
