//! The instances of one role as they come and go, their slots, and who is serving what.

use super::policy::{Candidate, Policy, PolicyKind, RequestKey, slot_identity};
use super::{
    EngineLoad, Health, HealthRules, HealthState, InstanceIndex, KindId, KindSet, LegFault, Role,
    Unlike,
};

mod settings;
mod weight;

pub use settings::PoolSettings;
pub use weight::WORKER_WEIGHT_MAX;
use weight::Weight;

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

/// One DP rank of one instance. It stays valid after its instance was removed: to release it is
/// then without effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotId {
    instance: InstanceIndex,
    rank: u32,
    /// Its leg tries an instance that was kept out.
    trial: bool,
}

/// What a slot is chosen by.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// What the policies go by.
    pub key: &'a RequestKey,
    /// Instances that failed the request, the last one last.
    pub avoid: &'a [InstanceIndex],
    /// Instances that do not go with the other leg's, see [`super::BadPairs`].
    pub shun: &'a [InstanceIndex],
    /// Kinds of instance to choose among; `None` is all.
    pub among: Option<&'a KindSet>,
    /// The time.
    pub now_ms: u64,
}

/// Whether an instance takes legs at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It does, as far as its health allows.
    Serving,
    /// An operator keeps it from new legs.
    Drained,
    /// It takes no leg any more and is removed when the last one has ended.
    Leaving,
}

/// Which evidence an instance needs before it takes a leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// None: an operator named it, and a wrong verdict of the probe must not turn into an outage.
    Given,
    /// Its probe has answered and does not fail: a worker that says itself that it is there says
    /// nothing of whether it can be reached.
    Probed,
}

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

/// Why no slot was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoSlot {
    /// No instance of the role takes legs.
    NoEngine(Role),
    /// Those that it would go to have as many legs as they may.
    Full,
    /// All workers of a role tell their model, and none the request's.
    NoModel,
    /// Workers of both roles take legs, and no two of them go together.
    NoPair(Box<Unlike>),
    /// No revision with a weight has workers for the legs.
    NoRevision,
}

/// What a pick would meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outlook {
    /// Load of the least loaded slot.
    pub load_min: u32,
    /// Bytes of the prompt's beginning that a slot is known to have in its cache.
    pub known_bytes: usize,
}

/// What `/workers` and `/ready` show of one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceView {
    /// Its number among those of its role.
    pub index: InstanceIndex,
    /// As configured.
    pub spec: InstanceSpec,
    /// Legs in flight for each DP rank, rank 0 first.
    pub in_flight_by_rank: Vec<u32>,
    /// Requests that each rank has from others; `None` where that is not known.
    pub elsewhere_by_rank: Option<Vec<u32>>,
    /// The present state.
    pub state: HealthState,
    /// Whether it answered recently.
    pub ready: bool,
    /// Transfers whose blocks it keeps for a decode leg.
    pub kept: u32,
    /// Whether it takes legs at all.
    pub standing: Standing,
    /// Whether it takes legs at this moment.
    pub routable: bool,
}

/// What a pick looks at for each DP rank, side by side: it looks at those of all instances.
#[derive(Debug, Clone, Copy)]
struct Rank {
    /// Legs under way.
    in_flight: u32,
    /// Number of the pick at which it was last chosen.
    picked: u64,
    /// When it is due, where turns go by weight.
    due: u64,
}

#[derive(Debug)]
struct Instance {
    index: InstanceIndex,
    spec: InstanceSpec,
    kind: KindId,
    trust: Trust,
    standing: Standing,
    health: Health,
    /// Rank 0 first.
    ranks: Vec<Rank>,
    /// How much each rank gets beside those of others.
    weight: Weight,
    /// Transfers whose blocks it keeps for a decode leg.
    kept: u32,
    /// What it does for others, by its own words.
    elsewhere: Elsewhere,
}

