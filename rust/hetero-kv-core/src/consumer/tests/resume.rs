//! A control connection that breaks under requests: dialled again at once, nothing fails; and what
//! fails where that does not succeed.

use super::super::{PeerState, RESUME_MAX};
use super::*;
use crate::producer::LeaseTimes;
use crate::testing::{
    CONTROL_PORT, Direction, Fate, common_fields, identity, lease_times, ms, options, prompt, secs,
    transfer,
};
use crate::wire::Kind;
use crate::wire::message::Message;

/// Paired long enough that a break is no sign of a peer that cannot be paired with.
fn paired(pair: &mut Pair, number: u8) {
    let (prefilled, decoded) = (format!("p{number}"), format!("d{number}"));
    let params = pair.prefill(&prefilled, transfer(number), prompt(number.into()), 40);
    pair.arrive(&decoded, &params);
    pair.run(secs(1));
}

/// The next step stops the load, because of the break.
#[track_caller]
fn assert_stopped_by_the_break(pair: &mut Pair) {
    pair.step();
    let failure = pair.workers[0].job("d1").cancel.clone();
    assert_eq!(failure.map(|f| f.reason), Some(FailureReason::PeerLost));
}

fn read_out(pair: &mut Pair, request_id: &str) {
    pair.report(request_id, false);
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].counts().failures.len(), 0);
    pair.finish(request_id);
    pair.run(ms(200));
    assert_nothing_left(pair);
}

#[test]
fn a_granted_lease_outlives_its_connection_and_is_renewed_on_the_next() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    assert!(pair.admit("d1", 0) > 0);
    pair.step();
    let renewals = pair.count_sent(|m| matches!(m, Message::Renew(_)));
    pair.cut();
    pair.run(ms(100));
    assert_eq!(pair.consumers[0].peers_ready(), 1);
    assert_eq!(pair.consumers[0].counts().reconnects, 1);
    assert_eq!(
        pair.count_sent(|m| matches!(m, Message::Renew(_))),
        renewals + 1
    );
    // Read and acknowledged over the new connection.
    read_out(&mut pair, "d1");
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Ack(_))), 1);
}

/// The second try's two seconds are over long before the next dial, which has time of its own.
#[test]
fn a_break_that_was_mended_leaves_no_haste_for_the_next_dial() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    assert!(pair.admit("d1", 0) > 0);
    pair.step();
    pair.cut();
    pair.run(secs(1));
    read_out(&mut pair, "d1");
    pair.run(RESUME_MAX);
    pair.cut();
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].peers_ready(), 0, "nobody needs it");
    // The way there is slow.
    pair.latency = ms(100);
    let params = pair.prefill("p2", transfer(2), prompt(2), 40);
    pair.arrive("d2", &params);
    pair.run(secs(1));
    assert!(pair.admit("d2", 0) > 0);
    pair.step();
    read_out(&mut pair, "d2");
}

#[test]
fn a_claim_without_an_answer_is_asked_anew() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    pair.network(|way, _| match way {
        Direction::ToConsumer => Fate::Drop,
        Direction::ToProducer => Fate::Deliver,
    });
    let params = pair.prefill("p2", transfer(2), prompt(2), 40);
    pair.arrive("d2", &params);
    pair.run(ms(20));
    pair.heal();
    pair.cut();
    pair.run(ms(100));
    for request in ["d1", "d2"] {
        assert!(pair.admit(request, 0) > 0);
        pair.step();
    }
    pair.report("d1", false);
    pair.finish("d1");
    read_out(&mut pair, "d2");
}

/// The blocks of both sides may differ in size, which only a paired engine's layout says.
#[test]
fn a_load_that_is_wanted_during_the_break_is_ordered_after_it() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    pair.cut();
    // Seen by the consumer, but not yet dialled through.
    pair.run(pair.latency);
    assert_eq!(pair.consumers[0].peers_ready(), 0);
    assert!(pair.admit("d1", 0) > 0);
    let orders = pair.consumers[0].take_orders(pair.now);
    assert!(orders.loads.is_empty() && orders.fails.is_empty());
    pair.run(ms(100));
    pair.step();
    assert_eq!(pair.consumers[0].counts().loads, 1);
    read_out(&mut pair, "d1");
}

