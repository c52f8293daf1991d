//! The client leaves, in each phase: exactly one report by the workers, nothing left behind.

use super::*;
use crate::step::PeerId;
use crate::testing::{ms, prompt, secs, transfer};
use crate::wire::params::TransferParams;

#[test]
fn while_it_queues() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.finish("d1");
    pair.run(secs(1));
    pair.step();
    assert!(!pair.workers[0].has("d1"), "vLLM waits for no report");
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().released, 1);
}

#[test]
fn while_the_peer_is_dialled() {
    let mut pair = Pair::new(1, 1);
    pair.latency = ms(300);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.finish("d1");
    // The linger is over long before the handshake is.
    pair.run(ms(1_000));
    assert_eq!(pair.held(), 1);
    pair.run(secs(3));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().released, 1, "not left to expire");
}

#[test]
fn while_it_waits_for_the_claim() {
    let mut pair = Pair::new(1, 1);
    pair.latency = ms(50);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    pair.finish("d1");
    pair.run(secs(1));
    pair.step();
    let (blocks, failure) = pair.workers[0].job("d1").fail.clone().expect("a failure");
    assert_eq!(blocks.len(), 3);
    assert_eq!(failure.reason, FailureReason::Cancelled);
    assert!(
        pair.workers[0].job("d1").load.is_none(),
        "an answer that comes later reads nothing"
    );
    pair.report("d1", true);
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().released, 1);
}

#[test]
fn while_it_loads() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.finish("d1");
    pair.finish("d1");
    pair.step();
    let cancel = pair.workers[0].job("d1").cancel.clone().expect("a cancel");
    assert_eq!(cancel.reason, FailureReason::Cancelled);
    pair.run(secs(20));
    assert_eq!(
        pair.held(),
        1,
        "a rank may still be writing the blocks it reads into"
    );
    pair.report("d1", true);
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn between_the_order_and_the_step_that_carries_it() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.finish("d1");
    pair.step();
    let job = pair.workers[0].job("d1");
    assert!(
        job.load.is_none() && job.cancel.is_none(),
        "nothing to read and nothing to stop"
    );
    let (blocks, failure) = job.fail.clone().expect("a failure");
    assert_eq!(blocks.len(), 3);
    assert_eq!(
        failure.reason,
        FailureReason::Cancelled,
        "a load with no time left would say that its lease ran out"
    );
    assert_eq!(pair.consumers[0].counts().loads, 0);
    pair.report("d1", true);
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

/// Counters only grow, at any moment that somebody may look at them.
#[test]
fn a_load_that_no_worker_heard_of_counts_as_its_failure_and_as_no_load() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    for request in ["d1", "d2"] {
        pair.arrive(request, &params);
    }
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    assert_eq!(pair.consumers[0].counts().loads, 1);
    // Ordered, and its step has not been made when the connection breaks.
    pair.admit("d2", 0);
    assert_eq!(pair.consumers[0].counts().loads, 1, "nobody was told");
    pair.consumers[0].handle_closed(pair.now, PeerId(0), "reset");
    pair.step();
    let counts = pair.consumers[0].counts();
    assert_eq!(counts.loads, 1);
    let lost: Vec<_> = counts
        .failures
        .iter()
        .map(|((reason, _), count)| (*reason, *count))
        .collect();
    assert_eq!(
        lost,
        [(FailureReason::PeerLost, 1)],
        "the first one's is its worker's to report"
    );
    assert!(pair.workers[0].job("d1").cancel.is_some());
    let job = pair.workers[0].job("d2");
    assert!(job.load.is_none() && job.cancel.is_none());
    let (blocks, failure) = job.fail.clone().expect("a failure");
    assert_eq!((blocks.len(), failure.reason), (3, FailureReason::PeerLost));
    for request in ["d1", "d2"] {
        pair.report(request, true);
        pair.finish(request);
    }
    pair.run(secs(60));
    assert_nothing_left(&mut pair);
}

#[test]
fn while_its_failure_is_reported() {
    let mut pair = Pair::new(1, 1);
    pair.listening.clear();
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    pair.run(ms(20));
    pair.finish("d1");
    pair.step();
    assert!(pair.workers[0].job("d1").fail.is_some());
    pair.report("d1", true);
    pair.run(secs(60));
    assert_nothing_left(&mut pair);
}

#[test]
fn after_it_was_loaded() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.report("d1", false);
    pair.finish("d1");
    pair.step();
    assert!(pair.workers[0].job("d1").cancel.is_none());
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().read_out, 1);
}

#[test]
fn a_cancel_that_loses_the_race_with_the_last_byte_counts_as_read() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.finish("d1");
    pair.step();
    pair.report("d1", false);
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().read_out, 1);
}

#[test]
fn a_request_rejected_before_admission_releases() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    let parsed = TransferParams::Decode(Box::new(params));
    pair.consumers[0].handle_rejected(pair.now, Ok(parsed));
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().released, 1);
    assert_eq!(pair.producers[0].counts().gone, 0);
}

#[test]
fn the_extra_rejection_after_a_failed_load_counts_nothing_twice() {
    let mut pair = Pair::new(1, 1);
    let mut params = pair.prefill("p1", transfer(1), prompt(1), 40);
    params.lease_epoch += 1;
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    pair.run(ms(20));
    pair.step();
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(1));
    let before = pair.consumers[0].counts().clone();
    assert_eq!(before.claims_gone, 1);
    let parsed = TransferParams::Decode(Box::new(params));
    pair.consumers[0].handle_rejected(pair.now, Ok(parsed));
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].counts(), &before);
    assert_eq!(pair.consumers[0].open(), (0, 0));
}

#[test]
fn a_rejected_sibling_leaves_the_transfer_to_the_others() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.consumers[0].handle_rejected(
        pair.now,
        Ok(TransferParams::Decode(Box::new(params.clone()))),
    );
    pair.run(secs(5));
    assert_eq!(pair.held(), 1);
    pair.admit("d1", 0);
    pair.step();
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().read_out, 1);
}

#[test]
fn a_rejected_request_of_no_concern_dials_nobody() {
    let mut pair = Pair::new(1, 1);
    let mut own = pair.prefill("p1", transfer(1), prompt(1), 40);
    own.engine = crate::ids::EngineId::new("decode").expect("valid");
    for params in [
        Ok(TransferParams::Absent),
        TransferParams::parse("[1]"),
        Ok(TransferParams::Decode(Box::new(own))),
    ] {
        let consumer = &mut pair.consumers[0];
        consumer.handle_rejected(pair.now, params);
        assert_eq!(consumer.poll_output(), None);
        assert_eq!(consumer.open(), (0, 0));
    }
}
