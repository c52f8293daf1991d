//! Transfers drawn from few numbers, so that a case that fails shrinks.

use proptest::prelude::*;

use super::world::{Axis, Engine, Format, Group, Layer, TOKEN_BYTES_MAX};
use super::{HEADS, TP, grouped, transfer};
use crate::ids::BlockId;
use crate::layout::KvHeads;
use crate::plan::{SourceChooser, Striping, TokenRange};

/// One transfer between two engines.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) heads: KvHeads,
    pub(super) model: Vec<Layer>,
    pub(super) producer: Engine,
    pub(super) consumer: Engine,
    pub(super) tokens: TokenRange,
    pub(super) chooser: SourceChooser,
    pub(super) striping: Striping,
}

/// Enough of a generator for storage and block ids, so that the rest of a case shrinks.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        // Constants of SplitMix64 (Steele, Lea, Flood, 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for place in (1..items.len()).rev() {
            items.swap(place, self.below(place + 1));
        }
    }

    /// A format of a layer whose tokens have so many bytes: cut into parts anywhere, or (opaque) as
    /// `parts` says.
    fn format(
        &mut self,
        token_bytes: usize,
        parts: Option<&[usize]>,
        block_outermost: bool,
    ) -> Format {
        let mut order = [Axis::Block, Axis::Part, Axis::Head, Axis::Token];
        self.shuffle(&mut order[usize::from(block_outermost)..]);
        let parts = match parts {
            Some(parts) => parts.to_vec(),
            None => self.cut(token_bytes),
        };
        let padded = self.below(2) == 0;
        let pads = [(); 4].map(|()| if padded { self.below(4) } else { 0 });
        Format {
            order,
            pads,
            parts,
            one_row: self.below(2) == 0,
        }
    }

    fn cut(&mut self, bytes: usize) -> Vec<usize> {
        let mut left = bytes;
        let mut parts = Vec::new();
        while left > 0 {
            let part = if parts.len() == 3 || self.below(3) == 0 {
                left
            } else {
                1 + self.below(left)
            };
            parts.push(part);
            left -= part;
        }
        parts
    }

    /// Blocks that hold `tokens`, perhaps more on either end, with ids all over the cache.
    fn group(&mut self, block_tokens: u32, tokens: TokenRange, num_blocks: usize) -> Group {
        let first_needed = tokens.first / block_tokens;
        let first_index = first_needed - self.below(first_needed as usize + 1) as u32;
        let needed = (tokens.past_last.div_ceil(block_tokens)).saturating_sub(first_index);
        let mut ids: Vec<BlockId> = (0..num_blocks as u32).map(BlockId).collect();
        if self.below(2) == 0 {
            self.shuffle(&mut ids);
        }
        ids.truncate(needed as usize + self.below(3));
        Group {
            block_tokens,
            first_index,
            blocks: ids,
        }
    }
}

pub(super) fn kv_heads(total: u32) -> KvHeads {
    if total == 0 {
        KvHeads::Latent
    } else {
        grouped(total)
    }
}

fn divides(a: u32, b: u32) -> bool {
    a.is_multiple_of(b) || b.is_multiple_of(a)
}

/// Heads (0: the latent) that both sides can share out.
pub(super) fn pairs_with(producer: u32, consumer: u32, heads: u32) -> bool {
    let count = heads.max(1);
    divides(producer, consumer) && divides(producer, count) && divides(consumer, count)
}

#[derive(Clone, Debug)]
pub(super) struct Draw {
    pub(super) producer_tp: u32,
    pub(super) consumer_tp: u32,
    pub(super) heads: u32,
    pub(super) layers: Vec<LayerDraw>,
    /// Per group, in tokens: the smaller block, the ratio, and whether the larger is the producer's.
    pub(super) groups: Vec<(u32, u32, bool)>,
    pub(super) tokens: TokenRange,
    pub(super) reversed_groups: bool,
    pub(super) layers_in_block: bool,
    pub(super) region_per_layer: [bool; 2],
    pub(super) weights: Vec<u16>,
    pub(super) holders_max: u32,
    pub(super) striped: bool,
    pub(super) seed: u64,
}

#[derive(Clone, Debug)]
pub(super) struct LayerDraw {
    pub(super) token_bytes: usize,
    pub(super) opaque: bool,
    pub(super) group: usize,
    pub(super) stages: [usize; 2],
}

