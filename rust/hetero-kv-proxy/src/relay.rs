//! Requests that no prefill leg serves: passed on to a decode engine as they are.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use hyper::body::Incoming;
use tokio::time::timeout_at;

use crate::admission::{self, Refused, Ticket};
use crate::admit;
use crate::answer::{self, Answer, Phase, Record};
use crate::app::App;
use crate::client_io::HeadWatch;
use crate::completions::Begun;
use crate::handover::DecodeHead;
use crate::headers;
use crate::lease::{SlotLease, outcome_of};
use crate::legs::{deadline_exceeded, malformed, read_answer};
use crate::openai::error::ApiError;
use crate::openai::request::refuse_params;
use crate::random::random_hex;
use crate::routing::policy::RequestKey;
use crate::routing::{Bound, InstanceIndex, LegFault, Role};
use crate::running::{Running, aborted};
use crate::slots::{Choice, Want};
use crate::timeline::Timeline;
use crate::trace_context;
use crate::upstream::{LegBody, SendError, Written};

/// The label in metrics of a path that is passed on; `None` for a path that is not.
pub fn label(path: &str) -> Option<&'static str> {
    // An engine, or a proxy in front of it, might read another path out of these.
    let plain = path.split('/').all(|part| part != ".." && part != ".") && !hides_characters(path);
    // Administration has its own listener: what asks for it here has the wrong one.
    let admin = path == "/v1/workers" || path.starts_with("/v1/workers/");
    match path {
        _ if admin => None,
        "/tokenize" => Some("/tokenize"),
        "/detokenize" => Some("/detokenize"),
        _ if path.starts_with("/v1/") && plain => Some("/v1/*"),
        _ => None,
    }
}

/// Whether a path has an escape for a character that needs none, or for one of `%20` to `%2f`: an
/// engine would read another path than the one that was looked at here.
fn hides_characters(path: &str) -> bool {
    path.split('%').skip(1).any(|behind| {
        let code = behind
            .get(..2)
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        code.is_none_or(|code| {
            matches!(code, 0x20..=0x2f | b'_' | b'~') || code.is_ascii_alphanumeric()
        })
    })
}

/// Whether an engine reads the body as JSON. Some do where no type is told.
fn is_json(headers: &HeaderMap) -> bool {
    let mut kinds = headers.get_all(header::CONTENT_TYPE).iter().peekable();
    kinds.peek().is_none()
        || kinds.any(|kind| {
            let kind = kind.as_bytes().to_ascii_lowercase();
            kind.windows(4).any(|part| part == b"json")
        })
}

/// The answer of the first decode engine that has the path, what it names, or the model: each is
/// asked once while the others say 404 or cannot be reached.
pub async fn serve(
    app: Arc<App>,
    label: &'static str,
    request: Request<Incoming>,
    watch: &HeadWatch,
) -> Answer {
    let mut record = Record::new(Arc::clone(&app), label);
    let sent_id = request.headers().get(headers::REQUEST_ID).cloned();
    match run(&app, request, watch, &mut record).await {
        Ok(begun) => begun.answer(app, record, watch).await,
        Err(answer) => {
            let answer = answer::named(*answer, record.id().or(sent_id));
            record.finish(answer.status());
            answer
        }
    }
}

async fn run(
    app: &Arc<App>,
    request: Request<Incoming>,
    watch: &HeadWatch,
    record: &mut Record,
) -> Result<Begun, Box<Answer>> {
    let told = |error: ApiError| Box::new(answer::error(&error));
    let deadline = record.started() + app.config().request_timeout;
    let (head, body) = request.into_parts();
    let (seat, body) = admit::enter(app, &head.headers, body, watch, deadline)
        .await
        .map_err(told)?;
    refuse_params(&body, is_json(&head.headers))
        .map_err(|error| told(admit::bad_request(&error)))?;
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut headers = headers::for_legs(head.headers, random_hex).map_err(told)?;
    let trace = trace_context::pass(app, &mut headers);
    record.identify(&headers, trace);
    let sent = Sent {
        timeline: record.timeline(),
        method: head.method,
        path: path.to_owned(),
        headers,
        body,
    };
    record.enter(Phase::HandOver);
    let running = Running::enter(app, &sent.headers);
    let decode = tokio::select! {
        decode = timeout_at(deadline, first_capable(app, &sent)) => {
            decode.unwrap_or_else(|_| Err(told(deadline_exceeded())))?
        }
        () = running.aborted() => return Err(told(aborted())),
    };
    Ok(Begun {
        request_id: sent.headers.get(headers::REQUEST_ID).cloned(),
        written: Written::default(),
        decode,
        seat,
        deadline,
        running,
    })
}

