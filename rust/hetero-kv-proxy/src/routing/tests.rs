//! Routing in virtual time.

use super::policy::{KeyParts, PolicyKind, RequestKey};
use super::*;
use proptest::prelude::*;

const RULES: HealthRules = HealthRules {
    failures_max: 3,
    fresh_ms: 6_000,
    breaker: BreakerRules {
        failures_max: 3,
        open_ms: 1_000,
    },
};

/// The keys of a request that has none.
static NO_KEY: std::sync::LazyLock<RequestKey> = std::sync::LazyLock::new(RequestKey::default);

/// For any slot.
fn any_slot(now_ms: u64) -> Ask<'static> {
    Ask {
        key: &NO_KEY,
        avoid: &[],
        shun: &[],
        among: None,
        now_ms,
    }
}

/// For a slot elsewhere.
fn avoiding(avoid: &[InstanceIndex]) -> Ask<'_> {
    Ask {
        avoid,
        ..any_slot(0)
    }
}

fn pool(policy: PolicyKind, dps: &[u32]) -> Pool {
    let specs = dps
        .iter()
        .enumerate()
        .map(|(index, &dp)| InstanceSpec {
            url: format!("http://engine-{index}:8000"),
            dp,
            rank0: 4,
        })
        .collect();
    Pool::new(Role::Prefill, specs, policy, RULES)
}

/// How often each (instance, rank) is chosen in `picks` picks that are released at once.
fn histogram(pool: &mut Pool, dps: &[u32], picks: usize) -> Vec<Vec<usize>> {
    let mut counts: Vec<Vec<usize>> = dps.iter().map(|&dp| vec![0; dp as usize]).collect();
    for _ in 0..picks {
        let picked = pool.pick(&any_slot(0)).expect("the pool has slots");
        counts[picked.instance.0][picked.rank as usize] += 1;
        pool.release(picked.slot);
    }
    counts
}

#[test]
fn every_rank_of_unequal_instances_gets_the_same_share() {
    for policy in PolicyKind::ALL {
        if policy == PolicyKind::PowerOfTwo {
            // Its shares are even only over many draws.
            continue;
        }
        for dps in [vec![8, 8], vec![8, 4], vec![4, 8], vec![1, 3, 2]] {
            let slots: u32 = dps.iter().sum();
            let picks = 1_000;
            let counts = histogram(&mut pool(policy, &dps), &dps, picks);
            let low = picks / slots as usize;
            for count in counts.iter().flatten() {
                assert!(
                    (low..=low + 1).contains(count),
                    "{policy:?} {dps:?} {counts:?}"
                );
            }
        }
    }
}

#[test]
fn consecutive_turns_fall_on_different_instances() {
    let mut pool = pool(PolicyKind::RoundRobin, &[4, 4]);
    let mut before = None;
    for _ in 0..16 {
        let picked = pool.pick(&any_slot(0)).expect("the pool has slots");
        assert_ne!(before, Some(picked.instance));
        before = Some(picked.instance);
    }
}

#[test]
fn the_rank_header_is_rank0_plus_slot_and_absent_for_one_rank() {
    let mut pool = pool(PolicyKind::RoundRobin, &[1, 2]);
    let mut seen = Vec::new();
    for _ in 0..3 {
        let picked = pool.pick(&any_slot(0)).expect("the pool has slots");
        seen.push((picked.instance.0, picked.rank_header));
    }
    seen.sort_unstable();
    assert_eq!(seen, [(0, None), (1, Some(4)), (1, Some(5))]);
}

#[test]
fn least_loaded_fills_the_emptiest_slot() {
    let mut pool = pool(PolicyKind::LeastLoaded, &[1, 1]);
    let long: Vec<Picked> = (0..4)
        .map(|_| pool.pick(&any_slot(0)).expect("slots"))
        .collect();
    // Both legs of instance 1 end, so the next two picks go there.
    for picked in long.iter().filter(|picked| picked.instance.0 == 1) {
        pool.release(picked.slot);
    }
    for _ in 0..2 {
        assert_eq!(pool.pick(&any_slot(0)).expect("slots").instance.0, 1);
    }
}

