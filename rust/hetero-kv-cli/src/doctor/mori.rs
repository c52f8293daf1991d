//! Whether the environment's AMD package and ROCm are there for the transport `mori`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hetero_kv_transport::mori::MORI_VERSIONS;
use serde::Deserialize;

use super::report::Finding;
use super::subprocess;

const CHECK: &str = "mori";

/// The package and ROCm's libraries are some hundred megabytes, read on first use.
const LIMIT: Duration = Duration::from_secs(120);

const PROBE: &str = include_str!("mori_probe.py");
const MARK: &str = "hetero-kv-doctor ";

/// One line of the probe.
#[derive(Debug, Deserialize)]
#[serde(tag = "stage", rename_all = "snake_case")]
enum Stage {
    /// hetero_kv is imported.
    Package,
    /// AMD's package is loaded, with the ROCm libraries that it links.
    Loaded { version: String },
    /// Nothing of this machine would end or hang the process.
    Machine,
    /// Something is missing; the text has the way out.
    Lacks { what: String },
}

/// `required`: the engines' `transport` is `mori`.
pub(super) fn check(python: &Path, required: bool) -> Finding {
    let at = python.display();
    let mut command = Command::new(python);
    command.current_dir("/").args(["-c", PROBE]);
    match subprocess::run(&mut command, &[], LIMIT) {
        Err(error) => lacking(required, &format!("{at} cannot be started: {error}")),
        Ok(ran) => {
            let stages = ran
                .stdout
                .lines()
                .filter_map(|line| line.strip_prefix(MARK))
                .filter_map(|line| serde_json::from_str(line).ok());
            finding(&at.to_string(), stages, required, &ran.ending(LIMIT))
        }
    }
}

/// `ending` is how the interpreter ended, for stages that are not there.
fn finding(at: &str, stages: impl Iterator<Item = Stage>, required: bool, ending: &str) -> Finding {
    let mut package = None;
    let mut step = "importing hetero_kv";
    for stage in stages {
        match stage {
            Stage::Package => step = "loading amd-mori and ROCm",
            Stage::Loaded { version } => {
                package = Some(version);
                step = "asking ROCm for its GPUs";
            }
            Stage::Machine => {
                let (lowest, below) = MORI_VERSIONS;
                let version = package.unwrap_or_default();
                return Finding::ok(
                    CHECK,
                    format!(
                        "amd-mori {version} (supported: {lowest} to below {below}) and ROCm are \
                         loaded in {at}, and ROCm sees a GPU"
                    ),
                );
            }
            Stage::Lacks { what } => {
                let loaded =
                    package.map_or_else(String::new, |version| format!("amd-mori {version}: "));
                return lacking(required, &format!("{at}: {loaded}{what}"));
            }
        }
    }
    lacking(
        required,
        &format!("{at}: {step} did not end well, {ending}"),
    )
}

/// Nothing is wrong with an environment without it, unless it is asked for by name.
fn lacking(required: bool, found: &str) -> Finding {
    if !required {
        return Finding::ok(
            CHECK,
            format!("not available, and only transport mori needs it: {found}"),
        );
    }
    Finding::fail(
        CHECK,
        found,
        "docs/mori.md lists what it needs, or set another transport; --python names the engines' \
         interpreter",
    )
}

#[cfg(test)]
mod tests;
