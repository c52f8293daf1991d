//! Pairs that are refused, and how long that is kept.

use super::super::peer::{check_layout, refusal, source_block_tokens};
use super::super::{PeerState, REFUSAL_KEPT};
use super::*;
use crate::failure::Failure;
use crate::ids::{Incarnation, PpRank};
use crate::layout::{LayerCache, RankCache};
use crate::producer::Producer;
use crate::testing::{
    CONTROL_PORT, NONCE, at, card, cards, fields, heads, identity, lease_times, ms, options,
    prompt, secs, transfer,
};
use crate::wire::Kind;
use crate::wire::card::WorkerCard;
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
    consumer.handle_dialed(now, peer, NONCE);
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
    Message::Accept(crate::wire::message::Accept {
        version: 1,
        from,
        proof: None,
    })
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
        (
            Message::Accept(crate::wire::message::Accept {
                version: 2,
                from: ours(),
                proof: None,
            }),
            None,
            "wire_version",
        ),
        (accept(ours()), layout(ours(), 1), "workers"),
        (accept(ours()), layout(ours(), 0), "workers"),
        (accept(staged.clone()), layout(staged, 2), "workers"),
        (
            accept(stages_of(0)),
            Some(Message::Layout(Box::new(Layout {
                from: stages_of(0),
                workers: Vec::new(),
            }))),
            "pp_size",
        ),
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

fn stages_of(pp_size: u32) -> EngineIdentity {
    EngineIdentity {
        pp_size,
        ..identity("prefill", 1, 2)
    }
}

/// A card at a place in the pipeline that holds the layers of these numbers.
fn staged_card((pp, tp): (u32, u32), layers: &[u32]) -> WorkerCard {
    let plain = card(tp, 2);
    let held: Vec<LayerCache> = layers
        .iter()
        .map(|number| LayerCache {
            name: format!("model.layers.{number}.self_attn.attn"),
            ..plain.cache.layers()[0].clone()
        })
        .collect();
    let regions = plain.cache.regions().to_vec();
    WorkerCard {
        pp_rank: PpRank(pp),
        cache: RankCache::new(64, 2, regions, held).expect("a cache"),
        ..plain
    }
}

#[test]
fn stages_are_taken_when_each_layer_is_in_one_and_on_all_its_ranks() {
    let check = |cards: Vec<WorkerCard>| {
        let layout = Layout {
            from: stages_of(2),
            workers: cards,
        };
        let ours = identity("decode", 1, 1);
        check_layout(&ours, (heads(4), 16), &layout.from, &layout)
    };
    let whole = || {
        vec![
            staged_card((0, 0), &[0, 1]),
            staged_card((0, 1), &[0, 1]),
            staged_card((1, 0), &[2]),
            staged_card((1, 1), &[2]),
        ]
    };
    assert_eq!(check(whole()), Ok(()));
    let mut any_order = whole();
    any_order.reverse();
    assert_eq!(check(any_order), Ok(()));

    let broken = |field: &str, words: &[&str], change: fn(&mut Vec<WorkerCard>)| {
        let mut cards = whole();
        change(&mut cards);
        let failure = check(cards).expect_err(field);
        assert_eq!(failure.field, field, "{failure}");
        for word in words {
            assert!(failure.text.contains(word), "{word:?} in {failure}");
        }
    };
    broken(
        "workers",
        &["tp_size 2 and pp_size 2", "3 ranks"],
        |cards| {
            cards.pop();
        },
    );
    broken(
        "workers",
        &["4 ranks: (pp 0, tp 0), (pp 0, tp 1), (pp 1, tp 0), (pp 1, tp 0)"],
        |cards| {
            cards[3] = cards[2].clone();
        },
    );
    // As many places as are wanted, counted in the other order.
    broken("workers", &["(pp 0, tp 3)"], |cards| {
        cards[3] = staged_card((0, 3), &[2]);
    });
    broken(
        "layers",
        &["model.layers.1", "in two pipeline stages", "0 and 1"],
        |cards| {
            cards[2] = staged_card((1, 0), &[1, 2]);
            cards[3] = staged_card((1, 1), &[1, 2]);
        },
    );
    broken(
        "layers",
        &["model.layers.1", "(pp 0, tp 0)", "(pp 0, tp 1)"],
        |cards| {
            cards[1] = staged_card((0, 1), &[0]);
        },
    );
}

