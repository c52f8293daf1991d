//! A decode answer on its way to the client, chunk by chunk.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::answer::Record;
use crate::app::App;
use crate::client_io::LegUntil;
use crate::completions::Begun;
use crate::handover::settle_stream;
use crate::lease::outcome_of;
use crate::metrics::ReasonLabels;
use crate::openai::Route;
use crate::openai::error::ApiError;
use crate::routing::LegFault;
use crate::together;
use crate::upstream::{Written, malformed};

// What is called for each chunk is marked `inline`: no link-time optimisation looks across modules.
mod broken;
mod chunks;
mod live;
mod passing;

pub use broken::StreamBroken;
use chunks::Chunks;
use live::Live;
use passing::Passing;

/// Most of an answer that is held back with its head.
const HELD_BYTES_MAX: usize = 64 << 10;

/// The limits of one answer.
#[derive(Debug, Clone, Copy)]
struct StreamLimits {
    /// When the request must be over.
    deadline: Instant,
    /// Longest silence.
    idle: std::time::Duration,
}

/// A decode answer's body with everything that ends when it ends.
#[derive(Debug)]
pub struct DecodeStream {
    app: Arc<App>,
    /// `None` once the answer has ended, well or not.
    live: Option<Live>,
    outcome: &'static str,
    limits: StreamLimits,
    alarm: Pin<Box<Sleep>>,
    chunks: Chunks,
    passing: Passing,
    written: Written,
    /// Whether the client has been given the head.
    told: bool,
    /// What came of the body before that.
    held: VecDeque<Frame<Bytes>>,
    /// What is wrong with an answer that is not well-formed.
    fault: Option<String>,
    /// Tells the client's socket until when the leg may run.
    until: Arc<LegUntil>,
}

impl DecodeStream {
    /// The body of a begun answer, counted by `record`; `is_events` says whether it is an event
    /// stream, and `until` ends it where the client takes nothing. Its head is given by
    /// [`Self::begin`].
    pub(crate) fn new(
        app: Arc<App>,
        begun: Begun,
        is_events: bool,
        record: Record,
        until: Arc<LegUntil>,
    ) -> Self {
        let now = Instant::now();
        let Begun {
            mut decode,
            seat,
            running,
            written,
            deadline,
            request_id: _,
        } = begun;
        let limits = StreamLimits {
            deadline,
            idle: app.config().stream_idle_timeout,
        };
        let cached = decode.cached.take();
        let mut stream = Self {
            passing: Passing::new(is_events, cached),
            outcome: outcome_of(decode.answer.head.status),
            chunks: Chunks::new(record.started(), now),
            live: Some(Live {
                decode,
                record,
                _seat: seat,
                running,
            }),
            limits,
            alarm: Box::pin(tokio::time::sleep_until(
                limits.deadline.min(now + limits.idle),
            )),
            written,
            told: false,
            held: VecDeque::new(),
            fault: None,
            until,
            app,
        };
        stream.until.set(Some(limits.deadline));
        if stream.engine_ended() {
            stream.complete();
        }
        stream
    }

    /// Waits until the head may go out: of an event stream at once, of another answer when something
    /// of its body has come, or all. What else is there by then is looked at too: hyper sends
    /// nothing of an answer that breaks before it had to wait.
    ///
    /// # Errors
    /// What the client is told in place of an answer that broke before.
    pub(crate) async fn begin(&mut self) -> Result<(), ApiError> {
        let mut held = 0;
        while held < HELD_BYTES_MAX {
            let waits = !self.passing.is_events() && self.held.is_empty();
            let next = poll_fn(|cx| match self.poll_body(cx) {
                Poll::Pending if !waits => Poll::Ready(None),
                next @ (Poll::Pending | Poll::Ready(_)) => next,
            });
            match next.await {
                Some(Ok(frame)) => {
                    held += frame.data_ref().map_or(0, Bytes::len);
                    self.held.push_back(frame);
                }
                Some(Err(broken)) => {
                    self.held.clear();
                    return Err(broken.api_error(self.fault.as_deref()));
                }
                None => break,
            }
            if self.passing.is_events() {
                break;
            }
        }
        self.told = true;
        if let Some(live) = &mut self.live {
            live.record.answering(live.decode.answer.head.status);
        }
        Ok(())
    }

