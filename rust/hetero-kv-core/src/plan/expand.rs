//! From a plan to the bytes: which runs to copy.

use std::collections::BTreeMap;
use std::fmt;

use smallvec::SmallVec;

use crate::ids::{BlockId, TpRank};
use crate::layout::{LayerCache, Part, RankCache};
use crate::memory::Run;
use crate::plan::{RankPlan, Source};

/// Most runs one call of [`expand()`] makes, counted before runs of neighbouring blocks are merged;
/// a caller with more blocks expands them in pieces.
pub const RUNS_MAX: u64 = 1 << 24;

/// One block to copy: which block of the sources, which block of the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPair {
    /// Block id, equal on every rank of the producer.
    pub source: BlockId,
    /// Block id, equal on every rank of the consumer.
    pub dest: BlockId,
}

/// One side of a pair, in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The source rank of this place in the producer's group.
    Source(TpRank),
    /// The reading rank of this place in the consumer's group.
    Consumer(TpRank),
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(tp_rank) => write!(f, "source tp_rank {tp_rank}"),
            Self::Consumer(tp_rank) => write!(f, "consumer tp_rank {tp_rank}"),
        }
    }
}

/// Caches and blocks that do not fit a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No cache was given for a rank that the plan reads.
    #[error("no cache given for source tp_rank {0}")]
    NoCache(TpRank),
    /// A cache holds another number of heads than its place says.
    #[error("heads_held: {side} announces {announced}, its place in the group gives {planned}")]
    HeadsHeld {
        /// Whose cache.
        side: Side,
        /// Heads in its cache.
        announced: u32,
        /// Heads by the plan.
        planned: u32,
    },
    /// One side has a layer that the other lacks.
    #[error("layer {layer:?} is missing on {side}")]
    LayerMissing {
        /// The layer.
        layer: String,
        /// Who lacks it.
        side: Side,
    },
    /// A layer is stored in pieces that do not correspond.
    #[error(
        "layer {layer:?}: {field} is {source_value} on source tp_rank {tp_rank}, {consumer_value} on the consumer"
    )]
    LayerShape {
        /// The layer.
        layer: String,
        /// `parts`, `rows` or `row_bytes`.
        field: &'static str,
        /// The source.
        tp_rank: TpRank,
        /// Its value.
        source_value: u64,
        /// The consumer's value.
        consumer_value: u64,
    },
    /// A block id past the end of a cache.
    #[error("block {block} on {side} is not below its num_blocks {num_blocks}")]
    NoSuchBlock {
        /// Whose cache.
        side: Side,
        /// The id.
        block: BlockId,
        /// Blocks of that cache.
        num_blocks: u32,
    },
    /// Two pairs write one block of the consumer.
    #[error("block {0} of the consumer is written by two pairs")]
    DuplicateDest(BlockId),
    /// More than [`RUNS_MAX`].
    #[error("{0} runs in one piece, above 16777216; expand fewer blocks at a time")]
    TooManyRuns(u64),
}

/// The runs to copy for `plan`, by source rank in the order of the plan's sources. `local` is the
/// consumer rank's cache, `remote` holds at least the caches of the plan's sources, `blocks` pairs
/// block ids in any order.
///
/// Layers pair by name. Each byte of the consumer's heads in the consumer's blocks is in exactly
/// one run; runs that are contiguous on both sides are merged and mostly ascend at the consumer.
/// Linear in the number of blocks, apart from sorting them.
///
/// # Errors
/// [`PlanError`] names the rank, layer, block or field that does not fit.
pub fn expand(
    plan: &RankPlan,
    local: &RankCache,
    remote: &[(TpRank, &RankCache)],
    blocks: &[BlockPair],
) -> Result<Vec<(TpRank, Vec<Run>)>, PlanError> {
    check_heads(Side::Consumer(plan.tp_rank), local, plan.heads.count())?;
    let consumer = Side::Consumer(plan.tp_rank);
    let mut blocks = blocks.to_vec();
    // Free lists hand out block ids in descending runs as often as ascending ones: sorted, both
    // merge.
    blocks.sort_unstable_by_key(|pair| pair.dest);
    for pair in &blocks {
        check_block(consumer, local, pair.dest)?;
    }
    if let Some(twice) = blocks.windows(2).find(|two| two[0].dest == two[1].dest) {
        return Err(PlanError::DuplicateDest(twice[0].dest));
    }
    let mut planned = Vec::with_capacity(plan.sources.len());
    let mut runs_max = 0_u64;
    for source in &plan.sources {
        let cache = remote
            .iter()
            .find(|(tp_rank, _)| *tp_rank == source.tp_rank)
            .ok_or(PlanError::NoCache(source.tp_rank))?
            .1;
        let side = Side::Source(source.tp_rank);
        check_heads(side, cache, source.held.count())?;
        for pair in &blocks {
            check_block(side, cache, pair.source)?;
        }
        let pieces = pieces(plan, source, local, cache)?;
        let runs_per_block: u64 = pieces.iter().map(Piece::runs).sum();
        runs_max = runs_max.saturating_add(runs_per_block.saturating_mul(blocks.len() as u64));
        planned.push((source.tp_rank, pieces));
    }
    if runs_max > RUNS_MAX {
        return Err(PlanError::TooManyRuns(runs_max));
    }
    Ok(planned
        .into_iter()
        .map(|(tp_rank, pieces)| (tp_rank, emit(&pieces, &blocks)))
        .collect())
}

