//! What a file of keys may hold, and that no key is shown.

use super::*;

const FILE: &[u8] = b"# ours\n\nfirst-key-of-ours\r\n  second-key-of-ours  \n";

#[test]
fn comments_and_blanks_are_left_out_and_each_key_counts() {
    let keys = Keys::parse(FILE, 16).expect("keys");
    assert_eq!(keys.first(), b"first-key-of-ours");
    assert!(keys.holds(b"first-key-of-ours") && keys.holds(b"second-key-of-ours"));
    for other in [
        &b""[..],
        b"# ours",
        b"first-key-of-our",
        b"first-key-of-ours\n",
        b"third-key-of-ours",
    ] {
        assert!(!keys.holds(other), "{other:?}");
    }
    assert_eq!(format!("{keys:?}"), "Keys(2)");
}

#[test]
fn a_fault_names_the_line_and_not_the_key() {
    let fault = |text: &[u8]| Keys::parse(text, 16).expect_err("a fault");
    assert_eq!(fault(b"# only this\n"), "no key in it; one a line");
    assert_eq!(
        fault(b"\nsecret"),
        "line 2: a key has 16 to 512 characters, not 6"
    );
    assert_eq!(
        fault(b"secret secret secret"),
        "line 1: a key is visible ASCII without blanks"
    );
    assert!(fault("secret-of-sixteen-\u{fc}".as_bytes()).starts_with("line 1"));
    let missing = Keys::read(Path::new("/nowhere/keys"), 16).expect_err("a fault");
    assert!(missing.starts_with("/nowhere/keys: "), "{missing}");
}
