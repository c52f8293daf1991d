//! The flags of `mock`.

use clap::{Args, ValueEnum};

use super::fault::Fault;
use crate::config::host_port;

/// Shown below the flags.
pub const EXAMPLE: &str = "\
Example: two prefill and two decode workers, a proxy before them, and a measurement

  hetero-kv-proxy mock --listen 127.0.0.1:8100,role=prefill,workers=2 \\
    --listen 127.0.0.1:8200,role=decode,workers=2 --pace-ms 20 --prefill-delay-ms 50
  hetero-kv-proxy serve --prefill http://127.0.0.1:8100 --prefill http://127.0.0.1:8101 \\
    --decode http://127.0.0.1:8200 --decode http://127.0.0.1:8201
  hetero-kv-proxy bench --url http://127.0.0.1:8000 --concurrency 32 --per-concurrency 10

What a request is, its kv_transfer_params say:
  do_remote_decode: true   a prefill leg: one token, not streamed; the prompt's blocks are pinned
                           for --lease-s and the answer carries their kv_transfer_params
  do_remote_prefill: true  a decode leg: the params are checked field by field and the blocks freed;
                           blocks that are pinned no longer are answered 500, as vLLM does
  neither                  an ordinary request, computed here

Faults (--fail, repeatable): KIND[=VALUE][,every=N][,times=N][,leg=prefill|decode|plain]
  status=CODE    answer with this status (400 to 599)
  close          close the connection instead of answering
  silence        take the request and never answer
  slow-head=MS   answer this much later
  cut=N          close the connection after N chunks; of a plain answer, in its middle
  hang=N         after N chunks send nothing more and keep the connection
  error-event=N  after N chunks an error event and the end, under the 200 that was sent
  no-done        a stream that ends in order but without `data: [DONE]`
  no-params      a prefill answer without kv_transfer_params
`every=N` takes each Nth request of a worker (1), `times=N` only so many (all), `leg` only such.
The first fault that applies is taken.

GET /health, /v1/models and /metrics answer too. /metrics has vLLM's vllm:num_requests_running and
vllm:num_requests_waiting, and hetero_kv_mock_*: legs, refusals by reason, aborts, tokens, and the
transfers that are pinned, freed and expired. The model is always named as --model says.";

/// More workers are a mistake.
const WORKERS_MAX: u16 = 1_024;
/// An hour: no test waits longer.
pub(crate) const DELAY_MS_MAX: u64 = 3_600_000;

/// The legs that a worker takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Both.
    Any,
    /// No decode legs.
    Prefill,
    /// No prefill legs.
    Decode,
}

impl Role {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// When a stream ends with a chunk that has the usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Usage {
    /// When the request's stream_options ask for it
    Request,
    /// Always
    Always,
    /// Never
    Never,
}

/// Where workers listen: `HOST:PORT[,role=R][,workers=N]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// Name or address.
    pub host: String,
    /// Port of the first; 0 lets the system choose each.
    pub port: u16,
    /// Legs that they take.
    pub role: Role,
    /// How many, on successive ports.
    pub workers: u16,
}

impl Listen {
    /// The port of the worker at `place`.
    ///
    /// # Errors
    /// There is no such port.
    pub fn port_of(&self, place: u16) -> anyhow::Result<u16> {
        if self.port == 0 {
            return Ok(0);
        }
        self.port
            .checked_add(place)
            .ok_or_else(|| anyhow::anyhow!("worker {place} of port {} has no port", self.port))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let (host, port) = host_port(parts.next().unwrap_or_default())?;
        let mut listen = Self {
            host,
            port,
            role: Role::Any,
            workers: 1,
        };
        for part in parts {
            match part.split_once('=') {
                Some(("role", "any")) => listen.role = Role::Any,
                Some(("role", "prefill")) => listen.role = Role::Prefill,
                Some(("role", "decode")) => listen.role = Role::Decode,
                Some(("role", role)) => {
                    return Err(format!("role is any, prefill or decode, not `{role}`"));
                }
                Some(("workers", count)) => {
                    listen.workers = count
                        .parse()
                        .ok()
                        .filter(|count| (1..=WORKERS_MAX).contains(count))
                        .ok_or_else(|| {
                            format!("workers must be 1 to {WORKERS_MAX}, not `{count}`")
                        })?;
                }
                Some(_) | None => {
                    return Err(format!(
                        "unknown part `{part}`; they are role= and workers="
                    ));
                }
            }
        }
        Ok(listen)
    }
}

/// How the workers behave.
#[derive(Debug, Clone, Args)]
pub struct MockArgs {
    /// Where to listen, which legs to take, and how many workers on successive ports (port 0: the system chooses each); repeatable
    #[arg(long, value_name = "HOST:PORT[,role=any|prefill|decode][,workers=N]",
        default_value = "127.0.0.1:8100", value_parser = Listen::parse)]
    pub listen: Vec<Listen>,
    /// Name of the model in every answer
    #[arg(long, default_value = "mock-model")]
    pub model: String,
    /// Tokens of an answer whose request sets no limit
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub tokens: u64,
    /// Milliseconds from one token to the next; 0 sends them as fast as they are taken, one write each
    #[arg(long, default_value_t = 0.0, value_parser = milliseconds)]
    pub pace_ms: f64,
    /// Time that a prefill leg takes, also in front of an ordinary request's first token
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=DELAY_MS_MAX))]
    pub prefill_delay_ms: u64,
    /// Time from a decode leg to its first token
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=DELAY_MS_MAX))]
    pub decode_delay_ms: u64,
    /// Bytes of text of each token; the text counts the tokens
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=65_536))]
    pub token_bytes: u64,
    /// Tokens in one chunk of a stream
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub chunk_tokens: u64,
    /// When a stream ends with a chunk that has the usage
    #[arg(long, value_enum, default_value_t = Usage::Request)]
    pub usage: Usage,
    /// A fault; see below
    #[arg(long, value_name = "FAULT", value_parser = Fault::parse)]
    pub fail: Vec<Fault>,
    /// Refuse what a decode worker would have to compute itself: no params, or params of another prompt
    #[arg(long)]
    pub require_kv: bool,
    /// How long the blocks of a prefill leg stay pinned
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub lease_s: u64,
    /// Largest request body; larger ones get 413
    #[arg(long, default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub body_bytes_max: u64,
    /// Deadline of a request, also of one that hangs on purpose
    #[arg(long, default_value_t = 3_600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub request_timeout_s: u64,
    /// Connections held at once, of all workers together; more wait in the listen queue
    #[arg(long, default_value_t = 65_536, value_parser = connections)]
    pub connections_max: usize,
    /// Threads; 0 is one for each core
    #[arg(long, default_value_t = 0, value_parser = threads)]
    pub threads: usize,
}

/// Milliseconds with a fraction, at most an hour.
pub(crate) fn milliseconds(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|ms| (0.0..=DELAY_MS_MAX as f64).contains(ms))
        .ok_or_else(|| format!("must be 0 to {DELAY_MS_MAX}, not `{text}`"))
}

fn connections(text: &str) -> Result<usize, String> {
    within(text, 1, 1_000_000)
}

pub(crate) fn threads(text: &str) -> Result<usize, String> {
    within(text, 0, 1_024)
}

fn within(text: &str, low: usize, high: usize) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|number| (low..=high).contains(number))
        .ok_or_else(|| format!("must be {low} to {high}, not `{text}`"))
}
