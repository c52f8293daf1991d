use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::*;
use crate::wire::message::{Challenge, Proof};
use crate::wire::{FrameError, HEADER_BYTES, Kind, decode, encode};

/// The message encodes to exactly these bytes and they decode to the message: a change of either
/// breaks peers of another version.
fn check_golden<M: Serialize + DeserializeOwned + PartialEq + Debug>(
    kind: Kind,
    message: &M,
    golden: &str,
) {
    let bytes = encode(kind, message).expect("the message is small");
    assert_eq!(hex::encode(&bytes), golden, "{kind:?}");
    let back: M = decode(kind, &bytes[HEADER_BYTES..]).expect("own bytes decode");
    assert_eq!(&back, message);
    for cut in HEADER_BYTES..bytes.len() - 1 {
        assert!(
            decode::<M>(kind, &bytes[HEADER_BYTES..cut]).is_err(),
            "{kind:?} cut at byte {cut} decodes"
        );
    }
}

fn fetch() -> Fetch {
    Fetch {
        id: 7,
        slot: Slot(3),
        epoch: Epoch(300),
        runs: vec![SourceRun(0, 65_536, 4096), SourceRun(1, 1, 5)],
    }
}

#[test]
fn refusals_keep_their_words_and_later_ones_are_understood_as_one() {
    for (code, word) in [
        (AttachRefusal::Engine, "engine"),
        (AttachRefusal::Incarnation, "incarnation"),
        (AttachRefusal::Rank, "rank"),
        (AttachRefusal::NotReady, "not_ready"),
        (AttachRefusal::Busy, "busy"),
        (AttachRefusal::Unauthenticated, "unauthenticated"),
    ] {
        assert_eq!(serde_json::to_value(code).expect("encodes"), word);
    }
    let later: AttachRefusal = serde_json::from_str("\"later\"").expect("decodes");
    assert_eq!(later, AttachRefusal::Unknown);
}

#[test]
fn golden_bytes() {
    check_golden(
        Kind::Attach,
        &Attach {
            engine: EngineId::new("p_dp1").expect("valid"),
            incarnation: Incarnation(0xab),
            dp_rank: DpRank(1),
            tp_rank: TpRank(2),
            pp_rank: PpRank(0),
            nonce: None,
        },
        "684b01203700000085a6656e67696e65a5705f647031ab696e6361726e6174696f6eccaba764705f72616e6b01a774705f72616e6b02a770705f72616e6b00",
    );
    check_golden(
        Kind::Attached,
        &Attached {
            region_bytes: vec![1 << 20, 12],
            proof: None,
        },
        "684b01211500000081ac726567696f6e5f627974657392ce001000000c",
    );
    check_golden(
        Kind::Attach,
        &Attach {
            engine: EngineId::new("p_dp1").expect("valid"),
            incarnation: Incarnation(0xab),
            dp_rank: DpRank(1),
            tp_rank: TpRank(2),
            pp_rank: PpRank(0),
            nonce: Some(vec![5; 32]),
        },
        "684b01205f00000086a6656e67696e65a5705f647031ab696e6361726e6174696f6eccaba764705f72616e6b01a774705f72616e6b02a770705f72616e6b00a56e6f6e6365c4200505050505050505050505050505050505050505050505050505050505050505",
    );
    check_golden(
        Kind::AttachChallenge,
        &Challenge { nonce: vec![5; 32] },
        "684b01292900000081a56e6f6e6365c4200505050505050505050505050505050505050505050505050505050505050505",
    );
    check_golden(
        Kind::AttachProof,
        &Proof { proof: vec![6; 32] },
        "684b012a2900000081a570726f6f66c4200606060606060606060606060606060606060606060606060606060606060606",
    );
    check_golden(
        Kind::Attached,
        &Attached {
            region_bytes: vec![1 << 20, 12],
            proof: Some(vec![6; 32]),
        },
        "684b01213d00000082ac726567696f6e5f627974657392ce001000000ca570726f6f66c4200606060606060606060606060606060606060606060606060606060606060606",
    );
    check_golden(
        Kind::AttachRefused,
        &AttachRefused {
            code: AttachRefusal::Incarnation,
            text: "started anew".into(),
        },
        "684b01252400000082a4636f6465ab696e6361726e6174696f6ea474657874ac7374617274656420616e6577",
    );
    let ends = QueuePairEnds {
        gid: vec![7; 16],
        lid: 0,
        mtu_bytes: 4096,
        reads_in_flight_max: 16,
        queue_pairs: vec![QueuePairEnd(17, 0x00ff_ffff)],
    };
    check_golden(
        Kind::VerbsConnect,
        &ends,
        "684b01265200000085a3676964c41007070707070707070707070707070707a36c696400a96d74755f6279746573cd1000b372656164735f696e5f666c696768745f6d617810ab71756575655f7061697273919211ce00ffffff",
    );
    check_golden(
        Kind::VerbsConnected,
        &ends,
        "684b01275200000085a3676964c41007070707070707070707070707070707a36c696400a96d74755f6279746573cd1000b372656164735f696e5f666c696768745f6d617810ab71756575655f7061697273919211ce00ffffff",
    );
    check_golden(
        Kind::VerbsRefused,
        &VerbsRefused { text: "no".into() },
        "684b01280900000081a474657874a26e6f",
    );
    check_golden(
        Kind::Fetch,
        &fetch(),
        "684b01222800000084a2696407a4736c6f7403a565706f6368cd012ca472756e73929300ce00010000cd100093010105",
    );
    check_golden(
        Kind::FetchData,
        &FetchData { id: 7, bytes: 4101 },
        "684b01230e00000082a2696407a56279746573cd1005",
    );
    check_golden(
        Kind::FetchEnd,
        &FetchEnd {
            id: 7,
            status: FetchStatus::LeaseGone,
            text: String::new(),
        },
        "684b01241d00000083a2696407a6737461747573aa6c656173655f676f6e65a474657874a0",
    );
}

