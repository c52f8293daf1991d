//! `hetero-kv lab`: a topology on this host without a model.
//!
//! This executable starts itself again: a process for each engine's scheduler and one for each
//! rank, with the product's own control plane and data plane between them. This process plays the
//! router: a prefill leg, its params, a decode leg. Ranks fill blocks with bytes that say where they
//! belong, and compare every byte that they load.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use hetero_kv_core::plan::{InstanceShape, KvShape};

use crate::output::{self, Verdict};
use fault::Fault;
use model::Order;

mod cluster;
mod config;
mod engine;
mod fault;
mod host;
mod ipc;
mod memory;
mod model;
mod rank;
mod relay;
mod report;
mod router;
mod span;
mod trace;
mod transports;

pub(crate) use engine::main as engine_main;
pub(crate) use rank::main as rank_main;

const EXAMPLES: &str = "\
Examples:
  Two prefill ranks feed two decode engines; every byte is compared:
    hetero-kv lab --prefill dp=1,tp=2 --decode dp=2,tp=1 --kv gqa:8:128 --requests 200
  The layout of RFC #46107, every source rank used:
    hetero-kv lab --preset rfc46107 --requests 2000
  A prefill rank stands still for 5 s; no request may fail:
    hetero-kv lab --prefill dp=1,tp=2 --decode dp=2,tp=1 --kv gqa:8:128 --requests 500 \\
        --fault stop-prefill:0.0.1@0.4=5
  Prefill instance 1 dies after 2 s, and acknowledgements of decode 0 are lost from the middle on:
    hetero-kv lab --prefill 2xdp=1,tp=2 --decode dp=2,tp=1 --kv mla:576 --requests 500 \\
        --fault kill-prefill:1@2s --fault drop-acks-decode:0.0@0.5 --lease-s 5
  The negative control: bytes change under valid leases, and lab must say so (exit 1):
    hetero-kv lab --prefill dp=1,tp=1 --decode dp=1,tp=1 --kv mla:576 --requests 20 \\
        --fault corrupt-prefill@0.5
  Eight holders of 50 MB/s each, spread over and not; compare the rates of their reads:
    hetero-kv lab --prefill dp=1,tp=8 --decode dp=8,tp=1 --kv mla:576 --requests 256 \\
        --transport tcp --fault slow-prefill@0=50 [--policy fixed]

Exit codes: 0 all right; 1 a byte differed, a block stayed held, a request failed that no fault
explains, or a corrupt fault never came due; 2 usage, a pair that is refused, or a host that is too small.";

/// The connector's setting `transport`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TransportFlag {
    /// For each pair of ranks the best that reaches, as engines choose
    Auto,
    /// Straight from the other process's memory
    Process,
    /// Sockets
    Tcp,
    /// RDMA
    Verbs,
    /// MoRI-IO: not in a lab
    Mori,
}