#[test]
fn a_failed_instance_is_skipped_while_another_is_better_and_still_tried_when_none_is() {
    let mut pool = pool(PolicyKind::RoundRobin, &[1, 1]);
    pool.on_connect_failed(InstanceIndex(0));
    assert_eq!(histogram(&mut pool, &[1, 1], 10), [[0], [10]]);
    for _ in 0..3 {
        pool.on_probe_failed(InstanceIndex(1));
    }
    // Suspect is better than unhealthy.
    assert_eq!(histogram(&mut pool, &[1, 1], 10), [[10], [0]]);
    for _ in 0..3 {
        pool.on_probe_failed(InstanceIndex(0));
    }
    assert_eq!(histogram(&mut pool, &[1, 1], 10), [[5], [5]]);
    pool.on_answer(InstanceIndex(0));
    assert_eq!(histogram(&mut pool, &[1, 1], 10), [[10], [0]]);
}

#[test]
fn a_preferred_slot_yields_to_health_and_to_a_retry_elsewhere() {
    for policy in [PolicyKind::ConsistentHash, PolicyKind::PrefixAware] {
        let mut pool = pool(policy, &[2, 2, 2]);
        let prompt = [b'p'; 400];
        let key = RequestKey::new(&KeyParts {
            prompt: &prompt,
            prompt_bytes: 256,
            ..KeyParts::default()
        });
        let pick = |pool: &mut Pool, avoid: &[InstanceIndex]| {
            let ask = Ask {
                key: &key,
                avoid,
                ..any_slot(0)
            };
            let picked = pool.pick(&ask).expect("slots");
            pool.release(picked.slot);
            picked.instance
        };
        let home = pick(&mut pool, &[]);
        assert!((0..9).all(|_| pick(&mut pool, &[]) == home), "{policy:?}");
        assert_ne!(pick(&mut pool, &[home]), home, "{policy:?}");
        pool.on_answer(home);
        pool.on_connect_failed(home);
        assert!((0..9).all(|_| pick(&mut pool, &[]) != home), "{policy:?}");
    }
}

#[test]
fn avoid_holds_unless_the_instance_is_the_only_one() {
    let mut two = pool(PolicyKind::RoundRobin, &[2, 1]);
    for _ in 0..5 {
        let picked = two.pick(&avoiding(&[InstanceIndex(0)])).expect("slots");
        assert_eq!(picked.instance.0, 1);
    }
    let mut one = pool(PolicyKind::RoundRobin, &[1]);
    assert!(one.pick(&avoiding(&[InstanceIndex(0)])).is_ok());
    assert!(
        pool(PolicyKind::RoundRobin, &[])
            .pick(&any_slot(0))
            .is_err()
    );
}

#[test]
fn instances_come_and_go_while_others_keep_their_counts_and_health() {
    let mut pool = pool(PolicyKind::RoundRobin, &[2, 1]);
    let held: Vec<Picked> = (0..6)
        .map(|_| pool.pick(&any_slot(0)).expect("slots"))
        .collect();
    pool.on_connect_failed(InstanceIndex(1));
    let spec = InstanceSpec {
        url: "http://late:8000".to_owned(),
        dp: 3,
        rank0: 0,
    };
    let late = pool.add(spec.clone(), Trust::Given, Standing::Serving);
    assert_eq!(late, InstanceIndex(2));
    let counts = |pool: &Pool| -> Vec<Vec<u32>> {
        let views = pool.view(0);
        views
            .into_iter()
            .map(|view| view.in_flight_by_rank)
            .collect()
    };
    assert_eq!(counts(&pool), [vec![2, 2], vec![2], vec![0, 0, 0]]);
    assert_eq!(pool.state(InstanceIndex(1), 0), Some(HealthState::Suspect));

    // Removed with legs in flight: they release nothing of any other.
    assert!(pool.remove(InstanceIndex(0)));
    assert!(!pool.remove(InstanceIndex(0)));
    for leg in held.iter().filter(|leg| leg.instance == InstanceIndex(0)) {
        assert!(!pool.release(leg.slot));
    }
    assert_eq!(counts(&pool), [vec![2], vec![0, 0, 0]]);
    for leg in held.iter().filter(|leg| leg.instance == InstanceIndex(1)) {
        pool.release(leg.slot);
    }
    assert_eq!(counts(&pool), [vec![0], vec![0, 0, 0]]);
    // No number is given twice, not even the last one.
    assert!(pool.remove(late));
    assert_eq!(
        pool.add(spec, Trust::Given, Standing::Serving),
        InstanceIndex(3)
    );
    assert_eq!(
        pool.pick(&any_slot(0)).expect("slots").instance,
        InstanceIndex(3)
    );
}

