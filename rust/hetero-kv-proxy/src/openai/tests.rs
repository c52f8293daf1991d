//! Splicing is compared with a reference that works on parsed values, and byte for byte where the
//! bytes are the promise.

use std::collections::BTreeMap;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::Route;
use super::error::ApiError;
use super::request::{Request, RequestError};
use super::response::{Ended, read};
use super::scan;
use super::splice::{Change, Object};
use super::sse::Tail;

/// What some connector's prefill leg carries.
const PARAMS: &str =
    r#"{"do_remote_decode":true,"transfer_id":"00112233445566778899aabbccddeeff"}"#;

fn completions(body: &str) -> Result<Request, RequestError> {
    Request::parse(Bytes::copy_from_slice(body.as_bytes()), Route::Completions)
}

fn prefill(body: &str) -> String {
    let request = completions(body).expect("a valid request");
    String::from_utf8(request.prefill_body(PARAMS).concat()).expect("UTF-8")
}

fn decode(body: &str, params: &str) -> String {
    let request = completions(body).expect("a valid request");
    String::from_utf8(request.decode_body(Some(params)).concat()).expect("UTF-8")
}

/// Bytes that a re-serialising proxy changes: floats, big integers, escapes, order, white space.
const ODD: &str = concat!(
    " {\t\"temperature\" : 0.30000000000000004, \"top_p\":1e0,\n\"seed\":18446744073709551616,",
    "\"zeta\":[1.0,-0,1E+2], \"alpha\":{\"kv_transfer_params\":{\"x\":1},\"max_tokens\":7},",
    "\"prompt\":\"caf\\u00e9 \\ud83d\\ude00 \\/ é \\u0000\",\"\\u006eot_n\":3 ,\"a\":null} \n"
);

#[test]
fn the_decode_body_is_the_clients_bytes_with_params_in_front() {
    let params = r#"{"remote_block_ids":[[1,2]],"f":0.10000000000000001}"#;
    let want = ODD.replacen('{', &format!("{{\"kv_transfer_params\":{params},"), 1);
    assert_eq!(decode(ODD, params), want);
}

#[test]
fn the_prefill_body_differs_in_the_named_members_only() {
    let want = ODD.replacen(
        '{',
        &format!("{{\"kv_transfer_params\":{PARAMS},\"max_tokens\":1,\"min_tokens\":1,"),
        1,
    );
    assert_eq!(prefill(ODD), want);
}

#[test]
fn every_limit_of_the_prefill_leg_is_set_or_removed() {
    let body = r#"{"max_tokens":500,"x":1,"max_completion_tokens":400,"min_tokens":100,"stream":true,
        "stream_options":{"include_usage":true},"n":4,"best_of":8,"kv_transfer_params":null,"prompt":"p"}"#;
    let sent: Value = serde_json::from_str(&prefill(body)).expect("JSON");
    assert_eq!(
        sent,
        json!({
            "max_tokens": 1, "x": 1, "max_completion_tokens": 1, "stream": false, "n": 1,
            "prompt": "p", "min_tokens": 1,
            "kv_transfer_params": serde_json::from_str::<Value>(PARAMS).expect("JSON"),
        })
    );
}

