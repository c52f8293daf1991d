//! Bytes that no peer of ours sends.

use proptest::prelude::*;

use super::*;
use crate::wire::frame::MAGIC;
use crate::wire::message::{MessageError, REASON_BYTES_MAX, bounded_reason};

/// A msgpack map from texts to raw values.
fn map(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0x80 | u8::try_from(entries.len()).expect("a small map")];
    for (key, value) in entries {
        bytes.push(0xa0 | u8::try_from(key.len()).expect("a short key"));
        bytes.extend_from_slice(key.as_bytes());
        bytes.extend_from_slice(value);
    }
    bytes
}

/// A release whose map has one more entry.
fn release_with(value: &[u8]) -> Vec<u8> {
    let id = [&[0xd9, 32], "07".repeat(16).as_bytes()].concat();
    framed(
        Kind::Release,
        &map(&[("transfer_id", &id), ("later", value)]),
    )
}

fn payload_error(frame: &[u8]) -> String {
    match read(frame) {
        Err(MessageError::Frame(FrameError::Payload { problem, .. })) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_frame_cut_anywhere_is_waited_for() {
    for message in samples() {
        let frame = message.to_frame().expect("encodes");
        for end in 0..frame.len() {
            assert_eq!(read(&frame[..end]), Ok(Vec::new()), "{message:?} at {end}");
        }
    }
}

#[test]
fn a_payload_cut_anywhere_is_refused() {
    for message in samples() {
        let frame = message.to_frame().expect("encodes");
        let payload = &frame[HEADER_BYTES..];
        for end in 0..payload.len() {
            let cut = framed(message.kind(), &payload[..end]);
            let error = read(&cut).expect_err("cut");
            let text = error.to_string();
            assert!(
                text.starts_with(&format!("cannot decode {:?}", message.kind())),
                "{text}"
            );
        }
    }
}

#[test]
fn frames_come_in_any_pieces() {
    let messages = samples();
    let stream: Vec<u8> = messages
        .iter()
        .flat_map(|message| message.to_frame().expect("encodes"))
        .collect();
    for size in [1, 2, 7, 8, 9, 64, 4096] {
        let mut decoder = FrameDecoder::new();
        let mut got = Vec::new();
        for piece in stream.chunks(size) {
            decoder.push(piece);
            while let Some((kind, payload)) = decoder.next_frame().expect("ours") {
                got.push(Message::from_frame(kind, &payload).expect("ours"));
            }
        }
        assert_eq!(got, messages, "pieces of {size}");
        assert_eq!(decoder.buffered_bytes(), 0);
    }
}

#[test]
fn bytes_behind_a_message_are_refused() {
    for message in samples() {
        let frame = message.to_frame().expect("encodes");
        let longer = [&frame[HEADER_BYTES..], &[0xc0]].concat();
        let problem = payload_error(&framed(message.kind(), &longer));
        assert_eq!(problem, "1 bytes too many");
    }
}

#[test]
fn foreign_protocols_and_versions_are_named() {
    assert_eq!(
        read(b"GET / HTTP/1.1\r\n\r\n")
            .expect_err("not ours")
            .to_string(),
        "not a hetero_kv frame: bad magic [47, 45]"
    );
    let mut frame = Message::Ping.to_frame().expect("encodes");
    frame[2] = 9;
    assert_eq!(
        read(&frame).expect_err("another version").to_string(),
        "peer speaks wire version 9, this build speaks 1"
    );
    frame[2] = 1;
    frame[3] = 31;
    assert_eq!(
        read(&frame).expect_err("unknown kind").to_string(),
        "unknown frame kind 31"
    );
}

#[test]
fn a_length_over_the_limit_is_refused_by_its_header_alone() {
    let header = |length: u32| {
        let mut bytes = vec![MAGIC[0], MAGIC[1], WIRE_VERSION, Kind::Layout.to_byte()];
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes
    };
    let limit = u32::try_from(FRAME_BYTES_MAX).expect("fits");
    let mut decoder = FrameDecoder::new();
    decoder.push(&header(limit + 1));
    assert_eq!(
        decoder.next_frame(),
        Err(FrameError::TooLarge(FRAME_BYTES_MAX + 1))
    );
    assert_eq!(
        read(&header(u32::MAX)).expect_err("4 GiB").to_string(),
        "frame of 4294967295 bytes is over the limit of 16777216"
    );
    // Whoever reads headers by itself, as the data plane does, meets the same limit.
    let first = *header(limit + 1).first_chunk().expect("a header");
    assert_eq!(
        Header::parse(first),
        Err(FrameError::TooLarge(FRAME_BYTES_MAX + 1))
    );
    // At the limit it is waited for, and nothing is set aside for it.
    let mut decoder = FrameDecoder::new();
    decoder.push(&header(limit));
    assert_eq!(decoder.next_frame(), Ok(None));
    assert_eq!(decoder.buffered_bytes(), HEADER_BYTES);
}

#[test]
fn a_stranger_has_a_lower_limit() {
    let mut decoder = FrameDecoder::new();
    decoder.set_limit(100);
    decoder.push(&framed(Kind::Hello, &[0; 100]));
    assert!(decoder.next_frame().expect("within").is_some());
    decoder.push(&framed(Kind::Hello, &[0; 101]));
    assert_eq!(decoder.next_frame(), Err(FrameError::TooLarge(101)));
    // No limit above the wire's own.
    decoder.set_limit(usize::MAX);
    let mut decoder = FrameDecoder::new();
    decoder.set_limit(usize::MAX);
    let mut header = framed(Kind::Layout, &[]);
    header[4..].copy_from_slice(&(u32::MAX).to_le_bytes());
    decoder.push(&header);
    assert!(decoder.next_frame().is_err());
}

#[test]
fn a_message_over_the_limit_is_not_sent() {
    let message = Message::Ack(Ack {
        transfer_id: TransferId([7; 16]),
        ranks: vec![(TpRank(u32::MAX), PpRank(u32::MAX)); FRAME_BYTES_MAX / 11 + 1],
        number: None,
    });
    let error = message.to_frame().expect_err("too large");
    assert!(matches!(error, FrameError::TooLarge(bytes) if bytes > FRAME_BYTES_MAX));
}

#[test]
fn fields_of_later_versions_are_skipped() {
    // Without the number that a build may leave out.
    let release = Ok(vec![Message::Release(Release {
        transfer_id: TransferId([7; 16]),
        number: None,
    })]);
    for value in [
        &[0xc0][..],
        &[0x93, 1, 2, 3],
        &[0x81, 0xa1, b'k', 0x91, 0xc4, 2, 0, 0],
    ] {
        assert_eq!(read(&release_with(value)), release);
    }
    // So with what carries nothing today.
    let ping = framed(Kind::Ping, &map(&[("load", &[7])]));
    assert_eq!(read(&ping), Ok(vec![Message::Ping]));
    // Ways to read a rank that this build does not know.
    let later = map(&[("cxl", &[0x80]), ("tcp", &[0xc0])]);
    let endpoints: Endpoints = decode(Kind::Layout, &later).expect("skipped");
    assert_eq!(endpoints, Endpoints::default());
}

#[test]
fn a_refusal_of_a_later_version_is_understood_as_one() {
    let reject = map(&[("code", b"\xa5later"), ("reason", b"\xa2no")]);
    assert_eq!(
        read(&framed(Kind::Reject, &reject)),
        Ok(vec![Message::Reject(Box::new(Reject {
            code: RejectCode::Unknown,
            reason: "no".into(),
            fields: None,
        }))])
    );
}

#[test]
fn push_mode_is_refused_by_name() {
    for kind in [
        Kind::Offer,
        Kind::Destinations,
        Kind::Piece,
        Kind::PieceFailed,
        Kind::Quiesced,
    ] {
        let error = read(&framed(kind, &[0x80])).expect_err("reserved");
        assert_eq!(
            error.to_string(),
            format!("push mode is not available: {kind:?} refused")
        );
    }
}

#[test]
fn data_frames_do_not_belong_on_a_control_port() {
    for kind in Kind::ALL
        .iter()
        .filter(|kind| (32..64).contains(&kind.to_byte()))
    {
        let error = read(&framed(*kind, &[0x80])).expect_err("misplaced");
        assert_eq!(error, MessageError::DataPlane(*kind));
        assert!(error.to_string().contains("belongs on a data port"));
    }
}

#[test]
fn nesting_bombs_do_not_use_up_the_stack() {
    // Lists in lists, maps in maps, in a field that is skipped; on a thread with a small stack.
    let lists = vec![0x91; 1 << 20];
    let maps: Vec<u8> = [0x81, 0xa1, b'k'].repeat(1 << 19);
    let bombs = [lists, maps];
    let run = move || {
        for bomb in &bombs {
            let problem = payload_error(&release_with(bomb));
            assert!(problem.contains("depth limit"), "{problem}");
            for kind in Kind::ALL.iter().filter(|kind| kind.to_byte() < 32) {
                assert!(read(&framed(*kind, bomb)).is_err(), "{kind:?}");
            }
        }
    };
    let thread = std::thread::Builder::new().stack_size(128 << 10).spawn(run);
    thread.expect("starts").join().expect("no overflow");
    // What is ours is far from the limit.
    let deep = [[0x91; 20].as_slice(), &[0xc0]].concat();
    assert!(read(&release_with(&deep)).is_ok());
}

#[test]
fn lengths_beyond_the_payload_set_nothing_aside() {
    // A list of 2^32 - 1 ranks, a text and a byte string of 4 GiB, in a payload of some bytes.
    let huge = u32::MAX.to_be_bytes();
    let id = [&[0xd9, 32], "07".repeat(16).as_bytes()].concat();
    let list = [&[0xdd], huge.as_slice()].concat();
    let text = [&[0xdb], huge.as_slice()].concat();
    let bytes = [&[0xc6], huge.as_slice()].concat();
    let pairs = [&[0xdf], huge.as_slice()].concat();
    for frame in [
        framed(Kind::Ack, &map(&[("transfer_id", &id), ("ranks", &list)])),
        framed(Kind::Release, &map(&[("transfer_id", &text)])),
        framed(Kind::Hello, &map(&[("compat_digest", &bytes)])),
        framed(Kind::Hello, &map(&[("nonce", &bytes)])),
        framed(Kind::Accept, &map(&[("proof", &bytes)])),
        framed(Kind::Challenge, &map(&[("nonce", &bytes)])),
        framed(Kind::Challenge, &map(&[("nonce", &list)])),
        framed(Kind::Proof, &map(&[("proof", &bytes)])),
        framed(Kind::Reject, &map(&[("fields", &pairs)])),
        framed(Kind::Granted, &map(&[("block_ids", &list)])),
        framed(Kind::Layout, &map(&[("workers", &list)])),
        framed(Kind::Ping, &pairs),
        framed(Kind::Ping, &list),
    ] {
        assert!(read(&frame).is_err(), "{frame:02x?}");
    }
}

#[test]
fn values_out_of_bounds_are_refused() {
    let id = |text: &str| {
        let mut bytes = vec![0xd9, u8::try_from(text.len()).expect("short")];
        bytes.extend_from_slice(text.as_bytes());
        bytes
    };
    for text in [
        "",
        "07",
        &"0g".repeat(16),
        &"07".repeat(17),
        &"é".repeat(16),
    ] {
        let frame = framed(Kind::Release, &map(&[("transfer_id", &id(text))]));
        assert!(payload_error(&frame).contains("transfer_id"), "{text:?}");
    }
    // A negative number where a count belongs.
    let renew = map(&[
        ("transfer_id", &id(&"07".repeat(16))),
        ("question", &[0xff]),
    ]);
    payload_error(&framed(Kind::Renew, &renew));
    // A missing field, by name.
    let renew = map(&[("transfer_id", &id(&"07".repeat(16)))]);
    assert!(payload_error(&framed(Kind::Renew, &renew)).contains("question"));
    // An engine id with a line break, which could forge a log line.
    let mut hello = samples()[0].to_frame().expect("encodes");
    let at = hello
        .windows(2)
        .position(|pair| pair == b"d0")
        .expect("the id");
    hello[at + 1] = b'\n';
    assert!(payload_error(&hello).contains("control characters"));
}

#[test]
fn caches_that_are_not_sound_do_not_decode() {
    let frame = samples()[3].to_frame().expect("encodes");
    // Regions of 32768 bytes become 32767 long: the last row lies outside.
    let at = frame
        .windows(3)
        .position(|bytes| bytes == [0xcd, 0x80, 0x00])
        .expect("the region's length");
    let mut short = frame.clone();
    short[at + 1..at + 3].copy_from_slice(&[0x7f, 0xff]);
    assert!(
        payload_error(&short).contains("ends at byte 32768"),
        "{}",
        payload_error(&short)
    );
}

#[test]
fn reasons_are_cut_at_a_character() {
    assert_eq!(bounded_reason("short"), "short");
    let long = "é".repeat(REASON_BYTES_MAX);
    let cut = bounded_reason(&format!("x{long}"));
    assert_eq!(cut.len(), REASON_BYTES_MAX - 1);
    assert!(cut.ends_with('é'));
}

#[test]
fn a_large_frame_leaves_no_large_buffer_behind() {
    let mut decoder = FrameDecoder::new();
    decoder.push(&framed(Kind::Layout, &vec![0xc0; FRAME_BYTES_MAX]));
    assert!(decoder.next_frame().expect("whole").is_some());
    for _ in 0..3 {
        decoder.push(&framed(Kind::Ping, &[0x80]));
        assert!(decoder.next_frame().expect("whole").is_some());
    }
    assert!(
        decoder.capacity_bytes() <= 1 << 20,
        "{}",
        decoder.capacity_bytes()
    );
}

fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let count = samples().len();
    (
        0..count,
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    )
        .prop_map(|(sample, changes)| {
            let mut frame = samples()[sample].to_frame().expect("encodes");
            for (index, byte) in changes {
                // The header mostly stays, so that payloads are reached.
                let at = index.index(frame.len() - HEADER_BYTES) + HEADER_BYTES;
                frame[at] = byte;
            }
            frame
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(&bytes);
        for kind in Kind::ALL {
            let _ = Message::from_frame(*kind, &bytes);
        }
    }

    #[test]
    fn random_payloads_never_panic(kind in 1..16u8, bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let kind = Kind::from_byte(kind).expect("a control kind");
        let _ = read(&framed(kind, &bytes));
    }

    #[test]
    fn changed_frames_decode_to_something_or_are_refused(frame in mutated()) {
        if let Ok(messages) = read(&frame) {
            for message in messages {
                // Whatever was understood can be said again.
                let again = message.to_frame().expect("encodes");
                prop_assert_eq!(read(&again), Ok(vec![message]));
            }
        }
    }
}
