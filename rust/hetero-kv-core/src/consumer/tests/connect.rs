//! Engines that are paired before any request names them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::super::{
    BACKOFF_MAX, Consumer, ConsumerOutput, PeerAddress, REFUSAL_KEPT, STANDING_MAX,
};
use super::notes;
use crate::ids::{EngineId, Incarnation};
use crate::producer::{ConnectionId, Producer, ProducerOutput};
use crate::step::PeerId;
use crate::testing::{
    NONCE, at, cards, common_fields, heads, identity, lease_times, ms, options, secs,
};
use crate::time::Time;
use crate::wire::WIRE_VERSION;
use crate::wire::message::{Accept, Hello, Message, Reject, RejectCode};

const HOST: &str = "10.0.0.1";
const PORT: u16 = 7000;

fn consumer() -> Consumer {
    Consumer::new(
        identity("decode", 5, 1),
        common_fields(),
        heads(4),
        options(),
    )
}

fn producer(engine: &str, incarnation: u64) -> Producer {
    let us = identity(engine, incarnation, 2);
    Producer::new(us, common_fields(), cards(2), lease_times(), 4)
}

fn address(engine: &str, incarnation: u64) -> PeerAddress {
    PeerAddress {
        host: HOST.into(),
        port: PORT,
        engine: EngineId::new(engine).expect("valid"),
        incarnation: Incarnation(incarnation),
    }
}

fn outputs(consumer: &mut Consumer) -> Vec<ConsumerOutput> {
    std::iter::from_fn(|| consumer.poll_output()).collect()
}

fn only_dial(consumer: &mut Consumer) -> PeerId {
    match outputs(consumer).as_slice() {
        [ConsumerOutput::Dial(peer, to)] => {
            assert_eq!((to.host.as_str(), to.port), (HOST, PORT));
            *peer
        }
        other => panic!("one dial, not {other:?}"),
    }
}

fn only_hello(consumer: &mut Consumer) -> Hello {
    match outputs(consumer).as_slice() {
        [ConsumerOutput::Send(_, Message::Hello(hello))] => (**hello).clone(),
        other => panic!("a greeting, not {other:?}"),
    }
}

/// Carries messages between the two until there are none, as one connection.
fn talk(now: Time, consumer: &mut Consumer, peer: PeerId, holder: &mut Producer, number: u64) {
    let dials = talk_and_dial(now, consumer, peer, holder, number);
    assert_eq!(dials, [], "a dial in the middle");
}

/// The same; what is dialled in consequence.
fn talk_and_dial(
    now: Time,
    consumer: &mut Consumer,
    peer: PeerId,
    holder: &mut Producer,
    number: u64,
) -> Vec<PeerId> {
    let mut dials = Vec::new();
    let connection = ConnectionId(number);
    holder.handle_connected(connection, NONCE);
    consumer.handle_dialed(now, peer, NONCE);
    let mut queue: VecDeque<ConsumerOutput> = outputs(consumer).into();
    while let Some(output) = queue.pop_front() {
        match output {
            ConsumerOutput::Send(_, message) => holder.handle_message(now, connection, message),
            ConsumerOutput::Close(_) => holder.handle_closed(connection),
            ConsumerOutput::Dial(peer, _) => dials.push(peer),
        }
        while let Some(answer) = holder.poll_output() {
            if let ProducerOutput::Send(_, message) = answer {
                consumer.handle_message(now, peer, message);
            }
        }
        queue.extend(outputs(consumer));
    }
    dials
}

#[test]
fn an_address_is_dialled_at_once_and_the_first_request_finds_the_pair_made() {
    let mut d = consumer();
    let mut p = producer("prefill", 3);
    d.keep_connected(at(secs(0)), HOST.into(), PORT);
    let peer = only_dial(&mut d);
    talk(at(secs(1)), &mut d, peer, &mut p, 1);
    assert_eq!(d.peers_ready(), 1);
    assert_eq!(d.counts().dials, 1);
    assert_eq!(d.connect(at(secs(2)), address("prefill", 3)), Ok(peer));
    assert_eq!(outputs(&mut d), []);
    // Nothing to do but heartbeats.
    let next = d.poll_timeout().expect("a heartbeat");
    assert!(next > at(secs(1)) + ms(900), "{next:?}");
}

