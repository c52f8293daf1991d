//! `hetero-kv demo`: becomes `python -m hetero_kv.demo`, which does the work and has the flags.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::output::Verdict;

/// Names the interpreter of an environment that has vLLM and this wheel.
const PYTHON_VARIABLE: &str = "HETERO_KV_VLLM_PYTHON";

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Passed on as they are: --topology, --model, --keep, --json, ...; --help lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Replaces this process; returns only when that fails.
pub(crate) fn run(args: &Args) -> Result<Verdict> {
    let python = python();
    let error = Command::new(&python)
        .args(["-m", "hetero_kv.demo"])
        .args(&args.arguments)
        .exec();
    Err(error).with_context(|| {
        format!(
            "cannot start {}; set {PYTHON_VARIABLE} to the Python of an environment that has vLLM \
             and hetero_kv",
            python.display()
        )
    })
}

/// The named interpreter, else the one of the environment this executable was installed into, else
/// the first on PATH.
pub(crate) fn python() -> PathBuf {
    if let Some(named) = std::env::var_os(PYTHON_VARIABLE) {
        return named.into();
    }
    let beside = std::env::current_exe()
        .ok()
        .and_then(|executable| Some(executable.parent()?.join("python3")));
    match beside {
        Some(python) if python.exists() => python,
        Some(_) | None => "python3".into(),
    }
}
