//! Whether the environment's vLLM is one that is supported, and loads the connector.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::report::Finding;
use super::subprocess;
use super::versions::VERSION;

/// Versions of vLLM that are supported: from the first, below the second (major, minor).
const SUPPORTED: ((u32, u32), (u32, u32)) = ((0, 32), (0, 33));

/// vLLM's first import takes ten seconds at rest, and minutes on a small machine that is busy.
const LIMIT: Duration = Duration::from_secs(300);

const PROBE: &str = include_str!("vllm_probe.py");
const MARK: &str = "hetero-kv-doctor ";

/// One line of the probe.
#[derive(Debug, Deserialize)]
#[serde(tag = "stage", rename_all = "snake_case")]
enum Stage {
    Python {
        version: String,
        executable: String,
    },
    Vllm {
        version: Option<String>,
        error: Option<String>,
        #[serde(default)]
        missing: bool,
    },
    Package {
        version: Option<String>,
        entry_points: Vec<String>,
        allowed: Option<String>,
    },
    Connector {
        module: Option<String>,
        error: Option<String>,
    },
}

/// Findings on vLLM and on the connector in it.
pub(super) fn check(python: &Path) -> Vec<Finding> {
    let mut command = Command::new(python);
    // Not the current folder's modules, which an engine does not see either. (`-P` is younger than
    // CPython 3.10.)
    command.current_dir("/").args(["-c", PROBE]);
    let ran = match subprocess::run(&mut command, &[], LIMIT) {
        Ok(ran) => ran,
        Err(error) => {
            return vec![Finding::fail(
                "vllm",
                format!("{} cannot be started: {error}", python.display()),
                "name the interpreter of the engines' environment with --python, or \
                 HETERO_KV_VLLM_PYTHON",
            )];
        }
    };
    let stages = ran
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix(MARK))
        .filter_map(|line| serde_json::from_str(line).ok());
    findings(python, stages, &ran.ending(LIMIT))
}

/// `ending` is how the interpreter ended, for stages that are not there.
fn findings(python: &Path, stages: impl Iterator<Item = Stage>, ending: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut at = python.display().to_string();
    let mut package = Package::default();
    let mut ended = false;
    for stage in stages {
        match stage {
            Stage::Python {
                version,
                executable,
            } => at = format!("{executable} (Python {version})"),
            Stage::Vllm {
                version,
                error,
                missing,
            } => {
                let (finding, loaded) = vllm(&at, version, error, missing);
                findings.push(finding);
                ended = !loaded;
            }
            Stage::Package {
                version,
                entry_points,
                allowed,
            } => {
                package = Package {
                    version,
                    entry_points,
                    allowed,
                }
            }
            Stage::Connector { module, error } => {
                findings.push(connector(&at, &package, module, error));
                ended = true;
            }
        }
    }
    if !ended {
        let (check, what) = if findings.is_empty() {
            ("vllm", "importing vLLM")
        } else {
            ("connector", "loading the connector")
        };
        findings.push(Finding::fail(
            check,
            format!("{at}: {what} did not end well, {ending}"),
            format!(
                "run `{} -c 'import vllm'` and mend what it says",
                python.display()
            ),
        ));
    }
    findings
}

/// What of this package the environment has.
#[derive(Default)]
struct Package {
    version: Option<String>,
    entry_points: Vec<String>,
    allowed: Option<String>,
}

fn supported_text() -> String {
    let ((low_major, low_minor), (high_major, high_minor)) = SUPPORTED;
    format!(">={low_major}.{low_minor},<{high_major}.{high_minor}")
}

/// Major and minor number of a version such as `0.32.0rc1+cpu`.
fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    let major = parts.next()?.parse().ok()?;
    let minor = parts.next()?;
    let digits = minor
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(minor.len());
    Some((major, minor[..digits].parse().ok()?))
}

/// The finding on vLLM, and whether it could be imported.
fn vllm(
    at: &str,
    version: Option<String>,
    error: Option<String>,
    missing: bool,
) -> (Finding, bool) {
    let install = format!(
        "install vLLM {} there, or name the engines' interpreter with --python",
        supported_text()
    );
    if let Some(error) = error {
        let found = if missing {
            format!("{at} has no vLLM")
        } else {
            format!("{at} has a vLLM that cannot be imported: {error}")
        };
        return (Finding::fail("vllm", found, install), false);
    }
    let version = version.unwrap_or_default();
    let (low, high) = SUPPORTED;
    let supported = major_minor(&version).is_some_and(|found| low <= found && found < high);
    let found = format!("{version} in {at}");
    if supported {
        return (Finding::ok("vllm", found), true);
    }
    let found = format!("{found} is not a supported version ({})", supported_text());
    (Finding::fail("vllm", found, install), true)
}

fn connector(
    at: &str,
    package: &Package,
    module: Option<String>,
    error: Option<String>,
) -> Finding {
    let check = "connector";
    let installed = package.version.as_deref();
    let Some(module) = module else {
        let error = error.unwrap_or_default();
        let found = format!("vLLM in {at} does not load HeteroKVConnector: {error}");
        let mend = if installed.is_none() {
            format!("install the wheel there: `pip install hetero_kv=={VERSION}` (or its file)")
        } else if package.entry_points.is_empty() {
            "the installed hetero_kv has no vllm.general_plugins entry point: install the wheel \
             instead of a copied folder, or set kv_connector_module_path to hetero_kv.connector"
                .to_owned()
        } else if let Some(allowed) = &package.allowed
            && !allowed.split(',').any(|name| name.trim() == "hetero_kv")
        {
            format!("VLLM_PLUGINS is {allowed:?}: add hetero_kv to it, or unset it")
        } else {
            "mend what it says; the engine would stop at start with the same".to_owned()
        };
        return Finding::fail(check, found, mend);
    };
    match installed {
        Some(version) if version == VERSION => Finding::ok(
            check,
            format!("HeteroKVConnector of {module}, hetero_kv {version}"),
        ),
        installed => Finding::warn(
            check,
            format!(
                "HeteroKVConnector of {module}: hetero_kv {} there, {VERSION} here",
                installed.unwrap_or("without metadata")
            ),
            "install one version, or run the hetero-kv of that environment",
        ),
    }
}

#[cfg(test)]
mod tests;
