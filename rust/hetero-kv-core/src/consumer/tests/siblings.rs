//! Several requests on one transfer; two decode engines on one transfer.

use super::*;
use crate::consumer::MISMATCH_LINGER;
use crate::testing::{CONTROL_PORT, common_fields, identity, ms, options, prompt, secs, transfer};
use crate::wire::message::Message;
use crate::wire::params::RemotePrefill;

/// A lie in the params.
type Change = fn(&mut RemotePrefill);

fn acks(pair: &Pair) -> usize {
    pair.count_sent(|message| matches!(message, Message::Ack(_)))
}

#[test]
fn four_siblings_share_one_claim_and_one_acknowledgement() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    let siblings = ["d0", "d1", "d2", "d3"];
    for request in siblings {
        pair.arrive(request, &params);
    }
    pair.run(ms(20));
    for request in siblings {
        assert_eq!(pair.admit(request, 0), 39);
    }
    pair.step();
    for request in siblings {
        assert!(pair.workers[0].job(request).load.is_some());
    }
    for request in &siblings[..3] {
        pair.report(request, false);
        pair.run(secs(1));
        assert_eq!(acks(&pair), 0, "{request} is not the last");
    }
    pair.report("d3", false);
    pair.run(ms(99));
    assert_eq!(acks(&pair), 0);
    pair.run(ms(1));
    assert_eq!(acks(&pair), 1);
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Claim(_))), 1);
    for request in siblings {
        pair.finish(request);
    }
    pair.run(ms(10));
    assert_nothing_left(&mut pair);
}

#[test]
fn a_sibling_within_the_linger_joins_and_one_after_it_is_too_late() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.report("d1", false);
    pair.run(ms(90));
    pair.arrive("d2", &params);
    pair.run(secs(20));
    assert_eq!(acks(&pair), 0);
    pair.admit("d2", 0);
    pair.step();
    assert!(pair.workers[0].job("d2").load.is_some());
    pair.report("d2", false);
    pair.run(ms(150));
    assert_eq!(acks(&pair), 1);
    pair.arrive("d3", &params);
    pair.admit("d3", 0);
    pair.run(ms(20));
    pair.step();
    let (_, failure) = pair.workers[0].job("d3").fail.clone().expect("a failure");
    assert_eq!(failure.reason, FailureReason::LeaseGone);
    pair.report("d3", true);
    for request in ["d1", "d2", "d3"] {
        pair.finish(request);
    }
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn a_failed_sibling_does_not_unread_what_another_has_read() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.arrive("d2", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.admit("d2", 0);
    pair.step();
    pair.report("d1", false);
    pair.report("d2", true);
    pair.run(secs(1));
    assert_eq!(pair.producers[0].counts().read_out, 1);
    pair.finish("d1");
    pair.finish("d2");
    assert_nothing_left(&mut pair);
}

#[test]
fn a_list_of_prompts_with_the_params_of_one_computes_the_others_here() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    // A router copies one prompt's params to all; the right one is neither first nor last.
    pair.arrive_as(0, "d0", &params, prompt(7), 40);
    pair.arrive_as(0, "d1", &params, prompt(1), 40);
    pair.arrive_as(0, "d2", &params, prompt(8), 90);
    pair.run(ms(20));
    assert_eq!(pair.admit("d0", 0), 0);
    assert_eq!(pair.admit("d2", 0), 0);
    assert_eq!(pair.admit("d1", 0), 39);
    pair.step();
    assert!(pair.workers[0].job("d1").load.is_some());
    pair.finish("d0");
    pair.finish("d2");
    pair.run(secs(20));
    assert_eq!(pair.held(), 1);
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Release(_))), 0);
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.consumers[0].counts().digest_mismatches, 2);
    assert_eq!(pair.consumers[0].counts().failures.len(), 0);
}

