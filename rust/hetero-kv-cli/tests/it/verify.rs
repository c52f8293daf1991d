use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{Cluster, Script, TOKEN_BYTES, ok, serve};
use crate::run::{Run, hetero_kv};

fn verify(cluster: &Cluster, flags: &str) -> Run {
    hetero_kv(&format!("verify --proxy {} {flags}", cluster.proxy))
}

fn json_of(run: &Run) -> Value {
    serde_json::from_str(&run.stdout).expect("JSON only on stdout")
}

#[test]
fn moved_kv_is_counted_by_source_and_waited_for() {
    let lease = Duration::from_millis(800);
    let cluster = Cluster::start(Script::Moves { lease });
    let run = verify(&cluster, "--prompts 4 --words 10 --json");
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    let bytes = 4 * 10 * TOKEN_BYTES;
    let report = json_of(&run);
    // 123456 bytes were counted before; a third of the sum, rounded down, is rank 0's.
    let (even, odd) = (123_456 + bytes / 2, bytes / 2);
    let rank_0 = even / 3 - 123_456 / 3 + odd / 3;
    assert_eq!(
        report,
        json!({
            "kv_moved": true,
            "reasons": [],
            "prompts": { "sent": 4, "ok": 4, "tokens": 40, "failures": [] },
            "bytes_moved": bytes,
            "external_tokens": 36,
            "computed_tokens": 4,
            "sources": [
                { "engine": "p", "tp": "0", "bytes": rank_0 },
                { "engine": "p", "tp": "1", "bytes": bytes - rank_0 },
            ],
            "leases": { "alive": 0, "problems": [] },
        })
    );
    let mut prompts = cluster.prompts();
    prompts.sort();
    prompts.dedup();
    assert_eq!(prompts.len(), 4, "prompts are distinct: {prompts:?}");
}

#[test]
fn people_read_the_verdict_on_the_last_line() {
    let lease = Duration::ZERO;
    let cluster = Cluster::start(Script::Moves { lease });
    let run = verify(&cluster, "--prompts 2 --words 10");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(run.stdout.lines().last(), Some("KV moved: yes"));
    for line in [
        "prompts answered: 2 of 2, 20 tokens",
        "decode: 20000 bytes, 18 tokens from outside, 2 computed",
    ] {
        assert!(run.stdout.contains(line), "{}", run.stdout);
    }
}

#[test]
fn a_decode_that_recomputes_is_found_out() {
    for (script, reason) in [
        (
            Script::Recomputes,
            "decode took 0 of 36 prompt tokens from outside and computed the rest",
        ),
        (
            Script::RecomputesHalf,
            "decode took 18 of 36 prompt tokens from outside and computed the rest",
        ),
    ] {
        let cluster = Cluster::start(script);
        let run = verify(&cluster, "--prompts 4 --words 10 --settle-s 0");
        assert_eq!(run.code, 1, "{}", run.stderr);
        let last = run.stdout.lines().last().expect("a verdict");
        assert!(last.starts_with("KV moved: no ("), "{last}");
        assert!(last.contains(reason), "{last}");
    }
}

#[test]
fn a_lease_that_outlives_the_wait_is_a_leak() {
    let lease = Duration::from_secs(60);
    let cluster = Cluster::start(Script::Moves { lease });
    let begun = Instant::now();
    let run = verify(&cluster, "--prompts 3 --words 10 --settle-s 1 --json");
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!(run.code, 1, "{}", run.stderr);
    let report = json_of(&run);
    assert_eq!(report["kv_moved"], true);
    assert_eq!(report["leases"]["alive"], 3);
    let problem = format!("prefill {} holds 3 leases, 0 before", cluster.prefill);
    assert_eq!(report["leases"]["problems"], json!([problem]));
}

#[test]
fn engines_without_the_connector_are_named() {
    let cluster = Cluster::start(Script::NoConnector);
    let run = verify(&cluster, "--prompts 1 --words 10 --settle-s 0");
    assert_eq!(run.code, 1);
    for text in [
        "no decode engine's hetero_kv_bytes_read_total rose: is HeteroKVConnector loaded there?",
        "exposes no hetero_kv_leases_alive",
    ] {
        assert!(run.stdout.contains(text), "{}", run.stdout);
    }
}