/// A card whose blocks can be cut by token.
fn sized_card(tp: u32, block_tokens: u32, group: u32) -> WorkerCard {
    let plain = card(tp, 2);
    let mut layer = plain.cache.layers()[0].clone();
    layer.parts[0].block_tokens = block_tokens;
    layer.group = group;
    let regions = plain.cache.regions().to_vec();
    WorkerCard {
        cache: RankCache::new(64, 2, regions, vec![layer]).expect("a cache"),
        ..plain
    }
}

#[test]
fn block_sizes_pair_when_one_divides_the_other_and_all_ranks_have_the_same() {
    let check = |ours: u32, cards: [WorkerCard; 2]| {
        let layout = Layout {
            from: identity("prefill", 1, 2),
            workers: cards.to_vec(),
        };
        let us = identity("decode", 1, 1);
        let checked = check_layout(&us, (heads(4), ours), &layout.from, &layout);
        checked.map(|()| source_block_tokens(&layout, ours))
    };
    let both = |tokens| [sized_card(0, tokens, 0), sized_card(1, tokens, 0)];
    for (theirs, ours) in [(16, 16), (16, 32), (32, 16), (16, 64), (64, 16)] {
        assert_eq!(check(ours, both(theirs)), Ok(theirs));
    }
    // Pages that cannot be cut say nothing of their size; their format's name does.
    assert_eq!(check(32, both(0)), Ok(32));
    let refused = |ours, cards, field: &str, words: &[&str]| {
        let failure = check(ours, cards).expect_err(field);
        assert_eq!(failure.field, field, "{failure}");
        for word in words {
            assert!(failure.text.contains(word), "{word:?} in {failure}");
        }
    };
    refused(24, both(16), "block_size", &["16", "24", "one must divide"]);
    let unlike = [sized_card(0, 16, 0), sized_card(1, 32, 0)];
    refused(32, unlike, "block_size", &["blocks of 32", "others of 16"]);
    let mixed = [sized_card(0, 16, 0), sized_card(1, 0, 0)];
    refused(32, mixed, "block_size", &["blocks of 32", "others of 16"]);
    let grouped = [sized_card(0, 16, 0), sized_card(1, 16, 1)];
    refused(16, grouped, "group_kinds", &["model.layers.0", "group 1"]);
}

#[test]
fn a_list_shows_only_the_items_that_differ() {
    let ours = fields(&[("kv_scales", "a=1;b=2;c=3"), ("dtype", "x")]);
    let shown = |theirs: &str| {
        let reject = Reject {
            code: RejectCode::Incompatible,
            reason: String::new(),
            fields: Some(fields(&[("kv_scales", theirs), ("dtype", "x")])),
        };
        refusal(&ours, &reject).text
    };
    let text = shown("a=1;b=9;c=3");
    assert!(
        text.ends_with("kv_scales: prefill has b=9, decode has b=2"),
        "{text}"
    );
    // Where nothing is left of one side the whole values tell more.
    assert!(shown("a=1;b=2").ends_with("prefill has a=1;b=2, decode has a=1;b=2;c=3"));
    assert!(shown("c=3;b=2;a=1").ends_with("prefill has c=3;b=2;a=1, decode has a=1;b=2;c=3"));
    assert!(shown("none").ends_with("prefill has none, decode has a=1;b=2;c=3"));
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
        (RejectCode::AlreadyConnected, ""),
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
    producer.handle_connected(connection, NONCE);
    let hello = crate::wire::message::Hello {
        versions: (2, 9),
        from: identity("decode", 100, 1),
        expect_engine: identity("prefill", 1, 1).engine,
        expect_incarnation: Incarnation(1),
        any_engine: false,
        compat_digest: fields(&[]).digest().to_vec(),
        nonce: None,
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
