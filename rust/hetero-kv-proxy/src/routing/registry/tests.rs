//! Whatever happens to a pool, it picks what a plain one picks that remembers nothing between picks.

mod plain;

use super::super::policy::{KeyParts, RequestKey};
use super::super::{BreakerRules, EngineLoad, Field, KindSet, Kinds, LegFault, Traits};
use super::*;
use plain::{Plain, PlainLeg};
use proptest::prelude::*;
use proptest::sample::Index;

const RULES: HealthRules = HealthRules {
    failures_max: 2,
    fresh_ms: 500,
    breaker: BreakerRules {
        failures_max: 1,
        open_ms: 150,
    },
};
const KINDS: usize = 3;
const RANKS_MAX: usize = 4;
const PROMPTS: u8 = 4;

/// Something that happens. Who it happens to is an index into those that there are.
#[derive(Debug, Clone)]
enum Event {
    Pick(Wish),
    PickAt(Index),
    Release(Index),
    Pass {
        ms: u64,
    },
    Answered(Index),
    Served(Index, u64),
    Failed(Index, bool, u64),
    ProbeAnswered(Index),
    ProbeFailed(Index),
    Unreachable(Index),
    Weigh(Index, u32),
    Stand(Index, Standing),
    Tell(Index, usize),
    Scrape {
        of: Index,
        loads: [(u32, u16); RANKS_MAX],
        own: u32,
        ago_ms: u64,
    },
    Come(u32, Trust),
    Go(Index),
    Set(PolicyKind, u32, u64, bool),
}

/// What a leg is wanted for.
#[derive(Debug, Clone)]
struct Wish {
    prompt: u8,
    bytes: usize,
    avoid: Vec<Index>,
    shun: Vec<Index>,
    /// A bit for each kind.
    among: Option<u8>,
    /// Asks of different threads do not come in the order of their times.
    ago_ms: u64,
}

fn who() -> impl Strategy<Value = Index> {
    any::<Index>()
}

fn few() -> impl Strategy<Value = Vec<Index>> {
    // Most requests avoid nobody.
    prop_oneof![4 => Just(Vec::new()), 1 => prop::collection::vec(who(), 1..4)]
}

fn wish() -> impl Strategy<Value = Wish> {
    let among = prop_oneof![
        4 => Just(None),
        1 => (1_u8..1 << KINDS).prop_map(Some),
    ];
    let ago_ms = prop_oneof![4 => Just(0), 1 => 0_u64..400];
    let bytes = prop::sample::select(vec![0, 100, 300, 1_500, 5_000]);
    (0..PROMPTS, bytes, few(), few(), among, ago_ms).prop_map(
        |(prompt, bytes, avoid, shun, among, ago_ms)| Wish {
            prompt,
            bytes,
            avoid,
            shun,
            among,
            ago_ms,
        },
    )
}

fn policy() -> impl Strategy<Value = PolicyKind> {
    prop::sample::select(PolicyKind::ALL.to_vec())
}

fn event() -> impl Strategy<Value = Event> {
    let standing = prop::sample::select(vec![
        Standing::Serving,
        Standing::Serving,
        Standing::Drained,
        Standing::Leaving,
    ]);
    let weight = prop::sample::select(vec![0, 1, 1, 2, 3, 7, 999, 1_000]);
    let trust = prop::sample::select(vec![Trust::Given, Trust::Probed]);
    let loads = prop::array::uniform4((0_u32..6, 0_u16..1_001));
    let legs_max = prop::sample::select(vec![1, 2, 5, u32::MAX]);
    prop_oneof![
        30 => wish().prop_map(Event::Pick),
        1 => who().prop_map(Event::PickAt),
        12 => who().prop_map(Event::Release),
        3 => (1_u64..250).prop_map(|ms| Event::Pass { ms }),
        1 => who().prop_map(Event::Answered),
        1 => (who(), 0_u64..200).prop_map(|(of, ms)| Event::Served(of, ms)),
        4 => (who(), any::<bool>(), 0_u64..2).prop_map(|(of, out, ms)| Event::Failed(of, out, ms)),
        1 => who().prop_map(Event::ProbeAnswered),
        1 => who().prop_map(Event::ProbeFailed),
        1 => who().prop_map(Event::Unreachable),
        1 => (who(), weight).prop_map(|(of, weight)| Event::Weigh(of, weight)),
        1 => (who(), standing).prop_map(|(of, standing)| Event::Stand(of, standing)),
        1 => (who(), 0..KINDS).prop_map(|(of, kind)| Event::Tell(of, kind)),
        4 => (who(), loads, 0_u32..3, 0_u64..600)
            .prop_map(|(of, loads, own, ago_ms)| Event::Scrape { of, loads, own, ago_ms }),
        1 => (1..=RANKS_MAX as u32, trust).prop_map(|(dp, trust)| Event::Come(dp, trust)),
        1 => who().prop_map(Event::Go),
        1 => (policy(), legs_max, 0_u64..800, any::<bool>())
            .prop_map(|(kind, legs, fresh, outlook)| Event::Set(kind, legs, fresh, outlook)),
    ]
}

