//! Requests that every engine gets, and lists that every decode engine gives.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, header};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::admit;
use crate::answer::{self, Answer, Record};
use crate::app::App;
use crate::client_io::HeadWatch;
use crate::headers;
use crate::instance::Instance;
use crate::legs::{Unreadable, read_answer};
use crate::openai::error::ApiError;
use crate::random::random_hex;
use crate::routing::Role;
use crate::trace_context;
use crate::upstream::{LegBody, SendError};

/// Paths whose `POST` goes to the engines of both roles.
pub const TO_ALL: [&str; 4] = [
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
];

/// One request as each engine gets it.
#[derive(Clone)]
struct Sent {
    method: Method,
    path: &'static str,
    headers: HeaderMap,
    body: Bytes,
}

/// An engine's answer, read whole.
struct Got {
    head: http::response::Parts,
    body: Bytes,
}

/// Which engine, and its answer or why there is none.
type Outcome = (Arc<Instance>, Result<Got, &'static str>);

/// Asks every engine of `roles` at once; an answer that is not there by `deadline` is none. In the
/// order of their ids, prefill first.
async fn ask(app: &Arc<App>, roles: &[Role], sent: &Sent, deadline: Instant) -> Vec<Outcome> {
    let mut asking = JoinSet::new();
    for role in roles.iter().copied() {
        for instance in app.snapshot(role).iter() {
            let (app, instance, sent) = (Arc::clone(app), Arc::clone(instance), sent.clone());
            asking.spawn(async move {
                let got = timeout_at(deadline, ask_one(&app, &instance, sent)).await;
                (instance, got.unwrap_or(Err("no answer in time")))
            });
        }
    }
    let mut outcomes = asking.join_all().await;
    outcomes.sort_by_key(|(instance, _)| (instance.role, instance.index));
    outcomes
}

async fn ask_one(app: &App, instance: &Instance, sent: Sent) -> Result<Got, &'static str> {
    let upstream = &instance.upstream;
    let send = async |fresh| {
        let body = LegBody::new([sent.body.clone()], None);
        upstream
            .send(&sent.method, sent.path, &sent.headers, &[], body, fresh)
            .await
    };
    let mut answer = send(false).await;
    if let Err(SendError::Reset { reused: true, .. }) = answer {
        answer = send(true).await;
    }
    let answer = match answer {
        Ok(answer) => answer,
        Err(SendError::Connect(_)) => {
            app.note_unreachable(instance);
            return Err("unreachable");
        }
        Err(SendError::Reset { .. }) => return Err("closed without an answer"),
        Err(SendError::Malformed(_)) => return Err("its answer is not well-formed"),
        Err(SendError::Request(_) | SendError::Bootstrap(_)) => return Err("not sent"),
    };
    let body = read_answer(app, answer.body).await;
    let body = body.map_err(|fault| match fault {
        Unreadable::Broken => "its answer broke off",
        Unreadable::Malformed(_) => "its answer is not well-formed",
        Unreadable::TooLarge(_) => "its answer is larger than --prefill-answer-bytes-max",
    })?;
    Ok(Got {
        head: answer.head,
        body,
    })
}

#[derive(Serialize)]
struct WorkerStatus {
    id: String,
    status: u16,
}

#[derive(Serialize)]
struct Statuses {
    workers: Vec<WorkerStatus>,
}

/// Sends a request to every engine: 200 with each one's status when all answered 2xx, else 502 that
/// names those that did not.
pub async fn to_all(
    app: &Arc<App>,
    path: &'static str,
    request: Request<Incoming>,
    watch: &HeadWatch,
) -> Answer {
    let record = Record::new(Arc::clone(app), path);
    let answer = match tell(app, path, request, watch).await {
        Ok(answer) => answer,
        Err(error) => answer::error(&error),
    };
    record.finish(answer.status());
    answer
}

