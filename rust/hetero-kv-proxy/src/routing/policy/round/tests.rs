//! The round by hand, and against a list.

use super::*;
use proptest::prelude::*;

fn facts(load: u32, cache_used: u16, weight: u32) -> SlotFacts {
    SlotFacts {
        load,
        cache_used,
        weight,
        turn: Turn::default(),
        has_room: true,
    }
}

fn identity(at: usize) -> u64 {
    super::super::slot_identity("http://engine:8000", at as u32)
}

fn round(slots: &[SlotFacts]) -> Round {
    let mut round = Round::new((0..slots.len()).map(identity).collect());
    for (at, facts) in slots.iter().enumerate() {
        round.set(at, facts);
    }
    round
}

#[test]
fn none_is_open_before_it_is_within_reach_and_without_room() {
    let mut round = round(&[facts(3, 0, 1); 130]);
    assert_eq!((round.open_count(), round.load_min()), (0, None));
    round.set_reach(|at| at % 2 == 1);
    assert_eq!(round.open_count(), 65);
    assert_eq!(round.load_cap(), LoadCap::new(65 * 3, 65));
    let full = SlotFacts {
        has_room: false,
        ..facts(9, 0, 7)
    };
    round.set(129, &full);
    round.set(128, &full);
    assert_eq!(round.open().last(), Some(127));
    assert_eq!(round.load_cap(), LoadCap::new(64 * 3, 64));
    round.set(129, &facts(2, 0, 7));
    assert_eq!(round.load_cap(), LoadCap::new(64 * 3 + 2, 64 + 7));
    assert_eq!(round.load_min(), Some(2));
}

#[test]
fn slots_with_one_short_are_all_found() {
    let round = Round::new(vec![5 << 32, 7 << 32 | 1, 5 << 32 | 9, 6 << 32]);
    let found = |short| round.of_short(short).collect::<Vec<usize>>();
    assert_eq!(found(5), [0, 2]);
    assert_eq!(found(7), [1]);
    assert_eq!(found(8), [0; 0]);
}

proptest! {
    /// Burdens are in the order of load by weight, and equal where that is.
    #[test]
    fn burdens_are_exact(
        one in (any::<u32>(), 1_u32..=1_000),
        other in (any::<u32>(), 1_u32..=1_000),
        near in any::<bool>(),
    ) {
        let other = match near {
            // A neighbour of the same share, the hardest to tell apart.
            true => {
                let load = u64::from(one.0) * u64::from(other.1) / u64::from(one.1);
                (u32::try_from(load).unwrap_or(u32::MAX), other.1)
            }
            false => other,
        };
        let round = round(&[facts(one.0, 999, one.1), facts(other.0, 0, other.1)]);
        let product = |load: u32, weight: u32| u64::from(load) * u64::from(weight);
        prop_assert_eq!(
            round.burden(0).cmp(&round.burden(1)),
            product(one.0, other.1).cmp(&product(other.0, one.1))
        );
    }

    #[test]
    fn places_among_the_open_are_those_of_a_list(
        reached in prop::collection::vec(any::<bool>(), 1..300),
        all in any::<bool>(),
    ) {
        let mut round = round(&vec![facts(1, 0, 1); reached.len()]);
        round.set_reach(|at| all || reached[at]);
        let open: Vec<usize> = (0..reached.len()).filter(|at| all || reached[*at]).collect();
        prop_assert_eq!(round.open().collect::<Vec<usize>>(), open.clone());
        prop_assert_eq!(round.open_count(), open.len());
        for (before, at) in open.iter().enumerate() {
            prop_assert_eq!(round.nth_open(before), *at);
            prop_assert_eq!(round.open_before(*at), before);
        }
    }
}
