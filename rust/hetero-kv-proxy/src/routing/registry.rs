//! The instances of one role as they come and go, and their slots.

use super::policy::{Policy, PolicyKind, Round, slot_identity};
use super::{Health, HealthRules, InstanceIndex, KindId, Role};

mod census;
mod instance;
mod leg;
mod loads;
mod reach;
mod settings;
mod span;
mod verdict;
mod view;
mod weight;

pub use instance::{InstanceSpec, Standing, Trust};
pub use leg::{Ask, NoSlot, Outlook, Picked, SlotId};
pub use settings::PoolSettings;
pub use view::InstanceView;
pub use weight::WORKER_WEIGHT_MAX;

use census::Census;
use instance::{Instance, Rank};
use loads::{Elsewhere, Told};
use reach::Reach;
use weight::Weight;

/// The slots of one role. The unit of choice is (instance, DP rank), so an instance with more
/// ranks gets as many more turns.
#[derive(Debug)]
pub struct Pool {
    role: Role,
    /// Most legs in flight for each slot.
    legs_max: u32,
    /// In the order of their indexes.
    instances: Vec<Instance>,
    /// One more than the last index given; none is given twice.
    next: usize,
    census: Census,
    slots: Vec<Slot>,
    /// What the policy sees of them.
    round: Round,
    /// For whom the round says which slots may be chosen.
    reach: Reach,
    /// For when the round says what slots have to do.
    told: Told,
    /// Picks so far.
    picks: u64,
    /// Where turns by weight have come to: nobody saves up turns from before.
    turned: u64,
    policy: Box<dyn Policy>,
    policy_kind: PolicyKind,
    reads_load: bool,
    /// Age at which what an engine said of its load says nothing any more.
    load_fresh_ms: u64,
    rules: HealthRules,
}

/// One place in the round of all slots.
#[derive(Debug, Clone, Copy)]
struct Slot {
    /// Position in [`Pool::instances`].
    at: usize,
    rank: u32,
}

impl Pool {
    /// A pool over `specs`, in flag order, whose slots have no limit of legs.
    pub fn new(
        role: Role,
        specs: Vec<InstanceSpec>,
        policy: PolicyKind,
        rules: HealthRules,
    ) -> Self {
        let mut pool = Self {
            role,
            legs_max: u32::MAX,
            instances: Vec::new(),
            next: 0,
            census: Census::default(),
            slots: Vec::new(),
            round: Round::default(),
            reach: Reach::default(),
            told: Told::default(),
            picks: 0,
            turned: 0,
            policy: policy.build(),
            policy_kind: policy,
            reads_load: policy.reads_load(),
            load_fresh_ms: 0,
            rules,
        };
        for spec in specs {
            pool.add(spec, Trust::Given, Standing::Serving);
        }
        pool
    }

    /// Takes in an instance of which nothing is known yet, under an index that no other had.
    pub fn add(&mut self, spec: InstanceSpec, trust: Trust, standing: Standing) -> InstanceIndex {
        let index = InstanceIndex(self.next);
        self.next += 1;
        let rank = Rank {
            in_flight: 0,
            picked: 0,
            due: Weight::default().first_due(0),
            place: 0,
        };
        self.instances.push(Instance {
            index,
            ranks: vec![rank; spec.dp as usize],
            weight: Weight::default(),
            spec,
            kind: KindId::SILENT,
            trust,
            standing,
            health: Health::default(),
            kept: 0,
            left: std::collections::VecDeque::new(),
            elsewhere: Elsewhere::default(),
        });
        self.order_slots();
        index
    }

    /// Takes an instance out, with whatever legs it has; false where it is not there.
    pub fn remove(&mut self, instance: InstanceIndex) -> bool {
        let found = self.position(instance);
        if let Some(at) = found {
            self.instances.remove(at);
            self.order_slots();
        }
        found.is_some()
    }

    /// Orders the slots so that consecutive turns fall on different instances as evenly as their
    /// sizes allow.
    fn order_slots(&mut self) {
        self.slots.clear();
        for (at, instance) in self.instances.iter().enumerate() {
            let ranks = 0..instance.spec.dp;
            self.slots.extend(ranks.map(|rank| Slot { at, rank }));
        }
        let instances = &mut self.instances;
        // Rank r of dp sits at (2r+1)/(2dp) of the round.
        self.slots.sort_by_key(|slot| {
            let dp = u64::from(instances[slot.at].spec.dp);
            let place = (2 * u64::from(slot.rank) + 1) * PLACES / (2 * dp);
            (place, slot.at)
        });
        let placed = self.slots.iter().enumerate().map(|(place, slot)| {
            let instance = &mut instances[slot.at];
            instance.ranks[slot.rank as usize].place = place;
            slot_identity(&instance.spec.url, slot.rank)
        });
        self.round = Round::new(placed.collect());
        self.told.forget();
        self.changed();
    }

    /// Who there is, who takes legs, or how good one is has changed.
    fn changed(&mut self) {
        self.reach.forget();
        self.census.count(&self.instances);
    }

    fn position(&self, instance: InstanceIndex) -> Option<usize> {
        self.instances
            .binary_search_by_key(&instance, |known| known.index)
            .ok()
    }

    fn get_mut(&mut self, instance: InstanceIndex) -> Option<&mut Instance> {
        let at = self.position(instance)?;
        self.instances.get_mut(at)
    }

    /// What an instance tells of itself, by its kind.
    pub fn set_kind(&mut self, instance: InstanceIndex, kind: KindId) {
        if let Some(known) = self.get_mut(instance) {
            known.kind = kind;
            self.changed();
        }
    }

    /// The kind of an instance; `None` where it is not there.
    pub fn kind(&self, instance: InstanceIndex) -> Option<KindId> {
        let at = self.position(instance)?;
        Some(self.instances[at].kind)
    }

    /// Whether an instance takes legs at all; `None` where it is not there.
    pub fn standing(&self, instance: InstanceIndex) -> Option<Standing> {
        let at = self.position(instance)?;
        Some(self.instances[at].standing)
    }

    /// Changes it. Legs in flight go on.
    pub fn set_standing(&mut self, instance: InstanceIndex, standing: Standing) {
        if let Some(known) = self.get_mut(instance) {
            known.standing = standing;
            self.changed();
        }
    }
}

/// Resolution of a slot's place in the round: a common multiple is not needed, only an order.
const PLACES: u64 = 1 << 32;

#[cfg(test)]
mod tests;
