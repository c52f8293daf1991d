//! What a transport is: the traits that `process`, `verbs`, `tcp` and `mori` implement.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::plan::Route;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::Endpoints;

use crate::error::TransportError;
use crate::memory::LocalMemory;
use crate::waker::Waker;

/// Transports that exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TransportName {
    /// `process_vm_readv` on one host.
    Process,
    /// RDMA by libibverbs.
    Verbs,
    /// TCP.
    Tcp,
    /// AMD's MoRI-IO engine.
    Mori,
}

impl TransportName {
    /// As settings, logs and metrics spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Verbs => "verbs",
            Self::Tcp => "tcp",
            Self::Mori => "mori",
        }
    }
}

impl fmt::Display for TransportName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a transport can do and how much it takes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The holder's processor takes no part, so the reader fences by the holder's lease page.
    pub one_sided: bool,
    /// Most runs of one batch.
    pub batch_runs_max: usize,
    /// Most bytes of one batch, and of each run in it.
    pub batch_bytes_max: u64,
    /// Most batches posted and not completed.
    pub in_flight_max: usize,
}

/// One source rank: where it is, how it can be read, and where its memory lies.
///
/// No call takes a peer beside it. A session is found by the route, a connection dials the source,
/// a read is of the source, an acknowledgement goes to the engine that granted the lease:
///
/// ```no_run
/// # use std::sync::Arc;
/// # use hetero_kv_core::ids::*;
/// # use hetero_kv_core::plan::{Route, RankPlan, Owner};
/// # use hetero_kv_core::time::Time;
/// # use hetero_kv_core::wire::card::Endpoints;
/// # use hetero_kv_core::wire::message::Ack;
/// # use hetero_kv_transport::error::TransportError;
/// # use hetero_kv_transport::memory::LocalMemory;
/// # use hetero_kv_transport::reader::{PieceRuns, ReadPiece};
/// # use hetero_kv_transport::transport::{Connection, Interrupt, Source, Transport};
/// fn read(plan: &RankPlan, owner: &Owner, endpoints: Endpoints) -> ReadPiece {
///     let route = plan.routes(owner, PpRank(0)).remove(0);
///     let source = Source { route, endpoints, regions: Vec::new() };
///     ReadPiece { source: Arc::new(source), runs: PieceRuns::Listed(Vec::new()) }
/// }
///
/// fn dial(
///     transport: &dyn Transport,
///     source: &Source,
///     memory: Arc<LocalMemory>,
///     deadline: Time,
///     interrupt: &Interrupt<'_>,
/// ) -> Result<Box<dyn Connection>, TransportError> {
///     transport.connect(source, memory, deadline, interrupt)
/// }
///
/// fn acknowledge(transfer_id: TransferId) -> Ack {
///     Ack { transfer_id, ranks: vec![(TpRank(0), PpRank(0))], number: None }
/// }
/// ```
///
/// None of these compiles with a second one named beside it. A session:
///
/// ```compile_fail,E0560
/// # use std::sync::Arc;
/// # use hetero_kv_core::ids::*;
/// # use hetero_kv_core::plan::{Route, RankPlan, Owner};
/// # use hetero_kv_core::time::Time;
/// # use hetero_kv_core::wire::card::Endpoints;
/// # use hetero_kv_core::wire::message::Ack;
/// # use hetero_kv_transport::error::TransportError;
/// # use hetero_kv_transport::memory::LocalMemory;
/// # use hetero_kv_transport::reader::{PieceRuns, ReadPiece};
/// # use hetero_kv_transport::transport::{Connection, Interrupt, Source, Transport};
/// fn source(route: Route, engine: EngineId, endpoints: Endpoints) -> Source {
///     Source { route, engine, endpoints, regions: Vec::new() }
/// }
/// ```
///
/// a dialled address:
///
/// ```compile_fail,E0061
/// # use std::sync::Arc;
/// # use hetero_kv_core::ids::*;
/// # use hetero_kv_core::plan::{Route, RankPlan, Owner};
/// # use hetero_kv_core::time::Time;
/// # use hetero_kv_core::wire::card::Endpoints;
/// # use hetero_kv_core::wire::message::Ack;
/// # use hetero_kv_transport::error::TransportError;
/// # use hetero_kv_transport::memory::LocalMemory;
/// # use hetero_kv_transport::reader::{PieceRuns, ReadPiece};
/// # use hetero_kv_transport::transport::{Connection, Interrupt, Source, Transport};
/// fn dial(
///     transport: &dyn Transport,
///     source: &Source,
///     tp_rank: TpRank,
///     memory: Arc<LocalMemory>,
///     deadline: Time,
///     interrupt: &Interrupt<'_>,
/// ) -> Result<Box<dyn Connection>, TransportError> {
///     transport.connect(source, tp_rank, memory, deadline, interrupt)
/// }
/// ```
///
/// a read:
///
/// ```compile_fail,E0560
/// # use std::sync::Arc;
/// # use hetero_kv_core::ids::*;
/// # use hetero_kv_core::plan::{Route, RankPlan, Owner};
/// # use hetero_kv_core::time::Time;
/// # use hetero_kv_core::wire::card::Endpoints;
/// # use hetero_kv_core::wire::message::Ack;
/// # use hetero_kv_transport::error::TransportError;
/// # use hetero_kv_transport::memory::LocalMemory;
/// # use hetero_kv_transport::reader::{PieceRuns, ReadPiece};
/// # use hetero_kv_transport::transport::{Connection, Interrupt, Source, Transport};
/// fn read(source: Arc<Source>, tp_rank: TpRank) -> ReadPiece {
///     ReadPiece { source, tp_rank, runs: PieceRuns::Listed(Vec::new()) }
/// }
/// ```
///
/// an acknowledgement:
///
/// ```compile_fail,E0560
/// # use std::sync::Arc;
/// # use hetero_kv_core::ids::*;
/// # use hetero_kv_core::plan::{Route, RankPlan, Owner};
/// # use hetero_kv_core::time::Time;
/// # use hetero_kv_core::wire::card::Endpoints;
/// # use hetero_kv_core::wire::message::Ack;
/// # use hetero_kv_transport::error::TransportError;
/// # use hetero_kv_transport::memory::LocalMemory;
/// # use hetero_kv_transport::reader::{PieceRuns, ReadPiece};
/// # use hetero_kv_transport::transport::{Connection, Interrupt, Source, Transport};
/// fn acknowledge(transfer_id: TransferId, engine: EngineId) -> Ack {
///     Ack { transfer_id, engine, ranks: vec![(TpRank(0), PpRank(0))], number: None }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Which rank.
    pub route: Route,
    /// Ways to read it, as it announced them.
    pub endpoints: Endpoints,
    /// Its regions, as it announced them; [`Run::source_region`] indexes them.
    pub regions: Vec<MemoryRegion>,
}

