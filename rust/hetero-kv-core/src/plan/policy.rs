//! The RFC's way of choosing a source, for comparison with the default.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a consumer chooses among equal holders.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum SourcePolicy {
    /// By a hash of the transfer id: uniform in any pair of shapes, and nothing to keep in step.
    #[default]
    Hash,
    /// As RFC #46107: in turn behind [`RoundRobinGate`], outside of it one fixed holder.
    RoundRobin,
}

impl fmt::Display for SourcePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hash => "hash",
            Self::RoundRobin => "round_robin",
        })
    }
}

/// A policy that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("source_policy is neither hash nor round_robin")]
pub struct UnknownPolicy;

impl FromStr for SourcePolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        match text {
            "hash" => Ok(Self::Hash),
            "round_robin" => Ok(Self::RoundRobin),
            _ => Err(UnknownPolicy),
        }
    }
}

/// When RFC #46107 lets a consumer take holders in turn: it reads alone (decode world size 1), every
/// rank of the prefill instance has all it wants (one latent, prefill dp 1), and there are several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundRobinGate {
    /// TP x PP workers of one decode engine.
    pub decode_world_size: u32,
    /// Whether the model's KV is one latent.
    pub mla: bool,
    /// Data parallel ranks of the prefill instance.
    pub prefill_dp: u32,
    /// Tensor parallel ranks of one prefill engine.
    pub prefill_tp: u32,
}

impl RoundRobinGate {
    /// Whether holders are taken in turn; otherwise the mapping is fixed.
    pub fn is_open(&self) -> bool {
        self.decode_world_size == 1 && self.mla && self.prefill_dp == 1 && self.prefill_tp > 1
    }
}
