//! What a run writes down: the first broken invariant, what happened how often, and the trace.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use hetero_kv_core::failure::FailureReason;
use hetero_kv_core::time::Time;

use crate::fault::Fault;

macro_rules! invariants {
    ($($(#[$doc:meta])* $name:ident = $label:literal,)*) => {
        /// What has to hold after every event, and at the end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Invariant {
            $($(#[$doc])* $name,)*
        }

        impl Invariant {
            /// Every one.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// As reports and mutants name it.
            pub fn label(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                }
            }
        }
    };
}

invariants! {
    /// A token is decoded from bytes that are not its prompt's at its place.
    ForeignByte = "foreign-byte",
    /// Blocks of decode are freed, re-used or computed into while a read can still write them.
    FreedUnderWriter = "freed-under-writer",
    /// A lease ends on a prefill rank while a reader whose time is not over reads under it.
    ReleasedUnderReader = "released-under-reader",
    /// Blocks of prefill are freed while a lease page still vouches for them.
    FreedBeforeBump = "freed-before-bump",
    /// A lease page does not hold the epoch of a lease that is alive.
    LeaseNotOnPage = "lease-not-on-page",
    /// A release is ordered that nothing justifies: neither a complete set, nor every claimant's
    /// release, nor lease and grace being over.
    ReleasedEarly = "released-early",
    /// A lease is over by the rules, and its release is not ordered.
    ReleasedLate = "released-late",
    /// The requests whose blocks prefill holds are not those under a lease.
    PinnedUnlikeLeased = "pinned-unlike-leased",
    /// A claim or renewal is answered otherwise than the rules say.
    AnsweredWrongly = "answered-wrongly",
    /// A prefill takes a transfer id that another has or had.
    IdTaken = "id-taken",
    /// Engines pair though another start of the engine was meant.
    PairedWithWrongStart = "paired-with-wrong-start",
    /// A rank reports a load as read though the part of one of its sources failed, did not land whole
    /// and once, or was not fenced after its last byte.
    ReadUnproven = "read-unproven",
    /// Workers are told to read without a grant, or other blocks than were granted.
    ReadWithoutGrant = "read-without-grant",
    /// Workers are told to read for longer than was granted, counted from the question.
    ReadBeyondGrant = "read-beyond-grant",
    /// A rank reports an id that vLLM does not wait for, or twice.
    StrayReport = "stray-report",
    /// A request gets other tokens from outside than it has to: computed here in silence, or loaded
    /// again after its load.
    WrongMatch = "wrong-match",
    /// A load fails, and nothing that went wrong in this run explains it.
    UnexplainedFailure = "unexplained-failure",
    /// A lease runs out, and nothing that went wrong in this run explains it.
    UnexplainedExpiry = "unexplained-expiry",
    /// A request waits for its load longer than all limits together allow.
    WaitsTooLong = "waits-too-long",
    /// A machine asks for a timer that is over, or a run never ends.
    Spins = "spins",
    /// Trouble is over, and something has not ended or is still held.
    NotConverged = "not-converged",
}

/// The first broken invariant of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub invariant: Invariant,
    /// When, in true time.
    pub at: Time,
    /// What exactly.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} at {:.6} s: {}",
            self.invariant.label(),
            self.at.since_origin().as_secs_f64(),
            self.text
        )
    }
}

/// How a request's decode leg ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// With the right answer, from KV that was moved.
    Answered,
    /// With the right answer, computed on decode as the rules say.
    Computed,
    /// With the right answer, computed on decode because the load failed.
    Recomputed,
    /// With an error, for a reason.
    Failed(FailureReason),
    /// The client left.
    Aborted,
    /// Its engine was killed.
    EngineLost,
    /// vLLM rejected it.
    Rejected,
}

/// What happened in a run, or in many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Trouble by kind.
    pub faults: BTreeMap<Fault, u64>,
    /// Ends of decode legs.
    pub outcomes: BTreeMap<Outcome, u64>,
    /// Loads failed, by reason, recomputed or not.
    pub failures: BTreeMap<FailureReason, u64>,
    /// Anything else worth knowing.
    pub events: BTreeMap<&'static str, u64>,
    /// Most blocks of one prefill engine under leases at once.
    pub pinned_blocks_max: u64,
}

impl Coverage {
    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        for (key, count) in &other.faults {
            *self.faults.entry(*key).or_default() += count;
        }
        for (key, count) in &other.outcomes {
            *self.outcomes.entry(*key).or_default() += count;
        }
        for (key, count) in &other.failures {
            *self.failures.entry(*key).or_default() += count;
        }
        for (key, count) in &other.events {
            *self.events.entry(key).or_default() += count;
        }
        self.pinned_blocks_max = self.pinned_blocks_max.max(other.pinned_blocks_max);
    }

    /// Kinds of trouble that never happened.
    pub fn missing(&self) -> Vec<Fault> {
        Fault::ALL
            .iter()
            .copied()
            .filter(|fault| !self.faults.contains_key(fault))
            .collect()
    }
}

/// Lines of trace kept.
const TRACE_LINES_MAX: usize = 4000;

pub(crate) struct Book {
    pub(crate) now: Time,
    pub(crate) violation: Option<Violation>,
    pub(crate) coverage: Coverage,
    enabled: BTreeSet<Fault>,
    trace: Option<VecDeque<String>>,
}

impl Book {
    pub(crate) fn new(enabled: BTreeSet<Fault>, traced: bool) -> Self {
        Self {
            now: Time::ZERO,
            violation: None,
            coverage: Coverage::default(),
            enabled,
            trace: traced.then(VecDeque::new),
        }
    }

    /// Whether this trouble may come in this run.
    pub(crate) fn may(&self, fault: Fault) -> bool {
        self.enabled.contains(&fault)
    }

    /// From here on nothing goes wrong.
    pub(crate) fn heal(&mut self) {
        self.enabled.clear();
    }

    pub(crate) fn happened(&mut self, fault: Fault) {
        *self.coverage.faults.entry(fault).or_default() += 1;
        self.trace(|| format!("FAULT {fault}"));
    }

    pub(crate) fn any_happened(&self, of: &[Fault]) -> bool {
        of.iter()
            .any(|fault| self.coverage.faults.contains_key(fault))
    }

    pub(crate) fn count(&mut self, event: &'static str) {
        *self.coverage.events.entry(event).or_default() += 1;
    }

    /// The first one stands.
    pub(crate) fn broken(&mut self, invariant: Invariant, text: String) {
        self.trace(|| format!("BROKEN {}: {text}", invariant.label()));
        if self.violation.is_none() {
            self.violation = Some(Violation {
                invariant,
                at: self.now,
                text,
            });
        }
    }

    /// A load failed; it has to have an explanation.
    pub(crate) fn load_failed(&mut self, reason: FailureReason, explained: bool, text: &str) {
        *self.coverage.failures.entry(reason).or_default() += 1;
        if !explained && !self.any_happened(&crate::fault::explains(reason)) {
            self.broken(
                Invariant::UnexplainedFailure,
                format!("{text}: {}", reason.label()),
            );
        }
    }

    pub(crate) fn trace(&mut self, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.trace {
            if lines.len() == TRACE_LINES_MAX {
                lines.pop_front();
            }
            let at = self.now.since_origin().as_secs_f64();
            lines.push_back(format!("{at:10.6}  {}", line()));
        }
    }

    pub(crate) fn take_trace(&mut self) -> Vec<String> {
        self.trace.take().map(Vec::from).unwrap_or_default()
    }
}
