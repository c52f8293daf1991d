//! A naive copier, index by index, and the comparison of every plan with it.
//!
//! A byte of KV is known by what it is (layer, block, head, part, row, position), and memory is a
//! list of such names, one per byte. Storage is a mixed-radix number over axes in any order, with
//! padding after each.

use std::num::NonZeroU32;

use proptest::prelude::*;

use crate::ids::{BlockId, TpRank, TransferId};
use crate::layout::{KvHeads, LayerCache, Part, RankCache};
use crate::memory::MemoryRegion;
use crate::plan::{BlockPair, Pairing, SourceChooser, expand, planned_bytes};

const UNTOUCHED: u32 = u32::MAX;
const GAP: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    Layer,
    Block,
    Head,
    Part,
    Row,
}

use Axis::{Block, Head, Layer, Part as PartAxis, Row};

/// How one side stores its cache.
#[derive(Clone, Debug)]
pub(super) struct Storage {
    /// Outermost first.
    pub(super) order: [Axis; 5],
    /// Unused bytes after each step of the axis at the same position.
    pub(super) pads: [usize; 5],
    /// Unused bytes before the first.
    pub(super) lead: usize,
    /// A region for each layer, instead of one storage that all layers are views of.
    pub(super) region_per_layer: bool,
}

/// What both sides agree on.
#[derive(Clone, Debug)]
pub(super) struct Geometry {
    pub(super) layers: usize,
    pub(super) parts: usize,
    pub(super) rows: usize,
    /// Of part 0; part `p` has `p` more.
    pub(super) row_bytes: usize,
}

impl Geometry {
    fn row_bytes(&self, part: usize) -> usize {
        self.row_bytes + part
    }
}

/// One rank's memory and cache.
pub(super) struct Rank<'a> {
    geometry: &'a Geometry,
    storage: &'a Storage,
    blocks: usize,
    heads: usize,
    pub(super) memory: Vec<Vec<u32>>,
}

impl<'a> Rank<'a> {
    pub(super) fn new(
        geometry: &'a Geometry,
        storage: &'a Storage,
        blocks: usize,
        heads: usize,
        fill: u32,
    ) -> Self {
        let mut rank = Self {
            geometry,
            storage,
            blocks,
            heads,
            memory: Vec::new(),
        };
        let regions = if storage.region_per_layer {
            geometry.layers
        } else {
            1
        };
        let region_bytes =
            storage.lead + rank.stride(storage.order[0]) * rank.steps(storage.order[0]);
        rank.memory = vec![vec![fill; region_bytes]; regions];
        rank
    }

    fn steps(&self, axis: Axis) -> usize {
        match axis {
            Layer if self.storage.region_per_layer => 1,
            Layer => self.geometry.layers,
            Block => self.blocks,
            Head => self.heads,
            PartAxis => self.geometry.parts,
            Row => self.geometry.rows,
        }
    }

    fn stride(&self, axis: Axis) -> usize {
        let mut stride = self.geometry.row_bytes(self.geometry.parts - 1);
        for (inner, pad) in self.storage.order.iter().zip(self.storage.pads).rev() {
            stride += pad;
            if *inner == axis {
                return stride;
            }
            stride *= self.steps(*inner);
        }
        unreachable!("every axis is in the order")
    }

    /// Region and offset of byte 0 of a row.
    fn address(&self, at: [(Axis, usize); 5]) -> (usize, usize) {
        let (mut region, mut offset) = (0, self.storage.lead);
        for (axis, index) in at {
            if axis == Layer && self.storage.region_per_layer {
                region = index;
            } else {
                offset += index * self.stride(axis);
            }
        }
        (region, offset)
    }

    /// `visit(region, offset, layer, part, row, byte)` for one (block, head).
    fn each_byte(
        &self,
        block: usize,
        head: usize,
        mut visit: impl FnMut(usize, usize, [usize; 4]),
    ) {
        for layer in 0..self.geometry.layers {
            for part in 0..self.geometry.parts {
                for row in 0..self.geometry.rows {
                    let (region, offset) = self.address([
                        (Layer, layer),
                        (Block, block),
                        (Head, head),
                        (PartAxis, part),
                        (Row, row),
                    ]);
                    for byte in 0..self.geometry.row_bytes(part) {
                        visit(region, offset + byte, [layer, part, row, byte]);
                    }
                }
            }
        }
    }

    pub(super) fn cache(&self, layer_order: impl Iterator<Item = usize>) -> RankCache {
        let origin = |layer, part| {
            self.address([
                (Layer, layer),
                (Block, 0),
                (Head, 0),
                (PartAxis, part),
                (Row, 0),
            ])
        };
        let regions = (0..).zip(&self.memory).map(|(index, memory)| MemoryRegion {
            base: 0x1003 + (index << 40),
            bytes: memory.len() as u64,
        });
        let layers = layer_order.map(|layer| LayerCache {
            name: format!("model.layers.{layer}.self_attn.attn"),
            region: origin(layer, 0).0 as u32,
            parts: (0..self.geometry.parts)
                .map(|part| Part {
                    offset_bytes: origin(layer, part).1 as u64,
                    block_stride_bytes: self.stride(Block) as u64,
                    head_stride_bytes: self.stride(Head) as u64,
                    rows: self.geometry.rows as u32,
                    row_stride_bytes: self.stride(Row) as u64,
                    row_bytes: self.geometry.row_bytes(part) as u64,
                    block_tokens: 0,
                })
                .collect(),
            group: 0,
        });
        RankCache::new(
            self.blocks as u32,
            self.heads as u32,
            regions.collect(),
            layers.collect(),
        )
        .expect("mixed-radix storage is a layout")
    }
}

