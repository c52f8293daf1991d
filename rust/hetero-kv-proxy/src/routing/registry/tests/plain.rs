//! A pool that keeps nothing of one pick for the next: it judges every instance and lists every slot
//! each time, and its policies compare all of them.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::super::super::policy::{LEGS_FREE, PolicyKind, RequestKey, slot_identity};
use super::super::super::{
    EngineLoad, Health, HealthRules, InstanceIndex, KindId, KindSet, NoSlot, Outlook, PoolSettings,
    Role,
};
use super::super::{Ask, InstanceSpec, Standing, Trust};

/// What a slot of weight 1 moves on by a turn.
const STEP: u64 = 1 << 24;
/// Slots that a beginning is remembered for.
const WAYS: usize = 8;
/// Beginnings with the same rest share a set.
const SETS: u64 = 1 << 15;

/// A leg in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlainLeg {
    pub(super) instance: InstanceIndex,
    pub(super) rank: u32,
    pub(super) rank_header: Option<u32>,
    trial: bool,
}

#[derive(Debug, Clone, Copy)]
struct PlainRank {
    in_flight: u32,
    picked: u64,
    due: u64,
}

#[derive(Debug)]
pub(super) struct PlainInstance {
    index: InstanceIndex,
    pub(super) spec: InstanceSpec,
    pub(super) kind: KindId,
    trust: Trust,
    pub(super) standing: Standing,
    pub(super) health: Health,
    ranks: Vec<PlainRank>,
    weight: u32,
    /// When it was asked, and what it said of each rank.
    said: Option<(u64, Vec<(u32, u16)>)>,
}

impl PlainInstance {
    fn is_routable(&self) -> bool {
        let answers = self.health.has_answered() && !self.health.is_unhealthy();
        (self.trust == Trust::Given || answers) && self.standing == Standing::Serving
    }

    fn step(&self) -> u64 {
        STEP / u64::from(self.weight.max(1))
    }

    fn said(&self, now_ms: u64, fresh_ms: u64) -> Option<&[(u32, u16)]> {
        let (asked_ms, said) = self.said.as_ref()?;
        (now_ms.saturating_sub(*asked_ms) <= fresh_ms).then_some(said)
    }

    pub(super) fn on_scraped(&mut self, loads: &[EngineLoad], own: &[u32], asked_ms: u64) {
        let others = loads.iter().zip(own);
        let others =
            others.map(|(load, own)| (load.requests.saturating_sub(*own), load.cache_used));
        self.said = Some((asked_ms, others.collect()));
    }
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    /// Position among the instances.
    at: usize,
    rank: u32,
    load: u32,
    cache_used: u16,
    weight: u32,
    turn: (u64, u64),
    identity: u64,
}

impl Candidate {
    fn load_beside(&self, other: &Self) -> Ordering {
        let ours = u64::from(self.load) * u64::from(other.weight);
        ours.cmp(&(u64::from(other.load) * u64::from(self.weight)))
    }

    fn short(&self) -> u32 {
        (self.identity >> 32) as u32
    }
}

/// The pool.
#[derive(Debug)]
pub(super) struct Plain {
    role: Role,
    instances: Vec<PlainInstance>,
    rules: HealthRules,
    policy: PlainPolicy,
    reads_load: bool,
    legs_max: u32,
    fresh_ms: u64,
    picks: u64,
    turned: u64,
}

impl Plain {
    pub(super) fn new(role: Role, policy: PolicyKind, rules: HealthRules, fresh_ms: u64) -> Self {
        Self {
            role,
            instances: Vec::new(),
            rules,
            policy: PlainPolicy::new(policy),
            reads_load: policy.reads_load(),
            legs_max: u32::MAX,
            fresh_ms,
            picks: 0,
            turned: 0,
        }
    }

    pub(super) fn set(&mut self, settings: PoolSettings) {
        if settings.policy != self.policy.kind {
            self.policy = PlainPolicy::new(settings.policy);
        }
        self.reads_load = settings.policy.reads_load() || settings.outlook;
        self.legs_max = settings.legs_max;
        self.fresh_ms = settings.load_fresh_ms;
        self.rules = settings.health;
    }

