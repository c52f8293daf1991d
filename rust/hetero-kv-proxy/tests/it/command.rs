//! The executable: exit codes, environment, signals.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use tokio::time::Instant;

use crate::client::Client;
use crate::engine::{Engine, Script, pair};
use crate::process::{Started, command, exit_code, signal};
use crate::{COMPLETIONS, STREAM};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(command: &mut Command) -> Output {
    command.output().expect("the executable runs")
}

#[test]
fn faults_of_the_configuration_are_exit_2_and_all_on_stderr() {
    for subcommand in ["serve", "check"] {
        let output = run(command().args([subcommand, "--connector", "p2p", "--policy", "x"]));
        assert_eq!(output.status.code(), Some(2));
        assert!(output.stdout.is_empty());
        let errors = text(&output.stderr);
        for part in [
            "--prefill: at least one",
            "--decode: at least one",
            "--connector p2p: unknown; one of hetero, none",
            "--policy x: unknown",
        ] {
            assert!(errors.contains(part), "{part} in {errors}");
        }
    }
    let output = run(command().args(["serve", "--no-such-flag"]));
    assert_eq!(output.status.code(), Some(2));
    let output = run(command().env("HETERO_KV_PROXY_LOG_LEVEL", "verbose").args([
        "check",
        "--prefill",
        "http://a:1",
        "--decode",
        "http://d:3",
    ]));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--log-level verbose: one of error, warn, info"));
}