#[test]
fn a_registered_instance_takes_legs_from_its_first_answer_and_not_while_its_probe_fails() {
    let mut pool = pool(PolicyKind::RoundRobin, &[]);
    let spec = InstanceSpec {
        url: "http://late:8000".to_owned(),
        dp: 1,
        rank0: 0,
    };
    let late = pool.add(spec, Trust::Probed, Standing::Serving);
    assert!(pool.pick(&any_slot(0)).is_err());
    assert!(pool.pick_at(late, 0).is_err());
    pool.on_probe_failed(late);
    assert!(pool.pick(&any_slot(0)).is_err(), "it has never answered");
    pool.on_probe_answered(late, 1);
    assert!(pool.pick(&any_slot(0)).is_ok());
    pool.on_connect_failed(late);
    assert!(
        pool.pick(&any_slot(0)).is_ok(),
        "traffic alone takes nobody out"
    );
    for _ in 0..3 {
        pool.on_probe_failed(late);
    }
    assert!(pool.pick(&any_slot(0)).is_err());
    assert_eq!(pool.ready_count(1), 0);
}

#[test]
fn a_drained_instance_takes_no_leg_and_its_last_release_says_so() {
    let mut pool = pool(PolicyKind::LeastLoaded, &[1, 1]);
    let first = pool.pick_at(InstanceIndex(0), 0).expect("slots");
    let second = pool.pick_at(InstanceIndex(0), 0).expect("slots");
    pool.keep(InstanceIndex(0));
    pool.set_standing(InstanceIndex(0), Standing::Drained);
    for _ in 0..5 {
        assert_eq!(
            pool.pick(&any_slot(0)).expect("slots").instance,
            InstanceIndex(1)
        );
    }
    // The one that is left is not avoided.
    assert!(pool.pick(&avoiding(&[InstanceIndex(1)])).is_ok());
    assert_eq!(pool.routable(), [InstanceIndex(1)]);
    assert!(!pool.release(first.slot));
    assert!(!pool.release(second.slot), "its blocks are not read yet");
    assert!(!pool.is_idle(InstanceIndex(0)));
    assert!(pool.unkeep(InstanceIndex(0)));
    assert!(pool.is_idle(InstanceIndex(0)));
    pool.set_standing(InstanceIndex(0), Standing::Serving);
    assert_eq!(
        pool.pick(&any_slot(0)).expect("slots").instance,
        InstanceIndex(0)
    );
}

#[test]
fn a_slot_takes_no_more_legs_than_it_may_and_a_worse_one_is_no_substitute() {
    for policy in PolicyKind::ALL {
        let mut pool = pool(policy, &[2, 1]).with_legs_max(2);
        pool.on_connect_failed(InstanceIndex(1));
        let held: Vec<Picked> = (0..4)
            .map(|_| pool.pick(&any_slot(0)).expect("room"))
            .collect();
        assert!(held.iter().all(|leg| leg.instance == InstanceIndex(0)));
        assert_eq!(pool.view(0)[0].in_flight_by_rank, [2, 2], "{policy:?}");
        assert_eq!(pool.pick(&any_slot(0)), Err(NoSlot::Full));
        assert_eq!(pool.room(&any_slot(0)), Err(NoSlot::Full));
        assert_eq!(pool.pick_at(InstanceIndex(0), 0), Err(NoSlot::Full));
        // One that was tried and failed is left out for the other.
        assert!(pool.room(&avoiding(&[InstanceIndex(0)])).is_ok());
        pool.release(held[0].slot);
        let next = pool.pick(&any_slot(0)).expect("room");
        assert_eq!((next.instance, next.rank), (held[0].instance, held[0].rank));
        pool.set_standing(InstanceIndex(0), Standing::Drained);
        pool.set_standing(InstanceIndex(1), Standing::Drained);
        let none = || NoSlot::NoEngine(Role::Prefill);
        assert_eq!(pool.pick(&any_slot(0)), Err(none()));
        assert_eq!(pool.pick_at(InstanceIndex(1), 0), Err(none()));
    }
}

