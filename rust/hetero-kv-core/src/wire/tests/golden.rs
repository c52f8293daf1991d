//! The exact bytes of wire version 1. They change only with the version. Made from the msgpack
//! specification by another encoder than the one under test.

use super::*;

#[rustfmt::skip]
const FRAMES: &[(&str, &[&str])] = &[
    ("Hello", &["684b0101a600000085a876657273696f6e73920101a466726f6d85a6656e67696e65a26430ab696e6361726e", "6174696f6e07a764705f72616e6b00a774705f73697a6501a770705f73697a6501ad6578706563745f656e67", "696e65a670305f647031b26578706563745f696e6361726e6174696f6ecf1122334455667788ad636f6d7061", "745f646967657374c4200909090909090909090909090909090909090909090909090909090909090909"]),
    ("Accept", &["684b01024e00000082a776657273696f6e01a466726f6d85a6656e67696e65a670305f647031ab696e636172", "6e6174696f6ecf1122334455667788a764705f72616e6b01a774705f73697a6502a770705f73697a6501"]),
    ("Reject", &["684b01033e00000083a4636f6465ac696e636f6d70617469626c65a6726561736f6ea26e6fa66669656c6473", "82a56474797065a7666c6f61743332a56d6f64656ca474696e79"]),
    ("Layout", &["684b01041102000082a466726f6d85a6656e67696e65a670305f647031ab696e6361726e6174696f6ecf1122", "334455667788a764705f72616e6b01a774705f73697a6502a770705f73697a6501a7776f726b6572739185a7", "64705f72616e6b01a774705f72616e6b00a770705f72616e6b00a5636163686584aa6e756d5f626c6f636b73", "40aa68656164735f68656c6402a7726567696f6e739182a462617365cf00007f0000000000a56279746573cd", "8000a66c61796572739183a46e616d65bd6d6f64656c2e6c61796572732e302e73656c665f6174746e2e6174", "746ea6726567696f6e00a570617274739186ac6f66667365745f627974657300b2626c6f636b5f7374726964", "655f6279746573cd0200b1686561645f7374726964655f6279746573cd0100a4726f777301b0726f775f7374", "726964655f6279746573cd0100a9726f775f6279746573cd0100a9656e64706f696e747382a770726f636573", "7389a7626f6f745f6964a162ad7069645f6e616d657370616365ceeffffffca3706964cd1092ab7374617274", "5f7469636b7363ad6e6f6e63655f61646472657373cf00007f0000001000a56e6f6e6365c410000102030405", "060708090a0b0c0d0e0fb26c656173655f706167655f61646472657373cf00007f0000002000ab6c65617365", "5f736c6f7473cd4000b06c656173655f706167655f6e6f6e636505a374637082a4686f7374a7666430303a3a", "31a4706f7274cd1388"]),
    ("Claim", &["684b01059200000084ab7472616e736665725f6964d920303730373037303730373037303730373037303730", "3730373037303730373037a565706f6368cd012cad70726f6d70745f646967657374d9403061306130613061", "3061306130613061306130613061306130613061306130613061306130613061306130613061306130613061", "306130613061306130613061a87175657374696f6e01"]),
    ("Granted", &["684b01067b00000086ab7472616e736665725f6964d920303730373037303730373037303730373037303730", "3730373037303730373037aa6772616e7465645f6d73cd7530a56c6561736582a4736c6f7403a565706f6368", "cd012ca9626c6f636b5f696473919203ce00011170aa6e756d5f746f6b656e7314a87175657374696f6e01"]),
    ("Gone", &["684b01074800000083ab7472616e736665725f6964d920303730373037303730373037303730373037303730", "3730373037303730373037a6726561736f6ea765787069726564a87175657374696f6e01"]),
    ("Renew", &["684b01083900000082ab7472616e736665725f6964d920303730373037303730373037303730373037303730", "3730373037303730373037a87175657374696f6e02"]),
    ("Ack", &["684b01094400000083ab7472616e736665725f6964d92030373037303730373037303730373037303730", "37303730373037303730373037a572616e6b7392920000920100a66e756d62657203"]),
    ("Release", &["684b010a3700000082ab7472616e736665725f6964d92030373037303730373037303730373037303730", "37303730373037303730373037a66e756d62657204"]),
    ("Ping", &["684b010b0100000080"]),
    ("Pong", &["684b010c0100000080"]),
    ("Bye", &["684b010d0100000080"]),
    ("Challenge", &["684b010e2900000081a56e6f6e6365c4200505050505050505050505050505050505050505050505050505050505050505"]),
    ("Proof", &["684b010f2900000081a570726f6f66c4200606060606060606060606060606060606060606060606060606060606060606"]),
];

#[test]
fn every_message_has_its_bytes() {
    let samples = samples();
    assert_eq!(samples.len(), FRAMES.len());
    for (message, (name, hex)) in samples.into_iter().zip(FRAMES) {
        assert_eq!(format!("{:?}", message.kind()), *name);
        let frame = message.to_frame().expect("encodes");
        assert_eq!(hex::encode(&frame), hex.concat(), "{name}");
        assert_eq!(read(&frame), Ok(vec![message]), "{name}");
    }
}

