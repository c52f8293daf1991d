//! The grammar of faults and their turns.

use super::*;

fn parse(text: &str) -> Fault {
    Fault::parse(text).expect("a fault")
}

#[test]
fn a_fault_is_read_whole() {
    let fault = parse("cut=3,every=10,times=2,leg=decode");
    assert_eq!(fault.kind, FaultKind::Cut(3));
    assert_eq!((fault.every, fault.times), (10, 2));
    assert_eq!(fault.leg, Some(LegKind::Decode));
    assert_eq!(parse("status=503").kind, FaultKind::Status(503));
    let slow = FaultKind::SlowHead(Duration::from_millis(7));
    assert_eq!(parse("slow-head=7").kind, slow);
}

#[test]
fn what_is_wrong_is_named() {
    for (text, part) in [
        ("status", "status needs a value"),
        ("status=200", "status must be 400 to 599, not `200`"),
        ("close=1", "close takes no value"),
        ("flood", "unknown fault `flood`"),
        ("close,every=0", "every must be a number from 1, not `0`"),
        ("close,leg=both", "leg is prefill, decode or plain"),
        ("close,always", "unknown part `always`"),
    ] {
        let error = Fault::parse(text).expect_err("a refusal");
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn every_and_times_count_only_the_legs_they_look_at() {
    let faults = Faults::new(&[parse("close,every=3,times=2,leg=decode")]);
    let mut met = Vec::new();
    for turn in 1..=12 {
        assert_eq!(faults.next(LegKind::Prefill), None);
        if faults.next(LegKind::Decode).is_some() {
            met.push(turn);
        }
    }
    assert_eq!(met, [3, 6]);
}

#[test]
fn the_first_fault_that_is_due_is_taken() {
    let faults = Faults::new(&[parse("status=500,every=2"), parse("close")]);
    let met: Vec<_> = (0..4).map(|_| faults.next(LegKind::Plain)).collect();
    let (close, status) = (Some(FaultKind::Close), Some(FaultKind::Status(500)));
    assert_eq!(met, [close, status, close, status]);
}
