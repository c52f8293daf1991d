//! Claims answered `Gone`, renewals, expiry, deadlines.

use super::*;
use crate::ids::Incarnation;
use crate::testing::{Fate, Workers, lease_times, ms, options, prompt, secs, transfer};
use crate::time::Time;
use crate::wire::Kind;
use crate::wire::message::{Granted, Message};
use crate::wire::params::RemotePrefill;

/// Runs one request whose claim is refused; its blocks are reported as failed.
fn refused(pair: &mut Pair, params: &RemotePrefill) {
    pair.arrive("d1", params);
    pair.run(ms(20));
    assert_eq!(pair.admit("d1", 0), params.num_tokens - 1);
    pair.step();
    let (blocks, failure) = pair.workers[0].job("d1").fail.clone().expect("a failure");
    assert_eq!(blocks.len(), (params.num_tokens - 1).div_ceil(16) as usize);
    assert_eq!(failure.reason, FailureReason::LeaseGone);
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].open(), (0, 0));
    assert_eq!(pair.consumers[0].counts().claims_gone, 1);
    assert_eq!(pair.consumers[0].counts().loads, 0);
    assert_failed(&pair.consumers[0], FailureReason::LeaseGone, "");
    let releases = pair.count_sent(|m| matches!(m, Message::Release(_) | Message::Ack(_)));
    assert_eq!(releases, 0, "a lease that is not ours is not released");
}

#[test]
fn an_expired_lease_fails_without_a_read() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.run(secs(40));
    pair.step_producers();
    refused(&mut pair, &params);
    assert_nothing_left(&mut pair);
}

#[test]
fn an_unknown_transfer_fails_without_a_read() {
    let mut pair = Pair::new(1, 1);
    let mut params = pair.prefill("p1", transfer(1), prompt(1), 40);
    params.transfer_id = transfer(9);
    refused(&mut pair, &params);
    assert_eq!(pair.held(), 1, "the lease of another transfer stays");
}

#[test]
fn a_foreign_epoch_fails_without_a_read() {
    let mut pair = Pair::new(1, 1);
    let mut params = pair.prefill("p1", transfer(1), prompt(1), 40);
    params.lease_epoch += 1;
    refused(&mut pair, &params);
    assert_eq!(pair.held(), 1);
}

#[test]
fn a_foreign_digest_fails_without_a_read() {
    let mut pair = Pair::new(1, 1);
    let mut params = pair.prefill("p1", transfer(1), prompt(1), 40);
    params.prompt_digest = prompt(2);
    refused(&mut pair, &params);
    assert_eq!(pair.held(), 1);
}

#[test]
fn a_request_that_queues_ten_leases_long_is_renewed() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(secs(300));
    assert_eq!(pair.held(), 1);
    let renewals = pair.count_sent(|m| matches!(m, Message::Renew(_)));
    assert!(
        (19..=22).contains(&renewals),
        "{renewals}: one per half lease"
    );
    pair.admit("d1", 0);
    pair.step();
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().expired, 0);
}

#[test]
fn a_load_is_renewed_and_its_workers_hear_of_it() {
    let options = ConsumerOptions {
        load_timeout: secs(400),
        ..options()
    };
    let mut pair = Pair::with(1, 1, lease_times(), options);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    for _ in 0..300 {
        pair.run(secs(1));
        pair.step();
        let deadline = pair.workers[0].job("d1").deadline.expect("loading");
        assert!(deadline > pair.now, "the workers' time never runs out");
    }
    assert!(pair.workers[0].job("d1").extensions >= 19);
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn the_first_deadline_runs_from_the_question_and_ends_a_margin_early() {
    let mut pair = Pair::new(1, 1);
    pair.latency = ms(100);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    pair.run(secs(1));
    let (asked_at, ..) = pair
        .sent
        .iter()
        .find(|(_, _, message)| matches!(message, Message::Claim(_)))
        .expect("a claim");
    let until = *asked_at + secs(30) - ms(500);
    pair.step();
    assert_eq!(pair.workers[0].job("d1").deadline, Some(until));
}

#[test]
fn a_long_step_between_order_and_workers_does_not_move_the_deadline() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    // Ordered within milliseconds by our own thread; the engine's step takes ten seconds.
    pair.run(secs(10));
    pair.step();
    let deadline = pair.workers[0].job("d1").deadline.expect("loading");
    assert!(
        deadline <= pair.now + secs(20),
        "{:?}",
        deadline.since(pair.now)
    );
    // So with an extension.
    pair.run(secs(10));
    pair.step();
    let deadline = pair.workers[0].job("d1").deadline.expect("loading");
    // The load's own time is over 30 s after its order, whatever the lease says.
    assert!(
        deadline <= pair.now + ms(10_020),
        "{:?}",
        deadline.since(pair.now)
    );
}

