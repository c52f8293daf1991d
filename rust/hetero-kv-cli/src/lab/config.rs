//! Flags of `hetero-kv lab` become a checked plan of what to run.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::plan::{EngineShape, InstanceShape, KvShape, Pairing};
use hetero_kv_transport::verbs::{self, DeviceChoice};

use super::fault::{Fault, Kind, Role, When};
use super::host;
use super::ipc::Transport;
use super::model::{Geometry, Model, WORD_BYTES, mix};
use super::{Args, Policy, Preset, TransportFlag};

/// Most ranks of both sides. Each is a process.
const RANKS_MAX: u64 = 64;
/// Without `--blocks`, the pools together take at most this share of the host's free memory.
const POOL_SHARE: f64 = 0.25;
/// No lab takes more than this share of it.
const MEMORY_SHARE_MAX: f64 = 0.8;
/// What a process needs beside its KV, code not counted.
const PROCESS_BYTES: u64 = 8 << 20;
/// Descriptors of the coordinator's own.
const DESCRIPTORS_OWN: u64 = 64;

/// What to run, checked.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) prefill: Vec<EngineShape>,
    pub(super) decode: Vec<EngineShape>,
    pub(super) kv: KvShape,
    pub(super) model: Model,
    pub(super) requests: u64,
    pub(super) concurrency: usize,
    pub(super) transport: Transport,
    pub(super) faults: Vec<Fault>,
    pub(super) policy: Policy,
    pub(super) stripe_bytes_min: u64,
    pub(super) recompute: bool,
    pub(super) lease_ms: u64,
    pub(super) prompt_tokens: (u32, u32),
    /// Blocks of each prefill engine and of each decode engine.
    pub(super) blocks: (u32, u32),
    pub(super) memory_bytes: u64,
    pub(super) seed: u64,
    pub(super) trace: Option<PathBuf>,
}

impl Plan {
    /// # Errors
    /// Flags that do not go together, a pair that is refused, or a host that is too small; the text
    /// names the flag.
    pub(super) fn new(args: &Args) -> Result<Self> {
        let preset = args.preset.map(Preset::values);
        let shapes = |flag: &str, given: &[InstanceShape], preset: Option<InstanceShape>| {
            let shapes = match (given, preset) {
                ([], Some(preset)) => vec![preset],
                ([], None) => bail!("{flag} is missing (or a --preset)"),
                (given, _) => given.to_vec(),
            };
            Ok(shapes)
        };
        let prefill = shapes("--prefill", &args.prefill, preset.map(|p| p.prefill))?;
        let decode = shapes("--decode", &args.decode, preset.map(|p| p.decode))?;
        let ranks = ranks(&prefill) + ranks(&decode);
        ensure!(
            ranks <= RANKS_MAX,
            "{ranks} ranks in all, above the {RANKS_MAX} of a lab: take smaller --prefill and \
             --decode"
        );
        let (prefill, decode) = (instances(&prefill), instances(&decode));
        let kv = args
            .kv
            .or(preset.map(|p| p.kv))
            .context("--kv is missing (or a --preset)")?;
        let layers = args.layers.or(preset.map(|p| p.layers)).unwrap_or(4);
        let block_size = args
            .block_size
            .or(preset.map(|p| p.block_size))
            .unwrap_or(16);
        let requests = args
            .requests
            .or(preset.map(|p| p.requests))
            .context("--requests is missing (or a --preset)")?;
        let concurrency = args
            .concurrency
            .or(preset.map(|p| p.concurrency))
            .unwrap_or(16);
        let model = Model::new(kv, layers, block_size, args.dtype.bytes(), args.layout);
        ensure!(
            model.row_bytes.is_multiple_of(WORD_BYTES),
            "--kv {kv} in {}: a token of a head has {} bytes, and lab lays KV out in words of \
             {WORD_BYTES}",
            args.dtype,
            model.row_bytes
        );
        check_pairs(&prefill, &decode, model.heads())?;
        let transport = transport(args.transport.unwrap_or(TransportFlag::Process))?;
        let mut faults = args.fault.clone();
        for fault in &faults {
            check_fault(fault, &prefill, &decode, transport)
                .with_context(|| format!("--fault {fault}"))?;
        }
        faults.extend(random_faults(
            args.random_faults,
            args.seed,
            &prefill,
            &decode,
        ));
        let prompt_tokens = args.prompt_tokens.unwrap_or((1, (4 * block_size).max(64)));
        let mut plan = Self {
            prefill,
            decode,
            kv,
            model,
            requests,
            // At most 2^16 by the flag's range.
            concurrency: concurrency as usize,
            transport,
            faults,
            policy: args.policy,
            stripe_bytes_min: args.stripe_bytes_min,
            recompute: args.load_failure == super::LoadFailure::Recompute,
            lease_ms: (args.lease_s * 1e3) as u64,
            prompt_tokens,
            blocks: (0, 0),
            memory_bytes: 0,
            seed: args.seed,
            trace: args.trace.clone(),
        };
        plan.size(args.blocks)?;
        plan.check_descriptors()?;
        Ok(plan)
    }

