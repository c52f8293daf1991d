//! Addresses and descriptors. What the engine does is tested on the engine itself (`tests/mori_io`).

use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::wire::card::{MoriEndpoint, MoriStorage};

use super::endpoint::{check, memory_of, storages};
use super::failure::kind_of;
use super::{MoriHost, MoriHostError, Notifications};
use crate::error::ReadFailureKind;
use crate::net::listen::ListenAddress;

fn listen(host: &str, bind_host: Option<&str>) -> ListenAddress {
    ListenAddress {
        host: host.into(),
        bind_host: bind_host.map(Into::into),
        port_range: None,
        ports_needed: 1,
    }
}

fn region(base: u64, bytes: u64) -> MemoryRegion {
    MemoryRegion { base, bytes }
}

fn endpoint(memories: &[(u64, u64)]) -> MoriEndpoint {
    MoriEndpoint {
        version: "1.2.4".into(),
        host: "127.0.0.1".into(),
        port: 1,
        engine: vec![1],
        memories: memories
            .iter()
            .map(|&(base, bytes)| MoriStorage {
                base,
                bytes,
                descriptor: vec![2],
            })
            .collect(),
        lease_page: vec![3],
        lease_slots: 4,
        lease_page_nonce: 5,
        notifications: false,
    }
}

#[test]
fn only_an_ipv4_address_is_taken() {
    assert!(MoriHost::new(&listen("127.0.0.1", None)).is_ok());
    assert!(MoriHost::new(&listen("127.0.0.1", Some("127.0.0.1"))).is_ok());
    for host in ["::1", "fd00::7"] {
        let error = MoriHost::new(&listen(host, None)).expect_err("no IPv4");
        assert!(matches!(&error, MoriHostError::NoIpv4(named) if named == host));
        assert!(error.to_string().contains("set host to an IPv4 address"));
    }
    let error = MoriHost::new(&listen("10.0.0.1", Some("0.0.0.0"))).expect_err("bind_host");
    let text = error.to_string();
    assert!(
        text.contains("0.0.0.0") && text.contains("10.0.0.1"),
        "{text}"
    );
}

#[test]
fn regions_at_one_address_share_the_longest_registration() {
    let regions = [
        region(0x1000, 16),
        region(0x2000, 8),
        region(0x1000, 64),
        region(0x1000, 32),
    ];
    let expected = [region(0x1000, 64), region(0x2000, 8)];
    assert_eq!(storages(&regions), expected);
}

#[test]
fn a_region_is_found_in_the_memory_that_holds_all_of_it() {
    let endpoint = endpoint(&[(0x1000, 64), (0x2000, 64)]);
    assert_eq!(memory_of(&endpoint, &region(0x1000, 64)), Some(0));
    assert_eq!(memory_of(&endpoint, &region(0x2020, 32)), Some(1));
    assert_eq!(memory_of(&endpoint, &region(0x2020, 33)), None);
    assert_eq!(memory_of(&endpoint, &region(0xfff, 2)), None);
    assert_eq!(memory_of(&endpoint, &region(u64::MAX, u64::MAX)), None);
}

#[test]
fn an_endpoint_that_cannot_be_used_is_refused_by_what_is_wrong() {
    let good = endpoint(&[(0x1000, 64)]);
    check(&good, &[region(0x1000, 64)], Notifications::Off).expect("usable");
    let mut many = good.clone();
    many.memories = vec![good.memories[0].clone(); 5000];
    let mut large = good.clone();
    large.engine = vec![0; 5000];
    let mut empty = good.clone();
    empty.lease_page.clear();
    let cases = [
        (endpoint(&[]), "0 registered memories"),
        (many, "5000 registered memories"),
        (large, "5000 bytes"),
        (empty, "0 bytes"),
        (endpoint(&[(0x1001, 64)]), "region 0 of 64 bytes at 0x1000"),
    ];
    for (bad, words) in cases {
        let error = check(&bad, &[region(0x1000, 64)], Notifications::Off).expect_err(words);
        assert_eq!(error.kind, ReadFailureKind::Refused);
        assert!(error.problem.contains(words), "{error}");
    }
}

#[test]
fn only_a_peer_that_takes_notifications_is_sent_any() {
    let regions = [region(0x1000, 64)];
    let without = endpoint(&[(0x1000, 64)]);
    let with = MoriEndpoint {
        notifications: true,
        ..without.clone()
    };
    for (endpoint, notifications, usable) in [
        (&without, Notifications::Off, true),
        (&with, Notifications::Off, true),
        (&with, Notifications::On, true),
        (&without, Notifications::On, false),
    ] {
        let checked = check(endpoint, &regions, notifications);
        let refused = checked.err().map(|error| error.kind);
        assert_eq!(refused, (!usable).then_some(ReadFailureKind::Refused));
    }
}

#[test]
fn a_failure_is_named_by_the_words_of_the_engine() {
    for (text, kind) in [
        (
            "ERR_RDMA_OP: remote access error",
            ReadFailureKind::OutOfBounds,
        ),
        (
            "ERR_INVALID_ARGS: length out of range",
            ReadFailureKind::OutOfBounds,
        ),
        (
            "ERR_RDMA_OP: local protection error",
            ReadFailureKind::Local,
        ),
        (
            "ERR_RDMA_OP: Work Request Flushed Error",
            ReadFailureKind::PeerLost,
        ),
        ("", ReadFailureKind::PeerLost),
    ] {
        assert_eq!(kind_of(text), kind, "{text}");
    }
}