    pub(super) fn add(&mut self, index: InstanceIndex, spec: InstanceSpec, trust: Trust) {
        let rank = PlainRank {
            in_flight: 0,
            picked: 0,
            due: STEP / 2,
        };
        self.instances.push(PlainInstance {
            index,
            ranks: vec![rank; spec.dp as usize],
            spec,
            kind: KindId::SILENT,
            trust,
            standing: Standing::Serving,
            health: Health::default(),
            weight: 1,
            said: None,
        });
    }

    pub(super) fn remove(&mut self, instance: InstanceIndex) {
        self.instances.retain(|known| known.index != instance);
    }

    pub(super) fn get(&mut self, instance: InstanceIndex) -> &mut PlainInstance {
        let mut known = self.instances.iter_mut();
        known
            .find(|known| known.index == instance)
            .expect("it is there")
    }

    pub(super) fn set_weight(&mut self, instance: InstanceIndex, weight: u32) {
        let turned = self.turned;
        let known = self.get(instance);
        known.weight = weight;
        let first = turned + known.step() / 2;
        for rank in &mut known.ranks {
            rank.due = rank.due.min(first);
        }
    }

    /// Whether an instance is of this kind, and whether one that takes legs is.
    pub(super) fn has_kind(&self, kind: KindId) -> (bool, bool) {
        let of_kind = || self.instances.iter().filter(|known| known.kind == kind);
        (
            of_kind().next().is_some(),
            of_kind().any(PlainInstance::is_routable),
        )
    }

    pub(super) fn best_tier(&self, among: &KindSet, now_ms: u64) -> Option<u8> {
        let routable = self.instances.iter().filter(|known| known.is_routable());
        let fitting = routable.filter(|known| among.contains(known.kind));
        fitting.map(|known| known.health.tier(now_ms)).min()
    }

    pub(super) fn outlook(&self, ask: &Ask<'_>) -> Result<Outlook, NoSlot> {
        let candidates = self.gather(ask)?;
        let loads = candidates.iter().map(|candidate| candidate.load);
        Ok(Outlook {
            load_min: loads.min().unwrap_or(u32::MAX),
            known_bytes: match self.policy.kind {
                PolicyKind::PrefixAware => self
                    .policy
                    .warmest(&candidates, ask.key)
                    .map_or(0, |(bytes, _)| bytes),
                PolicyKind::RoundRobin
                | PolicyKind::LeastLoaded
                | PolicyKind::PowerOfTwo
                | PolicyKind::ConsistentHash => 0,
            },
        })
    }

    pub(super) fn pick(&mut self, ask: &Ask<'_>) -> Result<PlainLeg, NoSlot> {
        let candidates = self.gather(ask)?;
        let chosen = candidates[self.policy.choose(&candidates, ask.key)];
        Ok(self.take(chosen.at, chosen.rank, ask.now_ms))
    }

    pub(super) fn pick_at(
        &mut self,
        instance: InstanceIndex,
        now_ms: u64,
    ) -> Result<PlainLeg, NoSlot> {
        let found = self
            .instances
            .iter()
            .position(|known| known.index == instance);
        let at = found.ok_or(NoSlot::NoEngine(self.role))?;
        if !self.instances[at].is_routable() {
            return Err(NoSlot::NoEngine(self.role));
        }
        let ranks = self.instances[at].ranks.iter().enumerate();
        let (rank, own) = ranks
            .min_by_key(|(_, own)| own.in_flight)
            .expect("it has a rank");
        match own.in_flight < self.legs_max {
            true => Ok(self.take(at, rank as u32, now_ms)),
            false => Err(NoSlot::Full),
        }
    }

    fn take(&mut self, at: usize, rank: u32, now_ms: u64) -> PlainLeg {
        let known = &mut self.instances[at];
        let trial = known.health.on_begin(now_ms);
        let step = known.step();
        let own = &mut known.ranks[rank as usize];
        own.in_flight += 1;
        self.picks += 1;
        own.picked = self.picks;
        self.turned = self.turned.max(own.due);
        own.due = self.turned + step;
        PlainLeg {
            instance: known.index,
            rank,
            rank_header: (known.spec.dp > 1).then(|| known.spec.rank0 + rank),
            trial,
        }
    }

    pub(super) fn release(&mut self, leg: PlainLeg) {
        let mut known = self.instances.iter_mut();
        let Some(known) = known.find(|known| known.index == leg.instance) else {
            return;
        };
        if leg.trial {
            known.health.on_trial_ended();
        }
        known.ranks[leg.rank as usize].in_flight -= 1;
    }