#[test]
fn without_answers_the_lease_runs_out_and_the_load_is_cancelled() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.drop_all(Kind::Renew);
    pair.run(ms(29_000));
    pair.step();
    assert!(pair.workers[0].job("d1").cancel.is_none());
    pair.run(ms(1_000));
    pair.step();
    let cancel = pair.workers[0].job("d1").cancel.clone().expect("a cancel");
    assert_eq!(cancel.reason, FailureReason::LeaseExpired);
    assert_eq!(
        pair.consumers[0].open(),
        (1, 1),
        "quiesces before it is forgotten"
    );
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(2));
    assert_nothing_left(&mut pair);
}

#[test]
fn a_lease_that_ran_out_while_the_timer_was_late_is_not_read() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    // The clock moves; no timer runs before vLLM's hook does.
    pair.now = pair.now + secs(60);
    pair.admit("d1", 0);
    pair.step();
    let (_, failure) = pair.workers[0].job("d1").fail.clone().expect("a failure");
    assert_eq!(failure.reason, FailureReason::LeaseExpired);
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(60));
    assert_nothing_left(&mut pair);
}

#[test]
fn a_grant_shorter_than_the_margin_is_never_read_under() {
    let times = crate::producer::LeaseTimes {
        lease: ms(400),
        renewal: ms(400),
        grace: ms(100),
    };
    let mut pair = Pair::with(1, 1, times, options());
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    pair.run(ms(20));
    pair.step();
    let job = pair.workers[0].job("d1");
    assert!(job.load.is_none());
    let (_, failure) = job.fail.clone().expect("a failure");
    assert_eq!(failure.reason, FailureReason::LeaseExpired);
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(2));
    assert_nothing_left(&mut pair);
}

