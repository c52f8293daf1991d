//! `hetero-kv verify`: did KV move, in a cluster that serves?
//!
//! The text of an answer proves nothing, because a decode engine that recomputes a prompt says the
//! same. What is asked instead is counted in the engines: bytes by the connector, prompt tokens by
//! vLLM itself, leases by the connector of the prefill side.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::output::{self, Verdict};
use counters::Counters;
use engines::{Engine, EngineArg, Role};
use http::{Client, Url};
use report::Report;

mod counters;
mod engines;
mod exposition;
mod http;
mod prompts;
mod report;

/// How often counters are read while they settle.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Flags of `hetero-kv verify`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where prompts go: the proxy's address, such as http://127.0.0.1:8000
    #[arg(long, value_name = "URL")]
    proxy: Url,
    /// An engine whose counters are read, URL,role=prefill or URL,role=decode; repeatable. Without
    /// it the proxy's GET /workers says which there are
    #[arg(long, value_name = "URL,role=ROLE")]
    engine: Vec<EngineArg>,
    /// How many prompts to send, one after another
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    prompts: u32,
    /// Random words of a prompt
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..=4096))]
    words: u32,
    /// Model to ask for; without it the first of the proxy's GET /v1/models
    #[arg(long)]
    model: Option<String>,
    /// Key for the proxy, sent as a bearer token
    #[arg(
        long,
        env = "HETERO_KV_API_KEY",
        hide_env_values = true,
        value_name = "KEY"
    )]
    api_key: Option<String>,
    /// Longest wait for one answer, in seconds
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout_s: u64,
    /// Longest wait for counters to settle and leases to end after the last answer, in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=600))]
    settle_s: u64,
    /// Print JSON only
    #[arg(long)]
    json: bool,
}

/// Sends prompts, reads counters before and after, and judges.
///
/// # Errors
/// What keeps it from asking: no engines, an engine or the proxy out of reach, no model.
pub(crate) fn run(args: &Args) -> anyhow::Result<Verdict> {
    let client = Client::new(Duration::from_secs(args.timeout_s));
    let engines = engines::list(&client, &args.proxy, &args.engine)?;
    for role in [Role::Prefill, Role::Decode] {
        ensure!(
            engines.iter().any(|engine| engine.role == role),
            "no {role} engine: {}",
            engines::HOW_TO_NAME
        );
    }
    let model = match &args.model {
        Some(model) => model.clone(),
        None => prompts::first_model(&client, &args.proxy, args.api_key.as_deref())?,
    };
    let before = read(&client, &engines)?;
    output::tell(&format!(
        "hetero-kv verify: sending {} prompts of {} words for {model:?} to {}\n",
        args.prompts, args.words, args.proxy
    ));
    let answers = prompts::send(
        &client,
        &prompts::Target {
            proxy: &args.proxy,
            api_key: args.api_key.as_deref(),
            model: &model,
        },
        args.prompts,
        args.words,
    )?;

    let deadline = Instant::now() + Duration::from_secs(args.settle_s);
    let report = loop {
        let after = read(&client, &engines)?;
        let report = Report::new(&engines, &answers, &before, &after);
        if report.right() || Instant::now() >= deadline {
            break report;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    output::print(&if args.json {
        serde_json::to_string(&report.json()).context("writing the report as JSON")? + "\n"
    } else {
        report.text()
    })?;
    Ok(if report.right() {
        Verdict::Right
    } else {
        Verdict::Wrong
    })
}

fn read(client: &Client, engines: &[Engine]) -> anyhow::Result<Vec<Counters>> {
    engines
        .iter()
        .map(|engine| {
            let text = client
                .get_text(&engine.url, "/metrics", None)
                .with_context(|| format!("reading the counters of {engine}"))?;
            Ok(Counters::parse(&text))
        })
        .collect()
}
