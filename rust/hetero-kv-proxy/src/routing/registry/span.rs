//! For how long what follows from the time of day stays as it is.

/// The times from one on and before another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    from_ms: u64,
    until_ms: u64,
}

impl Span {
    /// No time.
    pub(super) const NONE: Self = Self {
        from_ms: 0,
        until_ms: 0,
    };
    /// Every time.
    pub(super) const ALL: Self = Self {
        from_ms: 0,
        until_ms: u64::MAX,
    };

    pub(super) fn holds(&self, now_ms: u64) -> bool {
        (self.from_ms..self.until_ms).contains(&now_ms)
    }

    /// Leaves of it the side of `edge_ms` on which `now_ms` is: at the edge something changes.
    pub(super) fn cut(&mut self, edge_ms: u64, now_ms: u64) {
        match edge_ms <= now_ms {
            true => self.from_ms = self.from_ms.max(edge_ms),
            false => self.until_ms = self.until_ms.min(edge_ms),
        }
    }

    /// Leaves of it what is before `edge_ms`.
    pub(super) fn end_at(&mut self, edge_ms: u64) {
        self.until_ms = self.until_ms.min(edge_ms);
    }
}
