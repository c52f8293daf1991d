//! The reading end: asks for runs and receives them straight into KV memory. All work is done by
//! the thread that polls, so when it is not in a call of this file nothing writes a destination.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::data::{Fetch, FetchData, FetchEnd, FetchStatus, SourceRun};
use hetero_kv_core::wire::{Kind, decode, encode};
use rustix::event::PollFlags;

use super::attach::AttachedStream;
use super::framing::{FrameReceiver, FrameSender, ReceiveError};
use super::socket;
use crate::error::{ReadFailureKind, TransportError};
use crate::memory::{LocalMemory, OutOfBounds, SpanQueue, span_in};
use crate::transport::{Completion, Connection, POLL_BYTES_MAX, ReadBatch, TransportName};
use crate::waker::Waker;

/// A fetch that is asked for and not ended.
struct Posted {
    ticket: u64,
    bytes: u64,
    dest: SpanQueue,
    /// Whether the frame that announces the bytes has come.
    announced: bool,
}

/// A connection that the holder has taken.
pub(super) struct TcpConnection {
    stream: Option<OwnedFd>,
    dialled: Option<Arc<str>>,
    peer_regions: Vec<MemoryRegion>,
    memory: Arc<LocalMemory>,
    receiver: FrameReceiver,
    sender: FrameSender,
    /// In the order asked, which is the order answered.
    posted: VecDeque<Posted>,
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the pointers in `iovecs` are addresses for system calls; `receive_into` fills them anew
// each time. All else is `Send`.
unsafe impl Send for TcpConnection {}

impl TcpConnection {
    /// Fetches over a connection that the holder has taken.
    pub(super) fn new(
        attached: AttachedStream,
        peer_regions: Vec<MemoryRegion>,
        memory: Arc<LocalMemory>,
    ) -> Self {
        let dialled = rustix::net::getpeername(&attached.stream)
            .ok()
            .flatten()
            .and_then(|address| SocketAddr::try_from(address).ok())
            .map(|address| address.to_string().into());
        Self {
            stream: Some(attached.stream),
            dialled,
            peer_regions,
            memory,
            receiver: attached.receiver,
            sender: attached.sender,
            posted: VecDeque::new(),
            iovecs: Vec::new(),
        }
    }
}

fn lost(call: &'static str, problem: impl ToString) -> TransportError {
    TransportError::new(ReadFailureKind::PeerLost, call, problem.to_string())
}

fn out_of_bounds(side: &str, error: OutOfBounds) -> TransportError {
    TransportError::new(
        ReadFailureKind::OutOfBounds,
        "post",
        format!("{side}: {error}"),
    )
}

/// Source runs of a batch, those that follow on each other merged.
fn source_runs(runs: &[Run]) -> Vec<SourceRun> {
    let mut merged: Vec<SourceRun> = Vec::with_capacity(runs.len());
    for run in runs {
        if let Some(SourceRun(region, offset, bytes)) = merged.last_mut()
            && *region == run.source_region
            && *offset + *bytes == run.source_offset
        {
            *bytes += run.bytes;
            continue;
        }
        merged.push(SourceRun(run.source_region, run.source_offset, run.bytes));
    }
    merged
}

impl TcpConnection {
    /// Receives what is there, until a budget is used up; whether the socket may have more.
    fn receive(
        &mut self,
        stream: &OwnedFd,
        completions: &mut Vec<Completion>,
    ) -> Result<bool, TransportError> {
        let mut budget_bytes = POLL_BYTES_MAX;
        while budget_bytes > 0 {
            match self.posted.front_mut() {
                Some(front) if front.announced && front.dest.left_bytes() > 0 => {
                    // SAFETY: the pieces of `dest` lie in `memory`'s regions (checked by `post`),
                    // which `LocalMemory::new` makes its caller keep mapped and free of references
                    // while a job reads into them; `memory` is held by `self`.
                    let received =
                        unsafe { socket::receive_into(stream, &mut front.dest, &mut self.iovecs) };
                    match received {
                        Ok(0) => return Err(lost("readv", "the peer closed inside a fetch")),
                        Ok(bytes) => budget_bytes = budget_bytes.saturating_sub(bytes),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            return Ok(false);
                        }
                        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                            return Err(TransportError::new(
                                ReadFailureKind::Local,
                                "readv",
                                "memory of the destination is not mapped",
                            ));
                        }
                        Err(error) => return Err(lost("readv", error)),
                    }
                }
                Some(_) | None => match self.receiver.receive(stream) {
                    Ok(Some((kind, payload))) => self.answered(kind, &payload, completions)?,
                    Ok(None) => return Ok(false),
                    Err(ReceiveError::Frame(error)) => return Err(broken(error)),
                    Err(error) => return Err(lost("read", error)),
                },
            }
        }
        Ok(true)
    }

    fn answered(
        &mut self,
        kind: Kind,
        payload: &[u8],
        completions: &mut Vec<Completion>,
    ) -> Result<(), TransportError> {
        let Some(front) = self.posted.front_mut() else {
            return Err(broken(format!("{kind:?} came and nothing was asked")));
        };
        if kind == Kind::FetchData {
            let data: FetchData = decode(kind, payload).map_err(broken)?;
            if front.announced || data.id != front.ticket || data.bytes != front.bytes {
                return Err(broken("the bytes of another fetch were announced"));
            }
            front.announced = true;
            return Ok(());
        }
        if kind != Kind::FetchEnd {
            return Err(broken(format!("{kind:?} came inside a fetch")));
        }
        let end: FetchEnd = decode(kind, payload).map_err(broken)?;
        if end.id != front.ticket {
            return Err(broken("the end of another fetch came"));
        }
        let failed = |failure| {
            let text: String = end.text.chars().take(500).collect();
            Err(TransportError::new(failure, "Fetch", text))
        };
        let outcome = match end.status {
            FetchStatus::Ok if front.announced => Ok(()),
            FetchStatus::Ok => return Err(broken("a fetch ended well without its bytes")),
            FetchStatus::LeaseGone => failed(ReadFailureKind::LeaseGone),
            FetchStatus::OutOfBounds => failed(ReadFailureKind::OutOfBounds),
        };
        completions.push(Completion {
            ticket: front.ticket,
            outcome,
        });
        self.posted.pop_front();
        Ok(())
    }
}

