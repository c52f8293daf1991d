//! What the gate lets through, and by which name it refuses.

use http::Request;

use super::*;

const KEY: &[u8] = b"an-admin-key-of-ours";

fn keys(text: &[u8]) -> Option<Keys> {
    Some(Keys::parse(text, 8).expect("keys"))
}

fn gate(begun_s: u64) -> Gate {
    Gate {
        begun_s,
        ..Gate::new(keys(KEY), None, true)
    }
}

/// A request for one path with these headers.
fn head(headers: &[(&str, String)]) -> request::Parts {
    let mut request = Request::post("/v1/workers?x=1");
    for (name, value) in headers {
        request = request.header(*name, value);
    }
    request.body(()).expect("a request").into_parts().0
}

/// Signed at `timestamp_s`, shown at `now_s`.
fn ask(gate: &Gate, nonce: u128, timestamp_s: u64, now_s: u64) -> Result<(), ApiError> {
    let signed = Signed {
        method: "POST",
        target: "/v1/workers?x=1",
        timestamp_s,
        nonce,
        body: b"{}",
    };
    let head = head(&[
        (signature::TIMESTAMP, timestamp_s.to_string()),
        (signature::NONCE, format!("{nonce:032x}")),
        (signature::SIGNATURE, signed.sign(KEY)),
    ]);
    let claim = gate.claim(&head)?.expect("a claim");
    gate.prove(&claim, &head, b"{}", now_s)
}

fn code(result: Result<(), ApiError>) -> (u16, &'static str) {
    result.map_or_else(|error| (error.status, error.code), |()| (200, ""))
}

#[test]
fn a_signature_is_good_once_and_within_30_s() {
    let gate = gate(900);
    assert_eq!(code(ask(&gate, 1, 1_000, 1_000)), (200, ""));
    assert_eq!(code(ask(&gate, 1, 1_000, 1_030)), (401, "replayed_nonce"));
    assert_eq!(code(ask(&gate, 1, 1_001, 1_000)), (401, "replayed_nonce"));
    assert_eq!(code(ask(&gate, 2, 1_000, 1_030)), (200, ""));
    assert_eq!(code(ask(&gate, 3, 1_000, 1_031)), (401, "stale_timestamp"));
    assert_eq!(code(ask(&gate, 3, 1_031, 1_000)), (401, "stale_timestamp"));
    assert_eq!(code(ask(&gate, 3, 1_030, 1_000)), (200, ""));
    // For as long as its timestamp is good, a nonce is known.
    assert_eq!(code(ask(&gate, 3, 1_030, 1_060)), (401, "replayed_nonce"));
}

#[test]
fn what_was_signed_before_the_start_may_have_been_used() {
    let gate = gate(1_000);
    assert_eq!(code(ask(&gate, 1, 999, 1_000)), (401, "stale_timestamp"));
    assert_eq!(code(ask(&gate, 1, 1_000, 1_000)), (200, ""));
}

#[test]
fn a_stranger_is_refused_and_fills_no_memory() {
    let gate = gate(0);
    let error = gate.claim(&head(&[])).expect_err("no signature");
    assert_eq!((error.status, error.code), (401, "signature_missing"));
    assert!(error.message.contains(signature::TIMESTAMP));
    for nonce in 0..10 {
        let head = head(&[
            (signature::TIMESTAMP, "1000".to_owned()),
            (signature::NONCE, format!("{nonce:032x}")),
            (signature::SIGNATURE, "ab".repeat(32)),
        ]);
        let claim = gate.claim(&head).expect("headers").expect("a claim");
        let proven = gate.prove(&claim, &head, b"{}", 1_000);
        assert_eq!(code(proven), (401, "bad_signature"));
    }
    assert_eq!(code(ask(&gate, 0, 1_000, 1_000)), (200, ""));
    // Without a key nothing is asked for.
    gate.set(None, None, true);
    assert_eq!(gate.claim(&head(&[])).expect("open"), None);
}

#[test]
fn a_client_needs_a_key_but_for_what_probes_ask() {
    let told = |gate: &Gate, path: &str, value: Option<&str>| {
        let mut headers = HeaderMap::new();
        if let Some(value) = value {
            headers.insert(header::AUTHORIZATION, value.parse().expect("a value"));
        }
        let admitted = gate.admit(is_open(path), &mut headers);
        (code(admitted), headers.contains_key(header::AUTHORIZATION))
    };
    let gate = Gate::new(None, keys(b"key-of-one\nkey-of-two"), false);
    for good in ["Bearer key-of-one", "bearer  key-of-two "] {
        assert_eq!(told(&gate, "/v1/models", Some(good)), ((200, ""), false));
    }
    for bad in [
        "Bearer key-of-on",
        "Bearer ",
        "Bearer key-of-one,key-of-two",
    ] {
        let told = told(&gate, "/v1/models", Some(bad)).0;
        assert_eq!(told, (401, "invalid_api_key"), "{bad}");
    }
    for bad in [
        None,
        Some("key-of-one"),
        Some("Basic key-of-one"),
        Some("Bearer"),
    ] {
        for path in [
            "/v1/models",
            "/workers",
            "/start_profile",
            "/metrics/",
            "/nowhere",
        ] {
            let told = told(&gate, path, bad).0;
            assert_eq!(told, (401, "missing_api_key"), "{bad:?}");
        }
    }
    for open in ["/health", "/ready", "/metrics"] {
        assert_eq!(told(&gate, open, None).0, (200, ""));
    }
    let mut twice = HeaderMap::new();
    for value in ["Bearer key-of-one", "Bearer x"] {
        twice.append(header::AUTHORIZATION, value.parse().expect("a value"));
    }
    assert_eq!(code(gate.admit(false, &mut twice)).0, 401);
    // An engine gets it where that is asked for, and without keys unless it is not.
    for (keys, forwards) in [(keys(b"key-of-one"), true), (None, true), (None, false)] {
        let gate = Gate::new(None, keys, forwards);
        let told = told(&gate, "/v1/models", Some("Bearer key-of-one"));
        assert_eq!(told, ((200, ""), forwards));
    }
}
