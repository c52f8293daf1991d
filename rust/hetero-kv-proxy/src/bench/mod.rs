//! `hetero-kv-proxy bench`: load on any OpenAI-compatible proxy or engine, and what came of it.
//!
//! An answer counts only when it is whole: a 200 with an error inside, a stream without its last
//! event or without a token is a failure with a name. `sse`, `histogram`, `prompt`, `tally`,
//! `report` and `compare` are pure; `client` and `load` are the I/O.

pub mod cli;
pub mod client;
pub mod compare;
pub mod cpu;
pub mod failure;
pub mod histogram;
pub mod load;
pub mod prompt;
pub mod report;
pub mod sse;
pub mod tally;

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::BaseUrl;
use crate::openai::Route;
use crate::tell;
use cli::BenchArgs;
use client::{Client, Expect};
use cpu::Watched;
use load::{Load, Run};
use prompt::Bodies;
use report::{CpuReport, Report, RoundReport, VERSION};

/// A larger body is no request.
const BODY_BYTES_MAX: u64 = 256 << 20;
/// Longest wait for the list of models.
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);

/// Measures or compares as the flags say, and writes the result. False when a request failed.
///
/// # Errors
/// Nothing could be measured or compared, or the result not be written.
pub async fn run(args: BenchArgs) -> anyhow::Result<bool> {
    if let Some([a, b]) = args.compare.as_deref() {
        tell::answer(&compare::compare(a, b)?)?;
        return Ok(true);
    }
    let (interrupt, stop) = watch::channel(false);
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            interrupt.send_replace(true);
            // A second one does not wait.
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(130);
            }
        }
    });
    let report = measure(&args, stop).await?;
    match &args.json {
        Some(path) if path.as_os_str() == "-" => {
            tell::answer(&format!("{}\n", serde_json::to_string_pretty(&report)?))?;
        }
        Some(path) => {
            let text = serde_json::to_string_pretty(&report)?;
            std::fs::write(path, text).with_context(|| path.display().to_string())?;
            tell::answer(&report.table())?;
        }
        None => tell::answer(&report.table())?,
    }
    Ok(report.is_complete())
}

/// Runs every round.
///
/// # Errors
/// A URL, a file or a process that is not as it should be; no model; a warm-up of which nothing
/// was completed.
pub async fn measure(args: &BenchArgs, stop: watch::Receiver<bool>) -> anyhow::Result<Report> {
    let url = args.url.as_deref().context("--url is missing")?;
    let base = BaseUrl::of_server(url).map_err(|fault| anyhow::anyhow!("--url {url}: {fault}"))?;
    let connect_timeout = Duration::from_millis(args.connect_timeout_ms);
    let client = Client::new(base, &args.header, connect_timeout, !args.no_keep_alive)?;
    let route = if args.chat {
        Route::ChatCompletions
    } else {
        Route::Completions
    };
    let uri = client.uri(route.path())?;
    let watched = Watched::new(&args.pid)?;
    warn_of_open_files(args);
    let (bodies, stream, model) = match &args.body {
        Some(path) => {
            let bytes = read(path)?;
            let stream = asks_for_stream(&bytes)
                .with_context(|| format!("--body {}: not a request", path.display()))?;
            (Bodies::fixed(bytes), stream, None)
        }
        None => {
            let model = match &args.model {
                Some(model) => model.clone(),
                None => first_model(&client).await.context("--model is not given")?,
            };
            (Bodies::new(args, &model), !args.no_stream, Some(model))
        }
    };
    let run = Arc::new(Run {
        client,
        uri,
        bodies,
        expect: Expect {
            stream,
            tokens: args.exact.then_some(u64::from(args.max_tokens)),
            bytes_max: args.answer_bytes_max,
        },
        request_timeout: Duration::from_secs(args.request_timeout_s),
        in_flight_max: args.in_flight_max as usize,
        seed: args.seed,
        next: AtomicU64::new(0),
        stop,
        progress: !args.quiet,
    });
    let mut report = Report {
        version: VERSION,
        url: url.to_owned(),
        path: route.path().to_owned(),
        model,
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        rounds: Vec::new(),
    };
    for load in Load::plan(args) {
        if *run.stop.borrow() {
            break;
        }
        report
            .rounds
            .push(one_round(args, &run, load, &watched).await?);
    }
    Ok(report)
}

