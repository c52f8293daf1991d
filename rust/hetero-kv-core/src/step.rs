//! What the scheduler side tells all workers of its engine in one step, and what they tell back.
//!
//! vLLM carries these bytes in its connector metadata: every worker gets every step, in order.

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::ids::{BlockId, Incarnation, LeaseRef, TransferId};
use crate::producer::ReleaseOrder;
use crate::wire::message::Layout;

/// A peer engine as the scheduler side numbers it; never re-used within a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PeerId(pub u64);

/// Scheduler side to workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepOrders {
    /// Producer: the engine's incarnation, drawn by the scheduler side. Readers name it when they
    /// dial a worker, so workers serve nobody before they know it.
    pub incarnation: Option<Incarnation>,
    /// Producer: bump the lease page, then report `finished_sending`.
    pub releases: Vec<ReleaseOrder>,
    /// Consumer: peers not told before, ahead of loads that name them.
    pub peers: Vec<PeerCard>,
    /// Consumer: start reading.
    pub loads: Vec<LoadOrder>,
    /// Consumer: report these as failed without reading.
    pub fails: Vec<FailOrder>,
    /// Consumer: stop these, and report them once nothing can write their blocks.
    pub cancels: Vec<CancelOrder>,
    /// Consumer: a lease was renewed.
    pub extensions: Vec<Extension>,
    /// Requests that wait for a claim or a load, or for their release: on an empty step the
    /// worker may wait a moment instead of spinning.
    pub pending: u32,
}

impl StepOrders {
    /// As they travel in vLLM's connector metadata: msgpack maps, fields by name, since a card has
    /// several fields that may be left out, and by position the ones behind would be read as those.
    pub fn encode(&self) -> Result<Vec<u8>, StepError> {
        rmp_serde::to_vec_named(self).map_err(|error| StepError(error.to_string()))
    }

    /// The inverse of [`StepOrders::encode`], by the same build in another process.
    pub fn decode(bytes: &[u8]) -> Result<Self, StepError> {
        rmp_serde::from_slice(bytes).map_err(|error| StepError(error.to_string()))
    }
}

/// Orders that cannot be encoded or decoded: two builds in one engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step orders: {0}; do all processes of this engine run the same hetero_kv?")]
pub struct StepError(String);

impl Serialize for ReleaseOrder {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (&self.request_id, self.lease).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ReleaseOrder {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (request_id, lease) = Deserialize::deserialize(deserializer)?;
        Ok(Self { request_id, lease })
    }
}

/// A peer engine's ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCard {
    /// Its number.
    pub peer: PeerId,
    /// Identity, caches, endpoints.
    pub layout: Layout,
}

/// Read one request's blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadOrder {
    /// vLLM's internal id on this side.
    pub request_id: String,
    /// Where from.
    pub peer: PeerId,
    /// Which transfer; also seeds the choice among equal holders.
    pub transfer_id: TransferId,
    /// The fence.
    pub lease: LeaseRef,
    /// Time left to the reader, in milliseconds from when the worker gets this.
    pub deadline_ms: u64,
    /// Which of several equal holders.
    pub choice: SourceChoice,
    /// One past the last token of the sequence that is wanted.
    pub past_token: u32,
    /// Tokens of a source block.
    pub source_block_tokens: u32,
    /// Index in the sequence of the first source block, in source blocks.
    pub source_first_block: u32,
    /// Source blocks that hold the tokens to load; where blocks are of one size, index by index
    /// those of `dest_blocks`.
    pub source_blocks: Vec<BlockId>,
    /// Index in the sequence of the first block of this engine.
    pub first_block: u32,
    /// Blocks of this engine.
    pub dest_blocks: Vec<BlockId>,
}

/// What the choice among equal holders depends on, beside the transfer's id. Decided once per
/// transfer, so that every rank, stage and host chooses alike, and a log line replays it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceChoice {
    /// Weights of the source ranks by tp rank; empty when all weigh the same.
    pub weights: Vec<u16>,
    /// With the policy `round_robin`: how many transfers came from this engine before.
    pub sequence: Option<u64>,
}

/// Fail one request without a read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailOrder {
    /// vLLM's internal id.
    pub request_id: String,
    /// Blocks that stay unwritten.
    pub dest_blocks: Vec<BlockId>,
    /// Why.
    pub failure: Failure,
}

/// Stop one load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelOrder {
    /// vLLM's internal id.
    pub request_id: String,
    /// Why.
    pub failure: Failure,
}

/// More time for one load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extension {
    /// vLLM's internal id.
    pub request_id: String,
    /// Time left, in milliseconds from when the worker gets this.
    pub deadline_ms: u64,
}

#[cfg(test)]
mod tests;
