//! Which headers cross the proxy.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// The header by which an engine instance learns the DP rank that is meant.
pub const DP_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// The id of a request, equal on both legs and in the answer.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Whether a header is of one connection only (RFC 9110, section 7.6.1, and its older kin).
fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
            | "keep-alive"
            | "proxy-connection"
    )
}

/// Whether the proxy decides itself about a header of a request. From a client they would steer where
/// KV is read from or which rank serves; other routers' hand-over headers are among them.
fn is_edge(name: &str) -> bool {
    matches!(
        name,
        "x-data-parallel-rank"
            | "host"
            | "content-length"
            | "expect"
            // The prefill answer must be readable, and the end of a broken stream must be writable.
            | "accept-encoding"
            | "x-prefiller-host-port"
            | "x-prefiller-url"
            | "x-data-parallel-host-port"
            | "x-encoder-hosts-ports"
    ) || name.starts_with(EDGE_PREFIX)
}

/// Whether a header of an engine's answer is not the client's: the length is left to the body, and the
/// trace is that of the leg.
fn is_of_leg(name: &str) -> bool {
    matches!(name, "content-length" | "traceparent" | "tracestate")
}

/// Reserved for the hand-over between this proxy and engines.
const EDGE_PREFIX: &str = "x-hetero-kv-";

/// Removes what is of one connection, and whatever `drops` names.
fn drop_headers(headers: &mut HeaderMap, drops: impl Fn(&str) -> bool) {
    let nominated = headers.get_all(header::CONNECTION).iter();
    let nominated = nominated
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok());
    // Few of the headers that are there go, and all that could be there are many.
    let found = headers
        .keys()
        .filter(|name| is_hop_by_hop(name.as_str()) || drops(name.as_str()));
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
    drop_headers(&mut headers, is_edge);
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
    drop_headers(&mut headers, is_of_leg);
    if let Some(id) = request_id {
        headers.insert(REQUEST_ID, id.clone());
    }
    headers
}

#[cfg(test)]
mod tests;
