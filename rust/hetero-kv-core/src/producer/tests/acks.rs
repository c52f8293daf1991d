//! Acknowledgements as sets, releases, and who may send them.

use super::*;
use crate::ids::{PpRank, TpRank};
use crate::wire::message::Release;

const D2: ConnectionId = ConnectionId(2);

fn ack(p: &mut Producer, from: ConnectionId, n: u8, ranks: &[u32]) {
    let ack = Ack {
        transfer_id: transfer(n),
        ranks: ranks.iter().map(|tp| (TpRank(*tp), PpRank(0))).collect(),
        number: None,
    };
    p.handle_message(at(secs(5)), from, Message::Ack(ack));
    assert!(drain(p).is_empty(), "acknowledgements have no answer");
}

fn release(p: &mut Producer, from: ConnectionId, n: u8) {
    let release = Release {
        transfer_id: transfer(n),
        number: None,
    };
    p.handle_message(at(secs(5)), from, Message::Release(release));
    assert!(drain(p).is_empty(), "releases have no answer");
}

/// A producer whose transfer 5 is claimed by "decode" of two ranks.
fn claimed() -> (Producer, LeaseRef) {
    let mut p = producer();
    greet(&mut p, D, "decode", 2);
    let lease = finish(&mut p, at(secs(0)), 5);
    assert_granted(&claim(&mut p, at(secs(1)), D, claim_of(5, lease)), 30_000);
    (p, lease)
}

#[test]
fn a_complete_set_releases_once() {
    let (mut p, _) = claimed();
    ack(&mut p, D, 5, &[0]);
    assert!(!p.has_releases());
    ack(&mut p, D, 5, &[1]);
    assert!(p.has_releases());
    assert_eq!(ordered(&mut p), ["r5"]);
    // Duplicates of everything, before and after the report.
    ack(&mut p, D, 5, &[0, 1]);
    release(&mut p, D, 5);
    p.handle_timeout(at(secs(100)));
    p.handle_sent("r5");
    ack(&mut p, D, 5, &[0, 1]);
    release(&mut p, D, 5);
    p.handle_sent("r5");
    assert!(ordered(&mut p).is_empty());
    let counts = p.counts();
    assert_eq!(
        (counts.read_out, counts.released, counts.expired),
        (1, 0, 0)
    );
    assert_eq!(counts.late, 4);
}

#[test]
fn a_consumer_with_pipeline_stages_has_read_when_each_rank_of_each_stage_has() {
    let mut p = producer();
    p.handle_connected(D, NONCE);
    let mut staged = hello("decode", 100, 2);
    staged.from.pp_size = 2;
    p.handle_message(at(secs(0)), D, Message::Hello(Box::new(staged)));
    drain(&mut p);
    let lease = finish(&mut p, at(secs(0)), 5);
    assert_granted(&claim(&mut p, at(secs(1)), D, claim_of(5, lease)), 30_000);
    for (tp, pp) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        assert!(!p.has_releases(), "tp {tp} pp {pp} still reads");
        let ack = Ack {
            transfer_id: transfer(5),
            ranks: vec![(TpRank(tp), PpRank(pp))],
            number: None,
        };
        p.handle_message(at(secs(5)), D, Message::Ack(ack));
    }
    assert_eq!(ordered(&mut p), ["r5"]);
}

#[test]
fn a_rank_counts_once() {
    let (mut p, _) = claimed();
    ack(&mut p, D, 5, &[0, 0]);
    ack(&mut p, D, 5, &[0]);
    assert!(ordered(&mut p).is_empty());
    assert_eq!(p.counts().read_out, 0);
}

#[test]
fn ranks_that_the_engine_does_not_have_do_not_count() {
    let (mut p, _) = claimed();
    ack(&mut p, D, 5, &[0, 2, 7, u32::MAX]);
    let stage = Ack {
        transfer_id: transfer(5),
        ranks: vec![(TpRank(1), PpRank(1))],
        number: None,
    };
    p.handle_message(at(secs(5)), D, Message::Ack(stage));
    assert!(ordered(&mut p).is_empty());
    ack(&mut p, D, 5, &[1]);
    assert_eq!(ordered(&mut p), ["r5"]);
}

#[test]
fn an_engine_that_never_claimed_is_late_and_releases_nothing() {
    let (mut p, _) = claimed();
    greet(&mut p, D2, "other", 1);
    ack(&mut p, D2, 5, &[0]);
    release(&mut p, D2, 5);
    assert!(ordered(&mut p).is_empty());
    assert_eq!(p.counts().late, 1);
    ack(&mut p, D2, 99, &[0]);
    assert_eq!(p.counts().late, 2, "of an unknown transfer");
}

#[test]
fn a_lease_that_nobody_claimed_goes_when_anybody_releases_it() {
    let mut p = producer();
    greet(&mut p, D, "decode", 2);
    finish(&mut p, at(secs(0)), 5);
    release(&mut p, D, 5);
    assert_eq!(ordered(&mut p), ["r5"]);
    assert_eq!(p.counts().released, 1);
}

#[test]
fn one_of_two_readers_leaving_keeps_the_lease_for_the_other() {
    let (mut p, lease) = claimed();
    greet(&mut p, D2, "other", 1);
    assert_granted(&claim(&mut p, at(secs(2)), D2, claim_of(5, lease)), 30_000);
    release(&mut p, D, 5);
    assert!(ordered(&mut p).is_empty());
    // It left, so it counts no more; and its ranks are never mixed with the other's.
    ack(&mut p, D, 5, &[0, 1]);
    assert!(ordered(&mut p).is_empty());
    ack(&mut p, D2, 5, &[0]);
    assert_eq!(ordered(&mut p), ["r5"]);
    assert_eq!(p.counts().read_out, 1);
}