#[test]
fn the_largest_messages_fit_the_frame_limit() {
    let fetch = Fetch {
        id: u64::MAX,
        slot: Slot(u32::MAX),
        epoch: Epoch(u64::MAX),
        runs: vec![SourceRun(u32::MAX, u64::MAX, u64::MAX); FETCH_RUNS_MAX],
    };
    let attached = Attached {
        region_bytes: vec![u64::MAX; 4096],
        proof: None,
    };
    for bytes in [
        encode(Kind::Fetch, &fetch).expect("under the frame limit"),
        encode(Kind::Attached, &attached).expect("under the frame limit"),
    ] {
        let payload_bytes = bytes.len() - HEADER_BYTES;
        assert!(
            payload_bytes <= DATA_FRAME_BYTES_MAX,
            "{payload_bytes} bytes"
        );
    }
}

#[test]
fn unknown_fields_are_tolerated_and_unknown_statuses_are_not() {
    #[derive(Serialize)]
    struct Newer<'a> {
        id: u64,
        status: &'a str,
        text: &'a str,
        added_later: u32,
    }
    let newer = |status| Newer {
        id: 1,
        status,
        text: "",
        added_later: 9,
    };
    let bytes = encode(Kind::FetchEnd, &newer("ok")).expect("small");
    let end: FetchEnd = decode(Kind::FetchEnd, &bytes[HEADER_BYTES..]).expect("tolerated");
    assert_eq!(end.status, FetchStatus::Ok);

    let bytes = encode(Kind::FetchEnd, &newer("perhaps")).expect("small");
    let error = decode::<FetchEnd>(Kind::FetchEnd, &bytes[HEADER_BYTES..]).expect_err("refused");
    assert!(matches!(
        error,
        FrameError::Payload {
            kind: Kind::FetchEnd,
            ..
        }
    ));
}

#[test]
fn an_endpoint_that_is_not_offered_leaves_no_bytes_and_an_unknown_one_is_skipped() {
    use crate::wire::card::{Endpoints, TcpEndpoint, VerbsEndpoint};

    /// What a build knows that has no `verbs`.
    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Older {
        tcp: Option<TcpEndpoint>,
    }

    let tcp = TcpEndpoint {
        host: "10.0.0.1".into(),
        port: 5000,
    };
    let without = Endpoints {
        tcp: Some(tcp.clone()),
        ..Endpoints::default()
    };
    let bytes = rmp_serde::to_vec_named(&without).expect("encodes");
    assert!(!bytes.windows(5).any(|window| window == b"verbs"));
    assert_eq!(
        rmp_serde::from_slice::<Endpoints>(&bytes).ok(),
        Some(without.clone())
    );
    let with = Endpoints {
        verbs: Some(VerbsEndpoint {
            host: "10.0.0.1".into(),
            port: 5000,
            gid: vec![7; 16],
            region_keys: vec![1, u32::MAX],
            lease_page_address: 0x7f00_0000_2000,
            lease_page_key: 9,
            lease_slots: 64,
            lease_page_nonce: 5,
        }),
        ..without
    };
    let bytes = rmp_serde::to_vec_named(&with).expect("encodes");
    assert_eq!(rmp_serde::from_slice::<Endpoints>(&bytes).ok(), Some(with));
    let older: Older = rmp_serde::from_slice(&bytes).expect("skips what it does not know");
    assert_eq!(older, Older { tcp: Some(tcp) });
}
