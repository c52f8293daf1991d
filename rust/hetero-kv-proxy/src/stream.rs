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
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::answer::{Record, is_logged};
use crate::app::App;
use crate::client_io::LegUntil;
use crate::completions::Begun;
use crate::handover::{DecodeHead, settle_stream};
use crate::histogram::Gaps;
use crate::meters::DecodeMeters;
use crate::metrics::ReasonLabels;
use crate::openai::Route;
use crate::openai::error::{self, ApiError};
use crate::openai::sse::{self, Tail};
use crate::openai::tokens::Reader;
use crate::openai::usage::Teller;
use crate::routing::LegFault;
use crate::running::Running;
use crate::seats::Seat;
use crate::together;
use crate::upstream::{Written, malformed};

/// Most of an answer that is held back with its head.
const HELD_BYTES_MAX: usize = 64 << 10;

/// Why an answer ends before its end. hyper closes the client's connection on it, so that a client
/// sees a body cut short and never a whole one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamBroken {
    /// The engine's connection broke.
    #[error("the decode engine's answer broke off")]
    Engine,
    /// What came is not HTTP.
    #[error("the decode engine's answer is not well-formed")]
    Malformed,
    /// No chunk came for too long.
    #[error("the decode engine sent nothing for too long")]
    Idle,
    /// The request's deadline passed.
    #[error("the deadline of the request passed")]
    Deadline,
    /// Somebody asked for its end.
    #[error("the request was aborted")]
    Aborted,
}

impl StreamBroken {
    fn reason(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Malformed => "malformed",
            Self::Idle => "idle",
            Self::Deadline => "deadline",
            Self::Aborted => "aborted",
        }
    }

    /// Whether the engine is to blame.
    fn is_fault(self) -> bool {
        match self {
            Self::Engine | Self::Malformed => true,
            Self::Idle | Self::Deadline | Self::Aborted => false,
        }
    }

    fn api_error(self, detail: Option<&str>) -> ApiError {
        let (status, code) = match self {
            Self::Engine => (502, "decode_stream_broken"),
            Self::Malformed => (502, "decode_stream_malformed"),
            Self::Idle => (504, "decode_stream_idle"),
            Self::Deadline => (504, "deadline_exceeded"),
            Self::Aborted => (409, "aborted"),
        };
        let message = match detail {
            Some(detail) => format!("{self}: {detail}"),
            None => self.to_string(),
        };
        ApiError::new(status, code, message)
    }
}

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
    heard: Instant,
    /// Between chunks of an event stream, not yet counted.
    gaps: Gaps,
    first: Instant,
    chunks: u64,
    started: Instant,
    /// For an event stream: its end, to close it properly when it breaks.
    events: Option<Tail>,
    /// Tells prefill's count of cached tokens, where it is known.
    teller: Option<Teller>,
    /// Reads the tokens that it tells, where they are logged.
    tokens: Option<Reader>,
    any_chunk: bool,
    written: Written,
    aborted: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Whether the client has been given the head.
    told: bool,
    /// What came of the body before that.
    held: VecDeque<Frame<Bytes>>,
    /// What is wrong with an answer that is not well-formed.
    fault: Option<String>,
    /// Tells the client's socket until when the leg may run.
    until: Arc<LegUntil>,
}

#[derive(Debug)]
struct Live {
    decode: DecodeHead,
    record: Record,
    _seat: Seat,
    _running: Running,
}

