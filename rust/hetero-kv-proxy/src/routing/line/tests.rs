use super::*;
use proptest::prelude::*;

const PREFILL: Wants = Wants {
    prefill: true,
    decode: false,
};
const DECODE: Wants = Wants {
    prefill: false,
    decode: true,
};
const BOTH: Wants = Wants::BOTH;

#[test]
fn who_wants_what_an_earlier_one_waits_for_stands_behind_it() {
    let mut line = Line::new(8);
    let numbers: Vec<u64> = (0..4).map(|_| line.number()).collect();
    assert!(line.heads().is_empty());
    line.enter(numbers[0], PREFILL, 0).expect("room");
    // Other roles have lines of their own.
    assert!(line.is_next(numbers[1], DECODE));
    assert!(!line.is_next(numbers[1], PREFILL));
    line.enter(numbers[1], BOTH, 0).expect("room");
    // The second wants decode too, and would starve if later ones took what is free of it.
    assert!(!line.is_next(numbers[2], DECODE));
    line.enter(numbers[2], DECODE, 0).expect("room");
    assert_eq!(line.heads(), [numbers[0]]);
    line.leave(numbers[0]);
    assert_eq!(line.heads(), [numbers[1]]);
    line.leave(numbers[1]);
    assert_eq!(line.heads(), [numbers[2]]);
    line.enter(numbers[3], PREFILL, 0).expect("room");
    assert_eq!(line.heads(), [numbers[2], numbers[3]]);
}

#[test]
fn a_request_that_began_earlier_keeps_its_number() {
    let mut line = Line::new(8);
    let (early, late) = (line.number(), line.number());
    line.enter(late, DECODE, 0).expect("room");
    assert!(line.is_next(early, DECODE));
    line.enter(early, DECODE, 0).expect("room");
    assert_eq!(line.heads(), [early]);
    assert!(!line.is_next(late, DECODE));
}

#[test]
fn the_length_is_bounded_with_those_who_wait_elsewhere() {
    let mut line = Line::new(2);
    let numbers: Vec<u64> = (0..3).map(|_| line.number()).collect();
    assert_eq!(line.enter(numbers[0], BOTH, 2), Err(Full));
    line.enter(numbers[0], BOTH, 1).expect("room");
    assert_eq!(line.enter(numbers[1], BOTH, 1), Err(Full));
    line.enter(numbers[1], BOTH, 0).expect("room");
    assert_eq!(line.enter(numbers[2], BOTH, 0), Err(Full));
    line.leave(numbers[0]);
    line.enter(numbers[2], BOTH, 0).expect("room");
    assert_eq!(Line::new(0).enter(1, BOTH, 0), Err(Full));
}

proptest! {
    /// Whoever is served in whatever order room comes: for each role the numbers served ascend.
    #[test]
    fn each_role_is_served_in_order(
        wants in prop::collection::vec(0_usize..3, 1..40),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 40),
    ) {
        let mut line = Line::new(64);
        let mut by_number = std::collections::BTreeMap::new();
        for want in &wants {
            let number = line.number();
            let wants = [PREFILL, DECODE, BOTH][*want];
            line.enter(number, wants, 0).expect("room");
            by_number.insert(number, wants);
        }
        let (mut prefill, mut decode) = (0, 0);
        for pick in &picks {
            let heads = line.heads();
            if heads.is_empty() {
                break;
            }
            let number = heads[pick.index(heads.len())];
            let wants = by_number[&number];
            prop_assert!(line.is_next(number, wants));
            if wants.prefill {
                prop_assert!(number > prefill);
                prefill = number;
            }
            if wants.decode {
                prop_assert!(number > decode);
                decode = number;
            }
            line.leave(number);
        }
        prop_assert!(line.is_empty());
    }
}
