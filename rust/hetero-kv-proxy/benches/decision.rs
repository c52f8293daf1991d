//! How long the proxy takes to choose a slot among 64 workers of 8 DP ranks, by policy.
//!
//! `cargo bench -p hetero-kv-proxy --bench decision`. A decision is the making of the keys from the
//! request's bytes, where the policy reads them, and the pick from the pool. Loads move all the
//! while: as many legs are in flight as there are slots. Conversations of 200 bytes to 25 KB,
//! three in four of them known. Exit status 1 when the bar of 5 us is missed at p99 under
//! `prefix-aware`, or when 10^6 distinct prompts grow the process by more than 1 MiB behind the
//! first 10^5.
//!
//! `told` is the same where workers tell of themselves, two models in two revisions each, revisions
//! have weights, and engines say their load, another one anew before each decision: a decision is then
//! also the finding of those workers of both roles that go together.

use std::collections::VecDeque;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use hetero_kv_proxy::routing::policy::{KeyParts, PolicyKind, RequestKey};
use hetero_kv_proxy::routing::{
    Ask, Bound, BreakerRules, Draw, EngineLoad, Field, Fit, HealthRules, InstanceIndex,
    InstanceSpec, Kinds, Pool, Role, Traits, Weights, draw_of_turn,
};

const WORKERS: usize = 64;
const RANKS: u32 = 8;
const DECISIONS: usize = 200_000;
const BAR: Duration = Duration::from_micros(5);
const GROWTH_BYTES_MAX: u64 = 1 << 20;
const PROMPT_BYTES_MAX: usize = 200 << 7;

fn pool(policy: PolicyKind) -> Pool {
    let specs = (0..WORKERS)
        .map(|worker| InstanceSpec {
            url: format!("http://10.0.0.{worker}:8000"),
            dp: RANKS,
            rank0: 0,
        })
        .collect();
    let rules = HealthRules {
        failures_max: 3,
        fresh_ms: 9_000,
        breaker: BreakerRules {
            failures_max: 5,
            open_ms: 5_000,
        },
    };
    Pool::new(Role::Prefill, specs, policy, rules)
}

/// Numbers that look drawn (Marsaglia's xorshift).
struct Draws(u64);

impl Draws {
    fn below(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}

fn keys(prompt: &[u8]) -> RequestKey {
    RequestKey::new(&KeyParts {
        model: b"\"model\"",
        prompt,
        session: None,
        prompt_bytes: 256,
    })
}

fn ask(key: &RequestKey) -> Ask<'_> {
    Ask {
        key,
        avoid: &[],
        shun: &[],
        among: None,
        now_ms: 0,
    }
}

/// An engine says that it has so many requests of others on each rank.
fn say_load(pool: &mut Pool, worker: usize, requests: u32) {
    let load = EngineLoad {
        requests,
        cache_used: worker as u16 * 10,
    };
    let loads = [load; RANKS as usize];
    pool.on_scraped(InstanceIndex(worker), &loads, &[0; RANKS as usize], 0);
}

/// What workers of both roles tell.
struct Told {
    kinds: Kinds,
    decode: Pool,
    weights: Weights,
}

impl Told {
    /// Lets the workers of `prefill` tell, and as many of decode.
    fn new(prefill: &mut Pool) -> Self {
        let mut kinds = Kinds::default();
        let mut decode = pool(PolicyKind::LeastLoaded);
        for pool in [prefill, &mut decode] {
            for worker in 0..WORKERS {
                let traits = Traits::default()
                    .with(Field::Model, ["m", "n"][worker % 2])
                    .with(Field::Revision, ["a", "b"][worker / 2 % 2])
                    .with(Field::Dtype, "bfloat16");
                let kind = kinds.enter(&traits);
                pool.set_kind(InstanceIndex(worker), kind);
                say_load(pool, worker, worker as u32 % 5);
            }
        }
        let weights = Weights::parse("a=95,b=5").expect("invariant: valid");
        Self {
            kinds,
            decode,
            weights: weights.expect("invariant: not empty"),
        }
    }

