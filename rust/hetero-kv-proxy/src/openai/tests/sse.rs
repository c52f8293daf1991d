//! Event streams that break, and those that begin with an error.

use crate::openai::error::ApiError;
use crate::openai::sse::{self, Tail};

#[test]
fn a_broken_stream_is_closed_before_the_error_event() {
    let error = ApiError::new(502, "decode_stream_broken", "gone");
    let event = |pushed: &[&str]| {
        let mut tail = Tail::default();
        for chunk in pushed {
            tail.push(chunk.as_bytes());
        }
        (
            tail.is_done(),
            String::from_utf8(tail.error_event(&error).to_vec()).expect("UTF-8"),
        )
    };
    assert!(event(&[]).1.starts_with("data: {\"error\""));
    assert!(event(&["data: 1\n\n"]).1.starts_with("data: {\"error\""));
    assert!(event(&["data: 1\r\n\r\n"]).1.starts_with("data: {"));
    assert!(event(&["data: 1\n", "\n"]).1.starts_with("data: {"));
    assert!(event(&["data: {\"te"]).1.starts_with("\n\ndata: {"));
    assert!(event(&["data: [DO", "NE]\n\n"]).0);
    assert!(!event(&["data: [DONE]\n\n", "data: {\"x\":1}\n\n"]).0);
}

#[test]
fn a_stream_that_begins_with_an_engines_error_is_told_from_a_clients() {
    for (chunk, failure) in [
        (
            "data: {\"error\": {\"message\":\"x\",\"code\":500}}\n\n",
            true,
        ),
        (
            "data: {\"error\":{\"code\":\"lease_gone\"}}\n\ndata: [DONE]\n\n",
            true,
        ),
        ("data: {\"error\":{}}\n\n", true),
        ("data: {\"error\":{\"code\":400}}\n\n", false),
        ("data: {\"error\":\"text\"}\n\n", false),
        (
            "data: {\"choices\":[{\"text\":\"{\\\"error\\\"\"}]}\n\n",
            false,
        ),
        ("event: response.created\ndata: {}\n\n", false),
        ("data: {\"error", false),
        ("", false),
    ] {
        assert_eq!(sse::is_failure(chunk.as_bytes()), failure, "{chunk}");
    }
}
