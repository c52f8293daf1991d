//! The requests that run, by their id, so that one can be aborted from outside.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::admit;
use crate::answer::{self, Answer};
use crate::app::App;
use crate::client_io::HeadWatch;
use crate::headers;
use crate::openai::error::ApiError;
use crate::sync::lock;

/// The ids of running requests. A client may use one id for several: they are aborted together.
#[derive(Debug, Default)]
pub struct Requests(Mutex<HashMap<HeaderValue, Vec<Arc<Abort>>>>);

/// One running request; it is known until this is dropped.
#[derive(Debug)]
pub struct Running {
    app: Arc<App>,
    id: HeaderValue,
    abort: Arc<Abort>,
}

/// Whether a request is to end, and its task, which learns it.
#[derive(Debug, Default)]
struct Abort(Mutex<AbortState>);

#[derive(Debug, Default)]
struct AbortState {
    is_set: bool,
    /// Of who looked last: one task at a time has the request.
    waiting: Option<Waker>,
}

impl Abort {
    fn set(&self) {
        let waiting = {
            let mut state = lock(&self.0);
            state.is_set = true;
            state.waiting.take()
        };
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }
}

impl Running {
    /// Makes a request known by the id that its legs carry.
    pub fn enter(app: &Arc<App>, headers: &HeaderMap) -> Self {
        let id = headers.get(headers::REQUEST_ID).cloned();
        let id = id.unwrap_or_else(|| HeaderValue::from_static(""));
        let abort = Arc::<Abort>::default();
        let mut known = lock(&app.running.0);
        let of_id = known.entry(id.clone()).or_default();
        of_id.push(Arc::clone(&abort));
        Self {
            app: Arc::clone(app),
            id,
            abort,
        }
    }

    /// Ends when the request is aborted. Only who looked last is woken.
    pub async fn aborted(&self) {
        poll_fn(|cx| self.poll_aborted(cx)).await;
    }

    /// As [`Self::aborted`].
    pub fn poll_aborted(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = lock(&self.abort.0);
        if state.is_set {
            return Poll::Ready(());
        }
        match &mut state.waiting {
            Some(waiting) => waiting.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut known = lock(&self.app.running.0);
        if let Some(of_id) = known.get_mut(&self.id) {
            of_id.retain(|abort| !Arc::ptr_eq(abort, &self.abort));
            if of_id.is_empty() {
                known.remove(&self.id);
            }
        }
    }
}

impl Requests {
    /// Aborts the requests of this id, and says whether there was one.
    fn abort(&self, id: &str) -> bool {
        let Ok(id) = HeaderValue::from_str(id) else {
            return false;
        };
        let of_id = lock(&self.0).remove(&id).unwrap_or_default();
        for abort in &of_id {
            abort.set();
        }
        !of_id.is_empty()
    }
}

/// What the client of an aborted request is told.
pub fn aborted() -> ApiError {
    ApiError::new(409, "aborted", "the request was aborted")
}

#[derive(Deserialize)]
struct Order {
    request_ids: Vec<String>,
}

#[derive(Serialize)]
struct Done {
    aborted: Vec<String>,
    unknown: Vec<String>,
}

/// `POST /abort_requests` with `{"request_ids": [...]}`, as vLLM takes it.
pub async fn abort(app: &Arc<App>, request: Request<Incoming>, watch: &HeadWatch) -> Answer {
    let deadline = Instant::now() + app.config().request_timeout;
    let (head, body) = request.into_parts();
    let body: Bytes = match admit::body(app, &head.headers, body, deadline).await {
        Ok(body) => body,
        Err(error) => return answer::error(&error),
    };
    watch.arm();
    let order: Order = match serde_json::from_slice(&body) {
        Ok(order) => order,
        Err(error) => {
            let message = format!("the body must be {{\"request_ids\": [\"...\"]}}: {error}");
            return answer::error(&ApiError::new(400, "invalid_json", message));
        }
    };
    let (aborted, unknown) = order
        .request_ids
        .into_iter()
        .partition(|id| app.running.abort(id));
    match serde_json::to_vec(&Done { aborted, unknown }) {
        Ok(body) => answer::full(StatusCode::OK, "application/json", body),
        Err(error) => answer::error(&ApiError::new(500, "internal", error.to_string())),
    }
}
