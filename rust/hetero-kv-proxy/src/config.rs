//! The settings once checked: what is here is valid, and every fault is reported at once.
//!
//! A setting begins in [`Settings`], which makes it a flag, an environment variable and a key of the
//! TOML file. From there it has a field of [`Config`] and a line in `resolve`, where the fault of a
//! value is told; the default and the limits of a number stand in `numbers`. What a proxy that runs
//! cannot take over is listed in `next`.

use std::time::Duration;

use http::HeaderName;

use crate::auth::keys::Keys;
use crate::cli::{Invocation, Settings};
use crate::connectors::Connector;
use crate::routing::policy::PolicyKind;
use crate::routing::{AutoRules, Weights};

mod access;
mod address;
mod faults;
mod file;
mod next;
mod numbers;
mod place;
mod policies;
mod resolve;
mod workers;

pub use address::{BaseUrl, Worker, host_port};
pub(crate) use address::{WorkerFault, base_url};
pub(crate) use address::{assemble as assemble_worker, keys as worker_keys};
pub(crate) use numbers::limits;
pub(crate) use place::own_listener;
pub(crate) use workers::worker_faults;

/// Why there is no configuration: every fault that was found.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct ConfigError(pub Vec<String>);

/// Form of the log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What follows where no prefill engine takes legs or can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnNoPrefill {
    /// The request fails.
    Fail,
    /// Decode computes the prompt, and it is counted.
    DecodeOnly,
}

/// Everything `serve` runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// `HOST:PORT`, IPv6 in brackets.
    pub listen: String,
    /// `HOST:PORT` of the administrators' listener, where there is one.
    pub admin_listen: Option<String>,
    /// Keys by which administrators and workers sign, where they must.
    pub admin_keys: Option<Keys>,
    /// Keys of the clients, where they need one.
    pub api_keys: Option<Keys>,
    /// Whether engines get the client's `Authorization`.
    pub forward_authorization: bool,
    /// `HOST:PORT` where workers register over ZeroMQ, where they may.
    pub zmq_listen: Option<String>,
    /// For how long such a registration is good.
    pub zmq_ttl: Duration,
    /// KV connector of the engines.
    pub connector: &'static dyn Connector,
    /// Prefill instances: at least one where none can register, and none for a connector without a
    /// prefill leg.
    pub prefill: Vec<Worker>,
    /// Decode instances: at least one where none can register.
    pub decode: Vec<Worker>,
    /// Policy of the prefill leg.
    pub prefill_policy: PolicyKind,
    /// Policy of the decode leg.
    pub decode_policy: PolicyKind,
    /// When decode serves requests alone, where that is decided for each.
    pub auto: Option<AutoRules>,
    /// Header by whose value requests belong together.
    pub hash_header: Option<HeaderName>,
    /// Bytes of the prompt's beginning by which requests without that header belong together.
    pub hash_prompt_bytes: usize,
    /// Interval of scrapes; zero is none.
    pub scrape_interval: Duration,
    /// Whether a client may name the prefill worker.
    pub allow_prefill_endpoint: bool,
    /// Shares of revisions, at first.
    pub revision_weights: Option<Weights>,
    /// Whether a prefill answer without a KV handle fails the request.
    pub require_kv: bool,
    /// What follows where no prefill engine takes legs or can be reached.
    pub on_no_prefill: OnNoPrefill,
    /// Longest wait for a connection to an engine.
    pub connect_timeout: Duration,
    /// Deadline of a whole request.
    pub request_timeout: Duration,
    /// Longest silence between chunks of an answer.
    pub stream_idle_timeout: Duration,
    /// Longest wait for a request head.
    pub header_read_timeout: Duration,
    /// Longest silence within a request body.
    pub body_read_timeout: Duration,
    /// Longest time in which a client takes no byte.
    pub client_write_timeout: Duration,
    /// Largest request body.
    pub body_bytes_max: u64,
    /// Largest prefill answer.
    pub prefill_answer_bytes_max: u64,
    /// Requests at once.
    pub requests_max: usize,
    /// Legs in flight for each prefill slot; `None` is no limit.
    pub prefill_requests_max: Option<u32>,
    /// Legs in flight for each decode slot; `None` is no limit.
    pub decode_requests_max: Option<u32>,
    /// Requests that wait for room.
    pub queue_max: usize,
    /// Longest wait for room.
    pub queue_timeout: Duration,
    /// Client connections at once.
    pub connections_max: usize,
    /// Idle connections kept for each engine.
    pub pool_idle_max: usize,
    /// Age at which an idle engine connection is closed.
    pub pool_idle_timeout: Duration,
    /// Life of a decode leg after its client left.
    pub handover_grace: Duration,
    /// Interval of the health probes.
    pub health_interval: Duration,
    /// Longest wait for a probe's answer.
    pub health_timeout: Duration,
    /// Failed probes in a row that make an engine unhealthy.
    pub health_failures_max: u32,
    /// Retries of one leg of one request.
    pub retries_max: u32,
    /// Failed legs in a row that keep an engine out; 0 is never.
    pub breaker_failures_max: u32,
    /// For how long at first.
    pub breaker_open: Duration,
    /// How long engines keep blocks that decode was not seen to take.
    pub lease: Duration,
    /// Time for running requests to end at shutdown.
    pub drain_timeout: Duration,
    /// Requests whose times are kept.
    pub trace_requests_max: usize,
    /// Share of new traces that are sampled; 0 for no new traces.
    pub trace_sample: f64,
    /// Worker threads; 0 is one for each core.
    pub threads: usize,
    /// Tracing filter.
    pub log_level: String,
    /// Form of the log.
    pub log_format: LogFormat,
    /// The settings that say all this, none of them absent that has a default.
    resolved: Settings,
    /// What it was resolved from, to resolve it again.
    pub(crate) source: Invocation,
}

impl Config {
    /// The configuration as a TOML file that `--config` takes.
    ///
    /// # Errors
    /// A value that TOML cannot hold: none of the settings' types is one.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(&self.resolved)
    }
}

#[cfg(test)]
mod tests;
