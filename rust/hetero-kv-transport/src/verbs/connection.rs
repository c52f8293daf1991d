//! The reading end: batches become reads that the device carries out by itself; this thread posts
//! them and sleeps until one has ended.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::VerbsEndpoint;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::completion::{CompletionQueue, WorkCompletion};
use super::error::{Verb, VerbsError, WorkFailure};
use super::lane::{Batch, Finished, Lane};
use super::memory::Words;
use super::node::{BATCH_REQUESTS_MAX, Node};
use super::work::{self, Outside};
use crate::clock::{now, time_left, timespec};
use crate::error::{ReadFailureKind, TransportError};
use crate::fence::AnnouncedPage;
use crate::tcp::attach::AttachedStream;
use crate::transport::{Completion, Connection, Interrupt, ReadBatch, TransportName};
use crate::waker::Waker;

/// Batches of one queue pair that are taken and not completed: one in the device, one behind it.
pub(super) const BATCHES_PER_QUEUE_PAIR: usize = 2;

/// A batch in the order of posting, and its end once it is known.
struct Taken {
    ticket: u64,
    outcome: Option<Result<(), TransportError>>,
}

/// A connection whose way was probed.
pub(super) struct VerbsConnection {
    /// Dropped first: afterwards the device writes neither words nor KV memory for it.
    lanes: Vec<Lane>,
    words: Words,
    /// Pairs of words that no batch uses.
    free_words: Vec<usize>,
    queue: Arc<CompletionQueue>,
    /// Closed when either side ends; `None` once it was given up.
    stream: Option<AttachedStream>,
    peer: VerbsEndpoint,
    peer_regions: Vec<MemoryRegion>,
    taken: VecDeque<Taken>,
    next_lane: usize,
    requests_max: usize,
    /// Why nothing more is to be expected of it.
    failed: Option<TransportError>,
    found: Vec<WorkCompletion>,
    node: Arc<Node>,
}

/// What a connection is made of.
pub(super) struct Parts {
    pub(super) node: Arc<Node>,
    pub(super) lanes: Vec<Lane>,
    pub(super) words: Words,
    pub(super) queue: Arc<CompletionQueue>,
    pub(super) stream: AttachedStream,
    pub(super) peer: VerbsEndpoint,
    pub(super) peer_regions: Vec<MemoryRegion>,
}

/// Words that a connection of so many queue pairs needs.
pub(super) fn words_needed(queue_pairs: usize) -> usize {
    2 * queue_pairs * BATCHES_PER_QUEUE_PAIR
}

impl VerbsConnection {
    pub(super) fn new(parts: Parts, places: usize) -> Self {
        let pairs = parts.lanes.len() * BATCHES_PER_QUEUE_PAIR;
        Self {
            lanes: parts.lanes,
            words: parts.words,
            free_words: (0..pairs).map(|pair| 2 * pair).collect(),
            queue: parts.queue,
            stream: Some(parts.stream),
            peer: parts.peer,
            peer_regions: parts.peer_regions,
            taken: VecDeque::new(),
            next_lane: 0,
            requests_max: BATCH_REQUESTS_MAX.min(places.saturating_sub(2).max(1)),
            failed: None,
            found: Vec::new(),
            node: parts.node,
        }
    }

    /// Reads the lease page's nonce by each queue pair: the way is open, both ends know each
    /// other's keys, and it is the page of the start that was announced.
    pub(super) fn probe(
        &mut self,
        deadline: Time,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), TransportError> {
        for (word, lane) in self.lanes.iter_mut().enumerate() {
            // SAFETY: the words are dropped after the lanes.
            unsafe { lane.probe(&self.peer, &self.words, word) }.map_err(local)?;
        }
        while self.lanes.iter().any(Lane::busy) {
            self.queue.arm().map_err(local)?;
            self.collect()?;
            if !self.lanes.iter().any(Lane::busy) {
                break;
            }
            crate::tcp::socket::wait_ready(
                &self.queue.channel(),
                PollFlags::IN,
                deadline,
                interrupt,
            )?;
            self.queue.take_events().map_err(local)?;
        }
        for word in 0..self.lanes.len() {
            let found = self.words.read(word);
            announced_page(&self.peer).check_nonce(found)?;
        }
        Ok(())
    }

