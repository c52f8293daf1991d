//! The instances of one role, their slots, and who is serving what.

use super::policy::{Candidate, Policy, PolicyKind};
use super::{Health, HealthRules, HealthState, InstanceIndex};

/// One instance as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceSpec {
    /// Base URL as the user wrote it.
    pub url: String,
    /// DP ranks behind this URL, at least 1.
    pub dp: u32,
    /// Header value of the first rank.
    pub rank0: u32,
}

/// Position of a slot in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotId(usize);

/// A slot that was chosen; it counts as in flight until [`Pool::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Picked {
    /// What to hand back to [`Pool::release`].
    pub slot: SlotId,
    /// The instance to send the leg to.
    pub instance: InstanceIndex,
    /// DP rank within the instance, from 0.
    pub rank: u32,
    /// Value of the DP rank header: `rank0 + rank`, and none for an instance with one rank.
    pub rank_header: Option<u32>,
}

/// What `/workers` and `/ready` show of one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceView {
    /// As configured.
    pub spec: InstanceSpec,
    /// Legs in flight for each DP rank, rank 0 first.
    pub in_flight_by_rank: Vec<u32>,
    /// The present state.
    pub state: HealthState,
    /// Whether it answered recently.
    pub ready: bool,
}

#[derive(Debug)]
struct Instance {
    spec: InstanceSpec,
    health: Health,
}

#[derive(Debug)]
struct Slot {
    instance: InstanceIndex,
    rank: u32,
    in_flight: u32,
}

/// The slots of one role. The unit of choice is (instance, DP rank), so an instance with more
/// ranks gets as many more turns.
#[derive(Debug)]
pub struct Pool {
    instances: Vec<Instance>,
    slots: Vec<Slot>,
    policy: Box<dyn Policy>,
    rules: HealthRules,
    candidates: Vec<Candidate>,
}

impl Pool {
    /// A pool over `specs`, in flag order. Slots are ordered so that consecutive turns fall on
    /// different instances as evenly as their sizes allow.
    pub fn new(specs: Vec<InstanceSpec>, policy: PolicyKind, rules: HealthRules) -> Self {
        let mut slots: Vec<Slot> = specs
            .iter()
            .enumerate()
            .flat_map(|(index, spec)| {
                (0..spec.dp).map(move |rank| Slot {
                    instance: InstanceIndex(index),
                    rank,
                    in_flight: 0,
                })
            })
            .collect();
        // Rank r of dp sits at (2r+1)/(2dp) of the round.
        slots.sort_by_key(|slot| {
            let dp = u64::from(specs[slot.instance.0].dp);
            let place = (2 * u64::from(slot.rank) + 1) * PLACES / (2 * dp);
            (place, slot.instance)
        });
        let candidates = Vec::with_capacity(slots.len());
        Self {
            instances: specs
                .into_iter()
                .map(|spec| Instance {
                    spec,
                    health: Health::default(),
                })
                .collect(),
            slots,
            policy: policy.build(),
            rules,
            candidates,
        }
    }

    /// Number of instances.
    pub fn instance_count(&self) -> usize {
        self.instances.len()
    }

    /// Chooses a slot and counts it as in flight; `None` only for a pool without slots.
    ///
    /// Instances of the best health present share the load; `avoid` is left out as long as another
    /// instance exists. With every instance unhealthy one is still tried: a wrong verdict must not
    /// turn into an outage.
    pub fn pick(&mut self, avoid: Option<InstanceIndex>) -> Option<Picked> {
        let avoid = avoid.filter(|_| self.instances.len() > 1);
        let usable = |index: usize| avoid != Some(InstanceIndex(index));
        let best = (0..self.instances.len())
            .filter(|&index| usable(index))
            .map(|index| self.instances[index].health.state().tier())
            .min()?;
        self.candidates.clear();
        for (slot, at) in self.slots.iter().zip(0..) {
            let index = slot.instance.0;
            if usable(index) && self.instances[index].health.state().tier() == best {
                self.candidates.push(Candidate {
                    slot: at,
                    in_flight: slot.in_flight,
                });
            }
        }
        let chosen = self.candidates[self.policy.choose(&self.candidates)].slot;
        Some(self.take(chosen))
    }

    /// Takes the slot of `instance` with the fewest legs in flight, whatever its health.
    pub fn pick_at(&mut self, instance: InstanceIndex) -> Option<Picked> {
        let slots = self.slots.iter().zip(0..);
        let (_, chosen) = slots
            .filter(|(slot, _)| slot.instance == instance)
            .min_by_key(|(slot, _)| slot.in_flight)?;
        Some(self.take(chosen))
    }

    fn take(&mut self, chosen: usize) -> Picked {
        let slot = &mut self.slots[chosen];
        slot.in_flight += 1;
        let spec = &self.instances[slot.instance.0].spec;
        Picked {
            slot: SlotId(chosen),
            instance: slot.instance,
            rank: slot.rank,
            rank_header: (spec.dp > 1).then(|| spec.rank0 + slot.rank),
        }
    }

    /// Ends the leg that [`Pool::pick`] counted.
    pub fn release(&mut self, slot: SlotId) {
        let slot = &mut self.slots[slot.0];
        debug_assert!(slot.in_flight > 0, "each pick is released once");
        slot.in_flight = slot.in_flight.saturating_sub(1);
    }

    /// A probe was answered well, or a leg got a response head.
    pub fn on_answer(&mut self, instance: InstanceIndex, now_ms: u64) {
        self.instances[instance.0].health.on_answer(now_ms);
    }

    /// A probe failed.
    pub fn on_probe_failed(&mut self, instance: InstanceIndex) {
        self.instances[instance.0]
            .health
            .on_probe_failed(&self.rules);
    }

    /// Traffic could not reach the instance.
    pub fn on_connect_failed(&mut self, instance: InstanceIndex) {
        self.instances[instance.0].health.on_connect_failed();
    }

    /// The state of one instance.
    pub fn state(&self, instance: InstanceIndex) -> HealthState {
        self.instances[instance.0].health.state()
    }

    /// Number of instances that answered recently.
    pub fn ready_count(&self, now_ms: u64) -> usize {
        self.instances
            .iter()
            .filter(|instance| instance.health.is_ready(&self.rules, now_ms))
            .count()
    }

    /// All instances, in flag order.
    pub fn view(&self, now_ms: u64) -> Vec<InstanceView> {
        let mut views: Vec<InstanceView> = self
            .instances
            .iter()
            .map(|instance| InstanceView {
                spec: instance.spec.clone(),
                in_flight_by_rank: vec![0; instance.spec.dp as usize],
                state: instance.health.state(),
                ready: instance.health.is_ready(&self.rules, now_ms),
            })
            .collect();
        for slot in &self.slots {
            views[slot.instance.0].in_flight_by_rank[slot.rank as usize] = slot.in_flight;
        }
        views
    }
}

/// Resolution of a slot's place in the round: a common multiple is not needed, only an order.
const PLACES: u64 = 1 << 32;
