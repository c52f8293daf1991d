//! Reads batches from one process. All work is done by the thread that polls.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::lease_page::slot_offset_bytes;
use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::time::Time;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::probe::Peer;
use super::vm_read::{self, Scratch};
use crate::clock::timespec;
use crate::error::{ReadFailureKind, TransportError};
use crate::memory::{LocalMemory, OutOfBounds, SpanQueue, span_in};
use crate::transport::{Completion, Connection, POLL_BYTES_MAX, ReadBatch, TransportName};
use crate::waker::Waker;

/// A batch as two lists of pieces with the same bytes.
struct Posted {
    ticket: u64,
    lease: LeaseRef,
    source: SpanQueue,
    dest: SpanQueue,
}

pub(super) struct ProcessConnection {
    peer: Peer,
    peer_regions: Vec<MemoryRegion>,
    memory: Arc<LocalMemory>,
    posted: VecDeque<Posted>,
    scratch: Scratch,
}

impl ProcessConnection {
    pub(super) fn new(
        peer: Peer,
        peer_regions: Vec<MemoryRegion>,
        memory: Arc<LocalMemory>,
    ) -> Self {
        Self {
            peer,
            peer_regions,
            memory,
            posted: VecDeque::new(),
            scratch: Scratch::default(),
        }
    }

    /// Whether the peer has ended: its pidfd is readable.
    fn peer_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.peer.pidfd, PollFlags::IN)];
        let at_once = timespec(Duration::ZERO);
        poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }

    /// Copies at most [`POLL_BYTES_MAX`] of a batch; whether it is all there.
    fn copy(&mut self, batch: &mut Posted) -> Result<bool, TransportError> {
        let mut budget_bytes = POLL_BYTES_MAX;
        while batch.dest.left_bytes() > 0 && budget_bytes > 0 {
            // SAFETY: the pieces of `dest` lie in `memory`'s regions (checked by `post`), which
            // `LocalMemory::new` makes its caller keep mapped and free of references while a job
            // reads into them; `memory` is held by `self`.
            let copied = unsafe {
                vm_read::read_some(
                    self.peer.pid,
                    &mut batch.source,
                    &mut batch.dest,
                    budget_bytes,
                    &mut self.scratch,
                )
            };
            budget_bytes -= copied.map_err(|error| self.failed_read(error))?;
        }
        Ok(batch.dest.left_bytes() == 0)
    }

    /// Whether the lease stands, read from the peer's page after the data.
    fn fence(&mut self, lease: LeaseRef) -> Result<(), TransportError> {
        let endpoint = &self.peer.endpoint;
        let gone = |problem| TransportError::new(ReadFailureKind::LeaseGone, "lease page", problem);
        if lease.slot.0 >= endpoint.lease_slots {
            return Err(gone(format!(
                "slot {} is not on the source's page of {} slots",
                lease.slot, endpoint.lease_slots
            )));
        }
        // The copy of the data must not be seen later than that of the page.
        fence(Ordering::SeqCst);
        let page = endpoint.lease_page_address;
        let slot = page.saturating_add(slot_offset_bytes(lease.slot) as u64);
        let nonce = endpoint.lease_page_nonce;
        let words = vm_read::read_words::<2, 8>(self.peer.pid, [page, slot], &mut self.scratch)
            .map_err(|error| match self.failed_read(error) {
                error if error.kind == ReadFailureKind::OutOfBounds => gone(error.problem),
                error => error,
            })?;
        let [found_nonce, epoch] = words.map(u64::from_ne_bytes);
        if found_nonce != nonce {
            return Err(TransportError::new(
                ReadFailureKind::Incarnation,
                "lease page",
                "the page's nonce is not the one the source announced",
            ));
        }
        if epoch != lease.epoch.0 {
            return Err(gone(format!(
                "slot {} is at epoch {epoch}, the lease was of epoch {}",
                lease.slot, lease.epoch.0
            )));
        }
        Ok(())
    }

    fn failed_read(&self, error: io::Error) -> TransportError {
        let pid = self.peer.pid;
        if error.raw_os_error() == Some(libc::ESRCH) || self.peer_ended() {
            return peer_ended(pid);
        }
        let (kind, problem) = match error.raw_os_error() {
            Some(libc::EFAULT) | None => (
                ReadFailureKind::OutOfBounds,
                format!("memory of process {pid} or of this one is not mapped where announced"),
            ),
            Some(_) => (ReadFailureKind::PeerLost, format!("process {pid}: {error}")),
        };
        TransportError::new(kind, "process_vm_readv", problem)
    }
}

fn peer_ended(pid: libc::pid_t) -> TransportError {
    TransportError::new(
        ReadFailureKind::PeerLost,
        "pidfd",
        format!("process {pid} has ended"),
    )
}

fn out_of_bounds(side: &str, error: OutOfBounds) -> TransportError {
    TransportError::new(
        ReadFailureKind::OutOfBounds,
        "post",
        format!("{side}: {error}"),
    )
}

impl Connection for ProcessConnection {
    fn transport(&self) -> TransportName {
        TransportName::Process
    }

    fn post(&mut self, batch: ReadBatch) -> Result<(), TransportError> {
        let runs = batch.runs();
        let mut source = SpanQueue::with_capacity(runs.len());
        let mut dest = SpanQueue::with_capacity(runs.len());
        for run in runs {
            source.push(
                span_in(
                    &self.peer_regions,
                    run.source_region,
                    run.source_offset,
                    run.bytes,
                )
                .map_err(|error| out_of_bounds("source", error))?,
            );
            dest.push(
                self.memory
                    .span(run.dest_region, run.dest_offset, run.bytes)
                    .map_err(|error| out_of_bounds("destination", error))?,
            );
        }
        self.posted.push_back(Posted {
            ticket: batch.ticket,
            lease: batch.lease,
            source,
            dest,
        });
        Ok(())
    }

    fn poll(
        &mut self,
        timeout: Duration,
        waker: &Waker,
        completions: &mut Vec<Completion>,
    ) -> Result<(), TransportError> {
        let Some(mut batch) = self.posted.pop_front() else {
            // With nothing to copy there is only the end of the peer to wait for.
            let mut fds = [
                PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN),
                PollFd::new(&self.peer.pidfd, PollFlags::IN),
            ];
            return match poll(&mut fds, Some(&timespec(timeout))) {
                Ok(_) if fds[1].revents().is_empty() => Ok(()),
                Ok(_) => Err(peer_ended(self.peer.pid)),
                Err(Errno::INTR) => Ok(()),
                Err(error) => Err(TransportError::system(
                    ReadFailureKind::Local,
                    "poll",
                    error.into(),
                )),
            };
        };
        if self.peer_ended() {
            return Err(peer_ended(self.peer.pid));
        }
        let outcome = match self.copy(&mut batch) {
            Ok(false) => {
                self.posted.push_front(batch);
                return Ok(());
            }
            Ok(true) => self.fence(batch.lease),
            Err(error) => Err(error),
        };
        if let Err(error) = &outcome
            && error.kind == ReadFailureKind::PeerLost
        {
            return Err(error.clone());
        }
        completions.push(Completion {
            ticket: batch.ticket,
            outcome,
        });
        Ok(())
    }

    fn cancel_and_quiesce(&mut self, _deadline: Time) -> Result<(), TransportError> {
        // Only this thread copies, and it is here: no copy is under way.
        self.posted.clear();
        Ok(())
    }
}
