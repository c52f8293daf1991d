//! Connections and requests of one worker.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::Worker;
use super::answer::{Script, params};
use super::body::{Broken, Events, MockBody, Running};
use super::cli::Role;
use super::counters;
use super::fault::FaultKind;
use super::leg::{self, Leg, LegKind, Order};
use super::transfers::{Claim, PinRefusal};
use crate::openai::Route;
use crate::openai::error::ApiError;

/// A connection on which no request head comes for so long is closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(600);
/// Longest wait for a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a connection is closed instead of an answer.
#[derive(Debug, thiserror::Error)]
#[error("a fault on purpose")]
pub struct Closed;

type Answer = Response<MockBody>;

/// Serves one connection to its end.
pub async fn connection(worker: Arc<Worker>, stream: TcpStream) {
    // A chunk of one token is far smaller than a segment: it must not wait for another.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let service = service_fn(move |request| route(Arc::clone(&worker), request));
    // How a connection ended is in the counters, and no news where it is by a fault.
    let _ended = Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn route(worker: Arc<Worker>, request: Request<Incoming>) -> Result<Answer, Closed> {
    let path = request.uri().path();
    let chat = path == Route::ChatCompletions.path();
    if chat || path == Route::Completions.path() {
        if request.method() != Method::POST {
            return Ok(error(&ApiError::new(
                405,
                "method_not_allowed",
                "this path takes POST",
            )));
        }
        return completion(worker, request, chat).await;
    }
    if request.method() != Method::GET {
        return Ok(error(&ApiError::new(404, "unknown_path", "no such path")));
    }
    Ok(match path {
        "/health" => whole(200, "text/plain", Bytes::new()),
        "/v1/models" => {
            let model = json!({"id": worker.args.model, "object": "model", "owned_by": "mock"});
            let list = json!({"object": "list", "data": [model]}).to_string();
            whole(200, "application/json", list.into())
        }
        "/metrics" => {
            let text = counters::metrics(&worker);
            whole(200, "text/plain; version=0.0.4; charset=utf-8", text.into())
        }
        _ => error(&ApiError::new(404, "unknown_path", "no such path")),
    })
}

async fn completion(
    worker: Arc<Worker>,
    request: Request<Incoming>,
    chat: bool,
) -> Result<Answer, Closed> {
    let mut running = Running::new(Arc::clone(&worker));
    let (head, body) = request.into_parts();
    let counters = &worker.counters;
    let refused = |mut running: Running, reason, fault: ApiError| {
        counters.refuse(reason);
        running.end();
        Ok(error(&fault))
    };
    let bytes = match read(body, worker.args.body_bytes_max).await {
        Ok(bytes) => bytes,
        Err((reason, fault)) => return refused(running, reason, fault),
    };
    let leg = match leg::parse(&bytes, chat) {
        Ok(leg) => leg,
        Err(fault) => {
            let answer = ApiError::new(400, "bad_request", fault.message);
            return refused(running, fault.reason, answer);
        }
    };
    let kind = leg.kind();
    if let (Role::Prefill, LegKind::Decode) | (Role::Decode, LegKind::Prefill) = (worker.role, kind)
    {
        let message = format!("this is a {} worker", worker.role.name());
        return refused(running, "role", ApiError::new(400, "wrong_role", message));
    }
    let fault = worker.faults.next(kind);
    if let Some(fault) = fault {
        count(&counters.faults);
        match fault {
            FaultKind::Status(status) => {
                running.end();
                let fault = ApiError::new(status, "fault", "a fault on purpose");
                return Ok(error(&fault));
            }
            FaultKind::Close => {
                running.end();
                return Err(Closed);
            }
            FaultKind::Silence => {
                sleep(Duration::from_secs(worker.args.request_timeout_s)).await;
                running.end();
                return Err(Closed);
            }
            FaultKind::SlowHead(pause) => sleep(pause).await,
            FaultKind::Cut(_)
            | FaultKind::Hang(_)
            | FaultKind::ErrorEvent(_)
            | FaultKind::NoDone
            | FaultKind::NoParams => {}
        }
    }
    if let Order::Decode(handle) = &leg.order {
        if handle.incarnation == worker.transfers.incarnation {
            let id = &handle.transfer_id;
            match worker.transfers.claim(id, handle.epoch, leg.prompt_hash) {
                Claim::Same => {}
                Claim::OtherPrompt => {
                    count(&counters.prompt_mismatches);
                    if worker.args.require_kv {
                        let message = "the prompt is not the one that was prefilled";
                        let fault = ApiError::new(400, "prompt_mismatch", message);
                        return refused(running, "prompt_mismatch", fault);
                    }
                }
                Claim::Gone => {
                    let message = format!("transfer {id}: its blocks are not pinned");
                    let fault = ApiError::new(500, "lease_gone", message);
                    return refused(running, "lease_gone", fault);
                }
            }
        } else {
            count(&counters.foreign);
        }
    }
    if kind == LegKind::Plain && worker.role == Role::Decode && worker.args.require_kv {
        let fault = ApiError::new(400, "no_params", "no `kv_transfer_params`");
        return refused(running, "no_params", fault);
    }
    counters.leg(kind);
    let answer = Script::new(Arc::clone(&worker), &leg, chat);
    let delay = Duration::from_millis(match kind {
        LegKind::Prefill | LegKind::Plain => worker.args.prefill_delay_ms,
        LegKind::Decode => worker.args.decode_delay_ms,
    });
    let hang_limit = Duration::from_secs(worker.args.request_timeout_s);
    if leg.stream {
        let begin = Instant::now() + delay;
        let events = Events::new(answer, begin, fault, hang_limit, running);
        let kind = "text/event-stream; charset=utf-8";
        return Ok(respond(200, kind, MockBody::Events(Box::new(events))));
    }
    pause(delay + answer.span()).await;
    let handle = match leg.order {
        Order::Prefill(ref id) if fault != Some(FaultKind::NoParams) => {
            match pinned(&worker, &leg, id.as_deref(), &head.headers) {
                Ok(handle) => Some(handle),
                Err((reason, fault)) => return refused(running, reason, fault),
            }
        }
        Order::Prefill(_) | Order::Decode(_) | Order::Plain => None,
    };
    let whole_answer = answer.plain(handle.as_deref());
    counters
        .tokens
        .fetch_add(answer.tokens_in_all(), std::sync::atomic::Ordering::Relaxed);
    let hang = match fault {
        Some(FaultKind::Cut(_)) => None,
        Some(FaultKind::Hang(_)) => Some(hang_limit),
        Some(_) | None => {
            running.end();
            return Ok(whole(200, "application/json", whole_answer));
        }
    };
    let broken = Broken::new(&whole_answer, hang, running);
    let body = MockBody::Broken(Box::new(broken));
    Ok(respond(200, "application/json", body))
}

/// A timer is not free: none where there is nothing to wait for.
async fn pause(time: Duration) {
    if !time.is_zero() {
        sleep(time).await;
    }
}

async fn read(body: Incoming, limit: u64) -> Result<Bytes, (&'static str, ApiError)> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    match timeout(BODY_TIMEOUT, Limited::new(body, limit).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("the body has more than {limit} bytes");
            Err(("body_bytes", ApiError::new(413, "body_too_large", message)))
        }
        Ok(Err(error)) => {
            let fault = ApiError::new(400, "body_broken", error.to_string());
            Err(("body_broken", fault))
        }
        Err(_) => {
            let message = format!("no whole body within {} s", BODY_TIMEOUT.as_secs());
            Err(("body_timeout", ApiError::new(408, "body_timeout", message)))
        }
    }
}

