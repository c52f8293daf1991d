//! Runs seeds of the simulator.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use hetero_kv_sim::{Coverage, Invariant, Profile, Run, Scenario, run};

/// Lines of trace printed for a failing seed unless `--trace` asks for all.
const TRACE_TAIL: usize = 60;
/// From so many mixed seeds on a kind of trouble that never came is an error of the simulator.
const SEEDS_FOR_COVERAGE: u64 = 300;

/// Whole clusters from one seed each, on virtual time, with every kind of fault and a reference
/// model beside them. Exit code 0: every seed held; 1: one broke an invariant, or a kind of fault
/// never happened; 2: usage.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Number of seeds.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// First seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Only this one.
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Print the whole trace, also of a seed that holds; needs `--seed`.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Same amount of trouble for every seed.
    #[arg(long, value_enum)]
    profile: Option<ProfileName>,
    /// Stop after so many seeds have failed; the trace of the first is printed only with 1.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    failures_max: u64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProfileName {
    Calm,
    Mixed,
    Storm,
}

impl From<ProfileName> for Profile {
    fn from(name: ProfileName) -> Self {
        match name {
            ProfileName::Calm => Self::Calm,
            ProfileName::Mixed => Self::Mixed,
            ProfileName::Storm => Self::Storm,
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let profile = arguments.profile.map(Profile::from);
    match arguments.seed {
        Some(seed) => one(seed, profile, arguments.trace),
        None => many(&arguments, profile),
    }
}

fn one(seed: u64, profile: Option<Profile>, whole: bool) -> ExitCode {
    let scenario = Scenario::new(seed, profile);
    eprintln!("{scenario:#?}");
    let Run {
        violation,
        coverage,
        trace,
    } = run(seed, profile, true);
    let wanted = if whole { trace.len() } else { TRACE_TAIL };
    let tail = trace.len().saturating_sub(wanted);
    if whole || violation.is_some() {
        let mut out = std::io::stdout().lock();
        for line in &trace[tail..] {
            // A reader that has seen enough closes the pipe.
            if writeln!(out, "{line}").is_err() {
                break;
            }
        }
    }
    print_coverage(&coverage);
    match violation {
        Some(violation) => {
            println!("seed {seed}: {violation}");
            ExitCode::FAILURE
        }
        None => {
            println!("seed {seed}: held");
            ExitCode::SUCCESS
        }
    }
}

fn many(arguments: &Arguments, profile: Option<Profile>) -> ExitCode {
    let begun = Instant::now();
    let mut coverage = Coverage::default();
    let mut failures = std::collections::BTreeMap::<Invariant, u64>::new();
    let mut told = begun;
    let past = arguments.from.saturating_add(arguments.seeds);
    for seed in arguments.from..past {
        let Run {
            violation,
            coverage: of_one,
            ..
        } = run(seed, profile, false);
        coverage.add(&of_one);
        if let Some(violation) = violation {
            println!("seed {seed}: {violation}");
            *failures.entry(violation.invariant).or_default() += 1;
            if arguments.failures_max == 1 {
                println!("again, with the trace: hetero-kv-sim --seed {seed}");
                return one(seed, profile, false);
            }
            if failures.values().sum::<u64>() >= arguments.failures_max {
                break;
            }
        }
        if told.elapsed().as_secs() >= 5 {
            told = Instant::now();
            let done = seed - arguments.from + 1;
            let rate = done as f64 / begun.elapsed().as_secs_f64();
            eprintln!("{done} of {} seeds, {rate:.0} a second", arguments.seeds);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let rate = arguments.seeds as f64 / seconds;
    print_coverage(&coverage);
    for (invariant, count) in &failures {
        println!("{}: {count} seeds", invariant.label());
    }
    if !failures.is_empty() {
        return ExitCode::FAILURE;
    }
    let missing = coverage.missing();
    if profile.is_none() && arguments.seeds >= SEEDS_FOR_COVERAGE && !missing.is_empty() {
        println!("these never happened: {missing:?}");
        return ExitCode::FAILURE;
    }
    println!(
        "{} seeds from {} held, {rate:.0} a second",
        arguments.seeds, arguments.from
    );
    ExitCode::SUCCESS
}

fn print_coverage(coverage: &Coverage) {
    eprintln!("faults: {:?}", coverage.faults);
    eprintln!("ends of decode legs: {:?}", coverage.outcomes);
    eprintln!("failed loads: {:?}", coverage.failures);
    eprintln!("events: {:?}", coverage.events);
    eprintln!("most blocks pinned at once: {}", coverage.pinned_blocks_max);
}
