//! Administration of the workers, on a listener of its own that clients do not reach.

mod body;
mod change;
mod facts;
pub(crate) mod file;
mod revisions;
pub(crate) mod zmq;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde::Serialize;
use tokio::time::Instant;

pub(crate) use change::sweep;
pub(crate) use facts::Facts;

use crate::admin;
use crate::admit;
use crate::answer::{self, Answer};
use crate::app::App;
use crate::auth;
use crate::client_io::HeadWatch;
use crate::instance::Instance;
use crate::openai::error::ApiError;
use crate::server::not_allowed;

/// A registration is a few hundred bytes.
const BODY_BYTES_MAX: u64 = 64 << 10;
/// Longest wait that a request may ask for.
const WAIT_S_MAX: u64 = 3_600;

/// Whether the body of a registration could be taken by some connector.
///
/// # Errors
/// Status 400, with the field at fault.
pub fn check_registration(body: &[u8]) -> Result<(), ApiError> {
    body::told(body).map(drop)
}

/// What a request may say behind `?`.
struct Query {
    /// How long to wait for legs to end.
    wait: Duration,
    /// Remove, or change the role, although legs run or blocks are kept.
    force: bool,
}

impl Query {
    fn parse(query: Option<&str>, wait: Duration, with_force: bool) -> Result<Self, ApiError> {
        let mut parsed = Self { wait, force: false };
        let pairs = query.unwrap_or_default().split('&');
        for pair in pairs.filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "wait_s" => {
                    let seconds = value.parse().ok().filter(|wait| *wait <= WAIT_S_MAX);
                    let seconds = seconds.ok_or_else(|| {
                        bad_query(name, format!("must be 0 to {WAIT_S_MAX} seconds"))
                    })?;
                    parsed.wait = Duration::from_secs(seconds);
                }
                "force" if with_force && (value == "true" || value == "false") => {
                    parsed.force = value == "true";
                }
                "force" if with_force => {
                    return Err(bad_query(name, "must be true or false".to_owned()));
                }
                _ => {
                    let known = match with_force {
                        true => "is unknown here; wait_s=N and force=true are not",
                        false => "is unknown here; wait_s=N is not",
                    };
                    return Err(bad_query(name, known.to_owned()));
                }
            }
        }
        Ok(parsed)
    }

    fn until(&self) -> Instant {
        Instant::now() + self.wait
    }
}

fn bad_query(name: &str, fault: String) -> ApiError {
    let name: String = name.chars().take(64).collect();
    ApiError {
        param: Some(name.clone()),
        ..ApiError::new(400, "invalid_query", format!("`{name}` {fault}"))
    }
}

