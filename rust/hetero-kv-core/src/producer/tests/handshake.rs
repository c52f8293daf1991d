//! Who is let in.

use super::*;
use crate::testing::fields;
use crate::wire::{FrameDecoder, Kind, encode};

type Change = fn(&mut Hello);

fn refused(change: impl FnOnce(&mut Hello)) -> (Reject, Producer) {
    let mut p = producer();
    let mut hello = hello("decode", 100, 1);
    change(&mut hello);
    p.handle_connected(D, NONCE);
    p.handle_message(at(secs(0)), D, Message::Hello(Box::new(hello)));
    let outputs = drain(&mut p);
    let [
        ProducerOutput::Send(D, Message::Reject(reject)),
        ProducerOutput::Close(D),
    ] = outputs.as_slice()
    else {
        panic!("{outputs:?}")
    };
    ((**reject).clone(), p)
}

#[test]
fn each_refusal_names_what_differs_and_both_values() {
    let cases: [(Change, RejectCode, &[&str]); 5] = [
        (
            |h| h.versions = (2, 3),
            RejectCode::Version,
            &["speaks 1,", "2 to 3"],
        ),
        (
            |h| h.expect_engine = EngineId::new("elsewhere").expect("valid"),
            RejectCode::WrongEngine,
            &["prefill lives here", "elsewhere"],
        ),
        (
            |h| h.expect_incarnation = Incarnation(9),
            RejectCode::WrongIncarnation,
            &["0000000000000001", "0000000000000009", "restarted"],
        ),
        (
            |h| h.from.tp_size = 0,
            RejectCode::Protocol,
            &["tp_size", "0"],
        ),
        (
            |h| h.from.pp_size = 1 << 20,
            RejectCode::Protocol,
            &["pp_size", "1048576"],
        ),
    ];
    for (change, code, words) in cases {
        let (reject, p) = refused(change);
        assert_eq!(reject.code, code);
        for word in words {
            assert!(
                reject.reason.contains(word),
                "{word:?} in {:?}",
                reject.reason
            );
        }
        assert_eq!(reject.fields, None);
        assert_eq!(p.counts().rejected_peers, 1);
    }
}

#[test]
fn unlike_caches_are_refused_with_our_fields() {
    let (reject, p) = refused(|h| {
        h.compat_digest = fields(&[("dtype", "bfloat16"), ("model", "tiny")])
            .digest()
            .to_vec();
    });
    assert_eq!(reject.code, RejectCode::Incompatible);
    assert_eq!(p.counts().rejected_peers, 1);
    assert_eq!(reject.fields, Some(common_fields()));
    // A digest of another length is no way around it.
    let (reject, _) = refused(|h| h.compat_digest.truncate(16));
    assert_eq!(reject.code, RejectCode::Incompatible);
}

#[test]
fn a_dialer_with_a_range_of_versions_is_taken_when_ours_is_in_it() {
    let mut p = producer();
    p.handle_connected(D, NONCE);
    let mut hello = hello("decode", 100, 1);
    hello.versions = (0, 7);
    p.handle_message(at(secs(0)), D, Message::Hello(Box::new(hello)));
    let outputs = drain(&mut p);
    let [ProducerOutput::Send(D, Message::Accept(accept))] = outputs.as_slice() else {
        panic!("{outputs:?}")
    };
    assert_eq!(accept.version, WIRE_VERSION);
}

/// A message as a build of the next version writes it to one of this: in this version's frame, with
/// whatever fields it has learned since.
#[derive(serde::Serialize)]
struct Later<'a, M> {
    #[serde(flatten)]
    message: &'a M,
    learned_since: Vec<(&'static str, u64)>,
}

fn later<M: serde::Serialize>(kind: Kind, message: &M) -> Message {
    let later = Later {
        message,
        learned_since: vec![("a", 1), ("b", 2)],
    };
    let mut decoder = FrameDecoder::new();
    decoder.push(&encode(kind, &later).expect("small"));
    let (kind, payload) = decoder.next_frame().expect("a frame").expect("whole");
    Message::from_frame(kind, &payload).expect("read as this version's")
}

