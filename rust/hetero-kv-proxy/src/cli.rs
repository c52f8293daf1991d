//! The command line: one struct that the flags, the environment and the TOML file all fill.

pub mod environment;
pub(crate) mod near;

use std::path::PathBuf;

use clap::error::{ContextKind, ErrorKind};
use clap::{Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

use crate::auth::cli::{self as sign, SignArgs};
use crate::bench::cli::{self as bench, BenchArgs};
use crate::mock::cli::{self as mock, MockArgs};
use crate::timeline::cli::{self as trace, TraceArgs};

const EXAMPLE: &str = "\
Example: two prefill engines, one of them with 8 DP ranks, and one decode engine

  hetero-kv-proxy serve --listen 0.0.0.0:8000 \\
    --prefill http://10.0.0.1:8100 --prefill http://10.0.0.2:8100,dp=8 \\
    --decode http://10.0.0.3:8200,dp=8

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{\"model\":\"MODEL\",\"prompt\":\"Hello\",\"max_tokens\":16,\"stream\":true}'

A flag wins over its environment variable, and that over the TOML file. `hetero-kv-proxy check`
with the same flags prints what `serve` would run with, as a TOML file that --config takes.";

/// Routes OpenAI requests to vLLM engines with separate prefill and decode (P/D).
///
/// Each request runs on a prefill engine first; the KV handle in its answer goes to a decode
/// engine, which reads the KV cache from the prefill engine and streams the answer.
#[derive(Debug, Parser)]
#[command(name = "hetero-kv-proxy", version, after_help = EXAMPLE)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the OpenAI API in front of the engines
    #[command(after_help = EXAMPLE)]
    Serve(Box<Invocation>),
    /// Print the resolved configuration as TOML, or every fault in it
    Check(Box<Invocation>),
    /// Sign one request for the admin listener of a proxy with --admin-key-file
    #[command(after_help = sign::EXAMPLE)]
    Sign(SignArgs),
    /// Fetch the times of one request from the admin listener, as a Chrome trace
    #[command(after_help = trace::EXAMPLE)]
    Trace(TraceArgs),
    /// Measure a proxy or an engine: load, times, failures, its processor time
    #[command(after_help = bench::EXAMPLE)]
    Bench(Box<BenchArgs>),
    /// Scripted prefill and decode workers, with faults on request, to try a proxy on
    #[command(after_help = mock::EXAMPLE)]
    Mock(Box<MockArgs>),
}

/// The settings and where the file with more of them is.
#[derive(Debug, Clone, Default, Args)]
pub struct Invocation {
    /// TOML file with any of the settings below; names as the flags, with `_` for `-`; read again on SIGHUP (docs/proxy.md)
    #[arg(long, env = "HETERO_KV_PROXY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The settings given by flag or environment.
    #[command(flatten)]
    pub settings: Settings,
}

/// The fault of a setting that is no number of its kind, told as one that is out of its limits is;
/// `None` for every other error.
pub fn number_fault(error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::ValueValidation {
        return None;
    }
    let told = |kind| error.get(kind).map(ToString::to_string);
    let argument = told(ContextKind::InvalidArg)?;
    let flag = argument.split(' ').next()?;
    let limits = crate::config::limits(flag)?;
    let value: String = told(ContextKind::InvalidValue)?.chars().take(64).collect();
    Some(format!("{flag} {value}: must be {limits}"))
}

/// Declares the settings once: as flags, as environment variables and as TOML keys.
macro_rules! settings {
    ($($(#[$meta:meta])* $field:ident: $kind:ty, $env:literal;)*) => {
        /// Every setting, each absent where its source does not give it.
        #[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Settings {
            $(
                $(#[$meta])*
                // A number below 0 is a value, of which the limits can be told, and no flag.
                #[arg(long, env = $env, allow_negative_numbers = true)]
                pub $field: Option<$kind>,
            )*
        }

        impl Settings {
            /// The settings as a file names them.
            pub(crate) const NAMES: &[&str] = &[$(stringify!($field)),*];

            /// These settings, with those of `other` where these are silent.
            #[must_use]
            pub fn or(self, other: Self) -> Self {
                Self { $($field: self.$field.or(other.$field),)* }
            }
        }
    };
}

settings! {
    /// Address to serve on; port 0 lets the system choose [default: 127.0.0.1:8000]
    #[arg(value_name = "HOST:PORT")]
    listen: String, "HETERO_KV_PROXY_LISTEN";
    /// Address of a listener for administrators, where workers register, are drained and removed (docs/proxy.md); keep clients from it. None without it
    #[arg(value_name = "HOST:PORT")]
    admin_listen: String, "HETERO_KV_PROXY_ADMIN_LISTEN";
    /// File of keys, one a line (# begins a comment), by which requests of administrators and workers must be signed (docs/proxy.md); read again on SIGHUP. Without it nothing is signed
    #[arg(value_name = "FILE")]
    admin_key_file: PathBuf, "HETERO_KV_PROXY_ADMIN_KEY_FILE";
    /// File of keys, one a line (# begins a comment), one of which a client must send as `Authorization: Bearer KEY`; read again on SIGHUP. Without it any client is served
    #[arg(value_name = "FILE")]
    api_key_file: PathBuf, "HETERO_KV_PROXY_API_KEY_FILE";
    /// Whether engines get the client's Authorization [default: true, and false with --api-key-file]
    #[arg(value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    forward_authorization: bool, "HETERO_KV_PROXY_FORWARD_AUTHORIZATION";
    /// Address where MoRI-IO workers register over ZeroMQ, as vLLM has them do (its proxy_ip and proxy_ping_port); with --connector moriio-read or moriio-write. Keep clients from it. None without it
    #[arg(value_name = "HOST:PORT")]
    zmq_listen: String, "HETERO_KV_PROXY_ZMQ_LISTEN";
    /// How long a worker that registered over ZeroMQ is good for after each of its frames, which come every 3 s (older vLLM: 5 s) [default: 15000]
    #[arg(value_name = "MS")]
    zmq_ttl_ms: u64, "HETERO_KV_PROXY_ZMQ_TTL_MS";
    /// Whether workers may register over ZeroMQ, which signs nothing, although --admin-key-file is given [default: false]
    #[arg(value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    zmq_unsigned: bool, "HETERO_KV_PROXY_ZMQ_UNSIGNED";
    /// A prefill instance: base URL, its number of DP ranks, header value of its first rank, and what the connector needs (docs/proxy.md); repeatable (in the environment: separated by blanks)
    #[arg(value_name = "URL[,dp=N][,rank0=K][,...]", num_args = 1, value_delimiter = ' ', action = clap::ArgAction::Append)]
    prefill: Vec<String>, "HETERO_KV_PROXY_PREFILL";
    /// A decode instance; as --prefill
    #[arg(value_name = "URL[,dp=N][,rank0=K][,...]", num_args = 1, value_delimiter = ' ', action = clap::ArgAction::Append)]
    decode: Vec<String>, "HETERO_KV_PROXY_DECODE";
    /// KV connector of the engines: hetero, none (decode alone), nixl, mooncake, moriio-read or moriio-write [default: hetero]
    #[arg(value_name = "NAME")]
    connector: String, "HETERO_KV_PROXY_CONNECTOR";
    /// How slots are chosen: round-robin, least-loaded, power-of-two, consistent-hash or prefix-aware; or auto, which also decides for each request whether it needs prefill at all (then round-robin for prefill and prefix-aware for decode) [default: round-robin]
    #[arg(value_name = "POLICY")]
    policy: String, "HETERO_KV_PROXY_POLICY";
    /// Policy of the prefill leg, instead of --policy
    #[arg(value_name = "POLICY")]
    prefill_policy: String, "HETERO_KV_PROXY_PREFILL_POLICY";
    /// Policy of the decode leg, instead of --policy [default: --policy, or least-loaded without it]
    #[arg(value_name = "POLICY")]
    decode_policy: String, "HETERO_KV_PROXY_DECODE_POLICY";
    /// consistent-hash: header by whose value requests belong together; empty for none [default: x-session-id]
    #[arg(value_name = "HEADER")]
    hash_header: String, "HETERO_KV_PROXY_HASH_HEADER";
    /// consistent-hash: without that header, bytes of the prompt's beginning by which they do; 0 for none [default: 256]
    #[arg(value_name = "BYTES")]
    hash_prompt_bytes: usize, "HETERO_KV_PROXY_HASH_PROMPT_BYTES";
    /// Policy auto: bytes of a prompt that decode has not in its cache from which on prefill computes them; about 4 are a token [default: 2048]
    #[arg(value_name = "BYTES")]
    auto_prompt_bytes_min: usize, "HETERO_KV_PROXY_AUTO_PROMPT_BYTES_MIN";
    /// How often engines are asked for their load (GET /metrics), where a policy goes by load; an answer is good for three intervals; 0 is never [default: 1000]
    #[arg(value_name = "MS")]
    scrape_interval_ms: u64, "HETERO_KV_PROXY_SCRAPE_INTERVAL_MS";
    /// Whether a client may name the prefill worker of its request (`prefill_endpoint` in the body: the URL of a registered one); only where all clients are trusted to choose [default: false]
    #[arg(value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    allow_prefill_endpoint: bool, "HETERO_KV_PROXY_ALLOW_PREFILL_ENDPOINT";
    /// Shares of the revisions that workers tell (revision=...), to try a new one on a few requests; changed at run time by PUT /v1/revisions of the admin listener [default: none, all workers alike]
    #[arg(value_name = "REVISION=WEIGHT[,...]")]
    revision_weights: String, "HETERO_KV_PROXY_REVISION_WEIGHTS";
    /// Whether a prefill answer without a KV handle is a failure (502); with false decode computes the prompt, and it is counted [default: true]
    #[arg(value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    require_kv: bool, "HETERO_KV_PROXY_REQUIRE_KV";
    /// When no prefill engine takes legs or can be reached: fail, or decode-only, where decode computes the prompt, and it is counted [default: fail]
    #[arg(value_name = "fail|decode-only")]
    on_no_prefill: String, "HETERO_KV_PROXY_ON_NO_PREFILL";
    /// Longest wait for a connection to an engine [default: 5000]
    #[arg(value_name = "MS")]
    connect_timeout_ms: u64, "HETERO_KV_PROXY_CONNECT_TIMEOUT_MS";
    /// Deadline of a whole request, both legs and the answer [default: 600]
    #[arg(value_name = "S")]
    request_timeout_s: u64, "HETERO_KV_PROXY_REQUEST_TIMEOUT_S";
    /// Longest silence between two chunks of a decode answer [default: 300]
    #[arg(value_name = "S")]
    stream_idle_timeout_s: u64, "HETERO_KV_PROXY_STREAM_IDLE_TIMEOUT_S";
    /// Longest wait for a client's request head, also on a kept connection [default: 30]
    #[arg(value_name = "S")]
    header_read_timeout_s: u64, "HETERO_KV_PROXY_HEADER_READ_TIMEOUT_S";
    /// Longest silence within a client's request body [default: 30]
    #[arg(value_name = "S")]
    body_read_timeout_s: u64, "HETERO_KV_PROXY_BODY_READ_TIMEOUT_S";
    /// Longest time in which a client takes no byte of its answer [default: 60]
    #[arg(value_name = "S")]
    client_write_timeout_s: u64, "HETERO_KV_PROXY_CLIENT_WRITE_TIMEOUT_S";
    /// Largest request body; larger ones get 413 [default: 67108864]
    #[arg(value_name = "BYTES")]
    body_bytes_max: u64, "HETERO_KV_PROXY_BODY_BYTES_MAX";
    /// Largest prefill answer that is read [default: 67108864]
    #[arg(value_name = "BYTES")]
    prefill_answer_bytes_max: u64, "HETERO_KV_PROXY_PREFILL_ANSWER_BYTES_MAX";
    /// Requests served at once; more wait in the queue [default: 4096]
    #[arg(value_name = "N")]
    requests_max: usize, "HETERO_KV_PROXY_REQUESTS_MAX";
    /// Legs in flight for each DP rank of each instance; more wait in the queue; 0 is no limit [default: 0]
    #[arg(value_name = "N")]
    worker_requests_max: u32, "HETERO_KV_PROXY_WORKER_REQUESTS_MAX";
    /// The same for prefill, instead of --worker-requests-max
    #[arg(value_name = "N")]
    prefill_requests_max: u32, "HETERO_KV_PROXY_PREFILL_REQUESTS_MAX";
    /// The same for decode, instead of --worker-requests-max
    #[arg(value_name = "N")]
    decode_requests_max: u32, "HETERO_KV_PROXY_DECODE_REQUESTS_MAX";
    /// Requests that wait for room; more get 429; 0 is no queue [default: 1024]
    #[arg(value_name = "N")]
    queue_max: usize, "HETERO_KV_PROXY_QUEUE_MAX";
    /// Longest wait for room; then 503 [default: 30]
    #[arg(value_name = "S")]
    queue_timeout_s: u64, "HETERO_KV_PROXY_QUEUE_TIMEOUT_S";
    /// Client connections held at once; more wait in the listen queue [default: 16384]
    #[arg(value_name = "N")]
    connections_max: usize, "HETERO_KV_PROXY_CONNECTIONS_MAX";
    /// Idle connections kept for each engine [default: 1024]
    #[arg(value_name = "N")]
    pool_idle_max: usize, "HETERO_KV_PROXY_POOL_IDLE_MAX";
    /// Age at which an idle engine connection is closed; below the engine's own (vLLM: 5000) [default: 4000]
    #[arg(value_name = "MS")]
    pool_idle_timeout_ms: u64, "HETERO_KV_PROXY_POOL_IDLE_TIMEOUT_MS";
    /// How long a decode leg lives on after its client left, so that the engine takes the request and frees prefill's blocks [default: 1000]
    #[arg(value_name = "MS")]
    handover_grace_ms: u64, "HETERO_KV_PROXY_HANDOVER_GRACE_MS";
    /// Interval of GET /health to each engine [default: 2000]
    #[arg(value_name = "MS")]
    health_interval_ms: u64, "HETERO_KV_PROXY_HEALTH_INTERVAL_MS";
    /// Longest wait for an answer to it [default: 5000]
    #[arg(value_name = "MS")]
    health_timeout_ms: u64, "HETERO_KV_PROXY_HEALTH_TIMEOUT_MS";
    /// Failed probes in a row that make an engine unhealthy [default: 3]
    #[arg(value_name = "N")]
    health_failures_max: u32, "HETERO_KV_PROXY_HEALTH_FAILURES_MAX";
    /// How often a leg that an engine refused or never got is sent again, to another where there is one [default: 2]
    #[arg(value_name = "N")]
    retries_max: u32, "HETERO_KV_PROXY_RETRIES_MAX";
    /// Failed legs in a row that keep an engine out for a time, while another is there; 0 is never [default: 5]
    #[arg(value_name = "N")]
    breaker_failures_max: u32, "HETERO_KV_PROXY_BREAKER_FAILURES_MAX";
    /// That time at first; each failed trial doubles it, up to eight times this [default: 5]
    #[arg(value_name = "S")]
    breaker_open_s: u64, "HETERO_KV_PROXY_BREAKER_OPEN_S";
    /// How long engines that do not tell it (kv.lease_ms of their registration) keep blocks that decode was not seen to take: their lease_s and grace_ms, rounded up. For so long such a transfer keeps its prefill worker from being removed or changing its role [default: 31]
    #[arg(value_name = "S")]
    lease_s: u64, "HETERO_KV_PROXY_LEASE_S";
    /// On SIGTERM or SIGINT: time for running requests to end [default: 30]
    #[arg(value_name = "S")]
    drain_timeout_s: u64, "HETERO_KV_PROXY_DRAIN_TIMEOUT_S";
    /// Share of requests that come without a traceparent of which the engines are told to sample a new trace; 0 makes no traces [default: 0]
    #[arg(value_name = "0..1")]
    trace_sample: f64, "HETERO_KV_PROXY_TRACE_SAMPLE";
    /// Requests that ended last whose times GET /v1/trace/{request id} of --admin-listen tells; 0 for none [default: 256]
    #[arg(value_name = "N")]
    trace_requests_max: usize, "HETERO_KV_PROXY_TRACE_REQUESTS_MAX";
    /// Worker threads; 0 is one for each core [default: 0]
    #[arg(value_name = "N")]
    threads: usize, "HETERO_KV_PROXY_THREADS";
    /// What is logged to stderr: error, warn, info, debug, trace, off, or a tracing filter such as hetero_kv_proxy=debug [default: info]
    #[arg(value_name = "FILTER")]
    log_level: String, "HETERO_KV_PROXY_LOG_LEVEL";
    /// Form of the log: text or json [default: text]
    #[arg(value_name = "text|json")]
    log_format: String, "HETERO_KV_PROXY_LOG_FORMAT";
}
