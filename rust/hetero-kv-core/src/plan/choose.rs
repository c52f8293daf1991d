//! Which of several equal holders a consumer reads.

use sha2::{Digest, Sha256};

use super::policy::RoundRobinGate;
use crate::ids::{DpRank, TpRank, TransferId};

/// The choice among equal holders for one transfer: a pure function of the transfer id, the
/// weights, the heads and the consumer, so that a log line replays it. It spreads load (uniform
/// over holders in proportion to their weights, consumers of one transfer on different holders);
/// correctness never depends on it, because all holders are released whoever was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceChooser {
    transfer_id: TransferId,
    weights: Vec<u16>,
    turn: Turn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Hashed,
    /// Holders in turn; this one's number.
    RoundRobin(u64),
    Fixed,
}

/// Who asks for one of several equal holders.
#[derive(Clone, Copy)]
pub(super) struct Asker {
    /// The heads wanted begin here.
    pub(super) first_head: u32,
    /// The consumer's place among the `consumers` that want these same heads.
    pub(super) index: u32,
    pub(super) consumers: u32,
    /// The source of the RFC's fixed mapping.
    pub(super) mapped: TpRank,
}

impl SourceChooser {
    /// All holders weigh the same.
    pub fn new(transfer_id: TransferId) -> Self {
        Self::weighted(transfer_id, Vec::new())
    }

    /// Weights by producer tp rank, decided once per transfer by the consumer's scheduler. A holder
    /// of weight 0 is avoided unless no other has the heads; ranks past the end weigh 1.
    pub fn weighted(transfer_id: TransferId, weights: Vec<u16>) -> Self {
        Self {
            transfer_id,
            weights,
            turn: Turn::Hashed,
        }
    }

    /// The choice of RFC #46107: behind the gate the consumer takes the holders in turn, beginning
    /// with the one of its dp index; `sequence` counts the transfers from this prefill engine to
    /// this consumer (a count over several prefill engines would skip holders of each). Outside the
    /// gate: the holder at the consumer's own place. A holder of weight 0 is passed over for the
    /// next unless all weigh 0; other weights do not count.
    pub fn round_robin(
        transfer_id: TransferId,
        weights: Vec<u16>,
        gate: RoundRobinGate,
        consumer_dp: DpRank,
        sequence: u64,
    ) -> Self {
        Self {
            transfer_id,
            weights,
            turn: if gate.is_open() {
                Turn::RoundRobin(sequence.wrapping_add(consumer_dp.0.into()))
            } else {
                Turn::Fixed
            },
        }
    }

    /// The transfer this choice is for.
    pub fn transfer_id(&self) -> TransferId {
        self.transfer_id
    }

    /// The position in `holders`, which are not empty, of the one to read.
    pub(super) fn pick(&self, holders: &[TpRank], asker: &Asker) -> usize {
        if holders.len() <= 1 {
            return 0;
        }
        match self.turn {
            Turn::Hashed => self.pick_hashed(holders, asker),
            Turn::RoundRobin(number) => {
                // Below the number of holders, so it fits.
                self.first_used(holders, (number % holders.len() as u64) as usize)
            }
            Turn::Fixed => {
                let mapped = holders.iter().position(|holder| *holder == asker.mapped);
                self.first_used(holders, mapped.unwrap_or(0))
            }
        }
    }

    fn pick_hashed(&self, holders: &[TpRank], asker: &Asker) -> usize {
        let total: u64 = self.widths(holders).sum();
        // A wheel with one sector per holder, as wide as its weight. The transfer turns it; the
        // consumers of one transfer stand evenly around it.
        let mut point = (self.turn(asker.first_head) % total
            + u64::from(asker.index) * total / u64::from(asker.consumers))
            % total;
        for (position, width) in self.widths(holders).enumerate() {
            if point < width {
                return position;
            }
            point -= width;
        }
        unreachable!("the point lies below the sum of the widths")
    }

    fn first_used(&self, holders: &[TpRank], start: usize) -> usize {
        let widths: Vec<u64> = self.widths(holders).collect();
        (0..holders.len())
            .map(|step| (start + step) % holders.len())
            .find(|position| widths[*position] > 0)
            .unwrap_or(start)
    }

    /// What each holder counts: its weight, or 1 each where all are to be avoided.
    pub(super) fn widths(&self, holders: &[TpRank]) -> impl Iterator<Item = u64> {
        let all_avoided = holders.iter().all(|holder| self.weight(*holder) == 0);
        holders.iter().map(move |holder| {
            if all_avoided {
                1
            } else {
                u64::from(self.weight(*holder))
            }
        })
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