    /// Takes every completion that is there.
    fn collect(&mut self) -> Result<(), TransportError> {
        loop {
            let mut found = std::mem::take(&mut self.found);
            found.clear();
            let count = self.queue.poll(&mut found).map_err(local);
            for completion in &found {
                self.ended(*completion);
            }
            self.found = found;
            if count? == 0 {
                break;
            }
        }
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn ended(&mut self, completion: WorkCompletion) {
        let Some(lane) = self.lanes.get_mut(Lane::of(completion.id)) else {
            return;
        };
        lane.note_last(completion.id);
        match completion.outcome {
            // What else was posted on a failed queue pair is flushed; the first to end badly on it
            // is the one that says why.
            Err(failure) => {
                let known = self.failed.as_ref();
                if known.is_none() {
                    self.failed = Some(failure.error(Verb::Read));
                }
            }
            Ok(()) => match lane.completed(completion.id) {
                Ok(None) => {}
                Ok(Some(finished)) => self.finish(finished),
                Err(error) => self.failed = self.failed.take().or(Some(local(error))),
            },
        }
    }

    /// A batch's data and its copy of the lease page have arrived.
    fn finish(&mut self, finished: Finished) {
        // Neither the words nor the data may be looked at before the completion was seen.
        fence(Ordering::SeqCst);
        let nonce = self.words.read(finished.word);
        let epoch = self.words.read(finished.word + 1);
        self.free_words.push(finished.word);
        let outcome = announced_page(&self.peer).check_lease(finished.lease, nonce, epoch);
        self.settle(finished.ticket, outcome);
    }

    fn settle(&mut self, ticket: u64, outcome: Result<(), TransportError>) {
        if let Some(taken) = self.taken.iter_mut().find(|taken| taken.ticket == ticket) {
            taken.outcome = Some(outcome);
        }
    }

    /// Hands out what has ended, in the order of posting.
    fn hand_out(&mut self, completions: &mut Vec<Completion>) {
        while let Some(outcome) = self.taken.front().and_then(|taken| taken.outcome.clone()) {
            if let Some(taken) = self.taken.pop_front() {
                completions.push(Completion {
                    ticket: taken.ticket,
                    outcome,
                });
            }
        }
    }

    fn pump(&mut self) -> Result<(), TransportError> {
        for lane in &mut self.lanes {
            // SAFETY: pieces lie in the regions of the node's memory (checked by `post`), which
            // `LocalMemory::new` makes its caller keep mapped and free of references while a job
            // reads into them; the words are dropped after the lanes.
            unsafe { lane.pump(&self.node, &self.peer, &self.words, self.requests_max) }
                .map_err(local)?;
        }
        Ok(())
    }

    /// Sleeps until a completion comes, the peer's connection or the device has something to say,
    /// the waker is set or the timeout passes; whether the holder's connection stands.
    fn sleep(&mut self, timeout: Duration, waker: &Waker) -> Result<(), TransportError> {
        let Some(stream) = &mut self.stream else {
            return Err(lost("the connection is closed"));
        };
        let channel = self.queue.channel();
        let mut fds = [
            PollFd::from_borrowed_fd(channel, PollFlags::IN),
            PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.node.fault.waker.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, Some(&timespec(timeout))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                return Err(TransportError::system(
                    ReadFailureKind::Local,
                    "poll",
                    error.into(),
                ));
            }
        }
        let [completed, spoken, broken, _] = fds.map(|fd| !fd.revents().is_empty());
        if completed {
            self.queue.take_events().map_err(local)?;
        }
        if broken {
            return Err(local(VerbsError::Mismatch(format!(
                "the RDMA device failed: {}",
                self.node.describe()
            ))));
        }
        if spoken {
            return stream.expect_silence().map_err(lost);
        }
        Ok(())
    }
}

fn announced_page(peer: &VerbsEndpoint) -> AnnouncedPage {
    AnnouncedPage {
        nonce: peer.lease_page_nonce,
        slots: peer.lease_slots,
    }
}

