//! What a transfer cannot be made of, each named with its values.

use super::world::{Axis, Engine, Format, Group, Layer, Rank, heads_of};
use super::{grouped, transfer};
use crate::ids::{BlockId, PpRank, TpRank};
use crate::layout::{KvHeads, LayerCache, Part, RankCache};
use crate::memory::MemoryRegion;
use crate::plan::{
    BlockPair, GroupBlocks, Pairing, PlanError, RUNS_MAX, SourceChooser, Striping, TokenRange,
    Transfer, expand,
};

/// Two layers of one group, tokens 0..16 in blocks of `block_tokens`, two heads on each of `tp`
/// ranks.
fn engine(block_tokens: u32, stages: Vec<Vec<usize>>) -> Engine {
    let format = Format {
        order: [Axis::Block, Axis::Head, Axis::Token, Axis::Part],
        pads: [0; 4],
        parts: vec![4, 4],
        one_row: true,
    };
    Engine {
        tp: 2,
        stages,
        groups: vec![Group {
            block_tokens,
            first_index: 0,
            blocks: (0..16 / block_tokens).map(BlockId).collect(),
        }],
        group_of: vec![0, 0],
        formats: vec![format.clone(), format],
        num_blocks: 16,
        layers_in_block: false,
        region_per_layer: false,
    }
}

fn model(opaque: bool) -> Vec<Layer> {
    vec![
        Layer {
            opaque_rows: opaque.then_some(2),
        };
        2
    ]
}

type Lists = Vec<(u32, u32, Vec<BlockId>)>;

fn views(lists: &Lists) -> Vec<GroupBlocks<'_>> {
    lists
        .iter()
        .map(|(block_tokens, first_index, blocks)| GroupBlocks {
            block_tokens: *block_tokens,
            first_index: *first_index,
            blocks,
        })
        .collect()
}

/// What consumer rank 0 is given; changed one by one below.
struct Given {
    pairing: Pairing,
    tp_rank: u32,
    consumer_stages: u32,
    local: RankCache,
    remote: Vec<(PpRank, TpRank, RankCache)>,
    tokens: TokenRange,
    source: Lists,
    dest: Lists,
}

impl Given {
    fn new(sizes: (u32, u32), opaque: bool, producer_stages: Vec<Vec<usize>>) -> Self {
        let model = model(opaque);
        let producer = engine(sizes.0, producer_stages);
        let consumer = engine(sizes.1, vec![vec![0, 1]]);
        let remote = (0..producer.stages.len())
            .flat_map(|pp| (0..2).map(move |tp| (pp, tp)))
            .map(|(pp, tp)| {
                let rank = Rank::new(&producer, &model, pp, heads_of(4, 2, tp), 0);
                (PpRank(pp as u32), TpRank(tp as u32), rank.cache(true))
            })
            .collect();
        let lists = |engine: &Engine| {
            let of = |group: &Group| (group.block_tokens, group.first_index, group.blocks.clone());
            engine.groups.iter().map(of).collect()
        };
        Self {
            pairing: Pairing::new(2, 2, grouped(4)).expect("divisible"),
            tp_rank: 0,
            consumer_stages: 1,
            local: Rank::new(&consumer, &model, 0, heads_of(4, 2, 0), 0).cache(false),
            remote,
            tokens: TokenRange {
                first: 0,
                past_last: 16,
            },
            source: lists(&producer),
            dest: lists(&consumer),
        }
    }

    fn plan(&self) -> Result<u64, PlanError> {
        let (source_groups, dest_groups) = (views(&self.source), views(&self.dest));
        let remote: Vec<(PpRank, TpRank, &RankCache)> = self
            .remote
            .iter()
            .map(|(pp, tp, cache)| (*pp, *tp, cache))
            .collect();
        let plan = Transfer {
            pairing: &self.pairing,
            tp_rank: TpRank(self.tp_rank),
            consumer_stages: self.consumer_stages,
            chooser: &SourceChooser::new(transfer(0)),
            striping: Striping::OFF,
            local: &self.local,
            remote: &remote,
            tokens: self.tokens,
            source_groups: &source_groups,
            dest_groups: &dest_groups,
        }
        .plan()?;
        Ok(plan.bytes())
    }
}

fn one_stage() -> Vec<Vec<usize>> {
    vec![vec![0, 1]]
}

/// The message after a change to a transfer that is fine without it.
fn refused(sizes: (u32, u32), opaque: bool, change: impl FnOnce(&mut Given)) -> String {
    let mut given = Given::new(sizes, opaque, one_stage());
    change(&mut given);
    given.plan().expect_err("has to be refused").to_string()
}

