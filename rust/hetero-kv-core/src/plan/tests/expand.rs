//! Runs: how few, and what is refused. That they are right is the oracle's matter.

use super::oracle::{Axis, Geometry, Rank, Storage};
use super::{grouped, plan_of, transfer};
use crate::ids::{BlockId, TpRank};
use crate::layout::RankCache;
use crate::plan::{
    BlockPair, Pairing, PlanError, RUNS_MAX, SourceChooser, expand, planned_bytes, source_bytes,
};

const GEOMETRY: Geometry = Geometry {
    layers: 3,
    parts: 1,
    rows: 1,
    row_bytes: 16,
};

/// vLLM's LBHNC, as the CPU attention stores it.
const LBHNC: Storage = Storage {
    order: [Axis::Layer, Axis::Block, Axis::Head, Axis::Part, Axis::Row],
    pads: [0; 5],
    lead: 64,
    region_per_layer: false,
};

fn cache(geometry: &Geometry, storage: &Storage, blocks: usize, heads: usize) -> RankCache {
    Rank::new(geometry, storage, blocks, heads, 0).cache(0..geometry.layers)
}

fn pairs(pairs: &[(u32, u32)]) -> Vec<BlockPair> {
    pairs
        .iter()
        .map(|&(source, dest)| BlockPair {
            source: BlockId(source),
            dest: BlockId(dest),
        })
        .collect()
}

#[test]
fn neighbouring_blocks_are_one_run_also_from_a_descending_free_list() {
    let pairing = Pairing::new(1, 1, grouped(2)).expect("divisible");
    let plan = plan_of(&pairing, 0, &SourceChooser::new(transfer(0)));
    let whole = cache(&GEOMETRY, &LBHNC, 10, 2);
    let runs = |blocks: &[(u32, u32)]| {
        let expanded = expand(&plan, &whole, &[(TpRank(0), &whole)], &pairs(blocks));
        expanded.expect("fits")[0].1.len()
    };
    assert_eq!(runs(&[(2, 5), (3, 6), (4, 7)]), 3, "one per layer");
    assert_eq!(runs(&[(4, 7), (3, 6), (2, 5)]), 3, "one per layer");
    assert_eq!(
        runs(&[(4, 5), (3, 6), (2, 7)]),
        9,
        "one per layer and block"
    );
    assert_eq!(runs(&[]), 0);

    // With the block outermost a block's layers lie together, and so do neighbouring blocks.
    let block_outermost = Storage {
        order: [Axis::Block, Axis::Layer, Axis::Head, Axis::Part, Axis::Row],
        ..LBHNC
    };
    let together = cache(&GEOMETRY, &block_outermost, 10, 2);
    let blocks = pairs(&[(2, 5), (3, 6), (4, 7)]);
    let expanded = expand(&plan, &together, &[(TpRank(0), &together)], &blocks).expect("fits");
    assert_eq!(expanded[0].1.len(), 1);
}

