//! Who pairs where keys are set: both machines over the wire's bytes, and peers that cheat.

use super::super::{Consumer, ConsumerOutput, PeerAddress, PeerState};
use crate::auth::{Keys, Nonce};
use crate::failure::{Failure, FailureReason};
use crate::ids::{EngineId, Incarnation};
use crate::producer::{ConnectionId, Producer, ProducerOutput};
use crate::step::PeerId;
use crate::testing::{at, cards, common_fields, heads, identity, lease_times, options, secs};
use crate::wire::message::{Accept, Challenge, Message, Proof, RejectCode};
use crate::wire::{FrameDecoder, Kind, WIRE_VERSION};

const A: &str = "key-of-the-cluster-a";
const B: &str = "key-of-the-cluster-b";
const OURS: Nonce = Nonce([1; 32]);
const THEIRS: Nonce = Nonce([2; 32]);

fn keys(lines: &[&str]) -> Option<Keys> {
    let text = lines.join("\n");
    (!lines.is_empty()).then(|| Keys::parse(text.as_bytes()).expect("keys"))
}

fn decode(lines: &[&str]) -> Consumer {
    let us = identity("decode", 100, 2);
    Consumer::new(us, common_fields(), heads(4), options()).with_keys(keys(lines))
}

fn prefill(lines: &[&str]) -> Producer {
    let us = identity("prefill", 1, 2);
    Producer::new(us, common_fields(), cards(2), lease_times(), 4).with_keys(keys(lines))
}

/// One connection between the two, message by message.
struct Line {
    d: Consumer,
    p: Producer,
    peer: PeerId,
    connection: ConnectionId,
    /// All that went over it.
    said: Vec<Message>,
}

/// Changes a message on its way.
type Tamper<'a> = &'a mut dyn FnMut(&mut Message);

fn over_the_wire(message: &Message) -> Message {
    let mut decoder = FrameDecoder::new();
    decoder.push(&message.to_frame().expect("encodes"));
    let (kind, payload) = decoder.next_frame().expect("ours").expect("whole");
    Message::from_frame(kind, &payload).expect("ours")
}

impl Line {
    fn new(mut d: Consumer, p: Producer) -> Self {
        let address = PeerAddress {
            host: "10.0.0.1".into(),
            port: 7000,
            engine: EngineId::new("prefill").expect("valid"),
            incarnation: Incarnation(1),
        };
        let peer = d.connect(at(secs(0)), address).expect("an empty table");
        assert!(matches!(d.poll_output(), Some(ConsumerOutput::Dial(..))));
        Self {
            d,
            p,
            peer,
            connection: ConnectionId(1),
            said: Vec::new(),
        }
    }

    fn open(&mut self, ours: Nonce, theirs: Nonce) {
        self.p.handle_connected(self.connection, theirs);
        self.d.handle_dialed(at(secs(1)), self.peer, ours);
    }

    fn run(&mut self, tamper: Tamper<'_>) {
        let now = at(secs(1));
        let mut quiet = false;
        while !std::mem::replace(&mut quiet, true) {
            while let Some(output) = self.d.poll_output() {
                quiet = false;
                if let ConsumerOutput::Send(_, message) = output {
                    let mut message = over_the_wire(&message);
                    tamper(&mut message);
                    self.said.push(message.clone());
                    self.p.handle_message(now, self.connection, message);
                }
            }
            while let Some(output) = self.p.poll_output() {
                quiet = false;
                if let ProducerOutput::Send(_, message) = output {
                    let mut message = over_the_wire(&message);
                    tamper(&mut message);
                    self.said.push(message.clone());
                    self.d.handle_message(now, self.peer, message);
                }
            }
        }
    }

    fn kinds(&self) -> Vec<Kind> {
        self.said.iter().map(Message::kind).collect()
    }

    /// Why the next request would fail.
    fn failure(&self) -> Failure {
        let peer = self.d.peers.get(&self.peer).expect("known");
        let PeerState::Down { why, .. } = &peer.state else {
            panic!("{:?}", peer.state)
        };
        why.clone()
    }