    /// The mean of what is known of slots.
    fn mean(&self, now_ms: u64) -> (u32, u16) {
        let said: Vec<(u32, u16)> = self
            .instances
            .iter()
            .filter_map(|known| known.said(now_ms, self.fresh_ms))
            .flatten()
            .copied()
            .collect();
        let count = said.len().max(1) as u64;
        let requests: u64 = said.iter().map(|one| u64::from(one.0)).sum();
        let used: u64 = said.iter().map(|one| u64::from(one.1)).sum();
        ((requests / count) as u32, (used / count) as u16)
    }

    fn gather(&self, ask: &Ask<'_>) -> Result<Vec<Candidate>, NoSlot> {
        let now_ms = ask.now_ms;
        let fits = |known: &PlainInstance| {
            known.is_routable() && ask.among.is_none_or(|among| among.contains(known.kind))
        };
        let fitting: Vec<usize> = (0..self.instances.len())
            .filter(|at| fits(&self.instances[*at]))
            .collect();
        let without = |avoid: &[InstanceIndex]| -> Vec<usize> {
            let others = fitting.iter().copied();
            others
                .filter(|at| !avoid.contains(&self.instances[*at].index))
                .collect()
        };
        let last: Vec<InstanceIndex> = ask.avoid.last().copied().into_iter().collect();
        let usable = [without(ask.avoid), without(&last), fitting.clone()]
            .into_iter()
            .find(|usable| !usable.is_empty())
            .ok_or(NoSlot::NoEngine(self.role))?;
        let tier = |at: &usize| self.instances[*at].health.tier(now_ms);
        let best = usable.iter().map(tier).min();
        let prefer = |among: Vec<usize>, prefers: &dyn Fn(&PlainInstance) -> bool| {
            let chosen: Vec<usize> = among
                .iter()
                .copied()
                .filter(|at| prefers(&self.instances[*at]))
                .collect();
            match chosen.is_empty() {
                true => among,
                false => chosen,
            }
        };
        let well: Vec<usize> = usable
            .into_iter()
            .filter(|at| Some(tier(at)) == best)
            .collect();
        let weighing = prefer(well, &|known| known.weight > 0);
        let open = prefer(weighing, &|known| !ask.shun.contains(&known.index));

        let mean = self.mean(now_ms);
        let mut candidates = Vec::new();
        for at in open {
            let known = &self.instances[at];
            let said = known.said(now_ms, self.fresh_ms);
            for (rank, own) in (0..).zip(&known.ranks) {
                if own.in_flight >= self.legs_max {
                    continue;
                }
                let (elsewhere, cache_used) = match self.reads_load {
                    true => said.map_or(mean, |said| said[rank as usize]),
                    false => (0, 0),
                };
                candidates.push(Candidate {
                    at,
                    rank,
                    load: own.in_flight + elsewhere,
                    cache_used,
                    weight: known.weight.max(1),
                    turn: (own.due, own.picked),
                    identity: slot_identity(&known.spec.url, rank),
                });
            }
        }
        candidates.sort_by_key(|candidate| {
            let dp = u64::from(self.instances[candidate.at].spec.dp);
            let place = ((2 * u64::from(candidate.rank) + 1) << 32) / (2 * dp);
            (place, candidate.at)
        });
        match candidates.is_empty() {
            true => Err(NoSlot::Full),
            false => Ok(candidates),
        }
    }
}

/// All policies.
#[derive(Debug)]
struct PlainPolicy {
    kind: PolicyKind,
    turn: usize,
    draws: u64,
    clock: u64,
    /// For each set what it remembers: tag, slot, and when it was so.
    served: BTreeMap<u64, Vec<(u32, u32, u64)>>,
}

fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

impl PlainPolicy {
    fn new(kind: PolicyKind) -> Self {
        Self {
            kind,
            turn: 0,
            draws: 0x2545_f491_4f6c_dd1d,
            clock: 0,
            served: BTreeMap::new(),
        }
    }

