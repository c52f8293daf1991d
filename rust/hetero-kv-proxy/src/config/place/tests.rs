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

#[test]
fn a_worker_at_an_own_listener_is_known_by_loopback_wildcard_and_spelling() {
    for (url, host, own) in [
        ("http://127.0.0.1:8000", "127.0.0.1", true),
        ("http://localhost:8000/base", "127.0.0.1", true),
        ("http://127.0.0.1:8000", "localhost", true),
        ("http://127.0.0.1:8000", "0.0.0.0", true),
        ("http://127.9.9.9:8000", "0.0.0.0", true),
        ("http://localhost:8000", "::", true),
        ("http://[::1]:8000", "::", true),
        ("http://[::ffff:127.0.0.1]:8000", "0.0.0.0", true),
        ("http://Proxy.example.:8000", "proxy.example", true),
        ("http://10.0.0.1:8000", "10.0.0.1", true),
        ("http://127.0.0.1:8001", "0.0.0.0", false),
        ("http://[::1]:8000", "0.0.0.0", false),
        ("http://127.0.0.2:8000", "127.0.0.1", false),
        ("http://10.0.0.1:8000", "0.0.0.0", false),
        ("http://10.0.0.1:8000", "127.0.0.1", false),
        ("http://engine:8000", "0.0.0.0", false),
    ] {
        let base = worker(url).base;
        assert_eq!(base.is_listener(host, 8_000), own, "{url} at {host}:8000");
        let fault = own_listener(&base, [("--admin-listen", host, 8_000)]);
        assert_eq!(fault.is_some(), own);
        assert!(fault.is_none_or(|text| text.contains("own --admin-listen")));
    }
}
