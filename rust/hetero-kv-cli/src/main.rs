//! The executable `hetero-kv`: looks at a prefill and decode pair from the outside.
//!
//! Every subcommand is a file of its own: its flags, `run`, and what it prints. Exit codes are the
//! same for all: 0 all right, 1 a mismatch or a leak, 2 usage or a refusal.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod demo;
mod doctor;
mod lab;
mod output;
mod plan;
mod verify;

#[derive(Parser)]
#[command(
    name = "hetero-kv",
    version,
    about = "Moves KV between vLLM engines of unlike layouts"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Who reads what from whom, for a pair of shapes and a KV layout
    Plan(plan::Args),
    /// A topology on this host without a model: real processes, faults, every byte compared
    Lab(Box<lab::Args>),
    /// A part of `lab`
    #[command(hide = true)]
    LabEngine,
    /// A part of `lab`
    #[command(hide = true)]
    LabRank,
    /// Did KV move? Sends prompts through a proxy and reads the engines' counters
    Verify(verify::Args),
    /// Before a model is loaded: what would go wrong on this host or between two, and its mending
    Doctor(Box<doctor::Args>),
    /// The main job on real vLLM engines of this host, proven (see `hetero-kv demo --help`)
    Demo(demo::Args),
}

fn main() -> ExitCode {
    let (name, outcome) = match Cli::parse().command {
        Command::Plan(args) => ("plan", plan::run(&args)),
        Command::Lab(args) => ("lab", lab::run(&args)),
        Command::LabEngine => ("lab-engine", part(lab::engine_main)),
        Command::LabRank => ("lab-rank", part(lab::rank_main)),
        Command::Verify(args) => ("verify", verify::run(&args)),
        Command::Doctor(args) => ("doctor", doctor::run(&args)),
        Command::Demo(args) => ("demo", demo::run(&args)),
    };
    match outcome {
        Ok(output::Verdict::Right) => ExitCode::SUCCESS,
        Ok(output::Verdict::Wrong) => ExitCode::from(1),
        Err(refusal) => {
            output::tell(&format!("hetero-kv {name}: {refusal:#}\n"));
            ExitCode::from(2)
        }
    }
}

fn part(run: fn() -> anyhow::Result<()>) -> anyhow::Result<output::Verdict> {
    run().map(|()| output::Verdict::Right)
}
