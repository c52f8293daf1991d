//! The scripted workers of `hetero-kv-proxy mock`, byte by byte, and behind the proxy.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use clap::Parser;
use hetero_kv_proxy::cli::{Cli, Command, Settings};
use hetero_kv_proxy::mock::{Mock, cli::MockArgs};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::client::{Client, Reply};
use crate::{CHAT, COMPLETIONS, PROMPT, STREAM, metric, metric_sum, proxy_with, until};

pub(crate) fn args(flags: &[&str]) -> MockArgs {
    let line = ["hetero-kv-proxy", "mock"].iter().chain(flags);
    match Cli::try_parse_from(line).expect("flags").command {
        Command::Mock(args) => *args,
        Command::Serve(_)
        | Command::Check(_)
        | Command::Sign(_)
        | Command::Trace(_)
        | Command::Bench(_) => {
            unreachable!("mock was parsed")
        }
    }
}

/// One worker with these flags.
pub(crate) async fn worker(flags: &[&str]) -> Mock {
    let mut args = args(&["--listen", "127.0.0.1:0"]);
    let given = self::args(flags);
    if flags.contains(&"--listen") {
        args.listen = given.listen.clone();
    }
    let listen = args.listen;
    Mock::start(MockArgs { listen, ..given })
        .await
        .expect("the mock starts")
}

/// A prefill and a decode worker of one process.
pub(crate) async fn pair(flags: &[&str]) -> Mock {
    let listen = [
        "--listen",
        "127.0.0.1:0,role=prefill",
        "--listen",
        "127.0.0.1:0,role=decode",
    ];
    worker(&[&listen, flags].concat()).await
}

pub(crate) fn urls(mock: &Mock) -> Vec<String> {
    let url = |worker: &std::sync::Arc<hetero_kv_proxy::mock::Worker>| {
        format!("http://{}", worker.address)
    };
    mock.workers.iter().map(url).collect()
}

async fn post(mock: &Mock, at: usize, path: &str, body: &str) -> Reply {
    let mut client = Client::connect(mock.workers[at].address).await;
    client.post(path, &[], body.as_bytes()).await;
    client.reply().await
}

fn json_of(reply: &Reply) -> Value {
    serde_json::from_slice(&reply.body).expect("JSON")
}

/// The events of a stream.
fn events(reply: &Reply) -> Vec<String> {
    let text = reply.text();
    text.split_terminator("\n\n").map(str::to_owned).collect()
}

const PREFILL: &str = r#"{"model":"m","prompt":"hello","max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#;

fn decode_leg(params: &Value, prompt: &str) -> String {
    json!({"model": "m", "prompt": prompt, "max_tokens": 3, "kv_transfer_params": params})
        .to_string()
}

#[tokio::test]
async fn a_pair_of_legs_pins_and_frees_what_was_pinned() {
    let mock = pair(&[]).await;
    let reply = post(&mock, 0, COMPLETIONS, PREFILL).await;
    assert_eq!(reply.status, 200);
    let params = json_of(&reply)["kv_transfer_params"].clone();
    assert_eq!(params["do_remote_prefill"], true);
    assert_eq!(mock.transfers.pinned(), 1);

    let reply = post(&mock, 1, COMPLETIONS, &decode_leg(&params, "hello")).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(
        json_of(&reply)["choices"][0]["text"],
        " 0000000 0000001 0000002"
    );
    assert_eq!(
        (mock.transfers.pinned(), mock.transfers.freed.load(Relaxed)),
        (0, 1)
    );

    // The same blocks are there only once, and those of another epoch never were.
    let reply = post(&mock, 1, COMPLETIONS, &decode_leg(&params, "hello")).await;
    assert_eq!(
        (reply.status, mock.workers[1].counters.refused("lease_gone")),
        (500, 1)
    );
    let params = json_of(&post(&mock, 0, COMPLETIONS, PREFILL).await)["kv_transfer_params"].clone();
    let mut old = params.clone();
    old["lease_epoch"] = json!(1);
    let reply = post(&mock, 1, COMPLETIONS, &decode_leg(&old, "hello")).await;
    assert_eq!((reply.status, mock.transfers.pinned()), (500, 1));
    assert_eq!(mock.workers[1].counters.decode.load(Relaxed), 1);
}

#[tokio::test]
async fn a_leg_at_the_wrong_worker_and_another_prompt_are_seen() {
    let mock = pair(&["--require-kv"]).await;
    let reply = post(&mock, 1, COMPLETIONS, PREFILL).await;
    assert_eq!(
        (reply.status, json_of(&reply)["error"]["code"].as_str()),
        (400, Some("wrong_role"))
    );
    let params = json_of(&post(&mock, 0, COMPLETIONS, PREFILL).await)["kv_transfer_params"].clone();
    let reply = post(&mock, 0, COMPLETIONS, &decode_leg(&params, "hello")).await;
    assert_eq!(reply.status, 400);
    let reply = post(&mock, 1, COMPLETIONS, &decode_leg(&params, "hullo")).await;
    assert_eq!(
        (reply.status, json_of(&reply)["error"]["code"].as_str()),
        (400, Some("prompt_mismatch"))
    );
    assert_eq!(mock.workers[1].counters.prompt_mismatches.load(Relaxed), 1);
    let reply = post(&mock, 1, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, json_of(&reply)["error"]["code"].as_str()),
        (400, Some("no_params"))
    );
}

