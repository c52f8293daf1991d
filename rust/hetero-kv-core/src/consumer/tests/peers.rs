//! Heartbeats, silence, back-off, new starts, the table of peers.

use super::super::peer::Peer;
use super::super::{BACKOFF_MAX, ConsumerOutput, PEERS_MAX, PeerAddress, RESUME_MAX};
use super::*;
use crate::ids::Incarnation;
use crate::step::PeerId;
use crate::testing::{
    CONTROL_PORT, Direction, Fate, NONCE, at, common_fields, heads, identity, lease_times, ms,
    options, prompt, secs, transfer,
};
use crate::wire::message::Message;

/// A pair that is connected and idle.
fn idle_pair() -> (Pair, PeerId) {
    let mut pair = Pair::new(1, 1);
    let address = PeerAddress {
        host: "p".into(),
        port: CONTROL_PORT,
        engine: identity("prefill", 1, 1).engine,
        incarnation: Incarnation(1),
    };
    let peer = pair.consumers[0].connect(pair.now, address).expect("room");
    pair.run(ms(20));
    (pair, peer)
}

fn is_ready(pair: &Pair, peer: PeerId) -> bool {
    matches!(
        pair.consumers[0].peers[&peer].state,
        super::super::PeerState::Ready(_)
    )
}

fn silence(pair: &mut Pair) {
    pair.network(|direction, _| match direction {
        Direction::ToConsumer => Fate::Drop,
        Direction::ToProducer => Fate::Deliver,
    });
}

#[test]
fn an_idle_pair_beats_and_stays() {
    let (mut pair, peer) = idle_pair();
    pair.run(secs(600));
    assert!(is_ready(&pair, peer));
    let pings = pair.count_sent(|m| matches!(m, Message::Ping));
    assert!((118..=120).contains(&pings), "{pings}: one per heartbeat");
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Pong)), pings);
}

/// A firewall that forgets a connection drops its packets without a word.
#[test]
fn after_ten_idle_minutes_on_a_connection_cut_silently_a_request_succeeds_with_one_reconnect() {
    let (mut pair, peer) = idle_pair();
    serve(&mut pair, 1);
    pair.network(|_, _| Fate::Drop);
    pair.run(secs(600));
    assert!(!is_ready(&pair, peer), "found out while idle");
    pair.heal();
    assert_eq!(
        pair.consumers[0].counts().reconnects,
        0,
        "nobody dials for nothing"
    );
    serve(&mut pair, 2);
    assert_eq!(pair.consumers[0].counts().reconnects, 1);
}

/// One request from prefill to release.
fn serve(pair: &mut Pair, number: u32) {
    let (prefilled, decoded) = (format!("p{number}"), format!("d{number}"));
    let params = pair.prefill(&prefilled, transfer(number as u8), prompt(number), 40);
    pair.arrive(&decoded, &params);
    pair.run(ms(20));
    assert!(pair.admit(&decoded, 0) > 0);
    pair.step();
    pair.report(&decoded, false);
    pair.run(secs(1));
    assert_eq!(pair.consumers[0].counts().failures.len(), 0);
    pair.step_producers();
    assert_eq!(pair.held(), 0);
}

#[test]
fn silence_alone_is_a_loss_only_after_its_time() {
    let (mut pair, peer) = idle_pair();
    silence(&mut pair);
    let heard_at = pair.consumers[0].peers[&peer].heard_at;
    pair.run(ms(14_980));
    assert!(pair.now < heard_at + secs(15));
    assert!(is_ready(&pair, peer));
    pair.run(ms(30));
    assert!(!is_ready(&pair, peer));
    assert!(notes(&mut pair.consumers[0]).contains("silent for"));
}

#[test]
fn silence_set_shorter_than_three_heartbeats_is_taken_for_three() {
    let options = ConsumerOptions {
        peer_silence: secs(1),
        ..options()
    };
    let mut pair = Pair::with(1, 1, lease_times(), options);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    silence(&mut pair);
    pair.run(ms(14_900));
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Ping)), 2);
    assert_eq!(pair.consumers[0].peers_ready(), 1);
    pair.run(ms(200));
    assert_eq!(pair.consumers[0].peers_ready(), 0);
    // Dialled again, and not answered either.
    pair.run(RESUME_MAX);
    assert_failed(&pair.consumers[0], FailureReason::PeerLost, "");
}