#[test]
fn failed_prompts_are_shown_as_they_were_answered() {
    let cluster = Cluster::start(Script::Fails);
    let run = verify(&cluster, "--prompts 5 --settle-s 0");
    assert_eq!(run.code, 1);
    assert!(run.stdout.contains("5 of 5 prompts failed"));
    assert!(run.stdout.contains("status 500"), "{}", run.stdout);
    assert!(
        run.stdout.contains("Internal server error"),
        "{}",
        run.stdout
    );
}

#[test]
fn a_proxy_that_stops_answering_ends_the_run() {
    let cluster = Cluster::start(Script::Hangs);
    let begun = Instant::now();
    let run = verify(&cluster, "--prompts 100 --timeout-s 1 --settle-s 0 --json");
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(run.code, 1);
    let report = json_of(&run);
    assert_eq!(
        report["prompts"]["sent"], 3,
        "two without an answer are enough"
    );
    assert_eq!(report["prompts"]["ok"], 1);
}

#[test]
fn a_restarted_engine_is_no_proof() {
    let cluster = Cluster::start(Script::Restarts);
    let run = verify(&cluster, "--prompts 2 --words 10 --settle-s 0");
    assert_eq!(run.code, 1);
    let reason = format!("decode {} started anew meanwhile", cluster.decode[0]);
    assert!(run.stdout.contains(&reason), "{}", run.stdout);
}

#[test]
fn engines_may_be_named_instead_of_asked_for() {
    let lease = Duration::ZERO;
    let cluster = Cluster::start(Script::Moves { lease });
    // Only the first decode engine is read: the second one's tokens are missed.
    let engines = format!(
        "--engine {},role=prefill --engine {},role=decode",
        cluster.prefill, cluster.decode[0]
    );
    let flags = format!("{engines} --prompts 2 --words 10 --settle-s 0 --json");
    let report = json_of(&verify(&cluster, &flags));
    assert_eq!(report["external_tokens"], 9);
    let both = format!("{engines} --engine {},role=decode", cluster.decode[1]);
    let flags = format!("{both} --prompts 2 --words 10 --json");
    let report = json_of(&verify(&cluster, &flags));
    assert_eq!(report["external_tokens"], 18);
    assert_eq!(report["kv_moved"], true);
}

#[test]
fn what_keeps_it_from_asking_exits_2_and_says_why() {
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        format!("http://{}", listener.local_addr().expect("it is bound"))
    };
    let empty = serve(|_| ok("[]".to_owned()));
    let garbage = serve(|_| ok("<html>".to_owned()));
    let silent = serve(|_| None);
    let endless = serve(|request| match request.path.as_str() {
        "/metrics" => ok("x".repeat(17 << 20)),
        _ => ok(r#"{"data":[{"id":"tiny"}]}"#.to_owned()),
    });
    let endless_engines =
        format!("{endless} --engine {endless},role=prefill --engine {endless},role=decode");
    for (flags, reason) in [
        (
            format!("--proxy {closed}"),
            "asking the proxy for its engines",
        ),
        (
            format!("--proxy {empty}"),
            "no prefill engine: name engines with --engine",
        ),
        (format!("--proxy {garbage}"), "not as expected"),
        (format!("--proxy {silent} --timeout-s 1"), "timeout"),
        (format!("--proxy {endless_engines}"), "reading the answer"),
        (
            "--proxy https://a:1".to_owned(),
            "expected http://HOST:PORT",
        ),
        ("--proxy a:1".to_owned(), "expected http://HOST:PORT"),
        (
            format!("--proxy {empty} --engine http://a:1,role=both"),
            "expected URL,role=prefill or URL,role=decode",
        ),
        (
            format!("--proxy {empty} --prompts 0"),
            "0 is not in 1..=1000",
        ),
    ] {
        let run = hetero_kv(&format!("verify {flags} --json"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{flags}");
        assert!(run.stderr.contains(reason), "{flags}: {}", run.stderr);
    }
}
