//! What each connector's legs carry, as parsed values and, where it matters, byte for byte. That
//! vLLM takes them is shown in `tests/vllm/test_proxy_legs.py`.

use serde_json::{Value, json};

use super::*;
use crate::openai::response::Ended;

const ID: &str = "00112233445566778899aabbccddeeff";

fn peer(host: &str, dp: u32, dp_size: u32, dp_rank0: u32, tp: u32) -> PeerSpec {
    PeerSpec {
        dp,
        dp_size,
        dp_rank0,
        tp,
        zmq: ZmqAddress {
            host: host.to_owned(),
            handshake: 6301,
            notify: 61005,
        },
        bootstrap: format!("http://{host}:8998"),
        given: Vec::new(),
    }
}

fn transfer<'a>(prefill: &'a PeerSpec, rank: u32, decode: &'a PeerSpec) -> Transfer<'a> {
    Transfer {
        id: ID,
        prefill: Slot {
            peer: prefill,
            rank,
            engine_id: Some("engine-\"7\""),
        },
        decode: Some(Slot {
            peer: decode,
            rank: 0,
            engine_id: None,
        }),
    }
}

fn connector(name: &str) -> &'static dyn Connector {
    by_name(name).expect("a known connector")
}

fn parsed(leg: &Leg) -> Value {
    serde_json::from_str(&leg.params).expect("JSON")
}

fn length(params: &str) -> PrefillAnswer<'_> {
    PrefillAnswer {
        params: Some(params),
        ended: Ended::Length,
        usage: None,
    }
}

#[test]
fn names_and_orders() {
    let known: Vec<(&str, Order, bool, bool)> = ALL
        .iter()
        .map(|connector| {
            let shares = connector.shares_transfer();
            let pair = connector.needs_pair();
            (connector.name(), connector.order(), shares, pair)
        })
        .collect();
    assert_eq!(
        known,
        [
            ("hetero", Order::PrefillFirst, true, false),
            ("none", Order::DecodeAlone, false, false),
            ("nixl", Order::PrefillFirst, false, false),
            ("mooncake", Order::PrefillFirst, false, false),
            ("moriio-read", Order::PrefillFirst, false, true),
            ("moriio-write", Order::Together, false, true),
        ]
    );
    assert!(by_name("p2p").is_none());
}

#[test]
fn hetero_and_nixl_hand_the_answers_params_over_byte_for_byte() {
    let (p, d) = (peer("p", 1, 1, 0, 0), peer("d", 1, 1, 0, 0));
    let returned = r#"{ "remote_block_ids":[[1]] ,"f":1.50}"#;
    for name in ["hetero", "nixl"] {
        let transfer = transfer(&p, 0, &d);
        let connector = connector(name);
        let leg = connector.decode_leg(&transfer, Some(&length(returned)));
        let want = Leg {
            params: returned.to_owned(),
            request_id: None,
        };
        assert_eq!(leg, Some(want));
        let nothing = PrefillAnswer {
            params: None,
            ended: Ended::Length,
            usage: None,
        };
        assert_eq!(connector.decode_leg(&transfer, Some(&nothing)), None);
        let prefill = parsed(&connector.prefill_leg(&transfer));
        assert_eq!(prefill["do_remote_decode"], true);
        assert_eq!(prefill["do_remote_prefill"], false);
    }
}

#[test]
fn mooncake_names_its_transfer_the_bootstrap_server_and_the_engine_at_the_rank() {
    let (p, d) = (peer("10.0.0.1", 4, 4, 0, 0), peer("d", 1, 1, 0, 0));
    let transfer = transfer(&p, 2, &d);
    let mooncake = connector("mooncake");
    let id = format!("xfer-{ID}");
    assert_eq!(
        parsed(&mooncake.prefill_leg(&transfer)),
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id})
    );
    let answer = |ended| PrefillAnswer {
        params: None,
        ended,
        usage: None,
    };
    let leg = mooncake.decode_leg(&transfer, Some(&answer(Ended::Length)));
    assert_eq!(
        parsed(&leg.expect("kept")),
        json!({
            "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
            "remote_bootstrap_addr": "http://10.0.0.1:8998", "remote_engine_id": "engine-\"7\"",
        })
    );
    // It keeps blocks for no other end.
    for ended in [Ended::Stopped, Ended::Unknown] {
        assert_eq!(mooncake.decode_leg(&transfer, Some(&answer(ended))), None);
    }
}