/// Bytes that `plan` moves for so many blocks, over all its sources: what the transports' counters
/// must say after one transfer that was neither striped twice nor retried.
pub fn planned_bytes(plan: &RankPlan, local: &RankCache, blocks: u64) -> u64 {
    plan.sources
        .iter()
        .map(|source| source_bytes(source, local, blocks))
        .fold(0, u64::saturating_add)
}

/// Bytes that are read from one source for so many blocks.
pub fn source_bytes(source: &Source, local: &RankCache, blocks: u64) -> u64 {
    local
        .block_head_bytes()
        .saturating_mul(source.heads.count().into())
        .saturating_mul(blocks)
}

fn check_heads(side: Side, cache: &RankCache, planned: u32) -> Result<(), PlanError> {
    if cache.heads_held() == planned {
        return Ok(());
    }
    Err(PlanError::HeadsHeld {
        side,
        announced: cache.heads_held(),
        planned,
    })
}

fn check_block(side: Side, cache: &RankCache, block: BlockId) -> Result<(), PlanError> {
    if block.0 < cache.num_blocks() {
        return Ok(());
    }
    Err(PlanError::NoSuchBlock {
        side,
        block,
        num_blocks: cache.num_blocks(),
    })
}

/// One part of one layer on both sides, block 0, cut down to the heads of one source.
struct Piece {
    source: Place,
    dest: Place,
    /// What is left to walk inside a block, outermost first: at most heads and rows.
    axes: SmallVec<[Axis; 2]>,
    /// Contiguous on both sides.
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Place {
    region: u32,
    offset: u64,
    block_stride: u64,
}

#[derive(Clone, Copy)]
struct Axis {
    steps: u32,
    source_stride: u64,
    dest_stride: u64,
}

impl Piece {
    fn runs(&self) -> u64 {
        self.axes.iter().map(|axis| u64::from(axis.steps)).product()
    }
}

fn pieces(
    plan: &RankPlan,
    source: &Source,
    local: &RankCache,
    remote: &RankCache,
) -> Result<Vec<Piece>, PlanError> {
    let mut unpaired: BTreeMap<&str, &LayerCache> = remote
        .layers()
        .iter()
        .map(|layer| (layer.name.as_str(), layer))
        .collect();
    let mut pieces = Vec::with_capacity(local.layers().len());
    for dest in local.layers() {
        let Some(from) = unpaired.remove(dest.name.as_str()) else {
            return Err(PlanError::LayerMissing {
                layer: dest.name.clone(),
                side: Side::Source(source.tp_rank),
            });
        };
        let equal = |field, source_value, consumer_value| {
            if source_value == consumer_value {
                return Ok(());
            }
            Err(PlanError::LayerShape {
                layer: dest.name.clone(),
                field,
                tp_rank: source.tp_rank,
                source_value,
                consumer_value,
            })
        };
        equal("parts", from.parts.len() as u64, dest.parts.len() as u64)?;
        for (from_part, dest_part) in from.parts.iter().zip(&dest.parts) {
            equal("rows", from_part.rows.into(), dest_part.rows.into())?;
            equal("row_bytes", from_part.row_bytes, dest_part.row_bytes)?;
            pieces.push(piece(
                source.heads.count(),
                (
                    from.region,
                    from_part,
                    source.heads.first - source.held.first,
                ),
                (
                    dest.region,
                    dest_part,
                    source.heads.first - plan.heads.first,
                ),
            ));
        }
    }
    if let Some(layer) = unpaired.into_keys().next() {
        return Err(PlanError::LayerMissing {
            layer: layer.to_owned(),
            side: Side::Consumer(plan.tp_rank),
        });
    }
    pieces.sort_by_key(|piece: &Piece| (piece.dest.region, piece.dest.offset));
    Ok(pieces)
}

/// `from` and `dest`: region, part and the first wanted head as the rank counts its own.
fn piece(heads: u32, from: (u32, &Part, u32), dest: (u32, &Part, u32)) -> Piece {
    let place = |(region, part, head): (u32, &Part, u32)| Place {
        region,
        offset: part.offset_bytes + u64::from(head) * part.head_stride_bytes,
        block_stride: part.block_stride_bytes,
    };
    let mut axes: SmallVec<[Axis; 2]> = SmallVec::new();
    let (source_part, dest_part) = (from.1, dest.1);
    axes.push(Axis {
        steps: heads,
        source_stride: source_part.head_stride_bytes,
        dest_stride: dest_part.head_stride_bytes,
    });
    axes.push(Axis {
        steps: dest_part.rows,
        source_stride: source_part.row_stride_bytes,
        dest_stride: dest_part.row_stride_bytes,
    });
    axes.retain(|axis| axis.steps > 1);
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.dest_stride));
    let mut bytes = dest_part.row_bytes;
    while let Some(inner) = axes.last() {
        if inner.source_stride != bytes || inner.dest_stride != bytes {
            break;
        }
        bytes *= u64::from(inner.steps);
        axes.pop();
    }
    Piece {
        source: place(from),
        dest: place(dest),
        axes,
        bytes,
    }
}

