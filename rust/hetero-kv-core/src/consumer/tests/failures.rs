//! Params that are of no use, peers that die, holders that have less than was said.

use super::*;
use crate::ids::{BlockId, EngineId};
use crate::testing::{ms, prompt, secs, transfer};
use crate::wire::Kind;
use crate::wire::message::Message;
use crate::wire::params::{RemotePrefill, TransferParams};

/// Runs one request that cannot be served and returns the failure its workers report.
fn fail(pair: &mut Pair, text: &str) -> crate::failure::Failure {
    let params = TransferParams::parse(text);
    pair.consumers[0].handle_new_request(pair.now, "d1", params, prompt(1), 40);
    let external = pair.admit("d1", 0);
    assert_eq!(external, 39, "its tokens are claimed, to be failed");
    pair.run(ms(20));
    pair.step();
    let job = pair.workers[0].job("d1").clone();
    assert!(job.load.is_none());
    let (blocks, failure) = job.fail.expect("a failure");
    assert_eq!(blocks, [500, 501, 502].map(BlockId));
    pair.report("d1", true);
    // vLLM computes it here, or fails it.
    assert_eq!(pair.consumers[0].matched_tokens("d1", 0), 0);
    pair.finish("d1");
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].open(), (0, 0));
    assert_failed(&pair.consumers[0], failure.reason, &failure.field);
    failure
}

#[test]
fn malformed_params_fail_by_the_field_at_fault() {
    let sample = Pair::new(1, 1).prefill("p1", transfer(1), prompt(1), 40);
    let whole = sample.to_json();
    let keys: Vec<String> = whole
        .as_object()
        .expect("an object")
        .keys()
        .cloned()
        .collect();
    for key in keys.iter().filter(|key| !key.starts_with("do_remote")) {
        let mut pair = Pair::new(1, 1);
        let mut cut = whole.clone();
        cut.as_object_mut().expect("an object").remove(key);
        let failure = fail(&mut pair, &cut.to_string());
        assert_eq!(
            (failure.reason, &failure.field),
            (FailureReason::BadParams, key)
        );
        assert!(failure.text.contains(&format!("kv_transfer_params.{key}")));
        assert!(pair.sent.is_empty(), "nobody is dialled for it");
    }
    let failure = fail(&mut Pair::new(1, 1), "not json");
    assert_eq!(failure.field, "*");
}

/// A lie in the params.
type Change = fn(&mut RemotePrefill);

fn tampered(change: impl FnOnce(&mut RemotePrefill)) -> (Pair, crate::failure::Failure) {
    let mut pair = Pair::new(2, 1);
    let mut params = pair.prefill("p1", transfer(1), prompt(1), 40);
    change(&mut params);
    let failure = fail(&mut pair, &params.to_json().to_string());
    (pair, failure)
}

#[test]
fn params_that_lie_about_the_engine_are_refused_by_field_and_released() {
    let cases: [(&str, Change); 3] = [
        ("tp_size", |p| p.tp_size = 4),
        ("pp_size", |p| p.pp_size = 2),
        ("remote_dp_rank", |p| p.dp_rank.0 = 3),
    ];
    for (field, change) in cases {
        let (mut pair, failure) = tampered(change);
        assert_eq!(
            (failure.reason, failure.field.as_str()),
            (FailureReason::BadParams, field)
        );
        assert!(failure.text.contains("the engine there has"), "{failure}");
        assert_nothing_left(&mut pair);
    }
}

#[test]
fn params_that_name_this_engine_are_refused() {
    let (pair, failure) = tampered(|p| p.engine = EngineId::new("decode").expect("valid"));
    assert_eq!(failure.field, "remote_engine_id");
    assert_eq!(failure.reason, FailureReason::BadParams);
    assert!(pair.sent.is_empty());
}

#[test]
fn what_the_params_promise_beyond_the_holders_tokens_is_not_read() {
    // Same digest, so only a holder that kept less than its prompt has less; to the token, because
    // 33 and 39 tokens lie in the same number of blocks.
    let mut pair = Pair::new(1, 1);
    let mut params = pair.prefill("p1", transfer(1), prompt(1), 33);
    params.num_tokens = 40;
    let failure = fail(&mut pair, &params.to_json().to_string());
    assert_eq!(failure.field, "remote_num_tokens");
    assert!(failure.text.contains("33 tokens"), "{failure}");
    assert_nothing_left(&mut pair);
}

#[test]
fn block_ids_that_travelled_through_a_router_are_never_read() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    let mut changed = params.clone();
    changed.block_ids = vec![vec![BlockId(60), BlockId(61), BlockId(62)]];
    pair.arrive("d1", &changed);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    let load = pair.workers[0].job("d1").load.clone().expect("a load");
    assert_eq!(load.source_blocks, params.block_ids[0]);
}

#[test]
fn fewer_blocks_than_promised_tokens_fail_instead_of_a_short_read() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    let external = pair.consumers[0].matched_tokens("d1", 0);
    let blocks = [BlockId(500), BlockId(501)];
    pair.consumers[0].handle_allocated(pair.now, "d1", &blocks, external);
    pair.step();
    let (blocks, failure) = pair.workers[0].job("d1").fail.clone().expect("a failure");
    assert_eq!(failure.reason, FailureReason::Plan);
    assert_eq!(blocks, [500, 501].map(BlockId));
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn a_broken_request_that_is_cached_here_is_served_from_here() {
    let mut pair = Pair::new(1, 1);
    let params = TransferParams::parse("[]");
    pair.consumers[0].handle_new_request(pair.now, "d1", params, prompt(1), 33);
    assert_eq!(pair.admit("d1", 32), 0);
    pair.step();
    assert!(!pair.workers[0].has("d1"));
    pair.finish("d1");
    assert_nothing_left(&mut pair);
}

