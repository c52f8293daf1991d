use super::super::response;
use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

const PREFILL: &str = r#"{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}"#;

fn cached() -> Cached {
    Cached::of_prefill(PREFILL, Route::Completions).expect("a count")
}

fn passed(teller: &mut Teller, chunks: &[&str]) -> String {
    let mut out = Vec::new();
    for chunk in chunks {
        out.extend_from_slice(&teller.push(Bytes::copy_from_slice(chunk.as_bytes())));
    }
    out.extend_from_slice(&teller.end());
    String::from_utf8(out).expect("UTF-8")
}

#[test]
fn prefill_tells_a_count_or_none() {
    for (body, route, count) in [
        (
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":0}}}"#,
            Route::ChatCompletions,
            Some("0"),
        ),
        (
            r#"{"usage":{"input_tokens_details":{"cached_tokens":16}}}"#,
            Route::Responses,
            Some("16"),
        ),
        (
            r#"{"usage":{"input_tokens_details":{"cached_tokens":16}}}"#,
            Route::Completions,
            None,
        ),
        (
            r#"{"usage":{"prompt_tokens_details":null}}"#,
            Route::Completions,
            None,
        ),
        (
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}"#,
            Route::Completions,
            None,
        ),
        (
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":-1}}}"#,
            Route::Completions,
            None,
        ),
        (
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":1.5}}}"#,
            Route::Completions,
            None,
        ),
        (
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":1,"cached_tokens":2}}}"#,
            Route::Completions,
            None,
        ),
        (r#"{"usage":[]}"#, Route::Completions, None),
        ("{}", Route::Completions, None),
        ("", Route::Completions, None),
    ] {
        let usage = response::read(body.as_bytes()).usage;
        let told = usage.and_then(|usage| Cached::of_prefill(usage, route));
        let told = told.map(|cached| cached.count);
        assert_eq!(told.as_deref(), count, "{body}");
    }
}

#[test]
fn only_the_count_changes_in_a_plain_answer() {
    for (answer, want) in [
        (
            r#"{ "x":1.50e1, "usage": {"prompt_tokens":9, "prompt_tokens_details": { "audio":0, "cached_tokens": 9 } , "a":1}, "z":[]}"#,
            r#"{ "x":1.50e1, "usage": {"prompt_tokens":9, "prompt_tokens_details": { "audio":0, "cached_tokens": 3 } , "a":1}, "z":[]}"#,
        ),
        (
            r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}"#,
            r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}}"#,
        ),
        (
            r#"{"usage":{"prompt_tokens":9}}"#,
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":3},"prompt_tokens":9}}"#,
        ),
    ] {
        for cut in 0..answer.len() {
            let mut teller = Teller::new(cached(), false);
            assert_eq!(passed(&mut teller, &[&answer[..cut], &answer[cut..]]), want);
        }
    }
    for answer in [
        r#"{"usage":null}"#,
        r#"{"choices":[{"text":"\"usage\":{"}]}"#,
        r#"{"usage":{},"usage":{}}"#,
        "not json",
        "",
    ] {
        assert_eq!(passed(&mut Teller::new(cached(), false), &[answer]), answer);
    }
}

#[test]
fn only_the_count_changes_in_an_event_stream_and_lines_pass_as_they_end() {
    let stream = concat!(
        ": note\n\n",
        "data: {\"choices\":[{\"text\":\"\\\"usage\\\":{\"}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":9}}}\r\n\r\n",
        "data:{\"usage\" : { } }\n\n",
        "data: [DONE]\n\n",
    );
    let want = concat!(
        ": note\n\n",
        "data: {\"choices\":[{\"text\":\"\\\"usage\\\":{\"}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":3}}}\r\n\r\n",
        "data:{\"usage\" : {\"prompt_tokens_details\":{\"cached_tokens\":3} } }\n\n",
        "data: [DONE]\n\n",
    );
    for cut in 0..stream.len() {
        let mut teller = Teller::new(cached(), true);
        assert_eq!(
            passed(&mut teller, &[&stream[..cut], &stream[cut..]]),
            want,
            "{cut}"
        );
    }
    let mut teller = Teller::new(cached(), true);
    assert_eq!(
        teller.push(Bytes::from_static(b"data: 1\n\ndata: 2")),
        "data: 1\n\n"
    );
    assert_eq!(teller.push(Bytes::from_static(b"3\n")), "data: 23\n");
    assert_eq!(teller.push(Bytes::from_static(b"\n")), "\n");
    assert_eq!(teller.end(), "");
}

#[test]
fn responses_tell_it_within_their_last_event() {
    let prefill = r#"{"input_tokens_details":{"cached_tokens":4}}"#;
    let cached = Cached::of_prefill(prefill, Route::Responses).expect("a count");
    let event = |count| {
        format!(
            "event: response.completed\ndata: {{\"type\":\"x\",\"response\":{{\"id\":1,\"usage\":{{\"input_tokens_details\":{{\"cached_tokens\":{count}}}}}}}}}\n\n"
        )
    };
    let mut teller = Teller::new(cached.clone(), true);
    assert_eq!(passed(&mut teller, &[&event(8)]), event(4));
    let plain =
        |count| format!(r#"{{"usage":{{"input_tokens_details":{{"cached_tokens":{count}}}}}}}"#);
    let mut teller = Teller::new(cached, false);
    assert_eq!(passed(&mut teller, &[&plain(8)]), plain(4));
}

#[test]
fn what_is_too_large_passes_as_it_is() {
    for is_events in [false, true] {
        let answer = format!(
            r#"{{"t":"{}","usage":{{"a":1}}}}"#,
            "x".repeat(HELD_BYTES_MAX)
        );
        let mut teller = Teller::new(cached(), is_events);
        let (first, rest) = answer.split_at(HELD_BYTES_MAX + 6);
        assert_eq!(teller.push(Bytes::copy_from_slice(first.as_bytes())), first);
        assert_eq!(teller.push(Bytes::copy_from_slice(rest.as_bytes())), rest);
        assert_eq!(teller.end(), "");
    }
}

proptest! {
    /// However an event stream is cut: the same as a program that reads it whole would make of it.
    #[test]
    fn cuts_change_nothing(
        texts in prop::collection::vec("[a-z\"{}:\\\\ ]{0,12}", 1..6),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let event = |text: &String, count: u64| {
            let usage = json!({"prompt_tokens_details": {"cached_tokens": count}});
            format!("data: {}\n\n", json!({"text": text, "usage": usage}))
        };
        let stream: String = texts.iter().map(|text| event(text, 9)).collect();
        let want: String = texts.iter().map(|text| event(text, 3)).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len())).collect();
        cuts.sort_unstable();
        let mut chunks = Vec::new();
        let mut from = 0;
        for cut in cuts {
            chunks.push(&stream[from..cut]);
            from = cut;
        }
        chunks.push(&stream[from..]);
        let mut teller = Teller::new(cached(), true);
        prop_assert_eq!(passed(&mut teller, &chunks), want);
    }

    /// A plain answer parses to the same but for the count.
    #[test]
    fn a_plain_answer_is_the_same_but_for_the_count(text in ".{0,20}", more in any::<i64>()) {
        let answer = |count: u64| json!({
            "choices": [{"text": text}], "more": more,
            "usage": {"prompt_tokens_details": {"cached_tokens": count}, "n": more},
        });
        let mut teller = Teller::new(cached(), false);
        let told = passed(&mut teller, &[&answer(9).to_string()]);
        let told: Value = serde_json::from_str(&told).expect("JSON");
        prop_assert_eq!(told, answer(3));
    }
}