#[test]
fn ranks_of_two_engines_do_not_make_one_set() {
    let (mut p, lease) = claimed();
    greet(&mut p, D2, "other", 2);
    assert_granted(&claim(&mut p, at(secs(2)), D2, claim_of(5, lease)), 30_000);
    ack(&mut p, D, 5, &[0]);
    ack(&mut p, D2, 5, &[1]);
    assert!(ordered(&mut p).is_empty());
}

#[test]
fn a_reader_that_came_back_completes_its_own_set() {
    let (mut p, _) = claimed();
    ack(&mut p, D, 5, &[0]);
    p.handle_closed(D);
    assert!(
        ordered(&mut p).is_empty(),
        "a lost connection ends no lease"
    );
    greet(&mut p, D2, "decode", 2);
    ack(&mut p, D2, 5, &[1]);
    assert_eq!(ordered(&mut p), ["r5"]);
}

#[test]
fn an_acknowledgement_within_the_grace_releases_at_once() {
    let (mut p, _) = claimed();
    p.handle_timeout(at(secs(31)));
    assert_eq!(p.counts().expired, 1);
    ack(&mut p, D, 5, &[0, 1]);
    assert_eq!(ordered(&mut p), ["r5"]);
    p.handle_timeout(at(secs(40)));
    assert!(ordered(&mut p).is_empty());
}

/// What "decode" says of transfer 5, numbered.
fn say(p: &mut Producer, from: ConnectionId, message: Message) -> Option<Message> {
    p.handle_message(at(secs(5)), from, message);
    match drain(p).as_slice() {
        [] => None,
        [ProducerOutput::Send(to, answer)] if *to == from => Some(answer.clone()),
        other => panic!("{other:?}"),
    }
}

fn numbered_claim(lease: LeaseRef, question: u64) -> Message {
    let claim = claim_of(5, lease);
    Message::Claim(Claim { question, ..claim })
}

fn numbered_renew(question: u64) -> Message {
    Message::Renew(Renew {
        transfer_id: transfer(5),
        question,
    })
}

fn numbered_ack(ranks: &[u32], number: u64) -> Message {
    Message::Ack(Ack {
        transfer_id: transfer(5),
        ranks: ranks.iter().map(|tp| (TpRank(*tp), PpRank(0))).collect(),
        number: Some(number),
    })
}

fn numbered_release(number: u64) -> Message {
    Message::Release(Release {
        transfer_id: transfer(5),
        number: Some(number),
    })
}

/// Seed 6345 of the simulator, profile storm: a release is held up, its connection breaks, and the
/// same request comes to decode once more. Or decode knows this engine's host by two names.
#[test]
fn what_comes_later_than_a_claim_that_followed_it_changes_nothing() {
    for (first, second) in [(D, D2), (D2, D)] {
        let mut p = producer();
        greet(&mut p, D, "decode", 2);
        greet(&mut p, D2, "decode", 2);
        let lease = finish(&mut p, at(secs(0)), 5);
        let granted = |answer: Option<Message>| matches!(answer, Some(Message::Granted(_)));
        assert!(granted(say(&mut p, first, numbered_claim(lease, 10))));
        // The release that came between them is still under way.
        assert!(granted(say(&mut p, second, numbered_claim(lease, 14))));
        for late in [
            numbered_release(12),
            numbered_ack(&[0, 1], 12),
            numbered_renew(11),
            numbered_claim(lease, 10),
        ] {
            assert_eq!(say(&mut p, first, late), None);
        }
        assert!(!p.has_releases(), "decode reads under its second claim");
        assert_eq!(p.counts().late, 4);
        // Its second claim's own, over whichever connection.
        assert!(granted(say(&mut p, first, numbered_renew(15))));
        assert_eq!(say(&mut p, second, numbered_ack(&[0], 16)), None);
        assert_eq!(say(&mut p, first, numbered_ack(&[1], 16)), None);
        assert_eq!(ordered(&mut p), ["r5"]);
        assert_eq!(p.counts().late, 4);
    }
}

#[test]
fn a_claim_that_comes_after_its_release_does_not_hold_the_lease_for_it() {
    let (mut p, lease) = claimed();
    greet(&mut p, D2, "other", 1);
    assert_granted(&claim(&mut p, at(secs(2)), D2, claim_of(5, lease)), 30_000);
    assert_eq!(say(&mut p, D, numbered_release(12)), None);
    assert_eq!(say(&mut p, D, numbered_claim(lease, 11)), None);
    assert!(!p.has_releases(), "the other one reads");
    assert_eq!(say(&mut p, D2, numbered_release(8)), None);
    assert_eq!(ordered(&mut p), ["r5"]);
}

#[test]
fn numbers_of_two_consumer_starts_are_not_compared() {
    let (mut p, lease) = claimed();
    p.handle_connected(D2, NONCE);
    let restarted = Message::Hello(Box::new(hello("decode", 101, 2)));
    p.handle_message(at(secs(2)), D2, restarted);
    assert_eq!(drain(&mut p).len(), 1, "and nobody's connection is closed");
    assert!(say(&mut p, D, numbered_renew(50)).is_some());
    let answer = say(&mut p, D2, numbered_claim(lease, 1));
    assert!(matches!(answer, Some(Message::Granted(_))), "{answer:?}");
    assert_eq!(say(&mut p, D2, numbered_ack(&[0, 1], 2)), None);
    assert_eq!(ordered(&mut p), ["r5"]);
}