#[test]
fn caches_that_do_not_fit_are_named() {
    let pairing = Pairing::new(2, 1, grouped(4)).expect("divisible");
    let plan = plan_of(&pairing, 0, &SourceChooser::new(transfer(0)));
    let local = cache(&GEOMETRY, &LBHNC, 10, 4);
    let good = cache(&GEOMETRY, &LBHNC, 8, 2);
    let one = pairs(&[(0, 0)]);
    let fail = |local: &RankCache, second: &RankCache, blocks: &[BlockPair]| {
        let remote = [(TpRank(0), &good), (TpRank(1), second)];
        expand(&plan, local, &remote, blocks)
            .expect_err("does not fit")
            .to_string()
    };
    assert!(
        expand(
            &plan,
            &local,
            &[(TpRank(0), &good), (TpRank(1), &good)],
            &one
        )
        .is_ok()
    );
    assert_eq!(
        expand(&plan, &local, &[(TpRank(0), &good)], &one),
        Err(PlanError::NoCache(TpRank(1)))
    );
    let with = |change: fn(&mut Geometry)| {
        let mut geometry = GEOMETRY;
        change(&mut geometry);
        cache(&geometry, &LBHNC, 8, 2)
    };
    for (second, text) in [
        (
            cache(&GEOMETRY, &LBHNC, 8, 4),
            "heads_held: source tp_rank 1 announces 4, its place in the group gives 2",
        ),
        (
            with(|geometry| geometry.layers = 2),
            "layer \"model.layers.2.self_attn.attn\" is missing on source tp_rank 1",
        ),
        (
            with(|geometry| geometry.layers = 4),
            "layer \"model.layers.3.self_attn.attn\" is missing on consumer tp_rank 0",
        ),
        (
            with(|geometry| geometry.parts = 2),
            "layer \"model.layers.0.self_attn.attn\": parts is 2 on source tp_rank 1, 1 on the consumer",
        ),
        (
            with(|geometry| geometry.rows = 2),
            "layer \"model.layers.0.self_attn.attn\": rows is 2 on source tp_rank 1, 1 on the consumer",
        ),
        (
            with(|geometry| geometry.row_bytes = 32),
            "layer \"model.layers.0.self_attn.attn\": row_bytes is 32 on source tp_rank 1, 16 on the consumer",
        ),
    ] {
        assert_eq!(fail(&local, &second, &one), text);
    }
    assert_eq!(
        fail(&cache(&GEOMETRY, &LBHNC, 8, 2), &good, &one),
        "heads_held: consumer tp_rank 0 announces 2, its place in the group gives 4"
    );
    for (blocks, text) in [
        (
            vec![(8, 0)],
            "block 8 on source tp_rank 0 is not below its num_blocks 8",
        ),
        (
            vec![(0, 10)],
            "block 10 on consumer tp_rank 0 is not below its num_blocks 10",
        ),
        (
            vec![(0, 3), (1, 2), (2, 3)],
            "block 3 of the consumer is written by two pairs",
        ),
    ] {
        assert_eq!(fail(&local, &good, &pairs(&blocks)), text);
    }
}

#[test]
fn too_many_runs_are_refused_before_they_are_made() {
    let rows = Geometry {
        layers: 1,
        parts: 1,
        rows: 1 << 14,
        row_bytes: 1,
    };
    let apart = Storage {
        pads: [0, 0, 0, 0, 1],
        ..LBHNC
    };
    let pairing = Pairing::new(1, 1, grouped(1)).expect("divisible");
    let plan = plan_of(&pairing, 0, &SourceChooser::new(transfer(0)));
    let local = cache(&rows, &apart, 1025, 1);
    let blocks: Vec<_> = (0..1025).map(|block| (block, block)).collect();
    assert_eq!(
        expand(&plan, &local, &[(TpRank(0), &local)], &pairs(&blocks)),
        Err(PlanError::TooManyRuns(1025 << 14))
    );
    let fitting = expand(&plan, &local, &[(TpRank(0), &local)], &pairs(&blocks[1..]));
    assert_eq!(fitting.expect("at the limit")[0].1.len() as u64, RUNS_MAX);
}

#[test]
fn bytes_are_planned_per_source_and_in_all() {
    let pairing = Pairing::new(4, 2, grouped(8)).expect("divisible");
    let plan = plan_of(&pairing, 1, &SourceChooser::new(transfer(0)));
    let local = cache(&GEOMETRY, &LBHNC, 4, 4);
    // 3 layers of 16 bytes per (block, head); 2 heads from each of 2 sources.
    assert_eq!(source_bytes(&plan.sources[0], &local, 5), 3 * 16 * 2 * 5);
    assert_eq!(planned_bytes(&plan, &local, 5), 3 * 16 * 4 * 5);
    assert_eq!(planned_bytes(&plan, &local, u64::MAX), u64::MAX);
}
