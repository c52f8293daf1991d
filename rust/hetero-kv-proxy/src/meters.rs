//! The metrics of one worker, and of one pair of workers. They are found once and kept, so that a
//! request looks nothing up by its labels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::histogram::Durations;
use crate::instance::Instance;
use crate::metrics::{InstanceLabels, LEG_OUTCOMES, LegLabels, Metrics, PairLabels, WorkerLabels};
use crate::routing::{InstanceIndex, Role};
use crate::sync::lock;

/// Histograms with labels of the set `L`.
pub type DurationsBy<L> = Family<L, Durations, fn() -> Durations>;

/// Histograms of parts of a request.
pub(crate) fn parts_by<L: Clone + std::hash::Hash + Eq>() -> DurationsBy<L> {
    Family::new_with_constructor(Durations::parts)
}

/// The metrics of one worker. Those of a worker that is removed count on, unseen.
#[derive(Debug, Default)]
pub struct Meters {
    /// In the order of [`LEG_OUTCOMES`].
    ended: [Counter; LEG_OUTCOMES.len()],
    /// From the head of a request to its first slot here.
    pub queue: Durations,
    /// Good legs, sent to ended.
    pub leg: Durations,
    /// Of a prefill worker: transfers that decode was not seen to take.
    pub left: Option<Counter>,
    /// Of a decode worker.
    pub decode: Option<DecodeMeters>,
}

/// What only a decode worker has.
#[derive(Debug)]
pub struct DecodeMeters {
    /// From sending a leg to the head of a good answer.
    pub head: Durations,
    /// From the head of a request to the first chunk of its event stream.
    pub ttft: Durations,
    /// Between the chunks of an event stream.
    pub gap: Durations,
}

impl Meters {
    /// Counts a leg that ended.
    pub(crate) fn count_leg(&self, outcome: &'static str) {
        let at = LEG_OUTCOMES.iter().position(|known| *known == outcome);
        if let Some(counter) = at.and_then(|at| self.ended.get(at)) {
            counter.inc();
        }
    }
}

fn leg_labels(role: Role, instance: &Arc<str>, outcome: &'static str) -> LegLabels {
    LegLabels {
        role: role.name(),
        instance: Arc::clone(instance),
        outcome,
    }
}

impl Metrics {
    /// The meters of the workers of this role at this address, shown from here on.
    pub(crate) fn meters(&self, role: Role, instance: &Arc<str>) -> Meters {
        let both = InstanceLabels {
            role: role.name(),
            instance: Arc::clone(instance),
        };
        let one = WorkerLabels {
            instance: Arc::clone(instance),
        };
        let (leg, left, decode) = match role {
            Role::Prefill => (
                self.prefill_leg_seconds.get_or_create_owned(&one),
                Some(self.transfers_left.get_or_create_owned(&one)),
                None,
            ),
            Role::Decode => (
                self.decode_leg_seconds.get_or_create_owned(&one),
                None,
                Some(DecodeMeters {
                    head: self.decode_head_seconds.get_or_create_owned(&one),
                    ttft: self.ttft_seconds.get_or_create_owned(&one),
                    gap: self.inter_token_seconds.get_or_create_owned(&one),
                }),
            ),
        };
        Meters {
            ended: LEG_OUTCOMES.map(|outcome| {
                let labels = leg_labels(role, instance, outcome);
                self.legs.get_or_create_owned(&labels)
            }),
            queue: self.queue_seconds.get_or_create_owned(&both),
            leg,
            left,
            decode,
        }
    }