#[test]
fn those_that_failed_a_request_are_left_out_and_at_last_only_the_last_of_them() {
    let mut pool = pool(PolicyKind::RoundRobin, &[1, 1, 1]);
    let picks = |pool: &mut Pool, avoid: &[usize]| {
        let avoid: Vec<InstanceIndex> = avoid.iter().copied().map(InstanceIndex).collect();
        let mut picked: Vec<usize> = (0..6)
            .map(|_| pool.pick(&avoiding(&avoid)).expect("slots").instance.0)
            .collect();
        picked.sort_unstable();
        picked.dedup();
        picked
    };
    assert_eq!(picks(&mut pool, &[]), [0, 1, 2]);
    assert_eq!(picks(&mut pool, &[1]), [0, 2]);
    assert_eq!(picks(&mut pool, &[1, 0]), [2]);
    assert_eq!(picks(&mut pool, &[1, 0, 2]), [0, 1]);
}

#[test]
fn the_shunned_are_left_out_for_others_as_healthy_and_for_no_worse_ones() {
    let mut pool = pool(PolicyKind::RoundRobin, &[1, 1]).with_legs_max(1);
    let shun = [InstanceIndex(0)];
    let ask = Ask {
        shun: &shun,
        ..any_slot(0)
    };
    for _ in 0..4 {
        let picked = pool.pick(&ask).expect("slots");
        assert_eq!(picked.instance, InstanceIndex(1));
        assert_eq!(pool.room(&ask), Err(NoSlot::Full), "room is waited for");
        pool.release(picked.slot);
    }
    pool.on_connect_failed(InstanceIndex(1));
    let picked = pool.pick(&ask).expect("slots");
    assert_eq!(picked.instance, InstanceIndex(0));
}

#[test]
fn an_instance_whose_legs_fail_is_kept_out_tried_once_and_taken_back() {
    let mut pool = pool(PolicyKind::RoundRobin, &[1, 1]);
    let bad = InstanceIndex(0);
    for at in 0..3 {
        pool.on_probe_answered(bad, at);
        assert_eq!(pool.state(bad, at), Some(HealthState::Healthy));
        pool.on_failed(bad, LegFault::Failed, at, at);
    }
    assert_eq!(pool.state(bad, 3), Some(HealthState::Open));
    // Its probe is answered all the while, and proves nothing.
    pool.on_probe_answered(bad, 3);
    let share = |pool: &mut Pool, now_ms: u64| {
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(pool.pick(&any_slot(now_ms)).expect("slots"));
        }
        let count = held.iter().filter(|leg| leg.instance == bad).count();
        for leg in held {
            pool.release(leg.slot);
        }
        count
    };
    assert_eq!(share(&mut pool, 900), 0);
    // Its time is over: one of four legs tries it, and no other while that one runs.
    assert_eq!(pool.state(bad, 1_002), Some(HealthState::HalfOpen));
    assert_eq!(share(&mut pool, 1_002), 1);
    pool.on_failed(bad, LegFault::Failed, 1_003, 1_004);
    assert_eq!(share(&mut pool, 2_900), 0, "twice as long");
    assert_eq!(share(&mut pool, 3_004), 1);
    pool.on_served(bad, 3_004, 3_005);
    assert_eq!(pool.state(bad, 3_005), Some(HealthState::Healthy));
    assert_eq!(share(&mut pool, 3_005), 2);
    assert!(pool.view(3_005)[0].ready);
}

#[test]
fn the_last_instance_of_a_role_is_never_kept_out() {
    let mut pool = pool(PolicyKind::RoundRobin, &[1, 1]);
    for at in 0..9 {
        for instance in [0, 1].map(InstanceIndex) {
            pool.on_failed(instance, LegFault::Failed, at, at);
        }
    }
    assert_eq!(pool.state(InstanceIndex(1), 0), Some(HealthState::Open));
    assert_eq!(histogram(&mut pool, &[1, 1], 10), [[5], [5]]);
    // One that answers no probe is worse than one whose legs fail.
    for _ in 0..3 {
        pool.on_probe_failed(InstanceIndex(0));
    }
    assert_eq!(histogram(&mut pool, &[1, 1], 10), [[0], [10]]);
}

