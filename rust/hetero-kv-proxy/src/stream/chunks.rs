//! When the chunks of a decode answer come, and how many.

use tokio::time::Instant;

use super::live::Live;
use crate::histogram::Gaps;

/// The chunks that have come.
#[derive(Debug)]
pub(super) struct Chunks {
    count: u64,
    /// When the request began.
    started: Instant,
    first: Instant,
    last: Instant,
    /// Between chunks of an event stream, not yet counted.
    gaps: Gaps,
}

impl Chunks {
    /// None yet: what is waited for is waited for from `now` on.
    pub(super) fn new(started: Instant, now: Instant) -> Self {
        Self {
            count: 0,
            started,
            first: now,
            last: now,
            gaps: Gaps::default(),
        }
    }

    /// Whether one has come.
    pub(super) fn any(&self) -> bool {
        self.count > 0
    }

    /// When the last came.
    pub(super) fn last(&self) -> Instant {
        self.last
    }

    /// One has come: of an event stream its time is counted in the meters of `live`. Says whether it
    /// is the first.
    #[inline]
    pub(super) fn note(&mut self, live: Option<&Live>, is_events: bool) -> bool {
        let is_first = !self.any();
        let before = std::mem::replace(&mut self.last, Instant::now());
        if is_first {
            self.first = self.last;
        }
        self.count += 1;
        match (is_events, is_first) {
            (false, _) => {}
            (true, true) => {
                if let Some(meters) = live.and_then(Live::meters) {
                    meters.ttft.observe(self.last - self.started);
                }
            }
            (true, false) => {
                if self.gaps.keep(self.last - before) {
                    self.count_gaps(live);
                }
            }
        }
        is_first
    }

    /// Counts what was not yet counted when no more will come, and tells the leg of `live`.
    pub(super) fn close(&mut self, live: Option<&Live>) {
        self.count_gaps(live);
        if let Some(live) = live.filter(|_| self.any()) {
            let lease = &live.decode.lease;
            lease.note_chunks(self.first, self.last, self.count);
        }
    }

    fn count_gaps(&mut self, live: Option<&Live>) {
        if let Some(meters) = live.and_then(Live::meters) {
            self.gaps.count_in(&meters.gap);
        }
    }
}
