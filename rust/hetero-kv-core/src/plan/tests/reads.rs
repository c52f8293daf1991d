//! How few runs a transfer has, how its reads are sized and named.

use super::{grouped, plan_of, transfer};
use crate::ids::{BlockId, PpRank, TpRank};
use crate::layout::{HeadRange, KvHeads, LayerCache, Part, RankCache};
use crate::memory::MemoryRegion;
use crate::plan::{
    BlockPair, GroupBlocks, LayerRange, Pairing, Region, SourceChooser, Striping, TokenRange,
    Transfer, TransferPlan, expand,
};

const BLOCKS: u32 = 64;
const TOKEN_BYTES: u64 = 8;

#[derive(Clone, Copy)]
enum Order {
    Hnd,
    Nhd,
}

/// `layers` layers of `heads` heads in one region, a group each from `sizes` in turn.
fn cache(order: Order, layers: u32, heads: u32, sizes: &[u32]) -> RankCache {
    let mut end = 0;
    let layers = (0..layers)
        .map(|index| {
            let group = index % sizes.len() as u32;
            let block_tokens = sizes[group as usize];
            let block = TOKEN_BYTES * u64::from(block_tokens) * u64::from(heads);
            let offset_bytes = end;
            end += block * u64::from(BLOCKS);
            let part = match order {
                Order::Hnd => Part {
                    offset_bytes,
                    block_stride_bytes: block,
                    head_stride_bytes: TOKEN_BYTES * u64::from(block_tokens),
                    rows: 1,
                    row_stride_bytes: TOKEN_BYTES * u64::from(block_tokens),
                    row_bytes: TOKEN_BYTES * u64::from(block_tokens),
                    block_tokens,
                },
                Order::Nhd => Part {
                    offset_bytes,
                    block_stride_bytes: block,
                    head_stride_bytes: TOKEN_BYTES,
                    rows: block_tokens,
                    row_stride_bytes: TOKEN_BYTES * u64::from(heads),
                    row_bytes: TOKEN_BYTES,
                    block_tokens,
                },
            };
            LayerCache {
                name: format!("model.layers.{index}.self_attn.attn"),
                region: 0,
                parts: vec![part],
                group,
            }
        })
        .collect();
    let region = MemoryRegion {
        base: 0x1000,
        bytes: end,
    };
    RankCache::new(BLOCKS, heads, vec![region], layers).expect("the layers fill the region")
}

fn ids(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId).collect()
}

struct Side<'a> {
    cache: &'a RankCache,
    sizes: &'a [u32],
    blocks: &'a [BlockId],
}

impl Side<'_> {
    fn groups(&self) -> Vec<GroupBlocks<'_>> {
        self.sizes
            .iter()
            .map(|block_tokens| GroupBlocks {
                block_tokens: *block_tokens,
                first_index: 0,
                blocks: self.blocks,
            })
            .collect()
    }
}

fn plan(
    pairing: &Pairing,
    striping: Striping,
    tokens: u32,
    source: &Side<'_>,
    dest: &Side<'_>,
) -> TransferPlan {
    let remote: Vec<(PpRank, TpRank, &RankCache)> = (0..pairing.producer_tp())
        .map(|tp| (PpRank(0), TpRank(tp), source.cache))
        .collect();
    Transfer {
        pairing,
        tp_rank: TpRank(0),
        consumer_stages: 1,
        chooser: &SourceChooser::new(transfer(0)),
        striping,
        local: dest.cache,
        remote: &remote,
        tokens: TokenRange {
            first: 0,
            past_last: tokens,
        },
        source_groups: &source.groups(),
        dest_groups: &dest.groups(),
    }
    .plan()
    .expect("fits")
}

fn runs(
    heads: u32,
    tokens: u32,
    (source_order, source_size, source_blocks): (Order, u32, &[BlockId]),
    (dest_order, dest_size, dest_blocks): (Order, u32, &[BlockId]),
) -> usize {
    let pairing = Pairing::new(1, 1, grouped(heads)).expect("divisible");
    let source = Side {
        cache: &cache(source_order, 3, heads, &[source_size]),
        sizes: &[source_size],
        blocks: source_blocks,
    };
    let dest = Side {
        cache: &cache(dest_order, 3, heads, &[dest_size]),
        sizes: &[dest_size],
        blocks: dest_blocks,
    };
    let plan = plan(&pairing, Striping::OFF, tokens, &source, &dest);
    let bytes = u64::from(tokens) * TOKEN_BYTES * u64::from(heads) * 3;
    assert_eq!(plan.bytes(), bytes);
    plan.reads.iter().map(|read| read.runs.len()).sum()
}