    /// Shows the workers of this role at this address no more: addresses come and go with the
    /// engines, and their counters must not pile up.
    pub(crate) fn forget(&self, role: Role, instance: &Arc<str>) {
        for outcome in LEG_OUTCOMES {
            self.legs.remove(&leg_labels(role, instance, outcome));
        }
        self.queue_seconds.remove(&InstanceLabels {
            role: role.name(),
            instance: Arc::clone(instance),
        });
        let one = WorkerLabels {
            instance: Arc::clone(instance),
        };
        match role {
            Role::Prefill => {
                self.prefill_leg_seconds.remove(&one);
                self.transfers_left.remove(&one);
            }
            Role::Decode => {
                self.decode_leg_seconds.remove(&one);
                self.decode_head_seconds.remove(&one);
                self.ttft_seconds.remove(&one);
                self.inter_token_seconds.remove(&one);
            }
        }
    }
}

/// Pairs with metrics of their own: 16 by 16 workers. A histogram has 17 lines for each.
const PAIRS_MAX: usize = 256;
/// Stands for both workers of a pair beyond that.
const OTHER: &str = "other";

/// The metrics of the pairs that have met.
#[derive(Debug)]
pub struct Pairs {
    /// From the end of a prefill answer to the head of the decode answer.
    pub seconds: DurationsBy<PairLabels>,
    /// Decode legs with a handle that failed by the fault of an engine.
    pub failures: Family<PairLabels, Counter>,
    known: Mutex<HashMap<(InstanceIndex, InstanceIndex), Pair>>,
}

#[derive(Debug)]
struct Pair {
    labels: PairLabels,
    seconds: Durations,
    failures: Counter,
}

impl Pairs {
    pub(crate) fn new(
        seconds: DurationsBy<PairLabels>,
        failures: Family<PairLabels, Counter>,
    ) -> Self {
        Self {
            seconds,
            failures,
            known: Mutex::default(),
        }
    }

    /// A hand-over from one to the other took so long.
    pub(crate) fn took(&self, prefill: &Instance, decode: &Instance, took: Duration) {
        self.note(prefill, decode, |pair| pair.seconds.observe(took));
    }

    /// A hand-over from one to the other failed.
    pub(crate) fn failed(&self, prefill: &Instance, decode: &Instance) {
        self.note(prefill, decode, |pair| {
            pair.failures.inc();
        });
    }

    fn note(&self, prefill: &Instance, decode: &Instance, note: impl FnOnce(&Pair)) {
        let mut known = lock(&self.known);
        let key = (prefill.index, decode.index);
        if let Some(pair) = known.get(&key) {
            return note(pair);
        }
        // Whoever removes an instance cancels this first, and then waits for the lock.
        if prefill.gone.is_cancelled() || decode.gone.is_cancelled() {
            return;
        }
        if known.len() < PAIRS_MAX {
            let labels = PairLabels {
                prefill: Arc::clone(&prefill.label),
                decode: Arc::clone(&decode.label),
            };
            note(known.entry(key).or_insert_with(|| self.pair(labels)));
        } else {
            note(&self.pair(PairLabels {
                prefill: Arc::from(OTHER),
                decode: Arc::from(OTHER),
            }));
        }
    }

    fn pair(&self, labels: PairLabels) -> Pair {
        Pair {
            seconds: self.seconds.get_or_create_owned(&labels),
            failures: self.failures.get_or_create_owned(&labels),
            labels,
        }
    }

    /// Forgets all pairs of an instance whose `gone` is cancelled.
    pub(crate) fn forget(&self, instance: &Instance) {
        let mut known = lock(&self.known);
        let of_it = |key: &(InstanceIndex, InstanceIndex)| match instance.role {
            Role::Prefill => key.0 == instance.index,
            Role::Decode => key.1 == instance.index,
        };
        let gone: Vec<Pair> = known
            .extract_if(|key, _| of_it(key))
            .map(|(_, pair)| pair)
            .collect();
        for Pair { labels, .. } in gone {
            // Two starts of one engine share a label.
            if known.values().all(|pair| pair.labels != labels) {
                self.seconds.remove(&labels);
                self.failures.remove(&labels);
            }
        }
    }
}

#[cfg(test)]
mod tests;
