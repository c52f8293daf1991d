use std::collections::HashSet;

use super::{TraceContext, TraceIds, is_state};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

#[test]
fn a_traceparent_is_read_as_the_recommendation_says() {
    let good = format!("00-{TRACE}-{PARENT}-01");
    let trace = TraceContext::parse(good.as_bytes()).expect("a trace");
    assert_eq!(trace.trace_id(), TRACE);
    let header = trace.header(0xabc).expect("a header");
    assert_eq!(header, format!("00-{TRACE}-0000000000000abc-01"));
    for (told, passed) in [
        (format!("00-{TRACE}-{PARENT}-00"), "00"),
        // Unknown flags are not passed on; those of level 2 are.
        (format!("00-{TRACE}-{PARENT}-ff"), "03"),
        // A later version is read as far as it is known.
        (format!("cc-{TRACE}-{PARENT}-01"), "01"),
        (
            format!("cc-{TRACE}-{PARENT}-01-what-the-future-brings"),
            "01",
        ),
    ] {
        let trace = TraceContext::parse(told.as_bytes()).expect(&told);
        let header = trace.header(1).expect("a header");
        assert_eq!(header, format!("00-{TRACE}-0000000000000001-{passed}"));
    }
    let zeros = "0".repeat(32);
    for bad in [
        String::new(),
        format!("00-{TRACE}-{PARENT}"),
        format!("00-{TRACE}-{PARENT}-1"),
        format!("00-{TRACE}-{PARENT}-01-more"),
        format!("00-{TRACE}-{PARENT}-01-"),
        format!("cc-{TRACE}-{PARENT}-01.more"),
        format!("ff-{TRACE}-{PARENT}-01"),
        format!("0-{TRACE}-{PARENT}-011"),
        format!("00-{zeros}-{PARENT}-01"),
        format!("00-{TRACE}-{}-01", &zeros[..16]),
        format!("00-{}-{PARENT}-01", TRACE.to_uppercase()),
        format!("00-{TRACE}-+0f067aa0ba902b7-01"),
        format!("00_{TRACE}_{PARENT}_01"),
        format!("00-{}g-{PARENT}-01", &TRACE[1..]),
    ] {
        assert_eq!(TraceContext::parse(bad.as_bytes()), None, "{bad}");
    }
    assert_eq!(TraceContext::parse(&[0xff; 55]), None);
}

#[test]
fn a_tracestate_has_members_of_its_grammar() {
    let members = |count: usize| {
        let each: Vec<String> = (0..count).map(|at| format!("k{at}=v")).collect();
        each.join(",")
    };
    for good in [
        "",
        "a=1",
        "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "a=1 , b=2,,",
        "t@v*/_-=x y",
    ] {
        assert!(is_state(good), "{good}");
    }
    assert!(is_state(&members(32)) && !is_state(&members(33)));
    for bad in [
        "a", "=1", "a=", "A=1", "a=1,a=2", "a=b=c", "a=\u{e9}", "-a=1",
    ] {
        assert!(!is_state(bad), "{bad}");
    }
    assert!(!is_state(&format!("{}=1", "k".repeat(257))));
    assert!(!is_state(&format!("k={}", "v".repeat(257))));
}

#[test]
fn new_ids_are_never_told_twice_and_their_share_is_sampled() {
    let ids = TraceIds::default();
    let mut seen = HashSet::new();
    let mut sampled = 0;
    for _ in 0..10_000 {
        assert!(seen.insert(u128::from(ids.parent_id())));
        let trace = ids.start(0.25);
        assert!(seen.insert(trace.trace_id));
        sampled += u32::from(trace.flags);
    }
    assert!((2_000..3_000).contains(&sampled), "{sampled}");
    assert!((0..100).all(|_| ids.start(1.0).flags == 1));
    assert_ne!(
        TraceIds::default().parent_id(),
        TraceIds::default().parent_id()
    );
}