/// Where the prefill engine dies in a request's life.
fn dies(latency_ms: u64, before: impl FnOnce(&mut Pair)) -> Pair {
    let mut pair = Pair::new(1, 1);
    pair.latency = ms(latency_ms);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    before(&mut pair);
    pair.kill_producer(0);
    pair.run(ms(1_900));
    pair
}

#[track_caller]
fn ends_without_trace(mut pair: Pair) {
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].open(), (0, 0));
}

#[test]
fn the_peer_dies_before_the_dial_arrives() {
    let mut pair = dies(10, |_| {});
    assert_failed(&pair.consumers[0], FailureReason::Unreachable, "");
    assert!(notes(&mut pair.consumers[0]).contains("prefill at p:4711: connection refused"));
    pair.admit("d1", 0);
    pair.step();
    let (_, failure) = pair.workers[0].job("d1").fail.clone().expect("a failure");
    assert_eq!(failure.reason, FailureReason::Unreachable);
    ends_without_trace(pair);
}

#[test]
fn the_peer_dies_in_the_handshake() {
    // Dialled after one latency, greeted after two, paired after five.
    for after_ms in [15, 25, 35, 45] {
        let mut pair = dies(10, |pair| {
            pair.admit("d1", 0);
            pair.run(ms(after_ms));
        });
        assert_failed(&pair.consumers[0], FailureReason::PeerLost, "");
        pair.step();
        assert!(pair.workers[0].job("d1").fail.is_some());
        ends_without_trace(pair);
    }
}

#[test]
fn the_peer_dies_with_the_claim_unanswered() {
    let mut pair = dies(10, |pair| {
        pair.drop_all(Kind::Claim);
        pair.admit("d1", 0);
        pair.run(ms(100));
        assert_eq!(pair.count_sent(|m| matches!(m, Message::Claim(_))), 1);
    });
    pair.step();
    assert!(pair.workers[0].job("d1").fail.is_some());
    assert_failed(&pair.consumers[0], FailureReason::PeerLost, "");
    ends_without_trace(pair);
}

#[test]
fn the_peer_dies_while_the_request_queues() {
    let mut pair = dies(1, |pair| pair.run(secs(3)));
    assert_failed(&pair.consumers[0], FailureReason::PeerLost, "");
    pair.admit("d1", 0);
    pair.step();
    assert!(pair.workers[0].job("d1").fail.is_some());
    ends_without_trace(pair);
}

#[test]
fn the_peer_dies_under_the_load() {
    let mut pair = dies(1, |pair| {
        pair.run(ms(20));
        pair.admit("d1", 0);
        pair.step();
    });
    pair.step();
    let cancel = pair.workers[0].job("d1").cancel.clone().expect("a cancel");
    assert_eq!(cancel.reason, FailureReason::PeerLost);
    ends_without_trace(pair);
}

#[test]
fn the_peer_dies_after_the_load_and_nothing_fails() {
    let mut pair = dies(1, |pair| {
        pair.run(ms(20));
        pair.admit("d1", 0);
        pair.step();
        pair.report("d1", false);
    });
    assert_eq!(pair.consumers[0].counts().failures.len(), 0);
    pair.finish("d1");
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].open(), (0, 0));
}

#[test]
fn goodbye_is_a_death_too() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.say_to_consumer(Message::Bye);
    pair.run(ms(20));
    assert_failed(&pair.consumers[0], FailureReason::PeerLost, "");
    assert!(notes(&mut pair.consumers[0]).contains("going down"));
}

#[test]
fn a_read_that_was_not_acknowledged_before_the_cut_is_acknowledged_after_it() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.arrive("d2", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.admit("d2", 0);
    pair.step();
    pair.report("d1", false);
    pair.cut();
    pair.run(ms(300));
    pair.step();
    assert!(pair.workers[0].job("d2").cancel.is_some());
    // Another request brings the peer back before the cancelled sibling has quiesced.
    let again = pair.prefill("p2", transfer(2), prompt(2), 40);
    pair.arrive("d3", &again);
    pair.run(ms(20));
    pair.report("d2", true);
    pair.run(ms(200));
    pair.step_producers();
    assert_eq!(pair.released_ids(), ["p1"]);
    assert_eq!(pair.producers[0].counts().read_out, 1);
    pair.step();
    pair.admit("d3", 0);
    pair.step();
    pair.report("d3", false);
    for request in ["d1", "d2", "d3"] {
        pair.finish(request);
    }
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.consumers[0].counts().reconnects, 1);
}

#[test]
fn without_a_connection_the_lease_runs_out_by_itself() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.report("d1", false);
    pair.finish("d1");
    pair.cut();
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].open(), (0, 0));
    assert_eq!(pair.held(), 1);
    pair.run(secs(30));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().expired, 1);
}

#[test]
fn fields_that_peers_invent_are_counted_up_to_a_bound() {
    let mut pair = Pair::new(1, 1);
    let consumer = &mut pair.consumers[0];
    for number in 0..1000 {
        let failure = crate::failure::Failure::of_field(
            FailureReason::PairRefused,
            format!("field_{number}"),
            "differs",
        );
        consumer.count_failure("d1", &failure);
    }
    let failures = &consumer.counts().failures;
    assert_eq!(failures.len(), super::super::FAILURE_FIELDS_MAX + 1);
    assert_eq!(failures.values().sum::<u64>(), 1000);
    assert_eq!(failures[&(FailureReason::PairRefused, String::new())], 744);
}
