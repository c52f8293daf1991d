//! One leg of a request: choosing its slot, sending it, and what follows when it fails.

use std::io;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, LengthLimitError};

use crate::admission::{Begun, Refused, Ticket};
use crate::answer::{self, Answer};
use crate::app::App;
use crate::bootstrap;
use crate::connectors::{Leg, Slot};
use crate::headers;
use crate::instance::Instance;
use crate::lease::SlotLease;
use crate::metrics::RoleLabels;
use crate::openai::Route;
use crate::openai::error::ApiError;
use crate::openai::request::Request;
use crate::revisions::Drawing;
use crate::routing::policy::RequestKey;
use crate::routing::{
    AfterFailure, Alone, Bound, FailedLeg, Flow, InstanceIndex, LegFailure, LegFault, Role, Traits,
};
use crate::slots::{Choice, Slots, Want};
use crate::timeline::Timeline;
use crate::trace_context::{self, TraceContext};
use crate::upstream::{self, EngineBody, LegBody, SendError, Written};

/// What the client is told instead of a decode answer.
pub(crate) enum Failure {
    /// The proxy's own error.
    Api(ApiError),
    /// An engine's answer, read whole.
    Engine(Box<Answer>),
    /// The proxy's own error: no prefill engine could be reached, and nothing was prefilled.
    NoPrefill(ApiError),
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::NoEngine(Role::Prefill) => Self::NoPrefill(no_engine(Role::Prefill)),
            Refused::NoEngine(Role::Decode) => Self::Api(no_engine(Role::Decode)),
            Refused::Told(error) => Self::Api(error),
        }
    }
}

/// A future that few requests wait for, on the heap: the others would have room for it in a state
/// that is moved as they go.
pub(crate) fn rarely<F: Future>(future: F) -> Pin<Box<F>> {
    Box::pin(future)
}

/// The error where no instance of a role takes legs.
pub(crate) fn no_engine(role: Role) -> ApiError {
    let message = format!(
        "no {} engine is there that answers its probe and is not drained; GET /workers, here or on \
         the listener of --admin-listen, shows each engine and its state",
        role.name()
    );
    ApiError::new(503, "no_engine", message)
}

/// One request as both legs need it.
pub(crate) struct Call {
    pub(crate) app: Arc<App>,
    pub(crate) route: Route,
    pub(crate) request: Request,
    /// The model that it names, where workers tell theirs.
    pub(crate) model: Option<String>,
    /// The prefill worker that the client names.
    pub(crate) endpoint: Option<InstanceIndex>,
    /// By what its revision is drawn, where revisions have weights.
    pub(crate) drawing: Option<Drawing>,
    pub(crate) headers: HeaderMap,
    pub(crate) key: RequestKey,
    pub(crate) written: Written,
    pub(crate) ticket: Ticket,
    /// When the request's head came, by the clock of routing.
    pub(crate) head_us: u64,
    /// Where its legs are noted.
    pub(crate) timeline: Arc<Timeline>,
    /// Whose trace it belongs to.
    pub(crate) trace: Option<TraceContext>,
}

impl Call {
    /// Takes the slots of the first legs, waiting for room.
    pub(crate) async fn slots(
        &self,
        prefill: Option<Choice<'_>>,
        decode: Option<Choice<'_>>,
    ) -> Result<Slots, Refused> {
        let slots = self.take(prefill, decode, None, Begun::No).await?;
        for lease in [&slots.prefill, &slots.decode].into_iter().flatten() {
            lease.note_queue(self.head_us);
        }
        Ok(slots)
    }

    /// Takes slots for another pair of legs.
    pub(crate) async fn pair_again(
        &self,
        avoid_prefill: &[InstanceIndex],
        avoid_decode: &[InstanceIndex],
    ) -> Result<Slots, Refused> {
        let prefill = Choice::Any {
            avoid: avoid_prefill,
        };
        let decode = Choice::Any {
            avoid: avoid_decode,
        };
        self.take(Some(prefill), Some(decode), None, Begun::Yes)
            .await
    }

    /// Takes a slot for another leg of a request that has begun; where the other leg has its worker,
    /// `peer`, one that goes with it.
    pub(crate) async fn slot(
        &self,
        role: Role,
        avoid: &[InstanceIndex],
        peer: Option<&Instance>,
    ) -> Result<SlotLease, Failure> {
        let choice = Some(Choice::Any { avoid });
        let taken = match role {
            Role::Prefill => self.take(choice, None, peer, Begun::Yes).await?.prefill,
            Role::Decode => self.take(None, choice, peer, Begun::Yes).await?.decode,
        };
        taken.ok_or_else(|| no_engine(role).into())
    }

