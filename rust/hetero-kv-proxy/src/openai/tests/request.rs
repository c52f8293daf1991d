//! Which requests are taken, and which run on decode alone.

use bytes::Bytes;

use super::{completions, parsed};
use crate::openai::Route;
use crate::openai::request::{Request, RequestError};

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

#[test]
fn requests_that_one_transfer_cannot_serve_run_alone() {
    const SEVERAL: Option<&str> = Some("several_sequences");
    const LOGPROBS: Option<&str> = Some("prompt_logprobs");
    const STORED: Option<&str> = Some("stored_response");
    const NOTHING: Option<&str> = Some("no_tokens");
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
        (r#"{"prompt":"a","max_tokens":0}"#, [NOTHING; 2]),
        (r#"{"prompt":"a","max_tokens":0.0,"n":2}"#, [NOTHING; 2]),
        (
            r#"{"prompt":"a","max_tokens":0,"echo":false}"#,
            [NOTHING; 2],
        ),
        (r#"{"prompt":"a","max_tokens":0,"echo":true}"#, [None, None]),
        (r#"{"prompt":"a","max_tokens":1}"#, [None, None]),
    ];
    let chat = [
        (
            r#"{"messages":[],"logprobs":true,"echo":true}"#,
            [None, None],
        ),
        (r#"{"messages":[],"n":3}"#, [None, SEVERAL]),
        (r#"{"messages":[],"prompt_logprobs":1}"#, [LOGPROBS; 2]),
        (r#"{"messages":[],"max_completion_tokens":0}"#, [NOTHING; 2]),
        (
            r#"{"messages":[],"max_tokens":0,"echo":true}"#,
            [NOTHING; 2],
        ),
        (r#"{"messages":[],"max_completion_tokens":4}"#, [None, None]),
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
        (r#"{"input":"a","max_output_tokens":0}"#, [NOTHING; 2]),
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
