//! Pairs that are refused, and how long that is kept.

use super::super::{PeerState, REFUSAL_KEPT};
use super::*;
use crate::failure::Failure;
use crate::ids::Incarnation;
use crate::producer::Producer;
use crate::testing::{
    CONTROL_PORT, at, cards, fields, heads, identity, lease_times, ms, options, prompt, secs,
    transfer,
};
use crate::wire::Kind;
use crate::wire::message::{EngineIdentity, Layout, Message, Reject, RejectCode};
use crate::wire::params::RemotePrefill;

/// A request that meets a refusal: what its workers report.
fn refused(pair: &mut Pair, params: &RemotePrefill) -> Failure {
    pair.arrive("d1", params);
    pair.admit("d1", 0);
    pair.run(ms(50));
    pair.step();
    let (_, failure) = pair.workers[0].job("d1").fail.clone().expect("a failure");
    assert_eq!(failure.reason, FailureReason::PairRefused);
    assert_failed(
        &pair.consumers[0],
        FailureReason::PairRefused,
        &failure.field,
    );
    pair.report("d1", true);
    pair.finish("d1");
    pair.run(ms(500));
    assert_eq!(pair.consumers[0].open(), (0, 0));
    failure
}

/// A pair whose prefill engine is `identity` with `fields`.
fn other(identity: EngineIdentity, pairs: &[(&str, &str)], tp_d: u32) -> Pair {
    let mut pair = Pair::new(1, tp_d);
    pair.add_producer(identity, fields(pairs), lease_times(), CONTROL_PORT);
    pair
}

#[test]
fn unlike_caches_name_each_field_and_both_values() {
    let pairs = [("dtype", "bfloat16"), ("model", "tiny"), ("zeal", "1")];
    let mut pair = other(identity("other", 2, 1), &pairs, 1);
    let params = pair.prefill_at(1, CONTROL_PORT, "p1", transfer(1), prompt(1), 40);
    let failure = refused(&mut pair, &params);
    assert_eq!(failure.field, "dtype");
    for words in [
        "dtype: prefill has bfloat16, decode has float32",
        "zeal: prefill has 1, decode has nothing",
    ] {
        assert!(failure.text.contains(words), "{words:?} in {failure}");
    }
    assert!(!failure.text.contains("model"), "{failure}");
    assert!(notes(&mut pair.consumers[0]).contains("dtype: prefill has bfloat16"));
}

