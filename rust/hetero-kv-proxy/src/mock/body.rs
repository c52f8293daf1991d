//! Bodies of a mock's answers, among them those that go wrong on purpose.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

use super::Worker;
use super::answer::Script;
use super::fault::FaultKind;

/// Any answer's body.
#[derive(Debug)]
pub enum MockBody {
    /// Bytes that are all there.
    Whole(Bytes),
    /// The first part of a plain answer, and then nothing or the connection's end.
    Broken(Box<Broken>),
    /// An event stream.
    Events(Box<Events>),
}

/// Counts a request that runs, and one that nobody waited for.
#[derive(Debug)]
pub struct Running {
    worker: Arc<Worker>,
    ended: bool,
}

impl Running {
    /// It begins.
    pub fn new(worker: Arc<Worker>) -> Self {
        worker.counters.running.fetch_add(1, Ordering::Relaxed);
        Self {
            worker,
            ended: false,
        }
    }

    /// It ended as it was meant to.
    pub fn end(&mut self) {
        self.ended = true;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let counters = &self.worker.counters;
        counters.running.fetch_sub(1, Ordering::Relaxed);
        if !self.ended {
            counters.aborted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A plain answer that stops in its middle.
#[derive(Debug)]
pub struct Broken {
    length: u64,
    part: Bytes,
    end: End,
    running: Running,
}

impl Broken {
    /// Half of `whole`; then silence for `hang`, or the connection's end.
    pub fn new(whole: &Bytes, hang: Option<Duration>, running: Running) -> Self {
        Self {
            length: whole.len() as u64,
            part: whole.slice(..whole.len() / 2),
            end: End::new(hang),
            running,
        }
    }
}

/// What comes where an answer breaks.
#[derive(Debug)]
struct End {
    hang: Option<Pin<Box<Sleep>>>,
    /// What was handed over is on the wire only after the body had nothing to give for once.
    is_flushed: bool,
}

impl End {
    fn new(hang: Option<Duration>) -> Self {
        Self {
            hang: hang.map(|limit| Box::pin(sleep(limit))),
            is_flushed: false,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>, running: &mut Running) -> Poll<io::Error> {
        if !std::mem::replace(&mut self.is_flushed, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(hang) = &mut self.hang {
            ready!(hang.as_mut().poll(cx));
        }
        running.end();
        Poll::Ready(io::Error::other("a fault on purpose"))
    }
}

/// An event stream in the making.
#[derive(Debug)]
pub struct Events {
    script: Script,
    next: usize,
    begin: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    is_flushed: bool,
    fault: Option<FaultKind>,
    end: Option<End>,
    hang_limit: Duration,
    running: Running,
}

impl Events {
    /// The events of `script`, the first of them due at `begin`.
    pub fn new(
        script: Script,
        begin: Instant,
        fault: Option<FaultKind>,
        hang_limit: Duration,
        running: Running,
    ) -> Self {
        Self {
            script,
            next: 0,
            begin,
            timer: None,
            is_flushed: false,
            fault,
            end: None,
            hang_limit,
            running,
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let Some(end) = &mut self.end {
            let error = ready!(end.poll(cx, &mut self.running));
            return Poll::Ready(Some(Err(error)));
        }
        let chunks = self.script.chunks_before(self.next);
        match self.fault {
            Some(FaultKind::Cut(after)) if chunks >= after => {
                return self.break_off(cx, None);
            }
            Some(FaultKind::Hang(after)) if chunks >= after => {
                return self.break_off(cx, Some(self.hang_limit));
            }
            Some(FaultKind::ErrorEvent(after)) if chunks >= after => {
                if self.next > self.script.count() {
                    self.running.end();
                    return Poll::Ready(None);
                }
                self.next = self.script.count() + 1;
                // The count of chunks before an event past the end is that of all.
                return Poll::Ready(Some(Ok(self.script.error_event())));
            }
            Some(_) | None => {}
        }
        // Each event is a write of its own, as an engine's is.
        let due = self.begin + self.script.due(self.next);
        if Instant::now() < due {
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(sleep(Duration::ZERO)));
            if timer.deadline() != due {
                timer.as_mut().reset(due);
            }
            ready!(timer.as_mut().poll(cx));
        } else if !self.is_flushed {
            self.is_flushed = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.is_flushed = false;
        let skip_done = self.fault == Some(FaultKind::NoDone);
        match self.script.event(self.next, skip_done) {
            Some((event, tokens)) => {
                self.next += 1;
                let counters = &self.running.worker.counters;
                counters.tokens.fetch_add(tokens, Ordering::Relaxed);
                Poll::Ready(Some(Ok(event)))
            }
            None => {
                self.running.end();
                Poll::Ready(None)
            }
        }
    }

    fn break_off(
        &mut self,
        cx: &mut Context<'_>,
        hang: Option<Duration>,
    ) -> Poll<Option<io::Result<Bytes>>> {
        let end = self.end.insert(End::new(hang));
        let error = ready!(end.poll(cx, &mut self.running));
        Poll::Ready(Some(Err(error)))
    }
}

impl Body for MockBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut *self {
            Self::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Broken(broken) => {
                let part = std::mem::take(&mut broken.part);
                if !part.is_empty() {
                    return Poll::Ready(Some(Ok(Frame::data(part))));
                }
                let Broken { end, running, .. } = &mut **broken;
                end.poll(cx, running).map(|error| Some(Err(error)))
            }
            Self::Events(events) => events
                .poll_next(cx)
                .map(|next| next.map(|event| event.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_empty(),
            Self::Broken(_) | Self::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Broken(broken) => SizeHint::with_exact(broken.length),
            Self::Events(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests;
