use super::*;
use crate::routing::policy::draw_of_session;

fn weights(text: &str) -> Weights {
    Weights::parse(text).expect("valid").expect("some")
}

const THERE: Option<u8> = Some(0);

/// How many of `count` draws fall on each revision.
fn falls(
    weights: &Weights,
    tiers: &[Option<u8>],
    count: u64,
    draw: impl Fn(u64) -> u64,
) -> Vec<u64> {
    let mut falls = vec![0; weights.entries().len()];
    for turn in 0..count {
        let drawn = weights.draw(draw(turn), tiers).expect("some revision");
        falls[drawn.revision] += 1;
    }
    falls
}

#[test]
fn shares_are_those_of_the_weights() {
    let weights = weights("a=95,b=5");
    let all = [THERE; 2];
    let turns = falls(&weights, &all, 1_000, draw_of_turn);
    assert!((48..=52).contains(&turns[1]), "{turns:?}");
    // Sessions fall as independent draws do: five deviations of a binomial.
    let sessions = falls(&weights, &all, 10_000, |n| {
        draw_of_session(&n.to_le_bytes())
    });
    assert!((391..=609).contains(&sessions[1]), "{sessions:?}");
}

#[test]
fn a_session_keeps_its_revision_and_moves_only_while_its_workers_are_away() {
    let weights = weights("a=2,b=1,c=1,off=0");
    let all = [THERE; 4];
    let without_b = [THERE, None, THERE, THERE];
    let (mut moved_to_a, mut moved) = (0, 0);
    for session in 0..4_000_u64 {
        let draw = draw_of_session(&session.to_le_bytes());
        let usual = weights.draw(draw, &all).expect("all are there");
        assert_eq!(usual.instead_of, None);
        assert_eq!(weights.draw(draw, &all), Some(usual));
        let now = weights.draw(draw, &without_b).expect("two are there");
        if usual.revision == 1 {
            assert_eq!(now.instead_of, Some(1));
            moved += 1;
            moved_to_a += u32::from(now.revision == 0);
        } else {
            assert_eq!(now, usual);
        }
        assert_ne!(now.revision, 3, "it has no weight");
    }
    // By the weights of the others: two thirds.
    assert!((900..1_100).contains(&moved), "{moved}");
    assert!(
        (moved * 60..moved * 73).contains(&(moved_to_a * 100)),
        "{moved_to_a} of {moved}"
    );
}

#[test]
fn a_revision_whose_workers_fail_gets_nothing_while_another_is_well() {
    let weights = weights("a=1,b=1");
    assert_eq!(
        falls(&weights, &[Some(1), Some(0)], 100, draw_of_turn),
        [0, 100]
    );
    // Nobody is better: all are tried.
    let both = falls(&weights, &[Some(3), Some(3)], 100, draw_of_turn);
    assert!(both.iter().all(|count| *count > 40), "{both:?}");
    assert_eq!(weights.draw(7, &[None, None]), None);
    let off = self::weights("a=1,b=0");
    assert_eq!(
        off.draw(7, &[None, THERE]),
        None,
        "weight 0 is no last resort"
    );
}

#[test]
fn weights_are_checked() {
    assert_eq!(Weights::parse(" "), Ok(None));
    assert_eq!(
        weights("v1=95, v2=5").entries(),
        [("v1".into(), 95), ("v2".into(), 5)]
    );
    let many: Vec<String> = (0..17).map(|n| format!("r{n}=1")).collect();
    for (text, fault) in [
        ("a", "`a` is not REVISION=WEIGHT"),
        ("a=x", "`a`: a weight is 0 to 1000000, not `x`"),
        ("a=1000001", "not 1000001"),
        ("a=-1", "not `-1`"),
        ("=1", "a revision is 1 to 512"),
        ("a=1,a=2", "`a` is given twice"),
        ("a=0,b=0", "some revision needs a weight over 0"),
        (&many.join(","), "17 revisions; at most 16"),
    ] {
        let found = Weights::parse(text).expect_err(text);
        assert!(found.contains(fault), "{found}");
    }
}