#[test]
fn health_follows_probes_and_ages() {
    let mut health = Health::default();
    assert_eq!(health.state(9_000), HealthState::Unknown);
    assert!(!health.is_ready(&RULES, 0));
    health.on_probe_failed(&RULES);
    assert_eq!(health.state(9_000), HealthState::Suspect);
    health.on_probe_answered(1_000);
    assert!(health.is_ready(&RULES, 7_000));
    assert!(!health.is_ready(&RULES, 7_001));
    // Two lost probes do not move traffic; the third does; one good answer brings it back.
    health.on_probe_failed(&RULES);
    health.on_probe_failed(&RULES);
    assert_eq!(health.state(9_000), HealthState::Healthy);
    health.on_probe_failed(&RULES);
    assert_eq!(health.state(9_000), HealthState::Unhealthy);
    health.on_probe_answered(8_000);
    assert_eq!(health.state(9_000), HealthState::Healthy);
}

#[test]
fn answered_legs_keep_an_instance_routed_to_and_make_none_ready() {
    let mut health = Health::default();
    for at in 0..9 {
        // A server that is no engine answers legs, with 404 at least, and no probe.
        health.on_answer();
        assert_eq!(health.state(at), HealthState::Unknown);
        assert!(!health.is_ready(&RULES, at));
        health.on_probe_failed(&RULES);
        assert_eq!(
            (health.state(at), health.tier(at)),
            (HealthState::Unknown, 0)
        );
    }
    health.on_probe_answered(10);
    assert!(health.is_ready(&RULES, 10));
    // A leg ends suspicion of an engine whose probes are answered.
    health.on_connect_failed();
    assert!(!health.is_ready(&RULES, 11));
    health.on_answer();
    assert!(health.is_ready(&RULES, 11));
    // One that is too busy for its probes takes legs while they are answered.
    for _ in 0..3 {
        health.on_answer();
        health.on_probe_failed(&RULES);
        assert_eq!(health.tier(12), 0);
    }
    assert!(!health.is_ready(&RULES, 12));
    health.on_answer();
    assert!(!health.is_ready(&RULES, 12));
    assert_eq!(health.state(12), HealthState::Unknown);
    health.on_probe_answered(13);
    assert!(health.is_ready(&RULES, 13));
}

#[test]
fn connect_errors_alone_never_make_an_instance_unhealthy() {
    let mut health = Health::default();
    health.on_probe_answered(0);
    for _ in 0..100 {
        health.on_connect_failed();
    }
    assert_eq!(health.state(9_000), HealthState::Suspect);
}

#[test]
fn view_shows_legs_by_rank_and_readiness() {
    let mut pool = pool(PolicyKind::RoundRobin, &[2]);
    pool.pick(&any_slot(0)).expect("slots");
    pool.pick(&any_slot(0)).expect("slots");
    pool.pick(&any_slot(0)).expect("slots");
    pool.on_probe_answered(InstanceIndex(0), 5);
    let view = pool.view(5);
    assert_eq!(view[0].in_flight_by_rank, [2, 1]);
    assert!(view[0].ready);
    assert_eq!((pool.ready_count(5), pool.ready_count(9_000)), (1, 0));
}

const FLOW: FlowRules = FlowRules {
    require_kv: true,
    retries_max: 1,
    refuses_second_read: true,
};