/// Flags of `hetero-kv lab`.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// A prefill shape, [Nx]dp=D,tp=T[,pp=P]; repeatable
    #[arg(long, value_name = "SHAPE")]
    prefill: Vec<InstanceShape>,
    /// A decode shape; repeatable
    #[arg(long, value_name = "SHAPE")]
    decode: Vec<InstanceShape>,
    /// The KV layout, gqa:HEADS_TOTAL:HEAD_DIM or mla:LATENT
    #[arg(long)]
    kv: Option<KvShape>,
    /// Requests to send
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    requests: Option<u64>,
    /// Requests under way at once [default: 16]
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    concurrency: Option<u32>,
    /// How ranks are read [default: process]
    #[arg(long, value_enum)]
    transport: Option<TransportFlag>,
    /// KIND-ROLE[:INSTANCE[.DP[.TP]]]@WHEN[=ARG]: kill, stop, restart, slow, corrupt, drop-acks or
    /// abort; WHEN a share of the requests (0.4) or a time (2s); ARG the MB/s of slow or the seconds
    /// of stop; repeatable
    #[arg(long, value_name = "FAULT")]
    fault: Vec<Fault>,
    /// So many faults drawn from the seed: aborts, stops of up to a second, restarts
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    random_faults: u32,
    /// Of prompts, ids, choices and random faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fills shapes, KV, layers, block size, concurrency and requests; flags override it
    #[arg(long, value_enum)]
    preset: Option<Preset>,
    /// Layers of the model [default: 4]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    layers: Option<u32>,
    /// Tokens of a block [default: 16]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    block_size: Option<u32>,
    /// Type of the cache's elements
    #[arg(long, value_enum, default_value_t = crate::plan::Dtype::Bf16)]
    dtype: crate::plan::Dtype,
    /// Order of heads and tokens in a block
    #[arg(long, value_enum, default_value_t = Order::Hnd)]
    layout: Order,
    /// Shortest and longest prompt in tokens [default: 1-64, or up to four blocks]
    #[arg(long, value_name = "MIN-MAX", value_parser = token_range)]
    prompt_tokens: Option<(u32, u32)>,
    /// Blocks of each rank [default: enough for the concurrency, within a quarter of free memory]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    blocks: Option<u32>,
    /// Seconds of a lease, first and renewed
    #[arg(long, default_value_t = 30.0, value_parser = lease_seconds)]
    lease_s: f64,
    /// What decode does with a load that failed, as vLLM's kv_load_failure_policy
    #[arg(long, value_enum, default_value_t = LoadFailure::Fail)]
    load_failure: LoadFailure,
    /// Which of several equal holders is read; fixed draws transfer ids that all lead to the first
    #[arg(long, value_enum, default_value_t = Policy::Hash)]
    policy: Policy,
    /// Reads of at least so many bytes are split over up to 8 holders of the same heads; 0: never
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    stripe_bytes_min: u64,
    /// Write a JSON line for each request and source: whom the session, the connection, the read and
    /// the acknowledgement name
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print JSON only
    #[arg(long)]
    json: bool,
}

/// What happens to a request whose load failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LoadFailure {
    /// The request fails
    Fail,
    /// Decode computes its prompt
    Recompute,
}

/// Choice among equal holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// By the transfer id's hash
    Hash,
    /// Always the first
    Fixed,
    /// As RFC #46107: in turn behind its gate, elsewhere always the same one
    #[value(name = "round_robin", alias = "round-robin")]
    RoundRobin,
}

/// Named topologies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Preset {
    /// 2x(1,8) -> (8,1), MLA 576, 61 layers, block size 16, 512 concurrent, 2000 requests
    Rfc46107,
}

/// What a preset fills in.
#[derive(Clone, Copy, Debug)]
struct PresetValues {
    prefill: InstanceShape,
    decode: InstanceShape,
    kv: KvShape,
    layers: u32,
    block_size: u32,
    concurrency: u32,
    requests: u64,
}

impl Preset {
    fn values(self) -> PresetValues {
        match self {
            Self::Rfc46107 => PresetValues {
                prefill: "2xdp=1,tp=8".parse().expect("a shape of the grammar"),
                decode: "dp=8,tp=1".parse().expect("a shape of the grammar"),
                kv: "mla:576".parse().expect("a KV layout of the grammar"),
                layers: 61,
                block_size: 16,
                concurrency: 512,
                requests: 2000,
            },
        }
    }
}

/// Longest prompt of a lab.
const PROMPT_TOKENS_MAX: u32 = 1 << 20;

fn token_range(text: &str) -> Result<(u32, u32), String> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    match (low.parse::<u32>(), high.parse::<u32>()) {
        (Ok(low), Ok(high)) if (1..=high).contains(&low) && high <= PROMPT_TOKENS_MAX => {
            Ok((low, high))
        }
        _ => Err(format!(
            "expected MIN-MAX with 1 <= MIN <= MAX <= {PROMPT_TOKENS_MAX}, such as 1-64"
        )),
    }
}

fn lease_seconds(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|seconds| (0.5..=3600.0).contains(seconds))
        .ok_or_else(|| "expected seconds from 0.5 to 3600".to_owned())
}

/// Runs the topology and prints what it found.
pub(crate) fn run(args: &Args) -> anyhow::Result<Verdict> {
    let plan = config::Plan::new(args)?;
    output::tell(&report::head(&plan));
    let found = router::run(&plan)?;
    let text = if args.json {
        report::json(&plan, &found)?
    } else {
        report::table(&plan, &found)
    };
    output::print(&text)?;
    Ok(report::verdict(&found))
}

/// Time for what only a hang exceeds: processes that start, end, or answer.
const PATIENCE: Duration = Duration::from_secs(60);
