//! Which of several equal holders a consumer reads.

use sha2::{Digest, Sha256};

use crate::ids::{TpRank, TransferId};

/// The choice among equal holders for one transfer: a pure function of the transfer id, the
/// weights, the heads and the consumer, so that a log line replays it. It spreads load (uniform
/// over holders in proportion to their weights, consumers of one transfer on different holders);
/// correctness never depends on it, because all holders are released whoever was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceChooser {
    transfer_id: TransferId,
    weights: Vec<u16>,
}

impl SourceChooser {
    /// All holders weigh the same.
    pub fn new(transfer_id: TransferId) -> Self {
        Self {
            transfer_id,
            weights: Vec::new(),
        }
    }

    /// Weights by producer tp rank, decided once per transfer by the consumer's scheduler. A holder
    /// of weight 0 is avoided unless no other has the heads; ranks past the end weigh 1.
    pub fn weighted(transfer_id: TransferId, weights: Vec<u16>) -> Self {
        Self {
            transfer_id,
            weights,
        }
    }

    /// The transfer this choice is for.
    pub fn transfer_id(&self) -> TransferId {
        self.transfer_id
    }

    /// Picks one of the `holders` of the heads that begin at `first_head`, for consumer `index` of
    /// the `consumers` that want these same heads. Never outside `holders`, which are not empty.
    pub(super) fn pick(
        &self,
        holders: &[TpRank],
        first_head: u32,
        index: u32,
        consumers: u32,
    ) -> TpRank {
        if let [only] = holders {
            return *only;
        }
        let all_avoided = holders.iter().all(|holder| self.weight(*holder) == 0);
        let weight = |holder: TpRank| {
            if all_avoided {
                1
            } else {
                u64::from(self.weight(holder))
            }
        };
        let total: u64 = holders.iter().map(|holder| weight(*holder)).sum();
        // A wheel with one sector per holder, as wide as its weight. The transfer turns it; the
        // consumers of one transfer stand evenly around it.
        let mut point = (self.turn(first_head) % total
            + u64::from(index) * total / u64::from(consumers))
            % total;
        for holder in holders {
            let width = weight(*holder);
            if point < width {
                return *holder;
            }
            point -= width;
        }
        unreachable!("the point lies below the sum of the widths")
    }

    fn weight(&self, holder: TpRank) -> u16 {
        self.weights.get(holder.0 as usize).copied().unwrap_or(1)
    }

    /// A well mixed number: transfer ids may come from a router that merely counts.
    fn turn(&self, first_head: u32) -> u64 {
        let digest: [u8; 32] = Sha256::new()
            .chain_update(self.transfer_id.0)
            .chain_update(first_head.to_le_bytes())
            .finalize()
            .into();
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&digest[..8]);
        u64::from_le_bytes(bytes)
    }
}
