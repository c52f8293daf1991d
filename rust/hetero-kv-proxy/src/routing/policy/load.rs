//! How much load a preferred slot may have before it yields.

/// Legs that a slot may always serve at once: an engine computes requests in batches, and so few
/// are no load worth losing a warm cache for.
pub const LEGS_FREE: u32 = 4;
/// A preferred slot may have this share of the mean: 5/4.
const MEAN_SHARE: (u64, u64) = (5, 4);

/// Legs in flight from which on a slot takes no more by preference: [`LEGS_FREE`], or a quarter above
/// its share by weight of what all slots have that may be chosen, with the leg to place. Some of
/// them is always below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadCap {
    /// For weight 1, as a fraction.
    over: u64,
    under: u64,
}

impl LoadCap {
    /// By what those slots have and weigh together.
    pub fn new(load_sum: u64, weight_sum: u64) -> Self {
        let (over, under) = MEAN_SHARE;
        Self {
            over: (load_sum + 1) * over,
            under: under * weight_sum.max(1),
        }
    }

    /// Whether a slot is below it.
    pub fn admits(&self, load: u32, weight: u32) -> bool {
        load < LEGS_FREE
            || u64::from(load).saturating_mul(self.under)
                < self.over.saturating_mul(u64::from(weight))
    }

    /// The legs of a slot of this weight.
    pub fn legs(&self, weight: u32) -> u32 {
        let legs = self.over.saturating_mul(u64::from(weight));
        u32::try_from(legs.div_ceil(self.under))
            .unwrap_or(u32::MAX)
            .max(LEGS_FREE)
    }
}