async fn one_round(
    args: &BenchArgs,
    run: &Arc<Run>,
    load: Load,
    watched: &Watched,
) -> anyhow::Result<RoundReport> {
    if let Some(warmup) = load.warmup(args) {
        let tally = load::round(run, warmup).await;
        let failed: Vec<String> = tally
            .failures
            .iter()
            .map(|(kind, count, examples)| {
                let example = examples.first().map_or("", String::as_str);
                format!("{count} x {kind} ({example})")
            })
            .collect();
        if tally.completed == 0 && !*run.stop.borrow() {
            bail!(
                "no request of the warm-up was completed: {}",
                failed.join(", ")
            );
        }
        if !failed.is_empty() {
            tell::line(format_args!(
                "warm-up: {} of {} failed: {}",
                tally.failures.count(),
                tally.sent,
                failed.join(", ")
            ));
        }
    }
    let before = if watched.is_empty() {
        None
    } else {
        Some(watched.read()?)
    };
    let connects = run.client.connects.load(Ordering::Relaxed);
    let tally = load::round(run, load).await;
    let mut round = RoundReport::new(load, &tally, args.prompt_tokens);
    round.connects = run.client.connects.load(Ordering::Relaxed) - connects;
    if let Some(before) = before {
        round.cpu = Some(CpuReport::between(before, watched.read()?, &tally));
    }
    if run.progress {
        tell::line(format_args!(
            "{}: completed {} of {}",
            round.label(),
            round.completed,
            round.sent
        ));
    }
    Ok(round)
}

fn warn_of_open_files(args: &BenchArgs) {
    let open = if args.rate.is_empty() {
        0
    } else {
        args.in_flight_max
    };
    let needed = u64::from(
        args.concurrency
            .iter()
            .copied()
            .max()
            .unwrap_or(1)
            .max(open),
    ) + 64;
    if let Some(limit) = crate::run::raise_open_files()
        && limit < needed
    {
        tell::line(format_args!(
            "the limit of open files is {limit}, and {needed} may be needed: see `ulimit -Hn`"
        ));
    }
}

async fn first_model(client: &Client) -> anyhow::Result<String> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Model>,
    }
    #[derive(Deserialize)]
    struct Model {
        id: String,
    }
    let path = client.uri("/v1/models")?;
    let body = client
        .get(&path, Instant::now() + MODELS_TIMEOUT)
        .await
        .map_err(|failure| anyhow::anyhow!("GET {path}: {}: {}", failure.kind, failure.seen))?;
    let models: Models =
        serde_json::from_slice(&body).with_context(|| format!("GET {path}: no list of models"))?;
    let first = models.data.into_iter().next();
    Ok(first
        .with_context(|| format!("GET {path}: the list is empty"))?
        .id)
}

fn read(path: &Path) -> anyhow::Result<Bytes> {
    let file = std::fs::File::open(path).with_context(|| format!("--body {}", path.display()))?;
    let mut bytes = Vec::new();
    file.take(BODY_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("--body {}", path.display()))?;
    if bytes.len() as u64 > BODY_BYTES_MAX {
        bail!(
            "--body {}: more than {BODY_BYTES_MAX} bytes",
            path.display()
        );
    }
    Ok(bytes.into())
}

fn asks_for_stream(body: &[u8]) -> serde_json::Result<bool> {
    #[derive(Deserialize)]
    struct Asked {
        #[serde(default)]
        stream: Option<bool>,
    }
    Ok(serde_json::from_slice::<Asked>(body)?
        .stream
        .unwrap_or(false))
}
