use super::*;
use proptest::prelude::*;

const PREFILL: Wants = Wants {
    prefill: true,
    decode: false,
    lane: None,
};
const DECODE: Wants = Wants {
    prefill: false,
    decode: true,
    lane: None,
};
const BOTH: Wants = Wants {
    prefill: true,
    decode: true,
    lane: None,
};

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

impl Line {
    fn is_next(&self, number: u64, wants: Wants) -> bool {
        self.turn(number, wants) == Turn::Next
    }
}

fn of(lane: u64, wants: Wants) -> Wants {
    Wants {
        lane: Some(Lane(lane)),
        ..wants
    }
}

#[test]
fn a_lane_stands_behind_its_own_and_behind_those_that_may_be_in_any() {
    let mut line = Line::new(8);
    let numbers: Vec<u64> = (0..5).map(|_| line.number()).collect();
    line.enter(numbers[0], of(1, BOTH), 0).expect("room");
    line.enter(numbers[1], of(1, PREFILL), 0).expect("room");
    assert!(line.is_next(numbers[2], of(2, BOTH)));
    assert!(!line.is_next(numbers[2], of(1, DECODE)));
    assert_eq!(line.turn(numbers[2], DECODE), Turn::Beside(vec![Lane(1)]));
    line.enter(numbers[2], of(2, DECODE), 0).expect("room");
    assert_eq!(line.heads(), [numbers[0], numbers[2]]);
    // Without a lane it stands in both, and in front of all that come later.
    line.enter(numbers[3], DECODE, 0).expect("room");
    assert!(!line.is_next(numbers[4], of(3, DECODE)));
    assert!(line.is_next(numbers[4], of(3, PREFILL)));
    let beside = Turn::Beside(vec![Lane(1), Lane(2)]);
    assert_eq!(line.turn(numbers[3], DECODE), beside);
    assert_eq!(line.turn(numbers[3], PREFILL), Turn::Beside(vec![Lane(1)]));
    assert_eq!(line.turn(numbers[4], DECODE), Turn::Waits);
    line.enter(numbers[4], of(3, BOTH), 0).expect("room");
    assert_eq!(line.heads(), [numbers[0], numbers[2], numbers[3]]);
    line.leave(numbers[2]);
    assert_eq!(line.heads(), [numbers[0], numbers[3]]);
    line.leave(numbers[0]);
    assert_eq!(line.heads(), [numbers[1], numbers[3]]);
    line.leave(numbers[3]);
    assert_eq!(line.heads(), [numbers[1], numbers[4]]);
}

#[test]
fn a_lane_leaves_a_quarter_of_the_length_to_the_others() {
    let mut line = Line::new(8);
    for _ in 0..6 {
        let number = line.number();
        line.enter(number, of(1, BOTH), 0).expect("room");
    }
    let number = line.number();
    assert_eq!(line.enter(number, of(1, BOTH), 0), Err(Full));
    line.enter(number, of(2, BOTH), 0).expect("room");
    let number = line.number();
    line.enter(number, BOTH, 0).expect("room");
    assert_eq!(line.enter(line.next, of(3, BOTH), 0), Err(Full));
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
        wants in prop::collection::vec((0_usize..3, 0_u64..3), 1..40),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 40),
    ) {
        let mut line = Line::new(64);
        let mut by_number = std::collections::BTreeMap::new();
        for (want, lane) in &wants {
            let number = line.number();
            let wants = [PREFILL, DECODE, BOTH][*want];
            let wants = if *lane == 0 { wants } else { of(*lane, wants) };
            line.enter(number, wants, 0).expect("room");
            by_number.insert(number, wants);
        }
        let mut served: Vec<(u64, Wants)> = Vec::new();
        for pick in &picks {
            let heads = line.heads();
            if heads.is_empty() {
                break;
            }
            let number = heads[pick.index(heads.len())];
            let wants = by_number[&number];
            prop_assert!(line.turn(number, wants) != Turn::Waits);
            for (earlier, other) in &served {
                // Who was of any lane was served beside it.
                let in_order = number > *earlier || !wants.meets(*other);
                prop_assert!(in_order || other.lane.is_none());
            }
            served.push((number, wants));
            line.leave(number);
            // The heads are those for whom it is their turn, and no others.
            let heads = line.heads();
            for (number, wants) in &line.waiting {
                let waits = line.turn(*number, *wants) == Turn::Waits;
                prop_assert_eq!(heads.contains(number), !waits);
            }
        }
        prop_assert!(line.is_empty());
    }
}