/// A request as every engine gets it.
struct Sent {
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
    timeline: Arc<Timeline>,
}

/// A decode slot; `None` where no instance, or not this one, takes legs.
async fn one_slot(
    app: &Arc<App>,
    ticket: &Ticket,
    choice: Choice<'_>,
    begun: admission::Begun,
) -> Result<Option<Box<SlotLease>>, Box<Answer>> {
    let want = Want {
        prefill: None,
        decode: Some(choice),
        partner: None,
        key: &RequestKey::default(),
        bound: Bound::default(),
    };
    match app.admission.slots(app, &want, ticket, begun).await {
        Ok(slots) => Ok(slots.decode),
        Err(Refused::NoEngine(_)) => Ok(None),
        Err(Refused::Told(error)) => Err(Box::new(answer::error(&error))),
    }
}

async fn first_capable(app: &Arc<App>, sent: &Sent) -> Result<DecodeHead, Box<Answer>> {
    let mut untried: VecDeque<InstanceIndex> = app.routable(Role::Decode).into();
    let mut refusal = None;
    let ticket = Ticket::default();
    let first = Choice::Any { avoid: &[] };
    let mut next = one_slot(app, &ticket, first, admission::Begun::No).await?;
    while let Some(mut lease) = next {
        lease.follow(&sent.timeline);
        let instance = lease.picked.instance;
        untried.retain(|known| *known != instance);
        let send = async |fresh| {
            let rank = lease.picked.rank_header;
            let rank = rank.map(|rank| (headers::DP_RANK, HeaderValue::from(rank)));
            let body = LegBody::new([sent.body.clone()], None);
            let upstream = lease.upstream();
            upstream
                .send(
                    &sent.method,
                    &sent.path,
                    &sent.headers,
                    rank.as_slice(),
                    body,
                    fresh,
                )
                .await
        };
        let mut answer = send(false).await;
        if let Err(SendError::Reset { reused: true, .. }) = answer {
            answer = send(true).await;
        }
        match answer {
            Ok(answer) if answer.head.status == StatusCode::NOT_FOUND && !untried.is_empty() => {
                lease.note_answer();
                lease.end(outcome_of(answer.head.status));
                if let Ok(body) = read_answer(app, answer.body).await {
                    let id = sent.headers.get(headers::REQUEST_ID);
                    let headers = headers::for_client(answer.head.headers, id);
                    refusal = Some(answer::passed_on(answer.head.status, headers, body));
                }
            }
            Ok(answer) => {
                if answer.head.status.as_u16() < 500 {
                    lease.note_answer();
                }
                return Ok(DecodeHead::alone(answer, lease));
            }
            Err(SendError::Connect(_)) => {
                app.note_unreachable(lease.instance());
                lease.note_failed(LegFault::Unreachable);
                lease.end("connect");
            }
            Err(SendError::Reset { .. }) => {
                app.note_unreachable(lease.instance());
                lease.note_failed(LegFault::Failed);
                lease.end("reset");
                return Err(Box::new(answer::error(&ApiError::new(
                    502,
                    "decode_reset",
                    "the decode engine closed the connection without an answer",
                ))));
            }
            Err(SendError::Malformed(fault)) => {
                app.note_unreachable(lease.instance());
                lease.note_failed(LegFault::Failed);
                lease.end("malformed");
                let error = malformed(Role::Decode, &fault);
                return Err(Box::new(answer::error(&error)));
            }
            Err(SendError::Request(_) | SendError::Bootstrap(_)) => {
                lease.end("unsent");
                let message = "the request cannot be passed on";
                return Err(Box::new(answer::error(&ApiError::new(
                    500, "internal", message,
                ))));
            }
        }
        // One may have been drained or removed meanwhile.
        next = None;
        while next.is_none()
            && let Some(instance) = untried.pop_front()
        {
            let other = Choice::At(instance);
            next = one_slot(app, &ticket, other, admission::Begun::Yes).await?;
        }
    }
    Err(Box::new(refusal.unwrap_or_else(|| {
        answer::error(&ApiError::new(
            502,
            "decode_unreachable",
            "no decode engine can be reached",
        ))
    })))
}
