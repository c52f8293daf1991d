//! Slips of the hand, and words that are none.

use super::*;

const KNOWN: [&str; 4] = ["listen", "admin_listen", "requests_max", "lease_s"];

#[test]
fn slips_are_counted() {
    for (one, other, count) in [
        ("listen", "listen", 0),
        ("listen", "listn", 1),
        ("lisetn", "listen", 1),
        ("lustem", "listen", 2),
        ("", "abc", 3),
        ("abc", "", 3),
    ] {
        assert_eq!(
            slips(one.as_bytes(), other.as_bytes()),
            count,
            "{one} {other}"
        );
    }
}

#[test]
fn the_name_that_is_meant_is_found_and_a_strange_one_is_not() {
    for (word, meant) in [
        ("listn", Some("listen")),
        ("LISTEN", Some("listen")),
        ("requests-max", Some("requests_max")),
        ("request_max", Some("requests_max")),
        ("lease_ms", Some("lease_s")),
        ("prefix", None),
        ("", None),
    ] {
        assert_eq!(nearest(word, KNOWN), meant, "{word}");
    }
    assert_eq!(nearest(&"x".repeat(100_000), KNOWN), None);
}