#[test]
fn what_is_changed_below_is_fine_as_it_is() {
    // 16 tokens of 8 bytes in 2 heads and 2 layers; opaque: 4 blocks of 2 rows.
    for sizes in [(4, 4), (2, 8), (8, 2)] {
        assert_eq!(
            Given::new(sizes, false, one_stage()).plan(),
            Ok(16 * 8 * 2 * 2)
        );
    }
    assert_eq!(
        Given::new((4, 4), true, one_stage()).plan(),
        Ok(4 * 2 * 8 * 2 * 2)
    );
    let staged = Given::new((4, 4), false, vec![vec![1], vec![0]]);
    assert_eq!(staged.plan(), Ok(16 * 8 * 2 * 2));
}

#[test]
fn pages_that_cannot_be_cut_are_named_with_both_block_sizes() {
    assert_eq!(
        refused((2, 8), true, |_| {}),
        "page_format: layer \"model.layers.0.self_attn.attn\" stores opaque pages on source tp_rank \
         0, which cannot be cut by token; block_size: 2 on the source, 8 on the consumer"
    );
    let mixed = |given: &mut Given| given.local = Given::new((2, 8), true, one_stage()).local;
    assert_eq!(
        refused((2, 8), false, mixed),
        "page_format: layer \"model.layers.0.self_attn.attn\" stores opaque pages on consumer \
         tp_rank 0, which cannot be cut by token; block_size: 2 on the source, 8 on the consumer"
    );
    // Whichever side's pages they are.
    let local = |given: &mut Given| given.local = Given::new((4, 4), false, one_stage()).local;
    let remote = |given: &mut Given| given.remote = Given::new((4, 4), false, one_stage()).remote;
    for token_side in [&|_: &mut Given| {}, &local, &remote] as [&dyn Fn(&mut Given); 3] {
        assert_eq!(
            refused((4, 4), true, |given| {
                token_side(given);
                given.tokens.first = 6;
            }),
            "page_format: layer \"model.layers.0.self_attn.attn\" stores opaque pages on consumer \
             tp_rank 0, which cannot be cut at token 6 in blocks of 4"
        );
    }
}

#[test]
fn block_sizes_that_do_not_go_together_are_named() {
    let resize = |size: u32| move |given: &mut Given| given.dest[0].0 = size;
    assert_eq!(
        refused((4, 4), false, resize(6)),
        "block_size: 4 tokens on the source, 6 on the consumer; one must divide the other"
    );
    assert_eq!(
        refused((4, 4), false, resize(8)),
        "block_size: layer \"model.layers.0.self_attn.attn\" on consumer tp_rank 0 has blocks of 4 \
         tokens, its group of 8"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.source[0].0 = 8),
        "block_size: layer \"model.layers.0.self_attn.attn\" on source tp_rank 0 has blocks of 4 \
         tokens, its group of 8"
    );
    for (size, side) in [
        (0, "consumer"),
        (65_537, "consumer"),
        (u32::MAX, "consumer"),
    ] {
        assert_eq!(
            refused((4, 4), false, resize(size)),
            format!("block_size: {size} tokens in group 0 of the {side}, not in 1..=65536")
        );
    }
    assert_eq!(
        refused((4, 4), false, |given| given.source[0].0 = 0),
        "block_size: 0 tokens in group 0 of the source, not in 1..=65536"
    );
}

#[test]
fn blocks_that_are_missing_twice_or_out_of_range_are_named() {
    assert_eq!(
        refused((4, 4), false, |given| {
            given.source[0].2.pop();
        }),
        "the 3 blocks of group 0 of the source hold tokens 0..12, wanted are 0..16"
    );
    assert_eq!(
        refused((4, 4), false, |given| {
            given.dest[0].2.remove(0);
            given.dest[0].1 = 1;
        }),
        "the 3 blocks of group 0 of the consumer hold tokens 4..16, wanted are 0..16"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.dest[0].1 = u32::MAX),
        "the 4 blocks of group 0 of the consumer hold tokens 4294967295..4294967295, wanted are 0..16"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.tokens.past_last = u32::MAX),
        "the 4 blocks of group 0 of the source hold tokens 0..16, wanted are 0..4294967295"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.source[0].2[3] = BlockId(1)),
        "block 1 is twice among the blocks of group 0 of the source"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.dest[0].2[0] = BlockId(2)),
        "block 2 is twice among the blocks of group 0 of the consumer"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.source[0].2[1] = BlockId(16)),
        "block 16 on source tp_rank 0 is not below its num_blocks 16"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.dest[0].2[1] =
            BlockId(u32::MAX)),
        "block 4294967295 on consumer tp_rank 0 is not below its num_blocks 16"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.tokens.first = 17),
        "tokens: 17..16 ends before it begins"
    );
    // Nothing to move needs no blocks.
    let mut hit = Given::new((4, 4), false, one_stage());
    hit.tokens.first = 16;
    hit.source[0].2.clear();
    assert_eq!(hit.plan(), Ok(0));
    hit.dest[0].1 = 9;
    assert_eq!(hit.plan(), Ok(0), "a list that begins later");
}