#[test]
fn moriio_legs_name_both_control_sockets_in_the_request_id() {
    let (p, d) = (peer("fd00::1", 8, 8, 0, 0), peer("10.0.0.2", 1, 1, 0, 8));
    let want = format!(
        "___prefill_addr_host:fd00::1,handshake:6301,notify:61005___decode_addr_host:10.0.0.2,\
         handshake:6301,notify:61005_{ID}"
    );
    for name in ["moriio-read", "moriio-write"] {
        let connector = connector(name);
        let transfer = transfer(&p, 3, &d);
        let legs = [
            Some(connector.prefill_leg(&transfer)),
            connector.decode_leg(&transfer, Some(&length("{}"))),
        ];
        for leg in legs {
            assert_eq!(leg.expect("a leg").request_id, Some(want.clone()));
        }
    }
}

#[test]
fn moriio_read_keeps_the_answers_rank_and_fills_what_is_missing() {
    let (p, d) = (peer("p", 4, 4, 0, 0), peer("d", 2, 2, 0, 0));
    let transfer = transfer(&p, 3, &d);
    let read = connector("moriio-read");
    let prefill = parsed(&read.prefill_leg(&transfer));
    assert_eq!(prefill["transfer_id"], json!(format!("tx-{ID}")));
    assert_eq!(prefill["remote_dp_size"], 2);

    let leg = |returned: &str| {
        let leg = read.decode_leg(&transfer, Some(&length(returned)));
        parsed(&leg.expect("a leg"))
    };
    // An engine that echoes its rank: that rank, whatever was chosen.
    let full =
        r#"{"remote_dp_rank":1,"remote_dp_size":4,"remote_dp_size_local":4,"tp_size":1,"x":[1]}"#;
    assert_eq!(
        leg(full),
        serde_json::from_str::<Value>(full).expect("JSON")
    );
    // One that does not: the rank that was chosen.
    assert_eq!(
        leg(r#"{"x":1}"#),
        json!({"x": 1, "remote_dp_rank": 3, "remote_dp_size": 4})
    );
    for broken in [r#"{"remote_dp_rank":"1"}"#, r#"{"remote_dp_rank":-1}"#] {
        assert_eq!(read.decode_leg(&transfer, Some(&length(broken))), None);
    }
}

#[test]
fn moriio_read_makes_ranks_of_a_part_of_an_engine_local_to_it() {
    let (p, d) = (peer("p", 8, 16, 8, 0), peer("d", 1, 1, 0, 0));
    let transfer = transfer(&p, 3, &d);
    let read = connector("moriio-read");
    let returned = r#"{"remote_dp_rank":11,"remote_dp_size":16,"remote_dp_size_local":8}"#;
    for returned in [returned, "{}"] {
        let leg = read.decode_leg(&transfer, Some(&length(returned)));
        let leg = parsed(&leg.expect("a leg"));
        assert_eq!(leg["remote_dp_rank"], 3, "{returned}");
        assert_eq!(leg["remote_dp_size"], 8, "{returned}");
    }
}

#[test]
fn moriio_write_pins_the_global_prefill_rank_and_the_decode_rank_as_leader() {
    let (p, d) = (peer("p", 8, 16, 8, 0), peer("d", 4, 4, 0, 0));
    let transfer = transfer(&p, 3, &d);
    let write = connector("moriio-write");
    assert_eq!(
        parsed(&write.prefill_leg(&transfer)),
        json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "transfer_id": format!("tx-{ID}"), "remote_dp_size": 4,
            "remote_dp_size_local": 4,
        })
    );
    assert_eq!(
        parsed(&write.decode_leg(&transfer, None).expect("a leg")),
        json!({
            "do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": null,
            "remote_block_ids": null, "transfer_id": format!("tx-{ID}"), "remote_dp_size": 16,
            "remote_dp_size_local": 8, "remote_dp_rank": 11, "is_request_leader": true,
        })
    );
    let (p, d) = (peer("p", 1, 1, 0, 8), peer("d", 1, 1, 0, 4));
    let transfer = self::transfer(&p, 0, &d);
    assert_eq!(parsed(&write.prefill_leg(&transfer))["remote_tp_size"], 4);
    let decode = write.decode_leg(&transfer, None).expect("a leg");
    assert_eq!(parsed(&decode)["remote_tp_size"], 8);
}

