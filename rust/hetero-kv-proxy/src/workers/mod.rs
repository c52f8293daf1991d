//! Administration of the workers, on a listener of its own that clients do not reach.

mod body;
mod change;
mod facts;
pub(crate) mod file;
mod query;
mod revisions;
pub(crate) mod zmq;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde::Serialize;
use tokio::time::Instant;

use query::{Query, Takes};

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
/// Whether the body of a registration could be taken by some connector.
///
/// # Errors
/// Status 400, with the field at fault.
pub fn check_registration(body: &[u8]) -> Result<(), ApiError> {
    body::told(body).map(drop)
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
    let told = |error: ApiError| Box::new(answer::error(&error));
    // What is only read, and has no query to be read by.
    let whole = |answer: Answer| {
        query::none(head.uri.query()).map_or_else(|error| Err(told(error)), |()| Ok(answer))
    };
    if path == "/workers" {
        return match head.method {
            Method::GET | Method::HEAD => whole(admin::workers(app)),
            _ => wrong("GET, HEAD"),
        };
    }
    if let Some(id) = path.strip_prefix("/v1/trace/") {
        return match head.method {
            Method::GET | Method::HEAD => whole(admin::trace(app, id)),
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
        (_, &Method::GET | &Method::HEAD) if revisions => return whole(revisions::shown(app)),
        (_, &Method::PUT) if revisions => Order::Weights,
        _ if revisions => return wrong("GET, HEAD, PUT"),
        ([], &Method::GET | &Method::HEAD) if under.is_empty() => {
            return whole(admin::workers(app));
        }
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
            query::none(query)?;
            let (instance, created) = change::register(app, body::told(&body)?)?;
            let status = match created {
                true => StatusCode::CREATED,
                false => StatusCode::OK,
            };
            shown(app, &instance, status)
        }
        Order::Show(id) => {
            query::none(query)?;
            shown(app, &*change::find(app, id)?, StatusCode::OK)
        }
        Order::Drain(id) => {
            let query = Query::parse(query, Duration::ZERO, Takes::Wait)?;
            let instance = change::find(app, id)?;
            change::set_drained(app, &instance, true)?;
            change::wait_idle(app, &instance, query.until()).await;
            shown(app, &instance, StatusCode::OK)
        }
        Order::Undrain(id) => {
            query::none(query)?;
            let instance = change::find(app, id)?;
            change::set_drained(app, &instance, false)?;
            shown(app, &instance, StatusCode::OK)
        }
        Order::Weight(id) => {
            query::none(query)?;
            let weight = body::weight(&body)?;
            let instance = change::find(app, id)?;
            change::set_weight(app, &instance, weight)?;
            shown(app, &instance, StatusCode::OK)
        }
        Order::Weights => {
            query::none(query)?;
            revisions::set(app, &body)?;
            Ok(revisions::shown(app))
        }
        Order::Remove(id) => {
            let query = Query::parse(query, drain, Takes::WaitAndForce)?;
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
            let query = Query::parse(query, drain, Takes::WaitAndForce)?;
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