impl Draw {
    pub(super) fn case(&self) -> Case {
        let mut dice = Dice(self.seed);
        let count = self.groups.len();
        let group_of = |layer: &LayerDraw| layer.group % count;
        let sizes = |producer: bool| -> Vec<u32> {
            self.groups
                .iter()
                .map(|&(small, ratio, larger)| {
                    if larger == producer {
                        small * ratio
                    } else {
                        small
                    }
                })
                .collect()
        };
        let model: Vec<Layer> = self
            .layers
            .iter()
            .map(|layer| {
                let (small, ratio, _) = self.groups[group_of(layer)];
                let uncut = ratio == 1 && self.tokens.first.is_multiple_of(small);
                Layer {
                    opaque_rows: (layer.opaque && uncut).then(|| 1 + dice.below(3)),
                }
            })
            .collect();
        let opaque_parts: Vec<Vec<usize>> = self
            .layers
            .iter()
            .map(|layer| dice.cut(layer.token_bytes))
            .collect();
        let mut engine = |side: usize, tp: u32| {
            let mut stages: Vec<Vec<usize>> = vec![Vec::new(); 4];
            for (index, layer) in self.layers.iter().enumerate() {
                stages[layer.stages[side]].push(index);
            }
            stages.retain(|layers| !layers.is_empty());
            let num_blocks = self.tokens.past_last as usize + 4;
            let mut groups: Vec<Group> = sizes(side == 0)
                .into_iter()
                .map(|size| dice.group(size, self.tokens, num_blocks))
                .collect();
            let mut of: Vec<usize> = self.layers.iter().map(group_of).collect();
            if side == 1 && self.reversed_groups {
                groups.reverse();
                of.iter_mut().for_each(|group| *group = count - 1 - *group);
            }
            let formats = self
                .layers
                .iter()
                .zip(&model)
                .zip(&opaque_parts)
                .map(|((layer, shape), parts)| {
                    let fixed = shape.opaque_rows.map(|_| parts.as_slice());
                    dice.format(layer.token_bytes, fixed, self.layers_in_block)
                })
                .collect();
            Engine {
                tp: tp as usize,
                stages,
                groups,
                group_of: of,
                formats,
                num_blocks,
                layers_in_block: self.layers_in_block,
                region_per_layer: self.region_per_layer[side],
            }
        };
        let producer = engine(0, self.producer_tp);
        let consumer = engine(1, self.consumer_tp);
        Case {
            heads: kv_heads(self.heads),
            model,
            producer,
            consumer,
            tokens: self.tokens,
            chooser: SourceChooser::weighted(transfer(self.seed as u32), self.weights.clone()),
            striping: if self.striped {
                Striping {
                    threshold_bytes: 1,
                    holders_max: self.holders_max,
                }
            } else {
                Striping::OFF
            },
        }
    }
}

pub(super) fn tokens(first: u32, past_last: u32) -> TokenRange {
    TokenRange { first, past_last }
}

fn any_sizes() -> impl Strategy<Value = (u32, u32, u32)> {
    let triples: Vec<(u32, u32, u32)> = TP
        .into_iter()
        .flat_map(|a| TP.into_iter().map(move |b| (a, b)))
        .flat_map(|(a, b)| (0..=128_u32).map(move |heads| (a, b, heads)))
        .filter(|&(a, b, heads)| pairs_with(a, b, heads))
        .collect();
    assert!(HEADS.iter().all(|heads| *heads <= 128));
    prop::sample::select(triples)
}

fn any_layer() -> impl Strategy<Value = LayerDraw> {
    (
        1..TOKEN_BYTES_MAX,
        any::<bool>(),
        0..3_usize,
        [0..4_usize, 0..4_usize],
    )
        .prop_map(|(token_bytes, opaque, group, stages)| LayerDraw {
            token_bytes,
            opaque,
            group,
            stages,
        })
}

pub(super) fn any_draw() -> impl Strategy<Value = Draw> {
    (
        any_sizes(),
        prop::collection::vec(any_layer(), 1..6),
        prop::collection::vec((1..6_u32, 1..5_u32, any::<bool>()), 1..4),
        (0..24_u32, 0..40_u32, any::<bool>()),
        (any::<bool>(), any::<bool>(), any::<[bool; 2]>()),
        prop::collection::vec(prop::sample::select(vec![0, 1, 2, 7, u16::MAX]), 0..17),
        (1..18_u32, any::<bool>(), any::<u64>()),
    )
        .prop_map(
            |(
                (producer_tp, consumer_tp, heads),
                layers,
                groups,
                (first, count, aligned),
                (reversed_groups, layers_in_block, region_per_layer),
                weights,
                (holders_max, striped, seed),
            )| {
                let first = if aligned { first / 6 * 6 } else { first };
                Draw {
                    producer_tp,
                    consumer_tp,
                    heads,
                    layers,
                    groups,
                    tokens: tokens(first, first + count),
                    reversed_groups,
                    layers_in_block,
                    region_per_layer,
                    weights,
                    holders_max,
                    striped,
                    seed,
                }
            },
        )
}
