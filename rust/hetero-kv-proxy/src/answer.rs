//! What a client gets: bodies, error answers, and the record of how each request ended.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use crate::app::App;
use crate::headers;
use crate::metrics::{PhaseLabels, RequestLabels, RouteLabels};
use crate::openai::error::ApiError;
use crate::stream::{DecodeStream, StreamBroken};
use crate::timeline::Timeline;
use crate::trace_context::TraceContext;

/// Status that stands in metrics for a client that left before its answer began.
const CLIENT_LEFT: u16 = 499;

/// The body of any answer.
#[derive(Debug)]
pub enum ClientBody {
    /// Bytes that are all there.
    Full(Bytes),
    /// A decode answer as it comes.
    Stream(Box<DecodeStream>),
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = StreamBroken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamBroken>>> {
        match &mut *self {
            Self::Full(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Full(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Stream(stream) => stream.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_empty(),
            Self::Stream(stream) => stream.is_ended(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Stream(stream) => stream.size_hint(),
        }
    }
}

/// Any answer.
pub type Answer = Response<ClientBody>;

/// Bytes with a content type.
pub fn full(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(ClientBody::Full(body.into()));
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

/// An engine's answer that was read whole.
pub fn passed_on(status: StatusCode, headers: HeaderMap, body: Bytes) -> Answer {
    let mut answer = Response::new(ClientBody::Full(body));
    *answer.status_mut() = status;
    *answer.headers_mut() = headers;
    answer
}

/// The proxy's own error.
pub fn error(error: &ApiError) -> Answer {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = full(status, "application/json", error.body());
    if matches!(error.status, 429 | 503) {
        answer
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    answer
}

/// The answer with the id by which its request is found again, where there is one and it has none.
pub(crate) fn named(mut answer: Answer, id: Option<HeaderValue>) -> Answer {
    if let Some(id) = id {
        answer
            .headers_mut()
            .entry(headers::REQUEST_ID)
            .or_insert(id);
    }
    answer
}

/// Where a request is in its life; the label of `client_disconnects_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Its body is being read.
    Admit,
    /// It waits for the slots of its first legs.
    Queue,
    /// The prefill leg is out and not answered.
    Prefill,
    /// Prefill has answered; the decode leg is on its way or not answered.
    HandOver,
    /// The decode answer is passed on.
    Stream,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Queue => "queue",
            Self::Prefill => "prefill",
            Self::HandOver => "handover",
            Self::Stream => "stream",
        }
    }
}

/// Counts one request exactly once, however it ends. Dropped without [`Record::finish`] it counts a
/// client that left: hyper drops a request's future, or the body of its answer, when the client
/// closes its connection.
#[derive(Debug)]
pub struct Record {
    app: Arc<App>,
    route: &'static str,
    started: Instant,
    phase: Phase,
    status: Option<u16>,
    finished: bool,
    timeline: Arc<Timeline>,
}

impl Record {
    /// A request that begins now.
    pub fn new(app: Arc<App>, route: &'static str) -> Self {
        let started = Instant::now();
        Self {
            timeline: Arc::new(Timeline::new(route, app.us_at(started))),
            app,
            route,
            started,
            phase: Phase::Admit,
            status: None,
            finished: false,
        }
    }

    /// When the request began, by the clock of routing.
    pub(crate) fn started_us(&self) -> u64 {
        self.timeline.started_us
    }

    /// When the request began.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// What its legs are known by.
    pub(crate) fn identify(&self, headers: &HeaderMap, trace: Option<TraceContext>) {
        let id = headers.get(headers::REQUEST_ID);
        self.timeline.identify(id, trace);
    }

    /// The id that its legs carry; none before there are any.
    pub(crate) fn id(&self) -> Option<HeaderValue> {
        self.timeline.id_header().cloned()
    }

    /// Where what happens to it is noted.
    pub(crate) fn timeline(&self) -> Arc<Timeline> {
        Arc::clone(&self.timeline)
    }

    /// The route, as metrics name it.
    pub fn route(&self) -> &'static str {
        self.route
    }

    /// The request goes into another phase.
    pub fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.timeline.enter(phase, self.app.now_us());
    }

    /// The head of the answer goes out with this status; its body follows.
    pub fn answering(&mut self, status: StatusCode) {
        self.enter(Phase::Stream);
        self.status = Some(status.as_u16());
    }

    /// The request ended with this status, or with the one that is already out.
    pub fn finish(mut self, status: StatusCode) {
        self.status.get_or_insert(status.as_u16());
        self.finished = true;
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let status = self.status.unwrap_or(CLIENT_LEFT);
        let labels = RequestLabels {
            route: self.route,
            status,
        };
        let metrics = &self.app.metrics;
        metrics.requests.get_or_create(&labels).inc();
        let by_route = metrics
            .request_seconds
            .get_or_create(&RouteLabels { route: self.route });
        by_route.observe(self.started.elapsed());
        drop(by_route);
        let phase = self.phase.name();
        if !self.finished {
            let labels = PhaseLabels { phase };
            metrics.client_disconnects.get_or_create(&labels).inc();
        }
        let timeline = &self.timeline;
        timeline.end(status, self.app.now_us());
        if is_logged() {
            log(timeline, phase, self.finished);
        }
        let max = self.app.config().trace_requests_max;
        self.app.timelines.keep(Arc::clone(timeline), max);
    }
}

/// Whether requests are logged one by one.
pub(crate) fn is_logged() -> bool {
    tracing::enabled!(tracing::Level::DEBUG)
}

/// One line for one request. Nothing that a client wrote but its id is in it.
fn log(timeline: &Timeline, phase: &'static str, complete: bool) {
    timeline.seen(|seen| {
        let leg = |role| seen.legs.iter().rfind(|leg| leg.role == role);
        let (prefill, decode) = (leg("prefill"), leg("decode"));
        let ms = |from_us: u64, to_us: u64| {
            (from_us > 0 && to_us >= from_us).then(|| (to_us - from_us) as f64 / 1e3)
        };
        tracing::debug!(
            request_id = timeline.id(),
            trace_id = timeline.trace().map(TraceContext::trace_id),
            route = timeline.route,
            status = seen.status,
            phase,
            complete,
            prefill = prefill.map(|leg| &*leg.instance),
            prefill_rank = prefill.map(|leg| leg.rank),
            prefill_ms = prefill.and_then(|leg| ms(leg.sent_us, leg.ended_us)),
            decode = decode.map(|leg| &*leg.instance),
            decode_rank = decode.map(|leg| leg.rank),
            decode_head_ms = decode.and_then(|leg| ms(leg.sent_us, leg.head_us)),
            first_chunk_ms = decode.and_then(|leg| ms(timeline.started_us, leg.first_us)),
            chunks = decode.map(|leg| leg.chunks),
            prompt_tokens = seen.tokens.prompt,
            cached_tokens = seen.tokens.cached,
            completion_tokens = seen.tokens.completion,
            legs = seen.legs.len(),
            ms = ms(timeline.started_us, seen.ended_us),
            "request"
        );
    });
}
