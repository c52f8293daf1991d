//! A client's request up to the point where it may go to an engine.

use std::pin::pin;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout, timeout_at};

use crate::app::App;
use crate::client_io::HeadWatch;
use crate::legs::deadline_exceeded;
use crate::openai::Route;
use crate::openai::error::ApiError;
use crate::openai::request::{Request, RequestError};
use crate::seats::Seat;

/// A body of at least so many bytes may be a slice of what was read with it.
const SHARED_BYTES_MIN: usize = 8 << 10;

/// Waits until the request may run, and reads its body meanwhile: only then does a client that leaves
/// the queue show.
pub(crate) async fn enter(
    app: &App,
    headers: &HeaderMap,
    incoming: Incoming,
    watch: &HeadWatch,
    deadline: Instant,
) -> Result<(Seat, Bytes), ApiError> {
    // Pinned where they are: what waits for them would move all of their state.
    let read = pin!(async {
        let whole = body(app, headers, incoming, deadline).await?;
        watch.arm();
        Ok(whole)
    });
    let entered = pin!(app.admission.enter(app));
    let both = async { tokio::try_join!(entered, read) };
    timeout_at(deadline, both)
        .await
        .unwrap_or_else(|_| Err(deadline_exceeded()))
}

/// Reads the client's body within the limits of size and time.
pub(crate) async fn body(
    app: &App,
    headers: &HeaderMap,
    body: Incoming,
    deadline: Instant,
) -> Result<Bytes, ApiError> {
    let max = app.config().body_bytes_max;
    body_within(app, headers, body, max, deadline).await
}

/// As [`body`], of at most `max` bytes.
pub(crate) async fn body_within(
    app: &App,
    headers: &HeaderMap,
    mut body: Incoming,
    max: u64,
    deadline: Instant,
) -> Result<Bytes, ApiError> {
    let encoded = headers
        .get(header::CONTENT_ENCODING)
        .is_some_and(|coding| coding != "identity");
    if encoded {
        return Err(ApiError::new(
            415,
            "content_encoding",
            "a compressed request body is not supported",
        ));
    }
    let too_large = || {
        ApiError::new(
            413,
            "body_too_large",
            format!("the request body is larger than {max} bytes"),
        )
    };
    let declared = http_body::Body::size_hint(&body).lower();
    if declared > max {
        return Err(too_large());
    }
    let read_timeout = app.config().body_read_timeout;
    let mut whole = BytesMut::new();
    while !http_body::Body::is_end_stream(&body) {
        let frame = timeout_at(deadline, timeout(read_timeout, body.frame())).await;
        let Ok(Ok(frame)) = frame else {
            return Err(ApiError::new(
                408,
                "body_timeout",
                "the request body did not come in time",
            ));
        };
        let Some(frame) = frame else { break };
        let frame = frame
            .map_err(|_| ApiError::new(400, "body_broken", "the request body is not valid HTTP"))?;
        if let Ok(data) = frame.into_data() {
            if whole.len() as u64 + data.len() as u64 > max {
                return Err(too_large());
            }
            // A long body that came at once is not copied; of a short one the connection's buffer
            // would be held.
            if data.len() as u64 == declared && data.len() >= SHARED_BYTES_MIN {
                return Ok(data);
            }
            // A declared length is a claim: only the first part of it is set aside unseen.
            if whole.is_empty() {
                whole.reserve(declared.min(256 << 10) as usize);
            }
            whole.extend_from_slice(&data);
        }
    }
    Ok(whole.freeze())
}

/// The body as a request, or the 400 that names what is wrong with it.
pub(crate) fn parse(body: Bytes, route: Route) -> Result<Request, ApiError> {
    Request::parse(body, route).map_err(|error| bad_request(&error))
}

/// The 400 for a fault in a body.
pub(crate) fn bad_request(error: &RequestError) -> ApiError {
    let code = match error {
        RequestError::Syntax(_) => "invalid_json",
        RequestError::Duplicate(_) => "duplicate_field",
        RequestError::Field { .. } => "invalid_field",
        RequestError::ForeignParams => "kv_transfer_params_not_allowed",
    };
    let mut answer = ApiError::new(400, code, error.to_string());
    answer.param = error.field().map(str::to_owned);
    answer
}