#[test]
fn layers_missing_or_twice_over_the_stages_are_named() {
    let staged = |stages: Vec<Vec<usize>>| {
        Given::new((4, 4), false, stages)
            .plan()
            .expect_err("has to be refused")
            .to_string()
    };
    assert_eq!(
        staged(vec![vec![0]]),
        "layer \"model.layers.1.self_attn.attn\" is missing on source tp_rank 0"
    );
    assert_eq!(
        staged(vec![vec![0], vec![1, 0]]),
        "layer \"model.layers.0.self_attn.attn\" is in stage 0 and in stage 1 of source tp_rank 0"
    );
    let mut short = Given::new((4, 4), false, vec![vec![0], vec![1]]);
    let consumer = engine(4, vec![vec![1]]);
    short.local = Rank::new(&consumer, &model(false), 0, heads_of(4, 2, 0), 0).cache(false);
    assert_eq!(
        short.plan().expect_err("one stage").to_string(),
        "layer \"model.layers.0.self_attn.attn\" is missing on consumer tp_rank 0"
    );
    // The other layer may be another stage's.
    short.consumer_stages = 2;
    assert_eq!(short.plan(), Ok(16 * 8 * 2));
    // A later rank of a stage that lacks what its lead has.
    let mut uneven = Given::new((4, 4), false, vec![vec![0], vec![1]]);
    let latent = Pairing::new(2, 1, grouped(4)).expect("divisible");
    uneven.pairing = latent;
    uneven.remote.retain(|(pp, tp, _)| (pp.0, tp.0) != (1, 1));
    let whole = Engine {
        tp: 1,
        ..engine(4, one_stage())
    };
    uneven.local = Rank::new(&whole, &model(false), 0, heads_of(4, 1, 0), 0).cache(false);
    assert_eq!(
        uneven.plan().expect_err("no such rank").to_string(),
        "layer \"model.layers.1.self_attn.attn\" is missing on source tp_rank 1"
    );
}

#[test]
fn ranks_and_groups_that_do_not_fit_are_named() {
    assert_eq!(
        refused((4, 4), false, |given| given.tp_rank = 2),
        "tp_rank 2 is not below tp_size 2"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.remote.clear()),
        "no cache given for source tp_rank 0"
    );
    assert_eq!(
        refused((4, 4), false, |given| {
            let again = given.remote[0].clone();
            given.remote.push(again);
        }),
        "two caches given for source pp_rank 0 tp_rank 0"
    );
    assert_eq!(
        refused((4, 4), false, |given| {
            given.pairing = Pairing::new(2, 1, grouped(4)).expect("divisible");
        }),
        "heads_held: consumer tp_rank 0 announces 2, its place in the group gives 4"
    );
    assert_eq!(
        refused((4, 4), false, |given| {
            given.pairing = Pairing::new(1, 2, grouped(4)).expect("divisible");
        }),
        "heads_held: source tp_rank 0 announces 2, its place in the group gives 4"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.source.clear()),
        "layer \"model.layers.0.self_attn.attn\" is in group 0, blocks of 0 groups are given for the source"
    );
    assert_eq!(
        refused((4, 4), false, |given| given.dest.clear()),
        "layer \"model.layers.0.self_attn.attn\" is in group 0, blocks of 0 groups are given for the consumer"
    );
    assert_eq!(
        refused((4, 4), false, |given| {
            let mut other = engine(4, one_stage());
            for format in &mut other.formats {
                format.parts = vec![4, 5];
            }
            given.local = Rank::new(&other, &model(false), 0, heads_of(4, 2, 0), 0).cache(false);
        }),
        "layer \"model.layers.0.self_attn.attn\": token_bytes is 8 on source tp_rank 0, 9 on the consumer"
    );
}

