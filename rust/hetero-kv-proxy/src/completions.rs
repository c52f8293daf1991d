//! The two legs of a completion: admit, prefill, hand over, decode, stream.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Request as HttpRequest, header};
use hyper::body::Incoming;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::admission::Ticket;
use crate::admit;
use crate::answer::{self, Answer, Phase, Record, is_logged};
use crate::app::App;
use crate::client_io::HeadWatch;
use crate::config::OnNoPrefill;
use crate::connectors::{Leg, Order, Slot, Transfer};
use crate::handover::{DecodeHead, HandOver};
use crate::headers;
use crate::instance::Instance;
use crate::lease::SlotLease;
use crate::legs::{
    Attempt, Call, Failure, Refusal, Unreadable, after_failure, after_unreadable, rarely,
    read_answer, slot, tries_elsewhere,
};
use crate::openai::Route;
use crate::openai::error::ApiError;
use crate::openai::request::Request;
use crate::openai::response::{self, Ended};
use crate::openai::tokens::Tokens;
use crate::openai::usage::Cached;
use crate::prefill::{self, Prefilled, Transferring};
use crate::random::random_hex;
use crate::routing::policy::{KeyParts, RequestKey};
use crate::routing::{AfterPrefill, Flow, FlowRules, InstanceIndex, LegFault, Role};
use crate::running::{Running, aborted};
use crate::seats::Seat;
use crate::slots::{Choice, Slots};
use crate::stream::{DecodeStream, outcome_of};
use crate::together;
use crate::trace_context;
use crate::upstream::{self, Written};

