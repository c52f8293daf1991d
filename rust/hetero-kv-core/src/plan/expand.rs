//! From a plan and pairs of whole blocks to the bytes: which runs to copy.

use std::collections::BTreeMap;

use super::emit::{count, emit};
use super::error::{PlanError, Side};
use super::pieces::{Heads, Piece, layer_pieces};
use super::spans::{Span, Spans, WHOLE};
use crate::ids::{BlockId, TpRank};
use crate::layout::{LayerCache, RankCache};
use crate::memory::Run;
use crate::plan::{RankPlan, Source};

/// Most runs one call of [`expand()`] or [`super::Transfer::plan`] makes, counted before runs of
/// neighbouring blocks are merged; a caller with more blocks expands them in pieces.
pub const RUNS_MAX: u64 = 1 << 24;

/// One block to copy: which block of the sources, which block of the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPair {
    /// Block id, equal on every rank of the producer.
    pub source: BlockId,
    /// Block id, equal on every rank of the consumer.
    pub dest: BlockId,
}

impl BlockPair {
    /// Pairs two lists index by index. More blocks of the source than of the consumer are those past
    /// the end of what it wants.
    ///
    /// # Errors
    /// [`PlanError::BlockCounts`] where the consumer has more blocks than the source.
    pub fn zip(sources: &[BlockId], dest: &[BlockId]) -> Result<Vec<Self>, PlanError> {
        if dest.len() > sources.len() {
            return Err(PlanError::BlockCounts {
                sources: sources.len(),
                dest: dest.len(),
            });
        }
        Ok(sources
            .iter()
            .zip(dest)
            .map(|(source, dest)| Self {
                source: *source,
                dest: *dest,
            })
            .collect())
    }
}

/// The runs to copy for `plan`, by source rank in the order of the plan's sources, between two
/// engines without pipeline stages and with blocks of one size. `local` is the consumer rank's cache,
/// `remote` holds at least the caches of the plan's sources, `blocks` pairs block ids in any order.
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
    let consumer = Side::Consumer(plan.tp_rank);
    check_heads(consumer, local, plan.heads.count())?;
    let mut spans: Vec<Span> = blocks
        .iter()
        .map(|pair| Span {
            first_token: 0,
            tokens: WHOLE,
            source: pair.source,
            source_token: 0,
            dest: pair.dest,
            dest_token: 0,
        })
        .collect();
    // Free lists hand out block ids in descending runs as often as ascending ones: sorted, both
    // merge.
    spans.sort_unstable_by_key(|span| span.dest);
    if let Some(twice) = spans.windows(2).find(|two| two[0].dest == two[1].dest) {
        return Err(PlanError::DuplicateDest(twice[0].dest));
    }
    let spans = Spans::new(spans);
    check_block(consumer, local, spans.last_dest())?;
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
        check_block(side, cache, spans.last_source())?;
        let pieces = pieces(plan, source, local, cache)?;
        runs_max = runs_max.saturating_add(count(&pieces, &spans.lengths));
        planned.push((source.tp_rank, pieces));
    }
    check_runs(runs_max)?;
    Ok(planned
        .into_iter()
        .map(|(tp_rank, pieces)| {
            let mut runs = Vec::new();
            emit(&mut runs, &pieces, &spans.spans);
            (tp_rank, runs)
        })
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

pub(super) fn check_heads(side: Side, cache: &RankCache, planned: u32) -> Result<(), PlanError> {
    if cache.heads_held() == planned {
        return Ok(());
    }
    Err(PlanError::HeadsHeld {
        side,
        announced: cache.heads_held(),
        planned,
    })
}

/// `last`: the largest id used, if any.
pub(super) fn check_block(
    side: Side,
    cache: &RankCache,
    last: Option<BlockId>,
) -> Result<(), PlanError> {
    match last {
        Some(block) if block.0 >= cache.num_blocks() => Err(PlanError::NoSuchBlock {
            side,
            block,
            num_blocks: cache.num_blocks(),
        }),
        Some(_) | None => Ok(()),
    }
}

pub(super) fn check_runs(runs: u64) -> Result<(), PlanError> {
    if runs > RUNS_MAX {
        return Err(PlanError::TooManyRuns(runs));
    }
    Ok(())
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
    let heads = Heads {
        count: source.heads.count(),
        source_first: source.heads.first - source.held.first,
        dest_first: source.heads.first - plan.heads.first,
    };
    let mut pieces = Vec::with_capacity(local.layers().len());
    for dest in local.layers() {
        let Some(from) = unpaired.remove(dest.name.as_str()) else {
            return Err(PlanError::LayerMissing {
                layer: dest.name.clone(),
                side: Side::Source(source.tp_rank),
            });
        };
        for (side, layer) in [("source", from), ("consumer", dest)] {
            if layer.group != 0 {
                return Err(PlanError::NoSuchGroup {
                    layer: layer.name.clone(),
                    side,
                    group: layer.group,
                    groups: 1,
                });
            }
        }
        let ranks = (source.tp_rank, plan.tp_rank);
        layer_pieces(&mut pieces, from, dest, heads, ranks, None)?;
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