/// What an administrator asks for.
enum Order<'a> {
    Register,
    Show(&'a str),
    Remove(&'a str),
    Drain(&'a str),
    Undrain(&'a str),
    Role(&'a str),
    Weight(&'a str),
    Weights,
}

/// Serves one request of the admin listener.
pub async fn serve(app: &Arc<App>, request: Request<Incoming>, watch: &HeadWatch) -> Answer {
    match run(app, request, watch).await {
        Ok(answer) => answer,
        Err(answer) => *answer,
    }
}

async fn run(
    app: &Arc<App>,
    request: Request<Incoming>,
    watch: &HeadWatch,
) -> Result<Answer, Box<Answer>> {
    let (head, body) = request.into_parts();
    let path = head.uri.path();
    let no_path = || {
        let error = ApiError::new(404, "unknown_path", "no such path on the admin listener");
        Box::new(answer::error(&error))
    };
    let wrong = |allow| Err(Box::new(not_allowed(allow)));
    if path == "/workers" {
        return match head.method {
            Method::GET | Method::HEAD => Ok(admin::workers(app)),
            _ => wrong("GET, HEAD"),
        };
    }
    if let Some(id) = path.strip_prefix("/v1/trace/") {
        return match head.method {
            Method::GET | Method::HEAD => Ok(admin::trace(app, id)),
            _ => wrong("GET, HEAD"),
        };
    }
    let revisions = path == "/v1/revisions";
    let under = match revisions {
        true => "",
        false => path.strip_prefix("/v1/workers").ok_or_else(no_path)?,
    };
    let parts: Vec<&str> = under.split('/').skip(1).collect();
    let order = match (parts.as_slice(), &head.method) {
        (_, &Method::GET | &Method::HEAD) if revisions => return Ok(revisions::shown(app)),
        (_, &Method::PUT) if revisions => Order::Weights,
        _ if revisions => return wrong("GET, HEAD, PUT"),
        ([], &Method::GET | &Method::HEAD) if under.is_empty() => return Ok(admin::workers(app)),
        ([], &Method::POST) if under.is_empty() => Order::Register,
        ([], _) if under.is_empty() => return wrong("GET, HEAD, POST"),
        ([id], &Method::GET | &Method::HEAD) => Order::Show(id),
        ([id], &Method::DELETE) => Order::Remove(id),
        ([_], _) => return wrong("GET, HEAD, DELETE"),
        ([id, "drain"], &Method::POST) => Order::Drain(id),
        ([id, "undrain"], &Method::POST) => Order::Undrain(id),
        ([id, "role"], &Method::POST) => Order::Role(id),
        ([id, "weight"], &Method::POST) => Order::Weight(id),
        ([_, "drain" | "undrain" | "role" | "weight"], _) => return wrong("POST"),
        _ => return Err(no_path()),
    };
    let deadline = Instant::now() + app.config().body_read_timeout;
    let told = |error: ApiError| Box::new(answer::error(&error));
    let unproven = |error: ApiError| Box::new(app.unauthorized(&error));
    // What is only read is on the clients' listener too.
    let claim = match order {
        Order::Show(_) => None,
        Order::Register
        | Order::Remove(_)
        | Order::Drain(_)
        | Order::Undrain(_)
        | Order::Role(_)
        | Order::Weight(_)
        | Order::Weights => app.gate.claim(&head).map_err(unproven)?,
    };
    let body = admit::body_within(app, &head.headers, body, BODY_BYTES_MAX, deadline)
        .await
        .map_err(told)?;
    watch.arm();
    if let Some(claim) = claim {
        let proven = app.gate.prove(&claim, &head, &body, auth::now_s());
        proven.map_err(unproven)?;
    }
    follow(app, order, head.uri.query(), body)
        .await
        .map_err(told)
}

async fn follow(
    app: &Arc<App>,
    order: Order<'_>,
    query: Option<&str>,
    body: Bytes,
) -> Result<Answer, ApiError> {
    let drain = app.config().drain_timeout;
    match order {
        Order::Register => {
            let (instance, created) = change::register(app, body::told(&body)?)?;
            let status = match created {
                true => StatusCode::CREATED,
                false => StatusCode::OK,
            };
            shown(app, &instance, status)
        }
        Order::Show(id) => shown(app, &*change::find(app, id)?, StatusCode::OK),
        Order::Drain(id) => {
            let query = Query::parse(query, Duration::ZERO, false)?;
            let instance = change::find(app, id)?;
            change::set_drained(app, &instance, true)?;
            change::wait_idle(app, &instance, query.until()).await;
            shown(app, &instance, StatusCode::OK)
        }
        Order::Undrain(id) => {
            let instance = change::find(app, id)?;
            change::set_drained(app, &instance, false)?;
            shown(app, &instance, StatusCode::OK)
        }
        Order::Weight(id) => {
            let weight = body::weight(&body)?;
            let instance = change::find(app, id)?;
            change::set_weight(app, &instance, weight)?;
            shown(app, &instance, StatusCode::OK)
        }
        Order::Weights => {
            revisions::set(app, &body)?;
            Ok(revisions::shown(app))
        }
        Order::Remove(id) => {
            let query = Query::parse(query, drain, true)?;
            let instance = change::find(app, id)?;
            let removed = change::remove(app, &instance, query.force, query.until()).await?;
            let status = match removed {
                true => StatusCode::OK,
                false => StatusCode::ACCEPTED,
            };
            let id = instance.id();
            Ok(admin::json(status, &Removed { id, removed }))
        }
        Order::Role(id) => {
            let query = Query::parse(query, drain, true)?;
            let role = body::role(&body)?;
            let instance = change::find(app, id)?;
            let task = {
                let (app, force, until) = (Arc::clone(app), query.force, query.until());
                async move { change::change_role(&app, &instance, role, force, until).await }
            };
            // A change that has begun is ended, whether or not somebody waits for the answer.
            let changed = app
                .tasks
                .spawn(task)
                .await
                .map_err(|error| ApiError::new(500, "internal", error.to_string()))??;
            shown(app, &changed, StatusCode::OK)
        }
    }
}

#[derive(Serialize)]
struct Removed {
    id: String,
    removed: bool,
}

fn shown(app: &App, instance: &Instance, status: StatusCode) -> Result<Answer, ApiError> {
    let view = admin::worker(app, instance).ok_or_else(|| {
        let message = format!("worker `{}` was removed meanwhile", instance.id());
        ApiError::new(404, "unknown_worker", message)
    })?;
    Ok(admin::json(status, &view))
}
