//! What a decode worker uses: jobs go in, each comes out done exactly once.
//!
//! A job reads one prompt's KV from one or several source ranks. Each source has a session: a
//! thread of its own and a connection, started by the first job, so that a source that stalls
//! delays nobody else's reads. A job is reported done, well or not, only when nothing can write its
//! destination any more.

mod choose;
mod job;
mod session;
mod stats;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use hetero_kv_core::auth::Keys;
use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::memory::Run;
use hetero_kv_core::plan::{PlannedRead, Route};
use hetero_kv_core::time::Time;

pub use choose::{PassedOver, TransportChoice};
pub use job::{JobDone, ReadFailure, SourceRead};
pub use stats::{PeerStats, ReaderStats};

use crate::clock::{now, time_left};
use crate::error::ReadFailureKind;
use crate::memory::LocalMemory;
use crate::mori::MoriTransport;
use crate::transport::{Source, TransportName};
use crate::verbs;
use job::{DoneQueue, Job};
use session::{Session, SessionHandle};
use work::Piece;

/// How a reader behaves.
#[derive(Clone)]
pub struct ReaderOptions {
    /// Which transport to use.
    pub choice: TransportChoice,
    /// The device that `verbs` reads by; it has the reader's memory registered.
    pub verbs: Option<Arc<verbs::Node>>,
    /// The MoRI-IO engine, for [`TransportChoice::Mori`].
    pub mori: Option<Arc<MoriTransport>>,
    /// What holders have to prove, and this reader to them, over `tcp` and for `verbs`.
    pub keys: Option<Keys>,
    /// Longest time to reach a source.
    pub connect_timeout: Duration,
    /// Time in which a stopped job has to be quiescent; later it counts as unquiesced, is logged
    /// as an error and stays undone until it is.
    pub quiesce_timeout: Duration,
    /// A session without a job for so long ends.
    pub session_idle_timeout: Duration,
    /// Most sessions at once.
    pub sessions_max: usize,
    /// Most jobs at once.
    pub jobs_max: usize,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            choice: TransportChoice::Auto,
            verbs: None,
            mori: None,
            keys: None,
            connect_timeout: Duration::from_secs(5),
            quiesce_timeout: Duration::from_secs(10),
            session_idle_timeout: Duration::from_secs(600),
            sessions_max: 256,
            jobs_max: 16_384,
        }
    }
}

/// What to read for one prompt.
#[derive(Debug)]
pub struct ReadJob {
    /// The caller's number; no other job that is not drained yet may have it.
    pub id: u64,
    /// Lease to fence by, on every source.
    pub lease: LeaseRef,
    /// When the lease may end: checked before each post and after the last completion.
    pub deadline: Time,
    /// What to read from where; pieces of the same source are read in order.
    pub pieces: Vec<ReadPiece>,
}

/// What to read from one source.
#[derive(Debug)]
pub struct ReadPiece {
    /// The source.
    pub source: Arc<Source>,
    /// The runs to copy.
    pub runs: PieceRuns,
}

/// Runs of a piece. A list of them may be megabytes, and vLLM's thread has no time to make it.
#[derive(Debug)]
pub enum PieceRuns {
    /// As they are.
    Listed(Vec<Run>),
    /// Made by the session's thread.
    Planned(Box<PlannedRead>),
}

impl PieceRuns {
    fn is_empty(&self) -> bool {
        match self {
            Self::Listed(runs) => runs.is_empty(),
            Self::Planned(read) => read.bytes() == 0,
        }
    }

    fn list(self) -> Vec<Run> {
        match self {
            Self::Listed(runs) => runs,
            Self::Planned(read) => read.emit().runs,
        }
    }
}

impl From<Vec<Run>> for PieceRuns {
    fn from(runs: Vec<Run>) -> Self {
        Self::Listed(runs)
    }
}

/// Why a job is not taken. Nothing of it was started.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// This process was forked from the one that made the reader, and has none of its threads.
    #[error(
        "the reader belongs to process {owner}; this forked child, process {here}, has to make its \
         own"
    )]
    Forked {
        /// Process that made it.
        owner: u32,
        /// This process.
        here: u32,
    },
    /// The reader was shut down.
    #[error("the reader is shut down")]
    ShutDown,
    /// A job of this number is not drained yet.
    #[error("a job of id {0} is not drained yet")]
    DuplicateId(u64),
    /// As many jobs as there may be.
    #[error("{0} jobs are in flight, which is the limit")]
    TooManyJobs(usize),
    /// As many sources as there may be, and all of them busy: later there may be room.
    #[error("{0} sources are being read, which is the limit (sources_max)")]
    TooManySources(usize),
    /// The job alone reads more sources than there may be.
    #[error("a read of {sources} sources is over the limit of {most} (sources_max)")]
    MoreSourcesThanMost {
        /// Of the job.
        sources: usize,
        /// The limit.
        most: usize,
    },
    /// No thread or descriptor is left.
    #[error("cannot start a reading thread: {0}")]
    Start(io::Error),
}

