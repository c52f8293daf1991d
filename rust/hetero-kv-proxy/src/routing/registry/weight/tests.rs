//! Shares of legs by weight.

use super::super::super::policy::{KeyParts, PolicyKind, RequestKey};
use super::super::super::{
    Ask, BreakerRules, HealthRules, InstanceSpec, LegFault, Picked, Role, Standing, Trust,
};
use super::*;
use proptest::prelude::*;

const RULES: HealthRules = HealthRules {
    failures_max: 1,
    fresh_ms: 1_000,
    breaker: BreakerRules {
        failures_max: 1,
        open_ms: 1_000,
    },
};

fn spec(index: usize, dp: u32) -> InstanceSpec {
    InstanceSpec {
        url: format!("http://engine-{index}:8000"),
        dp,
        rank0: 0,
    }
}

fn pool(policy: PolicyKind, weights: &[u32]) -> Pool {
    let specs = (0..weights.len()).map(|index| spec(index, 1)).collect();
    let mut pool = Pool::new(Role::Decode, specs, policy, RULES);
    for (index, weight) in weights.iter().enumerate() {
        pool.set_weight(InstanceIndex(index), *weight);
    }
    pool
}

fn pick_but(pool: &mut Pool, avoid: &[InstanceIndex]) -> Picked {
    let ask = Ask {
        key: &RequestKey::default(),
        avoid,
        shun: &[],
        among: None,
        now_ms: 0,
    };
    pool.pick(&ask).expect("a slot")
}

fn pick(pool: &mut Pool) -> Picked {
    pick_but(pool, &[])
}

/// How often each instance is chosen in picks that are released at once.
fn idle_shares(pool: &mut Pool, picks: usize) -> Vec<usize> {
    let mut counts = vec![0; pool.instance_count()];
    for _ in 0..picks {
        let picked = pick(pool);
        counts[picked.instance.0] += 1;
        pool.release(picked.slot);
    }
    counts
}

#[test]
fn turns_are_shared_by_weight_and_spread() {
    for policy in [PolicyKind::RoundRobin, PolicyKind::LeastLoaded] {
        let mut pool = pool(policy, &[5, 1, 1]);
        let turns: Vec<usize> = (0..14)
            .map(|_| {
                let picked = pick(&mut pool);
                pool.release(picked.slot);
                picked.instance.0
            })
            .collect();
        assert_eq!(turns[..7], turns[7..], "{policy:?}");
        let of = |at: usize| turns[..7].iter().filter(|turn| **turn == at).count();
        assert_eq!([of(0), of(1), of(2)], [5, 1, 1], "{turns:?}");
        // The heavy one does not take its turns all at once.
        let longest = turns.split(|turn| *turn != 0).map(<[usize]>::len).max();
        assert!(longest < Some(6), "{turns:?}");
    }
}

#[test]
fn every_rank_has_the_weight_of_its_instance() {
    let mut pool = Pool::new(
        Role::Decode,
        vec![spec(0, 4), spec(1, 1)],
        PolicyKind::RoundRobin,
        RULES,
    );
    pool.set_weight(InstanceIndex(1), 2);
    assert_eq!(idle_shares(&mut pool, 600), [400, 200]);
}

#[test]
fn idle_slots_that_are_drawn_get_shares_by_weight() {
    let shares = idle_shares(&mut pool(PolicyKind::PowerOfTwo, &[3, 1]), 4_000);
    assert!((2_850..=3_150).contains(&shares[0]), "{shares:?}");
}

#[test]
fn legs_in_flight_are_shared_by_weight() {
    for policy in [
        PolicyKind::LeastLoaded,
        PolicyKind::ConsistentHash,
        PolicyKind::PrefixAware,
    ] {
        let mut pool = pool(policy, &[300, 100, 200]);
        let mut counts = [0; 3];
        for _ in 0..600 {
            counts[pick(&mut pool).instance.0] += 1;
        }
        assert_eq!(counts, [300, 100, 200], "{policy:?}");
    }
    // Of two that are drawn the one with less to do for its weight: about so.
    let mut pool = pool(PolicyKind::PowerOfTwo, &[3, 1]);
    let heavy = (0..400).filter(|_| pick(&mut pool).instance.0 == 0).count();
    assert!((295..=305).contains(&heavy), "{heavy}");
}

