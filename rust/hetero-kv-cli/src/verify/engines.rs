//! Which engines there are.

use std::fmt;
use std::str::FromStr;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::http::{Client, Url};

pub(super) const HOW_TO_NAME: &str =
    "name engines with --engine URL,role=prefill and --engine URL,role=decode";

/// Most engines whose counters are read.
const ENGINES_MAX: usize = 1024;

/// What an engine does in the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    Prefill,
    Decode,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// One server whose `/metrics` is read; its DP ranks share it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Engine {
    pub(super) role: Role,
    pub(super) url: Url,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.url)
    }
}

/// `URL,role=prefill|decode`.
#[derive(Clone, Debug)]
pub(super) struct EngineArg(Engine);

impl FromStr for EngineArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (url, role) = match text.rsplit_once(",role=") {
            Some((url, "prefill")) => (url, Role::Prefill),
            Some((url, "decode")) => (url, Role::Decode),
            Some(_) | None => return Err("expected URL,role=prefill or URL,role=decode".to_owned()),
        };
        Ok(Self(Engine {
            role,
            url: url.parse()?,
        }))
    }
}

/// One row of the proxy's `GET /workers`.
#[derive(Deserialize)]
struct Worker {
    url: String,
    role: Role,
}

/// The engines named by flags, else those the proxy knows; each once.
///
/// # Errors
/// A proxy out of reach, or one whose list is of another form.
pub(super) fn list(
    client: &Client,
    proxy: &Url,
    named: &[EngineArg],
) -> anyhow::Result<Vec<Engine>> {
    let mut engines: Vec<Engine> = if named.is_empty() {
        let workers: Vec<Worker> = client
            .get_json(proxy, "/workers", None)
            .with_context(|| format!("asking the proxy for its engines; {HOW_TO_NAME}"))?;
        workers
            .into_iter()
            .map(|worker| {
                let url = worker
                    .url
                    .parse()
                    .map_err(anyhow::Error::msg)
                    .with_context(|| format!("{proxy}/workers names {:?}", worker.url))?;
                Ok(Engine {
                    role: worker.role,
                    url,
                })
            })
            .collect::<anyhow::Result<_>>()?
    } else {
        named.iter().map(|arg| arg.0.clone()).collect()
    };
    engines.sort();
    engines.dedup();
    anyhow::ensure!(
        engines.len() <= ENGINES_MAX,
        "{} engines are more than the {ENGINES_MAX} that are read",
        engines.len()
    );
    Ok(engines)
}
