//! What crosses and what does not.

use super::*;

fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, HeaderValue::from_static(value));
    }
    headers
}

fn names(headers: &HeaderMap) -> Vec<&str> {
    let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    names
}

#[test]
fn client_headers_pass_but_for_hop_by_hop_and_hand_over() {
    let headers = map(&[
        ("authorization", "Bearer k"),
        ("traceparent", "00-1"),
        ("x-custom", "1"),
        ("content-type", "application/json"),
        ("connection", "keep-alive, X-Secret-Hop"),
        ("x-secret-hop", "1"),
        ("keep-alive", "5"),
        ("te", "trailers"),
        ("transfer-encoding", "chunked"),
        ("content-length", "5"),
        ("expect", "100-continue"),
        ("accept-encoding", "gzip"),
        ("host", "proxy"),
        ("x-data-parallel-rank", "3"),
        ("x-prefiller-host-port", "127.0.0.1:22"),
        ("x-hetero-kv-anything", "1"),
        ("proxy-authorization", "secret"),
    ]);
    let legs = for_legs(headers, || Ok::<_, ()>("minted".to_owned())).expect("minted");
    assert_eq!(
        names(&legs),
        [
            "authorization",
            "content-type",
            "traceparent",
            "x-custom",
            "x-request-id"
        ]
    );
    assert_eq!(legs[REQUEST_ID], "minted");
}

#[test]
fn a_clients_request_id_is_kept() {
    let legs = for_legs(map(&[("x-request-id", "mine")]), || Err("not called")).expect("kept");
    assert_eq!(legs[REQUEST_ID], "mine");
}

#[test]
fn answer_headers_pass_but_for_hop_by_hop_and_length() {
    let answer = map(&[
        ("content-type", "application/json"),
        ("content-length", "5"),
        ("connection", "close"),
        ("x-engine", "a"),
    ]);
    let id = HeaderValue::from_static("r");
    let client = for_client(answer, Some(&id));
    assert_eq!(names(&client), ["content-type", "x-engine", "x-request-id"]);
    let own = for_client(map(&[("x-request-id", "engine")]), Some(&id));
    // The engine's may be the one that the proxy made for it, with addresses in it.
    assert_eq!(own[REQUEST_ID], "r");
}