/// The load of an instance that is not this proxy's.
#[derive(Debug, Default)]
struct Elsewhere {
    /// When it was asked.
    asked_ms: u64,
    /// Requests and cache in use, by DP rank; empty while it was not asked.
    ranks: Vec<(u32, u16)>,
    /// Of all ranks together.
    sums: (u64, u64),
}

impl Elsewhere {
    /// What is known at `now_ms`: an answer older than `fresh_ms` says nothing.
    fn known(&self, now_ms: u64, fresh_ms: u64) -> Option<&Self> {
        let fresh = now_ms.saturating_sub(self.asked_ms) <= fresh_ms;
        (fresh && !self.ranks.is_empty()).then_some(self)
    }
}

impl Instance {
    fn is_routable(&self) -> bool {
        let trusted = match self.trust {
            Trust::Given => true,
            Trust::Probed => self.health.has_answered() && !self.health.is_unhealthy(),
        };
        trusted && self.standing == Standing::Serving
    }

    fn in_flight(&self) -> Vec<u32> {
        self.ranks.iter().map(|rank| rank.in_flight).collect()
    }

    fn is_idle(&self) -> bool {
        self.kept == 0 && self.ranks.iter().all(|rank| rank.in_flight == 0)
    }
}

/// One place in the round of all slots.
#[derive(Debug, Clone, Copy)]
struct Slot {
    /// Position in [`Pool::instances`].
    at: usize,
    rank: u32,
    /// Of the engine and the rank, whatever else comes or goes.
    identity: u64,
}

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
    slots: Vec<Slot>,
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
    marks: Vec<Mark>,
    candidates: Vec<Candidate>,
}

