//! What one consumer rank reads from whom.

use super::{LayerRange, Region, TokenRange};
use crate::ids::{PpRank, TpRank};
use crate::layout::HeadRange;
use crate::memory::Run;

/// What one consumer rank does for one transfer. Only [`super::Transfer::plan`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferPlan {
    /// The consumer rank.
    pub tp_rank: TpRank,
    /// What to read from whom, each rank of the producer at most once, none without runs. Together
    /// they write every byte of the rank's heads and layers in the tokens exactly once.
    pub reads: Vec<Read>,
    /// The ranks whose blocks end when this consumer rank is done, read or not, ascending. Over the
    /// ranks of the consumer these cover the producer.
    pub release: Vec<(PpRank, TpRank)>,
}

/// What is read from one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Read {
    /// Its stage.
    pub pp_rank: PpRank,
    /// Its place in the stage's group.
    pub tp_rank: TpRank,
    /// The tokens read from it.
    pub tokens: TokenRange,
    /// The heads read from it.
    pub heads: HeadRange,
    /// The layers read from it, as positions in the consumer's cache, ascending.
    pub layers: Vec<u32>,
    /// Which bytes.
    pub runs: Vec<Run>,
}

impl TransferPlan {
    /// Bytes over all reads: what the transports' counters must say after one transfer that was not
    /// retried.
    pub fn bytes(&self) -> u64 {
        self.reads.iter().map(Read::bytes).sum()
    }
}

impl Read {
    /// Bytes of its runs.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes).sum()
    }

    /// What it covers, in as few regions as its layers allow. `global_layer` tells the index in the
    /// whole model of the layer at a position in the consumer's cache.
    pub fn regions(&self, global_layer: impl Fn(u32) -> u32) -> Vec<Region> {
        let mut indexes: Vec<u32> = self.layers.iter().map(|at| global_layer(*at)).collect();
        indexes.sort_unstable();
        let mut regions: Vec<Region> = Vec::new();
        for index in indexes {
            match regions.last_mut() {
                Some(last) if last.layers.past_last == index => last.layers.past_last += 1,
                Some(_) | None => regions.push(Region {
                    tokens: self.tokens,
                    heads: self.heads,
                    layers: LayerRange {
                        first: index,
                        past_last: index + 1,
                    },
                }),
            }
        }
        regions
    }
}
