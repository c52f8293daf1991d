//! The consumer against real producers, over the wire's bytes, in virtual time.

mod aborts;
mod connect;
mod converge;
mod failures;
mod health;
mod keys;
mod leases;
mod life;
mod pairs;
mod peers;
mod resume;
mod siblings;

use super::{Consumer, ConsumerOptions};
use crate::failure::FailureReason;
use crate::testing::Pair;

/// Nothing is left of anything: requests, transfers, leases, slots' blocks.
#[track_caller]
fn assert_nothing_left(pair: &mut Pair) {
    pair.step_producers();
    for (consumer, workers) in pair.consumers.iter().zip(&pair.workers) {
        assert_eq!(consumer.open(), (0, 0));
        assert_eq!(workers.unreported().count(), 0, "workers owe a report");
    }
    assert_eq!(pair.held(), 0, "blocks still held");
}

/// The one failure counted so far: its reason and field.
#[track_caller]
fn assert_failed(consumer: &Consumer, reason: FailureReason, field: &str) {
    let failures: Vec<_> = consumer.counts().failures.iter().collect();
    assert_eq!(failures, [(&(reason, field.to_owned()), &1)]);
}

/// Text of all notes since the last call.
fn notes(consumer: &mut Consumer) -> String {
    let notes = consumer.take_notes();
    let texts: Vec<_> = notes.into_iter().map(|note| note.text).collect();
    texts.join("\n")
}

fn require_kv(options: ConsumerOptions) -> ConsumerOptions {
    ConsumerOptions {
        require_kv: true,
        ..options
    }
}