#[test]
fn a_prompt_unlike_its_digest_is_computed_here_and_released_without_a_claim() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive_as(0, "d1", &params, prompt(2), 40);
    pair.run(ms(20));
    assert_eq!(pair.admit("d1", 0), 0);
    pair.run(MISMATCH_LINGER + ms(100));
    pair.finish("d1");
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().released, 1);
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Claim(_))), 0);
    let consumer = &mut pair.consumers[0];
    assert_eq!(consumer.counts().digest_mismatches, 1);
    assert!(notes(consumer).contains("request d1: its prompt is not the one"));
}

#[test]
fn with_require_kv_a_prompt_unlike_its_digest_fails() {
    let mut pair = Pair::with(1, 1, crate::testing::lease_times(), require_kv(options()));
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive_as(0, "d1", &params, prompt(2), 40);
    assert_eq!(pair.admit("d1", 0), 39);
    pair.step();
    let (blocks, failure) = pair.workers[0].job("d1").fail.clone().expect("a failure");
    assert_eq!(blocks.len(), 3);
    assert_eq!(failure.field, "prompt_digest");
    assert_failed(
        &pair.consumers[0],
        FailureReason::DigestMismatch,
        "prompt_digest",
    );
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(MISMATCH_LINGER + ms(100));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().released, 1);
}

#[test]
fn a_prompt_unlike_its_digest_leaves_the_lease_to_the_right_one_that_comes_steps_later() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive_as(0, "d0", &params, prompt(7), 40);
    pair.run(MISMATCH_LINGER - ms(100));
    pair.arrive_as(0, "d1", &params, prompt(1), 40);
    assert_eq!(pair.admit("d1", 0), 39);
    pair.run(secs(1));
    pair.step();
    assert!(pair.workers[0].job("d1").load.is_some());
    pair.report("d1", false);
    pair.finish("d0");
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().read_out, 1);
}

#[test]
fn an_id_belongs_to_the_first_params_that_came_with_it() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    let changes: [(&str, Change); 4] = [
        ("remote_engine_id", |p| {
            p.engine = crate::ids::EngineId::new("elsewhere").expect("valid");
        }),
        ("remote_incarnation", |p| {
            p.incarnation = crate::ids::Incarnation(77)
        }),
        ("prompt_digest", |p| p.prompt_digest = prompt(9)),
        ("lease_epoch", |p| p.lease_epoch = 77),
    ];
    for (index, (field, change)) in changes.into_iter().enumerate() {
        let mut other = params.clone();
        change(&mut other);
        let request = format!("e{index}");
        pair.arrive(&request, &other);
        pair.admit(&request, 0);
        pair.step();
        let (_, failure) = pair.workers[0]
            .job(&request)
            .fail
            .clone()
            .expect("a failure");
        assert_eq!(
            (failure.reason, failure.field.as_str()),
            (FailureReason::BadParams, field)
        );
        pair.report(&request, true);
        pair.finish(&request);
    }
    // The first owner is not disturbed.
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    assert!(pair.workers[0].job("d1").load.is_some());
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn two_decode_engines_on_one_transfer_release_when_one_has_read_it() {
    let mut pair = Pair::new(1, 1);
    let other = pair.add_consumer(identity("other", 200, 1), common_fields(), options());
    let params = pair.prefill_at(0, CONTROL_PORT, "p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.arrive_as(other, "e1", &params, prompt(1), 40);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.admit_at(other, "e1", 0);
    pair.step();
    // One is aborted: the other keeps the blocks.
    pair.finish("d1");
    pair.step();
    pair.report("d1", true);
    pair.run(secs(1));
    assert_eq!(pair.held(), 1);
    assert!(pair.ordered.is_empty());
    pair.report_at(other, "e1", false);
    pair.run(secs(1));
    assert_eq!(pair.ordered.len(), 1);
    pair.consumers[other].handle_finished(pair.now, "e1");
    assert_nothing_left(&mut pair);
}
