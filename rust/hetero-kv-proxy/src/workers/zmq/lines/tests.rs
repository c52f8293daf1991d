//! Floods of one peer, and of many.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use tokio::time::Instant;

use super::{ADDRESSES_MAX, INTERVAL, LINES_MAX, Lines};

fn address(number: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(number))
}

#[test]
fn a_flood_of_one_peer_is_a_few_lines_and_then_their_number() {
    let (mut lines, start) = (Lines::default(), Instant::now());
    let due = |lines: &mut Lines, number, after_ms| {
        lines.due(address(number), start + Duration::from_millis(after_ms))
    };
    let logged = (0..10_000).filter(|at| due(&mut lines, 1, *at).is_some());
    assert_eq!(logged.count(), LINES_MAX as usize);
    // Others have their own.
    assert_eq!(due(&mut lines, 2, 10_000), Some(0));
    let next = INTERVAL.as_millis() as u64;
    assert_eq!(due(&mut lines, 1, next - 1), None);
    let left_out = 10_000 - u64::from(LINES_MAX) + 1;
    assert_eq!(due(&mut lines, 1, next), Some(left_out));
    assert_eq!(due(&mut lines, 1, next + 1), Some(0));
}

#[test]
fn a_flood_from_many_addresses_is_bounded_in_memory_and_in_lines() {
    let (mut lines, start) = (Lines::default(), Instant::now());
    let mut logged = 0;
    for number in 1..=10_000 {
        logged += usize::from(lines.due(address(number), start).is_some());
        assert!(lines.0.len() <= ADDRESSES_MAX + 1);
    }
    assert_eq!(logged, ADDRESSES_MAX + LINES_MAX as usize);
    // When their interval is over they make room.
    let later = start + INTERVAL;
    assert_eq!(lines.due(address(200_000), later), Some(0));
    assert_eq!(lines.0.len(), 1);
}
