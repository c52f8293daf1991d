//! `GET /v1/models`, passed on to a decode engine.

use std::sync::Arc;

use http::{Method, Request, header};
use hyper::body::Incoming;
use tokio::time::timeout;

use crate::answer::{self, Answer};
use crate::app::App;
use crate::headers;
use crate::legs::{random_hex, read_answer};
use crate::openai::error::ApiError;
use crate::routing::Role;
use crate::stream::outcome_of;
use crate::upstream::{LegBody, SendError};

/// The list of the first decode engine that answers; each is tried once.
pub async fn list(app: &Arc<App>, request: Request<Incoming>) -> Answer {
    let search = first_answer(app, request);
    match timeout(app.config.request_timeout, search).await {
        Ok(answer) => answer,
        Err(_) => answer::error(&ApiError::new(
            504,
            "deadline_exceeded",
            "no decode engine answered before the deadline of the request",
        )),
    }
}

async fn first_answer(app: &Arc<App>, request: Request<Incoming>) -> Answer {
    let (head, _) = request.into_parts();
    let mut headers = match headers::for_legs(head.headers, random_hex) {
        Ok(headers) => headers,
        Err(error) => return answer::error(&error),
    };
    headers.remove(header::CONTENT_TYPE);
    let mut avoid = None;
    for attempt in 0..app.instance_count(Role::Decode) {
        let Some(lease) = app.pick(Role::Decode, avoid) else {
            break;
        };
        avoid = Some(lease.picked.instance);
        let body = LegBody::default();
        // A kept connection may be stale; the second try opens its own.
        let sent = lease
            .upstream()
            .send(
                Method::GET,
                "/v1/models",
                headers.clone(),
                body,
                attempt > 0,
            )
            .await;
        match sent {
            Ok(answer) => {
                let status = answer.head.status;
                let Some(body) = read_answer(app, answer.body).await else {
                    lease.end("broken");
                    continue;
                };
                answer.connection.keep();
                lease.end(outcome_of(status));
                let headers = headers::for_client(answer.head.headers, None);
                return answer::passed_on(status, headers, body);
            }
            Err(SendError::Connect(_)) => {
                app.note_unreachable(Role::Decode, lease.picked.instance);
                lease.end("connect");
            }
            Err(SendError::Reset { .. }) => lease.end("reset"),
            Err(SendError::Request(_) | SendError::Bootstrap(_)) => lease.end("unsent"),
        }
    }
    answer::error(&ApiError::new(
        502,
        "decode_unreachable",
        "no decode engine can be reached",
    ))
}