#[test]
fn a_key_gets_no_more_of_a_slot_than_a_quarter_above_its_share_by_weight() {
    let mut light = 0;
    for session in 0_u8..20 {
        let mut pool = pool(PolicyKind::ConsistentHash, &[9, 1]);
        let key = RequestKey::new(&KeyParts {
            session: Some(&[session]),
            ..Default::default()
        });
        let ask = Ask {
            key: &key,
            avoid: &[],
            shun: &[],
            among: None,
            now_ms: 0,
        };
        let mut counts = [0; 2];
        for _ in 0..400 {
            counts[pool.pick(&ask).expect("a slot").instance.0] += 1;
        }
        match counts {
            // All fits into the heavy slot, which the key prefers.
            [400, 0] => {}
            [_, 49..=51] => light += 1,
            _ => panic!("{counts:?}"),
        }
    }
    assert!((1..20).contains(&light), "{light}");
}

#[test]
fn without_weight_it_serves_only_where_no_other_as_well_can() {
    let (first, spare) = (InstanceIndex(0), InstanceIndex(1));
    for policy in PolicyKind::ALL {
        let mut pool = pool(policy, &[1, 0]);
        for _ in 0..20 {
            assert_eq!(pick(&mut pool).instance, first, "{policy:?}");
        }
        // A leg that is sent again, and one while the other fails.
        assert_eq!(pick_but(&mut pool, &[first]).instance, spare);
        pool.on_failed(first, LegFault::Failed, 0, 1);
        assert_eq!(pick(&mut pool).instance, spare, "{policy:?}");
        pool.set_standing(spare, Standing::Drained);
        assert_eq!(pick(&mut pool).instance, first, "{policy:?}");
    }
    // Where nobody has a weight all are alike.
    assert_eq!(
        idle_shares(&mut pool(PolicyKind::RoundRobin, &[0, 0]), 10),
        [5, 5]
    );
    // Full is no reason: an operator has set it aside.
    let mut full = pool(PolicyKind::RoundRobin, &[1, 0]).with_legs_max(1);
    pick(&mut full);
    let ask = Ask {
        key: &RequestKey::default(),
        avoid: &[],
        shun: &[],
        among: None,
        now_ms: 0,
    };
    assert_eq!(full.pick(&ask), Err(super::super::NoSlot::Full));
}

#[test]
fn a_weight_that_changes_counts_at_once_and_one_that_comes_catches_up_on_nothing() {
    let mut pool = pool(PolicyKind::RoundRobin, &[1_000, 1]);
    idle_shares(&mut pool, 1_001);
    pool.set_weight(InstanceIndex(1), 1_000);
    let shares = idle_shares(&mut pool, 100);
    assert!((49..=51).contains(&shares[0]), "{shares:?}");
    let third = pool.add(spec(2, 1), Trust::Given, Standing::Serving);
    pool.set_weight(third, 1_000);
    let shares = idle_shares(&mut pool, 300);
    assert!(
        shares.iter().all(|share| (99..=102).contains(share)),
        "{shares:?}"
    );
}

#[test]
fn a_slot_that_was_loaded_for_long_does_not_get_all_turns_afterwards() {
    let mut pool = pool(PolicyKind::LeastLoaded, &[1, 1]);
    let (one, other) = (pick(&mut pool), pick(&mut pool));
    pool.release(other.slot);
    for _ in 0..1_000 {
        let picked = pick(&mut pool);
        assert_eq!(picked.instance, other.instance);
        pool.release(picked.slot);
    }
    pool.release(one.slot);
    assert_eq!(idle_shares(&mut pool, 10), [5, 5]);
}

proptest! {
    #[test]
    fn turns_are_never_far_from_their_shares(
        weights in prop::collection::vec(1_u32..=20, 2..6),
        picks in 1_usize..400,
    ) {
        let mut pool = pool(PolicyKind::RoundRobin, &weights);
        let shares = idle_shares(&mut pool, picks);
        let all = f64::from(weights.iter().sum::<u32>());
        for (share, weight) in shares.iter().zip(&weights) {
            let exact = picks as f64 * f64::from(*weight) / all;
            prop_assert!((*share as f64 - exact).abs() < 2.5, "{shares:?} for {weights:?}");
        }
    }
}
