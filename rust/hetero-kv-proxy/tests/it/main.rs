//! The proxy over real sockets, between a scripted client and scripted engines.
//!
//! The engines answer as vLLM does where it matters here: prefill checks its limits, pins blocks
//! and returns params; decode frees them. The client speaks HTTP by hand, so that a test sees every
//! byte and when it came.

mod admin;
mod admission;
mod auth;
mod auto;
mod bad_pairs;
mod bench;
mod breakers;
mod broken_answers;
mod cancel;
mod client;
mod command;
mod connectors;
mod engine;
mod engine_load;
mod failures;
mod front_doors;
mod fuzz_corpus;
mod hosts;
mod limits;
mod log;
mod metrics;
mod mock;
mod overload;
mod pace;
mod pairs;
mod pd_flow;
mod policies;
mod prefill_endpoint;
mod process;
mod refused_decode;
mod registry;
mod reload;
mod retries;
mod revisions;
mod routes;
mod sizes;
mod start;
mod streaming;
mod together;
mod trace_context;
mod traces;
mod twins;
mod weights;
mod workers;
mod zmq;

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::config::Config;
use hetero_kv_proxy::routing::{HealthState, Role};
use hetero_kv_proxy::run::Proxy;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use client::{Client, Reply};
use engine::Engine;

/// A proxy in front of these engines, and the engines' URLs as they are.
async fn proxy(prefill: &[&Engine], decode: &[&Engine]) -> Proxy {
    proxy_with(Settings::default(), &urls(prefill), &urls(decode)).await
}

fn urls(engines: &[&Engine]) -> Vec<String> {
    engines.iter().map(|engine| engine.url()).collect()
}

/// A proxy with more settings. Without word to the contrary it probes so rarely that a test sees
/// its own requests only.
async fn proxy_with(mut settings: Settings, prefill: &[String], decode: &[String]) -> Proxy {
    settings.prefill = Some(prefill.to_vec());
    settings.decode = Some(decode.to_vec());
    settings.health_interval_ms.get_or_insert(3_600_000);
    settings.scrape_interval_ms.get_or_insert(0);
    let config = Config::from_settings(settings).expect("a valid configuration");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let admin = match config.admin_listen.is_some() {
        true => Some(TcpListener::bind("127.0.0.1:0").await.expect("loopback")),
        false => None,
    };
    let proxy = Proxy::start(config, listener, admin).expect("the proxy starts");
    // The first probe ends before the test begins: its verdict must not fall into it.
    let probed = |role| {
        let views = proxy.app.view(role);
        views.iter().all(|view| view.state != HealthState::Unknown)
    };
    until("all engines probed", || {
        probed(Role::Prefill) && probed(Role::Decode)
    })
    .await;
    proxy
}

/// One request over its own connection, read to the end.
async fn post(proxy: &Proxy, path: &str, body: &str) -> Reply {
    let mut client = Client::connect(proxy.address).await;
    client.post(path, &[], body.as_bytes()).await;
    client.reply().await
}

/// The answers to so many requests at once, each over its own connection.
async fn at_once(proxy: &Proxy, count: usize, body: &'static str) -> Vec<Reply> {
    let address = proxy.address;
    let ask = move || async move {
        let mut client = Client::connect(address).await;
        client.post(COMPLETIONS, &[], body.as_bytes()).await;
        client.reply().await
    };
    let asked: Vec<_> = (0..count).map(|_| tokio::spawn(ask())).collect();
    let mut replies = Vec::new();
    for reply in asked {
        replies.push(reply.await.expect("a client"));
    }
    replies
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const PROMPT: &str = r#"{"model":"m","prompt":"hello","max_tokens":8}"#;
const STREAM: &str = r#"{"model":"m","prompt":"hello","max_tokens":8,"stream":true}"#;

/// For what happens in milliseconds on a host at rest, and in seconds on one where many wait for a
/// core.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `holds`, at most [`PATIENCE`], and returns how long it took.
async fn until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(
            start.elapsed() < PATIENCE,
            "{PATIENCE:?} passed and not: {what}"
        );
        sleep(Duration::from_millis(2)).await;
    }
    start.elapsed()
}

/// As [`until`], for what has to be asked.
async fn soon(what: &str, mut holds: impl AsyncFnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds().await {
        assert!(
            start.elapsed() < PATIENCE,
            "{PATIENCE:?} passed and not: {what}"
        );
        sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}

/// The value of one metric line, by its name and labels as written; 0 when it is not there.
async fn metric(proxy: &Proxy, line: &str) -> f64 {
    let name = format!("hetero_kv_proxy_{line} ");
    let text = metrics_text(proxy).await;
    let mut values = text.lines().filter_map(|found| found.strip_prefix(&name));
    values.next().map_or(0.0, number)
}

/// The sum of one metric over all its labels.
async fn metric_sum(proxy: &Proxy, name: &str) -> f64 {
    let name = format!("hetero_kv_proxy_{name}");
    let text = metrics_text(proxy).await;
    let lines = text.lines().filter_map(|line| line.strip_prefix(&name));
    let lines = lines.filter(|rest| rest.starts_with(['{', ' ']));
    let values = lines.filter_map(|rest| rest.rsplit_once(' '));
    values.map(|(_, value)| number(value)).sum()
}

fn number(text: &str) -> f64 {
    text.parse().expect("a number")
}

async fn metrics_text(proxy: &Proxy) -> String {
    let mut client = Client::connect(proxy.address).await;
    client.get("/metrics").await;
    client.reply().await.text()
}
