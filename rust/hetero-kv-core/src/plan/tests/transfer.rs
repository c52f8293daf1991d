//! Whole transfers against the naive copy.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::draw::{Case, Draw, LayerDraw, any_draw, pairs_with, tokens};
use super::world::{Engine, Rank, UNTOUCHED, heads_of, source};
use crate::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank};
use crate::layout::{HeadRange, RankCache};
use crate::plan::{LayerRange, Owner, Pairing, PlannedRead, Read, Region, Transfer};

/// Plans on every rank of the consumer, copies, and compares memory with the naive copy.
pub(super) fn check(case: &Case) {
    let total = case.heads.total() as usize;
    let (producer, consumer) = (&case.producer, &case.consumer);
    let pairing = Pairing::new(producer.tp as u32, consumer.tp as u32, case.heads)
        .expect("the case is divisible");
    let places = |engine: &Engine| -> Vec<(usize, usize)> {
        (0..engine.stages.len())
            .flat_map(|pp| (0..engine.tp).map(move |tp| (pp, tp)))
            .collect()
    };
    let sources: Vec<((usize, usize), Rank<'_>, RankCache)> = places(producer)
        .into_iter()
        .map(|(pp, tp)| {
            let rank = source(producer, &case.model, pp, heads_of(total, producer.tp, tp));
            let cache = rank.cache(true);
            ((pp, tp), rank, cache)
        })
        .collect();
    let remote: Vec<(PpRank, TpRank, &RankCache)> = sources
        .iter()
        .map(|((pp, tp), _, cache)| (PpRank(*pp as u32), TpRank(*tp as u32), cache))
        .collect();
    let (source_groups, dest_groups) = (producer.lists(), consumer.lists());
    let owner = Owner {
        engine: EngineId::new("prefill_dp1").expect("a valid id"),
        incarnation: Incarnation(5),
        dp_rank: DpRank(1),
    };
    let mut released = BTreeSet::new();
    for (pp, tp) in places(consumer) {
        let held = heads_of(total, consumer.tp, tp);
        let mut dest = Rank::new(consumer, &case.model, pp, held.clone(), UNTOUCHED);
        let mut copied = dest.memory.clone();
        let local = dest.cache(false);
        let bytes = dest.write(case.tokens);
        let asked = Transfer {
            pairing: &pairing,
            tp_rank: TpRank(tp as u32),
            consumer_stages: consumer.stages.len() as u32,
            chooser: &case.chooser,
            striping: case.striping,
            local: &local,
            remote: &remote,
            tokens: case.tokens,
            source_groups: &source_groups,
            dest_groups: &dest_groups,
        };
        let plan = asked
            .plan()
            .unwrap_or_else(|error| panic!("{error} in {case:?}"));
        let routes = plan.routes(&owner);
        // The same without its runs: who, and how many bytes.
        let outline = asked.outline().expect("as the plan");
        assert_eq!(outline.routes(&owner), routes);
        let planned: Vec<u64> = outline.reads.iter().map(PlannedRead::bytes).collect();
        let emitted: Vec<u64> = plan.reads.iter().map(Read::bytes).collect();
        assert_eq!(planned, emitted);
        assert_eq!(outline.bytes(), plan.bytes());
        assert_eq!(routes.len(), plan.reads.len());
        let mut regions = Vec::new();
        let mut read_ranks = BTreeSet::new();
        for (read, route) in plan.reads.iter().zip(&routes) {
            assert_eq!(
                (route.engine(), route.incarnation(), route.dp_rank()),
                (&owner.engine, Incarnation(5), DpRank(1))
            );
            assert_eq!(
                (route.pp_rank(), route.tp_rank()),
                (read.pp_rank, read.tp_rank)
            );
            assert!(
                read_ranks.insert((read.pp_rank, read.tp_rank)),
                "read twice"
            );
            assert!(plan.release.contains(&(read.pp_rank, read.tp_rank)));
            let from = sources
                .iter()
                .find(|((pp, tp), _, _)| {
                    (*pp as u32, *tp as u32) == (route.pp_rank().0, route.tp_rank().0)
                })
                .map(|(_, rank, _)| &rank.memory)
                .expect("a rank of the producer");
            assert!(!read.runs.is_empty(), "an empty read in {case:?}");
            for run in &read.runs {
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
            regions.extend(read.regions(|position| position));
        }
        assert!(
            copied == dest.memory,
            "rank pp {pp} tp {tp} differs in {case:?}"
        );
        assert_eq!(plan.bytes(), bytes);
        if !case.tokens.is_empty() {
            let whole = Region {
                tokens: case.tokens,
                heads: HeadRange {
                    first: held[0] as u32,
                    past_last: held[0] as u32 + held.len() as u32,
                },
                layers: LayerRange {
                    first: 0,
                    past_last: consumer.stages[pp].len() as u32,
                },
            };
            whole
                .check_covered_once(&regions)
                .unwrap_or_else(|error| panic!("{error} in {case:?}"));
        }
        released.extend(plan.release);
    }
    assert_eq!(
        released,
        remote.iter().map(|(pp, tp, _)| (*pp, *tp)).collect(),
        "{case:?}"
    );
}

#[test]
fn every_small_pair_of_shapes_is_exact() {
    let mut cases = 0_u64;
    for producer_tp in [1, 2, 3, 4, 6, 8, 16] {
        for consumer_tp in [1, 2, 3, 4, 6, 8, 16] {
            for heads in 0..=128 {
                if !pairs_with(producer_tp, consumer_tp, heads) {
                    continue;
                }
                for ratio in [1, 2] {
                    for larger in [true, false] {
                        cases += 1;
                        let layer = |index: usize| LayerDraw {
                            token_bytes: 2 + index,
                            opaque: index == 1,
                            group: index,
                            stages: [index % 2, (index + cases as usize) / 2 % 2],
                        };
                        check(
                            &Draw {
                                producer_tp,
                                consumer_tp,
                                heads,
                                layers: (0..3).map(layer).collect(),
                                groups: vec![(2, ratio, larger), (2, 1, larger)],
                                tokens: [tokens(2, 9), tokens(3, 8)][cases as usize % 2],
                                reversed_groups: cases.is_multiple_of(3),
                                layers_in_block: cases.is_multiple_of(5),
                                region_per_layer: [cases.is_multiple_of(7), larger],
                                weights: Vec::new(),
                                holders_max: u32::MAX,
                                striped: cases.is_multiple_of(2),
                                seed: cases,
                            }
                            .case(),
                        );
                    }
                }
            }
        }
    }
    assert!(cases > 4000, "only {cases} cases are divisible");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn any_transfer_is_exact(draw in any_draw()) {
        check(&draw.case());
    }
}
