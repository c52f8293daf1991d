use super::*;
use proptest::prelude::*;

const RULES: BreakerRules = BreakerRules {
    failures_max: 3,
    open_ms: 1_000,
};
use LegFault::{Failed, Unreachable};

/// Legs that begin at `from` and fail a millisecond later, one after the other.
fn fail(breaker: &mut Breaker, fault: LegFault, from: u64, times: u64) -> u64 {
    for at in (from..).take(times as usize) {
        breaker.on_failed(&RULES, fault, at, at + 1);
    }
    from + times
}

#[test]
fn it_opens_after_failures_in_a_row_and_a_trial_closes_it() {
    let mut breaker = Breaker::default();
    let at = fail(&mut breaker, Failed, 0, 2);
    assert_eq!(breaker.phase(at), Phase::Closed);
    breaker.on_served(at, at);
    let at = fail(&mut breaker, Failed, at + 1, 2);
    assert_eq!(breaker.phase(at), Phase::Closed, "not in a row");
    let at = fail(&mut breaker, Failed, at, 1);
    assert_eq!(breaker.phase(at), Phase::Open);
    assert_eq!(breaker.phase(at + 999), Phase::Open);
    assert!(!breaker.on_begin(at + 999), "no trial while it is open");
    let at = at + 1_000;
    assert_eq!(breaker.phase(at), Phase::HalfOpen);
    assert!(breaker.on_begin(at));
    assert_eq!(breaker.phase(at), Phase::Trying);
    assert!(!breaker.on_begin(at), "one trial at a time");
    breaker.on_served(at, at + 5);
    breaker.on_trial_ended();
    assert_eq!(breaker.phase(at + 5), Phase::Closed);
    let at = fail(&mut breaker, Failed, at + 6, 2);
    assert_eq!(breaker.phase(at), Phase::Closed, "it counts anew");
}

#[test]
fn a_failed_trial_doubles_the_time_and_one_without_a_verdict_leaves_it_half_open() {
    let mut breaker = Breaker::default();
    let mut at = fail(&mut breaker, Failed, 0, 3);
    for open_ms in [1_000, 2_000, 4_000, 8_000, 8_000] {
        assert_eq!(breaker.phase(at + open_ms - 1), Phase::Open);
        at += open_ms;
        // Its client left, or it was a client's mistake.
        assert!(breaker.on_begin(at));
        breaker.on_trial_ended();
        assert_eq!(breaker.phase(at), Phase::HalfOpen);
        assert!(breaker.on_begin(at));
        at = fail(&mut breaker, Failed, at, 1);
        breaker.on_trial_ended();
    }
}

#[test]
fn legs_that_ran_at_one_moment_are_one_failure() {
    let mut breaker = Breaker::default();
    // A burst: 50 began before the first of them failed.
    for _ in 0..50 {
        breaker.on_failed(&RULES, Failed, 10, 40);
    }
    assert_eq!(breaker.phase(40), Phase::Closed);
    breaker.on_failed(&RULES, Failed, 40, 50);
    breaker.on_failed(&RULES, Failed, 50, 60);
    assert_eq!(breaker.phase(60), Phase::Open);
}

#[test]
fn a_timeout_while_others_are_served_counts_nothing() {
    let mut breaker = Breaker::default();
    for round in 0..50 {
        let began = round * 10;
        breaker.on_served(began, began + 9);
        breaker.on_failed(&RULES, Unreachable, began, began + 10);
    }
    assert_eq!(breaker.phase(500), Phase::Closed);
}

#[test]
fn a_failure_right_behind_an_answer_counts() {
    let mut breaker = Breaker::default();
    breaker.on_served(7, 7);
    for _ in 0..3 {
        breaker.on_failed(&RULES, Failed, 7, 7);
    }
    assert_eq!(breaker.phase(7), Phase::Open);
}

#[test]
fn a_probe_disproves_that_nobody_can_connect_and_nothing_else() {
    let mut breaker = Breaker::default();
    let at = fail(&mut breaker, Unreachable, 0, 3);
    assert_eq!(breaker.phase(at), Phase::Open);
    breaker.on_probe_answered();
    assert_eq!(breaker.phase(at), Phase::Closed);
    let at = fail(&mut breaker, Unreachable, at, 2);
    let at = fail(&mut breaker, Failed, at, 1);
    assert_eq!(breaker.phase(at), Phase::Open);
    breaker.on_probe_answered();
    assert_eq!(breaker.phase(at), Phase::Open);
}

#[test]
fn an_answer_from_before_the_fault_does_not_close_it() {
    let mut breaker = Breaker::default();
    let at = fail(&mut breaker, Failed, 100, 3);
    breaker.on_served(50, at);
    assert_eq!(breaker.phase(at), Phase::Open);
    // A leg sent as the last resort does.
    breaker.on_served(at, at + 1);
    assert_eq!(breaker.phase(at + 1), Phase::Closed);
}

#[test]
fn without_a_maximum_it_never_opens() {
    let rules = BreakerRules {
        failures_max: 0,
        ..RULES
    };
    let mut breaker = Breaker::default();
    for at in 0..1_000 {
        breaker.on_failed(&rules, Failed, at, at);
    }
    assert_eq!(breaker.phase(1_000), Phase::Closed);
}

proptest! {
    /// Whatever comes, a trial is possible at the latest the longest time after the last failure.
    #[test]
    fn it_is_never_out_for_good(
        steps in prop::collection::vec((0_u8..4, 0_u64..3_000, 0_u64..500), 1..60),
    ) {
        let mut breaker = Breaker::default();
        let mut now = 0;
        let mut trial = false;
        for (kind, pause, took) in steps {
            now += pause;
            let began = now.saturating_sub(took);
            match kind {
                0 => breaker.on_failed(&RULES, Failed, began, now),
                1 => breaker.on_served(began, now),
                2 => trial |= breaker.on_begin(now),
                _ => breaker.on_probe_answered(),
            }
        }
        if trial {
            breaker.on_trial_ended();
        }
        let at = now + RULES.open_ms * 8;
        prop_assert!(matches!(breaker.phase(at), Phase::Closed | Phase::HalfOpen));
    }
}
