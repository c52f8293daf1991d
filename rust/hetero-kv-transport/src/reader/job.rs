//! One job's life over all its pieces, and the queue it ends in.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::plan::Route;
use hetero_kv_core::time::Time;

use super::session::SessionHandle;
use crate::clock::{now, time_left};
use crate::error::{ReadFailureKind, Retry};
use crate::transport::TransportName;

/// Why a job failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {text}")]
pub struct ReadFailure {
    /// To branch on and to label metrics by.
    pub kind: ReadFailureKind,
    /// For the log: the source, the call and the reason.
    pub text: String,
    /// The source it failed at; `None` when it was no source's doing.
    pub at: Option<Route>,
}

impl ReadFailure {
    /// Whether trying again makes sense.
    pub fn retry(&self) -> Retry {
        self.kind.retry()
    }
}

/// What was read from one source for one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceRead {
    /// The source.
    pub route: Route,
    /// Key of the session that read it; `None` when none had taken it up.
    pub session: Option<Route>,
    /// What [`Connection::dialled`](crate::transport::Connection::dialled) said of the last
    /// connection that was given a batch.
    pub dialled: Option<Arc<str>>,
    /// Bytes that arrived and were fenced; less than asked when the job failed.
    pub bytes: u64,
    /// How; `None` when the source was not reached.
    pub transport: Option<TransportName>,
}

/// A job that has ended. Nothing writes its destination any more.
#[derive(Clone, Debug)]
pub struct JobDone {
    /// The job's number.
    pub id: u64,
    /// `Ok`: every byte has arrived, and the lease stood on every source after its last byte.
    pub outcome: Result<(), ReadFailure>,
    /// What came from where, one entry for each piece.
    pub reads: Vec<SourceRead>,
    /// Time from submit to here.
    pub elapsed: Duration,
    /// When that was.
    pub ended_at: Time,
}

/// A job in flight, shared by the reader and the sessions of its pieces.
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) lease: LeaseRef,
    submitted: Time,
    deadline_nanos: AtomicU64,
    /// Mirrors `failure.is_some()`, to be looked at before each post.
    stopping: AtomicBool,
    state: Mutex<JobState>,
    /// Sessions of its pieces, woken when the job is to stop.
    sessions: Vec<Arc<SessionHandle>>,
    queue: Arc<DoneQueue>,
}

struct JobState {
    pieces_left: usize,
    failure: Option<ReadFailure>,
    stopped: Option<Time>,
    reads: Vec<SourceRead>,
    done: bool,
    reported_unquiesced: bool,
}

impl Job {
    /// A job of one piece for each entry of `sessions`.
    pub(super) fn new(
        id: u64,
        lease: LeaseRef,
        deadline: Time,
        sessions: Vec<Arc<SessionHandle>>,
        queue: Arc<DoneQueue>,
    ) -> Self {
        Self {
            id,
            lease,
            submitted: now(),
            deadline_nanos: AtomicU64::new(nanos(deadline)),
            stopping: AtomicBool::new(false),
            state: Mutex::new(JobState {
                pieces_left: sessions.len(),
                failure: None,
                stopped: None,
                reads: Vec::with_capacity(sessions.len()),
                done: false,
                reported_unquiesced: false,
            }),
            sessions,
            queue,
        }
    }

    /// When it has to be done.
    pub(super) fn deadline(&self) -> Time {
        Time::from_origin(Duration::from_nanos(
            self.deadline_nanos.load(Ordering::Relaxed),
        ))
    }

    /// Moves the deadline; whether that matters any more.
    pub(super) fn extend(&self, deadline: Time) -> bool {
        self.deadline_nanos
            .store(nanos(deadline), Ordering::Relaxed);
        self.wake_sessions();
        let state = self.lock();
        !state.done && state.failure.is_none()
    }

    /// Whether nothing of it is to be posted any more. A deadline that has passed stops it.
    pub(super) fn should_stop(&self, now: Time) -> bool {
        if !self.stopping.load(Ordering::Acquire) && now >= self.deadline() {
            self.stop(
                ReadFailureKind::Deadline,
                "the lease's time was over before every byte had arrived",
            );
        }
        self.stopping.load(Ordering::Acquire)
    }