fn spec(number: usize, dp: u32) -> InstanceSpec {
    InstanceSpec {
        url: format!("http://engine-{number}:8000"),
        dp,
        rank0: 2,
    }
}

/// A pool, a plain one, and the legs of both.
struct Both {
    pool: Pool,
    plain: Plain,
    legs: Vec<(Picked, PlainLeg)>,
    kinds: Vec<KindId>,
    /// The indexes of all that are there.
    there: Vec<InstanceIndex>,
    came: usize,
    now_ms: u64,
}

impl Both {
    fn new(policy: PolicyKind, dps: &[u32]) -> Self {
        let mut kinds = Kinds::default();
        let tell = |name| Traits::default().with(Field::Model, name);
        let mut both = Self {
            pool: Pool::new(Role::Decode, Vec::new(), policy, RULES).with_load_fresh_ms(300),
            plain: Plain::new(Role::Decode, policy, RULES, 300),
            legs: Vec::new(),
            kinds: ["a", "b", "c"]
                .map(|name| kinds.enter(&tell(name)))
                .to_vec(),
            there: Vec::new(),
            came: 0,
            now_ms: 1_000,
        };
        dps.iter().for_each(|dp| both.come(*dp, Trust::Given));
        both
    }

    fn come(&mut self, dp: u32, trust: Trust) {
        let spec = spec(self.came, dp);
        self.came += 1;
        let index = self.pool.add(spec.clone(), trust, Standing::Serving);
        self.plain.add(index, spec, trust);
        self.there.push(index);
    }

    fn who(&self, of: &Index) -> Option<InstanceIndex> {
        (!self.there.is_empty()).then(|| *of.get(&self.there))
    }

    fn pick(&mut self, wish: &Wish) -> Result<(), TestCaseError> {
        let prompt = [b'a' + wish.prompt; 5_000];
        let key = RequestKey::new(&KeyParts {
            prompt: &prompt[..wish.bytes],
            prompt_bytes: 256,
            ..KeyParts::default()
        });
        let all = |of: &[Index]| -> Vec<InstanceIndex> {
            of.iter().filter_map(|of| self.who(of)).collect()
        };
        let (avoid, shun) = (all(&wish.avoid), all(&wish.shun));
        let among: Option<KindSet> = wish.among.map(|among| {
            let kinds = self.kinds.iter().enumerate();
            let chosen = kinds.filter(|(at, _)| among >> at & 1 == 1);
            chosen.map(|(_, kind)| *kind).collect()
        });
        let ask = Ask {
            key: &key,
            avoid: &avoid,
            shun: &shun,
            among: among.as_ref(),
            now_ms: self.now_ms - wish.ago_ms,
        };
        prop_assert_eq!(self.pool.outlook(&ask), self.plain.outlook(&ask));
        if let Some(among) = &among {
            let best = self.pool.best_tier(among, ask.now_ms);
            prop_assert_eq!(best, self.plain.best_tier(among, ask.now_ms));
        }
        let takes_some = !self.pool.routable().is_empty();
        prop_assert_eq!(self.pool.has_routable(), takes_some);
        for kind in &self.kinds {
            let (all, routable) = self.plain.has_kind(*kind);
            prop_assert_eq!(self.pool.kinds().contains(*kind), all);
            prop_assert_eq!(self.pool.routable_kinds().contains(*kind), routable);
        }
        let (picked, plain) = (self.pool.pick(&ask), self.plain.pick(&ask));
        self.compare(picked, plain)
    }

    fn compare(
        &mut self,
        picked: Result<Picked, NoSlot>,
        plain: Result<PlainLeg, NoSlot>,
    ) -> Result<(), TestCaseError> {
        let slot = |picked: &Picked| (picked.instance, picked.rank, picked.rank_header);
        prop_assert_eq!(
            picked.as_ref().map(slot),
            plain
                .as_ref()
                .map(|leg| (leg.instance, leg.rank, leg.rank_header))
        );
        self.legs.extend(picked.ok().zip(plain.ok()));
        Ok(())
    }

    fn meet(&mut self, event: &Event) -> Result<(), TestCaseError> {
        let now_ms = self.now_ms;
        match event {
            Event::Pick(wish) => return self.pick(wish),
            Event::PickAt(of) => {
                if let Some(of) = self.who(of) {
                    let picked = self.pool.pick_at(of, now_ms);
                    let plain = self.plain.pick_at(of, now_ms);
                    return self.compare(picked, plain);
                }
            }
            Event::Release(which) => {
                if !self.legs.is_empty() {
                    let (picked, leg) = self.legs.swap_remove(which.index(self.legs.len()));
                    self.pool.release(picked.slot);
                    self.plain.release(leg);
                }
            }
            Event::Pass { ms } => self.now_ms += ms,
            Event::Come(dp, trust) => self.come(*dp, *trust),
            Event::Set(policy, legs_max, load_fresh_ms, outlook) => {
                let settings = PoolSettings {
                    policy: *policy,
                    outlook: *outlook,
                    legs_max: *legs_max,
                    load_fresh_ms: *load_fresh_ms,
                    health: RULES,
                };
                self.pool.set(settings);
                self.plain.set(settings);
            }
            Event::Answered(of)
            | Event::Served(of, _)
            | Event::Failed(of, _, _)
            | Event::ProbeAnswered(of)
            | Event::ProbeFailed(of)
            | Event::Unreachable(of)
            | Event::Weigh(of, _)
            | Event::Stand(of, _)
            | Event::Tell(of, _)
            | Event::Scrape { of, .. }
            | Event::Go(of) => {
                if let Some(of) = self.who(of) {
                    self.meet_one(of, event);
                }
            }
        }
        Ok(())
    }

