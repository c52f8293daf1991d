//! What is read in a prefill answer.

use crate::openai::response::{Ended, read};

#[test]
fn the_end_of_a_prefill_answer_is_read_from_each_route() {
    for (body, want) in [
        (r#"{"choices":[{"finish_reason":"length"}]}"#, Ended::Length),
        (r#"{"choices":[{"finish_reason":"stop"}]}"#, Ended::Stopped),
        (
            r#"{"choices":[{"finish_reason":"tool_calls"}]}"#,
            Ended::Stopped,
        ),
        (r#"{"choices":[{"finish_reason":"abort"}]}"#, Ended::Unknown),
        (r#"{"choices":[{"finish_reason":null}]}"#, Ended::Unknown),
        (r#"{"status":"incomplete","output":[]}"#, Ended::Length),
        (r#"{"status":"completed"}"#, Ended::Stopped),
        (r#"{"choices":[]}"#, Ended::Unknown),
        (r#"{"choices":{}}"#, Ended::Unknown),
        (r#"{"choices":null}"#, Ended::Unknown),
        (
            r#"{"choices":[],"status":"completed","choices":[]}"#,
            Ended::Unknown,
        ),
        (r#"{"status":"completed","choices":[{}]}"#, Ended::Stopped),
        (r#"{"status":7,"choices":[]}"#, Ended::Unknown),
        ("", Ended::Unknown),
    ] {
        assert_eq!(read(body.as_bytes()).ended, want, "{body}");
    }
}

#[test]
fn params_are_taken_raw_from_the_top_level_only() {
    let body =
        br#"{"choices":[{"kv_transfer_params":{"no":1}}], "kv_transfer_params": {"a": 1.50}}"#;
    assert_eq!(read(body).params, Some(r#"{"a": 1.50}"#));
    for body in [
        &br#"{"choices":[{"kv_transfer_params":{"no":1}}]}"#[..],
        br#"{"kv_transfer_params":null}"#,
        br#"{"kv_transfer_params":[1]}"#,
        br#"{"kv_transfer_params":"{}"}"#,
        br#"{"kv_transfer_params":{"a":1},"kv_transfer_params":{"a":2}}"#,
        br#"{"kv_transfer_params":{"a":1}"#,
        b"",
    ] {
        assert_eq!(read(body).params, None);
    }
}