#[test]
fn neighbours_are_one_run_whatever_the_order_and_size_of_blocks() {
    let (up, down) = (ids(8..16), ids((8..16).rev()));
    let apart = ids((8..24).step_by(2));
    for order in [Order::Hnd, Order::Nhd] {
        let equal = |source: &[BlockId], dest: &[BlockId]| {
            runs(2, 32, (order, 4, source), (order, 4, dest))
        };
        assert_eq!(equal(&up, &up), 3, "one per layer");
        assert_eq!(equal(&down, &down), 3, "one per layer");
        assert_eq!(equal(&up, &down), 24, "one per layer and block");
        assert_eq!(equal(&apart, &up), 24, "one per layer and block");
    }
    // One head: blocks of any size are the same bytes in a row.
    let one =
        |source: u32, dest: u32| runs(1, 32, (Order::Hnd, source, &up), (Order::Nhd, dest, &up));
    assert_eq!((one(4, 16), one(16, 4), one(4, 4)), (3, 3, 3));
    // Two heads: one per layer, head and smaller block, save where blocks end on both sides.
    assert_eq!(runs(2, 32, (Order::Hnd, 4, &up), (Order::Hnd, 8, &up)), 39);
    // Head before token into token before head: one per layer, head and token, save the same.
    assert_eq!(runs(2, 32, (Order::Hnd, 4, &up), (Order::Nhd, 4, &up)), 171);
}

#[test]
fn layers_side_by_side_are_one_run_in_whatever_order_a_rank_lists_them() {
    let pairing = Pairing::new(1, 1, grouped(1)).expect("divisible");
    let upwards = cache(Order::Hnd, 3, 1, &[4]);
    let mut layers = upwards.layers().to_vec();
    layers.reverse();
    let downwards = RankCache::new(BLOCKS, 1, upwards.regions().to_vec(), layers).expect("fits");
    let blocks = ids(0..BLOCKS);
    let side = |cache| Side {
        cache,
        sizes: &[4],
        blocks: &blocks,
    };
    let found = plan(
        &pairing,
        Striping::OFF,
        4 * BLOCKS,
        &side(&upwards),
        &side(&downwards),
    );
    assert_eq!(found.reads[0].runs.len(), 1);
}

#[test]
fn neighbours_by_number_in_two_regions_are_two_runs() {
    let pairing = Pairing::new(1, 1, grouped(1)).expect("divisible");
    let together = cache(Order::Hnd, 2, 1, &[4]);
    let mut layers = together.layers().to_vec();
    layers[1].region = 1;
    let bytes = together.regions()[0].bytes;
    let region = |base| MemoryRegion { base, bytes };
    let regions = vec![region(0x1000), region(0x1000 + 2 * bytes)];
    let apart = RankCache::new(BLOCKS, 1, regions, layers).expect("fits");
    let blocks = ids(0..BLOCKS);
    let side = |cache| Side {
        cache,
        sizes: &[4],
        blocks: &blocks,
    };
    for (source, dest, regions) in [
        (&apart, &together, [(0, 0), (1, 0)]),
        (&together, &apart, [(0, 0), (0, 1)]),
    ] {
        let found = plan(
            &pairing,
            Striping::OFF,
            4 * BLOCKS,
            &side(source),
            &side(dest),
        );
        let runs = found.reads[0].runs.iter();
        let of: Vec<(u32, u32)> = runs
            .map(|run| (run.source_region, run.dest_region))
            .collect();
        assert_eq!(of, regions);
    }
}

#[test]
fn the_threshold_counts_the_heads_and_layers_of_the_read() {
    // Replicated: two heads on four ranks, so two holders each; 32 tokens, 3 layers.
    let pairing = Pairing::new(4, 1, grouped(2)).expect("divisible");
    let (source, dest) = (cache(Order::Hnd, 3, 1, &[4]), cache(Order::Hnd, 3, 2, &[4]));
    let blocks = ids(0..8);
    let holders = |threshold_bytes| {
        let side = |cache| Side {
            cache,
            sizes: &[4],
            blocks: &blocks,
        };
        let striping = Striping {
            threshold_bytes,
            holders_max: 8,
        };
        plan(&pairing, striping, 32, &side(&source), &side(&dest))
            .reads
            .len()
    };
    let read_bytes = 32 * TOKEN_BYTES * 3;
    assert_eq!(holders(read_bytes), 4);
    assert_eq!(holders(read_bytes + 1), 2);
}