    /// Stops it for a reason that is no source's doing; the first reason stands. Whether the job
    /// had not ended before.
    pub(super) fn stop(&self, kind: ReadFailureKind, text: impl Into<String>) -> bool {
        self.fail(ReadFailure {
            kind,
            text: text.into(),
            at: None,
        })
    }

    /// Stops it for what became of one source.
    pub(super) fn stop_at(&self, source: &Route, kind: ReadFailureKind, text: impl Into<String>) {
        self.fail(ReadFailure {
            kind,
            text: text.into(),
            at: Some(source.clone()),
        });
    }

    fn fail(&self, failure: ReadFailure) -> bool {
        {
            let mut state = self.lock();
            if state.done {
                return false;
            }
            if state.failure.is_none() {
                state.failure = Some(failure);
                state.stopped = Some(now());
            }
            self.stopping.store(true, Ordering::Release);
        }
        self.wake_sessions();
        true
    }

    fn wake_sessions(&self) {
        for session in &self.sessions {
            session.wake();
        }
    }

    /// Counts a piece as quiescent. After the last one the job is done.
    pub(super) fn piece_done(&self, read: SourceRead) {
        let mut state = self.lock();
        state.reads.push(read);
        state.pieces_left -= 1;
        if state.pieces_left == 0 {
            self.finish(&mut state);
        }
    }

    /// Ends a job that has no pieces.
    pub(super) fn finish_empty(&self) {
        self.finish(&mut self.lock());
    }

    fn finish(&self, state: &mut JobState) {
        let at = now();
        if state.failure.is_none() && at >= self.deadline() {
            state.failure = Some(ReadFailure {
                kind: ReadFailureKind::Deadline,
                text: "the lease's time was over when the last byte had arrived".into(),
                at: None,
            });
        }
        state.done = true;
        self.queue.push(JobDone {
            id: self.id,
            outcome: state.failure.take().map_or(Ok(()), Err),
            reads: mem::take(&mut state.reads),
            elapsed: at.since(self.submitted),
            ended_at: at,
        });
    }

    /// Whether it has ended.
    pub(super) fn done(&self) -> bool {
        self.lock().done
    }

    /// Whether it was stopped more than `timeout` ago and has not ended; the first time that it is
    /// seen, an error is logged.
    pub(super) fn unquiesced(&self, timeout: Duration) -> bool {
        let mut state = self.lock();
        let Some(stopped) = state.stopped.filter(|_| !state.done) else {
            return false;
        };
        if now().since(stopped) <= timeout {
            return false;
        }
        let reported = mem::replace(&mut state.reported_unquiesced, true);
        let failure = state.failure.clone();
        // The session that ends this job must not wait for whoever reads the log.
        drop(state);
        if !reported {
            tracing::error!(
                job = self.id,
                ?timeout,
                ?failure,
                "a stopped read may still write its blocks; they stay held"
            );
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, JobState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn nanos(time: Time) -> u64 {
    u64::try_from(time.since_origin().as_nanos()).unwrap_or(u64::MAX)
}

/// Jobs that have ended and are not drained.
#[derive(Default)]
pub(super) struct DoneQueue {
    state: Mutex<DoneState>,
    changed: Condvar,
}

#[derive(Default)]
struct DoneState {
    done: Vec<JobDone>,
    notified: bool,
}

impl DoneQueue {
    fn push(&self, job: JobDone) {
        self.lock().done.push(job);
        self.changed.notify_all();
    }

    pub(super) fn take(&self) -> Vec<JobDone> {
        mem::take(&mut self.lock().done)
    }

    pub(super) fn notify(&self) {
        self.lock().notified = true;
        self.changed.notify_all();
    }

    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let deadline = now() + timeout;
        let mut state = self.lock();
        loop {
            let notified = mem::take(&mut state.notified);
            let left = time_left(deadline);
            if !state.done.is_empty() || notified || left.is_zero() {
                return !state.done.is_empty();
            }
            (state, _) = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, DoneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
