//! A request from its arrival to the release, and prompts that move nothing.

use super::*;
use crate::ids::BlockId;
use crate::testing::{Fate, ms, prompt, secs, transfer};
use crate::wire::Kind;
use crate::wire::message::Message;

fn is_claim(message: &Message) -> bool {
    matches!(message, Message::Claim(_))
}

#[test]
fn a_read_from_arrival_to_release() {
    let mut pair = Pair::new(2, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    assert_eq!(
        pair.count_sent(is_claim),
        1,
        "claimed before vLLM schedules it"
    );
    assert_eq!(pair.admit("d1", 0), 39, "the last token is computed here");
    pair.step();
    let load = pair.workers[0].job("d1").load.clone().expect("a load");
    assert_eq!(load.source_blocks, params.block_ids[0]);
    assert_eq!(load.dest_blocks, [500, 501, 502].map(BlockId));
    assert_eq!(load.lease.epoch.0, params.lease_epoch);
    assert_eq!(pair.workers[0].pending, 1);
    pair.run(secs(1));
    assert_eq!(pair.held(), 1, "not released while it reads");
    pair.report("d1", false);
    // vLLM's second call after the load, and a preemption's question.
    pair.consumers[0].handle_allocated(pair.now, "d1", &[BlockId(500)], 0);
    assert_eq!(pair.consumers[0].matched_tokens("d1", 0), 0);
    pair.run(ms(99));
    assert_eq!(pair.ordered.len(), 0, "a sibling may still come");
    pair.run(ms(10));
    assert_eq!(pair.ordered.len(), 1);
    pair.step_producers();
    assert_eq!(pair.released_ids(), ["p1"]);
    assert_eq!(pair.producers[0].counts().read_out, 1);
    pair.finish("d1");
    assert_nothing_left(&mut pair);
    assert_eq!(pair.consumers[0].counts().failures.len(), 0);
    pair.step();
    assert_eq!(pair.workers[0].pending, 0);
}

#[test]
fn blocks_that_come_before_the_claim_are_read_after_it() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    assert_eq!(pair.admit("d1", 0), 39);
    pair.step();
    assert!(
        !pair.workers[0].has("d1"),
        "no read before the claim is answered"
    );
    assert_eq!(pair.workers[0].pending, 1);
    // Long before vLLM asks again, our own thread has the answer.
    pair.run(ms(20));
    pair.step();
    assert!(pair.workers[0].job("d1").load.is_some());
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn a_prompt_of_one_token_moves_nothing_and_releases() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 1);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    assert_eq!(pair.admit("d1", 0), 0);
    pair.step();
    assert!(!pair.workers[0].has("d1"));
    pair.run(secs(1));
    pair.finish("d1");
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().released, 1);
    assert_eq!(pair.consumers[0].counts().failures.len(), 0);
}

#[test]
fn a_full_local_hit_only_releases() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 33);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    assert_eq!(pair.admit("d1", 32), 0);
    pair.run(secs(1));
    pair.step();
    assert!(!pair.workers[0].has("d1"));
    pair.finish("d1");
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().released, 1);
}

#[test]
fn a_partial_local_hit_reads_the_tail_by_absolute_index() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 70);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    // No room at first; at the second try more is cached here.
    assert_eq!(pair.consumers[0].matched_tokens("d1", 16), 53);
    assert_eq!(pair.admit("d1", 32), 37);
    pair.step();
    let load = pair.workers[0].job("d1").load.clone().expect("a load");
    assert_eq!(load.source_blocks, params.block_ids[0][2..5]);
    assert_eq!(load.dest_blocks, [502, 503, 504].map(BlockId));
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn the_last_token_in_a_block_of_its_own_is_not_read() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 33);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    assert_eq!(pair.admit("d1", 0), 32);
    pair.step();
    let load = pair.workers[0].job("d1").load.clone().expect("a load");
    assert_eq!(load.source_blocks, params.block_ids[0][..2]);
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
}

#[test]
fn requests_of_no_concern_leave_no_trace() {
    use crate::wire::params::TransferParams;
    let mut pair = Pair::new(1, 1);
    for params in [
        TransferParams::Absent,
        TransferParams::Prefill { transfer_id: None },
    ] {
        let consumer = &mut pair.consumers[0];
        consumer.handle_new_request(pair.now, "d1", Ok(params), prompt(1), 40);
        assert_eq!(consumer.matched_tokens("d1", 0), 0);
        consumer.handle_allocated(pair.now, "d1", &[], 0);
        consumer.handle_received(pair.now, "d1", false);
        consumer.handle_finished(pair.now, "d1");
        assert_eq!(consumer.open(), (0, 0));
        assert_eq!(
            consumer.take_orders(pair.now),
            crate::step::StepOrders::default()
        );
        assert_eq!(consumer.poll_output(), None);
        assert_eq!(consumer.poll_timeout(), None);
    }
}

#[test]
fn a_second_announcement_of_a_request_changes_nothing() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.arrive("d1", &params);
    // A report that no worker was asked for changes nothing either.
    pair.consumers[0].handle_received(pair.now, "d9", false);
    pair.report("d1", false);
    pair.consumers[0].handle_received(pair.now, "d1", true);
    pair.finish("d1");
    pair.run(secs(1));
    assert_nothing_left(&mut pair);
    assert_eq!(pair.producers[0].counts().read_out, 1);
}

#[test]
fn one_acknowledgement_names_every_rank() {
    let mut pair = Pair::new(4, 2);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(secs(1));
    let acks: Vec<_> = pair
        .sent
        .iter()
        .filter_map(|(_, _, message)| {
            let Message::Ack(ack) = message else {
                return None;
            };
            Some(ack.ranks.len())
        })
        .collect();
    assert_eq!(acks, [2]);
    assert_nothing_left(&mut pair);
}

#[test]
fn duplicated_messages_release_once() {
    let mut pair = Pair::new(2, 1);
    let doubled = [Kind::Ack, Kind::Release, Kind::Granted, Kind::Gone];
    pair.network(move |_, message| {
        if doubled.contains(&message.kind()) {
            Fate::Twice
        } else {
            Fate::Deliver
        }
    });
    for n in 1..=3 {
        let params = pair.prefill(&format!("p{n}"), transfer(n), prompt(n.into()), 40);
        let request = format!("d{n}");
        pair.arrive(&request, &params);
        pair.run(ms(20));
        // The third is a full local hit: it releases instead.
        pair.admit(&request, if n == 3 { 39 } else { 0 });
        pair.step();
        if n < 3 {
            pair.report(&request, false);
        }
        pair.finish(&request);
        pair.run(secs(1));
        pair.step_producers();
    }
    assert_eq!(pair.released_ids(), ["p1", "p2", "p3"]);
    assert_eq!(pair.producers[0].counts().late, 3);
    assert_nothing_left(&mut pair);
}
