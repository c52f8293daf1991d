//! The flags of `bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use http::{HeaderName, HeaderValue};

use crate::mock::cli::threads;

/// Shown below the flags.
pub const EXAMPLE: &str = "\
Examples
  The columns of RFC #46107, for a proxy that serves, with 10 requests for each connection:
    hetero-kv-proxy bench --url http://127.0.0.1:8000 --concurrency 32,128,512 \\
      --per-concurrency 10 --warmup --prompt-tokens 8192 --max-tokens 1024

  Arrivals that do not wait for answers, 20 a second for a minute, kept and compared:
    hetero-kv-proxy bench --url http://127.0.0.1:8000 --rate 20 --duration 60 --json a.json
    hetero-kv-proxy bench --url http://127.0.0.1:9000 --rate 20 --duration 60 --json b.json
    hetero-kv-proxy bench --compare a.json b.json

  What a small request costs a proxy on this host in processor time (mock workers behind it):
    hetero-kv-proxy bench --url http://127.0.0.1:8000 --concurrency 32 --duration 5 \\
      --no-stream --warmup 500 --pid $(pidof nginx | tr ' ' ,)

What is counted
  sent = completed + failed. A request is completed when its status is 200, the whole body came, no
  event holds an error, a stream ended with `data: [DONE]`, and at least one token came. All others
  are failures, by name: connect, connect_timeout, closed_before_head, timeout_before_head,
  timeout_in_answer, status_NNN, body_broken, too_long, content_type, bad_json, error_in_200,
  no_done, data_after_done, no_tokens, token_count, not_sent, interrupted. Only completed requests
  are in the times and rates.
  TTFT: from the request (in an open loop: from when it was due) to its first token. TPOT: from the
  first token to the last, by the tokens between. ITL: from a chunk to the next. TTFB: to the first
  byte of the body. E2E: to the end. P99 within 1 %. tok/s: by the usage in the answers; without
  it a chunk counts as a token, and the prompt's tokens only where --prompt-tokens gives them.
  CPU: of --pid and its descendants; a chunk's is the same time by chunks.

Exit status: 0 all completed, 1 some failed or nothing could be measured, 2 usage.";

/// How requests of an open loop arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arrivals {
    /// Independently of each other
    Poisson,
    /// At equal distances
    Uniform,
}

