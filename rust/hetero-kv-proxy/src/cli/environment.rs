//! Environment variables that are meant for the proxy and that no setting has: as with an unknown
//! flag, a slip in a name must not leave its setting at the default.

use std::ffi::OsString;

use clap::CommandFactory;

use super::Cli;
use super::near::nearest;

const PREFIX: &str = "HETERO_KV_PROXY_";
/// Further ones are counted: an environment has no limit.
const FAULTS_MAX: usize = 16;
/// Of a name that is shown.
const SHOWN_CHARS_MAX: usize = 80;

/// A fault for each variable of this environment that begins with `HETERO_KV_PROXY_` and is neither
/// a setting's nor one that Kubernetes puts there for a service of that name.
pub fn faults(names: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut command = Cli::command();
    // Arguments of subcommands are known once they are built.
    command.build();
    let subcommands = command.get_subcommands();
    let arguments = subcommands.flat_map(clap::Command::get_arguments);
    let variables = arguments.filter_map(|argument| argument.get_env()?.to_str());
    let mut known: Vec<&str> = variables.collect();
    known.sort_unstable();
    known.dedup();
    let mut unknown: Vec<String> = names
        .filter_map(|name| {
            let name = name.to_string_lossy();
            let ours = name.starts_with(PREFIX) && !is_service_link(&name);
            (ours && !known.contains(&&*name)).then(|| name.into_owned())
        })
        .collect();
    unknown.sort();
    let rest = unknown.len().saturating_sub(FAULTS_MAX);
    let mut faults: Vec<String> = unknown
        .iter()
        .take(FAULTS_MAX)
        .map(|name| fault(name, &known))
        .collect();
    if rest > 0 {
        faults.push(format!(
            "and {rest} more environment variables of {PREFIX}..."
        ));
    }
    faults
}

fn fault(name: &str, known: &[&str]) -> String {
    let shown: String = name.chars().take(SHOWN_CHARS_MAX).collect();
    // Behind what all have, so that a short name is not near all others.
    let known = known.iter().filter_map(|known| known.strip_prefix(PREFIX));
    let meant = nearest(name.trim_start_matches(PREFIX), known);
    let way_out = match meant {
        Some(meant) => format!("did you mean {PREFIX}{meant}?"),
        None => "unset it; `hetero-kv-proxy serve --help` lists those that are read".to_owned(),
    };
    format!("{shown}: no setting has this environment variable; {way_out}")
}

/// Whether Kubernetes made this name: a service `hetero-kv-proxy-...` puts
/// `HETERO_KV_PROXY_..._SERVICE_HOST`, `..._PORT_8000_TCP_ADDR` and their like into every container
/// of its namespace (`enableServiceLinks`).
fn is_service_link(name: &str) -> bool {
    let has_port = |protocol: &&str| {
        let mut parts = name.split("_PORT_").skip(1);
        parts.any(|behind| {
            let digits = behind.bytes().take_while(u8::is_ascii_digit).count();
            digits > 0 && behind[digits..].starts_with(protocol)
        })
    };
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || ["_TCP", "_UDP", "_SCTP"].iter().any(has_port)
}

#[cfg(test)]
mod tests;