    /// Engines of one side: (instance, dp, shape).
    pub(super) fn engines(&self, role: Role) -> Vec<(u32, u32, EngineShape)> {
        let shapes = match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        };
        (0..)
            .zip(shapes)
            .flat_map(|(instance, shape)| (0..shape.dp).map(move |dp| (instance, dp, *shape)))
            .collect()
    }

    /// Bytes that `blocks` of each rank of one side take.
    fn pool_bytes(&self, role: Role, blocks: u32) -> Result<u64> {
        let mut bytes = 0_u64;
        for (_, _, shape) in self.engines(role) {
            for pp in 0..shape.pp {
                for tp in 0..shape.tp {
                    let place = ((shape.tp, tp), (shape.pp, pp));
                    let prefill = role == Role::Prefill;
                    let geometry = Geometry::new(&self.model, prefill, place.0, place.1, 1)
                        .with_context(|| format!("--{role} {shape}"))?;
                    let rank = geometry.block_bytes().saturating_mul(blocks.into());
                    bytes = bytes.saturating_add(rank);
                }
            }
        }
        Ok(bytes)
    }

    /// Blocks for the requests under way at once, as far as memory goes.
    fn size(&mut self, given: Option<u32>) -> Result<()> {
        let longest = self.model.blocks_for(self.prompt_tokens.1);
        let wanted = |engines: usize| {
            let each = (self.concurrency as u64).div_ceil(engines.max(1) as u64);
            u32::try_from(each.saturating_mul(longest.into()))
                .unwrap_or(u32::MAX)
                .max(longest.saturating_mul(2))
        };
        let available = host::memory_available_bytes()?;
        let mut blocks = match given {
            Some(blocks) => (blocks, blocks),
            None => (
                wanted(self.engines(Role::Prefill).len()),
                wanted(self.engines(Role::Decode).len()),
            ),
        };
        ensure!(
            blocks.0 >= longest,
            "--blocks {} cannot hold one prompt of {} tokens, which needs {longest}: raise it or \
             lower --prompt-tokens",
            blocks.0,
            self.prompt_tokens.1
        );
        let bytes = |blocks: (u32, u32)| -> Result<u64> {
            let prefill = self.pool_bytes(Role::Prefill, blocks.0)?;
            Ok(prefill.saturating_add(self.pool_bytes(Role::Decode, blocks.1)?))
        };
        if given.is_none() {
            let share = available as f64 * POOL_SHARE / bytes(blocks)? as f64;
            if share < 1.0 {
                let shrunk = |count: u32| ((f64::from(count) * share) as u32).max(longest * 2);
                blocks = (shrunk(blocks.0), shrunk(blocks.1));
            }
        }
        let engines = self.engines(Role::Prefill).len() + self.engines(Role::Decode).len();
        let processes = engines as u64 + self.ranks();
        let needed = bytes(blocks)?.saturating_add(processes * PROCESS_BYTES);
        ensure!(
            needed as f64 <= available as f64 * MEMORY_SHARE_MAX,
            "the pools need {:.1} GiB ({} blocks on each prefill rank, {} on each decode rank) and \
             this host has {:.1} GiB to give, of which lab takes at most {:.0} %: lower {}",
            gib(needed),
            blocks.0,
            blocks.1,
            gib(available),
            MEMORY_SHARE_MAX * 100.0,
            match given {
                Some(_) => "--blocks, --layers or the shapes",
                None => "--prompt-tokens, --layers, --block-size or the shapes",
            }
        );
        self.blocks = blocks;
        self.memory_bytes = needed;
        Ok(())
    }

    pub(super) fn ranks(&self) -> u64 {
        [&self.prefill, &self.decode]
            .into_iter()
            .flatten()
            .map(|shape| u64::from(shape.dp) * u64::from(shape.tp) * u64::from(shape.pp))
            .sum()
    }

    /// Two pipes to each engine, two from an engine to each rank, and relays' connections.
    fn check_descriptors(&self) -> Result<()> {
        let (p, d) = (
            self.engines(Role::Prefill).len(),
            self.engines(Role::Decode).len(),
        );
        let coordinator = 2 * (p + d) + 2 * p * d;
        let engine = 2 * self.ranks() + (p + d) as u64;
        let needed = DESCRIPTORS_OWN + engine.max(coordinator as u64);
        let limit = host::descriptors_max();
        ensure!(
            needed <= limit,
            "up to {needed} descriptors are needed in one process and the limit is {limit}: raise \
             it (ulimit -n) or take smaller --prefill and --decode"
        );
        Ok(())
    }
}

