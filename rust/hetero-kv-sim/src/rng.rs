//! The one source of chance of a run.

/// SplitMix64 (Steele, Lea, Flood 2014): one word of state, good enough to pick faults by.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The same seed gives the same numbers.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x6865_7465_726f_6b76)
    }

    /// 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `past`, which is not 0. The bias of the remainder does not matter here.
    pub(crate) fn below(&mut self, past: u64) -> u64 {
        self.bits() % past
    }

    /// A number in `first..=last`.
    pub(crate) fn within(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    /// The same, for counts.
    pub(crate) fn count(&mut self, first: u32, last: u32) -> u32 {
        first + u32::try_from(self.below(u64::from(last - first) + 1)).unwrap_or(0)
    }

    /// An index below `past`, which is not 0.
    pub(crate) fn index(&mut self, past: usize) -> usize {
        usize::try_from(self.below(past as u64)).unwrap_or(0)
    }

    /// True so many times in a thousand.
    pub(crate) fn permille(&mut self, of: u64) -> bool {
        self.below(1000) < of
    }

    /// One of several.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())]
    }
}