    #[track_caller]
    fn assert_refused(&self, words: &[&str]) {
        let failure = self.failure();
        assert_eq!(failure.reason, FailureReason::PairRefused, "{failure}");
        assert_eq!(failure.field, "control_key_file", "{failure}");
        for word in words {
            assert!(failure.text.contains(word), "{word:?} in {failure}");
        }
        for secret in [A, B] {
            assert!(!failure.text.contains(secret));
        }
        assert_eq!(self.d.peers_ready(), 0);
    }
}

fn meet(d: &[&str], p: &[&str]) -> Line {
    let mut line = Line::new(decode(d), prefill(p));
    line.open(OURS, THEIRS);
    line.run(&mut |_| ());
    line
}

const KEYED: [Kind; 6] = [
    Kind::Hello,
    Kind::Challenge,
    Kind::Proof,
    Kind::Accept,
    Kind::Layout,
    Kind::Layout,
];

#[test]
fn both_prove_their_key_before_anything_else() {
    let line = meet(&[A], &[A]);
    assert_eq!(line.kinds(), KEYED);
    assert_eq!(line.d.peers_ready(), 1);
    assert_eq!(line.p.counts().rejected_peers, 0);
}

#[test]
fn without_keys_nothing_is_said_of_them() {
    let line = meet(&[], &[]);
    assert_eq!(
        line.kinds(),
        [Kind::Hello, Kind::Accept, Kind::Layout, Kind::Layout]
    );
    for message in &line.said {
        let frame = message.to_frame().expect("encodes");
        for word in ["nonce", "proof"] {
            // A card of a worker has nonces of its own.
            let found = frame.windows(word.len()).any(|it| it == word.as_bytes());
            assert!(!found || message.kind() == Kind::Layout, "{message:?}");
        }
    }
}

/// Everywhere [old, new], then [new, old], then [new]: whoever is a step ahead still pairs.
#[test]
fn keys_are_changed_one_engine_after_the_other() {
    for (d, p) in [
        (&[A, B][..], &[A][..]),
        (&[A], &[A, B]),
        (&[B, A], &[A, B]),
        (&[A, B], &[B, A]),
        (&[B], &[B, A]),
        (&[B, A], &[B]),
    ] {
        let line = meet(d, p);
        assert_eq!(line.d.peers_ready(), 1, "{d:?} {p:?}");
        assert_eq!(line.kinds(), KEYED);
    }
    // Two steps ahead is too far.
    meet(&[B, A], &[A]).assert_refused(&["the first key of decode's file"]);
}

#[test]
fn a_side_without_a_key_is_refused_by_name_and_says_nothing_more() {
    let line = meet(&[A], &[]);
    line.assert_refused(&["decode has it set and this prefill engine has not"]);
    assert_eq!(line.kinds(), [Kind::Hello, Kind::Reject]);
    assert_eq!(line.p.counts().rejected_peers, 1);

    let line = meet(&[], &[A]);
    line.assert_refused(&["this prefill engine has it set and decode shows no key"]);
    assert_eq!(line.kinds(), [Kind::Hello, Kind::Reject]);
    assert_eq!(line.p.counts().rejected_peers, 1);

    let line = meet(&[A], &[B]);
    line.assert_refused(&["decode's proof is by no key of this prefill engine's file"]);
    let kinds = [Kind::Hello, Kind::Challenge, Kind::Proof, Kind::Reject];
    assert_eq!(line.kinds(), kinds);
    assert_eq!(line.p.counts().rejected_peers, 1);
}

/// An engine that is not trusted is told neither who lives here nor what its cache is like.
#[test]
fn nothing_is_told_before_the_proof() {
    let mut line = Line::new(decode(&[A]), prefill(&[B]));
    line.open(OURS, THEIRS);
    line.run(&mut |message| {
        if let Message::Hello(hello) = message {
            hello.expect_engine = EngineId::new("elsewhere").expect("valid");
            hello.compat_digest = vec![0; 32];
        }
    });
    let Some(Message::Reject(reject)) = line.said.last() else {
        panic!("{:?}", line.said)
    };
    assert_eq!(reject.code, RejectCode::Unauthenticated);
    assert_eq!(reject.fields, None);
    assert!(
        !reject.reason.contains("prefill lives"),
        "{}",
        reject.reason
    );
    // With the proof it is told as ever.
    let mut line = Line::new(decode(&[A]), prefill(&[A]));
    line.d.fields = crate::testing::fields(&[("dtype", "bfloat16"), ("model", "tiny")]);
    line.open(OURS, THEIRS);
    line.run(&mut |_| ());
    assert_eq!(line.failure().field, "dtype");
}

