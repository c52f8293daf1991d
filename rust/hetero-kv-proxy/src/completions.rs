//! The two legs of a completion: admit, prefill, hand over, decode, stream.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request as HttpRequest};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use crate::admit;
use crate::answer::{self, Answer, Phase, Record};
use crate::app::{App, SlotLease};
use crate::client_io::HeadWatch;
use crate::handover::{DecodeHead, HandOver};
use crate::headers;
use crate::metrics::{ReasonLabels, RoleLabels};
use crate::openai::Route;
use crate::openai::error::ApiError;
use crate::openai::request::Request;
use crate::openai::response::kv_transfer_params;
use crate::routing::{AfterFailure, AfterPrefill, Flow, InstanceIndex, LegFailure, Role};
use crate::stream::{DecodeStream, StreamLimits, outcome_of};
use crate::upstream::{self, LegBody, SendError, Written};

/// What the client is told instead of a decode answer.
enum Failure {
    /// The proxy's own error.
    Api(ApiError),
    /// An engine's answer, read whole.
    Engine(Box<Answer>),
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

/// One request as both legs need it.
struct Call {
    app: Arc<App>,
    route: Route,
    request: Request,
    headers: HeaderMap,
    written: Written,
}

/// Serves one request. Dropped when the client leaves.
pub async fn serve(
    app: Arc<App>,
    route: Route,
    request: HttpRequest<Incoming>,
    watch: &HeadWatch,
) -> Answer {
    let mut record = Record::new(Arc::clone(&app), route.path());
    match run(&app, route, request, watch, &mut record).await {
        Ok((decode, permit, call, deadline)) => {
            let status = decode.answer.head.status;
            let request_id = call.headers.get(headers::REQUEST_ID);
            let head = headers::for_client(decode.answer.head.headers.clone(), request_id);
            record.answering(status);
            let limits = StreamLimits {
                deadline,
                idle: app.config.stream_idle_timeout,
            };
            let written = call.written.clone();
            let stream = DecodeStream::new(app, decode, record, permit, limits, written);
            let mut answer = http::Response::new(answer::ClientBody::Stream(Box::new(stream)));
            *answer.status_mut() = status;
            *answer.headers_mut() = head;
            answer
        }
        Err(failure) => {
            let answer = match failure {
                Failure::Api(error) => answer::error(&error),
                Failure::Engine(answer) => *answer,
            };
            record.finish(answer.status());
            answer
        }
    }
}

type Ready = (
    DecodeHead,
    tokio::sync::OwnedSemaphorePermit,
    Arc<Call>,
    Instant,
);

async fn run(
    app: &Arc<App>,
    route: Route,
    request: HttpRequest<Incoming>,
    watch: &HeadWatch,
    record: &mut Record,
) -> Result<Ready, Failure> {
    let Ok(permit) = Arc::clone(&app.admission).try_acquire_owned() else {
        return Err(ApiError::new(
            429,
            "too_many_requests",
            "the proxy is serving as many requests as it may; try again shortly",
        )
        .into());
    };
    let deadline = record.started() + app.config.request_timeout;
    let (head, body) = request.into_parts();
    let body = admit::body(app, &head.headers, body, deadline).await?;
    watch.arm();
    let request = admit::parse(body, route)?;
    if request.is_batch() {
        app.metrics.batch_prompts.inc();
    }
    let call = Arc::new(Call {
        app: Arc::clone(app),
        route,
        request,
        headers: headers::for_legs(head.headers, random_hex)?,
        written: Written::default(),
    });

    record.enter(Phase::Prefill);
    let late = |_| Failure::from(deadline_exceeded());
    let mut flow = Flow::read(app.config.on_missing_kv);
    let sent = Instant::now();
    let (answer, lease) = timeout_at(deadline, prefill_leg(&call, &mut flow))
        .await
        .map_err(late)??;

    record.enter(Phase::HandOver);
    let rest = hand_over(Arc::clone(&call), flow, answer, lease, sent);
    let mut hand_over = HandOver::new(Arc::clone(app), call.written.clone(), rest);
    let decode = timeout_at(deadline, hand_over.head())
        .await
        .map_err(late)?
        .ok_or_else(|| ApiError::new(500, "internal", "the hand-over ended twice"))??;
    Ok((decode, permit, call, deadline))
}

/// Sends the prefill leg until there is a response head. Dropped, it closes the connection, on
/// which the engine aborts the request and pins nothing.
///
/// One race is left: an engine whose answer is on the wire when the client leaves has pinned blocks
/// that nobody claims. Their lease bounds it.
async fn prefill_leg(
    call: &Call,
    flow: &mut Flow,
) -> Result<(upstream::Answer, SlotLease), Failure> {
    let mut next = Attempt::default();
    loop {
        let lease = pick(call, Role::Prefill, next.avoid)?;
        // A new id each time: the engine that failed may still hold blocks under the old one.
        let transfer_id = random_hex()?;
        let body = LegBody::new(call.request.prefill_body(&transfer_id), None);
        match send_leg(call, &lease, body, next.fresh).await {
            Ok(answer) => return Ok((answer, lease)),
            Err(error) => next = after_failure(call, flow, Role::Prefill, lease, error)?,
        }
    }
}

/// Reads the prefill answer and sends the decode leg until there is a response head.
async fn hand_over(
    call: Arc<Call>,
    mut flow: Flow,
    prefill: upstream::Answer,
    lease: SlotLease,
    sent: Instant,
) -> Result<DecodeHead, Failure> {
    let app = &call.app;
    let status = prefill.head.status;
    let Some(body) = read_answer(app, prefill.body).await else {
        lease.end("broken");
        return Err(ApiError::new(
            502,
            "prefill_answer_broken",
            "the prefill engine's answer broke off or was too large",
        )
        .into());
    };
    prefill.connection.keep();
    lease.end(outcome_of(status));
    app.metrics
        .prefill_leg_seconds
        .observe(sent.elapsed().as_secs_f64());

    let params = kv_transfer_params(&body);
    let step = flow.prefill_answered(status.as_u16(), params.is_some());
    match step {
        AfterPrefill::HandOver => {}
        AfterPrefill::PassOn => {
            let request_id = call.headers.get(headers::REQUEST_ID);
            let headers = headers::for_client(prefill.head.headers, request_id);
            let answer = answer::passed_on(status, headers, body);
            return Err(Failure::Engine(Box::new(answer)));
        }
        AfterPrefill::MissingKv => {
            app.metrics.kv_transfer_missing.inc();
            return Err(ApiError::new(
                502,
                "kv_transfer_missing",
                "the prefill engine answered without kv_transfer_params: it runs without the KV \
                 connector, or its connector kept no blocks; see --on-missing-kv",
            )
            .into());
        }
        AfterPrefill::Recompute => {
            app.metrics.kv_transfer_missing.inc();
            let labels = ReasonLabels {
                reason: "kv_transfer_missing",
            };
            app.metrics.fallbacks.get_or_create(&labels).inc();
        }
    }

    let decode_body = call.request.decode_body(params);
    let mut next = Attempt::default();
    loop {
        let lease = pick(&call, Role::Decode, next.avoid)?;
        let body = LegBody::new(decode_body.clone(), Some(call.written.clone()));
        match send_leg(&call, &lease, body, next.fresh).await {
            Ok(answer) => return Ok(DecodeHead { answer, lease }),
            Err(error) => next = after_failure(&call, &mut flow, Role::Decode, lease, error)?,
        }
    }
}

/// How the next try of a leg differs from the first.
#[derive(Default)]
struct Attempt {
    avoid: Option<InstanceIndex>,
    fresh: bool,
}

fn pick(call: &Call, role: Role, avoid: Option<InstanceIndex>) -> Result<SlotLease, ApiError> {
    call.app.pick(role, avoid).ok_or_else(|| {
        let message = format!("no {} engine is known", role.name());
        ApiError::new(503, "no_engine", message)
    })
}

async fn send_leg(
    call: &Call,
    lease: &SlotLease,
    body: LegBody,
    fresh: bool,
) -> Result<upstream::Answer, SendError> {
    let mut headers = call.headers.clone();
    if let Some(rank) = lease.picked.rank_header {
        headers.insert(headers::DP_RANK, HeaderValue::from(rank));
    }
    let answer = lease
        .upstream()
        .send(Method::POST, call.route.path(), headers, body, fresh)
        .await?;
    // A client's mistake proves a living engine; its own failures prove nothing.
    if answer.head.status.as_u16() < 500 {
        lease.note_answer();
    }
    Ok(answer)
}

/// What follows from a leg without a response head: another try, or the error for the client.
fn after_failure(
    call: &Call,
    flow: &mut Flow,
    role: Role,
    lease: SlotLease,
    error: SendError,
) -> Result<Attempt, Failure> {
    let app = &call.app;
    let instance = lease.picked.instance;
    tracing::debug!(role = role.name(), url = &**app.label(role, instance), %error, "leg failed");
    let (failure, outcome, code) = match error {
        SendError::Connect(_) => (LegFailure::Connect, "connect", "unreachable"),
        SendError::Reset { reused, .. } => (LegFailure::Reset { reused }, "reset", "reset"),
        SendError::Request(_) => {
            lease.end("unsent");
            let message = "the request cannot be passed on";
            return Err(ApiError::new(500, "internal", message).into());
        }
    };
    if failure != (LegFailure::Reset { reused: true }) {
        app.note_unreachable(role, instance);
    }
    lease.end(outcome);
    let step = flow.leg_failed(role, failure, instance, app.instance_count(role));
    let next = match step {
        AfterFailure::RetryElsewhere { avoid } => Attempt {
            avoid: Some(avoid),
            fresh: false,
        },
        AfterFailure::RetryFresh => Attempt {
            avoid: None,
            fresh: true,
        },
        AfterFailure::GiveUp => {
            let (code, message) = match (role, code) {
                (Role::Prefill, "unreachable") => (
                    "prefill_unreachable",
                    "the prefill engine cannot be reached",
                ),
                (Role::Prefill, _) => (
                    "prefill_reset",
                    "the prefill engine closed the connection without an answer",
                ),
                (Role::Decode, "unreachable") => {
                    ("decode_unreachable", "the decode engine cannot be reached")
                }
                (Role::Decode, _) => (
                    "decode_reset",
                    "the decode engine closed the connection without an answer",
                ),
            };
            return Err(ApiError::new(502, code, message).into());
        }
    };
    let labels = RoleLabels { role: role.name() };
    app.metrics.retries.get_or_create(&labels).inc();
    Ok(next)
}

/// A prefill answer read whole; `None` when it broke off or is too large.
pub async fn read_answer(app: &App, body: Incoming) -> Option<Bytes> {
    let max = usize::try_from(app.config.prefill_answer_bytes_max).ok()?;
    let whole = http_body_util::Limited::new(body, max).collect().await;
    Some(whole.ok()?.to_bytes())
}

fn deadline_exceeded() -> ApiError {
    ApiError::new(
        504,
        "deadline_exceeded",
        "the engines did not answer before the deadline of the request",
    )
}

/// 128 random bits as 32 hex digits.
///
/// # Errors
/// 500 where the system gives no random numbers.
pub fn random_hex() -> Result<String, ApiError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|_| ApiError::new(500, "internal", "the system gives no random numbers"))?;
    Ok(hex::encode(bytes))
}