#[test]
fn workers_that_no_mode_can_serve_are_refused_with_the_reason() {
    let both = peer("p", 2, 2, 0, 2);
    let beyond = peer("p", 8, 8, 8, 0);
    let uneven = peer("p", 8, 12, 0, 0);
    let odd = peer("a___b", 1, 1, 0, 0);
    for name in ["moriio-read", "moriio-write"] {
        for (worker, part) in [
            (&both, "share ports"),
            (&beyond, "dp-rank0=8"),
            (&uneven, "dp-size=12"),
            (&odd, "kv-host=a___b"),
        ] {
            for role in [Role::Prefill, Role::Decode] {
                let reason = connector(name).check(role, worker).expect_err(part);
                assert!(reason.contains(part), "{reason}");
            }
        }
    }
    let part = peer("d", 8, 16, 8, 0);
    let write = connector("moriio-write");
    let reason = write.check(Role::Decode, &part).expect_err("a part");
    assert!(reason.contains("WRITE mode"), "{reason}");
    write.check(Role::Prefill, &part).expect("served");
    let read = connector("moriio-read");
    read.check(Role::Decode, &part).expect("served");
}

#[test]
fn a_worker_of_another_mode_is_refused_where_the_connector_has_modes() {
    let fault = |name, told| other_mode(connector(name), told);
    let reason = fault("moriio-read", "write").expect("another mode");
    for part in ["`mode`", "`write`", "`read`", "--connector moriio-write"] {
        assert!(reason.contains(part), "{part}: {reason}");
    }
    let reason = fault("moriio-write", "READ").expect("another mode");
    assert!(reason.contains("--connector moriio-read"), "{reason}");
    let reason = fault("moriio-write", "push").expect("no mode of its");
    assert!(reason.contains("`push`"), "{reason}");
    for (name, told) in [
        ("moriio-read", "READ"),
        ("moriio-read", "read"),
        ("moriio-write", "write"),
        ("hetero", "read"),
        ("hetero", "write"),
        ("nixl", "push"),
        ("mooncake", "write"),
        ("none", "read"),
    ] {
        assert_eq!(fault(name, told), None, "{name} {told}");
    }
}

#[test]
fn a_worker_of_another_connector_is_refused_by_its_name() {
    let fault = |name, told| other_connector(connector(name), told);
    for (name, told, way_out) in [
        ("hetero", "NixlConnector", "--connector nixl"),
        ("nixl", "hetero", "--connector hetero"),
        ("nixl", "HeteroKVConnector", "--connector hetero"),
        ("mooncake", "NixlPushConnector", "--connector nixl"),
        (
            "nixl",
            "MoRIIOConnector",
            "--connector moriio-read or moriio-write",
        ),
        ("moriio-write", "MooncakeConnector", "--connector mooncake"),
    ] {
        let reason = fault(name, told).expect(told);
        for part in ["`kv.connector`", told, name, way_out] {
            assert!(reason.contains(part), "{part}: {reason}");
        }
    }
    for (name, told) in [
        ("hetero", "hetero"),
        ("hetero", "HeteroKVConnector"),
        ("nixl", "NixlPullConnector"),
        ("nixl", "MultiConnector"),
        ("hetero", "LMCacheConnectorV1"),
        ("hetero", "none"),
        ("none", "NixlConnector"),
        ("moriio-read", "MoRIIOConnector"),
        ("moriio-write", "MoRIIOConnector"),
    ] {
        assert_eq!(fault(name, told), None, "{name} {told}");
    }
}