/// The heads that design section 4 gives rank `rank`, found by asking for each head.
fn heads_of(total: usize, tp: usize, rank: usize) -> Vec<usize> {
    (0..total)
        .filter(|head| {
            if tp <= total {
                head * tp / total == rank
            } else {
                rank * total / tp == *head
            }
        })
        .collect()
}

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) producer_tp: usize,
    pub(super) consumer_tp: usize,
    pub(super) heads: KvHeads,
    pub(super) geometry: Geometry,
    pub(super) producer: Storage,
    pub(super) consumer: Storage,
    pub(super) source_blocks: usize,
    pub(super) dest_blocks: usize,
    pub(super) pairs: Vec<(usize, usize)>,
    pub(super) transfer: TransferId,
}

/// Runs one transfer on every rank of the consumer and compares memory with the naive copy.
pub(super) fn check(case: &Case) {
    let total = case.heads.total() as usize;
    let pairing = Pairing::new(case.producer_tp as u32, case.consumer_tp as u32, case.heads)
        .expect("the case is divisible");
    let geometry = &case.geometry;
    let name = |block: usize, head: usize, [layer, part, row, byte]: [usize; 4]| {
        [
            (block, case.source_blocks),
            (head, total),
            (layer, geometry.layers),
            (part, geometry.parts),
            (row, geometry.rows),
            (byte, geometry.row_bytes + geometry.parts),
        ]
        .iter()
        .fold(0, |name, (index, radix)| name * radix + index) as u32
    };
    let sources: Vec<Rank<'_>> = (0..case.producer_tp)
        .map(|tp_rank| {
            let held = heads_of(total, case.producer_tp, tp_rank);
            let mut rank = Rank::new(
                geometry,
                &case.producer,
                case.source_blocks,
                held.len(),
                GAP,
            );
            let mut memory = std::mem::take(&mut rank.memory);
            for block in 0..case.source_blocks {
                for (local, head) in held.iter().enumerate() {
                    rank.each_byte(block, local, |region, offset, what| {
                        memory[region][offset] = name(block, *head, what);
                    });
                }
            }
            rank.memory = memory;
            rank
        })
        .collect();
    // Sides list their layers in opposite order: only names may pair them.
    let caches: Vec<RankCache> = sources
        .iter()
        .map(|rank| rank.cache((0..geometry.layers).rev()))
        .collect();
    let remote: Vec<(TpRank, &RankCache)> = (0..).map(TpRank).zip(&caches).collect();
    let blocks: Vec<BlockPair> = case
        .pairs
        .iter()
        .map(|&(source, dest)| BlockPair {
            source: BlockId(source as u32),
            dest: BlockId(dest as u32),
        })
        .collect();
    let chooser = SourceChooser::new(case.transfer);

    for tp_rank in 0..case.consumer_tp {
        let wanted = heads_of(total, case.consumer_tp, tp_rank);
        let dest = Rank::new(
            geometry,
            &case.consumer,
            case.dest_blocks,
            wanted.len(),
            UNTOUCHED,
        );
        let mut expected = dest.memory.clone();
        let mut bytes = 0;
        for &(source_block, dest_block) in &case.pairs {
            for (local, head) in wanted.iter().enumerate() {
                dest.each_byte(dest_block, local, |region, offset, what| {
                    expected[region][offset] = name(source_block, *head, what);
                    bytes += 1;
                });
            }
        }

        let plan = pairing
            .rank_plan(TpRank(tp_rank as u32), &chooser)
            .expect("the rank is in its group");
        let local = dest.cache(0..geometry.layers);
        let mut copied = dest.memory.clone();
        for (source, runs) in expand(&plan, &local, &remote, &blocks).expect("the caches fit") {
            let from = &sources[source.0 as usize].memory;
            for run in runs {
                assert_ne!(run.bytes, 0, "an empty run in {case:?}");
                for byte in 0..run.bytes {
                    let found =
                        from[run.source_region as usize][(run.source_offset + byte) as usize];
                    let place =
                        &mut copied[run.dest_region as usize][(run.dest_offset + byte) as usize];
                    assert_eq!(*place, UNTOUCHED, "written twice by {run:?} in {case:?}");
                    *place = found;
                }
            }
        }
        assert!(copied == expected, "rank {tp_rank} differs in {case:?}");
        assert_eq!(planned_bytes(&plan, &local, blocks.len() as u64), bytes);
    }
}

fn kv_heads(total: u32) -> KvHeads {
    NonZeroU32::new(total).map_or(KvHeads::Latent, KvHeads::Grouped)
}

