//! Which holder is read.

use super::{grouped, plan_of, transfer};
use crate::ids::{TpRank, TransferId};
use crate::layout::KvHeads;
use crate::plan::{Pairing, SourceChooser};

/// Chi-square of the counts against equal shares, for transfer ids that merely count up.
fn chi_square(holders: u32, choose: impl Fn(TransferId) -> TpRank) -> f64 {
    const TRANSFERS: u32 = 10_000;
    let mut counts = vec![0_u32; holders as usize];
    for counter in 0..TRANSFERS {
        counts[choose(transfer(counter)).0 as usize] += 1;
    }
    let expected = f64::from(TRANSFERS) / f64::from(holders);
    counts
        .iter()
        .map(|&count| (f64::from(count) - expected).powi(2) / expected)
        .sum()
}

#[test]
fn transfers_spread_evenly_over_holders() {
    // 99.99 % quantiles of chi-square with 1, 3 and 7 degrees of freedom.
    for (producer, bound) in [(2, 15.1), (4, 21.1), (8, 29.9)] {
        let pairing = Pairing::new(producer, 1, KvHeads::Latent).expect("divisible");
        let found = chi_square(producer, |id| {
            plan_of(&pairing, 0, &SourceChooser::new(id)).sources[0].tp_rank
        });
        assert!(found < bound, "{producer} holders: {found}");
    }
    // Two heads with four holders each: both choices are even, and not the same choice twice.
    let pairing = Pairing::new(8, 1, grouped(2)).expect("divisible");
    let pair = |id| plan_of(&pairing, 0, &SourceChooser::new(id)).sources;
    for head in [0, 1] {
        let found = chi_square(4, |id| TpRank(pair(id)[head].tp_rank.0 % 4));
        assert!(found < 21.1, "head {head}: {found}");
    }
    let together = chi_square(16, |id| {
        let sources = pair(id);
        TpRank(sources[0].tp_rank.0 * 4 + sources[1].tp_rank.0 % 4)
    });
    assert!(together < 44.3, "both heads: {together}");
}

#[test]
fn consumers_of_one_transfer_stand_on_different_holders() {
    for (producer, consumer, heads) in [(8, 8, 1), (8, 4, 1), (4, 8, 1), (8, 8, 2), (12, 6, 3)] {
        let pairing = Pairing::new(producer, consumer, grouped(heads)).expect("divisible");
        for counter in 0..200 {
            let chooser = SourceChooser::new(transfer(counter));
            let mut readers = vec![0_u32; producer as usize];
            for tp_rank in 0..consumer {
                for source in plan_of(&pairing, tp_rank, &chooser).sources {
                    readers[source.tp_rank.0 as usize] += 1;
                }
            }
            let most = readers.iter().max().copied();
            assert_eq!(
                most,
                Some(consumer.div_ceil(producer)),
                "{producer} -> {consumer}, {heads} heads: {readers:?}"
            );
        }
    }
}

#[test]
fn weights_shift_the_choice_and_zero_avoids() {
    let pairing = Pairing::new(4, 1, KvHeads::Latent).expect("divisible");
    let counts = |weights: &[u16]| {
        let mut counts = [0_u32; 4];
        for counter in 0..10_000 {
            let chooser = SourceChooser::weighted(transfer(counter), weights.to_vec());
            counts[plan_of(&pairing, 0, &chooser).sources[0].tp_rank.0 as usize] += 1;
        }
        counts
    };
    let [none, once, thrice, rest] = counts(&[0, 100, 300, 100]);
    assert_eq!(none, 0);
    for (count, expected) in [(once, 2000), (thrice, 6000), (rest, 2000)] {
        assert!(count.abs_diff(expected) < 200, "{count}, not {expected}");
    }
    // All avoided: one of them is read all the same, and none more than the others.
    assert!(
        counts(&[0; 4])
            .iter()
            .all(|count| count.abs_diff(2500) < 250)
    );
    // The only holder is read whatever it weighs.
    let alone = Pairing::new(1, 1, grouped(4)).expect("divisible");
    let chooser = SourceChooser::weighted(transfer(1), vec![0]);
    assert_eq!(plan_of(&alone, 0, &chooser).sources[0].tp_rank, TpRank(0));
    // Widest weights do not overflow.
    let heavy = SourceChooser::weighted(transfer(1), vec![u16::MAX; 4]);
    plan_of(&pairing, 0, &heavy);
}

#[test]
fn a_choice_replays_in_another_process() {
    // First eight bytes of SHA-256(id || first head), little-endian, modulo 8 holders, by another
    // program.
    let pairing = Pairing::new(8, 1, KvHeads::Latent).expect("divisible");
    let chosen = (0..10)
        .map(|counter| {
            plan_of(&pairing, 0, &SourceChooser::new(transfer(counter))).sources[0]
                .tp_rank
                .0
        })
        .collect::<Vec<_>>();
    assert_eq!(chosen, [6, 1, 4, 6, 1, 4, 3, 7, 2, 6]);
}
