//! Sources that failed are avoided for a while, decided once per transfer.

use super::super::health::{FORGIVEN_AFTER, Health, QUARANTINE, QUARANTINE_MAX};
use super::*;
use crate::ids::TpRank;
use crate::plan::SourcePolicy;
use crate::testing::{at, lease_times, ms, options, prompt, secs, transfer};

const RANK: TpRank = TpRank(1);

#[test]
fn a_failed_rank_is_avoided_and_tried_again() {
    let mut health = Health::default();
    assert_eq!(health.weights(at(secs(0)), 4), [0_u16; 0], "all alike");
    assert!(health.failed(at(secs(0)), RANK));
    assert_eq!(health.weights(at(secs(0)), 4), [1, 0, 1, 1]);
    assert_eq!(health.avoided(at(secs(0))), 1);
    let over = at(secs(0)) + QUARANTINE;
    assert_eq!(health.weights(over, 4), [0_u16; 0]);
    assert_eq!(health.avoided(over), 0);
}

#[test]
fn failures_in_a_row_double_the_quarantine_up_to_its_most() {
    let mut health = Health::default();
    let mut now = at(secs(0));
    let mut times = Vec::new();
    for _ in 0..9 {
        assert!(health.failed(now, RANK));
        // Of reads that were under way together only the first counts.
        assert!(!health.failed(now, RANK));
        let begun = now;
        while health.avoided(now) > 0 {
            now = now + ms(500);
        }
        times.push(now.since(begun));
    }
    assert_eq!(times[..4], [QUARANTINE, secs(10), secs(20), secs(40)]);
    assert_eq!(times[8], QUARANTINE_MAX);
    // A rank that behaves for long starts anew.
    now = now + FORGIVEN_AFTER;
    assert!(health.failed(now, RANK));
    assert_eq!(health.avoided(now + QUARANTINE), 0);
}

#[test]
fn loads_carry_weights_once_a_source_was_lost_and_siblings_carry_the_same() {
    let mut pair = Pair::new(4, 1);
    let params = pair.prefill("p1", transfer(1), prompt(1), 40);
    pair.arrive("d1", &params);
    pair.arrive("d2", &params);
    pair.run(ms(20));
    pair.admit("d1", 0);
    let first = pair.consumers[0].take_orders(pair.now);
    assert_eq!(first.loads[0].choice.weights, [0_u16; 0]);
    // Not a rank of that engine, and not a request.
    pair.consumers[0].handle_source_lost(pair.now, "d1", TpRank(4));
    pair.consumers[0].handle_source_lost(pair.now, "nobody", RANK);
    assert_eq!(pair.consumers[0].sources_avoided(pair.now), 0);
    pair.consumers[0].handle_source_lost(pair.now, "d1", RANK);
    assert_eq!(pair.consumers[0].sources_avoided(pair.now), 1);
    assert_eq!(pair.consumers[0].counts().quarantines, 1);
    assert!(notes(&mut pair.consumers[0]).contains("source tp_rank 1"));
    // A sibling of a transfer that has chosen chooses alike.
    pair.admit("d2", 0);
    let second = pair.consumers[0].take_orders(pair.now);
    assert_eq!(second.loads[0].choice.weights, [0_u16; 0]);
    // The next transfer avoids it, and the one after the quarantine does not.
    for (number, weights) in [(2, vec![1, 0, 1, 1]), (3, Vec::new())] {
        let (prefilled, decoded) = (format!("p{number}"), format!("e{number}"));
        let params = pair.prefill(&prefilled, transfer(number), prompt(number.into()), 40);
        pair.arrive(&decoded, &params);
        pair.run(ms(20));
        pair.admit(&decoded, 0);
        let orders = pair.consumers[0].take_orders(pair.now);
        assert_eq!(orders.loads[0].choice.weights, weights, "transfer {number}");
        pair.run(QUARANTINE);
    }
}

/// Counted per prefill engine: one count over several would skip holders of each.
#[test]
fn round_robin_counts_the_transfers_of_each_prefill_engine() {
    let options = ConsumerOptions {
        source_policy: SourcePolicy::RoundRobin,
        ..options()
    };
    let mut pair = Pair::with(4, 1, lease_times(), options);
    let mut sequences = Vec::new();
    for number in 1..=3 {
        let params = pair.prefill(
            &format!("p{number}"),
            transfer(number),
            prompt(number.into()),
            40,
        );
        // Siblings of one transfer choose alike.
        for sibling in ["a", "b"] {
            let decoded = format!("{sibling}{number}");
            pair.arrive(&decoded, &params);
            pair.run(ms(20));
            pair.admit(&decoded, 0);
            let orders = pair.consumers[0].take_orders(pair.now);
            sequences.push(orders.loads[0].choice.sequence);
        }
    }
    assert_eq!(sequences, [0, 0, 1, 1, 2, 2].map(Some));
}