/// Each message that carries a secret's work, changed on its way.
#[test]
fn what_is_changed_on_its_way_is_refused() {
    type Change = fn(&mut Message);
    let changes: [(&str, Change, &str); 9] = [
        (
            "the dialer's nonce",
            |message| {
                if let Message::Hello(hello) = message {
                    hello.nonce = Some(vec![9; 32]);
                }
            },
            "decode's proof",
        ),
        (
            "a short nonce of the dialer",
            |message| {
                if let Message::Hello(hello) = message {
                    hello.nonce = Some(vec![1; 16]);
                }
            },
            "nonce has 16 bytes",
        ),
        (
            "who the dialer is",
            |message| {
                if let Message::Hello(hello) = message {
                    hello.from = identity("another", 100, 2);
                }
            },
            "decode's proof",
        ),
        (
            "the listener's nonce",
            |message| {
                if let Message::Challenge(challenge) = message {
                    challenge.nonce = vec![9; 32];
                }
            },
            "decode's proof",
        ),
        (
            "a long nonce of the listener",
            |message| {
                if let Message::Challenge(challenge) = message {
                    challenge.nonce = vec![2; 33];
                }
            },
            "nonce has 33 bytes",
        ),
        (
            "a short proof",
            |message| {
                if let Message::Proof(proof) = message {
                    proof.proof.truncate(16);
                }
            },
            "decode's proof has 16 bytes",
        ),
        (
            "who the listener is",
            |message| {
                if let Message::Accept(accept) = message {
                    accept.from = identity("prefill", 1, 4);
                }
            },
            "prefill's proof is by no key",
        ),
        (
            "an acceptance without a proof",
            |message| {
                if let Message::Accept(accept) = message {
                    accept.proof = None;
                }
            },
            "without proving",
        ),
        (
            "a long proof",
            |message| {
                if let Message::Accept(accept) = message {
                    accept.proof = Some(vec![0; 64]);
                }
            },
            "prefill's proof has 64 bytes",
        ),
    ];
    for (name, change, word) in changes {
        let mut line = Line::new(decode(&[A]), prefill(&[A]));
        line.open(OURS, THEIRS);
        line.run(&mut |message| change(message));
        line.assert_refused(&[word]);
        let layouts = line
            .kinds()
            .iter()
            .filter(|it| **it == Kind::Layout)
            .count();
        assert_eq!(layouts, 0, "{name}");
    }
}

/// A listener without a key that gives the dialer's own proof back to it.
#[test]
fn a_proof_given_back_proves_nothing() {
    let mut line = Line::new(decode(&[A]), prefill(&[]));
    line.d.handle_dialed(at(secs(1)), line.peer, OURS);
    let now = at(secs(1));
    let challenge = Challenge {
        nonce: OURS.0.to_vec(),
    };
    line.d
        .handle_message(now, line.peer, Message::Challenge(challenge));
    let proof = std::iter::from_fn(|| line.d.poll_output()).find_map(|output| {
        let ConsumerOutput::Send(_, Message::Proof(proof)) = output else {
            return None;
        };
        Some(proof.proof)
    });
    let accept = Accept {
        version: WIRE_VERSION,
        from: identity("prefill", 1, 2),
        proof: Some(proof.expect("a proof")),
    };
    line.d
        .handle_message(now, line.peer, Message::Accept(accept));
    line.assert_refused(&["prefill's proof is by no key"]);
}

