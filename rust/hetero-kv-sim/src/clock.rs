//! Each engine's own monotonic clock: an origin of its own, and a speed that is not quite right.

use std::time::Duration;

use hetero_kv_core::time::Time;

/// Fastest drift between true time and a clock. Far above a real oscillator's (tens of ppm), and
/// over the longest lease of a run still below its margin.
pub const DRIFT_PPM_MAX: u64 = 5_000;

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub(crate) origin: Duration,
    /// Parts per million that it gains.
    pub(crate) drift_ppm: i64,
}

impl Clock {
    /// What it shows at a true time.
    pub(crate) fn local(self, at: Time) -> Time {
        let nanos = i128::try_from(at.since_origin().as_nanos()).unwrap_or(i128::MAX);
        let gained = nanos * i128::from(self.drift_ppm) / 1_000_000;
        let nanos = u64::try_from(nanos + gained).unwrap_or(0);
        Time::from_origin(self.origin + Duration::from_nanos(nanos))
    }

    /// The first true time at which it shows at least `local`.
    pub(crate) fn global(self, local: Time) -> Time {
        let shown = local.since_origin().saturating_sub(self.origin).as_nanos();
        let shown = i128::try_from(shown).unwrap_or(i128::MAX / 1_000_000);
        let nanos = shown * 1_000_000 / (1_000_000 + i128::from(self.drift_ppm));
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX).saturating_sub(2);
        let mut at = Time::from_origin(Duration::from_nanos(nanos));
        while at < Time::MAX && self.local(at) < local {
            at = at + Duration::from_nanos(1);
        }
        at
    }
}
