//! Choosing instances and DP ranks, and deciding what follows a failed leg.
//!
//! Pure: no socket, no clock, no randomness, no async. Time is handed in as milliseconds since a
//! start of the caller's choice.

mod auto;
mod bad_pairs;
mod breaker;
mod engine_load;
mod flow;
mod health;
mod kind;
mod line;
mod pairing;
pub mod policy;
mod registry;
mod revision;

#[cfg(test)]
mod tests;

pub use auto::{Alone, AutoRules, DECODE_LOAD_IDLE, PREFILL_LOAD_LONG, Scene};
pub use bad_pairs::{AVOID_MS, AVOID_MS_MAX, BadPairs};
pub use breaker::{Breaker, BreakerRules, LegFault, Phase};
pub use engine_load::EngineLoad;
pub use flow::{AfterFailure, AfterPrefill, FailedLeg, Flow, FlowRules, LegFailure};
pub use health::{Health, HealthRules, HealthState};
pub use kind::{Field, KindId, KindSet, Kinds, LOOPBACK, NETWORK, Traits, Unlike};
pub use line::{Full, Lane, Line, Turn, Wants};
pub use pairing::{Bound, Draw, Fit};
pub use registry::{
    Ask, InstanceSpec, InstanceView, NoSlot, Outlook, Picked, Pool, SlotId, Standing, Trust,
};
pub use registry::{PoolSettings, WORKER_WEIGHT_MAX};
pub use revision::{Drawn, REVISIONS_MAX, WEIGHT_MAX, Weights, draw_of_turn};

/// Which leg of a request an instance serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Fills the KV cache for the prompt.
    Prefill,
    /// Generates the tokens.
    Decode,
}

impl Role {
    /// The role of the other leg.
    pub fn other(self) -> Self {
        match self {
            Self::Prefill => Self::Decode,
            Self::Decode => Self::Prefill,
        }
    }

    /// The word used in metrics, logs and `/workers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Number of an instance among those of its role: flags first, in their order, then as they
/// registered. None is given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceIndex(pub usize);