/// Bytes that are not the protocol: the stream has no boundary to go on from.
fn broken(problem: impl ToString) -> TransportError {
    lost("frame", problem)
}

impl Connection for TcpConnection {
    fn transport(&self) -> TransportName {
        TransportName::Tcp
    }

    fn dialled(&self) -> Option<Arc<str>> {
        self.dialled.clone()
    }

    fn post(&mut self, batch: ReadBatch) -> Result<(), TransportError> {
        let runs = batch.runs();
        let mut dest = SpanQueue::with_capacity(runs.len());
        for run in runs {
            span_in(
                &self.peer_regions,
                run.source_region,
                run.source_offset,
                run.bytes,
            )
            .map_err(|error| out_of_bounds("source", error))?;
            dest.push(
                self.memory
                    .span(run.dest_region, run.dest_offset, run.bytes)
                    .map_err(|error| out_of_bounds("destination", error))?,
            );
        }
        let fetch = Fetch {
            id: batch.ticket,
            slot: batch.lease.slot,
            epoch: batch.lease.epoch,
            runs: source_runs(runs),
        };
        let frame = encode(Kind::Fetch, &fetch).map_err(|error| {
            TransportError::new(ReadFailureKind::Local, "Fetch", error.to_string())
        })?;
        self.sender.push(frame);
        self.posted.push_back(Posted {
            ticket: batch.ticket,
            bytes: dest.left_bytes() as u64,
            dest,
            announced: false,
        });
        Ok(())
    }

    fn poll(
        &mut self,
        timeout: Duration,
        waker: &Waker,
        completions: &mut Vec<Completion>,
    ) -> Result<(), TransportError> {
        let Some(stream) = self.stream.take() else {
            return Err(lost("poll", "the connection is closed"));
        };
        let result = self.poll_stream(&stream, timeout, waker, completions);
        self.stream = Some(stream);
        result
    }

    fn cancel_and_quiesce(&mut self, _deadline: Time) -> Result<(), TransportError> {
        // Only this thread receives, and it is here. Closing tells the holder to stop.
        self.stream = None;
        self.posted.clear();
        Ok(())
    }
}

impl TcpConnection {
    fn poll_stream(
        &mut self,
        stream: &OwnedFd,
        timeout: Duration,
        waker: &Waker,
        completions: &mut Vec<Completion>,
    ) -> Result<(), TransportError> {
        self.sender
            .flush(stream)
            .map_err(|error| lost("send", error))?;
        let more = self.receive(stream, completions)?;
        if more || !completions.is_empty() {
            return Ok(());
        }
        let mut flags = PollFlags::IN;
        if !self.sender.is_empty() {
            flags |= PollFlags::OUT;
        }
        let ready = socket::wait_any(stream, flags, waker, Some(timeout))
            .map_err(|error| TransportError::system(ReadFailureKind::Local, "poll", error))?;
        if ready.socket {
            self.sender
                .flush(stream)
                .map_err(|error| lost("send", error))?;
            self.receive(stream, completions)?;
        }
        Ok(())
    }
}
