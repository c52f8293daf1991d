//! `hetero-kv-proxy bench` against scripted workers: what is counted, and what is not.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use clap::Parser;
use hetero_kv_proxy::bench::cli::BenchArgs;
use hetero_kv_proxy::bench::{compare, measure, report::Report};
use hetero_kv_proxy::cli::{Cli, Command, Settings};
use hetero_kv_proxy::mock::Mock;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::mock::{pair, urls, worker};
use crate::proxy_with;

fn args(url: &str, flags: &[&str]) -> BenchArgs {
    let line = ["hetero-kv-proxy", "bench", "--quiet", "--url", url];
    match Cli::try_parse_from(line.iter().chain(flags))
        .expect("flags")
        .command
    {
        Command::Bench(args) => *args,
        Command::Serve(_)
        | Command::Check(_)
        | Command::Sign(_)
        | Command::Trace(_)
        | Command::Mock(_) => {
            unreachable!("bench was parsed")
        }
    }
}

async fn bench_url(url: &str, flags: &[&str]) -> Report {
    let (_interrupt, stop) = watch::channel(false);
    measure(&args(url, flags), stop).await.expect("a result")
}

async fn bench(mock: &Mock, flags: &[&str]) -> Report {
    bench_url(&urls(mock)[0], flags).await
}

/// The failures of the first round, by name.
fn failures(report: &Report) -> Vec<(&str, u64)> {
    let failures = report.rounds[0].failures.iter();
    failures
        .map(|(kind, failure)| (kind.as_str(), failure.count))
        .collect()
}

#[tokio::test]
async fn a_warm_up_without_a_number_is_one_request_for_each_of_the_round_at_once() {
    for (flags, warm) in [
        (&["--warmup"][..], 2 + 5),
        (&[], 0),
        (&["--warmup", "0"], 0),
        (&["--warmup", "3"], 3 + 3),
        // Whatever comes after it.
        (&["--warmup", "--max-tokens", "2"], 2 + 5),
    ] {
        let mock = worker(&[]).await;
        let rounds = ["--concurrency", "2,5", "--per-concurrency", "1"];
        let report = bench(&mock, &[&rounds[..], flags].concat()).await;
        assert!(report.is_complete());
        let sent = mock.workers[0].counters.plain.load(Relaxed);
        assert_eq!(sent, 2 + 5 + warm, "{flags:?}");
    }
}

#[tokio::test]
async fn closed_rounds_send_all_and_count_tokens() {
    let mock = worker(&[]).await;
    let flags = [
        "--concurrency",
        "2,5",
        "--per-concurrency",
        "4",
        "--warmup",
        "3",
        "--max-tokens",
        "7",
        "--prompt-tokens",
        "50",
        "--exact",
    ];
    let report = bench(&mock, &flags).await;
    assert!(report.is_complete());
    assert_eq!(report.model.as_deref(), Some("mock-model"));
    for (round, sent) in report.rounds.iter().zip([8, 20]) {
        assert_eq!((round.sent, round.completed, round.failed), (sent, sent, 0));
        assert_eq!((round.generated_tokens, round.chunks), (7 * sent, 7 * sent));
        let total = round.total_tokens_per_s.expect("prompts are counted") * round.duration_s;
        assert!((total - (57 * sent) as f64).abs() < 0.01, "{total}");
        assert!(round.ttft_ms.is_some() && round.tpot_ms.is_some() && round.itl_ms.is_some());
    }
    assert_eq!(mock.workers[0].counters.plain.load(Relaxed), 8 + 20 + 3 + 3);
    // Connections are kept: the second round adds at most those it has more at once.
    let connects: Vec<u64> = report.rounds.iter().map(|round| round.connects).collect();
    assert!(connects[0] <= 2 && connects[1] <= 4, "{connects:?}");
    let table = report.table();
    for title in [
        "total tok/s",
        "gen tok/s",
        "TTFT ms",
        "TPOT ms",
        "duration s",
        "5 at once",
    ] {
        assert!(table.contains(title), "{title} in {table}");
    }
}

#[tokio::test]
async fn without_keep_alive_each_request_has_its_connection() {
    let mock = worker(&[]).await;
    let report = bench(
        &mock,
        &["--concurrency", "3", "--no-keep-alive", "--no-stream"],
    )
    .await;
    assert!(report.is_complete());
    assert_eq!((report.rounds[0].sent, report.rounds[0].connects), (30, 30));
    assert!(report.rounds[0].ttft_ms.is_none() && report.rounds[0].e2e_ms.is_some());
}

#[tokio::test]
async fn times_are_those_of_the_script() {
    let mock = worker(&["--pace-ms", "30", "--prefill-delay-ms", "120"]).await;
    let report = bench(&mock, &["--per-concurrency", "3", "--max-tokens", "5"]).await;
    let round = &report.rounds[0];
    let near = |ms: Option<f64>, want: f64| {
        let ms = ms.expect("measured");
        // A busy host adds; a wrong unit or a wrong pair of moments is off by more, or below.
        assert!(ms >= want - 2.0 && ms < want + 1_500.0, "{ms} for {want}");
    };
    near(round.ttft_ms.map(|times| times.mean), 120.0);
    near(round.tpot_ms.map(|times| times.p50), 30.0);
    near(round.itl_ms.map(|times| times.mean), 30.0);
    near(round.e2e_ms.map(|times| times.p99), 240.0);
}