    fn meet_one(&mut self, of: InstanceIndex, event: &Event) {
        let now_ms = self.now_ms;
        let (pool, plain) = (&mut self.pool, &mut self.plain);
        let known = plain.get(of);
        match event {
            Event::Answered(_) => {
                pool.on_answer(of);
                known.health.on_answer();
            }
            Event::Served(_, ago_ms) => {
                pool.on_served(of, now_ms - ago_ms, now_ms);
                known.health.on_served(now_ms - ago_ms, now_ms);
            }
            Event::Failed(_, unreachable, ago_ms) => {
                let fault = match unreachable {
                    true => LegFault::Unreachable,
                    false => LegFault::Failed,
                };
                pool.on_failed(of, fault, now_ms - ago_ms, now_ms);
                known
                    .health
                    .on_failed(&RULES, fault, now_ms - ago_ms, now_ms);
            }
            Event::ProbeAnswered(_) => {
                pool.on_probe_answered(of, now_ms);
                known.health.on_probe_answered(now_ms);
            }
            Event::ProbeFailed(_) => {
                pool.on_probe_failed(of);
                known.health.on_probe_failed(&RULES);
            }
            Event::Unreachable(_) => {
                pool.on_connect_failed(of);
                known.health.on_connect_failed();
            }
            Event::Weigh(_, weight) => {
                pool.set_weight(of, *weight);
                plain.set_weight(of, *weight);
            }
            Event::Stand(_, standing) => {
                pool.set_standing(of, *standing);
                known.standing = *standing;
            }
            Event::Tell(_, kind) => {
                pool.set_kind(of, self.kinds[*kind]);
                known.kind = self.kinds[*kind];
            }
            Event::Scrape {
                loads, own, ago_ms, ..
            } => {
                let ranks = known.spec.dp as usize;
                let loads: Vec<EngineLoad> = loads[..ranks]
                    .iter()
                    .map(|(requests, cache_used)| EngineLoad {
                        requests: *requests,
                        cache_used: *cache_used,
                    })
                    .collect();
                let own = vec![*own; ranks];
                pool.on_scraped(of, &loads, &own, now_ms - ago_ms);
                known.on_scraped(&loads, &own, now_ms - ago_ms);
            }
            Event::Go(_) => {
                pool.remove(of);
                plain.remove(of);
                self.there.retain(|there| *there != of);
            }
            Event::Pick(_)
            | Event::PickAt(_)
            | Event::Release(_)
            | Event::Pass { .. }
            | Event::Come(..)
            | Event::Set(..) => {}
        }
    }
}

#[test]
fn a_trial_that_ends_without_a_verdict_makes_way_for_the_next() {
    let specs = (0..2).map(|number| spec(number, 1)).collect();
    let mut pool = Pool::new(Role::Decode, specs, PolicyKind::RoundRobin, RULES);
    let bad = InstanceIndex(0);
    pool.on_failed(bad, LegFault::Failed, 0, 0);
    let trials = |pool: &mut Pool| -> Vec<Picked> {
        let ask = Ask {
            key: &RequestKey::default(),
            avoid: &[],
            shun: &[],
            among: None,
            now_ms: 150,
        };
        let picked = (0..4).map(|_| pool.pick(&ask).expect("a slot"));
        picked.filter(|leg| leg.instance == bad).collect()
    };
    for _ in 0..3 {
        let trials = trials(&mut pool);
        assert_eq!(trials.len(), 1);
        pool.release(trials[0].slot);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn a_pool_picks_what_a_plain_one_picks(
        policy in policy(),
        dps in prop::collection::vec(1..=RANKS_MAX as u32, 1..6),
        events in prop::collection::vec(event(), 1..150),
    ) {
        let mut both = Both::new(policy, &dps);
        for event in &events {
            both.meet(event)?;
        }
    }

    /// More slots than share a word of bits.
    #[test]
    fn a_large_pool_picks_what_a_plain_one_picks(
        policy in policy(),
        dps in prop::collection::vec(1..=RANKS_MAX as u32, 40..80),
        events in prop::collection::vec(event(), 1..300),
    ) {
        let mut both = Both::new(policy, &dps);
        for event in &events {
            both.meet(event)?;
        }
    }
}