#[tokio::test]
async fn a_lease_ends_by_itself() {
    let mock = pair(&["--lease-s", "1"]).await;
    let params = json_of(&post(&mock, 0, COMPLETIONS, PREFILL).await)["kv_transfer_params"].clone();
    let took = until("the lease is over", || mock.transfers.pinned() == 0).await;
    assert!(took > Duration::from_millis(700), "{took:?}");
    assert_eq!(mock.transfers.expired.load(Relaxed), 1);
    let reply = post(&mock, 1, COMPLETIONS, &decode_leg(&params, "hello")).await;
    assert_eq!(reply.status, 500);
}

#[tokio::test]
async fn streams_have_their_tokens_their_pace_and_their_end() {
    let mock = worker(&[
        "--pace-ms",
        "40",
        "--token-bytes",
        "4",
        "--chunk-tokens",
        "3",
    ])
    .await;
    let body = r#"{"messages":[],"max_tokens":8,"n":2,"stream":true,"stream_options":{"include_usage":true}}"#;
    let start = Instant::now();
    let reply = post(&mock, 0, CHAT, body).await;
    // Three steps: of 3, 3 and 2 tokens, the last two after 120 ms each.
    assert!(
        start.elapsed() >= Duration::from_millis(240),
        "{:?}",
        start.elapsed()
    );
    assert!(reply.whole);
    let events = events(&reply);
    assert_eq!(events.len(), 2 + 6 + 1 + 1);
    assert_eq!(events[9], "data: [DONE]");
    let parsed: Vec<Value> = events[..9]
        .iter()
        .map(|event| {
            serde_json::from_str(event.strip_prefix("data: ").expect("data")).expect("JSON")
        })
        .collect();
    assert_eq!(parsed[0]["choices"][0]["delta"]["role"], "assistant");
    for index in 0..2 {
        let texts: Vec<&str> = parsed[2..8]
            .iter()
            .filter(|event| event["choices"][0]["index"] == index)
            .map(|event| {
                event["choices"][0]["delta"]["content"]
                    .as_str()
                    .expect("a text")
            })
            .collect();
        assert_eq!(texts, [" 000 001 002", " 003 004 005", " 006 007"]);
    }
    assert_eq!(parsed[7]["choices"][0]["finish_reason"], "length");
    assert_eq!(parsed[8]["usage"]["completion_tokens"], 16);
    assert_eq!(mock.workers[0].counters.tokens.load(Relaxed), 16);
    // The pieces came one by one and not in a lump.
    let (first, last) = (reply.pieces[0].0, reply.pieces.last().expect("pieces").0);
    assert!(
        last - first >= Duration::from_millis(200),
        "{first:?} {last:?}"
    );
}

#[tokio::test]
async fn a_stream_has_as_many_tokens_as_are_asked_for_or_set() {
    let mock = worker(&[]).await;
    let reply = post(&mock, 0, COMPLETIONS, STREAM).await;
    assert_eq!((reply.pieces.len(), events(&reply).len()), (9, 9));
    let body = STREAM.replace("\"max_tokens\":8,", "");
    assert_eq!(events(&post(&mock, 0, COMPLETIONS, &body).await).len(), 17);
}

#[tokio::test]
async fn faults_are_what_they_are_called() {
    let start = |fault: &'static str| async move { worker(&["--fail", fault]).await };

    let mock = start("status=503,every=2").await;
    let statuses = [
        post(&mock, 0, COMPLETIONS, PROMPT).await.status,
        post(&mock, 0, COMPLETIONS, PROMPT).await.status,
    ];
    assert_eq!(statuses, [200, 503]);
    assert_eq!(mock.workers[0].counters.faults.load(Relaxed), 1);

    let mock = start("close").await;
    let mut client = Client::connect(mock.workers[0].address).await;
    client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
    assert!(client.head().await.is_none());

    let mock = start("cut=3").await;
    let reply = post(&mock, 0, COMPLETIONS, STREAM).await;
    assert_eq!((reply.whole, reply.pieces.len()), (false, 3));
    let reply = post(&mock, 0, COMPLETIONS, PROMPT).await;
    assert!(!reply.whole && !reply.body.is_empty());
    assert_eq!(mock.workers[0].counters.aborted.load(Relaxed), 0);

    let mock = start("error-event=2").await;
    let reply = post(&mock, 0, COMPLETIONS, STREAM).await;
    assert_eq!((reply.whole, events(&reply).len()), (true, 3));
    assert!(events(&reply)[2].starts_with("data: {\"error\""));

    let mock = start("no-done").await;
    let reply = post(&mock, 0, COMPLETIONS, STREAM).await;
    assert!(reply.whole && !reply.text().contains("[DONE]"));

    let mock = start("slow-head=150").await;
    let begun = Instant::now();
    post(&mock, 0, COMPLETIONS, PROMPT).await;
    assert!(begun.elapsed() >= Duration::from_millis(150));

    let mock = start("no-params").await;
    let reply = post(&mock, 0, COMPLETIONS, PREFILL).await;
    assert_eq!(
        (reply.status, &json_of(&reply)["kv_transfer_params"]),
        (200, &Value::Null)
    );
    assert_eq!(mock.transfers.pinned(), 0);
}