#[test]
fn retries_follow_the_rules_of_each_leg() {
    use AfterFailure::{GiveUp, RetryElsewhere, RetryFresh};
    let reset = |reused| LegFailure::Reset { reused };
    let refused = |status| LegFailure::Refused { status };
    let connect = LegFailure::Connect;
    let (p, d) = (Role::Prefill, Role::Decode);
    // What follows with a connector that refuses a second read, and with one that does not.
    for (role, failure, checked, unchecked) in [
        (p, connect, RetryElsewhere, RetryElsewhere),
        (p, reset(false), RetryElsewhere, RetryElsewhere),
        (p, reset(true), RetryFresh, RetryFresh),
        (p, refused(429), RetryElsewhere, RetryElsewhere),
        (p, refused(502), RetryElsewhere, RetryElsewhere),
        (p, refused(503), RetryElsewhere, RetryElsewhere),
        (p, refused(504), RetryElsewhere, RetryElsewhere),
        (p, refused(500), GiveUp, GiveUp),
        (p, refused(400), GiveUp, GiveUp),
        (d, connect, RetryElsewhere, RetryElsewhere),
        (d, reset(false), GiveUp, GiveUp),
        (d, reset(true), RetryFresh, GiveUp),
        (d, refused(429), RetryElsewhere, RetryElsewhere),
        (d, refused(503), RetryElsewhere, GiveUp),
        (d, refused(502), GiveUp, GiveUp),
        (d, refused(504), GiveUp, GiveUp),
        (d, refused(500), GiveUp, GiveUp),
        (d, refused(404), GiveUp, GiveUp),
    ] {
        for refuses_second_read in [true, false] {
            for has_handle in [true, false] {
                for instances in [1, 2] {
                    let want = match refuses_second_read || !has_handle {
                        true => checked,
                        false => unchecked,
                    };
                    let want = match (want, instances) {
                        (RetryElsewhere, 1) => GiveUp,
                        (want, _) => want,
                    };
                    let leg = FailedLeg {
                        role,
                        failure,
                        has_handle,
                        instance: InstanceIndex(0),
                    };
                    let mut flow = Flow::new(FlowRules {
                        refuses_second_read,
                        ..FLOW
                    });
                    let first = flow.leg_failed(leg, instances);
                    assert_eq!(first, want, "{leg:?} of {instances}, {refuses_second_read}");
                    let failure = connect;
                    let second = flow.leg_failed(FailedLeg { failure, ..leg }, 2);
                    match want {
                        GiveUp => assert_eq!(second, RetryElsewhere, "no budget was used"),
                        RetryElsewhere | RetryFresh => assert_eq!(second, GiveUp),
                    }
                }
            }
        }
    }
}

#[test]
fn the_legs_have_separate_budgets_and_the_tried_are_known() {
    let mut flow = Flow::new(FlowRules {
        retries_max: 3,
        ..FLOW
    });
    for role in [Role::Prefill, Role::Decode] {
        for (at, tried) in [(0, &[0][..]), (1, &[0, 1]), (0, &[1, 0])] {
            let leg = FailedLeg {
                role,
                failure: LegFailure::Connect,
                has_handle: false,
                instance: InstanceIndex(at),
            };
            assert_eq!(flow.leg_failed(leg, 2), AfterFailure::RetryElsewhere);
            let tried: Vec<InstanceIndex> = tried.iter().copied().map(InstanceIndex).collect();
            assert_eq!(flow.tried(role), tried);
        }
        let leg = FailedLeg {
            role,
            failure: LegFailure::Connect,
            has_handle: false,
            instance: InstanceIndex(0),
        };
        assert_eq!(flow.leg_failed(leg, 2), AfterFailure::GiveUp);
    }
}

#[test]
fn prefill_answers_lead_to_one_step_each() {
    let fail = Flow::new(FLOW);
    let recompute = Flow::new(FlowRules {
        require_kv: false,
        ..FLOW
    });
    let (held, bare) = (true, false);
    assert_eq!(
        fail.prefill_answered(200, held, false),
        AfterPrefill::HandOver
    );
    // A connector that kept the blocks of a stopped request is believed.
    assert_eq!(
        fail.prefill_answered(200, held, true),
        AfterPrefill::HandOver
    );
    assert_eq!(
        fail.prefill_answered(200, bare, false),
        AfterPrefill::MissingKv
    );
    assert_eq!(
        fail.prefill_answered(200, bare, true),
        AfterPrefill::RecomputeStopped
    );
    assert_eq!(
        recompute.prefill_answered(200, bare, false),
        AfterPrefill::Recompute
    );
    for status in [400, 404, 429, 500, 503, 302] {
        assert_eq!(
            recompute.prefill_answered(status, held, false),
            AfterPrefill::PassOn
        );
    }
}

