//! What a worker side has done, step by step.

use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::failure::Failure;
use hetero_kv_core::ids::{BlockId, EngineId, TpRank, TransferId};
use hetero_kv_core::plan::Route;
use hetero_kv_core::step::LoadOrder;
use hetero_kv_core::time::Time;

use crate::reader::ReaderStats;
use crate::tcp::ServerStats;

/// What a step has finished, each id exactly once per rank.
#[derive(Clone, Debug, Default)]
pub struct StepResults {
    /// For vLLM's `finished_sending`.
    pub sent: Vec<String>,
    /// For vLLM's `finished_recving`.
    pub received: Vec<LoadReport>,
}

/// One load's end on this rank.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// vLLM's internal id.
    pub request_id: String,
    /// `None` for a load that was never started.
    pub transfer_id: Option<TransferId>,
    /// The engine read; `None` for a load that was never started.
    pub engine: Option<EngineId>,
    /// `None`: every byte arrived and was proven right.
    pub failure: Option<Failure>,
    /// Whether the scheduler side ordered the failure, and has counted it.
    pub ordered: bool,
    /// Blocks that hold nothing usable when the load failed.
    pub invalid_blocks: Vec<BlockId>,
    /// Bytes that the plan moves.
    pub planned_bytes: u64,
    /// Bytes moved by source.
    pub reads: Vec<SourceRead>,
    /// The source rank that was lost or out of reach, when that is why it failed.
    pub lost_source: Option<TpRank>,
    /// When this rank was given the order, on the host's monotonic clock; `None` for a load that was
    /// never started.
    pub ordered_at: Option<Time>,
    /// From order to end: waiting for a session, reading and proving. Zero for a load that was never
    /// started.
    pub elapsed: Duration,
}

impl LoadReport {
    /// Of a load that never began on this rank.
    pub(super) fn unread(order: LoadOrder, failure: Failure) -> Self {
        Self {
            request_id: order.request_id,
            transfer_id: Some(order.transfer_id),
            engine: None,
            failure: Some(failure),
            ordered: false,
            invalid_blocks: order.dest_blocks,
            planned_bytes: 0,
            reads: Vec::new(),
            lost_source: None,
            ordered_at: None,
            elapsed: Duration::ZERO,
        }
    }
}

/// Bytes read from one source rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceRead {
    /// The source rank.
    pub route: Route,
    /// Key of the session that read it; `None` when none had taken it up.
    pub session: Option<Route>,
    /// The other end of its connection, as the system says: `ADDRESS:PORT`, or `pid N`.
    pub dialled: Option<Arc<str>>,
    /// Bytes.
    pub bytes: u64,
    /// Transport that moved them.
    pub transport: &'static str,
}

/// A moment's figures of the worker side.
#[derive(Clone, Debug, Default)]
pub struct WorkerFigures {
    /// Of the reader.
    pub reader: Option<ReaderStats>,
    /// Of the data listener.
    pub server: Option<ServerStats>,
}
