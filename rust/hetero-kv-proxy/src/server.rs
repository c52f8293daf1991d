//! Connections of clients and administrators, and the route table.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method, Request, header};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::answer::{self, Answer, Record};
use crate::app::App;
use crate::auth;
use crate::client_io::{ClientIo, HeadWatch};
use crate::legs::rarely;
use crate::listener::{self, Acceptor};
use crate::openai::Route;
use crate::openai::error::ApiError;
use crate::{admin, completions, fanout, relay, running, transfer_coding, workers};

/// Aborts running requests, at the path of vLLM's own.
const ABORT: &str = "/abort_requests";

/// Who comes in by a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// Clients of the OpenAI API.
    Clients,
    /// Workers that register, and those who run the engines.
    Administrators,
}

/// Connections that a worker of [`crate::workers`] or an administrator may hold, all together.
pub(crate) const ADMIN_CONNECTIONS_MAX: usize = 2_048;

/// Accepts and serves until the proxy stops, then stops accepting and returns; connections end by
/// themselves and are in `app.tasks`.
pub async fn run(app: Arc<App>, door: Door, listener: TcpListener) {
    let stop = app.stop.subscribe();
    let acceptor = Acceptor {
        listener,
        connections: Arc::new(Semaphore::new(match door {
            Door::Clients => app.config().connections_max,
            Door::Administrators => ADMIN_CONNECTIONS_MAX,
        })),
        tasks: app.tasks.clone(),
        stop: stop.clone(),
    };
    let serve = |stream, _| connection(Arc::clone(&app), door, stream, stop.clone());
    acceptor.run(serve, listener::log_failure).await;
}

async fn connection(app: Arc<App>, door: Door, stream: TcpStream, mut stop: watch::Receiver<bool>) {
    // A chunk of one token is far smaller than a segment: it must not wait for another.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let watch = Arc::new(HeadWatch::default());
    let write_timeout = app.config().client_write_timeout;
    let io = ClientIo::new(stream, Arc::clone(&watch), write_timeout);
    let mut builder = Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(app.config().header_read_timeout);
    let service = service_fn(move |request| {
        let served: Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(enter(Arc::clone(&app), door, Arc::clone(&watch), request));
        served
    });
    let mut served = builder.serve_connection(TokioIo::new(io), service);
    let stopped = tokio::select! {
        ended = poll_fn(|cx| served.poll_without_shutdown(cx)) => Some(ended),
        _ = stop.wait_for(|stop| *stop) => None,
    };
    let ended = match stopped {
        Some(ended) => ended,
        None => {
            Pin::new(&mut served).graceful_shutdown();
            poll_fn(|cx| served.poll_without_shutdown(cx)).await
        }
    };
    match ended {
        Ok(()) => served.into_parts().io.into_inner().close().await,
        Err(error) => tracing::debug!(%error, "client connection ended"),
    }
}

type Never = std::convert::Infallible;

async fn enter(
    app: Arc<App>,
    door: Door,
    watch: Arc<HeadWatch>,
    request: Request<Incoming>,
) -> Result<Answer, Never> {
    if let Err(error) = framing(&watch, request.headers()) {
        let mut answer = answer::error(&error);
        let close = HeaderValue::from_static("close");
        answer.headers_mut().insert(header::CONNECTION, close);
        return Ok(answer);
    }
    match door {
        Door::Clients => route(app, watch, request).await,
        Door::Administrators => Ok(rarely(workers::serve(&app, request, &watch)).await),
    }
}

/// Whether it is certain where the request ends, and what its body is.
fn framing(watch: &HeadWatch, headers: &HeaderMap) -> Result<(), ApiError> {
    if watch.has_two_lengths() {
        let text = "a request has either Content-Length or Transfer-Encoding";
        return Err(ApiError::new(400, "two_lengths", text));
    }
    transfer_coding::check(headers)
}

async fn route(
    app: Arc<App>,
    watch: Arc<HeadWatch>,
    mut request: Request<Incoming>,
) -> Result<Answer, Never> {
    let open = auth::is_open(request.uri().path());
    if let Err(error) = app.gate.admit(open, request.headers_mut()) {
        return Ok(app.unauthorized(&error));
    }
    let path = request.uri().path();
    let completion = Route::ALL.into_iter().find(|route| route.path() == path);
    if let Some(route) = completion {
        if request.method() != Method::POST {
            return Ok(not_allowed("POST"));
        }
        return Ok(completions::serve(app, route, request, &watch).await);
    }
    let to_all = fanout::TO_ALL.into_iter().find(|known| *known == path);
    let posted = to_all.is_some() || path == ABORT;
    if posted && request.method() != Method::POST {
        return Ok(not_allowed("POST"));
    }
    if let Some(to_all) = to_all {
        return Ok(rarely(fanout::to_all(&app, to_all, request, &watch)).await);
    }
    if posted {
        return Ok(rarely(running::abort(&app, request, &watch)).await);
    }
    let known: Option<&'static str> = ["/v1/models", "/health", "/ready", "/metrics", "/workers"]
        .into_iter()
        .find(|known| *known == path);
    let Some(known) = known else {
        let Some(label) = relay::label(path) else {
            let error = ApiError::new(404, "unknown_path", "no such path");
            return Ok(answer::error(&error));
        };
        return Ok(rarely(relay::serve(app, label, request, &watch)).await);
    };
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return Ok(not_allowed("GET, HEAD"));
    }
    if http_body::Body::is_end_stream(request.body()) {
        watch.arm();
    }
    Ok(match known {
        "/v1/models" => {
            let record = Record::new(Arc::clone(&app), known);
            let answer = rarely(fanout::models(&app, request)).await;
            record.finish(answer.status());
            answer
        }
        "/health" => admin::health(),
        "/ready" => admin::ready(&app, request.uri().query()),
        "/metrics" => admin::metrics(&app),
        _ => admin::workers(&app),
    })
}

pub(crate) fn not_allowed(allow: &'static str) -> Answer {
    let error = ApiError::new(
        405,
        "method_not_allowed",
        format!("this path takes {allow}"),
    );
    let mut answer = answer::error(&error);
    let allow = HeaderValue::from_static(allow);
    answer.headers_mut().insert(header::ALLOW, allow);
    answer
}
