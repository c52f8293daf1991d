//! Which headers cross the proxy.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use crate::trace_context::{TRACEPARENT, TRACESTATE};

/// The header by which an engine instance learns the DP rank that is meant.
pub const DP_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// The id of a request, equal on both legs and in the answer.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Headers of one connection only (RFC 9110, section 7.6.1, and its older kin).
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Request headers that the proxy decides itself. From a client they would steer where KV is read
/// from or which rank serves; other routers' hand-over headers are among them.
const EDGE: [HeaderName; 9] = [
    DP_RANK,
    header::HOST,
    header::CONTENT_LENGTH,
    header::EXPECT,
    // The prefill answer must be readable, and the end of a broken stream must be writable.
    header::ACCEPT_ENCODING,
    HeaderName::from_static("x-prefiller-host-port"),
    HeaderName::from_static("x-prefiller-url"),
    HeaderName::from_static("x-data-parallel-host-port"),
    HeaderName::from_static("x-encoder-hosts-ports"),
];
/// Reserved for the hand-over between this proxy and engines.
const EDGE_PREFIX: &str = "x-hetero-kv-";

/// Removes what is of one connection, and whatever `drops` names.
fn drop_headers(headers: &mut HeaderMap, drops: impl Fn(&HeaderName) -> bool) {
    let nominated = headers.get_all(header::CONNECTION).iter();
    let nominated = nominated
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok());
    // Few of the headers that are there go, and all that could be there are many.
    let found = headers
        .keys()
        .filter(|name| HOP_BY_HOP.contains(name) || drops(name));
    let dropped: Vec<HeaderName> = found.cloned().chain(nominated).collect();
    for name in dropped {
        headers.remove(name);
    }
}

/// The client's headers as both legs carry them, without what only the proxy may say. A client's
/// request id is kept; without one, `mint` makes it.
///
/// # Errors
/// That of `mint`.
pub fn for_legs<E>(
    mut headers: HeaderMap,
    mint: impl FnOnce() -> Result<String, E>,
) -> Result<HeaderMap, E> {
    drop_headers(&mut headers, |name| {
        EDGE.contains(name) || name.as_str().starts_with(EDGE_PREFIX)
    });
    if !headers.contains_key(REQUEST_ID)
        && let Ok(id) = HeaderValue::try_from(mint()?)
    {
        headers.insert(REQUEST_ID, id);
    }
    Ok(headers)
}

/// An engine's answer headers as the client gets them. The length is left to the body, and the id
/// is the client's also where the engine was given another, which may hold addresses.
pub fn for_client(mut headers: HeaderMap, request_id: Option<&HeaderValue>) -> HeaderMap {
    // The trace is that of the leg, and not of the client's request.
    drop_headers(&mut headers, |name| {
        [header::CONTENT_LENGTH, TRACEPARENT, TRACESTATE].contains(name)
    });
    if let Some(id) = request_id {
        headers.insert(REQUEST_ID, id.clone());
    }
    headers
}

#[cfg(test)]
mod tests;
