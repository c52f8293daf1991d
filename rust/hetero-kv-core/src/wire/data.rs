//! Messages of the data plane's listener, between one reading rank and one source rank.
//!
//! ```text
//! reader                     holder
//! Attach                ->
//!                       <-   Attached | AttachRefused (and the connection ends)
//!                            | AttachChallenge, where keys are set
//! AttachProof           ->
//!                       <-   Attached | AttachRefused
//! Fetch (several ahead) ->
//!                       <-   FetchData, then exactly `bytes` raw bytes   (only of a living lease)
//!                       <-   FetchEnd
//! ```
//!
//! Answers come in the order of the fetches. The raw bytes follow the frame without a header of
//! their own, in the order of the fetch's runs, so that both sides move them straight between the
//! socket and KV memory.
//!
//! `verbs` makes its queue pairs over such a connection, and keeps it: when it closes, whoever
//! closed it, both sides end their queue pairs.
//!
//! ```text
//! Attach                ->
//!                       <-   Attached
//! VerbsConnect          ->
//!                       <-   VerbsConnected | VerbsRefused (and the connection ends)
//! ```

use serde::{Deserialize, Serialize};

use crate::ids::{DpRank, EngineId, Epoch, Incarnation, LeaseRef, PpRank, Slot, TpRank};

/// Most runs in one fetch: enough that a fetch of 4 KiB blocks is 4 MiB, and few enough that a
/// holder allocates at most 24 KiB for a request.
pub const FETCH_RUNS_MAX: usize = 1024;

/// Most bytes in one fetch: what a reader that cancels has to wait for, or throw away.
pub const FETCH_BYTES_MAX: u64 = 4 << 20;

/// Largest payload of a data plane frame: an answer with the lengths of 4096 regions of 9 msgpack
/// bytes each; a fetch of [`FETCH_RUNS_MAX`] runs of 24 bytes stays below it.
pub const DATA_FRAME_BYTES_MAX: usize = 64 << 10;

/// First frame of a connection: who the reader believes to have dialled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Engine of the source rank.
    pub engine: EngineId,
    /// Start of that engine.
    pub incarnation: Incarnation,
    /// Data parallel rank.
    pub dp_rank: DpRank,
    /// Tensor parallel rank.
    pub tp_rank: TpRank,
    /// Pipeline rank.
    pub pp_rank: PpRank,
    /// Of a reader with a key, as in [`super::message::Hello`].
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub nonce: Option<Vec<u8>>,
}

/// The holder takes the connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Lengths in bytes of the holder's regions, in order.
    pub region_bytes: Vec<u64>,
    /// The holder's proof, after that of the reader; see [`crate::auth`].
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub proof: Option<Vec<u8>>,
}

/// Why a holder refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttachRefusal {
    /// Another engine listens at this address.
    Engine,
    /// The same engine, started anew.
    Incarnation,
    /// The right engine, another rank of it.
    Rank,
    /// The holder does not know its own incarnation yet; try again.
    NotReady,
    /// The holder serves as many connections as it may.
    Busy,
    /// One side has keys and the other none, or the proof is by no key of the other side.
    Unauthenticated,
    /// A code of a later version.
    #[serde(other)]
    Unknown,
}

/// The holder refuses the connection and closes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachRefused {
    /// To branch on.
    pub code: AttachRefusal,
    /// For the log: the field and both values.
    pub text: String,
}

/// A contiguous piece of one of the holder's regions: (region, offset in bytes, length in bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRun(pub u32, pub u64, pub u64);

/// Runs to read under one lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// The reader's number of this fetch; the answers carry it.
    pub id: u64,
    /// Slot of the lease.
    pub slot: Slot,
    /// Epoch that has to stand in the slot, before and after.
    pub epoch: Epoch,
    /// What to read, at most [`FETCH_RUNS_MAX`] runs and [`FETCH_BYTES_MAX`] bytes.
    pub runs: Vec<SourceRun>,
}

impl Fetch {
    /// The lease it reads under.
    pub fn lease(&self) -> LeaseRef {
        LeaseRef {
            slot: self.slot,
            epoch: self.epoch,
        }
    }
}

/// Raw bytes of a fetch follow this frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchData {
    /// The fetch.
    pub id: u64,
    /// How many raw bytes follow: the sum of the fetch's runs.
    pub bytes: u64,
}

/// Outcome of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FetchStatus {
    /// The lease stood before the first byte was read and after the last.
    Ok,
    /// The lease did not stand: bytes that came, if any, are worth nothing.
    LeaseGone,
    /// A run lies outside the holder's regions, or the fetch is over a limit.
    OutOfBounds,
}

/// Ends a fetch, after its bytes if any were sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchEnd {
    /// The fetch.
    pub id: u64,
    /// To branch on.
    pub status: FetchStatus,
    /// For the log; empty when all is well.
    pub text: String,
}

/// Most queue pairs of one connection: beyond eight or so a NIC gains nothing.
pub const QUEUE_PAIRS_MAX: usize = 16;

/// One side's ends of the queue pairs of a connection: `VerbsConnect` and `VerbsConnected`. The
/// answer has as many queue pairs as were asked for, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePairEnds {
    /// GID of the port, 16 bytes.
    #[serde(with = "serde_bytes")]
    pub gid: Vec<u8>,
    /// Local identifier of the port; 0 on Ethernet.
    pub lid: u16,
    /// Largest packet payload that the port takes, in bytes; the smaller of both sides is used.
    pub mtu_bytes: u32,
    /// Most reads in flight of one queue pair; the smaller of both sides is used.
    pub reads_in_flight_max: u8,
    /// Its queue pairs, at most [`QUEUE_PAIRS_MAX`].
    pub queue_pairs: Vec<QueuePairEnd>,
}

/// One end of a queue pair: (its number, its first packet sequence number), 24 bits each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePairEnd(pub u32, pub u32);

/// The holder makes no queue pairs, and closes the connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbsRefused {
    /// For the log.
    pub text: String,
}

#[cfg(test)]
mod tests;