#[test]
fn another_engine_at_the_address_is_refused_by_name() {
    let mut pair = other(identity("other", 1, 1), &[], 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    let failure = refused(&mut pair, &params);
    assert_eq!(failure.field, "remote_engine_id");
    assert!(
        failure
            .text
            .contains("other lives here, the peer looks for prefill"),
        "{failure}"
    );
}

#[test]
fn another_start_at_the_address_is_refused_by_name() {
    let mut pair = other(identity("prefill", 2, 1), &[], 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    let failure = refused(&mut pair, &params);
    assert_eq!(failure.field, "remote_incarnation");
    assert!(
        failure.text.contains("0000000000000002 lives here"),
        "{failure}"
    );
}

#[test]
fn sizes_that_do_not_divide_are_refused_with_both() {
    let mut pair = Pair::new(2, 3);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    let failure = refused(&mut pair, &params);
    assert_eq!(failure.field, "tp_size");
    assert!(failure.text.contains("producer 2, consumer 3"), "{failure}");
}

#[test]
fn a_refused_pair_is_not_asked_again_for_a_while() {
    let mut pair = other(identity("other", 2, 1), &[("dtype", "bfloat16")], 1);
    let params = pair.prefill_at(1, CONTROL_PORT, "p1", transfer(1), prompt(1), 40);
    refused(&mut pair, &params);
    let hellos = |pair: &Pair| pair.count_sent(|m| matches!(m, Message::Hello(_)));
    assert_eq!(hellos(&pair), 1);
    pair.arrive("d2", &params);
    pair.run(REFUSAL_KEPT - secs(1));
    assert_eq!(hellos(&pair), 1);
    pair.admit("d2", 0);
    pair.step();
    let (_, failure) = pair.workers[0].job("d2").fail.clone().expect("a failure");
    assert_eq!(failure.field, "dtype", "the refusal is remembered whole");
    pair.report("d2", true);
    pair.finish("d2");
    pair.run(secs(1));
    pair.arrive("d3", &params);
    pair.run(ms(20));
    assert_eq!(hellos(&pair), 2);
}

/// The refusal that a consumer makes of a handshake answered with `accept`, then `layout`.
fn handshake(accept: Message, layout: Option<Message>) -> Failure {
    use crate::consumer::{ConsumerOutput, PeerAddress};
    let mut consumer = Consumer::new(identity("decode", 100, 2), fields(&[]), heads(4), options());
    let address = PeerAddress {
        host: "p".into(),
        port: CONTROL_PORT,
        engine: identity("prefill", 1, 2).engine,
        incarnation: Incarnation(1),
    };
    let now = at(secs(1));
    let peer = consumer.connect(now, address).expect("room for one");
    consumer.handle_dialed(now, peer);
    consumer.handle_message(now, peer, accept);
    if let Some(layout) = layout {
        consumer.handle_message(now, peer, layout);
    }
    let outputs: Vec<_> = std::iter::from_fn(|| consumer.poll_output()).collect();
    assert_eq!(
        outputs.last(),
        Some(&ConsumerOutput::Close(peer)),
        "{outputs:?}"
    );
    let PeerState::Down { why, .. } = &consumer.peers[&peer].state else {
        panic!("{:?}", consumer.peers[&peer].state)
    };
    why.clone()
}

fn accept(from: EngineIdentity) -> Message {
    Message::Accept(crate::wire::message::Accept { version: 1, from })
}

fn layout(from: EngineIdentity, ranks: u32) -> Option<Message> {
    let mut workers = cards(2);
    workers.truncate(ranks as usize);
    Some(Message::Layout(Box::new(Layout { from, workers })))
}

#[test]
fn an_engine_that_describes_itself_badly_is_refused() {
    let ours = || identity("prefill", 1, 2);
    let staged = EngineIdentity {
        pp_size: 2,
        dp_size: 1,
        ..ours()
    };
    let cases = [
        (accept(identity("else", 1, 2)), None, "remote_engine_id"),
        (accept(identity("prefill", 5, 2)), None, "remote_engine_id"),
        (
            accept(ours()),
            layout(identity("prefill", 1, 4), 2),
            "identity",
        ),
        (accept(ours()), layout(ours(), 1), "workers"),
        (accept(ours()), layout(ours(), 0), "workers"),
        (accept(staged.clone()), layout(staged, 2), "pp_size"),
        (
            accept(identity("prefill", 1, 3)),
            layout(identity("prefill", 1, 3), 2),
            "tp_size",
        ),
        (
            accept(identity("prefill", 1, 0)),
            layout(identity("prefill", 1, 0), 0),
            "tp_size",
        ),
        (
            accept(identity("prefill", 1, u32::MAX)),
            layout(identity("prefill", 1, u32::MAX), 2),
            "tp_size",
        ),
        (layout(ours(), 2).expect("a layout"), None, ""),
        (
            Message::Claim(crate::wire::message::Claim {
                transfer_id: transfer(1),
                epoch: 1,
                prompt_digest: prompt(1),
                question: 1,
            }),
            None,
            "",
        ),
    ];
    for (first, second, field) in cases {
        let shown = format!("{first:?} {second:?}");
        let failure = handshake(first, second);
        assert_eq!(failure.reason, FailureReason::PairRefused, "{shown}");
        assert_eq!(failure.field, field, "{shown}");
    }
}

#[test]
fn a_refusal_is_cut_to_a_length_that_a_log_bears() {
    let reject = |code, reason: String, fields| {
        Message::Reject(Box::new(Reject {
            code,
            reason,
            fields,
        }))
    };
    let long = "x".repeat(1 << 20);
    let failure = handshake(reject(RejectCode::Unknown, long, None), None);
    assert!(failure.text.len() < 3000, "{}", failure.text.len());
    let mut many = crate::layout::CompatFields::new();
    for number in 0..60 {
        many.insert(&format!("f{number}"), "y".repeat(4000))
            .expect("within the limits");
    }
    let failure = handshake(
        reject(RejectCode::Incompatible, String::new(), Some(many)),
        None,
    );
    assert_eq!(failure.field, "f0");
    assert!(failure.text.len() < 3000, "{}", failure.text.len());
}

#[test]
fn codes_name_their_fields() {
    for (code, field) in [
        (RejectCode::Version, "wire_version"),
        (RejectCode::WrongEngine, "remote_engine_id"),
        (RejectCode::WrongIncarnation, "remote_incarnation"),
        (RejectCode::NotProducer, "kv_role"),
        (RejectCode::Incompatible, ""),
        (RejectCode::TooManyPeers, ""),
        (RejectCode::Protocol, ""),
        (RejectCode::Unknown, ""),
    ] {
        let reject = Message::Reject(Box::new(Reject {
            code,
            reason: "because".into(),
            fields: None,
        }));
        let failure = handshake(reject, None);
        assert_eq!(failure.field, field);
        assert!(failure.text.contains("because"));
    }
}

#[test]
fn a_handshake_that_hangs_is_given_up_in_time() {
    let mut pair = Pair::new(1, 1);
    pair.drop_all(Kind::Accept);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.admit("d1", 0);
    pair.run(ms(9_990));
    pair.step();
    assert!(!pair.workers[0].has("d1"));
    pair.run(ms(20));
    pair.step();
    assert!(pair.workers[0].job("d1").fail.is_some());
}

#[test]
fn requests_at_once_share_one_handshake() {
    let mut pair = Pair::new(1, 1);
    for n in 1..=8 {
        let params = pair.prefill(&format!("p{n}"), transfer(n), prompt(n.into()), 40);
        pair.arrive(&format!("d{n}"), &params);
    }
    pair.run(ms(20));
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Hello(_))), 1);
    assert_eq!(pair.count_sent(|m| matches!(m, Message::Granted(_))), 8);
}

#[test]
fn a_producer_of_another_version_is_refused_by_both_numbers() {
    // This build's consumer speaks one version; a later producer says what it speaks.
    let mut producer = Producer::new(
        identity("prefill", 1, 1),
        fields(&[]),
        cards(1),
        lease_times(),
        1,
    );
    let connection = crate::producer::ConnectionId(1);
    producer.handle_connected(connection);
    let hello = crate::wire::message::Hello {
        versions: (2, 9),
        from: identity("decode", 100, 1),
        expect_engine: identity("prefill", 1, 1).engine,
        expect_incarnation: Incarnation(1),
        compat_digest: fields(&[]).digest().to_vec(),
    };
    producer.handle_message(at(secs(0)), connection, Message::Hello(Box::new(hello)));
    let Some(crate::producer::ProducerOutput::Send(_, answer)) = producer.poll_output() else {
        panic!("no answer")
    };
    let failure = handshake(answer, None);
    assert_eq!(failure.field, "wire_version");
    assert!(
        failure.text.contains("speaks 1, the peer speaks 2 to 9"),
        "{failure}"
    );
}
