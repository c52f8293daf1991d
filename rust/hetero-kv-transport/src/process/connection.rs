//! Reads batches from one process. All work is done by the thread that polls.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::time::Time;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::probe::Peer;
use super::vm_read::{self, Scratch};
use crate::clock::timespec;
use crate::error::{ReadFailureKind, TransportError};
use crate::fence::{AnnouncedPage, gone};
use crate::memory::{LocalMemory, OutOfBounds, Span, SpanQueue, span_in};
use crate::transport::{Completion, Connection, POLL_BYTES_MAX, ReadBatch, TransportName};
use crate::waker::Waker;

/// Whether the lease page is read by the call that reads the data, as its last pieces.
///
/// `process_vm_readv(2)` processes its buffers in array order, and on x86-64 loads are not seen out
/// of order, so the page is read after the data all the same, and a small read costs one call
/// instead of two. Elsewhere the order of two loads inside the kernel is nobody's promise, so the
/// page is read by a call of its own behind a fence.
const PAGE_WITH_DATA: bool = cfg!(target_arch = "x86_64");

/// What is read of a lease page: its nonce, and the epoch of the lease's slot.
const PAGE_WORD_BYTES: usize = 8;
const PAGE_BYTES: usize = 2 * PAGE_WORD_BYTES;

/// A batch as two lists of pieces with the same bytes.
struct Posted {
    ticket: u64,
    lease: LeaseRef,
    source: SpanQueue,
    dest: SpanQueue,
    /// Where the lease page's words arrive that are the last pieces of both lists. Atomics, since
    /// the kernel writes them while this owns them.
    page_words: Option<Box<[AtomicU64; 2]>>,
}

impl Posted {
    /// Bytes of the data, without the lease page's, that are not there yet.
    fn data_left_bytes(&self) -> usize {
        let page_bytes = self.page_words.as_ref().map_or(0, |_| PAGE_BYTES);
        self.dest.left_bytes().saturating_sub(page_bytes)
    }

    /// Adds the pieces of the lease page behind the data's.
    fn push_page(&mut self, addresses: [usize; 2]) {
        let words = Box::new([AtomicU64::new(0), AtomicU64::new(0)]);
        for address in addresses {
            self.source.push(Span {
                address,
                bytes: PAGE_WORD_BYTES,
            });
        }
        self.dest.push(Span {
            address: words.as_ptr().expose_provenance(),
            bytes: PAGE_BYTES,
        });
        self.page_words = Some(words);
    }
}

pub(super) struct ProcessConnection {
    peer: Peer,
    dialled: Arc<str>,
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
            dialled: format!("pid {}", peer.pid).into(),
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
        let mut budget_bytes = POLL_BYTES_MAX + PAGE_BYTES;
        while batch.dest.left_bytes() > 0 && budget_bytes > 0 {
            // SAFETY: the pieces of `dest` lie in `memory`'s regions (checked by `post`), which
            // `LocalMemory::new` makes its caller keep mapped and free of references while a job
            // reads into them, and `memory` is held by `self`; or they are `page_words`, which
            // the batch owns and which are only ever touched as atomics.
            let copied = unsafe {
                vm_read::read_some(
                    self.peer.pid,
                    &mut batch.source,
                    &mut batch.dest,
                    budget_bytes,
                    &mut self.scratch,
                )
            };
            budget_bytes -= copied.map_err(|error| {
                let error = self.failed_read(error);
                if error.kind == ReadFailureKind::OutOfBounds && batch.data_left_bytes() == 0 {
                    return gone(error.problem);
                }
                error
            })?;
        }
        Ok(batch.dest.left_bytes() == 0)
    }

    fn announced_page(&self) -> AnnouncedPage {
        AnnouncedPage {
            nonce: self.peer.endpoint.lease_page_nonce,
            slots: self.peer.endpoint.lease_slots,
        }
    }

    /// Where the lease page's nonce and the lease's epoch are.
    fn page_addresses(&self, lease: LeaseRef) -> Result<[usize; 2], TransportError> {
        let offset = self.announced_page().offset_bytes(lease)?;
        let page = usize::try_from(self.peer.endpoint.lease_page_address).unwrap_or(0);
        let slot = page.checked_add(offset);
        match slot.filter(|slot| page != 0 && slot.checked_add(PAGE_WORD_BYTES).is_some()) {
            Some(slot) => Ok([page, slot]),
            None => Err(gone("the source's lease page is in nobody's memory")),
        }
    }

    /// Whether the lease stood after the last byte of a batch that is all there.
    fn fence(&mut self, batch: &Posted) -> Result<(), TransportError> {
        let [nonce, epoch] = match &batch.page_words {
            Some(words) => [0, 1].map(|at: usize| words[at].load(Ordering::Relaxed)),
            None => {
                let addresses = self.page_addresses(batch.lease)?;
                self.read_page(addresses)?
            }
        };
        let page = self.announced_page();
        match page.check_lease(batch.lease, nonce, epoch) {
            // Whatever has its pid by now is not another start of it.
            Err(error) if error.kind == ReadFailureKind::Incarnation && self.peer_ended() => {
                Err(peer_ended(self.peer.pid))
            }
            outcome => outcome,
        }
    }

    /// Reads the words of the lease page by a call of its own.
    fn read_page(&mut self, addresses: [usize; 2]) -> Result<[u64; 2], TransportError> {
        // The copy of the data must not be seen later than that of the page.
        fence(Ordering::SeqCst);
        let addresses = addresses.map(|address| address as u64);
        vm_read::read_words::<2, PAGE_WORD_BYTES>(self.peer.pid, addresses, &mut self.scratch)
            .map(|words| words.map(u64::from_ne_bytes))
            .map_err(|error| match self.failed_read(error) {
                error if error.kind == ReadFailureKind::OutOfBounds => gone(error.problem),
                error => error,
            })
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

    fn dialled(&self) -> Option<Arc<str>> {
        Some(Arc::clone(&self.dialled))
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
        let mut posted = Posted {
            ticket: batch.ticket,
            lease: batch.lease,
            source,
            dest,
            page_words: None,
        };
        if PAGE_WITH_DATA && let Ok(addresses) = self.page_addresses(batch.lease) {
            posted.push_page(addresses);
        }
        self.posted.push_back(posted);
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
        let outcome = match self.copy(&mut batch) {
            Ok(false) => {
                self.posted.push_front(batch);
                return Ok(());
            }
            Ok(true) => self.fence(&batch),
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