#[test]
fn fields_that_the_client_did_not_send_are_not_invented() {
    let sent: Value = serde_json::from_str(&prefill(r#"{"prompt":"p"}"#)).expect("JSON");
    let names: Vec<&str> = sent
        .as_object()
        .expect("object")
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        names,
        ["kv_transfer_params", "max_tokens", "min_tokens", "prompt"]
    );
}

#[test]
fn a_null_from_the_client_gives_way_to_the_params() {
    assert_eq!(
        decode(
            r#"{"a":1, "kv_transfer_params" : null ,"b":2}"#,
            r#"{"k":1}"#
        ),
        r#"{"a":1, "kv_transfer_params" : {"k":1} ,"b":2}"#
    );
    assert_eq!(
        decode("{}", r#"{"k":1}"#),
        r#"{"kv_transfer_params":{"k":1}}"#
    );
    assert_eq!(
        decode("{ }", r#"{"k":1}"#),
        r#"{"kv_transfer_params":{"k":1} }"#
    );
}

#[test]
fn removal_takes_one_comma_wherever_the_member_stands() {
    for (body, want) in [
        (r#"{"r":1}"#, "{}"),
        (r#"{ "r" : 1 }"#, "{  }"),
        (r#"{"r":1,"a":2}"#, r#"{"a":2}"#),
        (r#"{"a":2,"r":1}"#, r#"{"a":2}"#),
        (r#"{"a":2 , "r":1 , "b":3}"#, r#"{"a":2 , "b":3}"#),
        (r#"{"a":2,"r":1,"s":1}"#, r#"{"a":2}"#),
        (r#"{"r":1,"s":1,"a":2}"#, r#"{"a":2}"#),
        (r#"{"r":1,"a":2,"s":1}"#, r#"{"a":2}"#),
        (r#"{"s":1,"r":1}"#, "{}"),
    ] {
        let object = Object::parse(body.as_bytes()).expect("object");
        let text = Bytes::from_static(body.as_bytes());
        for shared_min in [1, usize::MAX] {
            let changes = [Change::Remove("r"), Change::Remove("s")];
            let out = object.apply(&text, &changes, shared_min).concat();
            assert_eq!(String::from_utf8_lossy(&out), want, "{body}");
        }
    }
}

#[test]
fn an_escaped_name_is_the_name() {
    let body = r#"{"m\u0061x_tokens":50,"prompt":"p"}"#;
    assert!(prefill(body).contains(r#""m\u0061x_tokens":1"#));
    let twice = r#"{"m\u0061x_tokens":50,"max_tokens":1}"#;
    assert!(matches!(
        completions(twice),
        Err(RequestError::Duplicate(name)) if name.0 == "max_tokens"
    ));
}

#[test]
fn faults_in_touched_fields_name_the_field() {
    for (body, field) in [
        (r#"{"max_tokens":"5"}"#, "max_tokens"),
        (r#"{"max_tokens":-4}"#, "max_tokens"),
        (r#"{"max_tokens":1.5}"#, "max_tokens"),
        (r#"{"max_tokens":1e999}"#, "max_tokens"),
        (r#"{"max_tokens":[1]}"#, "max_tokens"),
        (r#"{"max_completion_tokens":true}"#, "max_completion_tokens"),
        (r#"{"min_tokens":9,"max_tokens":8}"#, "min_tokens"),
        (r#"{"n":0}"#, "n"),
        (r#"{"best_of":0}"#, "best_of"),
        (r#"{"stream":1}"#, "stream"),
        (r#"{"echo":1}"#, "echo"),
        (r#"{"use_beam_search":"yes"}"#, "use_beam_search"),
        (r#"{"stream_options":{}}"#, "stream_options"),
        (r#"{"stream":true,"stream_options":[]}"#, "stream_options"),
        (r#"{"kv_transfer_params":{}}"#, "kv_transfer_params"),
        (r#"{"kv_transfer_params":false}"#, "kv_transfer_params"),
        (
            r#"{"vllm_xargs":{"a":1,"kv_transfer_params":"x"}}"#,
            "kv_transfer_params",
        ),
        (r#"{"n":1,"n":1}"#, "n"),
        (r#"{"prompt":"a","prompt":"b"}"#, "prompt"),
        (
            r#"{"kv_transfer_params":null,"kv_transfer_params":{"a":1}}"#,
            "kv_transfer_params",
        ),
    ] {
        let error = completions(body).expect_err(body);
        assert_eq!(error.field(), Some(field), "{body}");
    }
}

#[test]
fn accepted_forms_of_touched_fields() {
    for body in [
        r#"{"max_tokens":null,"n":null,"stream":null,"stream_options":null,"min_tokens":null}"#,
        r#"{"max_tokens":5.0,"min_tokens":5,"stream":true,"stream_options":{"a":1}}"#,
        r#"{"max_tokens":0}"#,
        r#"{"other":1,"other":2}"#,
        r#"{"vllm_xargs":{"kv":1},"n":1}"#,
        r#"{"vllm_xargs":[1]}"#,
    ] {
        completions(body).expect(body);
    }
}

fn parsed(body: &str, route: Route) -> Request {
    Request::parse(Bytes::copy_from_slice(body.as_bytes()), route).expect(body)
}

#[test]
fn a_limit_of_the_client_is_exact_whatever_prefill_is_told() {
    for (route, bodies) in [
        (
            Route::Completions,
            [r#"{"prompt":"p"}"#, r#"{"max_tokens":1}"#].as_slice(),
        ),
        (
            Route::ChatCompletions,
            &[
                r#"{"messages":[]}"#,
                r#"{"max_completion_tokens":1}"#,
                r#"{"max_tokens":7,"max_completion_tokens":5}"#,
            ],
        ),
        (
            Route::Responses,
            &[r#"{"input":"p"}"#, r#"{"max_output_tokens":1,"input":"p"}"#],
        ),
    ] {
        for body in bodies {
            let request = parsed(body, route);
            assert_eq!(request.decode_body(None), [body.as_bytes()]);
            let decode = request.decode_body(Some("{}")).concat();
            let want = body.replacen('{', r#"{"kv_transfer_params":{},"#, 1);
            assert_eq!(decode, want.as_bytes());
            let prefill: Value =
                serde_json::from_slice(&request.prefill_body("{}").concat()).expect("JSON");
            for limit in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
                let set = prefill.get(limit).is_none_or(|value| *value == json!(1));
                assert!(set, "{limit} in {prefill}");
            }
        }
    }
}

#[test]
fn the_prefill_leg_of_a_response_has_its_own_limit_and_is_not_stored() {
    let body = r#"{"input":"p","max_output_tokens":50,"stream":true,"store":true,"max_tokens":9}"#;
    let prefill = parsed(body, Route::Responses).prefill_body(PARAMS);
    let prefill: Value = serde_json::from_slice(&prefill.concat()).expect("JSON");
    assert_eq!(
        prefill,
        json!({
            "input": "p", "max_output_tokens": 1, "stream": false, "store": false, "max_tokens": 9,
            "kv_transfer_params": serde_json::from_str::<Value>(PARAMS).expect("JSON"),
        })
    );
    let absent = parsed(r#"{"input":"p"}"#, Route::Responses).prefill_body("{}");
    assert_eq!(
        absent.concat(),
        br#"{"kv_transfer_params":{},"max_output_tokens":1,"store":false,"input":"p"}"#
    );
}

#[test]
fn echo_is_for_decode_alone_to_do() {
    let sent: Value =
        serde_json::from_str(&prefill(r#"{"prompt":"p","echo":true}"#)).expect("JSON");
    assert_eq!(sent["echo"], false);
    assert!(decode(r#"{"prompt":"p","echo":true}"#, "{}").ends_with(r#""echo":true}"#));
}

#[test]
fn requests_that_one_transfer_cannot_serve_run_alone() {
    const SEVERAL: Option<&str> = Some("several_sequences");
    const LOGPROBS: Option<&str> = Some("prompt_logprobs");
    const STORED: Option<&str> = Some("stored_response");
    let completions = [
        (r#"{"prompt":"a"}"#, [None, None]),
        (r#"{"prompt":["a"],"n":1,"best_of":1}"#, [None, None]),
        (r#"{"prompt":[1,2,3],"n":null}"#, [None, None]),
        (r#"{"prompt":"a","logprobs":5}"#, [None, None]),
        (r#"{"prompt":"a","echo":true}"#, [None, None]),
        (r#"{"prompt":"a","echo":false,"logprobs":5}"#, [None, None]),
        (r#"{"prompt":"a","prompt_logprobs":null}"#, [None, None]),
        (r#"{"prompt":["a","b"]}"#, [None, SEVERAL]),
        (r#"{"prompt":[[1],[2]]}"#, [None, SEVERAL]),
        (r#"{"prompt":"a","n":2}"#, [None, SEVERAL]),
        (r#"{"prompt":"a","n":2.0}"#, [None, SEVERAL]),
        (r#"{"prompt":"a","best_of":2}"#, [None, SEVERAL]),
        (r#"{"prompt":"a","use_beam_search":true}"#, [None, SEVERAL]),
        (r#"{"prompt":"a","echo":true,"logprobs":0}"#, [LOGPROBS; 2]),
        (r#"{"prompt":"a","prompt_logprobs":0}"#, [LOGPROBS; 2]),
        (r#"{"prompt_embeds":"x"}"#, [Some("prompt_embeds"); 2]),
    ];
    let chat = [
        (
            r#"{"messages":[],"logprobs":true,"echo":true}"#,
            [None, None],
        ),
        (r#"{"messages":[],"n":3}"#, [None, SEVERAL]),
        (r#"{"messages":[],"prompt_logprobs":1}"#, [LOGPROBS; 2]),
    ];
    let responses = [
        (
            r#"{"input":"a","tools":[{"type":"function","name":"f"}]}"#,
            [None, None],
        ),
        (r#"{"input":"a","background":false}"#, [None, None]),
        (
            r#"{"input":"a","tools":[{"type":"code_interpreter"}]}"#,
            [None, SEVERAL],
        ),
        (r#"{"input":"a","background":true}"#, [STORED; 2]),
        (
            r#"{"input":"a","previous_response_id":"resp_1"}"#,
            [STORED; 2],
        ),
    ];
    for (route, cases) in [
        (Route::Completions, completions.as_slice()),
        (Route::ChatCompletions, &chat),
        (Route::Responses, &responses),
    ] {
        for (body, [shared, single]) in cases {
            let request = parsed(body, route);
            assert_eq!(request.runs_alone(true), *shared, "{body}");
            assert_eq!(request.runs_alone(false), *single, "{body}");
        }
    }
}

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
fn only_one_json_object_is_a_body() {
    for body in [
        &b""[..],
        b"[]",
        b"1",
        b"\"{}\"",
        b"{",
        b"{}{}",
        b"{} x",
        b"{\"a\":}",
        b"{\"a\":NaN}",
        b"{'a':1}",
        b"{\"a\":1,}",
        b"{\"a\":\"\xff\"}",
        b"\xef\xbb\xbf{}",
        b"{\"a\":\"\x01\"}",
    ] {
        assert!(
            matches!(
                Request::parse(Bytes::from_static(body), Route::Completions),
                Err(RequestError::Syntax(_))
            ),
            "{}",
            String::from_utf8_lossy(body)
        );
    }
    // Depth is the engine's to judge, and costs the scanner no stack.
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(200_000), "]".repeat(200_000));
    completions(&deep).expect("deep but valid");
}

#[test]
fn a_list_of_prompts_is_cut_to_its_first_on_the_prefill_leg_only() {
    for (prompt, first) in [
        (r#"["a","b"]"#, Some(r#""a""#)),
        (r#"[ "\u0061,]" , "b" ]"#, Some(r#""\u0061,]""#)),
        ("[[1,2],[3]]", Some("[1,2]")),
        (r#"["a"]"#, None),
        ("[[1,2]]", None),
        ("[1,2,3]", None),
        ("[]", None),
        (r#""a""#, None),
    ] {
        let body = format!(r#"{{"model":"m","prompt":{prompt},"z":0.10}}"#);
        let request = completions(&body).expect(&body);
        assert_eq!(request.is_batch(), first.is_some(), "{prompt}");
        let want = format!(r#""prompt":{},"z":0.10}}"#, first.unwrap_or(prompt));
        assert!(prefill(&body).ends_with(&want), "{prompt}");
        assert!(decode(&body, "{}").ends_with(&body[1..]), "{prompt}");
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
fn errors_have_the_shape_that_clients_expect() {
    let mut error = ApiError::new(400, "invalid_field", "`n` \"x\"");
    error.param = Some("n".to_owned());
    let body: Value = serde_json::from_slice(&error.body()).expect("JSON");
    assert_eq!(
        body,
        json!({"error": {"message": "`n` \"x\"", "type": "invalid_request_error",
            "param": "n", "code": "invalid_field"}})
    );
}

/// What the fast look alone finds.
fn fast(text: &str) -> Option<Object> {
    let (open, members) = scan::members(text.as_bytes())?;
    Some(Object { open, members })
}

#[test]
fn the_fast_look_knows_json_and_nothing_else() {
    let deep = |depth: usize| format!("{{\"a\":{}1{}}}", "[".repeat(depth), "]".repeat(depth));
    for text in [
        "{}",
        " { } ",
        r#"{"a":[],"b":{},"c":[{}, [ ] ,{"d":[1,2]}]}"#,
        r#"{"a":-0,"b":0.5,"c":1e9,"d":-12.25E-7,"e":1E+0,"f":10}"#,
        r#"{"a":true,"b":false,"c":null}"#,
        r#"{"a\u0041\n":"\"\\\/\b\f\n\r\t\ud800","é":"日本語"}"#,
        r#"{"a":"0123456789012345678901234567890123456789\n012345678901234567890123456789"}"#,
        &deep(128),
    ] {
        let parser = Object::by_parser(text).expect(text);
        assert_eq!(fast(text), Some(parser), "{text}");
    }
    assert_eq!(fast(&deep(129)), None);
    for text in [
        "",
        "{",
        "[]",
        "1",
        "{}{}",
        "{} x",
        "{,}",
        r#"{"a"}"#,
        r#"{"a":}"#,
        r#"{"a":1,}"#,
        r#"{"a":1 "b":2}"#,
        r#"{"a":01}"#,
        r#"{"a":1.}"#,
        r#"{"a":.5}"#,
        r#"{"a":1e}"#,
        r#"{"a":+1}"#,
        r#"{"a":-}"#,
        r#"{"a":NaN}"#,
        r#"{"a":tru}"#,
        r#"{"a":truex}"#,
        r#"{"a":"\x"}"#,
        r#"{"a":"\u12"}"#,
        r#"{"a":"\u12g4"}"#,
        r#"{"a":"x}"#,
        r#"{'a':1}"#,
        r#"{a:1}"#,
        r#"{"a":[1,]}"#,
        r#"{"a":[1}"#,
        r#"{"a":{1:2}}"#,
        r#"{"a":[1}]"#,
        r#"{"a":{"b":1]}"#,
        r#"{"a":{"b":1,}}"#,
        "{\"a\":\"\n\"}",
        "{\"a\":\"0123456789012345678901234567\u{1}\"}",
    ] {
        assert_eq!(fast(text), None, "{text}");
        assert!(Object::by_parser(text).is_err(), "{text}");
    }
}

/// Any JSON value, small.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        // Halves: serde_json's own reading of a float may be off by one bit.
        any::<i32>().prop_map(|halves| Value::from(f64::from(halves) / 2.0)),
        ".{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-c{},\":\\\\]{0,3}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn space() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["", " ", "\n\t ", "\r\n"])
}

/// Every member that some leg changes.
const TOUCHED: [&str; 13] = [
    "kv_transfer_params",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "echo",
    "store",
    "prompt",
    "logprobs",
];
const VALUES: &[&str] = &["true", "false", "null"];

proptest! {
    /// Splicing equals editing the parsed object, and members that are not named keep their bytes.
    #[test]
    fn splicing_equals_editing_parsed_values(
        members in prop::collection::btree_map("[a-f]|.{0,4}", (value(), space(), space()), 0..8),
        order in any::<prop::sample::Index>(),
        set in prop::collection::btree_map("[a-f]", value(), 0..4),
        remove in prop::collection::btree_set("[a-f]", 0..4),
        shared_min in prop::sample::select(vec![1, 4, 16, usize::MAX]),
    ) {
        let mut parts: Vec<(String, String)> = members
            .iter()
            .map(|(name, (value, before, after))| {
                let raw = format!(
                    "{before}{}{after}:{before}{value}{after}",
                    Value::from(name.as_str()),
                );
                (name.clone(), raw)
            })
            .collect();
        if !parts.is_empty() {
            let at = order.index(parts.len());
            parts.rotate_left(at);
        }
        let text = format!(
            "{{{}}}",
            parts.iter().map(|(_, raw)| raw.as_str()).collect::<Vec<_>>().join(",")
        );
        let set: BTreeMap<String, String> = set
            .into_iter()
            .filter(|(name, _)| !remove.contains(name))
            .map(|(name, value)| (name, value.to_string()))
            .collect();
        let changes: Vec<Change<'_>> = set
            .iter()
            .map(|(name, value)| Change::Set(name, value))
            .chain(remove.iter().map(|name| Change::Remove(name)))
            .collect();
        let object = Object::parse(text.as_bytes()).expect("generated JSON");
        let text = Bytes::from(text);
        let pieces = object.apply(&text, &changes, shared_min);
        // What is long enough and not changed is the client's bytes themselves.
        let shared = |piece: &Bytes| text.as_ptr_range().contains(&piece.as_ptr());
        prop_assert!(pieces.iter().all(|piece| !shared(piece) || piece.len() >= shared_min));
        if changes.is_empty() && text.len() > 1 {
            prop_assert!(pieces.iter().any(shared) == (text.len() > shared_min));
        }
        let out = String::from_utf8(pieces.concat()).expect("UTF-8");

        let mut want: BTreeMap<String, Value> =
            members.iter().map(|(name, (value, _, _))| (name.clone(), value.clone())).collect();
        for name in &remove {
            want.remove(name);
        }
        for (name, value) in &set {
            want.insert(name.clone(), serde_json::from_str(value).expect("JSON"));
        }
        let got: BTreeMap<String, Value> = serde_json::from_str(&out).expect("spliced JSON");
        prop_assert_eq!(got, want);
        for (name, raw) in &parts {
            if !set.contains_key(name) && !remove.contains(name) {
                prop_assert!(out.contains(raw.trim()), "{raw} in {out}");
            }
        }
        if changes.is_empty() {
            prop_assert_eq!(out.as_bytes(), &text[..]);
        }
    }

    /// Both legs of any request, against a model that writes the members anew: the decode leg is
    /// the client's bytes with the params in front; the prefill leg has the members that the proxy
    /// names, and every byte of every other member in its place.
    #[test]
    fn legs_keep_every_byte_that_they_do_not_name(
        others in prop::collection::vec((".{0,4}", value(), space(), space()), 0..6),
        touched in prop::collection::btree_map(
            prop::sample::select(TOUCHED.to_vec()),
            any::<prop::sample::Index>(),
            0..TOUCHED.len(),
        ),
        order in any::<u64>(),
        route in prop::sample::select(Route::ALL.to_vec()),
    ) {
        // Members as they stand in the body, the touched ones among the others.
        let mut members: Vec<(String, String)> = Vec::new();
        for (at, (name, value, before, after)) in others.iter().enumerate() {
            // The number keeps names apart from each other and from touched ones.
            let name = format!("{at}{name}");
            let raw = format!("{before}{}{after}:{before}{value}{after}", json!(name));
            members.push((name, raw));
        }
        let streams = touched.get("stream").is_some_and(|at| *at.get(VALUES) == "true");
        for (place, (name, at)) in touched.iter().enumerate() {
            let value = match *name {
                "stream" | "echo" | "store" => *at.get(VALUES),
                "stream_options" if streams => r#"{ "include_usage" :true}"#,
                "stream_options" | "kv_transfer_params" => "null",
                "prompt" => *at.get(&[r#""p""#, "[1, 2]", r#"[ "p" ]"#]),
                // `min_tokens` may not be over a limit.
                "min_tokens" => "1",
                _ => *at.get(&["1", "7 ", "20"]),
            };
            let place = (order as usize).wrapping_add(place * 3) % (members.len() + 1);
            members.insert(place, ((*name).to_owned(), format!("\"{name}\" : {value}")));
        }
        let raws: Vec<&str> = members.iter().map(|(_, raw)| raw.as_str()).collect();
        let text = format!("{{{}}}", raws.join(","));
        let request = Request::parse(Bytes::from(text.clone()), route).expect("valid");

        prop_assert_eq!(request.decode_body(None).concat(), text.as_bytes());
        let decode = String::from_utf8(request.decode_body(Some(PARAMS)).concat()).expect("UTF-8");
        let want = match touched.contains_key("kv_transfer_params") {
            true => text.replacen("\"kv_transfer_params\" : null",
                &format!("\"kv_transfer_params\" : {PARAMS}"), 1),
            false => {
                let comma = if members.is_empty() { "" } else { "," };
                text.replacen('{', &format!("{{\"kv_transfer_params\":{PARAMS}{comma}"), 1)
            }
        };
        prop_assert_eq!(decode, want);

        let prefill = String::from_utf8(request.prefill_body(PARAMS).concat()).expect("UTF-8");
        let set = |name: &str| match (name, route) {
            ("kv_transfer_params", _) => Some(PARAMS),
            ("max_tokens" | "min_tokens", Route::Completions | Route::ChatCompletions) => Some("1"),
            ("max_output_tokens", Route::Responses) => Some("1"),
            ("store", Route::Responses) => Some("false"),
            _ => None,
        };
        let changed = |name: &str| match name {
            "max_completion_tokens" | "n" => Some("1"),
            "stream" | "echo" => Some("false"),
            other => set(other),
        };
        let removed = |name: &str| match route {
            Route::Completions | Route::ChatCompletions => {
                matches!(name, "stream_options" | "best_of")
            }
            Route::Responses => name == "stream_options",
        };
        // What is left, in order, with no byte of it changed.
        let mut rest = prefill.as_str();
        for (name, raw) in members.iter().filter(|(name, _)| !removed(name)) {
            let want = match changed(name) {
                Some(value) => format!("\"{name}\" : {value}"),
                None => raw.trim().to_owned(),
            };
            let at = rest.find(&want);
            prop_assert!(at.is_some(), "{want} in {rest} of {prefill}");
            rest = &rest[at.unwrap_or_default() + want.len()..];
        }
        let got: BTreeMap<String, Value> = serde_json::from_str(&prefill).expect("JSON");
        let mut want: BTreeMap<String, Value> = serde_json::from_str(&text).expect("JSON");
        want.retain(|name, _| !removed(name));
        for name in TOUCHED {
            let value = set(name).or(want.contains_key(name).then(|| changed(name)).flatten());
            if let Some(value) = value {
                want.insert(name.to_owned(), serde_json::from_str(value).expect("JSON"));
            }
        }
        prop_assert_eq!(got, want);
    }

    /// The fast look finds what the parser finds, in whole objects and in broken ones.
    #[test]
    fn the_fast_look_agrees_with_the_parser(
        members in prop::collection::vec(
            ("[a-c\"\\\\é]{0,3}", value(), space(), space()), 0..5),
        fault in prop::sample::select(b"{}[]\",:\\ \n\x01-+.0e1tfnu".to_vec()),
        cut in any::<prop::sample::Index>(),
    ) {
        let parts = members.iter().map(|(name, value, before, after)| {
            format!("{before}{}{after}:{before}{value}{after}", Value::from(name.as_str()))
        });
        let parts: Vec<String> = parts.collect();
        let whole = format!(" {{{}}} ", parts.join(","));
        let agrees = |text: &[u8]| {
            let Ok(text) = std::str::from_utf8(text) else { return Ok(()) };
            prop_assert_eq!(fast(text), Object::by_parser(text).ok(), "{}", text);
            Ok(())
        };
        agrees(whole.as_bytes())?;
        agrees(&whole.as_bytes()[..cut.index(whole.len())])?;
        for at in 0..whole.len() {
            let mut broken = whole.clone().into_bytes();
            broken[at] = fault;
            agrees(&broken)?;
        }
    }

    /// No byte string makes the scanner panic, and what it accepts is what serde_json accepts.
    #[test]
    fn the_scanner_accepts_what_a_parser_accepts(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let accepted = Object::parse(&bytes).is_ok();
        let parsed = serde_json::from_slice::<serde_json::Map<String, Value>>(&bytes).is_ok();
        prop_assert!(accepted || !parsed);
    }
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
        assert_eq!(super::sse::is_failure(chunk.as_bytes()), failure, "{chunk}");
    }
}

#[test]
fn an_error_names_kv_by_its_code_or_type() {
    for (body, named) in [
        (
            r#"{"error":{"message":"x","type":"server_error","code":"lease_gone"}}"#,
            true,
        ),
        (
            r#"{"error":{"type":"kv_transfer_failed","code":500}}"#,
            true,
        ),
        ("data: {\"error\":{\"code\":\"kv_load\"}}\n\n", true),
        (
            r#"{"error":{"message":"kv_transfer lease_gone","code":500}}"#,
            false,
        ),
        (r#"{"error":{"code":"internal"}}"#, false),
        (r#"{"error":"kv_"}"#, false),
        ("kv_", false),
        ("", false),
    ] {
        assert_eq!(super::error::names_kv(body.as_bytes()), named, "{body}");
    }
}