#[test]
fn failures_are_tried_again_with_growing_pauses_and_noted_once() {
    let mut d = consumer();
    d.keep_connected(at(secs(0)), HOST.into(), PORT);
    let mut now = at(secs(0));
    let mut pauses = Vec::new();
    for _ in 0..12 {
        let peer = only_dial(&mut d);
        d.handle_closed(now, peer, "refused");
        assert_eq!(outputs(&mut d), []);
        let due = d.poll_timeout().expect("another try");
        pauses.push(due.since(now));
        d.handle_timeout(due - ms(1));
        assert_eq!(outputs(&mut d), [], "too early");
        now = due;
        d.handle_timeout(now);
    }
    assert!(pauses.windows(2).all(|two| two[0] <= two[1]), "{pauses:?}");
    assert_eq!(pauses.last(), Some(&BACKOFF_MAX));
    let noted: Vec<String> = d.take_notes().into_iter().map(|note| note.text).collect();
    assert_eq!(noted.len(), 1, "{noted:?}");
    for word in ["connect", "10.0.0.1:7000", "refused"] {
        assert!(noted[0].contains(word), "{noted:?}");
    }
    // Once it is there, all is as if it had always been.
    let peer = only_dial(&mut d);
    talk(now, &mut d, peer, &mut producer("prefill", 3), 1);
    assert_eq!(d.peers_ready(), 1);
}

#[test]
fn a_peer_that_is_lost_is_dialled_again_and_may_be_another_start() {
    let mut d = consumer();
    d.keep_connected(at(secs(0)), HOST.into(), PORT);
    let first = only_dial(&mut d);
    talk(at(secs(1)), &mut d, first, &mut producer("prefill", 3), 1);
    d.handle_closed(at(secs(2)), first, "reset");
    d.handle_timeout(at(secs(2)) + secs(1));
    let scout = only_dial(&mut d);
    assert_ne!(scout, first);
    talk(at(secs(3)), &mut d, scout, &mut producer("prefill", 4), 2);
    assert_eq!(d.peers_ready(), 1);
    assert_eq!(d.connect(at(secs(3)), address("prefill", 4)), Ok(scout));
}

