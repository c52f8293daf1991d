//! All that one consumer rank reads for one transfer: over stages, stripes, groups and block sizes.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::emit::count;
use super::error::{PlanError, Side};
use super::expand::{check_block, check_heads, check_runs};
use super::pairing::HeadGroup;
use super::pieces::{BlockSizes, Heads, Piece, is_opaque, layer_pieces};
use super::spans::{GroupBlocks, Spans, cut};
use super::stripe::{Stripe, Striping, stripes};
use super::transfer_plan::{PlannedRead, Read, TransferOutline, TransferPlan};
use super::{Pairing, SourceChooser, TokenRange};
use crate::ids::{PpRank, TpRank};
use crate::layout::{HeadRange, LayerCache, RankCache};

/// One transfer as one consumer rank sees it.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// The two tensor parallel groups and the heads.
    pub pairing: &'a Pairing,
    /// The consumer rank's place in its group.
    pub tp_rank: TpRank,
    /// Stages of the consumer. Where it has one, a layer that only the producer has is an error;
    /// where it has several, that layer is another stage's.
    pub consumer_stages: u32,
    /// Which of several equal holders to read.
    pub chooser: &'a SourceChooser,
    /// When to read several of them at once.
    pub striping: Striping,
    /// The consumer rank's cache.
    pub local: &'a RankCache,
    /// The caches of all ranks of the producer, in any order.
    pub remote: &'a [(PpRank, TpRank, &'a RankCache)],
    /// What to move. Behind a prefix hit it begins with the first missing token. An opaque page is
    /// always moved whole, also where the tokens end inside it.
    pub tokens: TokenRange,
    /// The source's blocks, by KV cache group.
    pub source_groups: &'a [GroupBlocks<'a>],
    /// The consumer's blocks, by KV cache group.
    pub dest_groups: &'a [GroupBlocks<'a>],
}

