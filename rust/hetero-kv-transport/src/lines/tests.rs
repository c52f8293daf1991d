//! Floods of one peer, and of many.

use std::net::Ipv4Addr;

use super::*;

fn peer(number: u32) -> Cause {
    Cause::Peer(Some(IpAddr::V4(Ipv4Addr::from(number))))
}

fn at_ms(ms: u64) -> Time {
    Time::from_origin(Duration::from_millis(ms))
}

#[test]
fn a_flood_of_one_peer_is_a_few_lines_and_then_their_number() {
    let mut lines = Lines::default();
    let logged = (0..10_000).filter(|ms| lines.due(peer(1), at_ms(*ms)).is_some());
    assert_eq!(logged.count(), LINES_MAX as usize);
    // Others have their own.
    assert_eq!(lines.due(peer(2), at_ms(10_000)), Some(0));
    assert_eq!(lines.due(Cause::System, at_ms(10_000)), Some(0));
    assert_eq!(lines.due(peer(1), at_ms(59_999)), None);
    let left_out = 10_000 - u64::from(LINES_MAX) + 1;
    assert_eq!(lines.due(peer(1), at_ms(60_000)), Some(left_out));
    assert_eq!(lines.due(peer(1), at_ms(60_001)), Some(0));
}

#[test]
fn a_flood_of_many_peers_is_bounded_in_memory_and_in_lines() {
    let mut lines = Lines::default();
    let mut logged = 0;
    for number in 1..=10_000 {
        logged += usize::from(lines.due(peer(number), at_ms(0)).is_some());
        assert!(lines.0.len() <= CAUSES_MAX + 1);
    }
    assert_eq!(logged, CAUSES_MAX + LINES_MAX as usize);
    // When their interval is over they make room.
    assert_eq!(lines.due(peer(200_000), at_ms(60_000)), Some(0));
    assert_eq!(lines.0.len(), 1);
}