/// What to send where, and what to make of it.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Base URL of the proxy or engine
    #[arg(long, value_name = "URL", required_unless_present = "compare")]
    pub url: Option<String>,
    /// Compare two results that --json wrote, instead of measuring
    #[arg(long, num_args = 2, value_names = ["A.json", "B.json"], conflicts_with_all = ["url", "json"])]
    pub compare: Option<Vec<PathBuf>>,

    /// Closed loop: as many requests at once, one round for each number
    #[arg(long, value_name = "N,N", value_delimiter = ',', help_heading = "Load",
        value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub concurrency: Vec<u32>,
    /// Closed loop: requests of a round, by its concurrency [default: 10]
    #[arg(long, value_name = "N", help_heading = "Load", conflicts_with = "duration",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub per_concurrency: Option<u32>,
    /// Open loop: requests a second, whether or not answers come; one round for each number
    #[arg(long, value_name = "R,R", value_delimiter = ',', help_heading = "Load",
        conflicts_with = "concurrency", requires = "duration", value_parser = rate)]
    pub rate: Vec<f64>,
    /// Seconds in which a round sends; what runs then is waited for
    #[arg(long, value_name = "S", help_heading = "Load", value_parser = seconds)]
    pub duration: Option<f64>,
    /// How requests of an open loop arrive
    #[arg(long, value_enum, default_value_t = Arrivals::Poisson, help_heading = "Load")]
    pub arrivals: Arrivals,
    /// Requests before each round that are not counted, as many at once as the round has; without N
    /// one for each of those [default: none]
    #[arg(long, value_name = "N", help_heading = "Load")]
    pub warmup: Option<Option<u32>>,
    /// Open loop: requests in flight; one that would be more counts as not_sent
    #[arg(long, value_name = "N", default_value_t = 10_000, help_heading = "Load",
        value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub in_flight_max: u32,
    /// A new connection for each request
    #[arg(long, help_heading = "Load")]
    pub no_keep_alive: bool,

    /// Model [default: the first of /v1/models]
    #[arg(long, help_heading = "Requests")]
    pub model: Option<String>,
    /// POST /v1/chat/completions instead of /v1/completions
    #[arg(long, help_heading = "Requests")]
    pub chat: bool,
    /// Bytes of each prompt
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Requests",
        value_parser = clap::value_parser!(u32).range(1..=1 << 26))]
    pub prompt_bytes: u32,
    /// Send a list of so many token ids instead of a text
    #[arg(long, value_name = "N", help_heading = "Requests", conflicts_with_all = ["chat", "prompt_bytes"],
        value_parser = clap::value_parser!(u32).range(1..=1 << 22))]
    pub prompt_tokens: Option<u32>,
    /// The same prompt in each request; else each begins differently, so that no prefix is cached
    #[arg(long, help_heading = "Requests")]
    pub same_prompt: bool,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Requests",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_tokens: u32,
    /// Let the model end an answer earlier; else `ignore_eos` is sent
    #[arg(long, help_heading = "Requests")]
    pub respect_eos: bool,
    /// Count an answer of another number of tokens than --max-tokens as failed
    #[arg(long, help_heading = "Requests")]
    pub exact: bool,
    /// Ask for whole answers instead of streams; no TTFT and TPOT then
    #[arg(long, help_heading = "Requests")]
    pub no_stream: bool,
    /// Do not ask for the usage at the end of a stream
    #[arg(long, help_heading = "Requests")]
    pub no_usage: bool,
    /// Send the bytes of this file as each request's body, instead of all of the above but --chat
    #[arg(long, value_name = "FILE", help_heading = "Requests",
        conflicts_with_all = ["model", "prompt_bytes", "prompt_tokens", "same_prompt", "max_tokens", "exact",
            "respect_eos", "no_stream", "no_usage"])]
    pub body: Option<PathBuf>,
    /// A header of each request, such as 'Authorization: Bearer KEY'; repeatable
    #[arg(long, value_name = "NAME: VALUE", help_heading = "Requests", value_parser = header)]
    pub header: Vec<(HeaderName, HeaderValue)>,
    /// Of prompts and arrivals
    #[arg(long, default_value_t = 0, help_heading = "Requests")]
    pub seed: u64,

    /// Write the result to this file; `-` is stdout, instead of the table
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub json: Option<PathBuf>,
    /// Processes, with their descendants, whose processor time and memory is told: the proxy's
    #[arg(
        long,
        value_name = "PID,PID",
        value_delimiter = ',',
        help_heading = "Result"
    )]
    pub pid: Vec<u32>,
    /// No progress on stderr
    #[arg(long, help_heading = "Result")]
    pub quiet: bool,

    /// Longest wait for a connection
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Limits",
        value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub connect_timeout_ms: u64,
    /// Deadline of a request
    #[arg(long, value_name = "S", default_value_t = 600, help_heading = "Limits",
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub request_timeout_s: u64,
    /// Longest answer; a longer one counts as too_long
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, help_heading = "Limits",
        value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub answer_bytes_max: u64,
    /// Threads; 0 is one for each core
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Limits", value_parser = threads)]
    pub threads: usize,
}

fn rate(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|rate| (0.001..=1e6).contains(rate))
        .ok_or_else(|| format!("must be 0.001 to 1000000 a second, not `{text}`"))
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|seconds| (0.1..=604_800.0).contains(seconds))
        .ok_or_else(|| format!("must be 0.1 to 604800, not `{text}`"))
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("must be NAME: VALUE")?;
    let name: HeaderName = name
        .trim()
        .parse()
        .map_err(|_| format!("`{name}` is not a header's name"))?;
    if [
        http::header::CONTENT_LENGTH,
        http::header::TRANSFER_ENCODING,
        http::header::CONNECTION,
    ]
    .contains(&name)
    {
        return Err(format!("{name} is made by this client"));
    }
    let value = value
        .trim()
        .parse()
        .map_err(|_| format!("the value of {name} cannot be a header's"))?;
    Ok((name, value))
}
