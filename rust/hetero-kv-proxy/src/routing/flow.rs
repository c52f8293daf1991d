//! One request's prefill and decode legs: what follows from each outcome.
//!
//! The caller performs the legs, in the order of its connector, and reports; this machine holds the
//! retry budget and the rules.

use super::{InstanceIndex, Role};

/// Retries allowed for one leg of one request. One is enough to step over a dead instance (health
/// then keeps the rest of the traffic away from it) and cannot multiply load.
pub const RETRIES_MAX_PER_LEG: u32 = 1;

/// How a leg failed before its response head.
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

/// What to do when prefill answers 200 without a usable `kv_transfer_params`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMissingKv {
    /// Fail the request: a silent recompute hides a broken deployment.
    Fail,
    /// Let decode compute the prompt, and count it.
    Recompute,
}

/// The retry budget and rules of one request.
#[derive(Debug, Clone)]
pub struct Flow {
    on_missing_kv: OnMissingKv,
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
    pub fn new(on_missing_kv: OnMissingKv) -> Self {
        Self {
            on_missing_kv,
            prefill: Tries::default(),
            decode: Tries::default(),
        }
    }

    /// A leg failed at `instance` before its response head; `instances` is the size of the pool.
    pub fn leg_failed(
        &mut self,
        role: Role,
        failure: LegFailure,
        instance: InstanceIndex,
        instances: usize,
    ) -> AfterFailure {
        let tries = match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
        };
        if tries.retries >= RETRIES_MAX_PER_LEG {
            return AfterFailure::GiveUp;
        }
        let elsewhere = instances > 1;
        let step = match (role, failure) {
            (Role::Prefill | Role::Decode, LegFailure::Reset { reused: true }) => {
                AfterFailure::RetryFresh
            }
            (Role::Prefill, LegFailure::Connect | LegFailure::Reset { reused: false })
            | (Role::Decode, LegFailure::Connect) => {
                if elsewhere {
                    AfterFailure::RetryElsewhere
                } else {
                    AfterFailure::GiveUp
                }
            }
            // The decode engine may have taken the request: its connector may have released the
            // blocks, and the same params would then name blocks that are gone.
            (Role::Decode, LegFailure::Reset { reused: false }) => AfterFailure::GiveUp,
        };
        match step {
            AfterFailure::RetryElsewhere => {
                tries.retries += 1;
                tries.failed.retain(|known| *known != instance);
                tries.failed.push(instance);
            }
            AfterFailure::RetryFresh => tries.retries += 1,
            AfterFailure::GiveUp => {}
        }
        step
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
            match self.on_missing_kv {
                OnMissingKv::Fail => AfterPrefill::MissingKv,
                OnMissingKv::Recompute => AfterPrefill::Recompute,
            }
        }
    }
}
