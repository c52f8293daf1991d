//! Readers and holders that prove a shared key to each other, and strangers that cannot.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hetero_kv_core::auth::{AttachTranscript, Keys, Nonce, Prover};
use hetero_kv_core::ids::{DpRank, Incarnation, PpRank, TpRank};
use hetero_kv_core::memory::Run;
use hetero_kv_core::wire::data::{
    Attach, AttachRefusal, AttachRefused, Attached, Fetch, SourceRun,
};
use hetero_kv_core::wire::message::{Challenge, Proof};
use hetero_kv_core::wire::{HEADER_BYTES, Header, Kind, decode, encode};
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::transport::TransportName;

use super::buffer::{Buffer, check_exact};
use super::holder::{Holder, HolderConfig, engine, job, lease, rdma_here, reader_with, wait_one};
use super::listener::scripted;

const A: &str = "key-of-the-cluster-a";
const B: &str = "key-of-the-cluster-b";

const RUN: [Run; 1] = [Run {
    source_region: 0,
    source_offset: 0,
    dest_region: 0,
    dest_offset: 0,
    bytes: 4096,
}];

fn holder(keys: &str, frame_timeout_ms: u64) -> Holder {
    Holder::start(HolderConfig {
        keys: keys.into(),
        frame_timeout_ms,
        ..HolderConfig::default()
    })
}

fn keys(text: &str) -> Option<Keys> {
    (!text.is_empty()).then(|| Keys::parse(text.as_bytes()).expect("keys"))
}

fn read_with_keys(transport: TransportName) {
    let both = format!("{B}\n{A}");
    for (ours, theirs, word) in [
        (A, A, None),
        (A, both.as_str(), None),
        ("", A, Some("the reader shows no key")),
        (
            A,
            "",
            Some("the reader has it set and this prefill worker has not"),
        ),
        (A, B, Some("the reader's proof is by no key")),
    ] {
        let holder = holder(theirs, 10_000);
        let buffers = [Buffer::new(4096, 0)];
        let reader = reader_with(&buffers, transport, |options| {
            options.keys = keys(ours);
        });
        reader.submit(job(1, &holder.source, &RUN)).expect("taken");
        let outcome = wait_one(&reader).outcome;
        let Some(word) = word else {
            assert_eq!(outcome, Ok(()));
            check_exact(&buffers, &RUN, 1, 0);
            continue;
        };
        let failure = outcome.expect_err("refused");
        assert_eq!(failure.kind, ReadFailureKind::Refused, "{failure}");
        assert!(failure.text.contains("control_key_file"), "{failure}");
        assert!(failure.text.contains(word), "{failure}");
        assert!(!failure.text.contains("key-of-the"), "{failure}");
        assert!(buffers[0].copied().iter().all(|&byte| byte == 0));
    }
}

#[test]
fn bytes_are_read_by_equal_keys_alone() {
    read_with_keys(TransportName::Tcp);
}

#[test]
fn queue_pairs_are_made_by_equal_keys_alone() {
    if rdma_here() {
        read_with_keys(TransportName::Verbs);
    }
}

// === the holder against strangers ===

fn attach(nonce: Option<Vec<u8>>) -> Attach {
    Attach {
        engine: engine(),
        incarnation: Incarnation(0x11),
        dp_rank: DpRank(1),
        tp_rank: TpRank(0),
        pp_rank: PpRank(0),
        nonce,
    }
}

struct Stranger(TcpStream);

impl Stranger {
    fn dial(holder: &Holder) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", holder.tcp_port())).expect("listening");
        let patience = Some(Duration::from_secs(20));
        stream.set_read_timeout(patience).expect("a socket");
        Self(stream)
    }

    fn say(&mut self, kind: Kind, message: &impl serde::Serialize) {
        let frame = encode(kind, message).expect("small");
        // It may have been closed already.
        let _ = self.0.write_all(&frame);
    }

    /// The next frame; `None` at the connection's end.
    fn hear(&mut self) -> Option<(Kind, Vec<u8>)> {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).ok()?;
        let header = Header::parse(header).expect("a frame");
        let mut payload = vec![0; header.payload_bytes];
        self.0.read_exact(&mut payload).ok()?;
        Some((header.kind, payload))
    }

    fn challenged(&mut self) -> Nonce {
        self.say(Kind::Attach, &attach(Some(vec![1; 32])));
        let (kind, payload) = self.hear().expect("a challenge");
        assert_eq!(kind, Kind::AttachChallenge);
        let challenge: Challenge = decode(kind, &payload).expect("a nonce");
        Nonce::parse(&challenge.nonce).expect("of the right length")
    }

    fn fetch(&mut self) {
        let fetch = Fetch {
            id: 1,
            slot: lease(0, 1).slot,
            epoch: lease(0, 1).epoch,
            runs: vec![SourceRun(0, 0, 4096)],
        };
        self.say(Kind::Fetch, &fetch);
    }
}

