//! The rows of a plan: one per decode rank, for one transfer from one owner engine.

use anyhow::{Context, bail, ensure};
use hetero_kv_core::ids::{DpRank, TpRank, TransferId};
use hetero_kv_core::plan::{
    EngineShape, InstanceShape, KvShape, LayerRange, Pairing, Region, RoundRobinGate,
    SourceChooser, TokenRange, stage_layers,
};
use serde::Serialize;

use super::{Args, Policy};

/// Most workers of one side. The rows grow with the workers of decode times the tp of prefill.
const WORKERS_MAX: u64 = 8192;

/// The whole answer of `--json`.
#[derive(Serialize)]
pub(super) struct Plan {
    pub(super) ranks: Vec<Rank>,
}

/// One decode rank.
#[derive(Serialize)]
pub(super) struct Rank {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) instance: Option<u32>,
    pub(super) dp: u32,
    pub(super) tp: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pp: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) layers: Option<[u32; 2]>,
    pub(super) sources: Vec<Source>,
    pub(super) holders: Vec<[u32; 2]>,
    pub(super) release: Vec<[u32; 2]>,
}

/// One read of a decode rank.
#[derive(Serialize)]
pub(super) struct Source {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) instance: Option<u32>,
    pub(super) dp: u32,
    pub(super) tp: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pp: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) layers: Option<[u32; 2]>,
    pub(super) heads: [u32; 2],
    pub(super) bytes_per_block_layer: u64,
    /// For the table.
    #[serde(skip)]
    pub(super) region: Region,
}

/// Plans every decode rank.
///
/// # Errors
/// An owner that is not there, shapes too large, a pipeline with empty stages, or a pair that is
/// refused, by field and both values.
pub(super) fn plan(args: &Args) -> anyhow::Result<Plan> {
    let prefill = instances("--prefill", &args.prefill)?;
    let decode = instances("--decode", &args.decode)?;
    for (p, prefill) in prefill.iter().enumerate() {
        for (d, decode) in decode.iter().enumerate() {
            pairing(args, prefill, decode)
                .with_context(|| format!("prefill instance {p} and decode instance {d} refused"))?;
        }
    }
    let owner = args.owner;
    let Some(owner_shape) = prefill.get(owner.instance as usize) else {
        bail!(
            "--owner names instance {} of {} prefill instances",
            owner.instance,
            prefill.len()
        );
    };
    ensure!(
        owner.dp < owner_shape.dp,
        "--owner names dp {} of prefill instance {}, which has dp={}",
        owner.dp,
        owner.instance,
        owner_shape.dp
    );
    let several = prefill.len() > 1 || decode.len() > 1;
    let staged = prefill.iter().chain(&decode).any(|shape| shape.pp > 1);
    let owner_stages = stage_layers(args.layers, owner_shape.pp).context("--prefill")?;
    let head_bytes =
        u64::from(args.block_size) * args.kv.elements_per_head_token() * args.dtype.bytes();

    let tokens = TokenRange {
        first: 0,
        past_last: args.tokens.unwrap_or(args.block_size),
    };

    let mut ranks = Vec::new();
    let mut engines = 0_u128;
    for (instance, shape) in (0..).zip(&decode) {
        let pairing = pairing(args, owner_shape, shape)?;
        let stages = stage_layers(args.layers, shape.pp).context("--decode")?;
        for dp in 0..shape.dp {
            let transfer_id = args.transfer_id.unwrap_or(example(engines));
            let chooser = chooser(args, transfer_id, owner_shape, shape, DpRank(dp));
            engines += 1;
            for (pp, layers) in (0..).zip(&stages) {
                for tp in 0..shape.tp {
                    let plan = pairing.rank_plan(TpRank(tp), &chooser)?;
                    let pairs =
                        |ranks: &[TpRank]| ranks.iter().map(|rank| [owner.dp, rank.0]).collect();
                    let sources = (0..)
                        .zip(&owner_stages)
                        .map(|(source_pp, held)| (source_pp, held.intersection(*layers)))
                        .filter(|(_, layers)| layers.count() > 0)
                        .flat_map(|(source_pp, layers)| {
                            let regions = plan.regions(tokens, layers);
                            plan.sources
                                .iter()
                                .zip(regions)
                                .map(move |(source, region)| Source {
                                    instance: several.then_some(owner.instance),
                                    dp: owner.dp,
                                    tp: source.tp_rank.0,
                                    pp: staged.then_some(source_pp),
                                    layers: staged.then_some(bounds(layers)),
                                    heads: [source.heads.first, source.heads.past_last],
                                    bytes_per_block_layer: u64::from(source.heads.count())
                                        * head_bytes,
                                    region,
                                })
                        })
                        .collect();
                    ranks.push(Rank {
                        instance: several.then_some(instance),
                        dp,
                        tp,
                        pp: staged.then_some(pp),
                        layers: staged.then_some(bounds(*layers)),
                        sources,
                        holders: pairs(&plan.holders),
                        release: pairs(&plan.release),
                    });
                }
            }
        }
    }
    Ok(Plan { ranks })
}

fn bounds(layers: LayerRange) -> [u32; 2] {
    [layers.first, layers.past_last]
}

/// A transfer goes to one engine, so rows of different engines are rows of different transfers:
/// ids that count up stand for them.
fn example(engine: u128) -> TransferId {
    TransferId(engine.to_be_bytes())
}

fn chooser(
    args: &Args,
    transfer_id: TransferId,
    prefill: &EngineShape,
    decode: &EngineShape,
    consumer_dp: DpRank,
) -> SourceChooser {
    match args.policy {
        Policy::Hash => SourceChooser::new(transfer_id),
        Policy::RoundRobin => {
            let gate = RoundRobinGate {
                decode_world_size: decode.tp * decode.pp,
                mla: match args.kv {
                    KvShape::Latent { .. } => true,
                    KvShape::Grouped { .. } => false,
                },
                prefill_dp: prefill.dp,
                prefill_tp: prefill.tp,
            };
            SourceChooser::round_robin(transfer_id, Vec::new(), gate, consumer_dp, args.sequence)
        }
    }
}

fn pairing(args: &Args, prefill: &EngineShape, decode: &EngineShape) -> anyhow::Result<Pairing> {
    Ok(Pairing::new(prefill.tp, decode.tp, args.kv.heads())?)
}

/// One shape per instance, in the order of the flags.
fn instances(flag: &str, shapes: &[InstanceShape]) -> anyhow::Result<Vec<EngineShape>> {
    let workers: u64 = shapes
        .iter()
        .map(|shape| {
            let EngineShape { dp, tp, pp } = shape.engine;
            // Four numbers of at most 1024: below 2^41.
            [shape.instances, dp, tp, pp]
                .into_iter()
                .map(u64::from)
                .product::<u64>()
        })
        .sum();
    ensure!(
        workers <= WORKERS_MAX,
        "{flag}: {workers} workers in all, above the {WORKERS_MAX} that are planned at a time"
    );
    Ok(shapes
        .iter()
        .flat_map(|shape| std::iter::repeat_n(shape.engine, shape.instances as usize))
        .collect())
}
