//! One source rank's session: a thread, a connection, and the pieces that are read over it.
//!
//! Pieces take turns, a batch each, so a long read does not hold up a short one. When a job is to
//! stop while a batch of it is in flight, the connection is quiesced and given up; what other jobs
//! had in flight on it is posted again on the next one. Reads have no side effects, so posting
//! again is safe.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hetero_kv_core::plan::Route;
use hetero_kv_core::time::Time;
use rustix::event::{PollFd, PollFlags, poll};

use super::Shared;
use super::choose::{self, Chosen, TransportChoice};
use super::stats::PeerStats;
use super::work::Piece;
use crate::clock::{now, time_left, timespec};
use crate::error::{ReadFailureKind, TransportError};
use crate::lines::{Cause, Lines};
use crate::transport::{Completion, Interrupt, ReadBatch, Source, TransportName, describe};
use crate::waker::Waker;

/// Longest time to reach a source again that was just lost. A host that lives answers at once; one
/// that is gone has to be told so within two seconds.
const RECONNECT_TIMEOUT: Duration = Duration::from_millis(1500);

/// Pause after the first attempt to quiesce that failed; each one after it is twice as long, up to
/// [`QUIESCE_PAUSE_MAX`]. A device that refuses does so at once, and asked without a pause it would
/// take a processor and fill the log.
const QUIESCE_PAUSE_MIN: Duration = Duration::from_millis(20);

/// Longest pause between attempts to quiesce.
const QUIESCE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// What the reader holds of a session.
pub(super) struct SessionHandle {
    route: Route,
    mailbox: Mutex<Mailbox>,
    waker: Waker,
    chosen: Mutex<(Option<TransportName>, String)>,
    connects: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Default)]
struct Mailbox {
    pieces: VecDeque<Piece>,
    /// Submitters that are about to push.
    holds: usize,
    /// Pieces that the thread has taken and not ended.
    taken: usize,
    /// End when there is nothing left to do.
    retire: bool,
    /// The thread takes nothing any more.
    closed: bool,
}