    async fn take(
        &self,
        prefill: Option<Choice<'_>>,
        decode: Option<Choice<'_>>,
        peer: Option<&Instance>,
        begun: Begun,
    ) -> Result<Slots, Refused> {
        let named = self.endpoint.map(Choice::At);
        let want = Want {
            prefill: prefill.map(|any| named.unwrap_or(any)),
            decode,
            partner: peer.map(|peer| peer.index),
            key: &self.key,
            bound: self.bound(peer.map(|peer| &peer.worker.traits)),
        };
        let app = &self.app;
        let mut slots = app.admission.slots(app, &want, &self.ticket, begun).await?;
        for lease in [&mut slots.prefill, &mut slots.decode]
            .into_iter()
            .flatten()
        {
            lease.follow(&self.timeline);
        }
        Ok(slots)
    }

    fn bound<'a>(&'a self, peer: Option<&'a Traits>) -> Bound<'a> {
        Bound {
            model: self.model.as_deref(),
            peer,
            draw: self.drawing.as_ref().map(Drawing::draw),
            only: None,
        }
    }

    /// Why decode serves the request alone, where policy `auto` decides. Who names the prefill
    /// worker has decided.
    pub(crate) fn auto_alone(&self) -> Option<Alone> {
        let rules = self.app.config().auto.filter(|_| self.endpoint.is_none())?;
        let want = Want {
            prefill: None,
            decode: None,
            partner: None,
            key: &self.key,
            bound: self.bound(None),
        };
        let scene = self.app.scene(&want, self.request.prompt().len())?;
        rules.alone(&scene)
    }

    /// Instances that may serve a leg.
    fn instances(&self, role: Role) -> usize {
        match (role, self.endpoint) {
            (Role::Prefill, Some(_)) => 1,
            (Role::Prefill | Role::Decode, _) => self.app.routable(role).len(),
        }
    }

    /// The id by which an engine's answer is the client's.
    pub(crate) fn request_id(&self) -> Option<&HeaderValue> {
        self.headers.get(headers::REQUEST_ID)
    }

    /// An engine's answer, read whole, as the client gets it.
    pub(crate) fn passed_on(&self, head: http::response::Parts, body: Bytes) -> Failure {
        let headers = headers::for_client(head.headers, self.request_id());
        let answer = answer::passed_on(head.status, headers, body);
        Failure::Engine(Box::new(answer))
    }

    /// Sends a leg and waits for the response head.
    pub(crate) async fn send(
        &self,
        lease: &SlotLease,
        body: LegBody,
        leg: Option<&Leg>,
        fresh: bool,
    ) -> Result<upstream::Answer, SendError> {
        let mut extra = Vec::new();
        if let Some(rank) = lease.picked.rank_header {
            extra.push((headers::DP_RANK, HeaderValue::from(rank)));
        }
        if let Some(id) = leg.and_then(|leg| leg.request_id.as_deref()) {
            let id = HeaderValue::try_from(id).map_err(http::Error::from)?;
            extra.push((headers::REQUEST_ID, id));
        }
        if let Some((parent_id, header)) = trace_context::leg(&self.app, self.trace) {
            lease.note_parent(parent_id);
            extra.push((trace_context::TRACEPARENT, header));
        }
        let (path, headers) = (self.route.path(), &self.headers);
        lease.begin();
        let answer = lease
            .upstream()
            .send(&Method::POST, path, headers, &extra, body, fresh)
            .await?;
        lease.note_head(answer.head.status);
        // A client's mistake proves a living engine; its own failures prove nothing.
        let status = answer.head.status.as_u16();
        if status < 500 {
            lease.note_answer();
        }
        if is_engine_failure(status) {
            lease.note_failed(LegFault::Failed);
        }
        Ok(answer)
    }

    /// Sends the prefill leg, and notes in `written` when the engine had it.
    pub(crate) async fn send_prefill(
        &self,
        lease: &SlotLease,
        leg: &Leg,
        fresh: bool,
        written: Option<Written>,
    ) -> Result<upstream::Answer, SendError> {
        let body = LegBody::new(self.request.prefill_body(&leg.params), written);
        self.send(lease, body, Some(leg), fresh).await
    }

    /// Sends the decode leg, with what `leg` adds or as the client sent it.
    pub(crate) async fn send_decode(
        &self,
        lease: &SlotLease,
        leg: Option<&Leg>,
        fresh: bool,
    ) -> Result<upstream::Answer, SendError> {
        let params = leg.map(|leg| leg.params.as_str());
        let body = self.request.decode_body(params);
        let body = LegBody::new(body, Some(self.written.clone()));
        self.send(lease, body, leg, fresh).await
    }