#[tokio::test]
async fn an_open_loop_sends_at_its_rate_whatever_answers_take() {
    let mock = worker(&["--pace-ms", "100"]).await;
    let begun = Instant::now();
    let flags = [
        "--rate",
        "50",
        "--duration",
        "1",
        "--arrivals",
        "uniform",
        "--max-tokens",
        "6",
    ];
    let report = bench(&mock, &flags).await;
    let round = &report.rounds[0];
    assert_eq!((round.sent, round.completed), (49, 49));
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    // 49 answers of 500 ms each would take 24 s one after the other.
    assert!(
        round.duration_s > 1.4 && round.duration_s < 4.0,
        "{}",
        round.duration_s
    );
}

#[tokio::test]
async fn more_in_flight_than_allowed_is_a_failure_with_a_name() {
    let mock = worker(&["--fail", "silence"]).await;
    let flags = [
        "--rate",
        "100",
        "--duration",
        "0.3",
        "--arrivals",
        "uniform",
        "--in-flight-max",
        "4",
        "--request-timeout-s",
        "1",
    ];
    let report = bench(&mock, &flags).await;
    let round = &report.rounds[0];
    assert_eq!((round.completed, round.failed), (0, round.sent));
    assert_eq!(
        failures(&report),
        [("not_sent", round.sent - 4), ("timeout_before_head", 4)]
    );
}

#[tokio::test]
async fn every_fault_of_a_worker_is_counted_by_its_name() {
    for (fault, flags, kind) in [
        ("status=503", vec![], "status_503"),
        ("close", vec![], "closed_before_head"),
        ("cut=3", vec![], "body_broken"),
        ("cut=0", vec!["--no-stream"], "body_broken"),
        (
            "hang=3",
            vec!["--request-timeout-s", "1"],
            "timeout_in_answer",
        ),
        (
            "hang=0",
            vec!["--no-stream", "--request-timeout-s", "1"],
            "timeout_in_answer",
        ),
        (
            "silence",
            vec!["--request-timeout-s", "1"],
            "timeout_before_head",
        ),
        ("error-event=3", vec![], "error_in_200"),
        ("no-done", vec![], "no_done"),
    ] {
        let every = format!("{fault},every=2");
        let mock = worker(&["--fail", &every]).await;
        let report = bench(
            &mock,
            &[vec!["--concurrency", "2", "--per-concurrency", "2"], flags].concat(),
        )
        .await;
        assert_eq!(failures(&report), [(kind, 2)], "{fault}");
        let round = &report.rounds[0];
        assert_eq!(
            (round.sent, round.completed, round.failed),
            (4, 2, 2),
            "{fault}"
        );
        assert!(!report.is_complete());
        assert!(
            report.table().contains(&format!("2 x {kind}")),
            "{}",
            report.table()
        );
    }
}