/// Pins the prompt and says of its blocks where they are.
fn pinned(
    worker: &Worker,
    leg: &Leg,
    id: Option<&str>,
    headers: &HeaderMap,
) -> Result<String, (&'static str, ApiError)> {
    let minted;
    let id = match id {
        Some(id) => id,
        None => {
            let mut random = [0; 16];
            // Without randomness the id is taken, and the request refused below.
            let _filled = getrandom::fill(&mut random);
            minted = hex::encode(random);
            &minted
        }
    };
    let epoch = worker
        .transfers
        .pin(id, leg.prompt_hash)
        .map_err(|refusal| match refusal {
            PinRefusal::Taken => {
                let message = format!("transfer {id} is pinned already");
                (
                    "transfer_taken",
                    ApiError::new(409, "transfer_taken", message),
                )
            }
            PinRefusal::Full => {
                let message = "no more prompts can be pinned; see --lease-s";
                (
                    "transfers_full",
                    ApiError::new(503, "transfers_full", message),
                )
            }
        })?;
    let request_id = headers
        .get("x-request-id")
        .and_then(|value| value.to_str().ok())
        .unwrap_or(id);
    Ok(params(worker, leg, id, epoch, request_id))
}

fn count(counter: &std::sync::atomic::AtomicU64) {
    counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
}

fn error(fault: &ApiError) -> Answer {
    whole(fault.status, "application/json", fault.body())
}

fn whole(status: u16, kind: &'static str, bytes: Bytes) -> Answer {
    respond(status, kind, MockBody::Whole(bytes))
}

fn respond(status: u16, kind: &'static str, body: MockBody) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}
