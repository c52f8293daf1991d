//! Floods of one cause, and of many.

use std::time::Duration;

use tokio::time::Instant;

use super::{CAUSES_MAX, INTERVAL, Lines};

#[test]
fn a_flood_of_one_cause_is_a_few_lines_and_then_their_number() {
    let (mut lines, start) = (Lines::new(8), Instant::now());
    let due = |lines: &mut Lines<u32>, cause, after_ms| {
        lines.due(cause, start + Duration::from_millis(after_ms))
    };
    let logged = (0..10_000).filter(|at| due(&mut lines, 1, *at).is_some());
    assert_eq!(logged.count(), 8);
    // Others have their own.
    assert_eq!(due(&mut lines, 2, 10_000), Some(0));
    let next = INTERVAL.as_millis() as u64;
    assert_eq!(due(&mut lines, 1, next - 1), None);
    assert_eq!(due(&mut lines, 1, next), Some(10_000 - 8 + 1));
    assert_eq!(due(&mut lines, 1, next + 1), Some(0));
}

#[test]
fn a_flood_of_many_causes_is_bounded_in_memory_and_in_lines() {
    let (mut lines, start) = (Lines::new(8), Instant::now());
    let mut logged = 0;
    for cause in 1..=10_000 {
        logged += usize::from(lines.due(cause, start).is_some());
        assert!(lines.caused.len() <= CAUSES_MAX + 1);
    }
    assert_eq!(logged, CAUSES_MAX + 8);
    // When their interval is over they make room.
    let later = start + INTERVAL;
    assert_eq!(lines.due(200_000, later), Some(0));
    assert_eq!(lines.caused.len(), 1);
}
