//! What a seed stands for: shapes, sizes, times, and the trouble to come.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use hetero_kv_core::auth::Keys;
use hetero_kv_core::consumer::ConsumerOptions;
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::producer::LeaseTimes;

use crate::fault::Fault;
use crate::rng::Rng;
use hetero_kv_core::plan::{SourcePolicy, Striping};

/// How much trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// None: every request has to be answered from the KV that was moved.
    Calm,
    /// One to six kinds, so that a failure has few explanations.
    Mixed,
    /// Every kind at once.
    Storm,
}

/// Ranks of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Ranks of its tensor parallel group.
    pub tp: u32,
    /// Stages of its pipeline.
    pub pp: u32,
}

impl Shape {
    /// Its ranks, stage by stage: (tp, pp).
    pub(crate) fn ranks(self) -> impl Iterator<Item = (u32, u32)> {
        (0..self.pp).flat_map(move |pp| (0..self.tp).map(move |tp| (tp, pp)))
    }

    /// The place of a rank among [`Shape::ranks`].
    pub(crate) fn index(self, tp: u32, pp: u32) -> usize {
        (pp * self.tp + tp) as usize
    }
}

/// One run's setting.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Where it comes from.
    pub seed: u64,
    /// How much trouble.
    pub profile: Profile,
    /// KV heads of the model.
    pub heads: KvHeads,
    /// Layers of the model.
    pub layers: u32,
    /// Pieces each layer is stored in: 1, or K and V apart.
    pub parts: u32,
    /// Whether a page of one head is opaque, as in vLLM's CPU attention, or a row per token.
    pub opaque_pages: bool,
    /// Ranks of each prefill engine.
    pub prefill: Vec<Shape>,
    /// Ranks of each decode engine.
    pub decode: Vec<Shape>,
    /// When decode reads several holders of the same heads at once.
    pub striping: Striping,
    /// Blocks of each engine.
    pub num_blocks: u32,
    /// Lease slots of each prefill engine.
    pub lease_slots: u32,
    /// Prompts that clients send.
    pub requests: u32,
    /// vLLM's load failure policy is `recompute`, not `fail`.
    pub recompute: bool,
    /// Times of a lease.
    pub times: LeaseTimes,
    /// Times and rules of the consumer.
    pub options: ConsumerOptions,
    /// Whether engines prove a shared key in each handshake.
    pub keyed: bool,
    /// Trouble that may come.
    pub faults: BTreeSet<Fault>,
    /// From here on nothing new goes wrong, and clients send nothing more.
    pub trouble_until: Duration,
    /// By here everything has to have ended.
    pub settled_by: Duration,
}

/// Tokens a block holds.
pub const BLOCK_TOKENS: u32 = 4;
/// Longest prompt.
pub const PROMPT_TOKENS_MAX: u32 = 36;

impl Scenario {
    /// What `seed` stands for; `profile` overrides the one the seed has.
    pub fn new(seed: u64, profile: Option<Profile>) -> Self {
        let mut rng = Rng::new(seed.wrapping_mul(2) + 1);
        let profile = profile.unwrap_or(match seed % 8 {
            0 => Profile::Calm,
            7 => Profile::Storm,
            1..=6 | 8.. => Profile::Mixed,
        });
        let heads = match rng.below(5) {
            0 => KvHeads::Latent,
            exponent => KvHeads::Grouped(NonZeroU32::MIN.saturating_add((1 << (exponent - 1)) - 1)),
        };
        let faults = match profile {
            Profile::Calm => BTreeSet::new(),
            Profile::Storm => Fault::ALL.iter().copied().collect(),
            Profile::Mixed => (0..rng.within(1, 6))
                .map(|_| rng.pick(Fault::ALL))
                .flat_map(with_companions)
                .collect(),
        };
        let millis = |rng: &mut Rng, first, last| Duration::from_millis(rng.within(first, last));
        let lease = millis(&mut rng, 2000, 4000);
        let layers = rng.count(1, 3);
        let shapes: Vec<Shape> = (0..4)
            .map(|_| Shape {
                tp: rng.pick(&[1, 2, 4]),
                pp: rng.pick(&[1, 1, 2, 3]).min(layers),
            })
            .collect();
        let striping = if rng.permille(500) {
            Striping {
                threshold_bytes: rng.within(1, 600),
                holders_max: rng.count(2, 4),
            }
        } else {
            Striping::OFF
        };
        let trouble_until = Duration::from_secs(rng.within(8, 20));
        Self {
            seed,
            profile,
            heads,
            layers,
            striping,
            parts: rng.count(1, 2),
            opaque_pages: rng.permille(500),
            prefill: shapes[..1 + rng.index(2)].to_vec(),
            decode: shapes[2..3 + rng.index(2)].to_vec(),
            num_blocks: rng.count(24, 48),
            lease_slots: rng.count(3, 16),
            requests: rng.count(8, 28),
            recompute: rng.permille(400),
            times: LeaseTimes {
                lease,
                renewal: lease,
                grace: millis(&mut rng, 200, 500),
            },
            options: ConsumerOptions {
                block_size: BLOCK_TOKENS,
                require_kv: rng.permille(300),
                claim_timeout: millis(&mut rng, 2000, 4000),
                load_timeout: millis(&mut rng, 5000, 9000),
                margin: millis(&mut rng, 300, 500),
                sibling_linger: Duration::from_millis(100),
                heartbeat: Duration::from_secs(1),
                peer_silence: Duration::from_secs(3),
                backoff: Duration::from_millis(250),
                source_policy: rng.pick(&[
                    SourcePolicy::Hash,
                    SourcePolicy::Hash,
                    SourcePolicy::RoundRobin,
                ]),
            },
            // Seeds below 65,536, of which the corpus and the mutants' are, keep what they stand for.
            keyed: (seed >> 16) % 2 == 1,
            faults,
            trouble_until,
            settled_by: trouble_until + Duration::from_secs(60),
        }
    }
}

impl Scenario {
    /// The keys of every engine.
    pub(crate) fn keys(&self) -> Option<Keys> {
        self.keyed
            .then(|| Keys::parse(b"key-of-the-simulation\n").ok())
            .flatten()
    }
}

/// Some trouble needs other trouble to show: a restart something that was killed, a strayed read a
/// restart that the control plane has not noticed.
fn with_companions(fault: Fault) -> Vec<Fault> {
    let companions: &[Fault] = if fault == Fault::Restart {
        &[Fault::PrefillKilled, Fault::DecodeKilled]
    } else if fault == Fault::ReadStrays {
        &[
            Fault::PrefillVanishes,
            Fault::PrefillKilled,
            Fault::Restart,
            Fault::ReadSlow,
        ]
    } else {
        &[]
    };
    [&[fault], companions].concat()
}
