//! Spellings of one place, and places that only look alike.

use super::super::address;
use super::*;

fn worker(text: &str) -> Worker {
    address::worker(text).expect("a worker")
}

fn same(one: &str, other: &str) -> bool {
    let (one, other) = (worker(one), worker(other));
    let same = one.base.is_same_place(&other.base);
    assert_eq!(same, other.base.is_same_place(&one.base));
    same
}

#[test]
fn spellings_of_one_place_are_one() {
    for (one, other) in [
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://LOCALHOST.:8000/", "http://127.0.0.1:8000"),
        ("http://Engine-1.example:80", "http://engine-1.example"),
        ("http://h:1/base/", "http://h:1/base"),
        ("http://[FD00::1]:1", "http://[fd00:0:0:0:0:0:0:1]:1"),
        ("http://[::ffff:10.0.0.1]:1", "http://10.0.0.1:1"),
    ] {
        assert!(same(one, other), "{one} {other}");
        assert!(worker(one).says_the_same(&worker(other)), "{one} {other}");
    }
    for (one, other) in [
        ("http://localhost:1", "http://127.0.0.2:1"),
        ("http://localhost:1", "http://[::1]:1"),
        ("http://h:1", "http://h:2"),
        ("http://h:1", "http://h.example:1"),
        ("http://h:1/a", "http://h:1/b"),
    ] {
        assert!(!same(one, other), "{one} {other}");
    }
}

#[test]
fn what_is_filled_in_is_as_good_as_what_is_said() {
    let said = worker("http://localhost:1,dp=1,dp-size=1,handshake=6301,kv-host=127.0.0.1");
    assert!(said.says_the_same(&worker("http://127.0.0.1:1")));
    for other in [
        "dp=2",
        "rank0=1",
        "dp-size=2",
        "tp=2",
        "handshake=1",
        "notify=1",
        "kv-host=h",
        "bootstrap=1",
        "model=m",
        "control=h:1",
    ] {
        let other = worker(&format!("http://127.0.0.1:1,{other}"));
        assert!(!said.says_the_same(&other), "{other:?}");
    }
}