    /// The engine id at the prefill slot, for a connector that needs it.
    pub(crate) async fn engine_id(&self, lease: &SlotLease) -> Result<Option<Arc<str>>, SendError> {
        let config = self.app.config();
        if !config.connector.needs_engine_id() {
            return Ok(None);
        }
        rarely(bootstrap::engine_id(&config, lease)).await.map(Some)
    }
}

/// How the next try of a leg differs from the first.
#[derive(Default, Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) fresh: bool,
}

/// A chosen slot as connectors see it.
pub(crate) fn slot<'a>(lease: &'a SlotLease, engine_id: Option<&'a str>) -> Slot<'a> {
    Slot {
        peer: lease.instance().peer(),
        rank: lease.picked.rank,
        engine_id,
    }
}

/// What follows from a leg without a response head: another try, or the error for the client.
pub(crate) fn after_failure(
    call: &Call,
    flow: &mut Flow,
    lease: SlotLease,
    has_handle: bool,
    error: SendError,
) -> Result<Attempt, Failure> {
    let app = &call.app;
    let instance = Arc::clone(lease.instance());
    let role = instance.role;
    let url = &*instance.label;
    tracing::debug!(role = role.name(), url, %error, "leg failed");
    let mut detail = None;
    let (failure, fault, outcome, code) = match error {
        SendError::Connect(_) => {
            let fault = LegFault::Unreachable;
            (LegFailure::Connect, fault, "connect", "unreachable")
        }
        SendError::Reset { reused, .. } => {
            let fault = LegFault::Failed;
            (LegFailure::Reset { reused }, fault, "reset", "reset")
        }
        SendError::Malformed(fault) => {
            detail = Some(fault);
            let failure = LegFailure::Reset { reused: false };
            (failure, LegFault::Failed, "malformed", "malformed")
        }
        SendError::Bootstrap(reason) => {
            tracing::warn!(url, reason, "bootstrap server");
            let fault = LegFault::Failed;
            (LegFailure::Connect, fault, "bootstrap", "bootstrap")
        }
        SendError::Request(_) => {
            lease.end("unsent");
            let message = "the request cannot be passed on";
            return Err(ApiError::new(500, "internal", message).into());
        }
    };
    if failure != (LegFailure::Reset { reused: true }) {
        app.note_unreachable(&instance);
        lease.note_failed(fault);
    }
    lease.end(outcome);
    let leg = FailedLeg {
        role,
        failure,
        has_handle,
        instance: instance.index,
    };
    let step = flow.leg_failed(leg, call.instances(role));
    let next = match step {
        AfterFailure::RetryElsewhere => Attempt { fresh: false },
        AfterFailure::RetryFresh => Attempt { fresh: true },
        AfterFailure::GiveUp => {
            let error = match detail {
                Some(fault) => malformed(role, &fault),
                None => given_up(role, code),
            };
            let not_reached = role == Role::Prefill && failure == LegFailure::Connect;
            return Err(match not_reached {
                true => Failure::NoPrefill(error),
                false => Failure::Api(error),
            });
        }
    };
    count_retry(app, role);
    Ok(next)
}

fn count_retry(app: &App, role: Role) {
    let labels = RoleLabels { role: role.name() };
    app.metrics.retries.get_or_create(&labels).inc();
}

/// Whether an answered leg is sent to another engine: this one refuses it at present.
pub(crate) fn tries_elsewhere(
    call: &Call,
    flow: &mut Flow,
    lease: &SlotLease,
    has_handle: bool,
    status: StatusCode,
) -> bool {
    let app = &call.app;
    if status.is_success() {
        return false;
    }
    let role = lease.role();
    let leg = FailedLeg {
        role,
        failure: LegFailure::Refused {
            status: status.as_u16(),
        },
        has_handle,
        instance: lease.picked.instance,
    };
    match flow.leg_failed(leg, call.instances(role)) {
        AfterFailure::RetryElsewhere => {
            count_retry(app, role);
            true
        }
        AfterFailure::RetryFresh | AfterFailure::GiveUp => false,
    }
}

/// The last answer of an engine that refused a leg which was then tried elsewhere.
#[derive(Default)]
pub(crate) struct Refusal(Option<upstream::Answer>);

impl Refusal {
    /// Remembers an answer. Its body stays unread, and is small or never wanted.
    pub(crate) fn set(&mut self, answer: upstream::Answer) {
        self.0 = Some(answer);
    }