/// Three heartbeats of silence, or the time set where that is longer, and two after the first that went
/// unanswered; never before one has.
#[test]
fn a_loss_is_due_by_the_later_of_silence_and_question() {
    let due = |silence, asked_after: Option<u64>| {
        let heard_at = at(secs(100));
        let mut peer = Peer::new(address(1), heard_at);
        peer.doubted_at = asked_after.map(|seconds| heard_at + secs(seconds));
        let lost_due = peer.lost_due(&ConsumerOptions {
            heartbeat: secs(5),
            peer_silence: secs(silence),
            ..options()
        });
        lost_due.map(|due| due.since(heard_at))
    };
    assert_eq!(due(60, None), None);
    assert_eq!(due(60, Some(5)), Some(secs(60)));
    assert_eq!(due(1, Some(1)), Some(secs(15)));
    assert_eq!(due(1, Some(5)), Some(secs(15)));
    assert_eq!(due(60, Some(90)), Some(secs(100)));
}

#[test]
fn a_pause_of_this_process_is_not_the_peers_silence() {
    let (mut pair, peer) = idle_pair();
    // Stopped for a minute; the timers run before the sockets are read.
    pair.freeze(secs(60));
    assert!(is_ready(&pair, peer));
    pair.run(secs(60));
    assert!(is_ready(&pair, peer));
    assert_eq!(pair.consumers[0].counts().reconnects, 0);
    // And when it is dead all the same, that is found out.
    silence(&mut pair);
    pair.freeze(secs(60));
    pair.run(ms(9_900));
    assert!(is_ready(&pair, peer));
    pair.run(ms(200));
    assert!(!is_ready(&pair, peer));
}

#[test]
fn attempts_are_spaced_by_a_doubling_back_off() {
    let mut pair = Pair::new(1, 1);
    pair.listening.clear();
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    // Within the back-off a request fails at once and nobody dials; after it, one dial.
    let mut pauses = Vec::new();
    for attempt in 0..8 {
        let request = format!("d{attempt}");
        pair.arrive(&request, &params);
        pair.run(ms(5));
        pair.finish(&request);
        let down_at = pair.now;
        loop {
            pair.run(ms(50));
            assert!(pair.now < down_at + secs(10));
            let peer = pair.consumers[0].peers.values().next().expect("a peer");
            if let super::super::PeerState::Down { until, .. } = &peer.state
                && *until > pair.now
            {
                continue;
            }
            pauses.push(pair.now.since(down_at));
            break;
        }
    }
    let floor: Vec<u64> = vec![250, 500, 1000, 2000, 4000, 5000, 5000, 5000];
    for (pause, floor) in pauses.iter().zip(floor) {
        let floor = ms(floor);
        assert!(
            *pause + ms(10) >= floor && *pause <= floor + ms(60),
            "{pause:?} for {floor:?}"
        );
    }
    assert_eq!(BACKOFF_MAX, secs(5));
}

#[test]
fn within_the_back_off_requests_fail_without_a_dial() {
    let mut pair = Pair::new(1, 1);
    pair.listening.clear();
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(10));
    pair.listening.insert(CONTROL_PORT, 0);
    pair.finish("d1");
    pair.run(ms(150));
    pair.arrive("d2", &params);
    pair.run(ms(20));
    assert!(pair.sent.is_empty());
    pair.finish("d2");
    pair.run(ms(150));
    // A success ends the row of failures.
    pair.arrive("d3", &params);
    pair.run(ms(20));
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Granted(_))), 1);
    assert_eq!(
        pair.consumers[0]
            .peers
            .values()
            .next()
            .expect("a peer")
            .failures,
        0
    );
}

