//! Usage as engines tell it.

use bytes::Bytes;

use super::{HELD_BYTES_MAX, Reader, Tokens};

const ALL: Tokens = Tokens {
    prompt: Some(9),
    cached: Some(3),
    completion: Some(8),
};

#[test]
fn usage_is_read_in_every_form_that_has_it() {
    let completions = r#"{"usage":{"prompt_tokens":9,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":3}}}"#;
    let responses = r#"{"usage":{"input_tokens":9,"output_tokens":8,"input_tokens_details":{"cached_tokens":3}}}"#;
    let event = format!(r#"{{"type":"response.completed","response":{responses}}}"#);
    for text in [completions, responses, &event] {
        assert_eq!(Tokens::of(text.as_bytes()), Some(ALL), "{text}");
    }
    let few = r#"{"usage":{"completion_tokens":8,"prompt_tokens_details":null}}"#;
    let later = Tokens::of(few.as_bytes()).expect("usage");
    assert_eq!((later.prompt, later.completion), (None, Some(8)));
    let before = Tokens {
        completion: Some(1),
        ..ALL
    };
    assert_eq!(before.then(later), ALL);
    for text in ["{}", r#"{"usage":null}"#, r#"{"usage":7}"#, "nonsense"] {
        assert_eq!(Tokens::of(text.as_bytes()), None, "{text}");
    }
}

#[test]
fn an_answer_is_read_however_it_is_cut() {
    let usage = r#"{"usage":{"prompt_tokens":9,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":3}}}"#;
    let events = format!("data: {{\"choices\":[]}}\n\ndata: {usage}\n\ndata: [DONE]\n\n");
    for (text, is_events) in [(usage, false), (events.as_str(), true)] {
        for size in [1, 7, 1_000] {
            let mut reader = Reader::new(is_events);
            for part in text.as_bytes().chunks(size) {
                reader.push(&Bytes::copy_from_slice(part));
                assert!(reader.held.len() <= text.len());
            }
            assert_eq!(reader.end(), ALL, "{is_events} {size}");
        }
    }
}

#[test]
fn what_is_too_large_is_not_kept() {
    let mut reader = Reader::new(true);
    for _ in 0..40 {
        reader.push(&Bytes::from(vec![b'x'; 100 << 10]));
        assert!(reader.held.len() <= HELD_BYTES_MAX);
    }
    assert_eq!(reader.end(), Tokens::default());
}
