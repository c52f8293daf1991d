//! Frames as both forms of vLLM's worker pack them, and what is wrong with others.

use serde_json::json;

use super::*;

fn packed(value: &Value) -> Vec<u8> {
    rmp_serde::to_vec(value).expect("packs")
}

fn recent() -> Value {
    json!({
        "type": "P", "http_address": "10.0.0.1:8100",
        "zmq_address": "host:10.0.0.2,handshake:6301,notify:61005",
        "dp_size": 8, "tp_size": 1, "transfer_mode": "READ",
    })
}

fn older() -> Value {
    json!({
        "type": "register", "role": "D", "index": "7",
        "request_address": "http://10.0.0.3:8200/v1/completions",
        "handshake_port": 6301, "notify_port": 61005,
        "dp_size": 1, "tp_size": 4, "transfer_mode": "write",
    })
}

fn with(mut frame: Value, name: &str, value: Value) -> Value {
    frame[name] = value;
    frame
}

fn fault(frame: &Value) -> String {
    announced(&packed(frame)).expect_err("a fault")
}

#[test]
fn both_forms_say_the_same_things() {
    let told = announced(&packed(&recent())).expect("a registration");
    assert_eq!(
        told,
        Announced {
            role: Role::Prefill,
            url: "http://10.0.0.1:8100".to_owned(),
            zmq: ZmqAddress {
                host: "10.0.0.2".to_owned(),
                handshake: 6301,
                notify: 61005
            },
            dp_size: 8,
            tp_size: 1,
            mode: "READ",
        }
    );
    let told = announced(&packed(&older())).expect("a registration");
    assert_eq!(
        told,
        Announced {
            role: Role::Decode,
            url: "http://10.0.0.3:8200".to_owned(),
            zmq: ZmqAddress {
                host: "10.0.0.3".to_owned(),
                handshake: 6301,
                notify: 61005
            },
            dp_size: 1,
            tp_size: 4,
            mode: "WRITE",
        }
    );
}

#[test]
fn ipv6_has_colons_of_its_own() {
    let frame = with(recent(), "http_address", json!("fd00::1:8100"));
    let frame = with(
        frame,
        "zmq_address",
        json!("host:fd00::2,handshake:1,notify:2"),
    );
    let told = announced(&packed(&frame)).expect("a registration");
    assert_eq!(told.url, "http://[fd00::1]:8100");
    assert_eq!(told.zmq.host, "fd00::2");
    let frame = with(older(), "request_address", json!("[fd00::1]:8100"));
    let told = announced(&packed(&frame)).expect("a registration");
    assert_eq!(
        (told.url.as_str(), told.zmq.host.as_str()),
        ("http://[fd00::1]:8100", "fd00::1")
    );
}

#[test]
fn a_bad_member_is_named() {
    for name in [
        "type",
        "http_address",
        "zmq_address",
        "dp_size",
        "tp_size",
        "transfer_mode",
    ] {
        let mut frame = recent();
        frame.as_object_mut().expect("a map").remove(name);
        assert_eq!(fault(&frame), format!("`{name}` is missing"));
        let fault = fault(&with(recent(), name, json!([1])));
        assert!(fault.contains(&format!("`{name}` must be")), "{fault}");
    }
    for name in ["role", "request_address", "handshake_port", "notify_port"] {
        let mut frame = older();
        frame.as_object_mut().expect("a map").remove(name);
        assert_eq!(fault(&frame), format!("`{name}` is missing"));
    }
    for (name, value) in [
        ("type", json!("E")),
        ("transfer_mode", json!("PUSH")),
        ("dp_size", json!(-1)),
        ("http_address", json!("10.0.0.1")),
        ("http_address", json!("10.0.0.1:0")),
        ("http_address", json!("10.0.0.1:8100/v1")),
        ("http_address", json!("x".repeat(600))),
        ("zmq_address", json!("host:h,handshake:1")),
        ("zmq_address", json!("host:,handshake:1,notify:2")),
        ("zmq_address", json!("host:h,handshake:x,notify:2")),
    ] {
        let fault = fault(&with(recent(), name, value.clone()));
        assert!(fault.contains(name), "{value}: {fault}");
    }
    assert!(fault(&with(older(), "role", json!("X"))).contains("`role`"));
    assert!(fault(&with(older(), "handshake_port", json!(70000))).contains("handshake_port"));
}

#[test]
fn what_is_no_map_of_plain_members_is_refused() {
    let whole = packed(&recent());
    for bytes in [
        b"".as_slice(),
        b"{}",
        &whole[..whole.len() - 1],
        &[whole.as_slice(), b"\0"].concat(),
        // A map that claims 2^32 - 1 members, and a string that claims as many bytes.
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0x81, 0xdb, 0xff, 0xff, 0xff, 0xff, b'x'],
        &[0x81, 0xa1, b'x', 0xc4, 0x01, 0x00],
        // The same member twice.
        &[0x82, 0xa1, b'x', 0x01, 0xa1, b'x', 0x02],
    ] {
        announced(bytes).expect_err("no registration");
    }
    let deep = (0..8).fold(json!(1), |inner, _| json!([inner]));
    let fault = fault(&with(recent(), "extra", deep));
    assert!(fault.contains("depth"), "{fault}");
    // What vLLM may come to add is passed over.
    announced(&packed(&with(recent(), "extra", json!({"a": 1.5})))).expect("a registration");
}

proptest::proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
        let _ = announced(&bytes);
    }

    #[test]
    fn no_change_of_a_good_frame_makes_it_panic(at in 0usize..150, byte in proptest::prelude::any::<u8>()) {
        let mut bytes = packed(&recent());
        if let Some(there) = bytes.get_mut(at) {
            *there = byte;
        }
        let _ = announced(&bytes);
    }
}