    fn choose(&mut self, candidates: &[Candidate], key: &RequestKey) -> usize {
        match self.kind {
            PolicyKind::RoundRobin => {
                let start = self.turn;
                self.turn += 1;
                first_around(candidates, start, |one, other| one.turn.cmp(&other.turn))
            }
            PolicyKind::LeastLoaded => self.least_loaded(candidates),
            PolicyKind::PowerOfTwo => self.power_of_two(candidates),
            PolicyKind::ConsistentHash => match key.group() {
                Some(group) => {
                    let rank =
                        |at: &usize| mix(group ^ candidates[*at].identity, 0xc2b2_ae3d_27d4_eb4f);
                    let admitted = (0..candidates.len()).filter(|at| admits(candidates, *at));
                    admitted.max_by_key(rank).expect("one is below the cap")
                }
                None => self.least_loaded(candidates),
            },
            PolicyKind::PrefixAware => {
                let warm = self.warmest(candidates, key).map(|(_, at)| at);
                let chosen = warm.unwrap_or_else(|| self.least_loaded(candidates));
                self.clock += 1;
                for prefix in key.prefixes() {
                    self.remember(*prefix, candidates[chosen].short());
                }
                chosen
            }
        }
    }

    fn least_loaded(&mut self, candidates: &[Candidate]) -> usize {
        let chosen = first_around(candidates, self.turn, |one, other| {
            let cache = (one.cache_used / 250).cmp(&(other.cache_used / 250));
            let load = one.load_beside(other).then(cache);
            load.then(one.turn.cmp(&other.turn))
        });
        self.turn = chosen + 1;
        chosen
    }

    fn draw(&mut self, below: usize) -> usize {
        const STIR: u64 = 0xd6e8_feb8_6659_fd93;
        self.draws = self.draws.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let drawn = mix(self.draws ^ STIR, STIR);
        ((u128::from(drawn) * below as u128) >> 64) as usize
    }

    fn power_of_two(&mut self, candidates: &[Candidate]) -> usize {
        let count = candidates.len();
        let first = self.draw(count);
        if count == 1 {
            return first;
        }
        let second = (first + 1 + self.draw(count - 1)) % count;
        let (one, other) = (&candidates[first], &candidates[second]);
        let both = (one.weight + other.weight) as usize;
        let second_is_less = match other.load_beside(one) {
            Ordering::Less => true,
            Ordering::Greater => false,
            Ordering::Equal => {
                one.weight != other.weight && self.draw(both) < other.weight as usize
            }
        };
        match second_is_less {
            true => second,
            false => first,
        }
    }

    fn warmest(&self, candidates: &[Candidate], key: &RequestKey) -> Option<(usize, usize)> {
        let whole = key.prompt_bytes().min(128 << 7);
        let mut found = None;
        for (level, prefix) in key.prefixes().iter().enumerate() {
            let bytes = 128 << level;
            if 4 * bytes < whole {
                continue;
            }
            let Some(served) = self.served.get(&(prefix % SETS)) else {
                continue;
            };
            let knows = |candidate: &Candidate| {
                let tag = (prefix >> 32) as u32;
                served
                    .iter()
                    .any(|one| (one.0, one.1) == (tag, candidate.short()))
            };
            let warm = (0..candidates.len())
                .filter(|at| knows(&candidates[*at]) && admits(candidates, *at));
            let emptiest = warm.min_by(|a, b| candidates[*a].load_beside(&candidates[*b]));
            found = emptiest.map(|at| (bytes, at)).or(found);
        }
        found
    }

    fn remember(&mut self, prefix: u64, slot: u32) {
        let tag = (prefix >> 32) as u32;
        let served = self.served.entry(prefix % SETS).or_default();
        served.retain(|one| (one.0, one.1) != (tag, slot));
        if served.len() == WAYS {
            let oldest = (0..WAYS).min_by_key(|at| served[*at].2);
            served.remove(oldest.expect("it is full"));
        }
        served.push((tag, slot, self.clock));
    }
}

/// The least of all candidates; of equals the first from `start` on and around.
fn first_around(
    candidates: &[Candidate],
    start: usize,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
) -> usize {
    let count = candidates.len();
    (0..count)
        .map(|step| (start + step) % count)
        .min_by(|a, b| order(&candidates[*a], &candidates[*b]))
        .expect("there is one")
}

/// A slot with a few legs, or with less than 5/4 of its share by weight of all.
fn admits(candidates: &[Candidate], at: usize) -> bool {
    let loads: u64 = candidates.iter().map(|one| u64::from(one.load)).sum();
    let weights: u64 = candidates.iter().map(|one| u64::from(one.weight)).sum();
    let (load, weight) = (candidates[at].load, u64::from(candidates[at].weight));
    load < LEGS_FREE || u64::from(load) * 4 * weights < (loads + 1) * 5 * weight
}
