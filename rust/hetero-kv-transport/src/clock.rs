//! The only place that asks the operating system for the time.

use std::time::Duration;

use hetero_kv_core::time::Time;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Monotonic time since boot, the same for every thread and process of the host. It stands still
/// while the host is suspended, like the durations of leases have to.
pub fn now() -> Time {
    let since_boot = clock_gettime(ClockId::Monotonic);
    // Both fields of a monotonic clock are never negative.
    let seconds = u64::try_from(since_boot.tv_sec).unwrap_or(0);
    let nanos = u32::try_from(since_boot.tv_nsec).unwrap_or(0);
    Time::from_origin(Duration::new(seconds, nanos))
}

/// Seconds since 1970 by the host's calendar clock, which may jump: for what is signed, not for
/// durations.
pub fn unix_s() -> u64 {
    u64::try_from(clock_gettime(ClockId::Realtime).tv_sec).unwrap_or(0)
}

/// Time left until `deadline`; zero when it has passed.
pub fn time_left(deadline: Time) -> Duration {
    deadline.since(now())
}

/// A duration as the system calls take it.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
