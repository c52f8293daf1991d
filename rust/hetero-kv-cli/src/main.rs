//! The executable `hetero-kv`: looks at a prefill and decode pair from the outside.
//!
//! Every subcommand is a file of its own: its flags, `run`, and what it prints. Exit codes are the
//! same for all: 0 all right, 1 a mismatch or a leak, 2 usage or a refusal.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod demo;
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
    /// Did KV move? Sends prompts through a proxy and reads the engines' counters
    Verify(verify::Args),
    /// The main job on real vLLM engines of this host, proven (see `hetero-kv demo --help`)
    Demo(demo::Args),
}

fn main() -> ExitCode {
    let (name, outcome) = match Cli::parse().command {
        Command::Plan(args) => ("plan", plan::run(&args)),
        Command::Verify(args) => ("verify", verify::run(&args)),
        Command::Demo(args) => ("demo", demo::run(&args)),
    };
    match outcome {
        Ok(output::Verdict::Right) => ExitCode::SUCCESS,
        Ok(output::Verdict::Wrong) => ExitCode::from(1),
        Err(refusal) => {
            eprintln!("hetero-kv {name}: {refusal:#}");
            ExitCode::from(2)
        }
    }
}