#[test]
fn every_control_kind_is_sampled() {
    let sampled: Vec<Kind> = samples().iter().map(Message::kind).collect();
    let control = Kind::ALL.iter().filter(|kind| kind.to_byte() < 32);
    assert_eq!(sampled, control.copied().collect::<Vec<_>>());
}

#[test]
fn kinds_keep_their_bytes() {
    let bytes: Vec<(u8, String)> = Kind::ALL
        .iter()
        .map(|kind| (kind.to_byte(), format!("{kind:?}")))
        .collect();
    let expected = [
        (1, "Hello"),
        (2, "Accept"),
        (3, "Reject"),
        (4, "Layout"),
        (5, "Claim"),
        (6, "Granted"),
        (7, "Gone"),
        (8, "Renew"),
        (9, "Ack"),
        (10, "Release"),
        (11, "Ping"),
        (12, "Pong"),
        (13, "Bye"),
        (14, "Challenge"),
        (15, "Proof"),
        (32, "Attach"),
        (33, "Attached"),
        (34, "Fetch"),
        (35, "FetchData"),
        (36, "FetchEnd"),
        (37, "AttachRefused"),
        (38, "VerbsConnect"),
        (39, "VerbsConnected"),
        (40, "VerbsRefused"),
        (41, "AttachChallenge"),
        (42, "AttachProof"),
        (64, "Offer"),
        (65, "Destinations"),
        (66, "Piece"),
        (67, "PieceFailed"),
        (68, "Quiesced"),
    ];
    assert_eq!(bytes, expected.map(|(byte, name)| (byte, name.to_owned())));
    for byte in 0..=u8::MAX {
        let known = expected.iter().any(|(known, _)| *known == byte);
        assert_eq!(Kind::from_byte(byte).is_some(), known, "{byte}");
    }
}

#[test]
fn headers_keep_their_bytes() {
    let header = Header {
        kind: Kind::Claim,
        payload_bytes: 0x0102,
    };
    let bytes = *b"hK\x01\x05\x02\x01\x00\x00";
    assert_eq!(header.to_bytes(), bytes);
    assert_eq!(Header::parse(bytes), Ok(header));
}

#[test]
fn refusals_and_ends_keep_their_words() {
    let words = [
        (RejectCode::Version, "version"),
        (RejectCode::WrongEngine, "wrong_engine"),
        (RejectCode::WrongIncarnation, "wrong_incarnation"),
        (RejectCode::Incompatible, "incompatible"),
        (RejectCode::NotProducer, "not_producer"),
        (RejectCode::TooManyPeers, "too_many_peers"),
        (RejectCode::AlreadyConnected, "already_connected"),
        (RejectCode::Unauthenticated, "unauthenticated"),
        (RejectCode::Protocol, "protocol"),
    ];
    for (code, word) in words {
        assert_eq!(serde_json::to_value(code).expect("encodes"), word);
    }
    let ends = [
        (GoneReason::Unknown, "unknown"),
        (GoneReason::Expired, "expired"),
        (GoneReason::Released, "released"),
        (GoneReason::Foreign, "foreign"),
    ];
    for (reason, word) in ends {
        assert_eq!(serde_json::to_value(reason).expect("encodes"), word);
    }
}

/// What keys add to frames that builds without them know.
#[test]
fn a_greeting_and_its_acceptance_have_their_bytes_with_keys() {
    const HELLO: &[&str] = &[
        "684b0101ce00000086a876657273696f6e73920101a466726f6d85a6656e67696e65a26430ab696e6361726e6174",
        "696f6e07a764705f72616e6b00a774705f73697a6501a770705f73697a6501ad6578706563745f656e67696e65a6",
        "70305f647031b26578706563745f696e6361726e6174696f6ecf1122334455667788ad636f6d7061745f64696765",
        "7374c4200909090909090909090909090909090909090909090909090909090909090909a56e6f6e6365c4200505",
        "050505050505050505050505050505050505050505050505050505050505",
    ];
    const ACCEPT: &[&str] = &[
        "684b01027600000083a776657273696f6e01a466726f6d85a6656e67696e65a670305f647031ab696e6361726e61",
        "74696f6ecf1122334455667788a764705f72616e6b01a774705f73697a6502a770705f73697a6501a570726f6f66",
        "c4200606060606060606060606060606060606060606060606060606060606060606",
    ];
    for (mut message, hex) in samples().into_iter().zip([HELLO, ACCEPT]) {
        if let Message::Hello(hello) = &mut message {
            hello.nonce = Some(vec![5; 32]);
        }
        if let Message::Accept(accept) = &mut message {
            accept.proof = Some(vec![6; 32]);
        }
        let frame = message.to_frame().expect("encodes");
        assert_eq!(hex::encode(&frame), hex.concat());
        assert_eq!(read(&frame), Ok(vec![message]));
    }
}
