//! One completion: admitted, served by the legs that its order asks for, and answered.

use std::pin::pin;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Request as HttpRequest, header};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::admission::Ticket;
use crate::admit;
use crate::answer::{self, Answer, Phase, Record};
use crate::app::App;
use crate::client_io::HeadWatch;
use crate::config::{Config, OnNoPrefill};
use crate::connectors::Order;
use crate::decode::{NoHandOver, decode_alone, hand_over};
use crate::handover::{DecodeHead, HandOver};
use crate::headers;
use crate::legs::{Call, Failure, deadline_exceeded, ended_twice};
use crate::openai::Route;
use crate::openai::request::Request;
use crate::prefill::prefill_leg;
use crate::random::random_hex;
use crate::routing::policy::{KeyParts, RequestKey};
use crate::routing::{Flow, FlowRules};
use crate::running::{Running, aborted};
use crate::seats::Seat;
use crate::slots::{Choice, Slots};
use crate::stream::DecodeStream;
use crate::together;
use crate::trace_context;
use crate::upstream::Written;

/// Serves one request. Dropped when the client leaves.
pub async fn serve(
    app: Arc<App>,
    route: Route,
    request: HttpRequest<Incoming>,
    watch: &HeadWatch,
) -> Answer {
    let mut record = Record::new(Arc::clone(&app), route.path());
    let sent_id = request.headers().get(headers::REQUEST_ID).cloned();
    match run(&app, route, request, watch, &mut record).await {
        Ok(begun) => begun.answer(app, record, watch).await,
        Err(failure) => {
            let answer = match failure {
                Failure::Api(error) | Failure::NoPrefill(error) => answer::error(&error),
                Failure::Engine(answer) => *answer,
            };
            let answer = answer::named(answer, record.id().or(sent_id));
            record.finish(answer.status());
            answer
        }
    }
}

/// A decode answer that has a head, with what lives as long as its body.
pub(crate) struct Begun {
    pub(crate) decode: DecodeHead,
    pub(crate) seat: Seat,
    pub(crate) running: Running,
    pub(crate) request_id: Option<HeaderValue>,
    pub(crate) written: Written,
    pub(crate) deadline: Instant,
}

impl Begun {
    /// The answer as the client gets it. An answer that breaks before anything of its body has come
    /// is an error with a status of its own; the head of an event stream is not held back for that.
    pub(crate) async fn answer(
        mut self,
        app: Arc<App>,
        record: Record,
        watch: &HeadWatch,
    ) -> Answer {
        let head = &mut self.decode.answer.head;
        let status = head.status;
        let headers = std::mem::take(&mut head.headers);
        let headers = headers::for_client(headers, self.request_id.as_ref());
        let is_events = headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let is_json = headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
        let readable = is_events || (is_json && status.is_success());
        if !readable || headers.contains_key(header::CONTENT_ENCODING) {
            self.decode.cached = None;
        }
        let mut stream = DecodeStream::new(app, self, is_events, record, watch.leg());
        if let Err(error) = stream.begin().await {
            let id = headers.get(headers::REQUEST_ID).cloned();
            return answer::named(answer::error(&error), id);
        }
        let mut answer = http::Response::new(answer::ClientBody::Stream(Box::new(stream)));
        *answer.status_mut() = status;
        *answer.headers_mut() = headers;
        answer
    }
}

async fn run(
    app: &Arc<App>,
    route: Route,
    request: HttpRequest<Incoming>,
    watch: &HeadWatch,
    record: &mut Record,
) -> Result<Begun, Failure> {
    let config = app.config();
    let deadline = record.started() + config.request_timeout;
    let (head, body) = request.into_parts();
    let (seat, body) = admit::enter(app, &head.headers, body, watch, deadline).await?;
    let request = admit::parse(body, route)?;
    if request.is_batch() {
        app.metrics.batch_prompts.inc();
    }
    let endpoint = request.prefill_endpoint();
    let endpoint = endpoint.map(|url| app.prefill_endpoint(url)).transpose()?;
    let connector = config.connector;
    let alone = request.runs_alone(connector.shares_transfer());
    let mut headers = headers::for_legs(head.headers, random_hex)?;
    let trace = trace_context::enter(app, &mut headers);
    record.identify(&headers, trace);
    let call = Arc::new(Call {
        app: Arc::clone(app),
        route,
        connector,
        key: request_key(&config, &request, &headers),
        endpoint,
        drawing: app.drawing(&headers),
        model: app.reads_model().then(|| request.model_name()).flatten(),
        request,
        headers,
        written: Written::default(),
        ticket: Ticket::default(),
        head_us: record.started_us(),
        timeline: record.timeline(),
        trace,
    });
    let order = match (alone, connector.order()) {
        (_, Order::DecodeAlone) => Order::DecodeAlone,
        (Some(reason), Order::PrefillFirst | Order::Together) => {
            app.count_fallback(reason);
            Order::DecodeAlone
        }
        (None, Order::PrefillFirst | Order::Together)
            if call.endpoint.is_none() && app.serves_alone() =>
        {
            app.count_fallback("same_engine");
            Order::DecodeAlone
        }
        (None, order) => match call.auto_alone() {
            Some(why) => {
                app.count_fallback(why.reason());
                Order::DecodeAlone
            }
            None => order,
        },
    };
    let running = Running::enter(app, &call.headers);
    // Pinned where it is: what waits for it would move all of its state.
    let legs = pin!(legs(&call, order, record));
    let decode = tokio::select! {
        biased;
        // A timer of its own would not ring while a leg takes all that a task may do in one turn.
        decode = timeout_at(deadline, legs) => {
            decode.unwrap_or_else(|_| Err(deadline_exceeded().into()))?
        }
        // As if the client had left.
        () = running.aborted() => return Err(aborted().into()),
    };
    Ok(Begun {
        decode,
        seat,
        running,
        request_id: call.request_id().cloned(),
        written: call.written.clone(),
        deadline,
    })
}