/// Bytes as people read them.
pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn ranks(shapes: &[InstanceShape]) -> u64 {
    shapes
        .iter()
        .map(|shape| {
            // Four numbers of at most 1024: below 2^41.
            let EngineShape { dp, tp, pp } = shape.engine;
            [shape.instances, dp, tp, pp]
                .into_iter()
                .map(u64::from)
                .product::<u64>()
        })
        .sum()
}

fn instances(shapes: &[InstanceShape]) -> Vec<EngineShape> {
    shapes
        .iter()
        .flat_map(|shape| std::iter::repeat_n(shape.engine, shape.instances as usize))
        .collect()
}

/// What a lab runs, once it is known to run here.
fn transport(flag: TransportFlag) -> Result<Transport> {
    match flag {
        TransportFlag::Auto => Ok(Transport::Auto),
        TransportFlag::Process => Ok(Transport::Process),
        TransportFlag::Tcp => Ok(Transport::Tcp),
        TransportFlag::Verbs => {
            verbs::probe(&DeviceChoice::default(), None).context("--transport verbs")?;
            Ok(Transport::Verbs)
        }
        TransportFlag::Mori => bail!(
            "--transport mori runs inside Python engines, and lab has none: see that an \
             environment has it by `hetero-kv doctor --transport mori --python PYTHON`, then start \
             engines with \"kv_connector_extra_config\": {{\"transport\": \"mori\"}} \
             (docs/mori.md); `lab --transport verbs` is RDMA without it"
        ),
    }
}

fn check_pairs(prefill: &[EngineShape], decode: &[EngineShape], heads: KvHeads) -> Result<()> {
    for (p, from) in prefill.iter().enumerate() {
        for (d, to) in decode.iter().enumerate() {
            Pairing::new(from.tp, to.tp, heads)
                .with_context(|| format!("prefill instance {p} and decode instance {d} refused"))?;
        }
    }
    Ok(())
}

fn check_fault(
    fault: &Fault,
    prefill: &[EngineShape],
    decode: &[EngineShape],
    transport: Transport,
) -> Result<()> {
    let shapes = match fault.role {
        Role::Prefill => prefill,
        Role::Decode => decode,
    };
    let Some(shape) = shapes.get(fault.instance as usize) else {
        bail!(
            "there are {} {} instances, counted from 0",
            shapes.len(),
            fault.role
        );
    };
    if let Some(dp) = fault.dp {
        ensure!(dp < shape.dp, "instance {} has {shape}", fault.instance);
    }
    if let Some(tp) = fault.tp {
        ensure!(tp < shape.tp, "instance {} has {shape}", fault.instance);
    }
    if let Kind::Slow(_) = fault.kind {
        ensure!(
            transport == Transport::Tcp,
            "a rate can only be set on --transport tcp, not on {}: with process and verbs, which \
             auto may take, the reader reads the memory itself",
            transport.name()
        );
    }
    Ok(())
}

/// Faults of kinds that a running system sees, spread over the run.
fn random_faults(
    count: u32,
    seed: u64,
    prefill: &[EngineShape],
    decode: &[EngineShape],
) -> Vec<Fault> {
    let mut state = mix(seed ^ 0xFA17);
    let mut draw = |below: u64| {
        state = mix(state);
        state % below.max(1)
    };
    (0..count)
        .map(|nth| {
            let role = if draw(2) == 0 {
                Role::Prefill
            } else {
                Role::Decode
            };
            let shapes = match role {
                Role::Prefill => prefill,
                Role::Decode => decode,
            };
            let instance = draw(shapes.len() as u64) as u32;
            let shape = shapes[instance as usize];
            let kind = match draw(4) {
                0 | 1 => Kind::Abort,
                2 => Kind::Stop(std::time::Duration::from_millis(200 + draw(800))),
                _ => Kind::Restart,
            };
            let tp = match kind {
                Kind::Stop(_) if draw(2) == 0 => Some(draw(shape.tp.into()) as u32),
                Kind::Kill
                | Kind::Stop(_)
                | Kind::Restart
                | Kind::Slow(_)
                | Kind::Corrupt
                | Kind::DropAcks
                | Kind::Abort => None,
            };
            let share =
                0.02 + 0.96 * (f64::from(nth) + draw(1000) as f64 / 1000.0) / f64::from(count);
            Fault {
                kind,
                role,
                instance,
                dp: Some(draw(shape.dp.into()) as u32),
                tp,
                when: When::Share(share.min(1.0)),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests;