/// What was heard on one connection is worth nothing on the next.
#[test]
fn a_recorded_handshake_does_not_pair_again() {
    let first = meet(&[A], &[A]);
    assert_eq!(first.kinds(), KEYED);
    // To the listener, which draws another nonce.
    let mut p = first.p;
    let again = ConnectionId(2);
    p.handle_connected(again, Nonce([3; 32]));
    for message in &first.said {
        if matches!(message, Message::Hello(_) | Message::Proof(_)) {
            p.handle_message(at(secs(2)), again, message.clone());
        }
    }
    let answers: Vec<_> = std::iter::from_fn(|| p.poll_output()).collect();
    let [
        ProducerOutput::Send(_, Message::Challenge(_)),
        ProducerOutput::Send(_, Message::Reject(reject)),
        ProducerOutput::Close(_),
    ] = answers.as_slice()
    else {
        panic!("{answers:?}")
    };
    assert_eq!(reject.code, RejectCode::Unauthenticated);
    // To the dialer.
    let mut line = Line::new(decode(&[A]), prefill(&[]));
    line.d.handle_dialed(at(secs(1)), line.peer, Nonce([4; 32]));
    for message in &first.said {
        if matches!(message, Message::Challenge(_) | Message::Accept(_)) {
            line.d
                .handle_message(at(secs(1)), line.peer, message.clone());
        }
    }
    line.assert_refused(&["prefill's proof is by no key"]);
}

#[test]
fn a_challenge_has_its_place_and_comes_once() {
    let challenge = || {
        Message::Challenge(Challenge {
            nonce: THEIRS.0.to_vec(),
        })
    };
    for (lines, times) in [(&[][..], 1), (&[A], 2)] {
        let mut line = Line::new(decode(lines), prefill(&[]));
        line.d.handle_dialed(at(secs(1)), line.peer, OURS);
        for _ in 0..times {
            line.d.handle_message(at(secs(1)), line.peer, challenge());
        }
        assert!(line.failure().text.contains("out of place"));
    }
    // Nor after the acceptance.
    let mut line = meet(&[A], &[A]);
    line.d.handle_message(at(secs(1)), line.peer, challenge());
    let closed = std::iter::from_fn(|| line.d.poll_output());
    assert!(
        closed
            .into_iter()
            .any(|it| matches!(it, ConsumerOutput::Close(_)))
    );
}

#[test]
fn before_its_proof_a_consumer_gets_no_further() {
    let claim = Message::Release(crate::wire::message::Release {
        transfer_id: crate::testing::transfer(1),
        number: None,
    });
    let proof = Message::Proof(Proof { proof: vec![0; 32] });
    let recorded = meet(&[A], &[A]);
    let greeting = recorded.said[0].clone();
    for said in [
        vec![proof],
        vec![greeting.clone(), claim],
        vec![greeting.clone(), greeting],
    ] {
        let mut p = prefill(&[A]);
        p.handle_connected(ConnectionId(7), THEIRS);
        for message in said {
            p.handle_message(at(secs(1)), ConnectionId(7), message);
        }
        let answers: Vec<_> = std::iter::from_fn(|| p.poll_output()).collect();
        let [
            ..,
            ProducerOutput::Send(_, Message::Reject(reject)),
            ProducerOutput::Close(_),
        ] = answers.as_slice()
        else {
            panic!("{answers:?}")
        };
        assert_eq!(reject.code, RejectCode::Protocol);
    }
}

