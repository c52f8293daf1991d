//! How evenly whole clusters read their holders.

use std::collections::BTreeMap;

use super::{grouped, plan_of, transfer};
use crate::ids::{DpRank, TpRank};
use crate::layout::{HeadRange, KvHeads};
use crate::plan::{Pairing, RoundRobinGate, SourceChooser};

/// From each prefill engine. Of so many random ids eight holders get within 5 % of one another in
/// 998 of 1000 draws; a choice that is a function of a random id cannot be more even than that.
const TRANSFERS: u32 = 100_000;

/// A cluster: instances of (dp, tp) on either side.
#[derive(Clone, Copy)]
struct Cluster {
    prefill: (u32, u32, u32),
    decode: (u32, u32),
}

const RFC: Cluster = Cluster {
    prefill: (2, 1, 8),
    decode: (8, 1),
};

/// Reads of each holder, by prefill engine, heads held and rank, when requests go to prefill engines
/// and to decode engines as two independent counters send them.
fn reads(
    cluster: Cluster,
    heads: KvHeads,
    chooser: impl Fn(u32, u32) -> SourceChooser,
) -> BTreeMap<(u32, HeadRange), BTreeMap<TpRank, u32>> {
    let (instances, dp, tp) = cluster.prefill;
    let engines = instances * dp;
    let pairing = Pairing::new(tp, cluster.decode.1, heads).expect("divisible");
    let mut counts: BTreeMap<(u32, HeadRange), BTreeMap<TpRank, u32>> = BTreeMap::new();
    for engine in 0..engines {
        for rank in (0..tp).map(TpRank) {
            let held = pairing.producer_heads(rank).expect("in the group");
            counts.entry((engine, held)).or_default().insert(rank, 0);
        }
    }
    for request in 0..TRANSFERS * engines {
        let engine = request % engines;
        // Another pace than the prefill side's, so that every pair of engines occurs.
        let decode = request / engines % cluster.decode.0;
        let chooser = chooser(request, decode);
        for rank in 0..cluster.decode.1 {
            for source in plan_of(&pairing, rank, &chooser).sources {
                *counts
                    .get_mut(&(engine, source.held))
                    .and_then(|holders| holders.get_mut(&source.tp_rank))
                    .expect("a holder of these heads") += 1;
            }
        }
    }
    counts
}

#[test]
fn hashing_reads_each_heads_holders_within_5_percent() {
    let of = |prefill, decode| Cluster { prefill, decode };
    for (cluster, heads) in [
        (RFC, KvHeads::Latent),
        (RFC, grouped(2)),
        (RFC, grouped(4)),
        (of((1, 4, 2), (8, 1)), KvHeads::Latent),
        (of((1, 2, 4), (2, 2)), KvHeads::Latent),
        (of((1, 2, 4), (2, 2)), grouped(2)),
    ] {
        // Ids that a router merely counts up, and ids as they are drawn.
        for drawn in [false, true] {
            let counts = reads(cluster, heads, |request, _| {
                SourceChooser::new(transfer(if drawn {
                    request.wrapping_mul(0x9e37_79b1)
                } else {
                    request
                }))
            });
            for ((engine, held), holders) in counts {
                assert!(holders.len() > 1, "one holder only");
                let most = holders.values().max().expect("a holder");
                let least = holders.values().min().expect("a holder");
                let mean = f64::from(holders.values().sum::<u32>()) / holders.len() as f64;
                let spread = f64::from(most - least) / mean;
                assert!(
                    spread <= 0.05,
                    "drawn {drawn}, {heads}, engine {engine}, heads {held}: {holders:?}, spread {spread}"
                );
            }
        }
    }
}

#[test]
fn round_robin_differs_by_at_most_one_read_per_consumer_and_engine() {
    let gate = RoundRobinGate {
        decode_world_size: 1,
        mla: true,
        prefill_dp: 1,
        prefill_tp: 8,
    };
    let pairing = Pairing::new(8, 1, KvHeads::Latent).expect("divisible");
    for (requests, engines_of) in [(1, 2_u64), (100, 2), (1001, 2), (20_000, 2), (999, 1)] {
        let mut sequences = [[0_u64; 8]; 2];
        let mut counts = [[[0_u32; 8]; 8]; 2];
        for request in 0..requests {
            let engine = (request % engines_of) as usize;
            let decode = (request / engines_of % 8) as usize;
            let sequence = &mut sequences[engine][decode];
            let chooser = SourceChooser::round_robin(
                transfer(request as u32),
                Vec::new(),
                gate,
                DpRank(decode as u32),
                *sequence,
            );
            *sequence += 1;
            let plan = plan_of(&pairing, 0, &chooser);
            counts[engine][decode][plan.sources[0].tp_rank.0 as usize] += 1;
        }
        for holders in counts.iter().flatten() {
            let most = holders.iter().max().expect("eight");
            let least = holders.iter().min().expect("eight");
            assert!(most - least <= 1, "{requests} requests: {holders:?}");
        }
        // Consumers do not march in step: over all of them the holders are as even.
        let in_all: Vec<u32> = (0..8)
            .map(|holder| counts[0].iter().map(|of| of[holder]).sum())
            .collect();
        let spread = in_all.iter().max().expect("eight") - in_all.iter().min().expect("eight");
        assert!(spread <= 8, "{requests} requests: {in_all:?}");
    }
}
