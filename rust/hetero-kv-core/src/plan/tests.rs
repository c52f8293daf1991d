use std::collections::BTreeSet;
use std::num::NonZeroU32;

use super::*;
use crate::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank, TransferId};
use crate::layout::{HeadRange, KvHeads};

mod choose;
mod draw;
mod expand;
mod fairness;
mod oracle;
mod policy;
mod reads;
mod refused;
mod regions;
mod striping;
mod text;
mod transfer;
mod world;

const TP: [u32; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
const HEADS: [u32; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 64];

fn grouped(total: u32) -> KvHeads {
    KvHeads::Grouped(NonZeroU32::new(total).expect("test tables hold no 0"))
}

fn transfer(counter: u32) -> TransferId {
    let mut id = [0; 16];
    id[12..].copy_from_slice(&counter.to_be_bytes());
    TransferId(id)
}

fn plan_of(pairing: &Pairing, tp_rank: u32, chooser: &SourceChooser) -> RankPlan {
    pairing
        .rank_plan(TpRank(tp_rank), chooser)
        .expect("the rank is in its group")
}

#[test]
fn a_pair_is_taken_exactly_when_it_divides() {
    let divides = |a: u32, b: u32| a.is_multiple_of(b) || b.is_multiple_of(a);
    for producer in TP {
        for consumer in TP {
            for heads in HEADS {
                assert_eq!(
                    Pairing::new(producer, consumer, grouped(heads)).is_ok(),
                    divides(producer, consumer)
                        && divides(producer, heads)
                        && divides(consumer, heads),
                    "{producer} -> {consumer}, {heads} heads"
                );
            }
            assert_eq!(
                Pairing::new(producer, consumer, KvHeads::Latent).is_ok(),
                divides(producer, consumer)
            );
        }
    }
}

#[test]
fn a_refusal_names_the_field_and_both_values() {
    let text = |producer, consumer, heads| {
        Pairing::new(producer, consumer, heads)
            .expect_err("not a pair")
            .to_string()
    };
    assert_eq!(
        text(2, 3, grouped(6)),
        "tp_size: producer 2, consumer 3; one must divide the other"
    );
    assert_eq!(
        text(4, 8, grouped(6)),
        "kv_heads: producer tp_size 4 and 6 KV heads; one must divide the other"
    );
    assert_eq!(
        text(2, 4, grouped(6)),
        "kv_heads: consumer tp_size 4 and 6 KV heads; one must divide the other"
    );
    assert_eq!(
        text(0, 4, grouped(4)),
        "tp_size: producer 0 is not in 1..=1024"
    );
    assert_eq!(
        text(1, 1025, KvHeads::Latent),
        "tp_size: consumer 1025 is not in 1..=1024"
    );
}

#[test]
fn a_pairing_says_what_it_pairs() {
    let pairing = Pairing::new(8, 4, grouped(2)).expect("divisible");
    assert_eq!((pairing.producer_tp(), pairing.consumer_tp()), (8, 4));
    assert_eq!(pairing.heads(), grouped(2));
}

#[test]
fn heads_are_covered_once_and_all_ranks_are_released() {
    for producer in TP {
        for consumer in TP {
            for heads in HEADS.map(grouped).into_iter().chain([KvHeads::Latent]) {
                let Ok(pairing) = Pairing::new(producer, consumer, heads) else {
                    continue;
                };
                let chooser = SourceChooser::new(transfer(producer * 100 + consumer));
                let mut released = BTreeSet::new();
                for tp_rank in 0..consumer {
                    let plan = plan_of(&pairing, tp_rank, &chooser);
                    let mut next = plan.heads.first;
                    for source in &plan.sources {
                        assert_eq!(source.heads.first, next);
                        assert!(!source.heads.is_empty());
                        assert!(source.held.contains(source.heads));
                        assert_eq!(pairing.producer_heads(source.tp_rank), Ok(source.held));
                        assert!(plan.holders.contains(&source.tp_rank));
                        next = source.heads.past_last;
                    }
                    assert_eq!(next, plan.heads.past_last);
                    let holders: Vec<TpRank> = (0..producer)
                        .map(TpRank)
                        .filter(|rank| {
                            let held = pairing.producer_heads(*rank).expect("in the group");
                            !held.intersection(plan.heads).is_empty()
                        })
                        .collect();
                    assert_eq!(plan.holders, holders);
                    assert!(holders.iter().all(|rank| plan.release.contains(rank)));
                    released.extend(plan.release);
                }
                assert_eq!(released, (0..producer).map(TpRank).collect());
            }
        }
    }
}

#[test]
fn a_rank_outside_the_group_is_an_error() {
    let pairing = Pairing::new(2, 1, KvHeads::Latent).expect("divisible");
    let refused = pairing.rank_plan(TpRank(1), &SourceChooser::new(transfer(0)));
    assert_eq!(
        refused.expect_err("one consumer rank").to_string(),
        "tp_rank 1 is not below tp_size 1"
    );
}

#[test]
fn routes_name_the_sources_of_the_owner() {
    let pairing = Pairing::new(4, 2, grouped(4)).expect("divisible");
    let plan = plan_of(&pairing, 1, &SourceChooser::new(transfer(7)));
    let owner = Owner {
        engine: EngineId::new("prefill_dp3").expect("a valid id"),
        incarnation: Incarnation(9),
        dp_rank: DpRank(3),
    };
    let routes = plan.routes(&owner, PpRank(1));
    let named: Vec<_> = routes
        .iter()
        .map(|route| {
            (
                route.engine().as_str(),
                route.incarnation(),
                route.dp_rank(),
                route.tp_rank(),
                route.pp_rank(),
            )
        })
        .collect();
    let of = |tp_rank| {
        (
            "prefill_dp3",
            Incarnation(9),
            DpRank(3),
            TpRank(tp_rank),
            PpRank(1),
        )
    };
    assert_eq!(named, [of(2), of(3)]);
}

#[test]
fn head_ranges_intersect_without_wrapping() {
    let range = |first, past_last| HeadRange { first, past_last };
    assert_eq!(range(0, 4).intersection(range(2, 6)), range(2, 4));
    assert!(range(0, 2).intersection(range(4, 6)).is_empty());
    assert!(range(4, 6).intersection(range(0, 2)).is_empty());
    assert_eq!(range(5, 3).count(), 0);
}