/// Something may still write memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{sessions} reading threads have not ended in time; memory they read into must stay mapped"
)]
pub struct NotQuiesced {
    /// Threads that are left.
    pub sessions: usize,
}

/// What sessions share with the reader.
struct Shared {
    memory: Arc<LocalMemory>,
    options: ReaderOptions,
    done: Arc<DoneQueue>,
    /// See [`ReaderStats::passed_over`]; kept here since sessions end.
    passed_over: Mutex<BTreeMap<(TransportName, PassedOver), u64>>,
    /// Session threads that have not ended.
    live: Mutex<usize>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    jobs: BTreeMap<u64, Arc<Job>>,
    sessions: BTreeMap<Route, Arc<SessionHandle>>,
    shut_down: bool,
}

/// Reads KV from source ranks into this process's memory.
pub struct Reader {
    shared: Arc<Shared>,
    state: Mutex<State>,
    pid: u32,
}

impl Reader {
    /// A reader into `memory`. It starts nothing until the first job.
    pub fn start(memory: Arc<LocalMemory>, options: ReaderOptions) -> Self {
        Self {
            shared: Arc::new(Shared {
                memory,
                options,
                done: Arc::default(),
                passed_over: Mutex::default(),
                live: Mutex::new(0),
                ended: Condvar::new(),
            }),
            state: Mutex::default(),
            pid: std::process::id(),
        }
    }

