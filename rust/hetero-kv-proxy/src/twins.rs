//! Engines that serve both roles: one place, given, or registered, as prefill and as decode.
//!
//! Each role is a worker of its own, with its own id, slots, standing and metrics; the engine is
//! one. KV that it would hand to itself it has already, so its two workers are not paired where
//! another takes the leg, and are not asked for a transfer where the choice falls on both: both slots
//! are taken before the first leg goes out, and a leg that is sent again does without it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::app::App;
use crate::instance::Instance;
use crate::routing::{InstanceIndex, Role};
use crate::sync::lock;

/// Which workers of the two roles are one engine.
#[derive(Debug, Default)]
pub(crate) struct Twins {
    /// Whether there are any; without, nobody looks.
    any: AtomicBool,
    /// Prefill and decode.
    pairs: Mutex<Vec<(InstanceIndex, InstanceIndex)>>,
}

impl Twins {
    fn enter(&self, role: Role, index: InstanceIndex, other: InstanceIndex) {
        let mut pairs = lock(&self.pairs);
        pairs.push(match role {
            Role::Prefill => (index, other),
            Role::Decode => (other, index),
        });
        self.any.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Relaxed)
    }

    /// A worker has gone.
    pub(crate) fn leave(&self, role: Role, index: InstanceIndex) {
        if self.is_empty() {
            return;
        }
        let mut pairs = lock(&self.pairs);
        pairs.retain(|(prefill, decode)| match role {
            Role::Prefill => *prefill != index,
            Role::Decode => *decode != index,
        });
        self.any.store(!pairs.is_empty(), Ordering::Relaxed);
    }

    /// Whether this prefill and this decode worker are one engine.
    pub(crate) fn are_one(&self, prefill: InstanceIndex, decode: InstanceIndex) -> bool {
        !self.is_empty() && lock(&self.pairs).contains(&(prefill, decode))
    }

    /// The workers of `role` that are one engine with `other`, which is of the other role.
    pub(crate) fn of(&self, role: Role, other: InstanceIndex) -> Vec<InstanceIndex> {
        if self.is_empty() {
            return Vec::new();
        }
        let pairs = lock(&self.pairs);
        let of = pairs.iter().filter_map(|(prefill, decode)| match role {
            Role::Prefill => (*decode == other).then_some(*prefill),
            Role::Decode => (*prefill == other).then_some(*decode),
        });
        of.collect()
    }
}

impl App {
    /// Notes of which workers of the other role a new one is the twin.
    pub(crate) fn note_twins(&self, instance: &Instance) {
        let others = self.snapshot(instance.role.other());
        let base = &instance.worker.base;
        for other in others.iter() {
            if other.worker.base.is_same_place(base) {
                self.twins.enter(instance.role, instance.index, other.index);
            }
        }
    }

    /// Whether prefill and decode are one engine, and no other takes legs: there is nobody to hand
    /// KV over to.
    pub(crate) fn serves_alone(&self) -> bool {
        if self.twins.is_empty() {
            return false;
        }
        let [decode] = self.routable(Role::Decode)[..] else {
            return false;
        };
        let twins = self.twins.of(Role::Prefill, decode);
        let prefill = self.routable(Role::Prefill);
        !prefill.is_empty() && prefill.iter().all(|index| twins.contains(index))
    }
}