#[test]
fn a_build_of_the_next_version_is_served_in_this_one() {
    let mut p = producer();
    let lease = finish(&mut p, at(secs(0)), 1);
    p.handle_connected(D, NONCE);
    let hello = Hello {
        versions: (WIRE_VERSION, WIRE_VERSION + 1),
        ..hello("decode", 100, 1)
    };
    p.handle_message(at(secs(0)), D, later(Kind::Hello, &hello));
    let outputs = drain(&mut p);
    let [ProducerOutput::Send(D, Message::Accept(accept))] = outputs.as_slice() else {
        panic!("{outputs:?}")
    };
    assert_eq!(accept.version, WIRE_VERSION, "the one that both speak");
    let layout = Layout {
        from: identity("decode", 100, 1),
        workers: Vec::new(),
    };
    p.handle_message(at(secs(0)), D, later(Kind::Layout, &layout));
    let claim = Claim {
        transfer_id: transfer(1),
        epoch: lease.epoch.0,
        prompt_digest: prompt(1),
        question: 5,
    };
    p.handle_message(at(secs(0)), D, later(Kind::Claim, &claim));
    let ack = Ack {
        transfer_id: transfer(1),
        ranks: vec![(crate::ids::TpRank(0), crate::ids::PpRank(0))],
        number: Some(6),
    };
    p.handle_message(at(secs(1)), D, later(Kind::Ack, &ack));
    let outputs = drain(&mut p);
    assert!(
        matches!(
            outputs.as_slice(),
            [
                ProducerOutput::Send(D, Message::Layout(_)),
                ProducerOutput::Send(D, Message::Granted(_)),
            ]
        ),
        "{outputs:?}"
    );
    assert_eq!(p.counts().read_out, 1);
}

#[test]
fn a_build_without_this_version_is_told_both() {
    for versions in [(WIRE_VERSION + 1, WIRE_VERSION + 2), (0, WIRE_VERSION - 1)] {
        let (reject, _) = refused(|hello| hello.versions = versions);
        assert_eq!(reject.code, RejectCode::Version);
        let (lowest, highest) = versions;
        let words = format!("speaks {WIRE_VERSION}, the peer speaks {lowest} to {highest}");
        assert!(reject.reason.contains(&words), "{}", reject.reason);
    }
    // Whoever greets in a later version's frame is told by the header alone.
    let mut frame = encode(Kind::Hello, &hello("decode", 100, 1)).expect("small");
    frame[2] = WIRE_VERSION + 1;
    let mut decoder = FrameDecoder::new();
    decoder.push(&frame);
    let error = decoder
        .next_frame()
        .expect_err("another version")
        .to_string();
    assert_eq!(error, "peer speaks wire version 2, this build speaks 1");
}

#[test]
fn a_stranger_gets_nothing_but_the_door() {
    let lease = LeaseRef {
        slot: crate::ids::Slot(0),
        epoch: crate::ids::Epoch(1),
    };
    let layout = Layout {
        from: identity("decode", 100, 1),
        workers: Vec::new(),
    };
    for message in [
        Message::Layout(Box::new(layout)),
        Message::Claim(claim_of(5, lease)),
        Message::Renew(Renew {
            transfer_id: transfer(5),
            question: 1,
        }),
        Message::Ack(Ack {
            transfer_id: transfer(5),
            ranks: Vec::new(),
            number: None,
        }),
    ] {
        let mut p = producer();
        finish(&mut p, at(secs(0)), 5);
        p.handle_connected(D, NONCE);
        p.handle_message(at(secs(0)), D, message.clone());
        let outputs = drain(&mut p);
        let [
            ProducerOutput::Send(D, Message::Reject(reject)),
            ProducerOutput::Close(D),
        ] = outputs.as_slice()
        else {
            panic!("{message:?}: {outputs:?}")
        };
        assert_eq!(reject.code, RejectCode::Protocol);
        // Whatever was still in the socket is not answered.
        p.handle_message(at(secs(0)), D, Message::Ping);
        assert!(drain(&mut p).is_empty());
        assert_eq!(p.gauges(at(secs(0))).leases_alive, 1);
    }
}

#[test]
fn a_message_of_the_other_side_closes_that_connection_only() {
    let mut p = producer();
    let other = ConnectionId(2);
    greet(&mut p, D, "decode", 1);
    greet(&mut p, other, "other", 1);
    let accept = Accept {
        version: WIRE_VERSION,
        from: identity("decode", 100, 1),
        proof: None,
    };
    p.handle_message(at(secs(1)), D, Message::Accept(accept));
    assert_eq!(drain(&mut p).last(), Some(&ProducerOutput::Close(D)));
    let answer = ask(&mut p, at(secs(1)), other, Message::Ping);
    assert_eq!(answer, Message::Pong);
}

#[test]
fn cards_of_all_ranks_go_to_whoever_was_accepted() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    let layout = Layout {
        from: identity("decode", 100, 1),
        workers: Vec::new(),
    };
    let answer = ask(&mut p, at(secs(0)), D, Message::Layout(Box::new(layout)));
    let Message::Layout(layout) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(layout.from, identity("prefill", 1, 2));
    assert_eq!(layout.workers, cards(2));
}

#[test]
fn bye_closes() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    p.handle_message(at(secs(0)), D, Message::Bye);
    assert_eq!(drain(&mut p), [ProducerOutput::Close(D)]);
}