fn lost(problem: impl ToString) -> TransportError {
    TransportError::new(ReadFailureKind::PeerLost, "verbs", problem.to_string())
}

pub(super) fn local(error: VerbsError) -> TransportError {
    TransportError::new(ReadFailureKind::Local, "verbs", error.to_string())
}

impl Connection for VerbsConnection {
    fn transport(&self) -> TransportName {
        TransportName::Verbs
    }

    fn post(&mut self, batch: ReadBatch) -> Result<(), TransportError> {
        let out_of_bounds = |error: Outside| {
            TransportError::new(ReadFailureKind::OutOfBounds, "post", error.to_string())
        };
        let list = work::read_list(
            batch.runs(),
            &self.peer_regions,
            &self.node.memory,
            self.node.request_limits(),
        )
        .map_err(out_of_bounds)?;
        if let Err(error) = announced_page(&self.peer).offset_bytes(batch.lease) {
            self.taken.push_back(Taken {
                ticket: batch.ticket,
                outcome: Some(Err(error)),
            });
            return Ok(());
        }
        let word = self.free_words.pop().ok_or_else(|| {
            local(VerbsError::Mismatch(
                "more batches were posted than the transport takes".into(),
            ))
        })?;
        self.taken.push_back(Taken {
            ticket: batch.ticket,
            outcome: None,
        });
        let count = self.lanes.len();
        self.lanes[self.next_lane].push(Batch::new(batch.ticket, batch.lease, list, word));
        self.next_lane = (self.next_lane + 1) % count;
        Ok(())
    }

    fn poll(
        &mut self,
        timeout: Duration,
        waker: &Waker,
        completions: &mut Vec<Completion>,
    ) -> Result<(), TransportError> {
        self.pump()?;
        let result = self.collect();
        self.hand_out(completions);
        result?;
        let busy = self.lanes.iter().any(Lane::busy);
        let spin = self.node.options.busy_poll.min(timeout);
        if completions.is_empty() && busy && !spin.is_zero() {
            let until = now() + spin;
            while completions.is_empty() && now() < until {
                let result = self.collect();
                self.hand_out(completions);
                result?;
            }
        }
        if completions.is_empty() {
            // What completes between the last look and this call leaves the channel silent.
            self.queue.arm().map_err(local)?;
            let result = self.collect();
            self.hand_out(completions);
            result?;
        }
        if !completions.is_empty() {
            return self.pump();
        }
        let slept = self.sleep(timeout, waker);
        // Also when the peer has gone: what had arrived before is well.
        let result = self.collect();
        self.hand_out(completions);
        slept.and(result)?;
        self.pump()
    }

    fn cancel_and_quiesce(&mut self, deadline: Time) -> Result<(), TransportError> {
        for lane in &mut self.lanes {
            if let Err(error) = lane.fail() {
                tracing::warn!(%error, "a queue pair cannot be drained, and is destroyed at once");
                lane.destroy().map_err(not_quiesced)?;
            }
        }
        while !self.lanes.iter().all(Lane::drained) && !self.node.fault.happened() {
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(TransportError::new(
                    ReadFailureKind::NotQuiesced,
                    "ibv_poll_cq",
                    "a queue pair in its error state is not drained yet",
                ));
            }
            self.queue.arm().map_err(not_quiesced)?;
            // Failed requests are what is expected here.
            let _ = self.collect();
            if self.lanes.iter().all(Lane::drained) {
                break;
            }
            let mut fds = [
                PollFd::from_borrowed_fd(self.queue.channel(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.node.fault.waker.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, Some(&timespec(left))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(not_quiesced(VerbsError::call("poll", &error.into()))),
            }
            self.queue.take_events().map_err(not_quiesced)?;
        }
        for lane in &mut self.lanes {
            lane.destroy().map_err(not_quiesced)?;
        }
        self.taken.clear();
        self.failed = Some(WorkFailure::Flushed.error(Verb::Read));
        // Tells the holder to end its ends.
        self.stream = None;
        Ok(())
    }
}

fn not_quiesced(error: VerbsError) -> TransportError {
    TransportError::new(ReadFailureKind::NotQuiesced, "verbs", error.to_string())
}
