//! The fast look over JSON, against the parser.

use proptest::prelude::*;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::*;
use crate::openai::splice::Object;
use crate::openai::tests::{space, value};

/// What the fast look alone finds.
fn fast(text: &str) -> Option<Object> {
    let (open, members) = members(text.as_bytes())?;
    Some(Object::new(open, members))
}

/// Whether the look passes `value` as a whole, without the parser's help.
fn passes(value: &str) -> bool {
    members(format!("{{\"a\":{value}}}").as_bytes()).is_some()
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

#[test]
fn a_long_list_of_integers_is_passed_and_a_broken_one_is_not() {
    let list = |middle: &str| {
        let ids: Vec<String> = (0..40).map(|id| id.to_string()).collect();
        format!("[{},{middle},{}]", ids.join(","), ids.join(","))
    };
    for middle in [
        "7",
        "0",
        "10",
        "4294967296",
        "0,0,0",
        "1.5",
        " 7",
        "-1",
        "[1]",
        "\"x\"",
    ] {
        assert!(passes(&list(middle)), "{middle}");
    }
    for middle in [
        "", "00", "01", "007", "1,,2", ",1", "x", "1]", "1-", "\u{1}",
    ] {
        assert!(!passes(&list(middle)), "{middle}");
    }
    for list in ["[0", "[0,", "[,]", "[0,]", "[00]", "[1,0"] {
        assert!(!passes(list), "{list}");
    }
}

proptest! {
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

    /// Each byte of a list, whatever lane it is in, counts as it does to the parser.
    #[test]
    fn a_list_of_integers_is_what_the_parser_takes_for_one(
        numbers in prop::collection::vec(prop_oneof![Just(0), 0..12_u64, any::<u64>()], 1..40),
        fault in prop::sample::select(b"0019,,[] .-e\"x\x01".to_vec()),
        at in any::<prop::sample::Index>(),
    ) {
        let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
        let mut list = format!("[{}]", numbers.join(",")).into_bytes();
        prop_assert_eq!(integers_end(&list), Some(list.len()));
        let at = 1 + at.index(list.len() - 1);
        list[at] = fault;
        let is_list = |text: &[u8]| serde_json::from_slice::<Vec<IgnoredAny>>(text).is_ok();
        let is_plain = |text: &[u8]| text.iter().all(|byte| b"0123456789,[]".contains(byte));
        match integers_end(&list) {
            Some(end) => prop_assert!(is_list(&list[..end]) && is_plain(&list[..end])),
            None => prop_assert!(!is_list(&list) || !is_plain(&list)),
        }
    }

    /// A special byte is found wherever it stands in a long string.
    #[test]
    fn a_string_ends_where_it_ends(length in 0..300_usize, special in prop::sample::select(b"\"\\\x00\x1f".to_vec())) {
        let mut text = "aé ~\u{7f}".repeat(60).into_bytes();
        text.truncate(length);
        text.push(special);
        text.extend(b"\"x");
        let mut scan = Scan { text: &text, at: 0 };
        scan.plain();
        prop_assert_eq!(scan.at, length);
    }
}