/// `pieces` and `blocks` ascend at the consumer. Pieces that lie in one and the same block of the
/// consumer (K and V of a page, or all layers where the block is the outermost axis) are walked
/// block by block, the others piece by piece, so that neighbours in memory follow one another.
fn emit(pieces: &[Piece], blocks: &[BlockPair]) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut rest = pieces;
    while let Some(first) = rest.first() {
        let same_block = |piece: &&Piece| {
            piece.dest.region == first.dest.region
                && piece.dest.block_stride == first.dest.block_stride
                && piece.dest.offset - first.dest.offset < first.dest.block_stride
        };
        let together = rest.iter().take_while(same_block).count().max(1);
        let (group, after) = rest.split_at(together);
        for pair in blocks {
            for piece in group {
                emit_piece(&mut runs, piece, pair);
            }
        }
        rest = after;
    }
    runs
}

fn emit_piece(runs: &mut Vec<Run>, piece: &Piece, pair: &BlockPair) {
    let mut run = Run {
        source_region: piece.source.region,
        source_offset: piece.source.offset + u64::from(pair.source.0) * piece.source.block_stride,
        dest_region: piece.dest.region,
        dest_offset: piece.dest.offset + u64::from(pair.dest.0) * piece.dest.block_stride,
        bytes: piece.bytes,
    };
    match piece.axes.as_slice() {
        [] => push_merged(runs, run),
        [outer, inner @ ..] => {
            for _ in 0..outer.steps {
                match inner {
                    [] => push_merged(runs, run),
                    [inner, ..] => {
                        let mut row = run;
                        for _ in 0..inner.steps {
                            push_merged(runs, row);
                            row.source_offset += inner.source_stride;
                            row.dest_offset += inner.dest_stride;
                        }
                    }
                }
                run.source_offset += outer.source_stride;
                run.dest_offset += outer.dest_stride;
            }
        }
    }
}

fn push_merged(runs: &mut Vec<Run>, run: Run) {
    if let Some(last) = runs.last_mut()
        && last.source_region == run.source_region
        && last.dest_region == run.dest_region
        && last.source_offset + last.bytes == run.source_offset
        && last.dest_offset + last.bytes == run.dest_offset
    {
        last.bytes += run.bytes;
        return;
    }
    runs.push(run);
}
