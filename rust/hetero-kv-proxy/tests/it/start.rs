//! What the executable says of its settings when it starts, or why it does not.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::process::{Started, command, exit_code, lines, signal};

const PAIR: [&str; 4] = [
    "--prefill",
    "http://127.0.0.1:9",
    "--decode",
    "http://127.0.0.1:10",
];

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(command: &mut Command) -> Output {
    command.output().expect("the executable runs")
}

/// `serve` on a free port with these flags, and what it logs.
fn serve(flags: &[&str], log: &Path) -> Started {
    let file = std::fs::File::create(log).expect("a file");
    let child = command()
        .args(["serve", "--listen", "127.0.0.1:0", "--log-format", "json"])
        .args(flags)
        .stderr(Stdio::from(file))
        .spawn();
    Started::new(child.expect("the executable starts"))
}

/// The fields of the lines that begin so, at least `count`.
async fn said(log: &Path, beginning: &str, count: usize) -> Vec<Value> {
    let start = Instant::now();
    loop {
        let fields = lines(log).into_iter().map(|line| line["fields"].clone());
        let begins = |fields: &Value| {
            let message = fields["message"].as_str().unwrap_or_default();
            message.starts_with(beginning)
        };
        let found: Vec<Value> = fields.filter(begins).collect();
        if found.len() >= count {
            return found;
        }
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{:?}",
            lines(log)
        );
        sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn an_address_that_cannot_be_had_is_exit_1_and_told_by_its_setting() {
    let holder = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let taken = holder.local_addr().expect("address").to_string();
    for (setting, more) in [
        ("--listen", &[][..]),
        ("--admin-listen", &[][..]),
        ("--zmq-listen", &["--connector", "moriio-read"][..]),
    ] {
        let free = match setting {
            "--listen" => &[][..],
            _ => &["--listen", "127.0.0.1:0"][..],
        };
        let output = run(command()
            .arg("serve")
            .args(PAIR)
            .args(free)
            .args(more)
            .args([setting, &taken]));
        assert_eq!(output.status.code(), Some(1), "{setting}");
        let errors = text(&output.stderr);
        let want = format!("hetero-kv-proxy: {setting} {taken}: Address");
        assert!(errors.contains(&want), "{want} in {errors}");
        assert!(errors.contains("another process listens there"), "{errors}");
    }
    drop(holder);
    let elsewhere = run(command()
        .arg("serve")
        .args(PAIR)
        .args(["--listen", "192.0.2.1:8000"]));
    let errors = text(&elsewhere.stderr);
    assert!(
        errors.contains("--listen 192.0.2.1:8000: ") && errors.contains("no address of this host"),
        "{errors}"
    );
}

#[test]
fn a_proxy_that_is_its_own_worker_is_refused_at_start() {
    for (listen, worker, setting) in [
        (
            "0.0.0.0:8123",
            "http://localhost:8123",
            "--listen 0.0.0.0:8123",
        ),
        ("127.0.0.1:8123", "http://127.0.0.1:8124", "--admin-listen"),
    ] {
        // As `serve`, which would go on where it is not refused.
        let output = run(command().args(["check", "--listen", listen]).args([
            "--admin-listen",
            "127.0.0.1:8124",
            "--prefill",
            "http://p:1",
            "--decode",
            worker,
        ]));
        assert_eq!(output.status.code(), Some(2));
        let errors = text(&output.stderr);
        let name = setting.split(' ').next().expect("a flag");
        let want = format!("--decode {worker}: is this proxy's own {name}");
        assert!(errors.contains(&want), "{want} in {errors}");
    }
}

#[tokio::test]
async fn shares_of_a_revision_that_no_worker_tells_are_told_once_at_start_and_after_a_reload() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, log) = (folder.path().join("proxy.toml"), folder.path().join("log"));
    let both = "prefill = [\"http://127.0.0.1:9,revision=v1\"]\n\
                decode = [\"http://127.0.0.1:10,revision=v1\",\"http://127.0.0.1:11,revision=v2\"]\n";
    std::fs::write(&file, both).expect("written");
    let config = file.to_str().expect("UTF-8");
    let weights = ["--revision-weights", "v1=90,v2=5,vv1=5"];
    let process = serve(&[&["--config", config][..], &weights].concat(), &log);
    let message = "no worker tells this revision";
    let found = said(&log, message, 1).await;
    assert_eq!(found[0]["unheard"], "v2 (prefill), vv1 (prefill, decode)");
    assert_eq!(found[0]["known"], "v1, v2");
    sleep(Duration::from_millis(500)).await;
    assert_eq!(said(&log, message, 1).await.len(), 1, "once");

    std::fs::write(&file, both.replace("v2", "vv1")).expect("written");
    signal(process.child(), rustix::process::Signal::HUP);
    let found = said(&log, message, 2).await;
    assert_eq!(found[1]["unheard"], "v2 (prefill, decode), vv1 (prefill)");
    signal(process.child(), rustix::process::Signal::TERM);
    assert_eq!(exit_code(process.into_child()).await, Some(0));
    assert_eq!(said(&log, message, 2).await.len(), 2, "once each time");
}

#[tokio::test]
async fn an_open_admin_listener_is_warned_of_unless_it_is_loopback_or_signed() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "a-key-of-sixteen-and-more\n").expect("written");
    let signed = ["--admin-key-file", keys.to_str().expect("UTF-8")];
    for (listen, more, warned) in [
        ("0.0.0.0:0", &[][..], 1),
        ("[::]:0", &[][..], 1),
        ("0.0.0.0:0", &signed[..], 0),
        ("127.0.0.1:0", &[][..], 0),
    ] {
        let process = serve(&[&["--admin-listen", listen][..], more].concat(), &log);
        said(&log, "serving", 2).await;
        let found = said(&log, "--admin-listen is open", 0).await;
        assert_eq!(found.len(), warned, "{listen} {more:?}");
        if let Some(found) = found.first() {
            let message = found["message"].as_str().expect("a text");
            assert!(message.contains("--admin-key-file"), "{message}");
        }
        drop(process);
    }
}

#[test]
fn an_environment_variable_that_no_setting_has_is_refused_with_all_other_faults() {
    let with = |name: &str| {
        run(command()
            .env(name, "1")
            .env("HETERO_KV_PROXY_SERVICE_HOST", "10.0.0.1")
            .env("HETERO_KV_PROXY_PORT_8000_TCP", "tcp://10.0.0.1:8000")
            .arg("check")
            .args(PAIR))
    };
    let output = with("HETERO_KV_PROXY_QUEUE_MAX");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let output = with("HETERO_KV_PROXY_QEUE_MAX");
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let want = "hetero-kv-proxy: HETERO_KV_PROXY_QEUE_MAX: no setting has this environment variable; \
                did you mean HETERO_KV_PROXY_QUEUE_MAX?\n";
    assert_eq!(text(&output.stderr), want);
    let both = run(command()
        .env("HETERO_KV_PROXY_QEUE_MAX", "1")
        .args(["serve", "--policy", "x"])
        .args(PAIR));
    let errors = text(&both.stderr);
    assert_eq!(errors.lines().count(), 2, "{errors}");
}

#[test]
fn a_number_below_0_is_a_value_by_flag_and_by_environment() {
    let want = "hetero-kv-proxy: --queue-max -1: must be 0 to 1000000\n";
    for output in [
        run(command().args(["serve", "--queue-max", "-1"]).args(PAIR)),
        run(command()
            .env("HETERO_KV_PROXY_QUEUE_MAX", "-1")
            .arg("check")
            .args(PAIR)),
    ] {
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(text(&output.stderr), want);
    }
}
