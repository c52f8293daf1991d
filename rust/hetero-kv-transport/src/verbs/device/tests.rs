use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::*;
use crate::verbs::gid::{Found, GidType, usable};

fn gid(index: u8, address: &str) -> Gid {
    let raw = address.parse::<Ipv6Addr>().expect("an address").octets();
    Gid { index, raw }
}

/// The table of a port with one address of each kind, as rxe and mlx5 show it.
fn table() -> Vec<Found> {
    [
        ("fe80::200:ff:fe00:0", true),
        ("fe80::200:ff:fe00:0", false),
        ("::ffff:10.99.1.1", true),
        ("::ffff:10.99.1.1", false),
        ("::ffff:10.99.2.2", false),
        ("fd00::1", false),
    ]
    .iter()
    .zip(0..)
    .map(|((address, roce_v1), index)| Found {
        gid: gid(index, address),
        kind: if *roce_v1 {
            GidType::InfiniBandOrRoceV1
        } else {
            GidType::RoceV2
        },
    })
    .collect()
}

fn port(ethernet: bool, gid_index: Option<u8>) -> Port {
    Port {
        number: 1,
        lid: 0,
        ethernet,
        mtu: sys::IBV_MTU_1024,
        message_bytes_max: 1 << 23,
        gids: usable(&table(), ethernet, gid_index).expect("some are usable"),
    }
}

fn v4(text: &str) -> Option<IpAddr> {
    Some(text.parse::<Ipv4Addr>().expect("an address").into())
}

#[test]
fn the_gid_of_the_advertised_address_is_taken_and_else_one_that_routes() {
    let port = port(true, None);
    assert_eq!(port.own_gid(v4("10.99.2.2")).index, 4);
    assert_eq!(port.own_gid(v4("10.99.1.1")).index, 3, "not RoCE v1");
    assert_eq!(port.own_gid("fd00::1".parse().ok()).index, 5);
    assert_eq!(
        port.own_gid(v4("192.0.2.1")).index,
        3,
        "IPv4 before link-local"
    );
    assert_eq!(port.own_gid(None).index, 3);
}

#[test]
fn a_peer_is_reached_from_an_address_of_its_kind() {
    let port = port(true, None);
    let own = port.own_gid(None);
    let towards = |peer: &str| port.gid_towards(gid(0, peer).raw, own).map(|gid| gid.index);
    assert_eq!(towards("::ffff:10.1.1.1"), Some(3));
    assert_eq!(towards("fd00::9"), Some(5));
    assert_eq!(towards("fe80::9"), Some(1));
    let only = Port {
        gids: vec![gid(3, "::ffff:10.99.1.1")],
        ..port.clone()
    };
    let own = only.own_gid(None);
    assert_eq!(only.gid_towards(gid(0, "fd00::9").raw, own), None);
}

#[test]
fn a_set_index_is_the_only_one() {
    let port = port(true, Some(2));
    assert_eq!(port.own_gid(v4("10.99.2.2")).index, 2, "RoCE v1, as set");
    assert_eq!(usable(&table(), true, Some(77)), None);
    assert_eq!(usable(&[], true, None), None);
    let infiniband = usable(&table(), false, None).expect("every GID");
    assert_eq!(infiniband.len(), 6);
}
