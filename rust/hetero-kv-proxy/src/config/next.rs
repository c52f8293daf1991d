//! Another configuration for a proxy that runs: what it takes over, and what it keeps for its life.

use toml::{Table, Value};

use super::{Config, ConfigError};
use crate::cli::Invocation;

/// Settings that are bound to what a proxy made at its start: its listeners, its threads, what its
/// connections were opened with, and the meaning of every leg.
const KEPT: [&str; 11] = [
    "listen",
    "admin_listen",
    "zmq_listen",
    "zmq_ttl_ms",
    "connector",
    "connections_max",
    "connect_timeout_ms",
    "pool_idle_max",
    "pool_idle_timeout_ms",
    "threads",
    "log_format",
];
/// They are told worker by worker.
const WORKERS: [&str; 2] = ["prefill", "decode"];

/// A setting with another value than the one that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Difference {
    /// As in the file.
    pub(crate) setting: String,
    /// As TOML; `none` without one.
    pub(crate) running: String,
    /// Likewise.
    pub(crate) next: String,
}

/// What becomes of a configuration that is read while another runs.
#[derive(Debug)]
pub(crate) struct Next {
    /// Differences that a running proxy cannot take over.
    pub(crate) kept: Vec<Difference>,
    /// Those that it does, but for workers.
    pub(crate) changed: Vec<Difference>,
    /// What it then runs with, or every fault of it.
    pub(crate) config: Result<Box<Config>, ConfigError>,
}

fn shown(value: Option<&Value>) -> String {
    value.map_or_else(|| "none".to_owned(), ToString::to_string)
}

fn differences(running: &Table, next: &Table, of: impl Fn(&str) -> bool) -> Vec<Difference> {
    let mut names: Vec<&String> = running.keys().chain(next.keys()).collect();
    names.sort();
    names.dedup();
    let names = names.into_iter().filter(|name| of(name));
    let differing = names.filter(|name| running.get(*name) != next.get(*name));
    let each = differing.map(|name| Difference {
        setting: name.clone(),
        running: shown(running.get(name)),
        next: shown(next.get(name)),
    });
    each.collect()
}

/// A setting of keys that is no longer given would open to everybody what it closed.
fn dropped_keys(running: &Config, next: &Config) -> Vec<String> {
    let keys = [
        (
            "admin_key_file",
            running.admin_keys.is_some() && next.admin_keys.is_none(),
            &running.resolved.admin_key_file,
            "anybody change the workers",
        ),
        (
            "api_key_file",
            running.api_keys.is_some() && next.api_keys.is_none(),
            &running.resolved.api_key_file,
            "any client in",
        ),
    ];
    let dropped = keys.into_iter().filter(|(_, dropped, ..)| *dropped);
    let told = dropped.map(|(name, _, path, lets)| {
        let path = path.as_deref().unwrap_or("".as_ref()).display();
        format!(
            "{name}: is {path} and no longer given, which would let {lets}; give it, or restart the \
             proxy without it"
        )
    });
    told.collect()
}

impl Config {
    /// What becomes of `next` while this configuration runs.
    pub(crate) fn followed_by(&self, next: &Self) -> Next {
        let tables = (
            Table::try_from(&self.resolved),
            Table::try_from(&next.resolved),
        );
        let (running, mut wanted) = match tables {
            (Ok(running), Ok(wanted)) => (running, wanted),
            (Err(error), _) | (_, Err(error)) => {
                return Next {
                    kept: Vec::new(),
                    changed: Vec::new(),
                    config: Err(ConfigError(vec![error.to_string()])),
                };
            }
        };
        let kept = differences(&running, &wanted, |name| KEPT.contains(&name));
        for difference in &kept {
            let name = &difference.setting;
            match running.get(name) {
                Some(value) => wanted.insert(name.clone(), value.clone()),
                None => wanted.remove(name),
            };
        }
        let changed = differences(&running, &wanted, |name| !WORKERS.contains(&name));
        let dropped = dropped_keys(self, next);
        // What is kept and what is new have to go together, as at a start.
        let settings = wanted
            .try_into()
            .map_err(|error: toml::de::Error| ConfigError(vec![error.to_string()]));
        let config = match settings.and_then(Self::from_settings) {
            Ok(_) if !dropped.is_empty() => Err(ConfigError(dropped)),
            Ok(config) => Ok(Box::new(Self {
                source: Invocation::clone(&self.source),
                ..config
            })),
            Err(ConfigError(mut faults)) => {
                faults.splice(0..0, dropped);
                Err(ConfigError(faults))
            }
        };
        Next {
            kept,
            changed,
            config,
        }
    }
}

#[cfg(test)]
mod tests;