/// Runs to read under one lease.
#[derive(Clone, Debug)]
pub struct ReadBatch {
    /// The caller's number; the completion carries it.
    pub ticket: u64,
    /// Lease to fence by.
    pub lease: LeaseRef,
    /// Runs, of which the batch is a part.
    pub runs: Arc<[Run]>,
    /// The batch's part of `runs`.
    pub range: Range<usize>,
}

impl ReadBatch {
    /// The batch's runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs[self.range.clone()]
    }
}

/// The end of one batch. Nothing writes its destination any more.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The batch's number.
    pub ticket: u64,
    /// `Ok`: every byte has arrived, and the lease stood after the last one was read.
    pub outcome: Result<(), TransportError>,
}

/// Ends a blocking step early.
pub struct Interrupt<'a> {
    /// Set whenever the answer of `should_stop` may have changed. The step clears it.
    pub waker: &'a Waker,
    /// Whether the step is to end with [`crate::error::ReadFailureKind::Cancelled`].
    pub should_stop: &'a dyn Fn() -> bool,
}

/// A way to read memory of other processes.
pub trait Transport: Send + Sync {
    /// Its name.
    fn name(&self) -> TransportName;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Whether the source offers it at all.
    fn offered(&self, endpoints: &Endpoints) -> bool;

    /// Reaches the source and proves that it is the one its route names. Blocks until `deadline`
    /// at most; only the session's own thread calls it.
    fn connect(
        &self,
        source: &Source,
        memory: Arc<LocalMemory>,
        deadline: Time,
        interrupt: &Interrupt<'_>,
    ) -> Result<Box<dyn Connection>, TransportError>;
}

/// A relation to one source rank, used by one thread.
///
/// - Each posted batch is completed exactly once, unless the connection fails or is quiesced.
/// - Batches complete in the order they were posted.
/// - The destination of a batch is written only between its post and its completion.
/// - After an error from [`Self::poll`] the connection is good for
///   [`Self::cancel_and_quiesce`] only.
pub trait Connection: Send {
    /// Which transport it is of.
    fn transport(&self) -> TransportName;

    /// Whom it really speaks to, asked of the system and not of the plan: the address of the
    /// socket's other end, or `pid N`. `None` where a transport cannot tell.
    fn dialled(&self) -> Option<Arc<str>> {
        None
    }

    /// Takes a batch. Never blocks and never waits for the peer. The caller keeps to the
    /// transport's [`Capabilities`]; a batch with a run outside the memory of either side is
    /// refused and not posted, the others go on.
    fn post(&mut self, batch: ReadBatch) -> Result<(), TransportError>;

    /// Moves bytes, and sleeps while there are none to move: until something completes, `waker` is
    /// set or `timeout` passes. A transport whose work is done by this very call returns at least
    /// each [`POLL_BYTES_MAX`], so that a cancel is seen.
    fn poll(
        &mut self,
        timeout: Duration,
        waker: &Waker,
        completions: &mut Vec<Completion>,
    ) -> Result<(), TransportError>;

    /// Gives up everything posted. On `Ok` nothing writes any destination of this connection any
    /// more, and the connection may be dropped; on [`crate::error::ReadFailureKind::NotQuiesced`]
    /// it may still, and the call is to be repeated.
    fn cancel_and_quiesce(&mut self, deadline: Time) -> Result<(), TransportError>;
}

/// Most bytes moved by one call of [`Connection::poll`].
pub const POLL_BYTES_MAX: usize = 8 << 20;

/// A route as logs and errors write it.
pub(crate) fn describe(route: &Route) -> String {
    format!(
        "engine {} (incarnation {}) dp {} tp {} pp {}",
        route.engine(),
        route.incarnation(),
        route.dp_rank(),
        route.tp_rank(),
        route.pp_rank()
    )
}