    fn fit(&self, prefill: &Pool, turn: u64) -> Fit {
        let bound = Bound {
            model: Some("m"),
            draw: Some(Draw {
                weights: &self.weights,
                number: draw_of_turn(turn),
            }),
            ..Bound::default()
        };
        Fit::pair(&self.kinds, prefill, &self.decode, &bound, 0)
            .expect("invariant: there are pairs")
    }
}

/// The times of all decisions, sorted.
fn time(policy: PolicyKind, told: bool) -> Vec<Duration> {
    let mut pool = pool(policy).with_load_fresh_ms(1);
    let told = told.then(|| Told::new(&mut pool));
    let mut draws = Draws(88_172_645_463_325_252);
    let mut text: Vec<u8> = (0..PROMPT_BYTES_MAX)
        .map(|at| b' ' + (at % 90) as u8)
        .collect();
    let mut held = VecDeque::new();
    let mut times = Vec::with_capacity(DECISIONS);
    let mut fresh = 0_u64;
    for _ in 0..DECISIONS {
        let known = draws.below(4) > 0 && fresh > 0;
        let conversation = match known {
            true => draws.below(fresh.min(20_000) as usize) as u64,
            false => fresh,
        };
        fresh += u64::from(!known);
        text[..8].copy_from_slice(&conversation.to_le_bytes());
        let bytes = 200 << draws.below(8);
        let prompt = &text[..bytes];
        if told.is_some() {
            say_load(&mut pool, times.len() % WORKERS, draws.below(5) as u32);
        }
        let start = Instant::now();
        let key = match policy.reads_key() {
            true => keys(black_box(prompt)),
            false => RequestKey::default(),
        };
        let fit = told
            .as_ref()
            .map(|told| told.fit(&pool, times.len() as u64));
        let ask = Ask {
            among: fit.as_ref().map(|fit| &fit.prefill),
            ..ask(&key)
        };
        let picked = pool.pick(&ask).expect("invariant: the pool has slots");
        times.push(start.elapsed());
        held.push_back(picked.slot);
        if held.len() > WORKERS * RANKS as usize {
            let at = draws.below(held.len());
            let ended = held
                .swap_remove_back(at)
                .expect("invariant: drawn below its length");
            pool.release(ended);
        }
    }
    times.sort_unstable();
    times
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let resident = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    resident.unwrap_or(0) * 4_096
}

/// Resident memory after 10^5 and after 10^6 distinct prompts under `prefix-aware`.
fn memory() -> (u64, u64) {
    let mut pool = pool(PolicyKind::PrefixAware);
    let mut text = vec![b'x'; 8_192];
    let mut early = 0;
    for prompt in 0_u64..1_000_000 {
        text[..8].copy_from_slice(&prompt.to_le_bytes());
        let picked = pool
            .pick(&ask(&keys(&text)))
            .expect("invariant: the pool has slots");
        pool.release(picked.slot);
        if prompt == 100_000 {
            early = resident_bytes();
        }
    }
    (early, resident_bytes())
}

fn main() -> ExitCode {
    println!("{WORKERS} workers x {RANKS} ranks, {DECISIONS} decisions; us");
    println!("policy               p50     p99   p99.9");
    let mut within = true;
    let untold = PolicyKind::ALL.map(|policy| (policy, false));
    for (policy, told) in untold.into_iter().chain([(PolicyKind::PrefixAware, true)]) {
        let times = time(policy, told);
        let at = |per_mille: usize| times[times.len() * per_mille / 1_000].as_secs_f64() * 1e6;
        let name = match told {
            true => format!("{}, told", policy.name()),
            false => policy.name().to_owned(),
        };
        println!("{name:18} {:5.2} {:7.2} {:7.2}", at(500), at(990), at(999));
        if policy == PolicyKind::PrefixAware {
            within &= times[times.len() * 99 / 100] <= BAR;
        }
    }
    let (early, late) = memory();
    println!(
        "resident after 10^5 and 10^6 distinct prompts: {:.1} and {:.1} MiB",
        early as f64 / f64::from(1 << 20),
        late as f64 / f64::from(1 << 20)
    );
    within &= late.saturating_sub(early) <= GROWTH_BYTES_MAX;
    match within {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