    fn engine_ended(&self) -> bool {
        self.live.as_ref().is_some_and(Live::engine_ended)
    }

    /// Whether nothing more will come.
    pub fn is_ended(&self) -> bool {
        self.live.is_none() && self.held.is_empty()
    }

    /// Length, where the engine gave one. An event stream has none: an error event may follow.
    pub fn size_hint(&self) -> SizeHint {
        let held = self.held.iter().filter_map(Frame::data_ref).map(Bytes::len);
        let held = held.sum::<usize>() as u64;
        match &self.live {
            Some(_) if self.passing.is_events() || !self.passing.keeps_length() => {
                SizeHint::default()
            }
            Some(live) => {
                let rest = live.decode.answer.body.size_hint();
                let early = live.decode.early.as_ref().map_or(0, Bytes::len) as u64;
                rest.exact().map_or(SizeHint::default(), |rest| {
                    SizeHint::with_exact(rest + early + held)
                })
            }
            // One that has ended before its head was given is a stream all the same.
            None if self.passing.is_events() && !self.held.is_empty() => SizeHint::default(),
            None => SizeHint::with_exact(held),
        }
    }

    /// See [`Body::poll_frame`].
    pub fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamBroken>>> {
        match self.held.pop_front() {
            Some(first) => Poll::Ready(Some(Ok(first))),
            None => self.poll_body(cx),
        }
    }

    fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamBroken>>> {
        loop {
            let Some(live) = &mut self.live else {
                return Poll::Ready(None);
            };
            if let Some(chunk) = live.decode.early.take() {
                match self.pass(chunk) {
                    Some(chunk) => return Poll::Ready(Some(Ok(Frame::data(chunk)))),
                    None => continue,
                }
            }
            match Pin::new(&mut live.decode.answer.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    // An engine that is always ahead of its client is never waited for below.
                    Ok(_) if Instant::now() >= self.limits.deadline => {
                        return self.break_off(StreamBroken::Deadline);
                    }
                    Ok(chunk) => match self.pass(chunk) {
                        Some(chunk) => return Poll::Ready(Some(Ok(Frame::data(chunk)))),
                        None => continue,
                    },
                    Err(trailers) => {
                        if self.engine_ended() {
                            self.complete();
                        }
                        return Poll::Ready(Some(Ok(trailers)));
                    }
                },
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(%error, "decode answer broke off");
                    self.fault = malformed(&error);
                    return self.break_off(match self.fault {
                        Some(_) => StreamBroken::Malformed,
                        None => StreamBroken::Engine,
                    });
                }
                Poll::Ready(None) => {
                    let rest = self.passing.end();
                    if self.is_cut_off() {
                        return self.break_off(StreamBroken::Engine);
                    }
                    self.complete();
                    let rest = (!rest.is_empty()).then(|| Ok(Frame::data(rest)));
                    return Poll::Ready(rest);
                }
                Poll::Pending => {}
            }
            let aborted = live.running.poll_aborted(cx);
            if aborted.is_ready() {
                return self.break_off(StreamBroken::Aborted);
            }
            // One timer for both limits; it is moved when it rings and not at each chunk.
            if self.alarm.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let now = Instant::now();
            let silent_until = self.chunks.last() + self.limits.idle;
            if now >= self.limits.deadline {
                return self.break_off(StreamBroken::Deadline);
            }
            if now >= silent_until {
                return self.break_off(StreamBroken::Idle);
            }
            self.alarm
                .as_mut()
                .reset(self.limits.deadline.min(silent_until));
        }
    }

    /// Whether a body that ended was not all: an event stream whose end is that of its connection
    /// tells by its last event only that it is whole.
    fn is_cut_off(&self) -> bool {
        let Some(live) = self.live.as_ref().filter(|_| self.passing.is_events()) else {
            return false;
        };
        let answer = &live.decode.answer;
        // Those of `/v1/responses`, and of what is relayed, have other last events.
        let ends_with_done = [Route::Completions, Route::ChatCompletions]
            .iter()
            .any(|route| route.path() == live.record.route());
        answer.body.ends_with_connection()
            && answer.head.status.is_success()
            && ends_with_done
            && !self.passing.is_done()
    }

    /// What the client gets with a chunk of the engine's; `None` where that is nothing yet.
    fn pass(&mut self, chunk: Bytes) -> Option<Bytes> {
        let is_events = self.passing.is_events();
        if self.chunks.note(self.live.as_ref(), is_events) {
            self.judge(&chunk);
        }
        let ended = self.engine_ended();
        let passed = self.passing.push(chunk, ended);
        if ended {
            self.complete();
        }
        (!passed.is_empty()).then_some(passed)
    }

    fn judge(&mut self, first: &[u8]) {
        if let Some(live) = &mut self.live {
            live.judge(&self.app, self.passing.is_events(), first);
        }
    }

    /// Notes what is known of the chunks when no more will come.
    fn close(&mut self) {
        self.chunks.close(self.live.as_ref());
        if let Some(live) = self.live.as_ref().filter(|_| self.chunks.any())
            && let Some(tokens) = self.passing.tokens()
        {
            live.record.timeline().tokens(tokens);
        }
    }

    fn complete(&mut self) {
        if !self.chunks.any() {
            self.judge(b"");
        }
        self.close();
        self.until.set(None);
        if let Some(mut live) = self.live.take() {
            if let Some(prefill) = live.decode.prefill {
                together::close_later(&self.app, prefill);
            }
            let status = live.decode.answer.head.status;
            if !self.told {
                // Nothing can keep it from the client.
                live.record.answering(status);
            }
            // First, so that the record knows of it.
            live.decode.lease.end(self.outcome);
            live.record.finish(status);
        }
    }

    fn break_off(
        &mut self,
        broken: StreamBroken,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamBroken>>> {
        self.close();
        self.until.set(None);
        let Some(live) = self.live.take() else {
            return Poll::Ready(None);
        };
        let (record, mut status) = (live.record, live.decode.answer.head.status);
        if !self.told {
            let told = broken.api_error(None).status;
            status = StatusCode::from_u16(told).unwrap_or(status);
        }
        let owed = !self.chunks.any() && live.decode.claims_blocks;
        if broken == StreamBroken::Aborted && owed {
            settle_stream(&self.app, live.decode, self.written.clone());
            record.finish(status);
            return self.tell(broken);
        }
        let whole = self.passing.is_done();
        if !whole && broken.is_fault() {
            live.decode.lease.note_failed(LegFault::Failed);
        }
        live.decode
            .lease
            .end(if whole { self.outcome } else { "broken" });
        record.finish(status);
        if whole {
            // Every event was passed on; only the end of the framing is missing.
            return Poll::Ready(None);
        }
        self.tell(broken)
    }

    /// The last that the client gets.
    fn tell(&self, broken: StreamBroken) -> Poll<Option<Result<Frame<Bytes>, StreamBroken>>> {
        let labels = ReasonLabels {
            reason: broken.reason(),
        };
        self.app.metrics.stream_breaks.get_or_create(&labels).inc();
        let error = broken.api_error(self.fault.as_deref());
        let event = self.told.then(|| self.passing.error_event(&error));
        Poll::Ready(Some(match event.flatten() {
            Some(event) => Ok(Frame::data(event)),
            None => Err(broken),
        }))
    }
}

impl Drop for DecodeStream {
    fn drop(&mut self) {
        self.close();
        self.until.set(None);
        let Some(live) = self.live.take() else {
            return;
        };
        if Instant::now() >= self.limits.deadline {
            // Its socket ended it: the client takes nothing that it could be told.
            let reason = StreamBroken::Deadline.reason();
            let labels = ReasonLabels { reason };
            self.app.metrics.stream_breaks.get_or_create(&labels).inc();
        }
        // The client left. The first chunk proves that the engine has taken the request and read
        // its KV; before that, the leg lives on for its grace.
        if !self.chunks.any() && live.decode.claims_blocks {
            settle_stream(&self.app, live.decode, self.written.clone());
        }
    }
}