/// What a pick finds of one instance.
#[derive(Debug, Clone, Copy)]
struct Mark {
    /// Of its health, where it may take the leg.
    tier: Option<u8>,
    /// Its slots may be chosen.
    open: bool,
    /// Its load elsewhere is known.
    told: bool,
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
            slots: Vec::new(),
            picks: 0,
            turned: 0,
            policy: policy.build(),
            policy_kind: policy,
            reads_load: policy.reads_load(),
            load_fresh_ms: 0,
            rules,
            marks: Vec::new(),
            candidates: Vec::new(),
        };
        for spec in specs {
            pool.add(spec, Trust::Given, Standing::Serving);
        }
        pool
    }

    /// The same pool with at most `legs_max` legs in flight for each slot.
    #[must_use]
    pub fn with_legs_max(mut self, legs_max: u32) -> Self {
        self.legs_max = legs_max;
        self
    }

    /// The same pool, in which what engines say of their load is good for `fresh_ms`.
    #[must_use]
    pub fn with_load_fresh_ms(mut self, fresh_ms: u64) -> Self {
        self.load_fresh_ms = fresh_ms;
        self
    }

    /// The same pool, which is asked for its [`Pool::outlook`]: its load counts whatever the policy.
    #[must_use]
    pub fn with_outlook(mut self) -> Self {
        self.reads_load = true;
        self
    }

    /// Whether the policy, or somebody else, goes by load.
    pub fn reads_load(&self) -> bool {
        self.reads_load
    }

    /// Legs in flight at an instance by DP rank; none where it is not there.
    pub fn legs(&self, instance: InstanceIndex) -> Vec<u32> {
        let at = self.position(instance);
        at.map(|at| self.instances[at].in_flight())
            .unwrap_or_default()
    }

    /// An instance was asked for its load at `asked_ms` and said `loads`, one for each DP rank. Of
    /// these requests `own` are this proxy's, which are counted here anyhow, and better.
    pub fn on_scraped(
        &mut self,
        instance: InstanceIndex,
        loads: &[EngineLoad],
        own: &[u32],
        asked_ms: u64,
    ) {
        let Some(known) = self.get_mut(instance) else {
            return;
        };
        if loads.len() != known.ranks.len() || own.len() != loads.len() {
            return;
        }
        let ranks = loads.iter().zip(own);
        let ranks: Vec<(u32, u16)> = ranks
            .map(|(load, own)| (load.requests.saturating_sub(*own), load.cache_used))
            .collect();
        known.elsewhere = Elsewhere {
            asked_ms,
            sums: ranks.iter().fold((0, 0), |(requests, used), rank| {
                (requests + u64::from(rank.0), used + u64::from(rank.1))
            }),
            ranks,
        };
    }

    /// The mean of what slots do for others, over those of which it is known: a slot of which it is
    /// not is neither a haven nor shunned.
    fn elsewhere_mean(&self, now_ms: u64) -> (u32, u16) {
        let known = |instance: &Instance| {
            let known = instance.elsewhere.known(now_ms, self.load_fresh_ms)?;
            Some((known.sums, known.ranks.len() as u64))
        };
        let (mut requests, mut used, mut count) = (0_u64, 0_u64, 0_u64);
        for (sums, ranks) in self.instances.iter().filter_map(known) {
            requests = requests.saturating_add(sums.0);
            used += sums.1;
            count += ranks;
        }
        let mean = |sum: u64| sum.checked_div(count).unwrap_or(0);
        (
            u32::try_from(mean(requests)).unwrap_or(u32::MAX),
            u16::try_from(mean(used)).unwrap_or(u16::MAX),
        )
    }

    /// Takes in an instance of which nothing is known yet, under an index that no other had.
    pub fn add(&mut self, spec: InstanceSpec, trust: Trust, standing: Standing) -> InstanceIndex {
        let index = InstanceIndex(self.next);
        self.next += 1;
        self.instances.push(Instance {
            index,
            ranks: vec![
                Rank {
                    in_flight: 0,
                    picked: 0,
                    due: Weight::default().first_due(0),
                };
                spec.dp as usize
            ],
            weight: Weight::default(),
            spec,
            kind: KindId::SILENT,
            trust,
            standing,
            health: Health::default(),
            kept: 0,
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
            let url = &instance.spec.url;
            let ranks = 0..instance.spec.dp;
            self.slots.extend(ranks.map(|rank| Slot {
                at,
                rank,
                identity: slot_identity(url, rank),
            }));
        }
        let instances = &self.instances;
        // Rank r of dp sits at (2r+1)/(2dp) of the round.
        self.slots.sort_by_key(|slot| {
            let dp = u64::from(instances[slot.at].spec.dp);
            let place = (2 * u64::from(slot.rank) + 1) * PLACES / (2 * dp);
            (place, slot.at)
        });
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

    /// Number of instances, whether they take legs or not.
    pub fn instance_count(&self) -> usize {
        self.instances.len()
    }

    /// The instances that take legs at this moment.
    pub fn routable(&self) -> Vec<InstanceIndex> {
        let routable = self.instances.iter().filter(|known| known.is_routable());
        routable.map(|known| known.index).collect()
    }

    /// What an instance tells of itself, by its kind.
    pub fn set_kind(&mut self, instance: InstanceIndex, kind: KindId) {
        if let Some(known) = self.get_mut(instance) {
            known.kind = kind;
        }
    }

    /// The kind of an instance; `None` where it is not there.
    pub fn kind(&self, instance: InstanceIndex) -> Option<KindId> {
        let at = self.position(instance)?;
        Some(self.instances[at].kind)
    }

    /// The kinds of all instances.
    pub fn kinds(&self) -> KindSet {
        self.instances.iter().map(|known| known.kind).collect()
    }

    /// The kinds of the instances that take legs at this moment.
    pub fn routable_kinds(&self) -> KindSet {
        let routable = self.instances.iter().filter(|known| known.is_routable());
        routable.map(|known| known.kind).collect()
    }

    /// How good the best instance of these kinds is that takes legs, lower being better; `None`
    /// where there is none.
    pub fn best_tier(&self, among: &KindSet, now_ms: u64) -> Option<u8> {
        let fits = |known: &&Instance| known.is_routable() && among.contains(known.kind);
        let fitting = self.instances.iter().filter(fits);
        fitting.map(|known| known.health.tier(now_ms)).min()
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
        }
    }

    /// Whether no leg is in flight at an instance and it keeps no blocks, or it is not there.
    pub fn is_idle(&self, instance: InstanceIndex) -> bool {
        self.position(instance)
            .is_none_or(|at| self.instances[at].is_idle())
    }

    /// Chooses a slot for a request with these keys and counts it as in flight.
    ///
    /// Instances of the best health present share the load. Those to avoid are left out as long as
    /// another exists, and else only the last of them. With every instance unhealthy one is still
    /// tried, where [`Trust`] allows: a wrong verdict must not turn into an outage. An instance of
    /// lesser health is no substitute for room at a better one. Among those of the best health, the
    /// shunned are left out as long as there is another.
    ///
    /// # Errors
    /// [`NoSlot`].
    pub fn pick(&mut self, ask: &Ask<'_>) -> Result<Picked, NoSlot> {
        self.gather(ask)?;
        let chosen = self.candidates[self.policy.choose(&self.candidates, ask.key)].slot;
        let Slot { at, rank, .. } = self.slots[chosen];
        Ok(self.take(at, rank, ask.now_ms))
    }

    /// Whether [`Pool::pick`] would find a slot.
    ///
    /// # Errors
    /// Those of [`Pool::pick`].
    pub fn room(&mut self, ask: &Ask<'_>) -> Result<(), NoSlot> {
        self.gather(ask)
    }

    /// What [`Pool::pick`] would meet.
    ///
    /// # Errors
    /// Those of [`Pool::pick`].
    pub fn outlook(&mut self, ask: &Ask<'_>) -> Result<Outlook, NoSlot> {
        self.gather(ask)?;
        let loads = self.candidates.iter().map(|candidate| candidate.load);
        Ok(Outlook {
            load_min: loads.min().unwrap_or(u32::MAX),
            known_bytes: self.policy.known_bytes(&self.candidates, ask.key),
        })
    }

    /// Sets the candidates of a pick; there is at least one.
    fn gather(&mut self, ask: &Ask<'_>) -> Result<(), NoSlot> {
        let now_ms = ask.now_ms;
        let fits = |known: &Instance| {
            let among = ask.among;
            known.is_routable() && among.is_none_or(|among| among.contains(known.kind))
        };
        let last = ask.avoid.last().map_or(&[][..], std::slice::from_ref);
        let other_than = |avoid: &[InstanceIndex]| {
            let mut fitting = self.instances.iter().filter(|known| fits(known));
            fitting.any(|known| !avoid.contains(&known.index))
        };
        let avoid = [ask.avoid, last]
            .into_iter()
            .find(|avoid| other_than(avoid))
            .unwrap_or_default();
        let usable = |known: &Instance| fits(known) && !avoid.contains(&known.index);
        // Once for each instance, and not for each of its slots.
        self.marks.clear();
        self.marks.extend(self.instances.iter().map(|known| Mark {
            tier: usable(known).then(|| known.health.tier(now_ms)),
            open: false,
            told: self.reads_load && known.elsewhere.known(now_ms, self.load_fresh_ms).is_some(),
        }));
        let tiers = self.marks.iter().filter_map(|mark| mark.tier);
        let best = tiers.min().ok_or(NoSlot::NoEngine(self.role))?;
        let mut weighs = false;
        for (mark, known) in self.marks.iter_mut().zip(&self.instances) {
            mark.open = mark.tier == Some(best);
            weighs |= mark.open && !known.weight.is_zero();
        }
        // Those of weight 0 stand in where no other does.
        if weighs {
            for (mark, known) in self.marks.iter_mut().zip(&self.instances) {
                mark.open &= !known.weight.is_zero();
            }
        }
        if !ask.shun.is_empty() {
            let shunned = |known: &Instance| ask.shun.contains(&known.index);
            let mut open = self.marks.iter().zip(&self.instances);
            if open.any(|(mark, known)| mark.open && !shunned(known)) {
                for (mark, known) in self.marks.iter_mut().zip(&self.instances) {
                    mark.open &= !shunned(known);
                }
            }
        }
        let mean = match self.reads_load {
            true => self.elsewhere_mean(now_ms),
            false => (0, 0),
        };
        self.candidates.clear();
        for (slot, position) in self.slots.iter().zip(0..) {
            let mark = self.marks[slot.at];
            if !mark.open {
                continue;
            }
            let (known, rank) = (&self.instances[slot.at], slot.rank as usize);
            let own = known.ranks[rank];
            if own.in_flight >= self.legs_max {
                continue;
            }
            let (elsewhere, cache_used) = match mark.told {
                true => known.elsewhere.ranks[rank],
                false => mean,
            };
            self.candidates.push(Candidate {
                slot: position,
                load: own.in_flight.saturating_add(elsewhere),
                cache_used,
                weight: known.weight.share(),
                due: own.due,
                picked: own.picked,
                identity: slot.identity,
            });
        }
        match self.candidates.is_empty() {
            true => Err(NoSlot::Full),
            false => Ok(()),
        }
    }

    /// Takes the slot of `instance` with the fewest legs in flight, whatever its health.
    ///
    /// # Errors
    /// [`NoSlot`]; no engine where the instance takes no legs.
    pub fn pick_at(&mut self, instance: InstanceIndex, now_ms: u64) -> Result<Picked, NoSlot> {
        let (at, rank) = self.emptiest(instance)?;
        Ok(self.take(at, rank, now_ms))
    }

    /// Whether [`Pool::pick_at`] would find a slot.
    ///
    /// # Errors
    /// Those of [`Pool::pick_at`].
    pub fn room_at(&self, instance: InstanceIndex) -> Result<(), NoSlot> {
        self.emptiest(instance).map(|_| ())
    }

    /// Position and rank of the slot of `instance` with the fewest legs.
    fn emptiest(&self, instance: InstanceIndex) -> Result<(usize, u32), NoSlot> {
        let none = || NoSlot::NoEngine(self.role);
        let at = self.position(instance).ok_or_else(none)?;
        let known = &self.instances[at];
        if !known.is_routable() {
            return Err(none());
        }
        let (rank, own) = (0..)
            .zip(&known.ranks)
            .min_by_key(|(_, own)| own.in_flight)
            .ok_or_else(none)?;
        match own.in_flight >= self.legs_max {
            true => Err(NoSlot::Full),
            false => Ok((at, rank)),
        }
    }

    fn take(&mut self, at: usize, rank: u32, now_ms: u64) -> Picked {
        let known = &mut self.instances[at];
        let trial = known.health.on_begin(now_ms);
        let own = &mut known.ranks[rank as usize];
        own.in_flight += 1;
        self.picks += 1;
        own.picked = self.picks;
        self.turned = self.turned.max(own.due);
        own.due = known.weight.next_due(self.turned);
        let instance = known.index;
        Picked {
            slot: SlotId {
                instance,
                rank,
                trial,
            },
            instance,
            rank,
            rank_header: (known.spec.dp > 1).then(|| known.spec.rank0 + rank),
        }
    }

    /// Ends the leg that [`Pool::pick`] counted. True where it was the last one of an instance that
    /// takes no others.
    pub fn release(&mut self, slot: SlotId) -> bool {
        // Removed meanwhile: its count went with it.
        let Some(known) = self.get_mut(slot.instance) else {
            return false;
        };
        if slot.trial {
            known.health.on_trial_ended();
        }
        let count = &mut known.ranks[slot.rank as usize].in_flight;
        debug_assert!(*count > 0, "each pick is released once");
        *count = count.saturating_sub(1);
        known.standing != Standing::Serving && known.is_idle()
    }

    /// A transfer's blocks stay on an instance until [`Pool::unkeep`].
    pub fn keep(&mut self, instance: InstanceIndex) {
        if let Some(known) = self.get_mut(instance) {
            known.kept += 1;
        }
    }

    /// Ends what [`Pool::keep`] began; returns as [`Pool::release`].
    pub fn unkeep(&mut self, instance: InstanceIndex) -> bool {
        let Some(known) = self.get_mut(instance) else {
            return false;
        };
        debug_assert!(known.kept > 0, "what is kept ends once");
        known.kept = known.kept.saturating_sub(1);
        known.standing != Standing::Serving && known.is_idle()
    }

    /// A probe was answered well.
    pub fn on_probe_answered(&mut self, instance: InstanceIndex, now_ms: u64) {
        if let Some(known) = self.get_mut(instance) {
            known.health.on_probe_answered(now_ms);
        }
    }

    /// A leg that began at `began_ms` failed by the engine's fault.
    pub fn on_failed(
        &mut self,
        instance: InstanceIndex,
        fault: LegFault,
        began_ms: u64,
        now_ms: u64,
    ) {
        let rules = self.rules;
        if let Some(known) = self.get_mut(instance) {
            known.health.on_failed(&rules, fault, began_ms, now_ms);
        }
    }

    /// A leg that began at `began_ms` was served.
    pub fn on_served(&mut self, instance: InstanceIndex, began_ms: u64, now_ms: u64) {
        if let Some(known) = self.get_mut(instance) {
            known.health.on_served(began_ms, now_ms);
        }
    }

    /// A leg got a response head with a status below 500.
    pub fn on_answer(&mut self, instance: InstanceIndex, now_ms: u64) {
        if let Some(known) = self.get_mut(instance) {
            known.health.on_answer(now_ms);
        }
    }

    /// A probe failed.
    pub fn on_probe_failed(&mut self, instance: InstanceIndex) {
        let rules = self.rules;
        if let Some(known) = self.get_mut(instance) {
            known.health.on_probe_failed(&rules);
        }
    }

    /// Traffic could not reach the instance.
    pub fn on_connect_failed(&mut self, instance: InstanceIndex) {
        if let Some(known) = self.get_mut(instance) {
            known.health.on_connect_failed();
        }
    }

    /// The state of one instance at `now_ms`; `None` where it is not there.
    pub fn state(&self, instance: InstanceIndex, now_ms: u64) -> Option<HealthState> {
        let at = self.position(instance)?;
        Some(self.instances[at].health.state(now_ms))
    }

    /// Number of instances that take legs and answered recently.
    pub fn ready_count(&self, now_ms: u64) -> usize {
        self.instances
            .iter()
            .filter(|known| known.is_routable() && known.health.is_ready(&self.rules, now_ms))
            .count()
    }

    /// All instances, in the order of their indexes.
    pub fn view(&self, now_ms: u64) -> Vec<InstanceView> {
        self.instances
            .iter()
            .map(|known| InstanceView {
                index: known.index,
                spec: known.spec.clone(),
                in_flight_by_rank: known.in_flight(),
                elsewhere_by_rank: known
                    .elsewhere
                    .known(now_ms, self.load_fresh_ms)
                    .map(|known| known.ranks.iter().map(|(requests, _)| *requests).collect()),
                state: known.health.state(now_ms),
                ready: known.health.is_ready(&self.rules, now_ms),
                kept: known.kept,
                standing: known.standing,
                routable: known.is_routable(),
            })
            .collect()
    }
}

/// Resolution of a slot's place in the round: a common multiple is not needed, only an order.
const PLACES: u64 = 1 << 32;
