use proptest::prelude::*;
use serde::de::IgnoredAny;

use super::*;

/// Whether the look passes `value` as a whole, without the parser's help.
fn passes(value: &str) -> bool {
    members(format!("{{\"a\":{value}}}").as_bytes()).is_some()
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
