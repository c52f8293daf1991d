use super::*;

const P0: InstanceIndex = InstanceIndex(0);
const P1: InstanceIndex = InstanceIndex(1);
const D0: InstanceIndex = InstanceIndex(0);
const D1: InstanceIndex = InstanceIndex(1);

fn of_p0(pairs: &BadPairs, now_ms: u64) -> Vec<(InstanceIndex, u64)> {
    pairs.with(Role::Prefill, P0, now_ms)
}

#[test]
fn a_pair_is_avoided_where_the_decode_engine_serves_others() {
    let mut pairs = BadPairs::default();
    // Nothing tells it from a fault of the decode engine.
    assert!(!pairs.on_failed(P0, D0, false, 0));
    pairs.on_served(Some(P0), D0, 1);
    assert!(
        !pairs.on_failed(P0, D0, false, 2),
        "it served this one only"
    );
    pairs.on_served(Some(P1), D1, 3);
    assert!(!pairs.on_failed(P0, D0, false, 4), "another engine did");
    assert!(pairs.is_empty());
    pairs.on_served(Some(P1), D0, 5);
    assert!(!pairs.on_failed(P0, D0, false, 60_006), "long ago");
    assert!(pairs.on_failed(P0, D0, false, 60_005));
    assert_eq!(of_p0(&pairs, 60_005), [(D0, 5_000)]);
    assert_eq!(pairs.with(Role::Decode, D0, 60_006), [(P0, 4_999)]);
    assert!(pairs.with(Role::Prefill, P1, 60_006).is_empty());
    assert!(of_p0(&pairs, 65_005).is_empty(), "time ends it");
}

#[test]
fn legs_without_kv_show_that_it_serves_others_and_a_named_fault_needs_no_proof() {
    let mut pairs = BadPairs::default();
    pairs.on_served(None, D0, 0);
    assert!(pairs.on_failed(P0, D0, false, 1));
    assert!(pairs.on_failed(P1, D1, true, 1));
}

#[test]
fn each_failure_after_its_time_doubles_it_and_a_served_leg_ends_it() {
    let mut pairs = BadPairs::default();
    let mut now = 0;
    for time in [5_000, 10_000, 20_000, 40_000, 60_000, 60_000] {
        assert!(pairs.on_failed(P0, D0, true, now));
        // Legs of the same moment, and the last resort, add nothing.
        assert!(!pairs.on_failed(P0, D0, true, now + 1));
        assert_eq!(of_p0(&pairs, now), [(D0, time)]);
        now += time;
    }
    pairs.on_served(Some(P0), D0, now);
    assert!(pairs.on_failed(P0, D0, true, now));
    assert_eq!(of_p0(&pairs, now), [(D0, 5_000)]);
    // Long after, it is another story.
    now += 5_000 + FORGET_MS + 1;
    assert!(pairs.on_failed(P0, D0, true, now));
    assert_eq!(of_p0(&pairs, now), [(D0, 5_000)]);
}

#[test]
fn a_prefill_engine_is_hopeless_when_all_its_pairs_are_avoided() {
    let mut pairs = BadPairs::default();
    pairs.on_failed(P0, D0, true, 0);
    assert!(pairs.hopeless(&[D0, D1], 1).is_empty());
    assert_eq!(pairs.hopeless(&[D0], 1), [P0]);
    pairs.on_failed(P0, D1, true, 2_000);
    assert_eq!(pairs.hopeless(&[D0, D1], 4_999), [P0]);
    assert!(pairs.hopeless(&[D0, D1], 5_000).is_empty());
}

#[test]
fn what_is_removed_is_forgotten_and_the_number_of_pairs_is_bounded() {
    let mut pairs = BadPairs::default();
    pairs.on_served(Some(P1), D0, 0);
    assert!(pairs.on_failed(P0, D0, false, 0));
    pairs.forget(Role::Prefill, P0);
    assert!(pairs.is_empty());
    pairs.forget(Role::Prefill, P1);
    assert!(!pairs.on_failed(P0, D0, false, 0), "the other is gone");
    assert!(pairs.on_failed(P0, D0, true, 0));
    pairs.forget(Role::Decode, D0);
    assert!(pairs.is_empty());
    for at in 0..2 * PAIRS_MAX {
        pairs.on_failed(P0, InstanceIndex(at), true, 0);
    }
    assert_eq!(of_p0(&pairs, 0).len(), PAIRS_MAX);
    // What has long ended makes room.
    assert!(pairs.on_failed(P1, D1, true, 5_000 + FORGET_MS + 1));
}