/// What the policies go by, where one of them reads it.
fn request_key(config: &Config, request: &Request, headers: &HeaderMap) -> RequestKey {
    if !config.prefill_policy.reads_key() && !config.decode_policy.reads_key() {
        return RequestKey::default();
    }
    let session = config.hash_header.as_ref();
    RequestKey::new(&KeyParts {
        model: request.model(),
        prompt: request.prompt(),
        session: session
            .and_then(|name| headers.get(name))
            .map(HeaderValue::as_bytes),
        prompt_bytes: config.hash_prompt_bytes,
    })
}

/// Sends the legs until there is a head of a decode answer.
async fn legs(call: &Arc<Call>, order: Order, record: &mut Record) -> Result<DecodeHead, Failure> {
    match legs_in_order(call, order, record).await {
        Err(Failure::NoPrefill(_))
            if call.app.config().on_no_prefill == OnNoPrefill::DecodeOnly =>
        {
            call.app.count_fallback("no_prefill");
            legs_in_order(call, Order::DecodeAlone, record).await
        }
        ended => ended,
    }
}

async fn legs_in_order(
    call: &Arc<Call>,
    order: Order,
    record: &mut Record,
) -> Result<DecodeHead, Failure> {
    let app = &call.app;
    let config = app.config();
    let flow = Flow::new(FlowRules {
        require_kv: config.require_kv,
        retries_max: config.retries_max,
        refuses_second_read: config.connector.refuses_second_read(),
    });
    record.enter(Phase::Queue);
    let mut slots = first_slots(call, &config, order).await?;
    let mut order = order;
    if let (Some(prefill), Some(decode)) = (&slots.prefill, &slots.decode)
        && app
            .twins
            .are_one(prefill.instance().index, decode.instance().index)
    {
        app.count_fallback("same_engine");
        slots.prefill = None;
        order = Order::DecodeAlone;
    }
    match order {
        Order::DecodeAlone => {
            record.enter(Phase::HandOver);
            // Nothing is pinned anywhere: a client that leaves closes the leg at once.
            decode_alone(call, flow, slots.decode).await
        }
        Order::PrefillFirst => {
            record.enter(Phase::Prefill);
            let (mut flow, mut slots) = (flow, slots);
            loop {
                let prefilled = prefill_leg(call, flow, slots).await?;
                record.enter(Phase::HandOver);
                let rest = hand_over(Arc::clone(call), prefilled);
                let mut hand_over = HandOver::new(Arc::clone(app), call.written.clone(), rest);
                match hand_over.head().await.ok_or_else(ended_twice)? {
                    Ok(decode) => return Ok(decode),
                    Err(NoHandOver::Told(failure)) => return Err(failure),
                    Err(NoHandOver::Unread(unread)) => {
                        (flow, slots) = unread.again(call)?;
                        record.enter(Phase::Prefill);
                    }
                }
            }
        }
        Order::Together => {
            record.enter(Phase::HandOver);
            let leaving = CancellationToken::new();
            let rest = together::both_legs(Arc::clone(call), flow, slots, leaving.clone());
            let mut hand_over = HandOver::new(Arc::clone(app), call.written.clone(), rest);
            // Dropped here, it closes the prefill leg at once; the decode leg has its grace.
            let leaving = leaving.drop_guard();
            let decode = hand_over.head().await.ok_or_else(ended_twice)??;
            leaving.disarm();
            Ok(decode)
        }
    }
}

/// Takes the slots that the first legs need.
async fn first_slots(call: &Call, config: &Config, order: Order) -> Result<Slots, Failure> {
    let any = Some(Choice::Any { avoid: &[] });
    // Where decode may be without room its slot is taken first: blocks never wait for it.
    // And where one engine may be both, it is known before anything is prefilled.
    let pair = config.connector.needs_pair()
        || config.decode_requests_max.is_some()
        || !call.app.twins.is_empty();
    let (prefill, decode) = match order {
        Order::DecodeAlone => (None, any),
        Order::PrefillFirst => (any, any.filter(|_| pair)),
        Order::Together => (any, any),
    };
    let slots = call.slots(prefill, decode).await?;
    if let (Some(drawing), Some(drawn)) = (&call.drawing, slots.drawn) {
        call.app.count_drawn(drawing, drawn);
    }
    Ok(slots)
}