fn divisible(a: usize, b: usize) -> bool {
    a.is_multiple_of(b) || b.is_multiple_of(a)
}

/// HND pages (vLLM's LBHNC), NHD (LBNHC), K and V apart, the block outermost over all layers
/// (BLHNC), and NHD in a storage per layer.
fn storages() -> Vec<Storage> {
    [
        (
            [Layer, Block, Head, PartAxis, Row],
            [0, 0, 0, 0, 0],
            64,
            false,
        ),
        (
            [Layer, Block, PartAxis, Row, Head],
            [5, 3, 1, 0, 0],
            7,
            false,
        ),
        (
            [PartAxis, Layer, Block, Head, Row],
            [9, 0, 0, 0, 0],
            1,
            false,
        ),
        (
            [Block, Layer, Head, PartAxis, Row],
            [0, 0, 0, 0, 0],
            0,
            false,
        ),
        (
            [Layer, PartAxis, Block, Row, Head],
            [0, 0, 2, 0, 1],
            3,
            true,
        ),
    ]
    .map(|(order, pads, lead, region_per_layer)| Storage {
        order,
        pads,
        lead,
        region_per_layer,
    })
    .to_vec()
}

#[test]
fn every_small_pair_of_shapes_and_layouts_is_exact() {
    const TP: [usize; 6] = [1, 2, 3, 4, 6, 8];
    let mut cases = 0;
    for producer_tp in TP {
        for consumer_tp in TP {
            // 0 stands for the latent.
            for total in [0, 1, 2, 3, 4, 6, 8, 16] {
                let heads = kv_heads(total);
                let count = heads.total() as usize;
                if !divisible(producer_tp, consumer_tp)
                    || !divisible(producer_tp, count)
                    || !divisible(consumer_tp, count)
                {
                    continue;
                }
                for (index, producer) in storages().iter().enumerate() {
                    for consumer in &storages() {
                        cases += 1;
                        check(&Case {
                            producer_tp,
                            consumer_tp,
                            heads,
                            geometry: Geometry {
                                layers: 2,
                                parts: if total == 0 { 1 } else { 2 },
                                rows: 1 + index % 3,
                                row_bytes: 3,
                            },
                            producer: producer.clone(),
                            consumer: consumer.clone(),
                            source_blocks: 4,
                            dest_blocks: 5,
                            pairs: vec![(3, 2), (0, 3), (1, 4), (2, 0)],
                            transfer: TransferId([index as u8; 16]),
                        });
                    }
                }
            }
        }
    }
    assert!(cases > 2000, "only {cases} cases are divisible");
}

fn any_storage() -> impl Strategy<Value = Storage> {
    (
        Just([Layer, Block, Head, PartAxis, Row]).prop_shuffle(),
        prop::array::uniform5(0..4_usize),
        0..70_usize,
        any::<bool>(),
    )
        .prop_map(|(order, pads, lead, region_per_layer)| Storage {
            order,
            pads,
            lead,
            region_per_layer,
        })
}

/// A divisible triple: `common` times powers and factors that keep one dividing the other.
fn any_sizes() -> impl Strategy<Value = (usize, usize, u32)> {
    const SIZES: [usize; 11] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32];
    let triples: Vec<(usize, usize, u32)> = SIZES
        .into_iter()
        .flat_map(|a| SIZES.into_iter().map(move |b| (a, b)))
        .flat_map(|(a, b)| (0..=64_u32).map(move |heads| (a, b, heads)))
        .filter(|&(a, b, heads)| {
            let count = heads.max(1) as usize;
            divisible(a, b) && divisible(a, count) && divisible(b, count)
        })
        .collect();
    prop::sample::select(triples)
}

fn any_pairs() -> impl Strategy<Value = (usize, usize, Vec<(usize, usize)>)> {
    (1..12_usize, 1..12_usize).prop_flat_map(|(source_blocks, dest_blocks)| {
        let dests: Vec<usize> = (0..dest_blocks).collect();
        let picked = prop::sample::subsequence(dests, 0..=dest_blocks).prop_shuffle();
        // One source block may feed several blocks of the consumer.
        let pairs = (picked, prop::collection::vec(0..source_blocks, dest_blocks))
            .prop_map(|(dests, sources)| sources.into_iter().zip(dests).collect());
        (Just(source_blocks), Just(dest_blocks), pairs)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn larger_pairs_in_any_storage_are_exact(
        (producer_tp, consumer_tp, heads) in any_sizes(),
        (layers, parts, rows, row_bytes) in (1..4_usize, 1..4_usize, 1..5_usize, 1..20_usize),
        producer in any_storage(),
        consumer in any_storage(),
        (source_blocks, dest_blocks, pairs) in any_pairs(),
        transfer in any::<[u8; 16]>(),
    ) {
        check(&Case {
            producer_tp,
            consumer_tp,
            heads: kv_heads(heads),
            geometry: Geometry { layers, parts, rows, row_bytes },
            producer,
            consumer,
            source_blocks,
            dest_blocks,
            pairs,
            transfer: TransferId(transfer),
        });
    }
}