#[test]
fn an_acknowledgement_that_is_due_during_the_break_is_sent_after_it() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    pair.admit("d1", 0);
    pair.step();
    pair.dials_hang = true;
    pair.cut();
    pair.run(ms(50));
    pair.report("d1", false);
    pair.finish("d1");
    pair.run(ms(500));
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Ack(_))), 0);
    assert_eq!(pair.consumers[0].open(), (0, 1), "the holder is to be told");
    pair.run(secs(2));
    assert_eq!(pair.consumers[0].open(), (0, 0), "it cannot be told");
    assert_eq!(pair.held(), 1, "its lease runs out");
}

#[test]
fn a_failed_transfer_is_released_over_the_next_connection() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    pair.admit("d1", 0);
    pair.step();
    pair.cut();
    pair.run(pair.latency);
    assert_eq!(pair.consumers[0].peers_ready(), 0);
    // The handshake takes longer than the transfer lingers.
    pair.latency = ms(100);
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(secs(2));
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Release(_))), 1);
    assert_nothing_left(&mut pair);
}

#[test]
fn where_nobody_listens_any_more_requests_fail_by_the_break_at_once() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    pair.admit("d1", 0);
    pair.step();
    pair.kill_producer(0);
    pair.run(ms(100));
    assert_stopped_by_the_break(&mut pair);
    let told = notes(&mut pair.consumers[0]);
    assert!(
        told.contains("is gone") && told.contains("dialled again: "),
        "{told}"
    );
}

#[test]
fn a_dial_that_hangs_fails_them_within_two_seconds() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    pair.admit("d1", 0);
    pair.step();
    pair.dials_hang = true;
    pair.cut();
    pair.run(RESUME_MAX - ms(50));
    pair.step();
    assert!(pair.workers[0].job("d1").cancel.is_none());
    pair.run(ms(100));
    assert_stopped_by_the_break(&mut pair);
    assert_eq!(RESUME_MAX, secs(2));
}

#[test]
fn another_start_at_the_same_place_fails_them_by_the_break() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    pair.admit("d1", 0);
    pair.step();
    pair.kill_producer(0);
    let new = identity("prefill", 2, 1);
    pair.add_producer(new, common_fields(), lease_times(), CONTROL_PORT);
    pair.run(secs(1));
    assert_stopped_by_the_break(&mut pair);
    // What comes later hears why the engine there is refused.
    let peer = pair.consumers[0].peers.values().next().expect("a peer");
    let PeerState::Down { why, .. } = &peer.state else {
        panic!("{:?}", peer.state)
    };
    assert_eq!(why.reason, FailureReason::PairRefused);
}

#[test]
fn a_connection_that_breaks_as_soon_as_it_stands_is_not_dialled_in_a_circle() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    assert_eq!(pair.consumers[0].peers_ready(), 1);
    pair.cut();
    pair.run(ms(100));
    assert_failed(&pair.consumers[0], FailureReason::PeerLost, "");
    assert_eq!(pair.consumers[0].counts().dials, 1);
}

/// A firewall that forgets the connection under a long load.
#[test]
fn a_silent_cut_is_found_out_and_mended_under_a_load() {
    let long = LeaseTimes {
        lease: secs(60),
        renewal: secs(60),
        ..lease_times()
    };
    let mut pair = Pair::with(1, 1, long, options());
    paired(&mut pair, 1);
    pair.admit("d1", 0);
    pair.step();
    let cut_at = pair.now;
    pair.drop_all(Kind::Pong);
    while pair.consumers[0].counts().reconnects == 0 {
        pair.run(ms(100));
        assert!(pair.now < cut_at + secs(16));
    }
    pair.heal();
    read_out(&mut pair, "d1");
    assert_eq!(pair.consumers[0].counts().dials, 2);
}

/// It is no failure that the next request should suffer for.
#[test]
fn a_connection_that_broke_while_nothing_needed_it_is_dialled_by_the_next_request_at_once() {
    let mut pair = Pair::new(1, 1);
    paired(&mut pair, 1);
    pair.admit("d1", 0);
    pair.step();
    read_out(&mut pair, "d1");
    pair.cut();
    pair.run(pair.latency * 2);
    assert_eq!(pair.consumers[0].peers_ready(), 0);
    let params = pair.prefill("p2", transfer(2), prompt(2), 40);
    pair.arrive("d2", &params);
    pair.run(ms(100));
    assert!(pair.admit("d2", 0) > 0);
    pair.step();
    read_out(&mut pair, "d2");
    assert_eq!(pair.consumers[0].counts().reconnects, 1);
}
