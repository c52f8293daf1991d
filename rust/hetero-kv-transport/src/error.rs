//! What goes wrong while KV is moved: a kind to branch on, and a text to report.

use std::fmt;
use std::io;

/// What happened, for callers to branch on and metrics to label by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReadFailureKind {
    /// The lease does not stand any more: what was read is worth nothing.
    LeaseGone,
    /// The job's deadline passed.
    Deadline,
    /// The caller cancelled the job.
    Cancelled,
    /// The source was reached and is lost: its process ended or its connection broke.
    PeerLost,
    /// The source could not be reached.
    Unreachable,
    /// The source refuses: another engine or rank is there, or it serves as many as it may.
    Refused,
    /// A run lies outside the memory of one side.
    OutOfBounds,
    /// The engine at the source's address is another start of it.
    Incarnation,
    /// Something may still write the destination.
    NotQuiesced,
    /// This process lacks what it needs: descriptors, threads, mapped memory.
    Local,
}

impl ReadFailureKind {
    /// Every kind.
    pub const ALL: &[Self] = &[
        Self::LeaseGone,
        Self::Deadline,
        Self::Cancelled,
        Self::PeerLost,
        Self::Unreachable,
        Self::Refused,
        Self::OutOfBounds,
        Self::Incarnation,
        Self::NotQuiesced,
        Self::Local,
    ];

    /// Its name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LeaseGone => "lease_gone",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::PeerLost => "peer_lost",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::OutOfBounds => "out_of_bounds",
            Self::Incarnation => "incarnation",
            Self::NotQuiesced => "not_quiesced",
            Self::Local => "local",
        }
    }

    /// Who has to change for it to go well.
    pub fn origin(self) -> ErrorOrigin {
        match self {
            Self::Deadline
            | Self::Cancelled
            | Self::OutOfBounds
            | Self::NotQuiesced
            | Self::Local => ErrorOrigin::Local,
            Self::LeaseGone | Self::Refused | Self::Incarnation => ErrorOrigin::Peer,
            Self::PeerLost | Self::Unreachable => ErrorOrigin::Transport,
        }
    }

    /// Whether the same read can go well if it is tried again.
    pub fn retry(self) -> Retry {
        match self {
            Self::LeaseGone
            | Self::Deadline
            | Self::Cancelled
            | Self::OutOfBounds
            | Self::Incarnation
            | Self::NotQuiesced => Retry::Never,
            Self::PeerLost | Self::Unreachable | Self::Refused => Retry::Elsewhere,
            Self::Local => Retry::Same,
        }
    }
}

impl fmt::Display for ReadFailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where an error comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorOrigin {
    /// This process or its caller.
    Local,
    /// The other side's answer.
    Peer,
    /// What lies between.
    Transport,
}

/// Whether trying again makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The same read fails again.
    Never,
    /// The same read from the same source may go well later.
    Same,
    /// Another holder of the same bytes may serve it.
    Elsewhere,
}

/// A failure of one transport: its kind, the call that failed, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {problem}")]
pub struct TransportError {
    /// To branch on.
    pub kind: ReadFailureKind,
    /// System call or step that failed, in the words of its manual page.
    pub call: &'static str,
    /// For the log.
    pub problem: String,
}

impl TransportError {
    /// An error of this kind.
    pub fn new(kind: ReadFailureKind, call: &'static str, problem: impl Into<String>) -> Self {
        Self {
            kind,
            call,
            problem: problem.into(),
        }
    }

    /// An error that a system call gave.
    pub(crate) fn system(kind: ReadFailureKind, call: &'static str, error: io::Error) -> Self {
        Self::new(kind, call, error.to_string())
    }

    /// Where it comes from.
    pub fn origin(&self) -> ErrorOrigin {
        self.kind.origin()
    }

    /// Whether trying again makes sense.
    pub fn retry(&self) -> Retry {
        self.kind.retry()
    }
}