#[test]
fn no_answer_to_the_claim_fails_in_time() {
    let mut pair = Pair::new(1, 1);
    pair.drop_all(Kind::Claim);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    pair.run(ms(9_999));
    pair.step();
    assert!(!pair.workers[0].has("d1"));
    pair.run(ms(1));
    pair.step();
    assert!(pair.workers[0].job("d1").fail.is_some());
    assert_failed(&pair.consumers[0], FailureReason::ClaimTimeout, "");
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn a_late_answer_to_an_earlier_claim_is_not_taken_for_a_later_one() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    let mut first = true;
    pair.network(move |_, message| {
        if message.kind() == Kind::Granted && std::mem::take(&mut first) {
            Fate::Delay(secs(3))
        } else {
            Fate::Deliver
        }
    });
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.finish("d1");
    pair.run(ms(200));
    // The transfer was given up and released; the answer to its claim is still on its way.
    pair.arrive("d2", &params);
    pair.admit("d2", 0);
    pair.run(secs(4));
    pair.step();
    let job = pair.workers[0].job("d2");
    assert!(
        job.load.is_none(),
        "no read under the answer to an earlier question"
    );
    let (_, failure) = job.fail.clone().expect("a failure");
    assert_eq!(failure.reason, FailureReason::LeaseGone);
    pair.report("d2", true);
    pair.finish("d2");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

/// A load whose renewal is under way and not answered, and its deadline.
fn unanswered_renewal() -> (Pair, Granted, Time) {
    let options = ConsumerOptions {
        load_timeout: secs(400),
        ..options()
    };
    let mut pair = Pair::with(1, 1, lease_times(), options);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    pair.run(ms(20));
    pair.step();
    let granted = pair.sent.iter().find_map(|(_, _, message)| {
        if let Message::Granted(granted) = message {
            Some((**granted).clone())
        } else {
            None
        }
    });
    pair.drop_all(Kind::Granted);
    pair.run(secs(16));
    let question = pair.sent.iter().rev().find_map(|(_, _, message)| {
        if let Message::Renew(renew) = message {
            Some(renew.question)
        } else {
            None
        }
    });
    let answer = Granted {
        question: question.expect("renewed at half of its time"),
        ..granted.expect("the claim was granted")
    };
    let deadline = pair.workers[0].job("d1").deadline.expect("loading");
    (pair, answer, deadline)
}

/// The deadline after this answer.
fn deadline_after(pair: &mut Pair, answer: Granted) -> Option<Time> {
    let now = pair.now;
    let peer = pair.workers[0]
        .job("d1")
        .load
        .as_ref()
        .expect("loading")
        .peer;
    pair.consumers[0].handle_message(now, peer, Message::Granted(Box::new(answer)));
    pair.step();
    pair.workers[0].job("d1").deadline
}

/// The number by which the holder tells what was said first, over whichever connection.
fn number_of(message: &Message) -> Option<u64> {
    if let Message::Claim(claim) = message {
        return Some(claim.question);
    }
    if let Message::Renew(renew) = message {
        return Some(renew.question);
    }
    if let Message::Ack(ack) = message {
        return ack.number;
    }
    None
}

#[test]
fn no_two_things_said_of_a_transfer_have_one_number() {
    let (mut pair, _, _) = unanswered_renewal();
    pair.report("d1", false);
    pair.run(secs(1));
    let sent = pair.sent.iter();
    let numbers: Vec<u64> = sent.filter_map(|(_, _, said)| number_of(said)).collect();
    assert!(numbers.len() >= 3, "a claim, a renewal, an acknowledgement");
    assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
}

#[test]
fn only_the_answer_to_a_renewal_gives_more_time() {
    let (mut pair, answer, deadline) = unanswered_renewal();
    let earlier = Granted {
        question: answer.question - 1,
        ..answer.clone()
    };
    assert_eq!(deadline_after(&mut pair, earlier), Some(deadline));
    // Under another fence: bytes read so far were not read under that one.
    let mut refenced = answer.clone();
    refenced.lease.epoch = refenced.lease.epoch.next();
    assert_eq!(deadline_after(&mut pair, refenced), Some(deadline));
    // The holder was asked and has answered, which the workers' model has to know.
    let granted = Message::Granted(Box::new(answer.clone()));
    pair.workers[0].note_received(Incarnation(1), &granted);
    let later = deadline_after(&mut pair, answer);
    assert!(later > Some(deadline), "{later:?}");
}

#[test]
fn a_load_that_takes_too_long_is_cancelled_once() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.run(ms(29_999));
    pair.step();
    assert!(pair.workers[0].job("d1").cancel.is_none());
    pair.run(secs(40));
    pair.step();
    let cancel = pair.workers[0].job("d1").cancel.clone().expect("a cancel");
    assert_eq!(cancel.reason, FailureReason::LoadTimeout);
    assert_eq!(pair.held(), 1, "the lease lives while a rank may read");
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn the_workers_model_sees_a_deadline_that_is_too_late() {
    use crate::ids::{Epoch, LeaseRef, Slot};
    use crate::step::{Extension, StepOrders};
    use crate::wire::message::{Claim, Granted};
    let now = Time::from_origin(secs(5));
    let mut workers = Workers::new(ms(500));
    workers.note_sent(
        now,
        &Message::Claim(Claim {
            transfer_id: transfer(1),
            epoch: 1,
            prompt_digest: prompt(1),
            question: 1,
        }),
    );
    let granted = Granted {
        transfer_id: transfer(1),
        granted_ms: 10_000,
        lease: LeaseRef {
            slot: Slot(0),
            epoch: Epoch(1),
        },
        block_ids: Vec::new(),
        num_tokens: 1,
        question: 1,
    };
    workers.note_received(Incarnation(1), &Message::Granted(Box::new(granted.clone())));
    let load = crate::step::LoadOrder {
        request_id: "d1".into(),
        peer: crate::step::PeerId(0),
        transfer_id: transfer(1),
        lease: granted.lease,
        deadline_ms: 9_501,
        choice: crate::step::SourceChoice::default(),
        first_block: 0,
        past_token: 16,
        source_block_tokens: 16,
        source_first_block: 0,
        source_blocks: vec![crate::ids::BlockId(1)],
        dest_blocks: vec![crate::ids::BlockId(2)],
    };
    let orders = StepOrders {
        peers: vec![crate::step::PeerCard {
            peer: load.peer,
            layout: crate::wire::message::Layout {
                from: crate::testing::identity("prefill", 1, 1),
                workers: Vec::new(),
            },
        }],
        loads: vec![load],
        extensions: Vec::<Extension>::new(),
        ..StepOrders::default()
    };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        workers.take(now, orders);
    }));
    assert!(caught.is_err(), "9.5 s are allowed, not 9.501");
}
