//! How long one consumer rank takes from a transfer id and block ids to the runs it reads, at the
//! size of a large model: 61 layers, 512 blocks.
//!
//! `cargo bench -p hetero-kv-core --bench plan`. Exit status 1 when a case of equal tensor parallel
//! sizes takes more than the bar in the median, or when its time per block grows with the blocks.
//! `outline` is the part that vLLM's worker thread waits for; the lists of runs are made by the
//! reader's threads. The cases of unlike sizes are shown only: their lists of runs are megabytes, and the pages of a
//! list that the allocator takes from the kernel anew each time cost more than what is written.

// The core takes time as an argument; this program is its caller.
#![allow(clippy::disallowed_methods)]

use std::hint::black_box;
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use hetero_kv_core::ids::{BlockId, PpRank, TpRank, TransferId};
use hetero_kv_core::layout::{KvHeads, LayerCache, Part, RankCache};
use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::plan::{GroupBlocks, Pairing, SourceChooser, Striping, TokenRange, Transfer};

const LAYERS: u32 = 61;
const BLOCKS: u32 = 512;
const BLOCK_TOKENS: u32 = 16;
const ELEMENT_BYTES: u64 = 2;
const BAR: Duration = Duration::from_millis(1);
/// Time per block at the most blocks over that at an eighth of them: 1 is linear.
const GROWTH_MAX: f64 = 2.0;
const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_millis(150);

/// Where heads lie in a block.
#[derive(Clone, Copy)]
enum Order {
    /// Head before token: a head's page is contiguous.
    Hnd,
    /// Token before head: a head's page is a row per token.
    Nhd,
}

struct Case {
    name: &'static str,
    heads: KvHeads,
    /// Elements of one token in one head.
    elements: u64,
    order: Order,
    producer_tp: u32,
    consumer_tp: u32,
    /// Tokens of a block of the producer; the consumer's have [`BLOCK_TOKENS`].
    source_tokens: u32,
    /// Whether the bar is for this case.
    barred: bool,
}

/// Block ids as they come: one after another, or so that no two neighbours merge.
#[derive(Clone, Copy)]
enum Ids {
    Neighbours,
    Scattered,
}