async fn tell(
    app: &Arc<App>,
    path: &'static str,
    request: Request<Incoming>,
    watch: &HeadWatch,
) -> Result<Answer, ApiError> {
    let deadline = Instant::now() + app.config().request_timeout;
    let (head, body) = request.into_parts();
    let body = admit::body(app, &head.headers, body, deadline).await?;
    watch.arm();
    let mut headers = headers::for_legs(head.headers, random_hex)?;
    trace_context::pass(app, &mut headers);
    let sent = Sent {
        method: Method::POST,
        path,
        headers,
        body,
    };
    let outcomes = ask(app, &[Role::Prefill, Role::Decode], &sent, deadline).await;
    let mut faults = Vec::new();
    let mut workers = Vec::new();
    for (instance, outcome) in outcomes {
        let id = instance.id();
        match outcome {
            Ok(got) if got.head.status.is_success() => workers.push(WorkerStatus {
                id,
                status: got.head.status.as_u16(),
            }),
            Ok(got) => faults.push(format!("{id}: answered {}", got.head.status.as_u16())),
            Err(reason) => faults.push(format!("{id}: {reason}")),
        }
    }
    if !faults.is_empty() {
        let message = format!(
            "{} of {} engines did not follow: {}",
            faults.len(),
            faults.len() + workers.len(),
            faults.join("; ")
        );
        return Err(ApiError::new(502, "workers_failed", message));
    }
    let body = serde_json::to_vec(&Statuses { workers })
        .map_err(|error| ApiError::new(500, "internal", error.to_string()))?;
    Ok(answer::full(StatusCode::OK, "application/json", body))
}

#[derive(Deserialize)]
struct List<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct Model<'a> {
    #[serde(borrow)]
    id: std::borrow::Cow<'a, str>,
}

/// `GET /v1/models`: the models of all decode engines, each once, as their engines spell them.
///
/// One good answer is passed on as it is; without one, the first that came.
pub async fn models(app: &Arc<App>, request: Request<Incoming>) -> Answer {
    let (head, _) = request.into_parts();
    let mut headers = match headers::for_legs(head.headers, random_hex) {
        Ok(headers) => headers,
        Err(error) => return answer::error(&error),
    };
    headers.remove(header::CONTENT_TYPE);
    trace_context::pass(app, &mut headers);
    let sent = Sent {
        method: Method::GET,
        path: "/v1/models",
        headers,
        body: Bytes::new(),
    };
    // An engine that hangs must not hide the models of the others.
    let deadline = Instant::now()
        + app
            .config()
            .health_timeout
            .min(app.config().request_timeout);
    let outcomes = ask(app, &[Role::Decode], &sent, deadline).await;
    let (mut good, other): (Vec<Got>, Vec<Got>) = outcomes
        .into_iter()
        .filter_map(|(_, outcome)| outcome.ok())
        .partition(|got| got.head.status.is_success());
    if good.len() > 1
        && let Some(merged) = merge(&good)
    {
        return answer::full(StatusCode::OK, "application/json", merged);
    }
    good.extend(other);
    match good.into_iter().next() {
        Some(got) => {
            let headers = headers::for_client(got.head.headers, None);
            answer::passed_on(got.head.status, headers, got.body)
        }
        None => answer::error(&ApiError::new(
            502,
            "decode_unreachable",
            "no decode engine can be reached",
        )),
    }
}

/// One list of all models; `None` when no answer is such a list.
fn merge(answers: &[Got]) -> Option<String> {
    let mut ids = Vec::new();
    let mut models: Vec<&str> = Vec::new();
    let mut any = false;
    for got in answers {
        let Ok(list) = serde_json::from_slice::<List<'_>>(&got.body) else {
            continue;
        };
        any = true;
        for model in list.data {
            let Ok(Model { id }) = serde_json::from_str(model.get()) else {
                continue;
            };
            if !ids.contains(&id) {
                ids.push(id);
                models.push(model.get());
            }
        }
    }
    any.then(|| format!(r#"{{"object":"list","data":[{}]}}"#, models.join(",")))
}