proptest! {
    /// Whatever is picked and released in whatever order: counts stay true, ranks stay in range,
    /// and the even policies never leave two slots more than one leg apart while only picking.
    #[test]
    fn counts_stay_true(
        dps in prop::collection::vec(1_u32..6, 1..5),
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        prompts in 1_usize..4,
        steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..80),
    ) {
        let keys: Vec<RequestKey> = (0..prompts)
            .map(|at| RequestKey::new(&KeyParts {
                prompt: at.to_string().repeat(300).as_bytes(),
                prompt_bytes: 256,
                ..KeyParts::default()
            }))
            .collect();
        let fair = matches!(policy, PolicyKind::RoundRobin | PolicyKind::LeastLoaded);
        let mut pool = pool(policy, &dps);
        let mut held: Vec<Picked> = Vec::new();
        let mut released = false;
        for (give_back, which) in steps {
            if give_back && !held.is_empty() {
                pool.release(held.swap_remove(which.index(held.len())).slot);
                released = true;
            } else {
                let key = &keys[which.index(keys.len())];
                let ask = Ask { key, ..any_slot(0) };
                let picked = pool.pick(&ask).expect("dps is not empty");
                prop_assert!(picked.rank < dps[picked.instance.0]);
                held.push(picked);
            }
            let view = pool.view(0);
            for (index, instance) in view.iter().enumerate() {
                for (rank, &count) in instance.in_flight_by_rank.iter().enumerate() {
                    let want = held
                        .iter()
                        .filter(|p| p.instance.0 == index && p.rank as usize == rank)
                        .count();
                    prop_assert_eq!(count as usize, want);
                }
            }
            if fair && !released {
                let all: Vec<u32> =
                    view.iter().flat_map(|v| v.in_flight_by_rank.clone()).collect();
                let spread = all.iter().max().zip(all.iter().min()).map(|(a, b)| a - b);
                prop_assert!(spread <= Some(1), "{all:?}");
            }
        }
    }
}

#[test]
fn what_engines_do_for_others_counts_while_it_is_fresh() {
    let loads = |requests: &[u32]| -> Vec<EngineLoad> {
        let load = |requests: &u32| EngineLoad {
            requests: *requests,
            cache_used: 0,
        };
        requests.iter().map(load).collect()
    };
    let mut pool = pool(PolicyKind::LeastLoaded, &[1, 1, 1]).with_load_fresh_ms(3_000);
    let (first, second) = (InstanceIndex(0), InstanceIndex(1));
    // Of the first's ten, two are ours; the third says nothing and counts as the mean of the others,
    // which is five.
    pool.on_scraped(first, &loads(&[10]), &[2], 0);
    pool.on_scraped(second, &loads(&[2]), &[0], 1_000);
    let picked = |pool: &mut Pool, now_ms| -> Vec<usize> {
        let picked: Vec<Picked> = (0..12)
            .map(|_| pool.pick(&any_slot(now_ms)).expect("slots"))
            .collect();
        for one in &picked {
            pool.release(one.slot);
        }
        let count = |at| picked.iter().filter(|one| one.instance.0 == at).count();
        (0..3).map(count).collect()
    };
    // 8, 2 and 5 before; 9 each behind the twelve.
    assert_eq!(picked(&mut pool, 2_000), [1, 7, 4]);
    // The first's words are old: 2 is all that is known of anyone.
    assert_eq!(picked(&mut pool, 3_001), [4, 4, 4]);
    assert_eq!(pool.view(3_001)[1].elsewhere_by_rank, Some(vec![2]));
    assert_eq!(pool.view(4_001)[1].elsewhere_by_rank, None);
    // More of ours than it says: some have not reached it.
    pool.on_scraped(first, &loads(&[1]), &[3], 5_000);
    assert_eq!(pool.view(5_000)[0].elsewhere_by_rank, Some(vec![0]));
    // As many as ranks, or it is not believed.
    pool.on_scraped(first, &loads(&[7, 7]), &[0, 0], 5_000);
    assert_eq!(pool.view(5_000)[0].elsewhere_by_rank, Some(vec![0]));
    pool.on_scraped(InstanceIndex(9), &loads(&[7]), &[0], 5_000);
    // A limit of legs is of this proxy's own.
    let mut pool = self::pool(PolicyKind::LeastLoaded, &[1])
        .with_load_fresh_ms(3_000)
        .with_legs_max(1);
    pool.on_scraped(first, &loads(&[50]), &[0], 0);
    assert!(pool.pick(&any_slot(0)).is_ok());
}
