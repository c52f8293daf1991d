//! Who holds which KV head.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::ids::TpRank;

/// Largest tensor parallel group accepted.
pub const TP_SIZE_MAX: u32 = 1024;

/// The heads of a cache, counted over the whole model. Per-rank counts hide replication (2 heads on
/// 4 ranks look like 4 heads), so nothing is ever planned from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvHeads {
    /// Multi-head or grouped-query attention with this many KV heads in all.
    Grouped(NonZeroU32),
    /// Multi-head latent attention: one latent without heads, on every rank.
    Latent,
}

impl KvHeads {
    /// KV heads in all; a latent counts as one.
    pub fn total(self) -> u32 {
        match self {
            Self::Grouped(total) => total.get(),
            Self::Latent => 1,
        }
    }
}

impl fmt::Display for KvHeads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Grouped(total) => write!(f, "{total} KV heads"),
            Self::Latent => f.write_str("one latent"),
        }
    }
}

/// Consecutive heads, by their index in the whole model. Never empty where this crate makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HeadRange {
    /// First head.
    pub first: u32,
    /// One past the last head.
    pub past_last: u32,
}

impl HeadRange {
    /// How many heads.
    pub fn count(self) -> u32 {
        self.past_last.saturating_sub(self.first)
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.count() == 0
    }

    /// The heads that are in both.
    pub fn intersection(self, other: Self) -> Self {
        let first = self.first.max(other.first);
        Self {
            first,
            past_last: self.past_last.min(other.past_last).max(first),
        }
    }

    /// Whether every head of `other` is in this range.
    pub fn contains(self, other: Self) -> bool {
        self.first <= other.first && other.past_last <= self.past_last
    }
}

impl fmt::Display for HeadRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.count() == 1 {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}..{}", self.first, self.past_last)
        }
    }
}

/// A cache that cannot be cut over a tensor parallel group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Neither number divides the other.
    #[error("tp_size {tp_size} and kv_heads {kv_heads}: one must divide the other")]
    Indivisible {
        /// Ranks of the group.
        tp_size: u32,
        /// KV heads in all.
        kv_heads: u32,
    },
    /// The group's size is 0 or above [`TP_SIZE_MAX`].
    #[error("tp_size {0} is not in 1..=1024")]
    TpSize(u32),
    /// The rank is not in its group.
    #[error("tp_rank {tp_rank} is not below tp_size {tp_size}")]
    TpRank {
        /// The rank asked for.
        tp_rank: TpRank,
        /// Ranks of the group.
        tp_size: u32,
    },
}

/// The rule of every cut and of every pair.
pub(crate) fn one_divides_other(a: u32, b: u32) -> bool {
    a.is_multiple_of(b) || b.is_multiple_of(a)
}

/// The heads rank `tp_rank` of a group of `tp_size` holds, as vLLM cuts them: a share of the heads
/// each while there are enough, and from there on `tp_size / heads` neighbours hold the same head.
pub fn owned_heads(
    heads: KvHeads,
    tp_size: u32,
    tp_rank: TpRank,
) -> Result<HeadRange, LayoutError> {
    let kv_heads = heads.total();
    if tp_size == 0 || tp_size > TP_SIZE_MAX {
        return Err(LayoutError::TpSize(tp_size));
    }
    if !one_divides_other(kv_heads, tp_size) {
        return Err(LayoutError::Indivisible { tp_size, kv_heads });
    }
    if tp_rank.0 >= tp_size {
        return Err(LayoutError::TpRank { tp_rank, tp_size });
    }
    let (first, count) = if tp_size <= kv_heads {
        let share = kv_heads / tp_size;
        (tp_rank.0 * share, share)
    } else {
        (tp_rank.0 / (tp_size / kv_heads), 1)
    };
    Ok(HeadRange {
        first,
        past_last: first + count,
    })
}
