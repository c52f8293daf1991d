//! Control planes with keys, over sockets.

use hetero_kv_core::auth::{ControlTranscript, Nonce, Prover};
use hetero_kv_core::wire::message::Proof;

use super::*;

pub(super) const A: &str = "key-of-the-cluster-a";
const B: &str = "key-of-the-cluster-b";

pub(super) fn keys(key: &str) -> Option<Keys> {
    (!key.is_empty()).then(|| Keys::parse(key.as_bytes()).expect("keys"))
}

/// A greeting that asks for a challenge.
pub(super) fn keyed_hello() -> Hello {
    let Message::Hello(mut hello) = hello(7) else {
        panic!("a greeting")
    };
    hello.nonce = Some(vec![1; 32]);
    *hello
}

/// Greets, and says what it is challenged with.
fn challenged(peer: &mut Scripted, hello: &Hello) -> Nonce {
    peer.say(&Message::Hello(Box::new(hello.clone())));
    let Some(Message::Challenge(challenge)) = peer.hear() else {
        panic!("no challenge")
    };
    Nonce::parse(&challenge.nonce).expect("of the right length")
}

pub(super) fn proof(hello: &Hello, listener: Nonce, key: &str) -> Message {
    let transcript = ControlTranscript {
        hello,
        dialer: Nonce([1; 32]),
        listener,
        accepted: None,
    };
    Message::Proof(Proof {
        proof: transcript.prove(key.as_bytes()),
    })
}

#[test]
fn two_control_planes_pair_by_equal_keys_alone() {
    for (d, p, word) in [
        (A, A, None),
        ("", "", None),
        (A, B, Some("decode's proof is by no key")),
        (
            A,
            "",
            Some("decode has it set and this prefill engine has not"),
        ),
        ("", A, Some("this prefill engine has it set")),
    ] {
        let holder = holder_with(ControlLimits::default(), keys(p));
        let reader = reader_with(keys(d));
        reader.request("127.0.0.1", holder.at.port());
        // The holder has no lease of that id: a pair that is made ends with that.
        let failure = reader.failure().failure;
        let Some(word) = word else {
            assert_eq!(failure.reason, FailureReason::LeaseGone, "{failure}");
            assert_eq!(
                reader
                    .desk
                    .lock()
                    .consumer
                    .as_ref()
                    .expect("one")
                    .peers_ready(),
                1
            );
            continue;
        };
        assert_eq!(failure.reason, FailureReason::PairRefused, "{failure}");
        assert_eq!(failure.field, "control_key_file");
        assert!(failure.text.contains(word), "{failure}");
        assert!(!failure.text.contains("key-of-the-cluster"), "{failure}");
    }
}

#[test]
fn each_connection_has_a_challenge_of_its_own() {
    let holder = holder_with(ControlLimits::default(), keys(A));
    let hello = keyed_hello();
    let mut first = Scripted::dial(&holder);
    let theirs = challenged(&mut first, &hello);
    let answer = proof(&hello, theirs, A);
    first.say(&answer);
    let Some(Message::Accept(accept)) = first.hear() else {
        panic!("not accepted")
    };
    let accepted = ControlTranscript {
        hello: &hello,
        dialer: Nonce([1; 32]),
        listener: theirs,
        accepted: Some((accept.version, &accept.from)),
    };
    assert!(accepted.is_proven(A.as_bytes(), &accept.proof.expect("a proof")));
    assert!(first.is_answered());
    // The same proof on another connection.
    let mut second = Scripted::dial(&holder);
    assert_ne!(challenged(&mut second, &hello), theirs);
    second.say(&answer);
    let Some(Message::Reject(reject)) = second.hear() else {
        panic!("not refused")
    };
    assert_eq!(reject.code, RejectCode::Unauthenticated);
    assert_eq!(second.hear(), None);
}

/// Being challenged neither ends a stranger's deadline nor begins a new one.
#[test]
fn a_stranger_has_to_prove_itself_in_time() {
    let holder = holder_with(QUICK, keys(A));
    let hello = keyed_hello();
    let proof = frame(&proof(&hello, Nonce([0; 32]), A));
    for (name, bytes) in [
        ("nothing", &[][..]),
        ("half a header", &proof[..5]),
        ("half a proof", &proof[..proof.len() - 1]),
        ("a ping", &frame(&Message::Ping)),
    ] {
        let started = Instant::now();
        let mut peer = Scripted::dial(&holder);
        challenged(&mut peer, &hello);
        thread::sleep(QUICK.frame_timeout / 2);
        peer.say_bytes(bytes);
        while peer.hear().is_some() {}
        let took = started.elapsed();
        assert!(took >= QUICK.frame_timeout, "{name}: {took:?}");
        assert!(took < PATIENCE / 2, "{name}: {took:?}");
    }
}

#[test]
fn a_proof_that_is_long_or_wrong_ends_its_connection_only() {
    let holder = holder_with(ControlLimits::default(), keys(A));
    let hello = keyed_hello();
    let mut other = Scripted::dial(&holder);
    let theirs = challenged(&mut other, &hello);
    other.say(&proof(&hello, theirs, A));
    assert!(matches!(other.hear(), Some(Message::Accept(_))));
    let sized = |bytes: usize| {
        frame(&Message::Proof(Proof {
            proof: vec![0; bytes],
        }))
    };
    let wrong: [(&str, Vec<u8>, bool); 4] = [
        ("a short one", sized(16), true),
        ("a wrong one", sized(32), true),
        ("one over the limit of strangers", sized(80_000), false),
        (
            "4 GiB announced",
            b"hK\x01\x0f\xff\xff\xff\xff".to_vec(),
            false,
        ),
    ];
    for (name, bytes, told) in wrong {
        let mut peer = Scripted::dial(&holder);
        challenged(&mut peer, &hello);
        peer.say_bytes(&bytes);
        let answer = peer.hear();
        let refused = matches!(
            &answer,
            Some(Message::Reject(reject)) if reject.code == RejectCode::Unauthenticated
        );
        assert_eq!(refused, told, "{name}: {answer:?}");
        assert_eq!(peer.hear(), None, "{name}");
        assert!(other.is_answered(), "{name}");
    }
}

/// A listener of an older build, and one that guesses.
#[test]
fn a_listener_that_proves_nothing_gets_no_claim() {
    for proof in [None, Some(vec![0; 32]), Some(vec![0; 5])] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let reader = reader_with(keys(A));
        reader.request("127.0.0.1", port);
        let mut peer = accept_one(&listener);
        let Some(Message::Hello(hello)) = peer.hear() else {
            panic!("no greeting")
        };
        assert_eq!(hello.nonce.map(|nonce| nonce.len()), Some(32));
        peer.say(&Message::Accept(Accept {
            version: WIRE_VERSION,
            from: identity("p", 7),
            proof,
        }));
        assert_eq!(peer.hear(), None, "no claim, no layout");
        let failure = reader.failure().failure;
        assert_eq!(failure.reason, FailureReason::PairRefused, "{failure}");
        assert_eq!(failure.field, "control_key_file");
    }
}
