//! What one consumer rank reads from whom.

use std::fmt;
use std::sync::Arc;

use super::emit::{count_bytes, emit};
use super::pieces::Piece;
use super::spans::Spans;
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

/// A plan whose lists of runs are not made yet. It is small where the lists are megabytes, and each
/// can be made where it is used. Only [`super::Transfer::outline`] makes one.
#[derive(Debug)]
#[non_exhaustive]
pub struct TransferOutline {
    /// The consumer rank.
    pub tp_rank: TpRank,
    /// As [`TransferPlan::reads`].
    pub reads: Vec<PlannedRead>,
    /// As [`TransferPlan::release`].
    pub release: Vec<(PpRank, TpRank)>,
}

/// A [`Read`] before its runs are made.
pub struct PlannedRead {
    pub(super) read: Read,
    /// Its pieces, by the blocks that they are walked over.
    pub(super) work: Vec<(Arc<Spans>, Vec<Piece>)>,
}

impl TransferOutline {
    /// As [`TransferPlan::bytes`].
    pub fn bytes(&self) -> u64 {
        self.reads
            .iter()
            .map(PlannedRead::bytes)
            .fold(0, u64::saturating_add)
    }
}

impl PlannedRead {
    /// Its stage.
    pub fn pp_rank(&self) -> PpRank {
        self.read.pp_rank
    }

    /// Its place in the stage's group.
    pub fn tp_rank(&self) -> TpRank {
        self.read.tp_rank
    }

    /// As [`Read::bytes`].
    pub fn bytes(&self) -> u64 {
        self.work
            .iter()
            .map(|(spans, pieces)| count_bytes(pieces, &spans.lengths))
            .fold(0, u64::saturating_add)
    }

    /// Makes the runs.
    pub fn emit(mut self) -> Read {
        for (spans, pieces) in &self.work {
            emit(&mut self.read.runs, pieces, &spans.spans);
        }
        self.read
    }
}

impl fmt::Debug for PlannedRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlannedRead")
            .field("read", &self.read)
            .finish_non_exhaustive()
    }
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