    /// Takes a job. Its destination is the reader's until the job is drained as done.
    pub fn submit(&self, job: ReadJob) -> Result<(), SubmitError> {
        if self.forked() {
            return Err(SubmitError::Forked {
                owner: self.pid,
                here: std::process::id(),
            });
        }
        let mut state = self.lock();
        if state.shut_down {
            return Err(SubmitError::ShutDown);
        }
        if state.jobs.contains_key(&job.id) {
            return Err(SubmitError::DuplicateId(job.id));
        }
        let jobs_max = self.shared.options.jobs_max;
        if state.jobs.len() >= jobs_max {
            return Err(SubmitError::TooManyJobs(jobs_max));
        }
        let mut pieces = job.pieces;
        pieces.retain(|piece| !piece.runs.is_empty());
        let sources: BTreeSet<&Route> = pieces.iter().map(|piece| &piece.source.route).collect();
        let most = self.shared.options.sessions_max;
        if sources.len() > most {
            return Err(SubmitError::MoreSourcesThanMost {
                sources: sources.len(),
                most,
            });
        }
        // Held open until the pieces are in, so that none of them ends in between.
        let mut sessions = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            sessions.push(self.session(&mut state, &piece.source.route)?.hold());
        }
        let handles = sessions
            .iter()
            .map(|held| Arc::clone(held.handle()))
            .collect();
        let shared_job = Arc::new(Job::new(
            job.id,
            job.lease,
            job.deadline,
            handles,
            Arc::clone(&self.shared.done),
        ));
        state.jobs.insert(job.id, Arc::clone(&shared_job));
        if pieces.is_empty() {
            shared_job.finish_empty();
        }
        for (piece, session) in pieces.into_iter().zip(sessions) {
            session.push(Piece::new(Arc::clone(&shared_job), piece));
        }
        Ok(())
    }

    /// Moves a job's deadline after its lease was renewed; whether the job is in flight.
    pub fn extend(&self, id: u64, deadline: Time) -> bool {
        !self.forked()
            && self
                .lock()
                .jobs
                .get(&id)
                .is_some_and(|job| job.extend(deadline))
    }

    /// Stops a job. It is reported as every other, with [`ReadFailureKind::Cancelled`] unless it
    /// had ended before. Whether a job of this id was in flight.
    pub fn cancel(&self, id: u64) -> bool {
        if self.forked() {
            return false;
        }
        let job = self.lock().jobs.get(&id).cloned();
        job.is_some_and(|job| job.stop(ReadFailureKind::Cancelled, "cancelled by the caller"))
    }

    /// Jobs that are done since the last call, in the order they became so.
    pub fn drain(&self) -> Vec<JobDone> {
        if self.forked() {
            return Vec::new();
        }
        let mut state = self.lock();
        let done = self.shared.done.take();
        for job in &done {
            state.jobs.remove(&job.id);
        }
        let jobs: Vec<Arc<Job>> = state.jobs.values().cloned().collect();
        drop(state);
        stats::report_unquiesced(&jobs, self.shared.options.quiesce_timeout);
        done
    }

    /// Waits until a job is done, [`Self::notify`] is called or the timeout passes; whether a job
    /// is done. Returns at once when one is.
    pub fn wait(&self, timeout: Duration) -> bool {
        !self.forked() && self.shared.done.wait(timeout)
    }

    /// Ends the wait of every thread that waits, or the next one.
    pub fn notify(&self) {
        if !self.forked() {
            self.shared.done.notify();
        }
    }

    /// Gauges and counters.
    pub fn stats(&self) -> ReaderStats {
        if self.forked() {
            return ReaderStats::default();
        }
        let mut state = self.lock();
        state.sessions.retain(|_, session| !session.closed());
        let jobs: Vec<Arc<Job>> = state.jobs.values().cloned().collect();
        let sessions: Vec<Arc<SessionHandle>> = state.sessions.values().cloned().collect();
        drop(state);
        ReaderStats {
            jobs_in_flight: jobs.iter().filter(|job| !job.done()).count(),
            jobs_unquiesced: stats::report_unquiesced(&jobs, self.shared.options.quiesce_timeout),
            sessions: *self.live(),
            peers: sessions.iter().map(|session| session.stats()).collect(),
            passed_over: self
                .shared
                .passed_over
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
        }
    }

    /// Stops every job and ends every session. After `Ok` nothing writes this process's memory any
    /// more; jobs that were in flight can still be drained.
    pub fn shutdown(&self, deadline: Time) -> Result<(), NotQuiesced> {
        if self.forked() {
            return Ok(());
        }
        let (jobs, sessions): (Vec<_>, Vec<_>) = {
            let mut state = self.lock();
            state.shut_down = true;
            (
                state.jobs.values().cloned().collect(),
                state.sessions.values().cloned().collect(),
            )
        };
        for job in jobs {
            job.stop(ReadFailureKind::Cancelled, "the reader shuts down");
        }
        for session in sessions {
            session.retire();
        }
        let mut live = self.live();
        while *live > 0 {
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(NotQuiesced { sessions: *live });
            }
            (live, _) = self
                .shared
                .ended
                .wait_timeout(live, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// The open session of a route, started if there is none.
    fn session(&self, state: &mut State, route: &Route) -> Result<Arc<SessionHandle>, SubmitError> {
        if let Some(session) = state.sessions.get(route)
            && !session.closed()
        {
            return Ok(Arc::clone(session));
        }
        state.sessions.retain(|_, session| !session.closed());
        let most = self.shared.options.sessions_max;
        if state.sessions.len() >= most {
            let idle = state.sessions.values().find(|session| session.idle());
            idle.ok_or(SubmitError::TooManySources(most))?.retire();
        }
        // An engine started anew takes the place of its former start, whose rank is gone.
        for (other, session) in &state.sessions {
            if same_place(other, route) {
                session.retire();
            }
        }
        let handle = Arc::new(SessionHandle::new(route.clone()).map_err(SubmitError::Start)?);
        let session = Session::new(Arc::clone(&handle), Arc::clone(&self.shared));
        *self.live() += 1;
        let name = format!("hkv-read-{}", route.tp_rank());
        if let Err(error) = thread::Builder::new().name(name).spawn(|| session.run()) {
            *self.live() -= 1;
            return Err(SubmitError::Start(error));
        }
        state.sessions.insert(route.clone(), Arc::clone(&handle));
        Ok(handle)
    }

    fn forked(&self) -> bool {
        self.pid != std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> MutexGuard<'_, usize> {
        self.shared
            .live
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let deadline = now() + self.shared.options.quiesce_timeout;
        if let Err(error) = self.shutdown(deadline) {
            tracing::error!(%error, "the reader is dropped while it may still write");
        }
    }
}

/// Whether two routes differ in nothing but the incarnation.
fn same_place(one: &Route, other: &Route) -> bool {
    one.engine() == other.engine()
        && one.dp_rank() == other.dp_rank()
        && one.tp_rank() == other.tp_rank()
        && one.pp_rank() == other.pp_rank()
}
