//! The bodies of both legs.

use std::collections::BTreeMap;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{PARAMS, completions, parsed, space, value};
use crate::openai::Route;
use crate::openai::request::{Request, RequestError};

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
fn an_escaped_name_is_the_name() {
    let body = r#"{"m\u0061x_tokens":50,"prompt":"p"}"#;
    assert!(prefill(body).contains(r#""m\u0061x_tokens":1"#));
    let twice = r#"{"m\u0061x_tokens":50,"max_tokens":1}"#;
    assert!(matches!(
        completions(twice),
        Err(RequestError::Duplicate(name)) if name.0 == "max_tokens"
    ));
    for foreign in [
        r#"{"kv_tr\u0061nsfer_params":{"k":1},"prompt":"p"}"#,
        r#"{"vllm_xargs":{"kv_tr\u0061nsfer_params":{"k":1}},"prompt":"p"}"#,
        r#"{"vllm_x\u0061rgs":{"kv_transfer_params":{"k":1}},"prompt":"p"}"#,
    ] {
        let refused = completions(foreign);
        assert!(
            matches!(refused, Err(RequestError::ForeignParams)),
            "{foreign}"
        );
    }
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
}