impl Live {
    fn meters(&self) -> Option<&DecodeMeters> {
        self.decode.lease.instance().meters.decode.as_ref()
    }
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
            teller: cached.map(|cached| Teller::new(cached, is_events)),
            outcome: outcome_of(decode.answer.head.status),
            started: record.started(),
            aborted: Box::pin(running.aborted()),
            live: Some(Live {
                decode,
                record,
                _seat: seat,
                _running: running,
            }),
            limits,
            alarm: Box::pin(tokio::time::sleep_until(
                limits.deadline.min(now + limits.idle),
            )),
            heard: now,
            gaps: Gaps::default(),
            first: now,
            chunks: 0,
            events: is_events.then(Tail::default),
            tokens: is_logged().then(|| Reader::new(is_events)),
            any_chunk: false,
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
            let waits = self.events.is_none() && self.held.is_empty();
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
            if self.events.is_some() {
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
        self.live.as_ref().is_some_and(|live| {
            live.decode.early.is_none() && live.decode.answer.body.is_end_stream()
        })
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
            Some(_) if self.events.is_some() || self.teller.is_some() => SizeHint::default(),
            Some(live) => {
                let rest = live.decode.answer.body.size_hint();
                let early = live.decode.early.as_ref().map_or(0, Bytes::len) as u64;
                rest.exact().map_or(SizeHint::default(), |rest| {
                    SizeHint::with_exact(rest + early + held)
                })
            }
            // One that has ended before its head was given is a stream all the same.
            None if self.events.is_some() && !self.held.is_empty() => SizeHint::default(),
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
                    let rest = self.teller.as_mut().map_or(Bytes::new(), Teller::end);
                    if let Some(events) = &mut self.events {
                        events.push(&rest);
                    }
                    if let Some(tokens) = &mut self.tokens {
                        tokens.push(&rest);
                    }
                    if self.is_cut_off() {
                        return self.break_off(StreamBroken::Engine);
                    }
                    self.complete();
                    let rest = (!rest.is_empty()).then(|| Ok(Frame::data(rest)));
                    return Poll::Ready(rest);
                }
                Poll::Pending => {}
            }
            if self.aborted.as_mut().poll(cx).is_ready() {
                return self.break_off(StreamBroken::Aborted);
            }
            // One timer for both limits; it is moved when it rings and not at each chunk.
            if self.alarm.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let now = Instant::now();
            let silent_until = self.heard + self.limits.idle;
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
        let (Some(live), Some(events)) = (&self.live, &self.events) else {
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
            && !events.is_done()
    }

    /// What the client gets with a chunk of the engine's; `None` where that is nothing yet.
    fn pass(&mut self, chunk: Bytes) -> Option<Bytes> {
        self.note_chunk(&chunk);
        let ended = self.engine_ended();
        let passed = match &mut self.teller {
            None => chunk,
            Some(teller) => {
                let ready = teller.push(chunk);
                match ended.then(|| teller.end()).filter(|rest| !rest.is_empty()) {
                    Some(rest) if ready.is_empty() => rest,
                    Some(rest) => [ready, rest].concat().into(),
                    None => ready,
                }
            }
        };
        if let Some(events) = &mut self.events {
            events.push(&passed);
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.push(&passed);
        }
        if ended {
            self.complete();
        }
        (!passed.is_empty()).then_some(passed)
    }

    fn note_chunk(&mut self, chunk: &[u8]) {
        let before = std::mem::replace(&mut self.heard, Instant::now());
        if self.events.is_some() && self.any_chunk {
            if self.gaps.keep(self.heard - before) {
                self.count_gaps();
            }
        } else if self.events.is_some()
            && let Some(meters) = self.live.as_ref().and_then(Live::meters)
        {
            meters.ttft.observe(self.heard - self.started);
        }
        self.chunks += 1;
        if !self.any_chunk {
            self.any_chunk = true;
            self.first = self.heard;
            self.judge(chunk);
        }
    }

    fn count_gaps(&mut self) {
        if let Some(meters) = self.live.as_ref().and_then(Live::meters) {
            self.gaps.count_in(&meters.gap);
        }
    }

    /// What the first bytes of the body say of the engine, and of the pair that moved its KV.
    fn judge(&mut self, first: &[u8]) {
        let Some(live) = &mut self.live else {
            return;
        };
        let kept = live.decode.kept.take();
        let DecodeHead {
            answer,
            lease,
            source,
            ..
        } = &live.decode;
        let status = answer.head.status;
        let broke = self.events.is_some() && sse::is_failure(first);
        if broke {
            lease.note_failed(LegFault::Failed);
        } else if status.is_success() {
            lease.note_served();
            self.app
                .note_pair_served(source.as_deref(), lease.instance());
            // Decode has read its KV.
            if let Some(kept) = kept {
                kept.taken();
            }
        }
        let names_kv = (broke || status.is_server_error()) && error::names_kv(first);
        // Gateways answer 502 to 504 for what has nothing to do with KV.
        let failed = broke || names_kv || status == StatusCode::INTERNAL_SERVER_ERROR;
        if let (true, Some(source)) = (failed, source) {
            self.app
                .note_pair_failed(source, lease.instance(), names_kv);
        }
    }

    /// Notes what is known of the chunks when no more will come.
    fn close(&mut self) {
        self.count_gaps();
        if let Some(live) = self.live.as_ref().filter(|_| self.any_chunk) {
            let lease = &live.decode.lease;
            lease.note_chunks(self.first, self.heard, self.chunks);
            if let Some(tokens) = &self.tokens {
                live.record.timeline().tokens(tokens.end());
            }
        }
    }

    fn complete(&mut self) {
        if !self.any_chunk {
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
        let owed = !self.any_chunk && live.decode.claims_blocks;
        if broken == StreamBroken::Aborted && owed {
            settle_stream(&self.app, live.decode, self.written.clone());
            record.finish(status);
            return self.tell(broken);
        }
        let whole = self.events.as_ref().is_some_and(Tail::is_done);
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
        Poll::Ready(Some(match &self.events {
            Some(events) if self.told => Ok(Frame::data(events.error_event(&error))),
            Some(_) | None => Err(broken),
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
        if !self.any_chunk && live.decode.claims_blocks {
            settle_stream(&self.app, live.decode, self.written.clone());
        }
    }
}

/// The label of a leg that was answered.
pub fn outcome_of(status: StatusCode) -> &'static str {
    match status.as_u16() {
        200..=299 => "ok",
        300..=399 => "status_3xx",
        400..=499 => "status_4xx",
        _ => "status_5xx",
    }
}