/// Serves one request. Dropped when the client leaves.
pub async fn serve(
    app: Arc<App>,
    route: Route,
    request: HttpRequest<Incoming>,
    watch: &HeadWatch,
) -> Answer {
    let mut record = Record::new(Arc::clone(&app), route.path());
    match run(&app, route, request, watch, &mut record).await {
        Ok(begun) => begun.answer(app, record, watch).await,
        Err(failure) => {
            let answer = match failure {
                Failure::Api(error) | Failure::NoPrefill(error) => answer::error(&error),
                Failure::Engine(answer) => *answer,
            };
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
            return answer::error(&error);
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
    let deadline = record.started() + app.config().request_timeout;
    let (head, body) = request.into_parts();
    let (seat, body) = admit::enter(app, &head.headers, body, watch, deadline).await?;
    let request = admit::parse(body, route)?;
    if request.is_batch() {
        app.metrics.batch_prompts.inc();
    }
    let endpoint = request.prefill_endpoint();
    let endpoint = endpoint.map(|url| app.prefill_endpoint(url)).transpose()?;
    let connector = app.config().connector;
    let alone = request.runs_alone(connector.shares_transfer());
    let mut headers = headers::for_legs(head.headers, random_hex)?;
    let trace = trace_context::enter(app, &mut headers);
    record.identify(&headers, trace);
    let call = Arc::new(Call {
        app: Arc::clone(app),
        route,
        key: request_key(app, &request, &headers),
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
    let decode = tokio::select! {
        biased;
        decode = legs(&call, order, record) => decode?,
        () = sleep_until(deadline) => return Err(deadline_exceeded().into()),
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
fn request_key(app: &App, request: &Request, headers: &HeaderMap) -> RequestKey {
    let config = app.config();
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
    let slots = first_slots(call, order).await?;
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
async fn first_slots(call: &Call, order: Order) -> Result<Slots, Failure> {
    let config = call.app.config();
    let any = Some(Choice::Any { avoid: &[] });
    // Where decode may be without room its slot is taken first: blocks never wait for it.
    let pair = config.connector.needs_pair() || config.decode_requests_max.is_some();
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

/// Sends the client's body to a decode engine until there is an answer to pass on.
async fn decode_alone(
    call: &Call,
    mut flow: Flow,
    taken: Option<SlotLease>,
) -> Result<DecodeHead, Failure> {
    let (answer, lease) = decode_leg(call, &mut flow, taken, None, |_| None).await?;
    Ok(DecodeHead::alone(answer, lease))
}

/// Sends a decode leg until there is an answer to pass on; `prefilled` keeps blocks for it.
async fn decode_leg(
    call: &Call,
    flow: &mut Flow,
    mut taken: Option<SlotLease>,
    prefilled: Option<&Instance>,
    mut leg: impl FnMut(&SlotLease) -> Option<Leg>,
) -> Result<(upstream::Answer, SlotLease), Failure> {
    let has_handle = prefilled.is_some();
    let peer = prefilled;
    let mut refusal = Refusal::default();
    let tries = async {
        let mut next = Attempt::default();
        loop {
            let lease = match taken.take() {
                Some(lease) => lease,
                None => {
                    call.slot(Role::Decode, flow.tried(Role::Decode), peer)
                        .await?
                }
            };
            match call
                .send_decode(&lease, leg(&lease).as_ref(), next.fresh)
                .await
            {
                Ok(answer) => {
                    let status = answer.head.status;
                    if !tries_elsewhere(call, flow, &lease, has_handle, status) {
                        return Ok((answer, lease));
                    }
                    lease.end(outcome_of(status));
                    refusal.set(answer);
                    next = Attempt::default();
                }
                Err(error) => next = after_failure(call, flow, lease, has_handle, error)?,
            }
        }
    };
    let ended = tries.await;
    match ended {
        Ok(begun) => Ok(begun),
        Err(failure) => Err(rarely(refusal.or(call, failure)).await),
    }
}

/// Sends the prefill leg until there is an answer to go on with. Dropped, it closes the connection,
/// on which the engine aborts the request and pins nothing; an answer that is on its way by then is
/// taken, and handed over.
async fn prefill_leg(call: &Arc<Call>, flow: Flow, slots: Slots) -> Result<Prefilled, Failure> {
    let mut refusal = Refusal::default();
    let prefilled = prefill_tries(call, flow, slots, &mut refusal).await;
    match prefilled {
        Ok(prefilled) => Ok(prefilled),
        Err(failure) => Err(rarely(refusal.or(call, failure)).await),
    }
}

async fn prefill_tries(
    call: &Arc<Call>,
    mut flow: Flow,
    slots: Slots,
    refusal: &mut Refusal,
) -> Result<Prefilled, Failure> {
    let app = &call.app;
    let connector = app.config().connector;
    let Slots {
        prefill: mut taken,
        mut decode,
        drawn: _,
    } = slots;
    let mut next = Attempt::default();
    loop {
        let lease = match taken.take() {
            Some(lease) => lease,
            None => {
                let tried = flow.tried(Role::Prefill);
                let peer = decode.as_ref().map(|lease| &**lease.instance());
                rarely(call.slot(Role::Prefill, tried, peer)).await?
            }
        };
        // A new id each time: the engine that failed may still hold blocks under the old one.
        let transfer_id = random_hex()?;
        let engine_id = match call.engine_id(&lease).await {
            Ok(engine_id) => engine_id,
            Err(error) => {
                next = after_failure(call, &mut flow, lease, false, error)?;
                continue;
            }
        };
        let leg = connector.prefill_leg(&Transfer {
            id: &transfer_id,
            prefill: slot(&lease, engine_id.as_deref()),
            decode: decode.as_ref().map(|lease| slot(lease, None)),
        });
        let transfer = Transferring {
            transfer_id,
            engine_id,
            decode,
            flow,
        };
        let (lease, transfer, answer) = prefill::send(call, lease, leg, next.fresh, transfer)
            .await
            .ok_or_else(ended_twice)?;
        (decode, flow) = (transfer.decode, transfer.flow);
        match answer {
            Ok(answer) => {
                let status = answer.head.status;
                if tries_elsewhere(call, &mut flow, &lease, false, status) {
                    lease.end(outcome_of(status));
                    refusal.set(answer);
                    next = Attempt::default();
                    continue;
                }
                return Ok(Prefilled {
                    answer,
                    lease,
                    transfer: Transferring {
                        transfer_id: transfer.transfer_id,
                        engine_id: transfer.engine_id,
                        decode,
                        flow,
                    },
                });
            }
            Err(error) => next = after_failure(call, &mut flow, lease, false, error)?,
        }
    }
}

/// Why there is no head of a decode answer.
pub(crate) enum NoHandOver {
    /// This is what the client is told.
    Told(Failure),
    /// Prefill's answer cannot be read, so there is nothing to hand over.
    Unread(Box<Unread>),
}

impl<T: Into<Failure>> From<T> for NoHandOver {
    fn from(failure: T) -> Self {
        Self::Told(failure.into())
    }
}

/// A prefill answer that could not be read, and what its request has in hand.
pub(crate) struct Unread {
    fault: Unreadable,
    instance: InstanceIndex,
    flow: Flow,
    decode: Option<SlotLease>,
}

impl Unread {
    /// What another prefill leg begins with, where there is one.
    fn again(self, call: &Call) -> Result<(Flow, Slots), Failure> {
        let mut flow = self.flow;
        after_unreadable(call, &mut flow, self.instance, self.fault)?;
        let slots = Slots {
            prefill: None,
            decode: self.decode,
            drawn: None,
        };
        Ok((flow, slots))
    }
}

/// Reads the prefill answer and sends the decode leg until there is a response head.
pub(crate) async fn hand_over(
    call: Arc<Call>,
    prefilled: Prefilled,
) -> Result<DecodeHead, NoHandOver> {
    let app = &call.app;
    let connector = app.config().connector;
    let Prefilled {
        answer: prefill,
        lease: prefill_lease,
        transfer:
            Transferring {
                transfer_id,
                engine_id,
                mut decode,
                mut flow,
            },
    } = prefilled;
    let status = prefill.head.status;
    let body = match read_answer(app, prefill.body).await {
        Ok(body) => body,
        Err(fault) => {
            if fault.is_fault() {
                prefill_lease.note_failed(LegFault::Failed);
            }
            let instance = prefill_lease.picked.instance;
            prefill_lease.end(fault.outcome());
            return Err(NoHandOver::Unread(Box::new(Unread {
                fault,
                instance,
                flow,
                decode,
            })));
        }
    };
    let prefill_instance = Arc::clone(prefill_lease.instance());
    let prefill_rank = prefill_lease.picked.rank;
    let began_ms = prefill_lease.began_ms();
    // Before its leg ends: with neither, an instance that leaves is gone.
    let mut kept = app.keep_blocks(&prefill_instance);
    prefill_lease.end(outcome_of(status));
    let answered_us = app.now_us();

    let answer = response::read(&body);
    let leg = |decode: Option<&SlotLease>| {
        let transfer = Transfer {
            id: &transfer_id,
            prefill: Slot {
                peer: prefill_instance.peer(),
                rank: prefill_rank,
                engine_id: engine_id.as_deref(),
            },
            decode: decode.map(|lease| slot(lease, None)),
        };
        connector.decode_leg(&transfer, Some(&answer))
    };
    let mut first = leg(decode.as_ref());
    let has_handle = first.is_some();
    let stopped = answer.ended == Ended::Stopped;
    match flow.prefill_answered(status.as_u16(), has_handle, stopped) {
        AfterPrefill::HandOver => {
            kept.owe();
            app.note_served(&prefill_instance, began_ms);
        }
        AfterPrefill::PassOn => return Err(call.passed_on(prefill.head, body).into()),
        AfterPrefill::MissingKv => {
            app.metrics.kv_transfer_missing.inc();
            app.note_failed(&prefill_instance, LegFault::Failed, began_ms);
            return Err(ApiError::new(
                502,
                "kv_transfer_missing",
                "the prefill engine answered without a handle of kept blocks: it runs without the \
                 KV connector, or its connector kept no blocks; see --connector and --require-kv",
            )
            .into());
        }
        AfterPrefill::Recompute => {
            app.metrics.kv_transfer_missing.inc();
            app.note_failed(&prefill_instance, LegFault::Failed, began_ms);
            app.count_fallback("kv_transfer_missing");
        }
        AfterPrefill::RecomputeStopped => {
            app.note_served(&prefill_instance, began_ms);
            app.count_fallback("prefill_stopped");
        }
    }

    if is_logged()
        && let Some(tokens) = Tokens::of(&body)
    {
        // Its one token is not the answer's.
        call.timeline.tokens(Tokens {
            completion: None,
            ..tokens
        });
    }
    // Of several prompts prefill had the first only, and decode's sum is the better one.
    let usage = match has_handle && !call.request.is_batch() {
        true => answer.usage,
        false => None,
    };
    let cached = usage.and_then(|usage| Cached::of_prefill(usage, call.route));
    let taken = decode.take();
    let leg = |lease: &SlotLease| {
        if has_handle {
            lease.reads_from(&prefill_instance, Some(answered_us));
        }
        // The first is that of the slot taken before, or names none.
        first.take().or_else(|| leg(Some(lease)))
    };
    let with = has_handle.then_some(&*prefill_instance);
    let (answer, lease) = decode_leg(&call, &mut flow, taken, with, leg).await?;
    Ok(match has_handle {
        true => DecodeHead {
            kept: Some(kept),
            source: Some(Arc::clone(&prefill_instance)),
            cached,
            ..DecodeHead::claiming(answer, lease)
        },
        false => DecodeHead::alone(answer, lease),
    })
}

fn ended_twice() -> ApiError {
    ApiError::new(500, "internal", "the hand-over ended twice")
}

pub(crate) fn deadline_exceeded() -> ApiError {
    ApiError::new(
        504,
        "deadline_exceeded",
        "the engines did not answer before the deadline of the request",
    )
}