impl SessionHandle {
    pub(super) fn new(route: Route) -> io::Result<Self> {
        Ok(Self {
            route,
            mailbox: Mutex::default(),
            waker: Waker::new()?,
            chosen: Mutex::default(),
            connects: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    /// Keeps the session open until the hold is used or dropped.
    pub(super) fn hold(self: Arc<Self>) -> Hold {
        self.lock().holds += 1;
        Hold { handle: self }
    }

    /// Makes the thread look at its jobs.
    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    /// Whether its thread takes no piece any more.
    pub(super) fn closed(&self) -> bool {
        self.lock().closed
    }

    /// Whether it has nothing to do and is not about to end.
    pub(super) fn idle(&self) -> bool {
        let mailbox = self.lock();
        let nothing = mailbox.pieces.is_empty() && mailbox.holds == 0 && mailbox.taken == 0;
        nothing && !mailbox.retire
    }

    /// Ends the session as soon as it has nothing to do.
    pub(super) fn retire(&self) {
        self.lock().retire = true;
        self.wake();
    }

    pub(super) fn stats(&self) -> PeerStats {
        let (transport, why) = self
            .chosen
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        PeerStats {
            route: self.route.clone(),
            transport,
            why,
            reconnects: self.connects.load(Ordering::Relaxed).saturating_sub(1),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A promise to push a piece, or not to.
pub(super) struct Hold {
    handle: Arc<SessionHandle>,
}

impl Hold {
    pub(super) fn handle(&self) -> &Arc<SessionHandle> {
        &self.handle
    }

    pub(super) fn push(self, piece: Piece) {
        self.handle.lock().pieces.push_back(piece);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.handle.lock().holds -= 1;
        self.handle.wake();
    }
}

/// A batch in flight.
struct Posted {
    ticket: u64,
    /// Key of its piece.
    key: u64,
    range: Range<usize>,
}

struct Active {
    key: u64,
    piece: Piece,
}

/// A connection that could not be quiesced.
#[derive(Clone, Copy, Debug)]
struct Unquiet {
    /// When it is tried again.
    again_at: Time,
    /// From the attempt before until then.
    pause: Duration,
}

/// What the session's thread owns. The connection is dropped before the pieces, which count as
/// quiescent when they are dropped.
pub(super) struct Session {
    connection: Option<Chosen>,
    posted: VecDeque<Posted>,
    pieces: VecDeque<Active>,
    next_key: u64,
    next_ticket: u64,
    /// When the attempt to connect began; it may be interrupted and taken up again.
    connecting_since: Option<Time>,
    /// Whether the last connection was lost, and not given up by us.
    lost: bool,
    /// Set while the connection is given up and may still write: nothing else is done with it.
    unquiet: Option<Unquiet>,
    /// Lines of the log that the source may still cause.
    lines: Lines,
    handle: Arc<SessionHandle>,
    shared: Arc<Shared>,
}

impl Session {
    pub(super) fn new(handle: Arc<SessionHandle>, shared: Arc<Shared>) -> Self {
        Self {
            connection: None,
            posted: VecDeque::new(),
            pieces: VecDeque::new(),
            next_key: 0,
            next_ticket: 0,
            connecting_since: None,
            lost: false,
            unquiet: None,
            lines: Lines::default(),
            handle,
            shared,
        }
    }

    /// The thread's life: until it was idle for long, or is retired.
    pub(super) fn run(self) {
        // Also after a panic, so that no submitter waits for a dead thread and no shutdown either.
        // It is dropped last: whoever sees the thread ended may unmap what the connection wrote.
        let _ending = Ending(Arc::clone(&self.handle), Arc::clone(&self.shared));
        let mut session = self;
        session.work();
    }

    fn work(&mut self) {
        let mut idle_since = now();
        loop {
            self.take_mail();
            self.end_stopped();
            if self.pieces.is_empty() {
                self.connecting_since = None;
                let idle_left =
                    (idle_since + self.shared.options.session_idle_timeout).since(now());
                if self.close_if_idle(idle_left.is_zero()) {
                    return;
                }
                self.sleep(idle_left);
                continue;
            }
            idle_since = now();
            if self.unquiet.is_some() {
                // Pieces that are not posted still end when their time is over.
                let at = now();
                let waiting = |active: &&Active| !active.piece.job.should_stop(at);
                let deadlines = self.pieces.iter().filter(waiting);
                let first = deadlines.map(|active| active.piece.job.deadline()).min();
                self.wait_for_quiet(first.map_or(QUIESCE_PAUSE_MAX, time_left));
                continue;
            }
            if self.connection.is_none() {
                // It may have used up a wake, so mail and stopped jobs come first again.
                self.connect();
                continue;
            }
            self.post();
            self.poll();
        }
    }

    fn take_mail(&mut self) {
        self.handle.waker.clear();
        let arrived = {
            let mut mailbox = self.handle.lock();
            let arrived = mem::take(&mut mailbox.pieces);
            mailbox.taken += arrived.len();
            arrived
        };
        for mut piece in arrived {
            piece.session = Some(self.handle.route.clone());
            // Of a job that is over nothing is read, and its list of runs may be megabytes.
            if !piece.job.should_stop(now())
                && let Err(problem) = piece.prepare(&self.shared.memory)
            {
                let from = describe(&piece.source.route);
                piece
                    .job
                    .stop(ReadFailureKind::OutOfBounds, format!("{from}: {problem}"));
            }
            self.pieces.push_back(Active {
                key: self.next_key,
                piece,
            });
            self.next_key += 1;
        }
    }

    /// Ends the pieces whose jobs are to stop, once nothing writes their destinations.
    fn end_stopped(&mut self) {
        let at = now();
        let stopping = |active: &Active| active.piece.job.should_stop(at);
        if self.unquiet.is_none()
            && self
                .pieces
                .iter()
                .any(|active| stopping(active) && active.piece.posted())
        {
            self.give_up_connection(None);
        }
        for _ in 0..self.pieces.len() {
            let Some(active) = self.pieces.pop_front() else {
                break;
            };
            if stopping(&active) && !active.piece.posted() {
                self.end(active.piece);
            } else {
                self.pieces.push_back(active);
            }
        }
    }

    fn end(&self, piece: Piece) {
        drop(piece);
        self.handle.lock().taken -= 1;
    }

    /// Quiesces the connection and drops it; what was in flight is to be posted again. A
    /// connection that cannot be quiesced yet stays, and its pieces stay in flight: nobody knows
    /// for how long, so their jobs fail, by what broke it where something did.
    fn give_up_connection(&mut self, broken_by: Option<&TransportError>) {
        let Some(chosen) = &mut self.connection else {
            return;
        };
        let deadline = now() + self.shared.options.quiesce_timeout;
        if let Err(error) = chosen.connection.cancel_and_quiesce(deadline) {
            let pause = match self.unquiet {
                Some(before) => (before.pause * 2).min(QUIESCE_PAUSE_MAX),
                None => {
                    // Once: it is tried until it succeeds.
                    tracing::error!(
                        route = %describe(&self.handle.route),
                        %error,
                        "a connection may still write; its blocks stay held"
                    );
                    QUIESCE_PAUSE_MIN
                }
            };
            self.unquiet = Some(Unquiet {
                again_at: now() + pause,
                pause,
            });
            let told = broken_by.unwrap_or(&error);
            for Active { piece, .. } in self.pieces.iter().filter(|active| active.piece.posted()) {
                let text = format!("{}: {told}", describe(&self.handle.route));
                piece.job.stop_at(&piece.source.route, told.kind, text);
            }
            return;
        }
        if self.unquiet.take().is_some() {
            tracing::warn!(
                route = %describe(&self.handle.route),
                "a connection that might have written is quiet"
            );
        }
        self.connection = None;
        for active in &mut self.pieces {
            let first = self
                .posted
                .iter()
                .filter(|posted| posted.key == active.key)
                .map(|posted| posted.range.start)
                .min();
            if let Some(first) = first {
                active.piece.post_again_from(first);
            }
        }
        self.posted.clear();
    }

    /// Quiesces the connection that may still write once its pause is over; sleeps for it until
    /// there is mail, at most `timeout`.
    fn wait_for_quiet(&mut self, timeout: Duration) {
        let Some(unquiet) = self.unquiet else {
            return;
        };
        let left = time_left(unquiet.again_at);
        if left.is_zero() {
            self.give_up_connection(None);
        } else {
            self.wait_for_mail(left.min(timeout));
        }
    }

    fn wait_for_mail(&self, timeout: Duration) {
        let mut fds = [PollFd::new(&self.handle.waker, PollFlags::IN)];
        // An interrupted wait only makes the loop go round once more.
        let _ = poll(&mut fds, Some(&timespec(timeout)));
    }

    /// Closes the mailbox when it is empty and the session is retired or its idle time over.
    fn close_if_idle(&self, idle_over: bool) -> bool {
        let mut mailbox = self.handle.lock();
        let nothing = mailbox.pieces.is_empty() && mailbox.holds == 0;
        if nothing && (idle_over || mailbox.retire) {
            mailbox.closed = true;
        }
        mailbox.closed
    }

    /// Sleeps until there is mail or the peer ends.
    fn sleep(&mut self, timeout: Duration) {
        if self.unquiet.is_some() {
            self.wait_for_quiet(timeout);
            return;
        }
        let Some(chosen) = &mut self.connection else {
            self.wait_for_mail(timeout);
            return;
        };
        let mut none = Vec::new();
        let result = chosen
            .connection
            .poll(timeout, &self.handle.waker, &mut none);
        if let Err(error) = result {
            tracing::info!(route = %describe(&self.handle.route), %error, "idle session lost");
            self.give_up_connection(None);
        }
    }

    fn connect(&mut self) {
        let Some(active) = self.pieces.front() else {
            return;
        };
        let source = Arc::clone(&active.piece.source);
        let options = &self.shared.options;
        let timeout = if self.lost {
            RECONNECT_TIMEOUT.min(options.connect_timeout)
        } else {
            options.connect_timeout
        };
        let since = *self.connecting_since.get_or_insert_with(now);
        let deadline = since + timeout;
        // A job whose own time is over earlier has to be ended then, and the attempt goes on.
        let first_job = self.pieces.iter().map(|active| active.piece.job.deadline());
        let pause_at = first_job
            .min()
            .map_or(deadline, |first| first.min(deadline));
        let interrupt = Interrupt {
            waker: &self.handle.waker,
            should_stop: &|| {
                let at = now();
                self.pieces
                    .iter()
                    .any(|active| active.piece.job.should_stop(at))
            },
        };
        let result = choose::connect(options, &source, &self.shared.memory, pause_at, &interrupt);
        match result {
            Ok(chosen) => self.connected(chosen),
            Err(error) if error.kind == ReadFailureKind::Cancelled => {}
            Err(_) if pause_at < deadline && time_left(pause_at).is_zero() => {}
            Err(error) => self.not_connected(&source, error),
        }
    }

    fn connected(&mut self, chosen: Chosen) {
        let transport = chosen.connection.transport();
        self.connecting_since = None;
        let before = self.handle.connects.fetch_add(1, Ordering::Relaxed);
        if self.shared.options.choice == TransportChoice::Auto {
            let mut counts = self
                .shared
                .passed_over
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            for &better in &chosen.passed_over {
                *counts.entry(better).or_default() += 1;
            }
        }
        let known = {
            let mut known = self
                .handle
                .chosen
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            mem::replace(&mut *known, (Some(transport), chosen.why.clone()))
        };
        if known.0 != Some(transport) {
            tracing::info!(
                route = %describe(&self.handle.route),
                %transport,
                why = chosen.why,
                "source reached"
            );
        } else if before > 0 {
            tracing::debug!(route = %describe(&self.handle.route), %transport, "reached again");
        }
        self.connection = Some(chosen);
    }

    /// Fails every piece: each of them would meet the same.
    fn not_connected(&mut self, source: &Source, error: TransportError) {
        self.connecting_since = None;
        self.lost = false;
        // A source that was reached once, and now is not, is lost.
        let reached_before = self.handle.connects.load(Ordering::Relaxed) > 0;
        let kind = if error.kind == ReadFailureKind::Unreachable && reached_before {
            ReadFailureKind::PeerLost
        } else {
            error.kind
        };
        let text = format!("{}: {error}", describe(&source.route));
        if let Some(unlogged) = self.lines.due(Cause::Source, now()) {
            tracing::warn!(%kind, text, unlogged, "source not reached");
        }
        for active in &self.pieces {
            active.piece.job.stop_at(&source.route, kind, text.clone());
        }
    }

    /// Fills the connection with batches, one of each piece in turn.
    fn post(&mut self) {
        let Some(chosen) = &mut self.connection else {
            return;
        };
        let mut without_work = 0;
        while self.posted.len() < chosen.capabilities.in_flight_max
            && without_work < self.pieces.len()
        {
            self.pieces.rotate_left(1);
            let Some(Active { key, piece }) = self.pieces.back_mut() else {
                return;
            };
            if !piece.has_more() || piece.job.should_stop(now()) {
                without_work += 1;
                continue;
            }
            without_work = 0;
            piece.transport = Some(chosen.connection.transport());
            piece.dialled = chosen.connection.dialled();
            let range = piece.next_batch(&chosen.capabilities);
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            let batch = ReadBatch {
                ticket,
                lease: piece.job.lease,
                runs: Arc::clone(&piece.runs),
                range: range.clone(),
            };
            match chosen.connection.post(batch) {
                Ok(()) => self.posted.push_back(Posted {
                    ticket,
                    key: *key,
                    range,
                }),
                Err(error) => {
                    piece.completed(range, false);
                    let route = &piece.source.route;
                    piece.job.stop_at(route, error.kind, error.to_string());
                }
            }
        }
    }

    fn poll(&mut self) {
        let Some(chosen) = &mut self.connection else {
            return;
        };
        let first_deadline = self
            .pieces
            .iter()
            .map(|active| active.piece.job.deadline())
            .min();
        let timeout = first_deadline.map_or(Duration::ZERO, time_left);
        let mut completions = Vec::new();
        let result = chosen
            .connection
            .poll(timeout, &self.handle.waker, &mut completions);
        for completion in completions {
            self.completed(completion);
        }
        if let Err(error) = result {
            self.connection_failed(&error);
        }
    }

    fn completed(&mut self, completion: Completion) {
        let Some(at) = self
            .posted
            .iter()
            .position(|posted| posted.ticket == completion.ticket)
        else {
            tracing::error!(
                ticket = completion.ticket,
                "a batch completed that was not posted"
            );
            return;
        };
        let Some(posted) = self.posted.remove(at) else {
            return;
        };
        let Some(index) = self
            .pieces
            .iter()
            .position(|active| active.key == posted.key)
        else {
            return;
        };
        self.lost = false;
        let piece = &mut self.pieces[index].piece;
        let arrived = piece.completed(posted.range, completion.outcome.is_ok());
        self.handle.bytes.fetch_add(arrived, Ordering::Relaxed);
        if let Err(error) = completion.outcome {
            let text = format!("{}: {error}", describe(&piece.source.route));
            piece.job.stop_at(&piece.source.route, error.kind, text);
        }
        if piece.complete()
            && let Some(active) = self.pieces.remove(index)
        {
            self.end(active.piece);
        }
    }

    /// The connection broke. What it had in flight is tried once more on a new one: an idle
    /// connection may have been closed long ago, and a peer that is really gone refuses at once.
    fn connection_failed(&mut self, error: &TransportError) {
        let text = format!("{}: {error}", describe(&self.handle.route));
        if let Some(unlogged) = self.lines.due(Cause::Source, now()) {
            tracing::warn!(text, unlogged, "connection lost");
        }
        for active in &mut self.pieces {
            let piece = &mut active.piece;
            if !piece.posted() {
                continue;
            }
            if piece.lost_once || error.kind != ReadFailureKind::PeerLost {
                let route = &piece.source.route;
                piece.job.stop_at(route, error.kind, text.clone());
            }
            piece.lost_once = true;
        }
        self.lost = true;
        self.give_up_connection(Some(error));
    }
}

/// Closes the session when its thread ends, however it ends.
struct Ending(Arc<SessionHandle>, Arc<Shared>);

impl Drop for Ending {
    fn drop(&mut self) {
        let Self(handle, shared) = self;
        let left = {
            let mut mailbox = handle.lock();
            mailbox.closed = true;
            mem::take(&mut mailbox.pieces)
        };
        drop(left);
        *shared.live.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        shared.ended.notify_all();
    }
}

#[cfg(test)]
mod tests;