#[tokio::test]
async fn answers_that_are_no_answers_do_not_count() {
    let mock = worker(&["--tokens", "5"]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("body.json");
    let body = |text: &str| {
        std::fs::write(&file, text).expect("written");
        vec!["--body", file.to_str().expect("UTF-8")]
    };
    // The file's own limit counts; it asks for no stream, and none is expected.
    let report = bench(&mock, &body(r#"{"prompt":"p","max_tokens":3}"#)).await;
    assert!(report.is_complete());
    assert_eq!(report.rounds[0].generated_tokens, 30);
    // What is no request of the API is the worker's to refuse, and not taken for an answer.
    let report = bench(&mock, &body(r#"{"max_tokens":3,"stream":true}"#)).await;
    assert_eq!(failures(&report), [("status_400", 10)]);
    let example = &report.rounds[0].failures["status_400"].examples[0];
    assert!(example.contains("`prompt` is missing"), "{example}");
    // An answer that is too long, and one of another length than was asked for.
    let report = bench(&mock, &["--answer-bytes-max", "300"]).await;
    assert_eq!(failures(&report), [("too_long", 10)]);
    let chunky = worker(&["--chunk-tokens", "2", "--usage", "never"]).await;
    let report = bench(&chunky, &["--exact", "--max-tokens", "4"]).await;
    assert_eq!(failures(&report), [("token_count", 10)]);
}

#[tokio::test]
async fn a_stream_where_none_was_asked_for_is_no_answer() {
    // An engine that answers a plain request with a stream, and a 200 with an error inside.
    for (kind, answer, failure) in [
        ("text/event-stream", "data: [DONE]\n\n", "content_type"),
        (
            "application/json",
            r#"{"error":{"message":"inside"}}"#,
            "error_in_200",
        ),
        ("application/json", r#"{"choices":[]}"#, "no_tokens"),
        ("application/json", "<html>", "bad_json"),
    ] {
        let engine = crate::engine::Engine::start(
            crate::engine::Script::Answer(200, kind, answer),
            &crate::engine::Blocks::default(),
        )
        .await;
        let report = bench_url(
            &engine.url(),
            &["--model", "m", "--no-stream", "--per-concurrency", "2"],
        )
        .await;
        assert_eq!(failures(&report), [(failure, 2)], "{answer}");
    }
}

#[tokio::test]
async fn a_port_without_listener_is_a_failure_by_name_and_no_hang() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    drop(listener);
    let report = bench_url(&url, &["--model", "m", "--per-concurrency", "2"]).await;
    assert_eq!(failures(&report), [("connect", 2)]);
    let (_interrupt, stop) = watch::channel(false);
    let error = measure(&args(&url, &[]), stop).await.expect_err("no model");
    assert!(
        format!("{error:#}").contains("GET /v1/models: connect"),
        "{error:#}"
    );
    let (_interrupt, stop) = watch::channel(false);
    let warm = args(&url, &["--model", "m", "--warmup", "2"]);
    let error = measure(&warm, stop).await.expect_err("a cold warm-up");
    assert!(error.to_string().contains("2 x connect"), "{error}");
}

#[tokio::test]
async fn a_url_for_clients_libraries_is_refused_with_the_way_out() {
    let (_interrupt, stop) = watch::channel(false);
    let url = "http://127.0.0.1:9/v1";
    let measured = measure(&args(url, &["--concurrency", "1"]), stop).await;
    let fault = measured.expect_err("no such path").to_string();
    let want = format!("--url {url}: leave `/v1` out: the paths of requests begin with it");
    assert_eq!(fault, want);
}

#[tokio::test]
async fn an_interrupt_ends_the_run_and_what_ran_is_counted() {
    let mock = worker(&["--pace-ms", "1000"]).await;
    let (interrupt, stop) = watch::channel(false);
    let flags = ["--concurrency", "3", "--duration", "60"];
    let args = args(&urls(&mock)[0], &flags);
    let running = tokio::spawn(async move { measure(&args, stop).await });
    let counters = &mock.workers[0].counters;
    crate::until("three run", || counters.running.load(Relaxed) == 3).await;
    interrupt.send_replace(true);
    let report = running.await.expect("no panic").expect("a result");
    assert_eq!(failures(&report), [("interrupted", 3)]);
    crate::until("none runs", || counters.running.load(Relaxed) == 0).await;
}

#[tokio::test]
async fn through_the_proxy_every_request_moves_its_blocks() {
    let mock = pair(&["--require-kv"]).await;
    let workers = urls(&mock);
    let proxy = proxy_with(Settings::default(), &workers[..1], &workers[1..]).await;
    let url = format!("http://{}", proxy.address);
    let pid = std::process::id().to_string();
    let flags = [
        "--concurrency",
        "16",
        "--warmup",
        "16",
        "--exact",
        "--pid",
        &pid,
    ];
    let report = bench_url(&url, &flags).await;
    assert!(report.is_complete(), "{}", report.table());
    assert_eq!(mock.transfers.freed.load(Relaxed), 176);
    assert_eq!(mock.transfers.pinned(), 0);
    let cpu = report.rounds[0].cpu.expect("it was read");
    assert!(cpu.rss_mib > 1.0 && cpu.rss_peak_mib >= cpu.rss_mib);
    assert!(cpu.cpu_s >= 0.0 && cpu.us_per_request * 160.0 <= cpu.cpu_s * 1e6 + 1.0);
}

#[tokio::test]
async fn results_are_written_read_and_compared() {
    let mock = worker(&["--pace-ms", "5"]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, report: &Report| {
        let path = folder.path().join(name);
        std::fs::write(&path, serde_json::to_string(report).expect("JSON")).expect("written");
        path
    };
    let a = bench(&mock, &["--concurrency", "2,4", "--per-concurrency", "1"]).await;
    let mut b = a.clone();
    b.rounds.remove(0);
    b.rounds[0].requests_per_s = a.rounds[1].requests_per_s * 2.0;
    let (first, second) = (write("a.json", &a), write("b.json", &b));
    let text = compare::compare(&first, &second).expect("one load in both");
    assert!(
        text.contains("4 at once") && !text.contains("2 at once"),
        "{text}"
    );
    let row = text
        .lines()
        .find(|line| line.starts_with("requests/s"))
        .expect("a row");
    assert!(row.ends_with("2.000"), "{row}");

    b.rounds.clear();
    let none = write("none.json", &b);
    let error = compare::compare(&first, &none)
        .expect_err("nothing in common")
        .to_string();
    assert!(error.contains("2 at once, 4 at once"), "{error}");
    b.version = 99;
    let other = write("other.json", &b);
    let error = compare::compare(&first, &other)
        .expect_err("a version")
        .to_string();
    assert!(error.contains("version 99, not 1"), "{error}");
    std::fs::write(&other, "{}").expect("written");
    let error = compare::compare(&other, &first)
        .expect_err("no result")
        .to_string();
    assert!(error.contains("not a result"), "{error}");
}
