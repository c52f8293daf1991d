//! A plan for people.

use super::Args;
use super::rows::{Plan, Rank};
use crate::output::columns;

/// The table, under two lines that say what was planned.
pub(super) fn text(args: &Args, plan: &Plan) -> String {
    let list = |shapes: &[hetero_kv_core::plan::InstanceShape]| {
        let shapes: Vec<String> = shapes.iter().map(ToString::to_string).collect();
        shapes.join(" + ")
    };
    let transfer = match args.transfer_id {
        Some(id) => format!("transfer {id}"),
        None => {
            "an example transfer per decode engine (--transfer-id HEX plans a given one)".into()
        }
    };
    let rows: Vec<Vec<String>> = plan.ranks.iter().flat_map(lines).collect();
    format!(
        "prefill {} -> decode {}, {}, {} layers, blocks of {} tokens, {}\n\
         owner: prefill instance {}, dp {}; {transfer}\n\n{}",
        list(&args.prefill),
        list(&args.decode),
        args.kv,
        args.layers,
        args.block_size,
        args.dtype,
        args.owner.instance,
        args.owner.dp,
        columns(
            &[
                "DECODE RANK",
                "READS",
                "REGION",
                "BYTES/BLOCK/LAYER",
                "HOLDERS",
                "RELEASES"
            ],
            &rows,
        )
    )
}

/// A line per read; the rank and what it releases stand on the first.
fn lines(rank: &Rank) -> Vec<Vec<String>> {
    let mut lines: Vec<Vec<String>> = rank
        .sources
        .iter()
        .map(|source| {
            let bytes = source.bytes_per_block_layer.to_string();
            let from = place(source.instance, source.dp, source.pp, source.tp);
            vec![String::new(), from, source.region.to_string(), bytes]
        })
        .collect();
    if let Some(first) = lines.first_mut() {
        first[0] = place(rank.instance, rank.dp, rank.pp, rank.tp) + &span("layers", rank.layers);
        first.extend([tp_ranks(&rank.holders), tp_ranks(&rank.release)]);
    }
    lines
}

fn place(instance: Option<u32>, dp: u32, pp: Option<u32>, tp: u32) -> String {
    let part = |name: &str, value: Option<u32>| {
        value.map_or(String::new(), |value| format!("{name}{value} "))
    };
    format!("{}dp{dp} {}tp{tp}", part("i", instance), part("pp", pp))
}

fn span(name: &str, bounds: Option<[u32; 2]>) -> String {
    match bounds {
        None => String::new(),
        Some([first, past_last]) if first + 1 == past_last => {
            format!(" {} {first}", name.trim_end_matches('s'))
        }
        Some([first, past_last]) => format!(" {name} {first}..{past_last}"),
    }
}

/// `[dp, tp]` pairs of one owner, ascending and without gaps: holders of neighbouring heads are
/// neighbours. Written like the ranges of a region, the end not included.
fn tp_ranks(pairs: &[[u32; 2]]) -> String {
    match (pairs.first(), pairs.last()) {
        (Some([dp, first]), Some([_, last])) if first == last => format!("dp{dp} tp{first}"),
        (Some([dp, first]), Some([_, last])) => format!("dp{dp} tp{first}..{}", last + 1),
        _ => String::new(),
    }
}