fn tall(block_tokens: u32, blocks: u32, group: u32) -> RankCache {
    let part = Part {
        offset_bytes: 0,
        block_stride_bytes: 2 * u64::from(block_tokens),
        head_stride_bytes: 0,
        rows: block_tokens,
        row_stride_bytes: 2,
        row_bytes: 1,
        block_tokens,
    };
    let layer = LayerCache {
        name: "model.layers.0.self_attn.attn".into(),
        region: 0,
        parts: vec![part],
        group,
    };
    let region = MemoryRegion {
        base: 0x1000,
        bytes: 2 * u64::from(block_tokens) * u64::from(blocks),
    };
    RankCache::new(blocks, 1, vec![region], vec![layer]).expect("fits")
}

#[test]
fn too_many_runs_are_refused_before_they_are_made() {
    let plan = |past_last: u32| {
        let pairing = Pairing::new(1, 1, KvHeads::Latent).expect("divisible");
        let cache = tall(1 << 14, 1025, 0);
        let blocks: Vec<BlockId> = (0..1025).map(BlockId).collect();
        let list = [GroupBlocks {
            block_tokens: 1 << 14,
            first_index: 0,
            blocks: &blocks,
        }];
        Transfer {
            pairing: &pairing,
            tp_rank: TpRank(0),
            consumer_stages: 1,
            chooser: &SourceChooser::new(transfer(0)),
            striping: Striping::OFF,
            local: &cache,
            remote: &[(PpRank(0), TpRank(0), &cache)],
            tokens: TokenRange {
                first: 0,
                past_last,
            },
            source_groups: &list,
            dest_groups: &list,
        }
        .plan()
        .map(|plan| plan.reads[0].runs.len() as u64)
    };
    assert_eq!(plan(1 << 24), Ok(RUNS_MAX));
    assert_eq!(
        plan((1 << 24) + 1),
        Err(PlanError::TooManyRuns(RUNS_MAX + 1))
    );
}

#[test]
fn whole_blocks_pair_only_where_one_size_and_one_group_are_meant() {
    let pairing = Pairing::new(1, 1, KvHeads::Latent).expect("divisible");
    let plan = super::plan_of(&pairing, 0, &SourceChooser::new(transfer(0)));
    let pair = [BlockPair {
        source: BlockId(0),
        dest: BlockId(0),
    }];
    let text = |source: &RankCache, dest: &RankCache| {
        expand(&plan, dest, &[(TpRank(0), source)], &pair)
            .expect_err("does not fit")
            .to_string()
    };
    let plain = tall(4, 2, 0);
    assert!(expand(&plan, &plain, &[(TpRank(0), &plain)], &pair).is_ok());
    assert_eq!(
        text(&tall(8, 2, 0), &plain),
        "block_size: 8 tokens on the source, 4 on the consumer; whole blocks pair only where they are equal"
    );
    for (source, dest, side) in [
        (tall(4, 2, 3), tall(4, 2, 0), "source"),
        (tall(4, 2, 0), tall(4, 2, 3), "consumer"),
    ] {
        assert_eq!(
            text(&source, &dest),
            format!(
                "layer \"model.layers.0.self_attn.attn\" is in group 3, blocks of 1 groups are given for the {side}"
            )
        );
    }
}

#[test]
fn more_local_than_remote_blocks_are_refused() {
    let ids = |count: u32| -> Vec<BlockId> { (0..count).map(BlockId).collect() };
    assert_eq!(
        BlockPair::zip(&ids(3), &ids(4))
            .expect_err("one has no source")
            .to_string(),
        "4 blocks of the consumer and 3 of the source"
    );
    let pairs = BlockPair::zip(&[BlockId(5), BlockId(6)], &[BlockId(1)]).expect("enough");
    assert_eq!(
        pairs,
        [BlockPair {
            source: BlockId(5),
            dest: BlockId(1)
        }]
    );
}

#[test]
fn engines_that_cannot_be_a_pair_are_refused_with_both_values() {
    let text = |producer, consumer| {
        Pairing::between(producer, consumer)
            .expect_err("no pair")
            .to_string()
    };
    assert_eq!(
        text((2, grouped(8)), (2, grouped(4))),
        "kv_heads: producer has 8 KV heads, consumer has 4 KV heads"
    );
    assert_eq!(
        text((2, KvHeads::Latent), (2, grouped(1))),
        "kv_heads: producer has one latent, consumer has 1 KV heads"
    );
    for tp in [0, 1025, 1_000_000_000, u32::MAX] {
        assert_eq!(
            text((tp, KvHeads::Latent), (1, KvHeads::Latent)),
            format!("tp_size: producer {tp} is not in 1..=1024")
        );
        assert_eq!(
            text((1, KvHeads::Latent), (tp, KvHeads::Latent)),
            format!("tp_size: consumer {tp} is not in 1..=1024")
        );
    }
    assert!(Pairing::between((2, grouped(4)), (4, grouped(4))).is_ok());
}