fn proof_of(attach: &Attach, listener: Nonce, key: &str) -> Proof {
    let transcript = AttachTranscript {
        attach,
        dialer: Nonce([1; 32]),
        listener,
        accepted: None,
    };
    Proof {
        proof: transcript.prove(key.as_bytes()),
    }
}

#[test]
fn a_stranger_at_the_data_port_reads_nothing_and_is_told_nothing() {
    let holder = holder(A, 10_000);
    let mut last = None;
    // As an older build greets; with a nonce of another length; another rank; another's proof.
    let mut elsewhere = attach(None);
    elsewhere.tp_rank = TpRank(7);
    for (name, greeting) in [
        ("no nonce", attach(None)),
        ("another rank", elsewhere),
        ("a short nonce", attach(Some(vec![1; 8]))),
    ] {
        let mut stranger = Stranger::dial(&holder);
        stranger.say(Kind::Attach, &greeting);
        stranger.fetch();
        let (kind, payload) = stranger.hear().expect("a refusal");
        assert_eq!(kind, Kind::AttachRefused, "{name}");
        let refused: AttachRefused = decode(kind, &payload).expect("a refusal");
        assert_eq!(refused.code, AttachRefusal::Unauthenticated, "{name}");
        assert_eq!(stranger.hear(), None, "{name}");
    }
    let mut said = attach(Some(vec![1; 32]));
    for (name, key, change) in [
        ("another key", B, 0),
        ("the proof of another rank", A, 1),
        ("the proof of another connection", A, 2),
    ] {
        let mut stranger = Stranger::dial(&holder);
        let listener = stranger.challenged();
        assert_ne!(last, Some(listener), "{name}");
        said.tp_rank = TpRank(u32::from(change == 1));
        let nonce = if change == 2 {
            last.expect("one before")
        } else {
            listener
        };
        stranger.say(Kind::AttachProof, &proof_of(&said, nonce, key));
        stranger.fetch();
        let (kind, payload) = stranger.hear().expect("a refusal");
        let refused: AttachRefused = decode(kind, &payload).expect("a refusal");
        assert_eq!(refused.code, AttachRefusal::Unauthenticated, "{name}");
        assert_eq!(stranger.hear(), None, "{name}");
        last = Some(listener);
    }
    // A fetch, a greeting or garbage where the proof belongs.
    for kind in [Kind::Fetch, Kind::Attach, Kind::AttachChallenge] {
        let mut stranger = Stranger::dial(&holder);
        stranger.challenged();
        stranger.say(kind, &attach(None));
        assert_eq!(stranger.hear(), None, "{kind:?}");
    }
    let mut stranger = Stranger::dial(&holder);
    stranger.challenged();
    stranger.say(
        Kind::AttachProof,
        &Proof {
            proof: vec![0; 1 << 17],
        },
    );
    assert_eq!(stranger.hear(), None, "a proof over the limit of frames");
}

#[test]
fn a_stranger_has_to_prove_itself_in_time() {
    let holder = holder(A, 800);
    let proof = encode(Kind::AttachProof, &Proof { proof: vec![0; 32] }).expect("small");
    for bytes in [&[][..], &proof[..4], &proof[..proof.len() - 1]] {
        let begun = Instant::now();
        let mut stranger = Stranger::dial(&holder);
        stranger.challenged();
        std::thread::sleep(Duration::from_millis(400));
        stranger.0.write_all(bytes).expect("open");
        assert_eq!(stranger.hear(), None);
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(700), "{took:?}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}

// === the reader against a holder that has no key ===

#[test]
fn a_holder_that_proves_nothing_is_not_read() {
    let holder = holder("", 10_000);
    let region_bytes: Vec<u64> = holder.source.regions.iter().map(|r| r.bytes).collect();
    let attached = |proof| {
        let answer = Attached {
            region_bytes: region_bytes.clone(),
            proof,
        };
        encode(Kind::Attached, &answer).expect("small")
    };
    let challenge = |bytes: usize| {
        let challenge = Challenge {
            nonce: vec![1; bytes],
        };
        encode(Kind::AttachChallenge, &challenge).expect("small")
    };
    for (name, answers, word) in [
        // An older build, which skips the nonce.
        ("no proof", vec![attached(None)], "without proving"),
        (
            "a proof without a challenge",
            vec![attached(Some(vec![0; 32]))],
            "without proving",
        ),
        (
            "a wrong proof",
            vec![challenge(32), attached(Some(vec![0; 32]))],
            "by no key",
        ),
        ("a short nonce", vec![challenge(8)], "nonce has 8 bytes"),
    ] {
        let buffers = [Buffer::new(4096, 0)];
        let reader = reader_with(&buffers, TransportName::Tcp, |options| {
            options.keys = keys(A);
        });
        let source = holder.via(scripted(answers));
        reader.submit(job(1, &source, &RUN)).expect("taken");
        let failure = wait_one(&reader).outcome.expect_err("refused");
        assert_eq!(failure.kind, ReadFailureKind::Refused, "{name}: {failure}");
        assert!(
            failure.text.contains("control_key_file"),
            "{name}: {failure}"
        );
        assert!(failure.text.contains(word), "{name}: {failure}");
    }
}