/// Each layer of one place in the producer's group, over its stages, by name.
type StagedLayers<'a> = BTreeMap<&'a str, (PpRank, &'a LayerCache)>;

/// The lists of blocks of two groups, cut into one another.
struct GroupPair {
    spans: Arc<Spans>,
    sizes: BlockSizes,
}

/// What is put together over the heads of one consumer rank.
#[derive(Default)]
struct Parts {
    groups: BTreeMap<(u32, u32), GroupPair>,
    release: BTreeSet<(PpRank, TpRank)>,
    planned: Vec<PlannedRead>,
}

impl<'a> Transfer<'a> {
    /// Who is read for what, byte by byte. A pure function: every rank and every replay of a log
    /// line comes to the same.
    ///
    /// Layers pair by name over all stages of the producer; tokens by their position in the
    /// sequence, so that blocks may differ in size and either list may begin later. Linear in the
    /// number of blocks, apart from sorting them.
    ///
    /// # Errors
    /// [`PlanError`] names the rank, layer, group, block or field that does not fit, and both values.
    pub fn plan(&self) -> Result<TransferPlan, PlanError> {
        let outline = self.outline()?;
        Ok(TransferPlan {
            tp_rank: outline.tp_rank,
            reads: outline.reads.into_iter().map(PlannedRead::emit).collect(),
            release: outline.release,
        })
    }

    /// As [`Transfer::plan`], without the lists of runs.
    ///
    /// # Errors
    /// As [`Transfer::plan`].
    pub fn outline(&self) -> Result<TransferOutline, PlanError> {
        if self.tokens.first > self.tokens.past_last {
            return Err(PlanError::Tokens {
                first: self.tokens.first,
                past_last: self.tokens.past_last,
            });
        }
        let held = self.pairing.consumer_heads(self.tp_rank)?;
        check_heads(Side::Consumer(self.tp_rank), self.local, held.count())?;
        self.check_remote()?;
        let mut parts = Parts::default();
        for heads in self.pairing.head_groups(self.tp_rank)? {
            self.plan_heads(&heads, held.first, &mut parts)?;
        }
        let runs = parts
            .planned
            .iter()
            .flat_map(|planned| &planned.work)
            .map(|(spans, pieces)| count(pieces, &spans.lengths))
            .fold(0, u64::saturating_add);
        check_runs(runs)?;
        parts.planned.retain(|planned| planned.bytes() > 0);
        Ok(TransferOutline {
            tp_rank: self.tp_rank,
            reads: parts.planned,
            release: parts.release.into_iter().collect(),
        })
    }

    fn check_remote(&self) -> Result<(), PlanError> {
        let mut seen = BTreeSet::new();
        for (pp_rank, tp_rank, _) in self.remote {
            if !seen.insert((*pp_rank, *tp_rank)) {
                return Err(PlanError::CacheTwice {
                    pp_rank: *pp_rank,
                    tp_rank: *tp_rank,
                });
            }
        }
        Ok(())
    }

    fn stages(&self, tp_rank: TpRank) -> impl Iterator<Item = (PpRank, &'a RankCache)> {
        self.remote
            .iter()
            .filter(move |(_, of, _)| *of == tp_rank)
            .map(|(pp_rank, _, cache)| (*pp_rank, *cache))
    }

    fn staged_layers(&self, tp_rank: TpRank) -> Result<StagedLayers<'a>, PlanError> {
        let mut layers = StagedLayers::new();
        for (pp_rank, cache) in self.stages(tp_rank) {
            for layer in cache.layers() {
                if let Some((first, _)) = layers.insert(&layer.name, (pp_rank, layer)) {
                    return Err(PlanError::LayerTwice {
                        layer: layer.name.clone(),
                        side: Side::Source(tp_rank),
                        first,
                        second: pp_rank,
                    });
                }
            }
        }
        if layers.is_empty() {
            return Err(PlanError::NoCache(tp_rank));
        }
        Ok(layers)
    }

    /// The reads of heads that the same ranks hold: a stage each, and in each as many holders as the
    /// size is worth.
    fn plan_heads(
        &self,
        heads: &HeadGroup,
        first_held: u32,
        parts: &mut Parts,
    ) -> Result<(), PlanError> {
        let lead = heads.holders[self.chooser.pick(&heads.holders, &heads.asker)];
        let mut unpaired = self.staged_layers(lead)?;
        let mut stages: BTreeMap<PpRank, Vec<u32>> = BTreeMap::new();
        for (position, layer) in (0..).zip(self.local.layers()) {
            let Some((pp_rank, _)) = unpaired.remove(layer.name.as_str()) else {
                return Err(PlanError::LayerMissing {
                    layer: layer.name.clone(),
                    side: Side::Source(lead),
                });
            };
            stages.entry(pp_rank).or_default().push(position);
        }
        if let Some(layer) = unpaired.into_keys().next()
            && self.consumer_stages <= 1
        {
            return Err(PlanError::LayerMissing {
                layer: layer.to_owned(),
                side: Side::Consumer(self.tp_rank),
            });
        }
        let (unit, units) = self.units();
        for (pp_rank, layers) in stages {
            parts
                .release
                .extend(heads.holders.iter().map(|holder| (pp_rank, *holder)));
            let shares = stripes(
                self.chooser,
                &self.striping,
                &heads.holders,
                &heads.asker,
                units,
                self.bytes(heads.heads, &layers),
            );
            let alone = shares.len() == 1;
            for Stripe {
                tp_rank,
                first,
                past_last,
            } in shares
            {
                // Units are counted from the one that the first token lies in.
                let at = |index: u32| {
                    let unit_index = u64::from(self.tokens.first) / unit + u64::from(index);
                    u32::try_from(unit_index.saturating_mul(unit)).unwrap_or(u32::MAX)
                };
                let tokens = self.tokens.intersection(TokenRange {
                    first: at(first),
                    past_last: at(past_last),
                });
                let read = Read {
                    pp_rank,
                    tp_rank,
                    tokens,
                    heads: heads.heads,
                    layers: layers.clone(),
                    runs: Vec::new(),
                };
                self.plan_read(read, alone, heads.held, first_held, parts)?;
            }
        }
        Ok(())
    }

    fn plan_read(
        &self,
        read: Read,
        alone: bool,
        held: HeadRange,
        first_held: u32,
        parts: &mut Parts,
    ) -> Result<(), PlanError> {
        let side = Side::Source(read.tp_rank);
        let cache = self
            .stages(read.tp_rank)
            .find(|(pp_rank, _)| *pp_rank == read.pp_rank)
            .ok_or(PlanError::NoCache(read.tp_rank))?
            .1;
        check_heads(side, cache, held.count())?;
        let by_name: BTreeMap<&str, &LayerCache> = cache
            .layers()
            .iter()
            .map(|layer| (layer.name.as_str(), layer))
            .collect();
        let heads = Heads {
            count: read.heads.count(),
            source_first: read.heads.first - held.first,
            dest_first: read.heads.first - first_held,
        };
        let mut pieces: BTreeMap<(u32, u32), Vec<Piece>> = BTreeMap::new();
        for position in &read.layers {
            let dest = &self.local.layers()[*position as usize];
            let Some(from) = by_name.get(dest.name.as_str()) else {
                return Err(PlanError::LayerMissing {
                    layer: dest.name.clone(),
                    side,
                });
            };
            let pair = self.group_pair(from, dest, &mut parts.groups)?;
            if is_opaque(from, dest) {
                self.check_page_begin(dest, pair.sizes)?;
            }
            layer_pieces(
                pieces.entry((from.group, dest.group)).or_default(),
                from,
                dest,
                heads,
                (read.tp_rank, self.tp_rank),
                Some(pair.sizes),
            )?;
        }
        let mut work = Vec::with_capacity(pieces.len());
        for (key, mut pieces) in pieces {
            pieces.sort_by_key(|piece| (piece.dest.region, piece.dest.offset));
            let whole = &parts.groups[&key].spans;
            let spans = if alone {
                Arc::clone(whole)
            } else {
                Arc::new(whole.beginning_in(read.tokens))
            };
            check_block(side, cache, spans.last_source())?;
            check_block(Side::Consumer(self.tp_rank), self.local, spans.last_dest())?;
            work.push((spans, pieces));
        }
        parts.planned.push(PlannedRead { read, work });
        Ok(())
    }

    fn group_pair<'g>(
        &self,
        from: &LayerCache,
        dest: &LayerCache,
        groups: &'g mut BTreeMap<(u32, u32), GroupPair>,
    ) -> Result<&'g GroupPair, PlanError> {
        let key = (from.group, dest.group);
        match groups.entry(key) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(new) => {
                let find = |side, lists: &'a [GroupBlocks<'a>], group: u32| {
                    lists
                        .get(group as usize)
                        .ok_or_else(|| PlanError::NoSuchGroup {
                            layer: dest.name.clone(),
                            side,
                            group,
                            groups: lists.len(),
                        })
                };
                let source = find("source", self.source_groups, from.group)?;
                let target = find("consumer", self.dest_groups, dest.group)?;
                let (spans, sizes) = cut(self.tokens, source, target, key)?;
                Ok(new.insert(GroupPair {
                    spans: Arc::new(spans),
                    sizes,
                }))
            }
        }
    }

    /// An opaque page may be cut short by the end of the sequence, whose rest nobody reads, but not
    /// begin inside: its first tokens are already there.
    fn check_page_begin(&self, layer: &LayerCache, sizes: BlockSizes) -> Result<(), PlanError> {
        if sizes.source == sizes.dest && !self.tokens.first.is_multiple_of(sizes.dest) {
            return Err(PlanError::OpaqueCut {
                layer: layer.name.clone(),
                side: Side::Consumer(self.tp_rank),
                first_token: self.tokens.first,
                block_tokens: sizes.dest,
            });
        }
        Ok(())
    }

    /// What stripes are cut by, in tokens, and how many of them the tokens touch: no block of either
    /// side, in any group, is shared by two stripes. One unit where the sizes have no common multiple
    /// that a sequence could reach.
    fn units(&self) -> (u64, u32) {
        let unit = self
            .source_groups
            .iter()
            .chain(self.dest_groups)
            .map(|group| u64::from(group.block_tokens.max(1)))
            .fold(1_u64, |unit, tokens| {
                (unit / gcd(unit, tokens)).saturating_mul(tokens)
            });
        let (first, past_last) = (
            u64::from(self.tokens.first),
            u64::from(self.tokens.past_last),
        );
        // Both are positions below 2^32, so their difference in units is too.
        (unit, (past_last.div_ceil(unit) - first / unit) as u32)
    }

    /// Bytes of these layers' tokens in the consumer, for the decision to stripe.
    fn bytes(&self, heads: HeadRange, layers: &[u32]) -> u64 {
        layers
            .iter()
            .map(|position| {
                let layer = &self.local.layers()[*position as usize];
                let block_tokens = self
                    .dest_groups
                    .get(layer.group as usize)
                    .map_or(1, |group| group.block_tokens.max(1));
                layer
                    .head_bytes()
                    .saturating_mul(heads.count().into())
                    .saturating_mul(self.tokens.count().div_ceil(block_tokens).into())
            })
            .fold(0, u64::saturating_add)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