/// A scout becomes the peer that it finds only by a proof.
#[test]
fn a_scout_believes_nobody_without_a_key() {
    let mut d = decode(&[A]);
    d.keep_connected(at(secs(0)), "10.0.0.1".into(), 7000);
    let Some(ConsumerOutput::Dial(scout, _)) = d.poll_output() else {
        panic!("no dial")
    };
    d.handle_dialed(at(secs(1)), scout, OURS);
    let accept = Accept {
        version: WIRE_VERSION,
        from: identity("prefill", 1, 2),
        proof: None,
    };
    d.handle_message(at(secs(1)), scout, Message::Accept(accept));
    assert!(d.by_address.is_empty(), "{:?}", d.by_address);
    assert!(super::notes(&mut d).contains("control_key_file"));
    // With one it does, also under the name that a request gives it meanwhile.
    for named in [false, true] {
        let mut d = decode(&[A]);
        d.keep_connected(at(secs(0)), "10.0.0.1".into(), 7000);
        let Some(ConsumerOutput::Dial(scout, _)) = d.poll_output() else {
            panic!("no dial")
        };
        let mut line = Line {
            d,
            p: prefill(&[A]),
            peer: scout,
            connection: ConnectionId(1),
            said: Vec::new(),
        };
        line.open(OURS, THEIRS);
        if named {
            let address = PeerAddress {
                host: "10.0.0.1".into(),
                port: 7000,
                engine: EngineId::new("prefill").expect("valid"),
                incarnation: Incarnation(1),
            };
            assert_eq!(line.d.connect(at(secs(1)), address), Ok(scout));
        }
        line.run(&mut |_| ());
        assert_eq!(line.d.peers_ready(), 1);
    }
}

// === builds that know no keys ===

/// As a build before keys has them.
mod before {
    use serde::Deserialize;

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "snake_case")]
    pub(super) enum RejectCode {
        Version,
        WrongEngine,
        #[serde(other)]
        Unknown,
    }

    #[derive(Debug, Deserialize)]
    pub(super) struct Reject {
        pub(super) code: RejectCode,
        pub(super) reason: String,
    }

    #[derive(Debug, Deserialize)]
    pub(super) struct Hello {
        pub(super) versions: (u8, u8),
        #[serde(with = "serde_bytes")]
        pub(super) compat_digest: Vec<u8>,
    }
}

fn payload(message: &Message) -> Vec<u8> {
    message.to_frame().expect("encodes")[crate::wire::HEADER_BYTES..].to_vec()
}

#[test]
fn an_older_decode_engine_is_refused_by_words_that_it_can_log() {
    // Its greeting is that of a build without a key, byte for byte.
    let line = meet(&[], &[A]);
    let Some(refusal @ Message::Reject(_)) = line.said.last() else {
        panic!("{:?}", line.said)
    };
    let reject: before::Reject =
        crate::wire::decode(Kind::Reject, &payload(refusal)).expect("understood");
    assert_eq!(reject.code, before::RejectCode::Unknown);
    for word in ["control_key_file", "has to be updated"] {
        assert!(reject.reason.contains(word), "{}", reject.reason);
    }
}

#[test]
fn an_older_prefill_engine_is_not_used_by_one_with_a_key() {
    let mut line = Line::new(decode(&[A]), prefill(&[]));
    line.d.handle_dialed(at(secs(1)), line.peer, OURS);
    let Some(ConsumerOutput::Send(_, hello)) = line.d.poll_output() else {
        panic!("no greeting")
    };
    // It understands the greeting, skips the nonce, and accepts.
    let understood: before::Hello =
        crate::wire::decode(Kind::Hello, &payload(&hello)).expect("understood");
    assert_eq!(understood.versions, (1, 1));
    assert_eq!(understood.compat_digest, common_fields().digest());
    let accept = Message::Accept(Accept {
        version: WIRE_VERSION,
        from: identity("prefill", 1, 2),
        proof: None,
    });
    line.d
        .handle_message(at(secs(1)), line.peer, over_the_wire(&accept));
    line.assert_refused(&["knows no such setting", "without proving"]);
    let rest: Vec<_> = std::iter::from_fn(|| line.d.poll_output()).collect();
    assert_eq!(rest, [ConsumerOutput::Close(line.peer)]);
}

#[test]
fn nothing_shows_a_key() {
    let line = meet(&[A, B], &[A, B]);
    let Line { mut d, p, said, .. } = line;
    let notes = super::notes(&mut d);
    let shown = format!("{d:?}{p:?}{said:?}{notes}");
    let bytes = format!("{:?}", A.as_bytes());
    for secret in [A, B, bytes.trim_matches(['[', ']'])] {
        assert!(!shown.contains(secret), "{secret}");
    }
    assert!(shown.contains("Keys(2)"));
    for message in said {
        let frame = message.to_frame().expect("encodes");
        assert!(!frame.windows(A.len()).any(|it| it == A.as_bytes()));
    }
}