#[tokio::test]
async fn what_hangs_keeps_its_connection_until_the_peer_leaves_or_its_deadline() {
    for fault in ["hang=2", "silence"] {
        let mock = worker(&["--fail", fault, "--request-timeout-s", "1"]).await;
        let begun = Instant::now();
        let mut client = Client::connect(mock.workers[0].address).await;
        client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
        let mut chunks = 0;
        if client.head().await.is_some() {
            while client.chunk().await.is_some_and(|chunk| !chunk.is_empty()) {
                chunks += 1;
            }
        }
        assert_eq!(chunks, if fault == "silence" { 0 } else { 2 }, "{fault}");
        let took = begun.elapsed();
        assert!(
            took >= Duration::from_millis(950) && took < Duration::from_secs(4),
            "{fault} {took:?}"
        );

        let mock = worker(&["--fail", fault]).await;
        let mut client = Client::connect(mock.workers[0].address).await;
        client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
        let counters = &mock.workers[0].counters;
        until("it runs", || counters.running.load(Relaxed) == 1).await;
        drop(client);
        until("it ended", || counters.running.load(Relaxed) == 0).await;
        assert_eq!(counters.aborted.load(Relaxed), 1, "{fault}");
    }
}

#[tokio::test]
async fn requests_have_limits_and_paths_their_answers() {
    let mock = worker(&["--body-bytes-max", "100"]).await;
    let body = json!({"prompt": "x".repeat(200)}).to_string();
    assert_eq!(post(&mock, 0, COMPLETIONS, &body).await.status, 413);
    let mut client = Client::connect(mock.workers[0].address).await;
    for (path, part) in [
        ("/health", ""),
        ("/v1/models", "\"id\":\"mock-model\""),
        (
            "/metrics",
            "hetero_kv_mock_refused_total{reason=\"body_bytes\"} 1",
        ),
        (
            "/metrics",
            "vllm:num_requests_running{model_name=\"mock-model\"} 0",
        ),
    ] {
        client.get(path).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, 200);
        assert!(reply.text().contains(part), "{part} in {}", reply.text());
    }
    client.get("/nothing").await;
    assert_eq!(client.reply().await.status, 404);
}

#[tokio::test]
async fn the_proxy_serves_from_mock_workers_and_they_are_left_clean() {
    let mock = pair(&["--require-kv", "--pace-ms", "1"]).await;
    let urls = urls(&mock);
    let proxy = proxy_with(Settings::default(), &urls[..1], &urls[1..]).await;
    for (path, body) in [(COMPLETIONS, PROMPT), (COMPLETIONS, STREAM)] {
        let reply = crate::post(&proxy, path, body).await;
        assert_eq!((reply.status, reply.whole), (200, true), "{}", reply.text());
    }
    assert_eq!(mock.workers[1].counters.decode.load(Relaxed), 2);
    assert_eq!(
        (mock.transfers.pinned(), mock.transfers.freed.load(Relaxed)),
        (0, 2)
    );
    assert!(metric_sum(&proxy, "ttft_seconds_count").await >= 1.0);
}

#[tokio::test]
async fn a_limit_of_no_tokens_is_judged_by_decode_alone_and_pins_nothing() {
    let mock = pair(&[]).await;
    let [prefill, decode] = [urls(&mock)[..1].to_vec(), urls(&mock)[1..].to_vec()];
    let proxy = proxy_with(Settings::default(), &prefill, &decode).await;
    for (path, body) in [
        (
            COMPLETIONS,
            r#"{"model":"m","prompt":"hello","max_tokens":0}"#,
        ),
        (
            CHAT,
            r#"{"model":"m","messages":[{"role":"user","content":"hello"}],"max_completion_tokens":0}"#,
        ),
    ] {
        let mut client = Client::connect(proxy.address).await;
        client.post(path, &[], body.as_bytes()).await;
        let reply = client.reply().await;
        // In the engine's own words.
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert!(reply.text().contains("must be 1 to"), "{}", reply.text());
    }
    let alone = "fallbacks_total{reason=\"no_tokens\"}";
    assert_eq!(metric(&proxy, alone).await, 2.0);
    let mut client = Client::connect(mock.workers[0].address).await;
    client.get("/metrics").await;
    let text = client.reply().await.text();
    assert!(text.contains("transfers_pinned 0"), "{text}");
    let prefilled = &mock.workers[0].counters.prefill;
    assert_eq!(prefilled.load(Relaxed), 0, "nothing is prefilled");
}
