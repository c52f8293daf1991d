//! The RFC's round robin, its gate and its fixed mapping.

use super::{grouped, plan_of, transfer};
use crate::ids::{DpRank, TpRank};
use crate::layout::KvHeads;
use crate::plan::{Pairing, RoundRobinGate, SourceChooser, SourcePolicy};

const OPEN: RoundRobinGate = RoundRobinGate {
    decode_world_size: 1,
    mla: true,
    prefill_dp: 1,
    prefill_tp: 8,
};

fn in_turn(gate: RoundRobinGate, weights: &[u16], dp: u32, sequence: u64) -> SourceChooser {
    SourceChooser::round_robin(transfer(0), weights.to_vec(), gate, DpRank(dp), sequence)
}

#[test]
fn the_gate_is_open_in_one_row_of_its_truth_table() {
    for (decode_world_size, alone) in [(1, true), (2, false), (8, false), (0, false)] {
        for mla in [true, false] {
            for (prefill_dp, whole) in [(1, true), (2, false), (8, false), (0, false)] {
                for (prefill_tp, several) in [(1, false), (2, true), (8, true), (0, false)] {
                    let gate = RoundRobinGate {
                        decode_world_size,
                        mla,
                        prefill_dp,
                        prefill_tp,
                    };
                    let expected = alone && mla && whole && several;
                    assert_eq!(gate.is_open(), expected, "{gate:?}");
                }
            }
        }
    }
}

#[test]
fn behind_the_gate_each_consumer_takes_the_holders_in_turn() {
    let pairing = Pairing::new(8, 1, KvHeads::Latent).expect("divisible");
    let chosen = |dp: u32, sequence: u64| {
        plan_of(&pairing, 0, &in_turn(OPEN, &[], dp, sequence)).sources[0].tp_rank
    };
    for dp in 0..16 {
        for sequence in 0..40 {
            let expected = (u64::from(dp) + sequence) % 8;
            assert_eq!(chosen(dp, sequence), TpRank(expected as u32));
        }
    }
    // The count may have run over.
    assert_eq!(chosen(3, u64::MAX), TpRank(2));
}

#[test]
fn outside_the_gate_the_mapping_is_fixed() {
    // The RFC's tables: a rank each, the first of a share, or one that several share.
    for (producer, consumer, heads, expected) in [
        (4, 4, KvHeads::Latent, &[0, 1, 2, 3][..]),
        (8, 4, KvHeads::Latent, &[0, 2, 4, 6]),
        (4, 8, KvHeads::Latent, &[0, 0, 1, 1, 2, 2, 3, 3]),
        (8, 1, KvHeads::Latent, &[0]),
        (8, 4, grouped(2), &[0, 2, 4, 6]),
    ] {
        let pairing = Pairing::new(producer, consumer, heads).expect("divisible");
        let gate = RoundRobinGate {
            prefill_dp: 2,
            ..OPEN
        };
        for (tp_rank, holder) in (0..).zip(expected) {
            for sequence in 0..10 {
                let plan = plan_of(&pairing, tp_rank, &in_turn(gate, &[], 1, sequence));
                assert_eq!(plan.sources[0].tp_rank, TpRank(*holder), "{pairing:?}");
            }
        }
    }
    // A consumer of several ranks' heads reads the first holder of each.
    let pairing = Pairing::new(8, 1, grouped(4)).expect("divisible");
    let gate = RoundRobinGate { mla: false, ..OPEN };
    let plan = plan_of(&pairing, 0, &in_turn(gate, &[], 0, 5));
    let ranks: Vec<u32> = plan.sources.iter().map(|source| source.tp_rank.0).collect();
    assert_eq!(ranks, [0, 2, 4, 6]);
}

#[test]
fn a_holder_of_weight_0_is_passed_over() {
    let pairing = Pairing::new(4, 1, KvHeads::Latent).expect("divisible");
    let closed = RoundRobinGate { mla: false, ..OPEN };
    let chosen = |gate, weights: &[u16], sequence| {
        plan_of(&pairing, 0, &in_turn(gate, weights, 0, sequence)).sources[0]
            .tp_rank
            .0
    };
    let turns: Vec<u32> = (0..4).map(|n| chosen(OPEN, &[1, 0, 0, 9], n)).collect();
    assert_eq!(turns, [0, 3, 3, 3]);
    let turns: Vec<u32> = (0..4).map(|n| chosen(OPEN, &[9, 1, 1, 0], n)).collect();
    assert_eq!(turns, [0, 1, 2, 0]);
    let turns: Vec<u32> = (0..4).map(|n| chosen(OPEN, &[0; 4], n)).collect();
    assert_eq!(turns, [0, 1, 2, 3]);
    assert_eq!(chosen(closed, &[0, 1], 0), 1);
}

#[test]
fn policies_have_names() {
    assert_eq!(SourcePolicy::default(), SourcePolicy::Hash);
    for (policy, name) in [
        (SourcePolicy::Hash, "hash"),
        (SourcePolicy::RoundRobin, "round_robin"),
    ] {
        assert_eq!(policy.to_string(), name);
        assert_eq!(name.parse(), Ok(policy));
        assert_eq!(serde_json::to_value(policy).expect("a word"), name);
    }
    assert_eq!(
        "fixed"
            .parse::<SourcePolicy>()
            .expect_err("no policy")
            .to_string(),
        "source_policy is neither hash nor round_robin"
    );
}