fn main() -> ExitCode {
    let grouped = KvHeads::Grouped(NonZeroU32::new(8).expect("invariant: 8 is not 0"));
    let cases = [
        Case {
            name: "MLA 576, TP8 -> TP8",
            heads: KvHeads::Latent,
            elements: 576,
            order: Order::Hnd,
            producer_tp: 8,
            consumer_tp: 8,
            source_tokens: BLOCK_TOKENS,
            barred: true,
        },
        Case {
            name: "GQA 8x128 HND, TP8 -> TP8",
            heads: grouped,
            elements: 256,
            order: Order::Hnd,
            producer_tp: 8,
            consumer_tp: 8,
            source_tokens: BLOCK_TOKENS,
            barred: true,
        },
        Case {
            name: "GQA 8x128 NHD, TP8 -> TP8",
            heads: grouped,
            elements: 256,
            order: Order::Nhd,
            producer_tp: 8,
            consumer_tp: 8,
            source_tokens: BLOCK_TOKENS,
            barred: true,
        },
        Case {
            name: "GQA 8x128 HND, TP8 -> TP1",
            heads: grouped,
            elements: 256,
            order: Order::Hnd,
            producer_tp: 8,
            consumer_tp: 1,
            source_tokens: BLOCK_TOKENS,
            barred: false,
        },
        Case {
            name: "GQA 8x128 NHD, TP8 -> TP4",
            heads: grouped,
            elements: 256,
            order: Order::Nhd,
            producer_tp: 8,
            consumer_tp: 4,
            source_tokens: BLOCK_TOKENS,
            barred: false,
        },
        Case {
            name: "GQA 8x128 HND, blocks of 64",
            heads: grouped,
            elements: 256,
            order: Order::Hnd,
            producer_tp: 8,
            consumer_tp: 8,
            source_tokens: 4 * BLOCK_TOKENS,
            barred: false,
        },
    ];
    println!("{LAYERS} layers, one consumer rank; best and median of {ROUNDS} rounds");
    println!(
        "case                        ids         blocks     runs    best ms  median ms  ns/run  outline ms"
    );
    let mut within = true;
    for case in &cases {
        for ids in [Ids::Neighbours, Ids::Scattered] {
            let mut per_block = Vec::new();
            for blocks in [BLOCKS / 4, BLOCKS, 2 * BLOCKS] {
                let figures = time(case, ids, blocks);
                println!(
                    "{:27} {:11} {:6} {:8} {:10.4} {:10.4} {:7.1} {:11.4}",
                    case.name,
                    match ids {
                        Ids::Neighbours => "neighbours",
                        Ids::Scattered => "scattered",
                    },
                    blocks,
                    figures.runs,
                    figures.best.as_secs_f64() * 1e3,
                    figures.median.as_secs_f64() * 1e3,
                    figures.best.as_nanos() as f64 / figures.runs as f64,
                    figures.outline.as_secs_f64() * 1e3,
                );
                per_block.push(figures.best.as_secs_f64() / f64::from(blocks));
                if case.barred && blocks == BLOCKS && figures.median > BAR {
                    println!("  above the bar of {BAR:?}");
                    within = false;
                }
            }
            let growth = per_block[per_block.len() - 1] / per_block[0];
            if growth > GROWTH_MAX {
                println!("  {growth:.2} times the time per block at 8 times the blocks");
                within &= !case.barred;
            }
        }
    }
    if within {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

struct Figures {
    runs: usize,
    best: Duration,
    median: Duration,
    /// In the median.
    outline: Duration,
}

/// The plan and its runs, made anew each time, as for each request.
fn time(case: &Case, ids: Ids, blocks: u32) -> Figures {
    let pairing = Pairing::new(case.producer_tp, case.consumer_tp, case.heads)
        .expect("invariant: the cases are divisible");
    let local = cache(
        case,
        pairing.consumer_heads(TpRank(0)).map(|h| h.count()),
        BLOCK_TOKENS,
    );
    let source = cache(
        case,
        pairing.producer_heads(TpRank(0)).map(|h| h.count()),
        case.source_tokens,
    );
    let remote: Vec<(PpRank, TpRank, &RankCache)> = (0..case.producer_tp)
        .map(|rank| (PpRank(0), TpRank(rank), &source))
        .collect();
    let (source_ids, dest_ids) = ids_of(ids, blocks);
    let group = |block_tokens, blocks| GroupBlocks {
        block_tokens,
        first_index: 0,
        blocks,
    };
    let source_count = (blocks * BLOCK_TOKENS).div_ceil(case.source_tokens) as usize;
    let source_groups = [group(case.source_tokens, &source_ids[..source_count])];
    let dest_groups = [group(BLOCK_TOKENS, &dest_ids)];
    let once = |seed: u128, full: bool| {
        let transfer = Transfer {
            pairing: &pairing,
            tp_rank: TpRank(0),
            consumer_stages: 1,
            chooser: &SourceChooser::new(TransferId(seed.to_be_bytes())),
            striping: Striping::OFF,
            local: &local,
            remote: &remote,
            tokens: TokenRange {
                first: 0,
                past_last: blocks * BLOCK_TOKENS,
            },
            source_groups: &source_groups,
            dest_groups: &dest_groups,
        };
        // What is made is counted, or the compiler might not make it.
        if full {
            let plan = transfer.plan().expect("invariant: the caches fit");
            plan.reads.iter().map(|read| read.runs.len()).sum()
        } else {
            let outline = transfer.outline().expect("invariant: the caches fit");
            outline.reads.len()
        }
    };
    let runs: usize = once(0, true);
    let [(best, median), (_, outline)] = [true, false].map(|full| {
        let rounds = rounds(|seed| once(seed, full));
        (rounds[0], rounds[ROUNDS / 2])
    });
    Figures {
        runs,
        best,
        median,
        outline,
    }
}

/// The least time of each round, ascending.
fn rounds(once: impl Fn(u128) -> usize) -> Vec<Duration> {
    let mut seed = 0;
    let mut rounds: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let mut least = Duration::MAX;
            let begun = Instant::now();
            while begun.elapsed() < ROUND {
                seed += 1;
                let started = Instant::now();
                black_box(once(black_box(seed)));
                least = least.min(started.elapsed());
            }
            least
        })
        .collect();
    rounds.sort_unstable();
    rounds
}

/// One storage for all layers, as vLLM allocates it.
fn cache<E: std::fmt::Debug>(
    case: &Case,
    heads_held: Result<u32, E>,
    block_tokens: u32,
) -> RankCache {
    let heads = heads_held.expect("invariant: rank 0 exists");
    let num_blocks = 8 * BLOCKS;
    let row = case.elements * ELEMENT_BYTES;
    let page = row * u64::from(block_tokens);
    let block = page * u64::from(heads);
    let layer_bytes = block * u64::from(num_blocks);
    let layers = (0..LAYERS)
        .map(|index| {
            let offset_bytes = u64::from(index) * layer_bytes;
            let part = match case.order {
                Order::Hnd => Part {
                    offset_bytes,
                    block_stride_bytes: block,
                    head_stride_bytes: page,
                    rows: 1,
                    row_stride_bytes: page,
                    row_bytes: page,
                    block_tokens,
                },
                Order::Nhd => Part {
                    offset_bytes,
                    block_stride_bytes: block,
                    head_stride_bytes: row,
                    rows: block_tokens,
                    row_stride_bytes: row * u64::from(heads),
                    row_bytes: row,
                    block_tokens,
                },
            };
            LayerCache {
                name: format!("model.layers.{index}.self_attn.attn"),
                region: 0,
                parts: vec![part],
                group: 0,
            }
        })
        .collect();
    let region = MemoryRegion {
        base: 0x7000_0000_0000,
        bytes: layer_bytes * u64::from(LAYERS),
    };
    RankCache::new(num_blocks, heads, vec![region], layers)
        .expect("invariant: the layers fill the region")
}

/// Of the source and of the consumer, in the order of the sequence.
fn ids_of(ids: Ids, blocks: u32) -> (Vec<BlockId>, Vec<BlockId>) {
    (0..blocks)
        .map(|index| match ids {
            Ids::Neighbours => (BlockId(100 + index), BlockId(7 + index)),
            // Every second block, and against each other's order.
            Ids::Scattered => (BlockId(2 * (blocks - index)), BlockId(2 * index)),
        })
        .unzip()
}
