//! What the processes of a lab tell each other: msgpack behind a length, over pipes.
//!
//! The coordinator talks to engines, an engine to its ranks. KV and the control plane's messages
//! never go this way.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::time::Duration;

use hetero_kv_core::ids::{TpRank, TransferId};
use hetero_kv_core::plan::SourcePolicy;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::fault::Role;
use super::model::Model;
use super::span::Span;

/// Largest message: a step's orders with the cards of 64 ranks stay far below.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// One engine, as its processes are told at start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct EngineConfig {
    /// vLLM's engine id.
    pub(super) engine_id: String,
    pub(super) role: Role,
    pub(super) dp: u32,
    pub(super) dp_size: u32,
    pub(super) tp_size: u32,
    pub(super) pp_size: u32,
    pub(super) model: Model,
    pub(super) num_blocks: u32,
    pub(super) transport: Transport,
    pub(super) lease_ms: u64,
    pub(super) lease_slots: u32,
    /// Where the control listener was before a restart.
    pub(super) port: Option<u16>,
    pub(super) source_policy: SourcePolicy,
    /// 0: no read is striped.
    pub(super) stripe_bytes_min: u64,
    /// What vLLM's `kv_load_failure_policy` says.
    pub(super) recompute: bool,
    /// Ranks whose data goes through a relay that can be slowed.
    pub(super) limited: Vec<u32>,
    /// Of the bytes that blocks hold before any request.
    pub(super) seed: u64,
    /// Whether prefill tells each acknowledgement that it hears.
    pub(super) trace: bool,
}

/// Ways to read a rank in a lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Transport {
    /// The best that its probe reaches, for each pair of ranks.
    Auto,
    /// Straight from the other process's memory.
    Process,
    /// Sockets.
    Tcp,
    /// RDMA.
    Verbs,
}

impl Transport {
    /// As the flag has it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Process => "process",
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
        }
    }
}

/// One rank, as its process is told at start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RankConfig {
    pub(super) engine: EngineConfig,
    pub(super) tp_rank: u32,
    pub(super) pp_rank: u32,
}

/// A prompt by what its tokens are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Prompt {
    pub(super) salt: u64,
    pub(super) tokens: u32,
}

/// Coordinator to engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToEngine {
    Prefill {
        request: u64,
        prompt: Prompt,
        transfer_id: TransferId,
    },
    Decode {
        request: u64,
        prompt: Prompt,
        params: String,
    },
    Abort {
        request: u64,
    },
    /// Pair before any request needs it.
    Connect {
        port: u16,
        engine_id: String,
        incarnation: u64,
    },
    /// Change bytes of these ranks (`None`: all): of every prompt prefilled from here on, or of
    /// blocks of decode that nobody uses.
    Corrupt {
        tp: Option<u32>,
    },
    /// Bytes per second of these ranks' data from here on.
    Slow {
        tp: Option<u32>,
        bytes_per_s: u64,
    },
    Figures,
    /// Compare every block with what it must hold.
    Sweep,
    Stop,
}

/// Engine to coordinator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum FromEngine {
    Started {
        port: Option<u16>,
        incarnation: u64,
        ranks: Vec<RankProcess>,
    },
    StartFailed(String),
    /// `None`: not held, for the reason given.
    Prefilled {
        request: u64,
        params: Result<String, String>,
    },
    PrefillAborted {
        request: u64,
    },
    Decoded {
        request: u64,
        outcome: Outcome,
        load: Load,
    },
    Figures(Figures),
    Swept {
        mismatched_bytes: u64,
    },
    /// Transfers, in hexadecimal, whose acknowledgement came.
    Acknowledged(Vec<String>),
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct RankProcess {
    pub(super) tp: u32,
    pub(super) pp: u32,
    pub(super) pid: u32,
    /// Where it announced that it listens for reads.
    pub(super) data_port: Option<u16>,
}

/// How a request ended on decode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Outcome {
    Ok,
    /// Its KV was computed on decode.
    Recomputed(Option<Reason>),
    Cancelled,
    Failed(Reason),
}

