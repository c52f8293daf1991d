//! One large read, from several equal holders at once.

use super::choose::{Asker, SourceChooser};
use crate::ids::TpRank;

/// When a read is cut into stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Striping {
    /// Reads of at least so many bytes are striped.
    pub threshold_bytes: u64,
    /// Most holders of one read.
    pub holders_max: u32,
}

impl Striping {
    /// One holder for each read, whatever its size.
    pub const OFF: Self = Self {
        threshold_bytes: u64::MAX,
        holders_max: 1,
    };
}

/// One holder's share: so many units (blocks, whatever the caller cuts by) of all, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stripe {
    pub(super) tp_rank: TpRank,
    pub(super) first: u32,
    pub(super) past_last: u32,
}

/// Cuts `units`, `bytes` in all, over `holders`: consecutive shares in proportion to the weights, the
/// first for the holder that an unstriped read would take and so on in a circle, so that consumers
/// of one transfer begin on different holders. A holder of weight 0 or without a unit has no stripe.
pub(super) fn stripes(
    chooser: &SourceChooser,
    striping: &Striping,
    holders: &[TpRank],
    asker: &Asker,
    units: u32,
    bytes: u64,
) -> Vec<Stripe> {
    let start = chooser.pick(holders, asker);
    if bytes < striping.threshold_bytes || striping.holders_max <= 1 || holders.len() <= 1 {
        return vec![Stripe {
            tp_rank: holders[start],
            first: 0,
            past_last: units,
        }];
    }
    let widths: Vec<u64> = chooser.widths(holders).collect();
    let used: Vec<usize> = (0..holders.len())
        .map(|step| (start + step) % holders.len())
        .filter(|position| widths[*position] > 0)
        .take(striping.holders_max as usize)
        .collect();
    let total: u64 = used.iter().map(|position| widths[*position]).sum();
    let mut stripes = Vec::with_capacity(used.len());
    let (mut first, mut passed) = (0, 0);
    for position in used {
        passed += widths[position];
        // To the nearest unit, at most `units`; the sum is below 2^32 * 1024 * 2^16.
        let past_last = ((u64::from(units) * passed + total / 2) / total) as u32;
        if past_last > first {
            stripes.push(Stripe {
                tp_rank: holders[position],
                first,
                past_last,
            });
        }
        first = past_last;
    }
    stripes
}
