//! `hetero-kv plan`: who reads what from whom.

use std::fmt;

use anyhow::Context;
use clap::ValueEnum;
use hetero_kv_core::ids::TransferId;
use hetero_kv_core::plan::{InstanceShape, KvShape};

use crate::output::{self, Verdict};

mod rows;
mod table;

/// Flags of `hetero-kv plan`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A prefill shape, [Nx]dp=D,tp=T[,pp=P]; repeatable
    #[arg(long, required = true, value_name = "SHAPE")]
    prefill: Vec<InstanceShape>,
    /// A decode shape; repeatable
    #[arg(long, required = true, value_name = "SHAPE")]
    decode: Vec<InstanceShape>,
    /// The KV layout, gqa:HEADS_TOTAL:HEAD_DIM or mla:LATENT
    #[arg(long)]
    kv: KvShape,
    /// Layers of the model
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    layers: u32,
    /// Tokens of a block
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    block_size: u32,
    /// Type of the cache's elements
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// The engine that ran the prefill: [INSTANCE.]DP
    #[arg(long, default_value = "0", value_name = "[INSTANCE.]DP", value_parser = owner)]
    owner: OwnerArg,
    /// Plan this transfer (32 hexadecimal digits) on every decode engine; without it each decode
    /// engine gets an example transfer of its own
    #[arg(long, value_name = "HEX", value_parser = transfer_id)]
    transfer_id: Option<TransferId>,
    /// Tokens of the transfer, for the regions in the table; a block's by default
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// How to choose among equal holders, as the setting source_policy
    #[arg(long, value_enum, default_value_t = Policy::Hash)]
    policy: Policy,
    /// With round_robin: how many transfers each decode engine has had from the owner before
    #[arg(long, default_value_t = 0)]
    sequence: u64,
    /// Print JSON only
    #[arg(long)]
    json: bool,
}

/// Element types by vLLM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    /// 2 bytes
    #[value(alias = "bfloat16")]
    Bf16,
    /// 2 bytes
    #[value(alias = "float16")]
    Fp16,
    /// 4 bytes
    #[value(alias = "float32")]
    Fp32,
    /// 1 byte
    #[value(alias = "fp8_e4m3", alias = "fp8_e5m2")]
    Fp8,
}

impl Dtype {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp32 => 4,
            Self::Fp8 => 1,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp32 => "fp32",
            Self::Fp8 => "fp8",
        })
    }
}

/// Choice among equal holders, by the values of the setting `source_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// By the transfer id's hash
    Hash,
    /// As RFC #46107: in turn behind its gate, elsewhere always the same one
    #[value(name = "round_robin", alias = "round-robin")]
    RoundRobin,
}

/// Which engine ran the prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OwnerArg {
    instance: u32,
    dp: u32,
}

fn owner(text: &str) -> Result<OwnerArg, String> {
    let (instance, dp) = text.split_once('.').unwrap_or(("0", text));
    let number = |part: &str| part.parse::<u32>().ok();
    match (number(instance), number(dp)) {
        (Some(instance), Some(dp)) => Ok(OwnerArg { instance, dp }),
        _ => Err("expected [INSTANCE.]DP, such as 3 or 1.3".to_owned()),
    }
}

fn transfer_id(text: &str) -> Result<TransferId, String> {
    TransferId::parse(text).map_err(|error| error.to_string())
}

/// Plans and prints.
pub(crate) fn run(args: &Args) -> anyhow::Result<Verdict> {
    let plan = rows::plan(args)?;
    let text = if args.json {
        let mut json = serde_json::to_string(&plan).context("writing the plan as JSON")?;
        json.push('\n');
        json
    } else {
        table::text(args, &plan)
    };
    output::print(&text)?;
    Ok(Verdict::Right)
}