#[test]
fn a_new_start_at_the_same_address_works_at_once_and_replaces_the_old() {
    let mut pair = Pair::new(1, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    pair.step();
    // The machine was reset: no goodbye, no reset connection, and a new engine under the same id.
    let new = pair.add_producer(
        identity("prefill", 2, 1),
        common_fields(),
        lease_times(),
        CONTROL_PORT,
    );
    let again = pair.prefill_at(new, CONTROL_PORT, "p2", transfer(2), prompt(2), 40);
    pair.arrive("d2", &again);
    pair.run(ms(20));
    pair.admit("d2", 0);
    pair.step();
    assert!(pair.workers[0].job("d2").load.is_some());
    let cancel = pair.workers[0]
        .job("d1")
        .cancel
        .clone()
        .expect("the old start is gone");
    assert_eq!(cancel.reason, FailureReason::PeerLost);
    assert!(
        cancel.text.contains("another start lives at p:4711"),
        "{cancel}"
    );
    pair.report("d1", true);
    pair.report("d2", false);
    pair.finish("d1");
    pair.finish("d2");
    pair.run(secs(60));
    assert_nothing_left(&mut pair);
}

#[test]
fn params_of_a_start_that_is_gone_do_not_disturb_the_new_one() {
    let mut pair = Pair::new(1, 1);
    let stale = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.kill_producer(0);
    let new = pair.add_producer(
        identity("prefill", 2, 1),
        common_fields(),
        lease_times(),
        CONTROL_PORT,
    );
    let fresh = pair.prefill_at(new, CONTROL_PORT, "p2", transfer(2), prompt(2), 40);
    pair.arrive("d2", &fresh);
    pair.run(ms(20));
    pair.arrive("d1", &stale);
    pair.run(ms(20));
    assert_failed(
        &pair.consumers[0],
        FailureReason::PairRefused,
        "remote_incarnation",
    );
    pair.admit("d2", 0);
    pair.step();
    assert!(pair.workers[0].job("d2").load.is_some());
    pair.run(secs(1));
    pair.step();
    assert!(pair.workers[0].job("d2").cancel.is_none());
}

#[test]
fn a_dial_that_comes_through_after_it_was_given_up_is_closed() {
    let mut consumer = Consumer::new(
        identity("decode", 1, 1),
        common_fields(),
        heads(4),
        options(),
    );
    let peer = consumer.connect(at(secs(0)), address(1)).expect("room");
    consumer.handle_timeout(at(secs(10)));
    while consumer.poll_output().is_some() {}
    consumer.handle_dialed(at(secs(11)), peer, NONCE);
    assert_eq!(consumer.poll_output(), Some(ConsumerOutput::Close(peer)));
    assert_eq!(consumer.poll_output(), None, "no greeting");
    assert_eq!(consumer.poll_timeout(), None);
    // Nor does a message that was still in the socket matter.
    consumer.handle_message(at(secs(11)), peer, Message::Ping);
    assert_eq!(consumer.poll_output(), None);
}

fn address(number: usize) -> PeerAddress {
    PeerAddress {
        host: format!("host{number}"),
        port: 1,
        engine: identity("prefill", 1, 1).engine,
        incarnation: Incarnation(number as u64),
    }
}

#[test]
fn a_full_table_evicts_the_longest_unused_and_closes_it() {
    let mut consumer = Consumer::new(
        identity("decode", 1, 1),
        common_fields(),
        heads(4),
        options(),
    );
    for number in 0..PEERS_MAX {
        let peer = consumer
            .connect(at(ms(number as u64)), address(number))
            .expect("room");
        consumer.handle_dialed(at(ms(number as u64)), peer, NONCE);
    }
    // Number 0 is used once more, so number 1 is the oldest.
    consumer.connect(at(secs(5)), address(0)).expect("known");
    while consumer.poll_output().is_some() {}
    consumer
        .connect(at(secs(6)), address(PEERS_MAX))
        .expect("room is made");
    let outputs: Vec<_> = std::iter::from_fn(|| consumer.poll_output()).collect();
    assert_eq!(
        outputs,
        [
            ConsumerOutput::Close(PeerId(1)),
            ConsumerOutput::Dial(PeerId(PEERS_MAX as u64), address(PEERS_MAX)),
        ]
    );
    assert_eq!(consumer.peers.len(), PEERS_MAX);
    assert_eq!(consumer.by_address.len(), PEERS_MAX);
    // A dial of the evicted one that comes through late is closed.
    consumer.handle_dialed(at(secs(6)), PeerId(1), NONCE);
    assert_eq!(
        consumer.poll_output(),
        Some(ConsumerOutput::Close(PeerId(1)))
    );
}

#[test]
fn when_every_peer_is_busy_a_new_one_is_refused() {
    let mut pair = Pair::new(1, 1);
    pair.dials_hang = true;
    let mut params = pair.prefill("p1", transfer(1), prompt(1), 40);
    for number in 0..PEERS_MAX {
        params.transfer_id.0[..8].copy_from_slice(&(number as u64).to_le_bytes());
        params.port = 1 + u16::try_from(number).expect("small");
        pair.consumers[0].handle_new_request(
            pair.now,
            &format!("d{number}"),
            Ok(crate::wire::params::TransferParams::Decode(Box::new(
                params.clone(),
            ))),
            prompt(1),
            40,
        );
    }
    params.transfer_id = transfer(0xee);
    params.port = 9999;
    pair.arrive("late", &params);
    assert_failed(&pair.consumers[0], FailureReason::Unreachable, "");
    pair.admit("late", 0);
    pair.step();
    let (_, failure) = pair.workers[0].job("late").fail.clone().expect("a failure");
    assert!(
        failure.text.contains("1024 prefill engines are in use"),
        "{failure}"
    );
    pair.report("late", true);
    pair.finish("late");
    for number in 0..PEERS_MAX {
        pair.consumers[0].handle_finished(pair.now, &format!("d{number}"));
    }
    pair.run(secs(20));
    assert_eq!(pair.consumers[0].open(), (0, 0));
}