#[test]
fn the_same_start_keeps_its_number_when_it_comes_back() {
    let mut d = consumer();
    let mut p = producer("prefill", 3);
    d.keep_connected(at(secs(0)), HOST.into(), PORT);
    let first = only_dial(&mut d);
    talk(at(secs(1)), &mut d, first, &mut p, 1);
    d.handle_closed(at(secs(2)), first, "reset");
    p.handle_closed(ConnectionId(1));
    d.handle_timeout(at(secs(2)) + secs(1));
    let scout = only_dial(&mut d);
    p.handle_connected(ConnectionId(2), NONCE);
    d.handle_dialed(at(secs(3)), scout, NONCE);
    let hello = only_hello(&mut d);
    assert!(hello.any_engine);
    let accept = Accept {
        version: WIRE_VERSION,
        from: identity("prefill", 3, 2),
        proof: None,
    };
    d.handle_message(at(secs(3)), scout, Message::Accept(accept));
    // The workers know it as `first`, so that one is dialled, and the scout has done its work.
    match outputs(&mut d).as_slice() {
        [
            ConsumerOutput::Close(closed),
            ConsumerOutput::Dial(dialled, to),
        ] => {
            assert_eq!((*closed, *dialled), (scout, first));
            assert_eq!(*to, address("prefill", 3));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_takes_the_scout_over_and_its_engine_has_to_be_the_one() {
    let mut d = consumer();
    d.keep_connected(at(secs(0)), HOST.into(), PORT);
    let scout = only_dial(&mut d);
    assert_eq!(d.connect(at(secs(1)), address("prefill", 3)), Ok(scout));
    assert_eq!(outputs(&mut d), [], "one dial is enough");
    d.handle_dialed(at(secs(2)), scout, NONCE);
    let hello = only_hello(&mut d);
    assert!(!hello.any_engine);
    assert_eq!(hello.expect_engine.as_str(), "prefill");

    // Greeted as a scout already: the answer is compared with what the request names.
    let mut d = consumer();
    d.keep_connected(at(secs(0)), HOST.into(), PORT);
    let scout = only_dial(&mut d);
    d.handle_dialed(at(secs(1)), scout, NONCE);
    assert!(only_hello(&mut d).any_engine);
    assert_eq!(d.connect(at(secs(2)), address("prefill", 3)), Ok(scout));
    let accept = Accept {
        version: WIRE_VERSION,
        from: identity("prefill", 4, 2),
        proof: None,
    };
    d.handle_message(at(secs(3)), scout, Message::Accept(accept));
    assert_eq!(outputs(&mut d), [ConsumerOutput::Close(scout)]);
    assert_eq!(d.peers_ready(), 0);
}

#[test]
fn an_engine_connected_under_another_name_is_left_as_it_is() {
    let mut d = consumer();
    let mut p = producer("prefill", 3);
    let named = PeerAddress {
        host: "prefill.local".into(),
        ..address("prefill", 3)
    };
    let peer = d.connect(at(secs(0)), named).expect("room");
    assert!(matches!(
        outputs(&mut d).as_slice(),
        [ConsumerOutput::Dial(..)]
    ));
    talk(at(secs(1)), &mut d, peer, &mut p, 1);
    d.keep_connected(at(secs(2)), HOST.into(), PORT);
    let scout = only_dial(&mut d);
    p.handle_connected(ConnectionId(2), NONCE);
    d.handle_dialed(at(secs(2)), scout, NONCE);
    let hello = only_hello(&mut d);
    p.handle_message(
        at(secs(2)),
        ConnectionId(2),
        Message::Hello(Box::new(hello)),
    );
    let sent: Vec<_> = std::iter::from_fn(|| p.poll_output()).collect();
    let [
        ProducerOutput::Send(ConnectionId(2), Message::Reject(reject)),
        ProducerOutput::Close(ConnectionId(2)),
    ] = sent.as_slice()
    else {
        panic!("{sent:?}");
    };
    assert_eq!(reject.code, RejectCode::AlreadyConnected);
    assert_eq!(p.counts().rejected_peers, 0);
    d.handle_message(at(secs(2)), scout, Message::Reject(reject.clone()));
    assert_eq!(outputs(&mut d), [ConsumerOutput::Close(scout)]);
    assert_eq!(d.peers_ready(), 1, "the connection in use stands");
    d.handle_timeout(at(secs(2)) + REFUSAL_KEPT - ms(1));
    assert!(
        !outputs(&mut d)
            .iter()
            .any(|o| matches!(o, ConsumerOutput::Dial(..)))
    );
}

#[test]
fn an_engine_does_not_pair_with_itself() {
    let mut d = consumer();
    d.keep_connected(at(secs(0)), HOST.into(), PORT);
    let scout = only_dial(&mut d);
    talk(at(secs(1)), &mut d, scout, &mut producer("decode", 5), 1);
    assert_eq!(d.peers_ready(), 0);
    assert!(notes(&mut d).contains("is this engine itself"));
}

#[test]
fn addresses_are_bounded() {
    let mut d = consumer();
    for port in 0..=STANDING_MAX {
        d.keep_connected(
            at(secs(0)),
            HOST.into(),
            u16::try_from(port).expect("few") + 1,
        );
    }
    assert_eq!(outputs(&mut d).len(), STANDING_MAX);
    assert!(notes(&mut d).contains("one more than 256"));
}

/// Dials within `time` of an address that is kept connected, where `holder` answers each at once and
/// `after` follows.
fn dials_within(
    time: Duration,
    d: &mut Consumer,
    holder: &mut Producer,
    mut after: impl FnMut(&mut Consumer, Time, PeerId),
) -> u64 {
    let (mut now, end) = (at(secs(0)), at(time));
    let mut number = 0;
    let mut latest = BTreeMap::new();
    d.keep_connected(now, HOST.into(), PORT);
    while now < end {
        let mut dialled = Vec::new();
        for output in outputs(d) {
            match output {
                ConsumerOutput::Dial(peer, _) => dialled.push(peer),
                ConsumerOutput::Close(peer) => {
                    if let Some(connection) = latest.remove(&peer) {
                        holder.handle_closed(connection);
                    }
                }
                ConsumerOutput::Send(..) => {}
            }
        }
        while let Some(peer) = dialled.pop() {
            number += 1;
            latest.insert(peer, ConnectionId(number));
            dialled.extend(talk_and_dial(now, d, peer, holder, number));
            after(d, now, peer);
        }
        now = now + ms(1);
        if d.poll_timeout().is_some_and(|due| due <= now) {
            d.handle_timeout(now);
        }
    }
    number
}

#[test]
fn an_engine_that_cannot_be_paired_with_is_asked_no_oftener_than_a_refusal_is_kept() {
    let us = identity("decode", 5, 2);
    let mut d = Consumer::new(us, common_fields(), heads(4), options());
    let them = identity("prefill", 3, 3);
    let mut p = Producer::new(them, common_fields(), cards(3), lease_times(), 4);
    let dials = dials_within(REFUSAL_KEPT * 3, &mut d, &mut p, |_, _, _| {});
    assert_eq!(d.peers_ready(), 0);
    assert!(notes(&mut d).contains("tp_size"));
    assert!((3..=12).contains(&dials), "{dials}");
}

#[test]
fn an_address_whose_connections_break_as_soon_as_they_stand_is_dialled_with_pauses() {
    let mut d = consumer();
    let mut p = producer("prefill", 3);
    let dials = dials_within(secs(10), &mut d, &mut p, |d, now, peer| {
        d.handle_message(now, peer, Message::Bye);
    });
    assert!((4..=100).contains(&dials), "{dials}");
}

/// Named by a request between its greeting and the answer to it.
#[test]
fn a_request_that_takes_over_a_scout_is_served_though_its_engine_is_connected_by_another_name() {
    let mut d = consumer();
    let mut p = producer("prefill", 3);
    let named = PeerAddress {
        host: "prefill.local".into(),
        ..address("prefill", 3)
    };
    let other = d.connect(at(secs(0)), named).expect("room");
    outputs(&mut d);
    talk(at(secs(0)), &mut d, other, &mut p, 1);
    d.keep_connected(at(secs(1)), HOST.into(), PORT);
    let scout = only_dial(&mut d);
    d.handle_dialed(at(secs(1)), scout, NONCE);
    let hello = only_hello(&mut d);
    assert!(hello.any_engine);
    assert_eq!(d.connect(at(secs(1)), address("prefill", 3)), Ok(scout));
    p.handle_connected(ConnectionId(2), NONCE);
    let hello = Message::Hello(Box::new(hello));
    p.handle_message(at(secs(1)), ConnectionId(2), hello);
    while let Some(output) = p.poll_output() {
        if let ProducerOutput::Send(_, message) = output {
            d.handle_message(at(secs(1)), scout, message);
        }
    }
    match outputs(&mut d).as_slice() {
        [
            ConsumerOutput::Close(closed),
            ConsumerOutput::Dial(dialled, to),
        ] => {
            assert_eq!((*closed, *dialled), (scout, scout));
            assert_eq!(*to, address("prefill", 3));
        }
        other => panic!("{other:?}"),
    }
    talk(at(secs(2)), &mut d, scout, &mut p, 3);
    assert_eq!(d.peers_ready(), 2);
    // The same answer to a greeting that names the engine is a refusal like any other.
    d.handle_closed(at(secs(3)), scout, "reset");
    d.connect(at(secs(9)), address("prefill", 3))
        .expect("known");
    outputs(&mut d);
    d.handle_dialed(at(secs(9)), scout, NONCE);
    assert!(!only_hello(&mut d).any_engine);
    let reject = Reject {
        code: RejectCode::AlreadyConnected,
        reason: "again".into(),
        fields: None,
    };
    d.handle_message(at(secs(9)), scout, Message::Reject(Box::new(reject)));
    assert_eq!(outputs(&mut d), [ConsumerOutput::Close(scout)]);
}

/// A firewall has forgotten the connection: this side has found out, the holder has not.
#[test]
fn a_pair_that_the_holder_still_takes_for_connected_is_made_anew() {
    let mut d = consumer();
    let mut p = producer("prefill", 3);
    d.keep_connected(at(secs(0)), HOST.into(), PORT);
    let first = only_dial(&mut d);
    talk(at(secs(0)), &mut d, first, &mut p, 1);
    let mut now = at(secs(0));
    while d.peers_ready() == 1 {
        now = now + ms(100);
        d.handle_timeout(now);
    }
    outputs(&mut d);
    d.handle_timeout(now + ms(250));
    let scout = only_dial(&mut d);
    assert_ne!(scout, first);
    let dials = talk_and_dial(now + ms(250), &mut d, scout, &mut p, 2);
    assert_eq!(dials, [first]);
    talk(now + ms(260), &mut d, first, &mut p, 3);
    assert_eq!(d.peers_ready(), 1);
}