#[test]
fn the_environment_gives_what_flags_do_not() {
    let output = run(command()
        .env("HETERO_KV_PROXY_PREFILL", "http://a:1,dp=2 http://b:2")
        .env("HETERO_KV_PROXY_REQUESTS_MAX", "5")
        .env("HETERO_KV_PROXY_THREADS", "3")
        .args(["check", "--decode", "http://d:3", "--requests-max", "6"]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    for line in [
        "prefill = [\"http://a:1,dp=2\", \"http://b:2\"]",
        "decode = [\"http://d:3\"]",
        "requests_max = 6",
        "threads = 3",
    ] {
        assert!(
            printed.lines().any(|found| found == line),
            "{line} in {printed}"
        );
    }
}

#[test]
fn a_full_disk_and_a_reader_that_has_gone_change_no_exit_code() {
    let full = || {
        let file = std::fs::OpenOptions::new().write(true).open("/dev/full");
        Stdio::from(file.expect("Linux has it"))
    };
    let good = ["check", "--prefill", "http://a:1", "--decode", "http://d:3"];
    for (arguments, code) in [(&good[..], 0), (&["check", "--policy", "x"][..], 2)] {
        let status = command()
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(full())
            .status();
        assert_eq!(status.expect("it runs").code(), Some(code));
    }
    // The answer itself has nowhere to go.
    let output = run(command().args(good).stdout(full()));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("writing to stdout"));
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = run(command().args(good).stdout(writer));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

/// Starts `serve` on a free port and reads the address from its first log line.
fn serve(p: &Engine, d: &Engine) -> (Child, SocketAddr, impl Read) {
    serve_with(p, d, &[])
}

fn serve_with(p: &Engine, d: &Engine, flags: &[&str]) -> (Child, SocketAddr, impl Read + use<>) {
    serve_workers(&p.url(), &d.url(), flags)
}

fn serve_workers(p: &str, d: &str, flags: &[&str]) -> (Child, SocketAddr, impl Read + use<>) {
    let mut child = command()
        .args(["serve", "--listen", "127.0.0.1:0", "--log-format", "json"])
        .args(["--prefill", p, "--decode", d])
        .args(flags)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the executable starts");
    let mut log = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    log.read_line(&mut line).expect("a log line");
    let line: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    let fields = &line["fields"];
    assert_eq!(fields["message"], "serving");
    assert!(fields["prefill"].as_str().expect("slots").ends_with(" x1"));
    let address = fields["listen"]
        .as_str()
        .expect("an address")
        .parse()
        .expect("an address");
    (child, address, log)
}

#[tokio::test]
async fn sigterm_lets_a_stream_end_and_a_second_signal_does_not_wait() {
    let (p, d) = pair().await;
    let events = vec!["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"];
    d.once(Script::Stream(events.clone(), Duration::from_millis(200)));
    let (child, address, _log) = serve(&p, &d);
    let mut client = Client::connect(address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    signal(&child, Signal::TERM);
    let mut text = Vec::new();
    while let Some(chunk) = client.chunk().await
        && !chunk.is_empty()
    {
        text.extend(chunk);
    }
    assert_eq!(text, events.concat().as_bytes());
    assert_eq!(exit_code(child).await, Some(0));

    d.once(Script::StreamThenSilence(vec!["data: 1\n\n"]));
    let (child, address, _log) = serve(&p, &d);
    let mut client = Client::connect(address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    signal(&child, Signal::INT);
    tokio::time::sleep(Duration::from_millis(200)).await;
    signal(&child, Signal::INT);
    let start = Instant::now();
    assert_eq!(exit_code(child).await, Some(0));
    assert!(start.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn without_descriptors_connections_wait_and_accepting_backs_off() {
    let (p, d) = pair().await;
    let (child, address, mut log) = serve(&p, &d);
    let pid = Some(Pid::from_child(&child));
    let child = Started::new(child);
    let health = async |client: &mut Client| {
        client.get("/health").await;
        client.reply().await.status
    };
    let mut open = Client::connect(address).await;
    assert_eq!(health(&mut open).await, 200);
    let limit = getrlimit(Resource::Nofile);
    let allow = |current| {
        let maximum = limit.maximum;
        let allowed = Rlimit { current, maximum };
        prlimit(pid, Resource::Nofile, allowed).expect("a process of ours");
    };
    // Those that are open stay so.
    allow(Some(1));
    let mut waiting = Client::connect(address).await;
    let waited = {
        let reply = health(&mut waiting);
        tokio::pin!(reply);
        let early = tokio::time::timeout(Duration::from_millis(500), &mut reply).await;
        assert!(early.is_err(), "it is not accepted");
        assert_eq!(health(&mut open).await, 200);
        allow(limit.current);
        tokio::time::timeout(Duration::from_secs(5), reply).await
    };
    assert_eq!(waited.expect("an answer"), 200);
    let child = child.into_child();
    signal(&child, Signal::TERM);
    drop((open, waiting));
    assert_eq!(exit_code(child).await, Some(0));
    let mut text = String::new();
    log.read_to_string(&mut text).expect("UTF-8");
    // It failed some ten times in these 500 ms, and would for as long as it lasts.
    assert_eq!(text.matches("accept failed").count(), 1, "{text}");
}

/// Each leg finds the bootstrap server away, which makes the engine suspect, and each good probe
/// ends that: as many lines as there are requests, without a limit.
#[tokio::test]
async fn a_fault_that_each_request_meets_is_a_few_lines_a_minute() {
    let (p, d) = pair().await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let nobody = closed.local_addr().expect("an address");
    drop(closed);
    let worker = format!("{},bootstrap={nobody}", p.url());
    let flags = "--connector mooncake --health-interval-ms 100 --breaker-failures-max 1000";
    let flags: Vec<&str> = flags.split(' ').collect();
    let (child, address, mut log) = serve_workers(&worker, &d.url(), &flags);
    let child = Started::new(child);
    let mut client = Client::connect(address).await;
    let body = br#"{"model":"m","prompt":"p","max_tokens":8}"#;
    // Two lines a round: more than the 20 of a minute.
    for _ in 0..30 {
        client.post(COMPLETIONS, &[], body).await;
        assert_eq!(client.reply().await.status, 502);
        tokio::time::sleep(Duration::from_millis(110)).await;
    }
    drop(client);
    let child = child.into_child();
    signal(&child, Signal::TERM);
    assert_eq!(exit_code(child).await, Some(0));
    let mut text = String::new();
    log.read_to_string(&mut text).expect("UTF-8");
    assert_eq!(text.matches("bootstrap server").count(), 20, "{text}");
    let of_prefill = text
        .lines()
        .filter(|line| line.contains("engine state") && line.contains("\"role\":\"prefill\""));
    assert_eq!(of_prefill.count(), 20, "{text}");
}

#[tokio::test]
async fn a_request_is_one_line_at_debug_none_at_info_and_no_line_has_its_prompt_or_key() {
    let (p, d) = pair().await;
    let keys = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(keys.path(), "sk-secret-of-the-client\n").expect("keys");
    let keys = keys.path().to_str().expect("UTF-8");
    let logs = async |level: &str| {
        let flags = ["--log-level", level, "--api-key-file", keys];
        let (child, address, mut log) = serve_with(&p, &d, &flags);
        let body = r#"{"model":"m","prompt":"my-secret-prompt","max_tokens":8}"#;
        let used = r#"{"usage":{"prompt_tokens":9,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":3}}}"#;
        d.once(Script::Answer(200, "application/json", used));
        d.once(Script::Answer(500, "application/json", "{}"));
        for (key, status) in [
            ("secret-of-the-client", 200),
            ("secret-of-the-client", 500),
            ("secret-guess", 401),
        ] {
            let key = format!("Bearer sk-{key}");
            let mut client = Client::connect(address).await;
            let headers = [
                ("authorization", key.as_str()),
                ("x-request-id", "id-of-it"),
                (
                    "traceparent",
                    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                ),
            ];
            client.post(COMPLETIONS, &headers, body.as_bytes()).await;
            assert_eq!(client.reply().await.status, status);
        }
        signal(&child, Signal::TERM);
        assert_eq!(exit_code(child).await, Some(0));
        let mut text = String::new();
        log.read_to_string(&mut text).expect("UTF-8");
        text
    };
    let trace = logs("trace").await;
    for secret in ["my-secret-prompt", "secret-of-the-client", "secret-guess"] {
        assert!(!trace.contains(secret), "{secret} in {trace}");
    }
    let lines: Vec<serde_json::Value> = trace
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .filter(|line: &serde_json::Value| line["fields"]["message"] == "request")
        .collect();
    assert_eq!(lines.len(), 2, "{trace}");
    for (line, status) in lines.iter().zip([200, 500]) {
        assert_eq!(line["level"], "DEBUG");
        let fields = &line["fields"];
        for (name, want) in [
            ("request_id", serde_json::json!("id-of-it")),
            (
                "trace_id",
                serde_json::json!("4bf92f3577b34da6a3ce929d0e0e4736"),
            ),
            ("route", serde_json::json!(COMPLETIONS)),
            ("status", serde_json::json!(status)),
            ("prefill", serde_json::json!(p.url())),
            ("decode", serde_json::json!(d.url())),
            ("decode_rank", serde_json::json!(0)),
            ("legs", serde_json::json!(2)),
            ("complete", serde_json::json!(true)),
        ] {
            assert_eq!(fields[name], want, "{name} in {fields}");
        }
        let tokens = ["prompt_tokens", "cached_tokens", "completion_tokens"];
        for (name, want) in tokens.into_iter().zip([9, 3, 8]) {
            match status {
                200 => assert_eq!(fields[name], serde_json::json!(want), "{name} in {fields}"),
                _ => assert!(fields[name].is_null(), "{name} in {fields}"),
            }
        }
        for time in ["ms", "prefill_ms", "decode_head_ms"] {
            assert!(fields[time].is_f64(), "{time} in {fields}");
        }
    }
    let info = logs("info").await;
    assert!(!info.contains("id-of-it"), "{info}");
}

/// Whoever reaches the registration port says nonsense as often as they like.
#[tokio::test]
async fn strangers_at_the_registration_port_do_not_fill_the_log() {
    const COUNT: usize = 200;
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let zmq = port.local_addr().expect("an address");
    drop(port);
    let child = command()
        .args(["serve", "--listen", "127.0.0.1:0", "--log-format", "json"])
        .args([
            "--connector",
            "moriio-read",
            "--zmq-listen",
            &zmq.to_string(),
        ])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the executable starts");
    let mut child = Started::new(child);
    let mut log = BufReader::new(child.child_mut().stderr.take().expect("piped"));
    let mut text = String::new();
    let address: SocketAddr = loop {
        let mut line = String::new();
        assert_ne!(log.read_line(&mut line).expect("a log line"), 0, "{text}");
        let fields: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        text.push_str(&line);
        let fields = &fields["fields"];
        if fields["message"] == "serving" {
            let listen = fields["listen"].as_str().expect("an address");
            break listen.parse().expect("an address");
        }
    };
    for _ in 0..COUNT {
        use std::io::Write;
        let mut stream = std::net::TcpStream::connect(zmq).expect("the proxy accepts");
        stream.write_all(&[b'x'; 80]).expect("the proxy reads");
        // Until it is closed, and so counted.
        let mut scrap = [0; 128];
        while stream.read(&mut scrap).is_ok_and(|count| count > 0) {}
    }
    let line = "hetero_kv_proxy_zmq_frames_total{outcome=\"handshake\"}";
    let start = Instant::now();
    loop {
        let mut client = Client::connect(address).await;
        client.get("/metrics").await;
        let metrics = client.reply().await.text();
        if metrics.contains(&format!("{line} {COUNT}\n")) {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{metrics}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    signal(child.child(), Signal::TERM);
    assert_eq!(exit_code(child.into_child()).await, Some(0));
    log.read_to_string(&mut text).expect("UTF-8");
    let warned = text
        .lines()
        .filter(|line| line.contains("ZeroMQ connection closed"));
    let warned = warned.count();
    assert!((1..=8).contains(&warned), "{warned} lines: {text}");
}

#[tokio::test]
async fn mock_tells_its_urls_and_bench_tells_by_its_exit_what_came_of_the_run() {
    let mock = command()
        .args(["mock", "--listen", "127.0.0.1:0,role=decode,workers=2"])
        .args(["--fail", "status=500,every=2"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the executable starts");
    let mut mock = Started::new(mock);
    let mut urls = BufReader::new(mock.child_mut().stdout.take().expect("piped")).lines();
    let mut url = || {
        let line = urls.next().expect("a line").expect("text");
        line.strip_suffix(" decode").expect("its role").to_owned()
    };
    let (first, second) = (url(), url());
    assert_ne!(first, second);
    let bench = |flags: &[&str]| run(command().args(["bench", "--quiet"]).args(flags));
    let good = bench(&["--url", &first, "--per-concurrency", "1", "--json", "-"]);
    assert_eq!(good.status.code(), Some(0), "{}", text(&good.stderr));
    let result: serde_json::Value = serde_json::from_slice(&good.stdout).expect("JSON");
    assert_eq!(result["rounds"][0]["completed"], 1);
    // The second of these two meets the fault.
    let bad = bench(&["--url", &second, "--per-concurrency", "2"]);
    assert_eq!(bad.status.code(), Some(1));
    assert!(
        text(&bad.stdout).contains("1 x status_500"),
        "{}",
        text(&bad.stdout)
    );
    signal(mock.child(), Signal::TERM);
    assert_eq!(exit_code(mock.into_child()).await, Some(0));
    for (flags, part) in [
        (vec!["bench"], "--url"),
        (
            vec!["bench", "--url", "http://h:1", "--rate", "5"],
            "--duration",
        ),
        (
            vec![
                "bench",
                "--url",
                "http://h:1",
                "--header",
                "Content-Length: 1",
            ],
            "made by this client",
        ),
        (
            vec!["mock", "--listen", "h:1,role=both"],
            "role is any, prefill or decode",
        ),
        (vec!["mock", "--fail", "flood"], "unknown fault `flood`"),
    ] {
        let output = run(command().args(&flags));
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(
            text(&output.stderr).contains(part),
            "{}",
            text(&output.stderr)
        );
    }
    let nowhere = bench(&["--url", "https://h", "--model", "m"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(
        text(&nowhere.stderr).contains("--url https://h"),
        "{}",
        text(&nowhere.stderr)
    );
}

#[tokio::test]
async fn a_change_of_an_engines_state_is_logged_with_its_reason() {
    let (p, d) = pair().await;
    d.set_healthy(false);
    let gone = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let nobody = format!("http://{}", gone.local_addr().expect("address"));
    drop(gone);
    let flags = ["--health-interval-ms", "50", "--prefill", &nobody];
    let (child, _, mut log) = serve_with(&p, &d, &flags);
    let child = Started::new(child);
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    signal(child.child(), Signal::TERM);
    assert_eq!(exit_code(child.into_child()).await, Some(0));
    let mut lines = String::new();
    log.read_to_string(&mut lines).expect("UTF-8");
    let reason_of = |url: &str, after: &str| {
        let line = lines
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .find(|line| line["fields"]["url"] == *url && line["fields"]["after"] == *after);
        line.unwrap_or_else(|| panic!("{url} {after} in {lines}"))["fields"]["reason"].clone()
    };
    let refused = "GET /health: no connection: Connection refused (os error 111)";
    assert_eq!(reason_of(&nobody, "suspect"), refused);
    assert_eq!(reason_of(&nobody, "unhealthy"), refused);
    assert_eq!(reason_of(&d.url(), "suspect"), "GET /health: 503");
    assert_eq!(reason_of(&p.url(), "healthy"), "GET /health: answered");
}