    /// What the client is told when the other tries failed too: an engine's own words, such as when
    /// to come again, say more than that another could not be reached.
    pub(crate) async fn or(self, call: &Call, failure: Failure) -> Failure {
        let Some(answer) = self.0 else {
            return failure;
        };
        match rarely(read_answer(&call.app, answer.body)).await {
            Ok(body) => call.passed_on(answer.head, body),
            Err(_) => failure,
        }
    }
}

fn given_up(role: Role, code: &str) -> ApiError {
    let (code, message) = match (role, code) {
        (Role::Prefill, "unreachable") => (
            "prefill_unreachable",
            "the prefill engine cannot be reached",
        ),
        (Role::Prefill, "bootstrap") => (
            "prefill_bootstrap",
            "the prefill engine's bootstrap server does not name the engine of the chosen rank",
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
    ApiError::new(502, code, message)
}

/// The error where an engine answers what is no HTTP/1.
pub(crate) fn malformed(role: Role, fault: &str) -> ApiError {
    let code = match role {
        Role::Prefill => "prefill_malformed",
        Role::Decode => "decode_malformed",
    };
    let role = role.name();
    let message = format!("the {role} engine's answer is not well-formed: {fault}");
    ApiError::new(502, code, message)
}

/// Whether a status says that the engine, or what stands in front of it, has failed. Another one, such
/// as 501, says something of the request.
fn is_engine_failure(status: u16) -> bool {
    matches!(status, 500 | 502 | 503 | 504)
}

/// Why an answer cannot be read whole.
#[derive(Debug)]
pub(crate) enum Unreadable {
    /// The connection broke.
    Broken,
    /// What is wrong with its framing.
    Malformed(String),
    /// It is longer than this.
    TooLarge(u64),
}

impl Unreadable {
    fn of(error: &(dyn std::error::Error + 'static), max: u64) -> Self {
        if error.is::<LengthLimitError>() {
            return Self::TooLarge(max);
        }
        let error = error.downcast_ref::<io::Error>();
        match error.and_then(upstream::malformed) {
            Some(fault) => Self::Malformed(fault),
            None => Self::Broken,
        }
    }

    /// How a leg ended whose answer it was.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Broken | Self::TooLarge(_) => "broken",
            Self::Malformed(_) => "malformed",
        }
    }

    /// Whether it is the engine's fault. What is too large may be so by what the client asks for,
    /// and another engine's would be as large.
    pub(crate) fn is_fault(&self) -> bool {
        match self {
            Self::Broken | Self::Malformed(_) => true,
            Self::TooLarge(_) => false,
        }
    }

    /// What the client is told of a prefill answer.
    pub(crate) fn of_prefill(self) -> ApiError {
        match self {
            Self::Malformed(fault) => malformed(Role::Prefill, &fault),
            Self::Broken => ApiError::new(
                502,
                "prefill_answer_broken",
                "the prefill engine's answer broke off",
            ),
            Self::TooLarge(max) => ApiError::new(
                502,
                "prefill_answer_too_large",
                format!(
                    "the prefill engine's answer is larger than the {max} bytes of \
                     --prefill-answer-bytes-max"
                ),
            ),
        }
    }
}

/// An answer read whole.
pub(crate) async fn read_answer(app: &App, body: EngineBody) -> Result<Bytes, Unreadable> {
    let max = app.config().prefill_answer_bytes_max;
    let bytes_max = usize::try_from(max).unwrap_or(usize::MAX);
    let whole = http_body_util::Limited::new(body, bytes_max)
        .collect()
        .await;
    match whole {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) => Err(Unreadable::of(&*error, max)),
    }
}

/// What follows from a prefill answer that cannot be read: another try, or the error for the
/// client. Nothing of the answer has gone anywhere, and the next try has a new transfer id.
pub(crate) fn after_unreadable(
    call: &Call,
    flow: &mut Flow,
    instance: InstanceIndex,
    fault: Unreadable,
) -> Result<(), ApiError> {
    if !fault.is_fault() {
        return Err(fault.of_prefill());
    }
    let leg = FailedLeg {
        role: Role::Prefill,
        failure: LegFailure::Reset { reused: false },
        has_handle: false,
        instance,
    };
    match flow.leg_failed(leg, call.instances(Role::Prefill)) {
        AfterFailure::RetryElsewhere | AfterFailure::RetryFresh => {
            count_retry(&call.app, Role::Prefill);
            Ok(())
        }
        AfterFailure::GiveUp => Err(fault.of_prefill()),
    }
}
