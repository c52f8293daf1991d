//! One request's prefill and decode legs: what follows from each outcome.
//!
//! The caller performs the legs, in the order of its connector, and reports; this machine holds the
//! retry budget and the rules.

use super::{InstanceIndex, Role};

/// What one request's legs go by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowRules {
    /// Whether a prefill answer without a KV handle fails the request: decode would compute the prompt
    /// again, and hide a broken deployment.
    pub require_kv: bool,
    /// Retries of one leg of one request.
    pub retries_max: u32,
    /// Whether the connector itself refuses a handle whose blocks were read and freed. Where it does
    /// not, a decode leg that may have been taken is never sent again: the second engine would read
    /// whatever is in those blocks by then.
    pub refuses_second_read: bool,
}

/// How a leg failed before an answer that could be passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegFailure {
    /// No connection: the engine has not seen the request.
    Connect,
    /// The connection broke before a response head.
    Reset {
        /// The connection had served an earlier leg. The engine then almost surely closed it for
        /// idleness at the moment of sending, and has not seen the request.
        reused: bool,
    },
    /// It was answered with a status that says that the engine does not take it at present, or
    /// that what stands in front of it got no answer.
    Refused {
        /// 429, 502, 503 or 504; no other is tried again.
        status: u16,
    },
}

/// One failed leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailedLeg {
    /// Which leg.
    pub role: Role,
    /// How it failed.
    pub failure: LegFailure,
    /// Whether it carried the handle of a prefill's blocks.
    pub has_handle: bool,
    /// The instance that failed it.
    pub instance: InstanceIndex,
}

/// What to do after a failed leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterFailure {
    /// Try again on another instance.
    RetryElsewhere,
    /// Try again on any instance, over a connection that was opened for it.
    RetryFresh,
    /// Answer with an error.
    GiveUp,
}

/// What to do with a prefill answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterPrefill {
    /// Send the decode leg with the params.
    HandOver,
    /// Send the decode leg without params: decode computes the prompt itself.
    Recompute,
    /// As [`AfterPrefill::Recompute`]: prefill's one token was the whole answer, for which its
    /// connector kept no blocks. Nothing is wrong, and decode gives that answer.
    RecomputeStopped,
    /// Give the client this answer as it is.
    PassOn,
    /// Answer that the KV handle is missing.
    MissingKv,
}

/// The retry budget and rules of one request.
#[derive(Debug, Clone)]
pub struct Flow {
    rules: FlowRules,
    prefill: Tries,
    decode: Tries,
}

/// Where one leg was tried.
#[derive(Debug, Clone, Default)]
struct Tries {
    retries: u32,
    /// Instances that failed it, the last one last.
    failed: Vec<InstanceIndex>,
}

impl Flow {
    /// A request without a leg yet.
    pub fn new(rules: FlowRules) -> Self {
        Self {
            rules,
            prefill: Tries::default(),
            decode: Tries::default(),
        }
    }

    /// A leg failed; `instances` is the size of the pool.
    pub fn leg_failed(&mut self, leg: FailedLeg, instances: usize) -> AfterFailure {
        let step = match (leg.failure, self.may_be_taken(&leg)) {
            (_, true) => AfterFailure::GiveUp,
            (LegFailure::Reset { reused: true }, false) => AfterFailure::RetryFresh,
            (
                LegFailure::Connect
                | LegFailure::Reset { reused: false }
                | LegFailure::Refused {
                    status: 429 | 502..=504,
                },
                false,
            ) if instances > 1 => AfterFailure::RetryElsewhere,
            (
                LegFailure::Connect
                | LegFailure::Reset { reused: false }
                | LegFailure::Refused { .. },
                false,
            ) => AfterFailure::GiveUp,
        };
        let tries = match leg.role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
        };
        if tries.retries >= self.rules.retries_max {
            return AfterFailure::GiveUp;
        }
        match step {
            AfterFailure::RetryElsewhere => {
                tries.retries += 1;
                tries.failed.retain(|known| *known != leg.instance);
                tries.failed.push(leg.instance);
            }
            AfterFailure::RetryFresh => tries.retries += 1,
            AfterFailure::GiveUp => {}
        }
        step
    }

    /// Whether a leg that is sent again could do harm: the engine that failed it may have taken it.
    ///
    /// A prefill leg that is sent again has a new transfer id, and what the first pinned is freed by
    /// its lease. A decode engine that took its leg may have read the blocks, and freed them.
    fn may_be_taken(&self, leg: &FailedLeg) -> bool {
        let read_twice = leg.has_handle && !self.rules.refuses_second_read;
        match (leg.role, leg.failure) {
            (Role::Prefill, _) | (Role::Decode, LegFailure::Connect) => false,
            (Role::Decode, LegFailure::Reset { reused: false }) => true,
            // Almost surely closed for idleness; "almost" is not enough where nobody would notice.
            (Role::Decode, LegFailure::Reset { reused: true }) => read_twice,
            (Role::Decode, LegFailure::Refused { status }) => match status {
                // Decided before any work is done.
                429 => false,
                // A gateway says it of an engine that broke off, too.
                503 => read_twice,
                // The words of a gateway about a leg that it had sent.
                _ => true,
            },
        }
    }

    /// The instances to avoid in the next try of a leg, the last one last.
    pub fn tried(&self, role: Role) -> &[InstanceIndex] {
        match role {
            Role::Prefill => &self.prefill.failed,
            Role::Decode => &self.decode.failed,
        }
    }

    /// Prefill answered with `status`; `has_handle` says whether the body says that blocks are
    /// kept, `stopped` whether it ended by itself and not for its token limit.
    pub fn prefill_answered(&self, status: u16, has_handle: bool, stopped: bool) -> AfterPrefill {
        if !(200..300).contains(&status) {
            AfterPrefill::PassOn
        } else if has_handle {
            AfterPrefill::HandOver
        } else if stopped {
            AfterPrefill::RecomputeStopped
        } else {
            match self.rules.require_kv {
                true => AfterPrefill::MissingKv,
                false => AfterPrefill::Recompute,
            }
        }
    }
}