impl Outcome {
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Recomputed(_) => "recomputed",
            Self::Cancelled => "cancelled",
            Self::Failed(_) => "failed",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reason {
    /// The metric label.
    pub(super) label: String,
    pub(super) field: String,
    pub(super) text: String,
}

/// What one request's load moved, over all ranks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Load {
    /// Bytes by (engine, tp), one entry per read.
    pub(super) reads: Vec<SourceRead>,
    pub(super) planned_bytes: u64,
    pub(super) mismatched_bytes: u64,
    /// Of each rank that was ordered to read.
    pub(super) spans: Vec<Span>,
}

impl Load {
    /// Of the slowest rank; `None` when no rank was ordered to read.
    pub(super) fn elapsed(&self) -> Option<Duration> {
        self.spans.iter().map(|span| span.elapsed()).max()
    }
}

/// A source rank as a `Route` names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct RankName {
    pub(super) engine: String,
    pub(super) incarnation: u64,
    pub(super) tp: u32,
    pub(super) pp: u32,
}

/// One rank's read of one source rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SourceRead {
    /// In hexadecimal.
    pub(super) transfer_id: String,
    /// The reading rank: tp and pp.
    pub(super) reader: (u32, u32),
    pub(super) source: RankName,
    /// Key of the session.
    pub(super) session: Option<RankName>,
    /// The other end of its connection.
    pub(super) dialled: Option<String>,
    pub(super) engine: String,
    pub(super) tp: u32,
    pub(super) bytes: u64,
    pub(super) transport: String,
    /// Why the session reads by that one; `None` when it has been given up or goes by another.
    pub(super) why: Option<String>,
}

/// A moment's figures of an engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Figures {
    pub(super) blocks_held: u32,
    pub(super) leases_alive: u64,
    pub(super) leases: BTreeMap<String, u64>,
    /// Requests and transfers the consumer still knows.
    pub(super) open: (usize, usize),
    /// Breaches of vLLM's contract.
    pub(super) violations: Vec<String>,
    pub(super) unquiesced: u64,
}

/// Engine to rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToRank {
    Step(Step),
    Corrupt(Vec<u32>),
    Slow { bytes_per_s: u64 },
    Sweep,
    Stop,
}

/// One step of the engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Step {
    /// The scheduler side's orders, encoded.
    #[serde(with = "serde_bytes")]
    pub(super) orders: Vec<u8>,
    /// Prompts computed in this step.
    pub(super) fills: Vec<Fill>,
    /// Prompts of loads that orders to come will name.
    pub(super) expected: Vec<(String, u64)>,
    /// How long to wait for a finished read.
    pub(super) wait_ms: u64,
}

/// Computes a prompt's KV into blocks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Fill {
    pub(super) content: u64,
    pub(super) blocks: Vec<u32>,
}

/// Rank to engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum FromRank {
    Started {
        #[serde(with = "serde_bytes")]
        card: Vec<u8>,
    },
    StartFailed(String),
    Stepped(Stepped),
    Swept {
        mismatched_bytes: u64,
    },
    /// Done, nothing to say.
    Done,
}

/// What a rank reports of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Stepped {
    pub(super) sent: Vec<String>,
    pub(super) received: Vec<Received>,
    /// Bytes of blocks about to be loaded that were not as their last use left them.
    pub(super) mismatched_bytes: u64,
    pub(super) unquiesced: u64,
}

/// One load's end on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Received {
    pub(super) request_id: String,
    pub(super) failure: Option<Reason>,
    /// The source rank that was lost or out of reach, when that is why it failed.
    pub(super) lost_source: Option<TpRank>,
    pub(super) load: Load,
}

/// Writes one message.
pub(super) fn send<M: Serialize>(to: &mut impl Write, message: &M) -> io::Result<()> {
    let payload = rmp_serde::to_vec(message).map_err(io::Error::other)?;
    if payload.len() > MESSAGE_BYTES_MAX {
        return Err(io::Error::other("a message of the lab is too long"));
    }
    let length = u32::try_from(payload.len()).map_err(io::Error::other)?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(&payload)?;
    to.flush()
}

/// Reads one message; an end of the stream is an error of kind `UnexpectedEof`.
pub(super) fn receive<M: DeserializeOwned>(from: &mut impl Read) -> io::Result<M> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::other("a message of the lab is too long"));
    }
    let mut payload = vec![0; length];
    from.read_exact(&mut payload)?;
    rmp_serde::from_slice(&payload).map_err(io::Error::other)
}