#[test]
fn block_sizes_without_a_common_multiple_are_moved_unstriped() {
    // Primes: their least common multiple passes 2^64.
    let sizes = [65_521, 65_519, 65_497, 65_479, 65_449, 65_447];
    let pairing = Pairing::new(2, 1, KvHeads::Latent).expect("divisible");
    let memory = cache(Order::Hnd, 6, 1, &sizes);
    let blocks = ids(0..3);
    let side = Side {
        cache: &memory,
        sizes: &sizes,
        blocks: &blocks,
    };
    let striping = Striping {
        threshold_bytes: 1,
        holders_max: 8,
    };
    let found = plan(&pairing, striping, 130_000, &side, &side);
    assert_eq!(found.reads.len(), 1);
    assert_eq!(found.bytes(), 6 * 130_000 * TOKEN_BYTES);
    // Two that do: stripes of whole blocks of both.
    let sizes = [4, 6];
    let memory = cache(Order::Hnd, 2, 1, &sizes);
    let blocks = ids(0..32);
    let side = Side {
        cache: &memory,
        sizes: &sizes,
        blocks: &blocks,
    };
    let found = plan(&pairing, striping, 100, &side, &side);
    let tokens: Vec<TokenRange> = found.reads.iter().map(|read| read.tokens).collect();
    let range = |first, past_last| TokenRange { first, past_last };
    assert_eq!(tokens, [range(0, 60), range(60, 100)]);
}

#[test]
fn a_read_names_its_layers_in_as_few_regions_as_they_allow() {
    let pairing = Pairing::new(1, 1, KvHeads::Latent).expect("divisible");
    let memory = cache(Order::Hnd, 5, 1, &[4]);
    let blocks = ids(0..2);
    let side = Side {
        cache: &memory,
        sizes: &[4],
        blocks: &blocks,
    };
    let found = plan(&pairing, Striping::OFF, 6, &side, &side);
    let [read] = found.reads.as_slice() else {
        panic!("one source, {found:?}");
    };
    assert_eq!(read.layers, [0, 1, 2, 3, 4]);
    let region = |first, past_last| Region {
        tokens: TokenRange {
            first: 0,
            past_last: 6,
        },
        heads: HeadRange {
            first: 0,
            past_last: 1,
        },
        layers: LayerRange { first, past_last },
    };
    assert_eq!(read.regions(|at| at), [region(0, 5)]);
    // The consumer's cache may list a stage's layers backwards.
    assert_eq!(read.regions(|at| 30 - at), [region(26, 31)]);
    let apart = [3, 4, 9, 10, 12];
    assert_eq!(
        read.regions(|at| apart[at as usize]),
        [region(3, 5), region(9, 11), region(12, 13)]
    );
}

#[test]
fn whole_blocks_and_tokens_come_to_the_same_runs() {
    let pairing = Pairing::new(2, 1, grouped(4)).expect("divisible");
    let (source, dest) = (cache(Order::Nhd, 3, 2, &[4]), cache(Order::Hnd, 3, 4, &[4]));
    let (from, to) = (ids([5, 9, 1, 2]), ids([7, 3, 4, 5]));
    let side = |cache, blocks| Side {
        cache,
        sizes: &[4],
        blocks,
    };
    let by_token = plan(
        &pairing,
        Striping::OFF,
        16,
        &side(&source, &from),
        &side(&dest, &to),
    );
    let ungrouped = plan_of(&pairing, 0, &SourceChooser::new(transfer(0)));
    let pairs = BlockPair::zip(&from, &to).expect("as many");
    let remote = [(TpRank(0), &source), (TpRank(1), &source)];
    let by_block = expand(&ungrouped, &dest, &remote, &pairs).expect("fits");
    let reads: Vec<_> = by_token
        .reads
        .into_iter()
        .map(|read| (read.tp_rank, read.runs))
        .collect();
    assert_eq!(reads, by_block);
}
