//! Legs as proxies send them, good and bad.

use serde_json::{Value, json};

use super::*;

fn body(changes: &Value) -> Value {
    let mut body = json!({"model": "m", "prompt": "hello world", "max_tokens": 8});
    for (key, value) in changes.as_object().expect("an object") {
        body[key] = value.clone();
    }
    body
}

fn read(body: &Value) -> Result<Leg, LegError> {
    parse(body.to_string().as_bytes(), false)
}

fn prefill() -> Value {
    body(&json!({"max_tokens": 1, "kv_transfer_params":
        {"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null}}))
}

fn params() -> Value {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "hetero_version": 1,
        "transfer_id": "0123456789abcdef0123456789abcdef", "remote_engine_id": "e",
        "remote_incarnation": "i", "remote_host": "127.0.0.1", "remote_port": 9, "remote_dp_rank": 0,
        "remote_request_id": "r", "tp_size": 1, "pp_size": 1, "remote_block_ids": [[1, 2]],
        "remote_num_tokens": 20, "lease_epoch": 3, "prompt_digest": "0".repeat(64), "more": [null]})
}

#[test]
fn params_say_what_a_request_is() {
    let kind = |body: &Value| read(body).expect("a leg").kind();
    assert_eq!(kind(&body(&json!({}))), LegKind::Plain);
    assert_eq!(
        kind(&body(&json!({"kv_transfer_params": null}))),
        LegKind::Plain
    );
    assert_eq!(kind(&prefill()), LegKind::Prefill);
    let decode = body(&json!({"kv_transfer_params": params()}));
    assert_eq!(kind(&decode), LegKind::Decode);
    let Order::Decode(handle) = read(&decode).expect("a leg").order else {
        panic!("a decode leg");
    };
    assert_eq!((handle.epoch, handle.incarnation.as_str()), (3, "i"));
}

#[test]
fn each_param_is_needed_and_named() {
    let sent = params();
    for key in sent.as_object().expect("an object").keys() {
        if ["do_remote_prefill", "do_remote_decode", "more"].contains(&key.as_str()) {
            continue;
        }
        for wrong in [Value::Null, json!({"a": 1})] {
            let mut params = sent.clone();
            params[key] = wrong;
            let error = read(&body(&json!({"kv_transfer_params": params}))).expect_err(key);
            assert!(
                error.reason == "body"
                    || error
                        .message
                        .contains(&format!("kv_transfer_params.{key}`")),
                "{key}: {}",
                error.message
            );
        }
    }
}

#[test]
fn what_an_engine_refuses_is_refused() {
    let mut two = params();
    two["do_remote_decode"] = json!(true);
    let mut short = params();
    short["transfer_id"] = json!("0123");
    for (changed, reason) in [
        (json!({"prompt": null}), "prompt"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": -4}), "body"),
        (json!({"min_tokens": 9}), "min_tokens"),
        (json!({"n": 0}), "n"),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
        ),
        (json!({"kv_transfer_params": two}), "kv_transfer_params"),
        (json!({"kv_transfer_params": short}), "transfer_id"),
    ] {
        assert_eq!(read(&body(&changed)).expect_err(reason).reason, reason);
    }
    for (key, value, reason) in [
        ("max_tokens", json!(2), "max_tokens"),
        ("stream", json!(true), "stream"),
        ("n", json!(2), "n"),
    ] {
        let mut leg = prefill();
        leg[key] = value;
        assert_eq!(read(&leg).expect_err(reason).reason, reason);
    }
    let twice = br#"{"prompt":"a","max_tokens":1,"max_tokens":2}"#;
    assert_eq!(parse(twice, false).expect_err("twice").reason, "body");
}

#[test]
fn prompts_are_told_apart_and_counted() {
    let leg = |prompt: Value| read(&body(&json!({"prompt": prompt}))).expect("a leg");
    assert_eq!(leg(json!([5, 6, 7])).prompt_tokens, 3);
    assert_eq!(leg(json!("x".repeat(398))).prompt_tokens, 100);
    let (one, other) = (leg(json!("one")), leg(json!("other")));
    assert_ne!(one.prompt_hash, other.prompt_hash);
    assert_eq!(one.prompt_hash, leg(json!("one")).prompt_hash);
    let chat = br#"{"messages":[{"role":"user","content":"hi"}]}"#;
    assert_eq!(parse(chat, true).expect("a chat").kind(), LegKind::Plain);
    assert_eq!(parse(chat, false).expect_err("no prompt").reason, "prompt");
}
