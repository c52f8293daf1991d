//! Faults between two hosts that need no network of their own.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::report::{HETERO_KV, Report, doctor};

/// A real `doctor listen`, ended with the test.
pub(super) struct Listener {
    process: Child,
    pub(super) port: u16,
}

impl Listener {
    pub(super) fn start(words: &str) -> Self {
        Self::start_with(words, &[])
    }

    /// With variables of its environment set.
    pub(super) fn start_with(words: &str, variables: &[(&str, &str)]) -> Self {
        let mut process = Command::new(HETERO_KV)
            .envs(variables.iter().copied())
            .args(["doctor", "listen", "--json", "--seconds", "60"])
            .args(words.split_whitespace())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("a line");
        let said: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        let at = said["listening"].as_str().expect("an address");
        let port = at.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        Self {
            process,
            port: port.expect("a port"),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn check(port: u16) -> Report {
    Report::of(&mut doctor(&format!(
        "check 127.0.0.1:{port} --json --seconds 0"
    )))
}

#[test]
fn two_real_ends_find_nothing_wrong() {
    let listener = Listener::start("--listen 127.0.0.1:0 --tp 3");
    let words = format!("check 127.0.0.1:{} --json --seconds 1", listener.port);
    let report = Report::of(&mut doctor(&words));
    assert_eq!((report.code, report.failed()), (0, vec![]), "{report}");
    for check in [
        "reach",
        "version",
        "advertised",
        "data ports",
        "rdma",
        "large packets",
        "throughput",
    ] {
        assert_eq!(report.status(check), "ok", "{check}: {report}");
    }
    assert_eq!(
        report.found("data ports").matches(", ").count(),
        2,
        "{report}"
    );
    assert!(
        report.found("throughput").contains("CPU seconds"),
        "{report}"
    );
}

#[test]
fn nobody_listening_is_told_from_dropped_packets() {
    let port = {
        let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
        closed.local_addr().expect("bound").port()
    };
    check(port).assert_only("reach", &["connection refused"], &["doctor listen"]);
}

#[test]
fn an_advertised_address_that_refuses_is_named_beside_the_one_that_works() {
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
    let advertised = closed.local_addr().expect("bound");
    drop(closed);
    let listener = Listener::start(&format!("--listen 127.0.0.1:0 --advertise {advertised}"));
    let report = check(listener.port);
    assert_eq!(
        (report.code, report.status("advertised")),
        (1, "fail"),
        "{report}"
    );
    let found = report.found("advertised");
    assert!(
        found.contains(&format!("{advertised} is advertised and cannot be reached")),
        "{found}"
    );
    assert!(found.contains("refused"), "{found}");
    assert!(
        found.contains(&format!("127.0.0.1:{} can", listener.port)),
        "{found}"
    );
    assert!(report.mend("advertised").contains("set host"), "{report}");
}

#[test]
fn an_advertised_address_where_another_listener_answers_is_named() {
    let other = Listener::start("--listen 127.0.0.1:0");
    let words = format!("--listen 127.0.0.1:0 --advertise 127.0.0.1:{}", other.port);
    let listener = Listener::start(&words);
    check(listener.port).assert_only("advertised", &["another program answers"], &["set host"]);
}

/// A peer that says `answer` to whoever comes, and keeps the connection.
fn scripted(answer: Vec<u8>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let answer = answer.clone();
            thread::spawn(move || {
                let mut question = [0; 512];
                let _ = stream.read(&mut question);
                let _ = stream.write_all(&answer);
                let _ = stream.read(&mut question);
            });
        }
    });
    port
}

#[test]
fn a_peer_of_another_wire_version_is_named_with_both_versions() {
    let port = scripted(
        b"{\"hetero_kv_doctor\":true,\"version\":\"9.1.0\",\"wire\":[8,9],\"run\":\"x\",\
          \"advertise\":{\"host\":\"127.0.0.1\",\"port\":1},\"a later field\":1}\n"
            .to_vec(),
    );
    let report = check(port);
    assert_eq!(
        (report.code, report.status("version")),
        (1, "fail"),
        "{report}"
    );
    // It does not say that it knows of RDMA, and is not asked.
    assert_eq!(report.status("rdma"), "", "{report}");
    let found = report.found("version");
    let here = concat!("hetero_kv ", env!("CARGO_PKG_VERSION"), " (wire 1) here");
    assert!(found.contains(here), "{found}");
    assert!(found.contains("9.1.0 (wire 8 to 9) there"), "{found}");
    assert!(
        report
            .mend("version")
            .contains("install the newer hetero_kv here"),
        "{report}"
    );
}

#[test]
fn peers_that_are_no_doctor_are_named_and_wait_for_nobody() {
    let long = [b'x'; 10_000].to_vec();
    let answers: [&[u8]; 4] = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"{\"hetero_kv_doctor\":false}\n",
        b"\x00\xff\n",
        &long,
    ];
    for answer in answers {
        let report = check(scripted(answer.to_vec()));
        report.assert_only(
            "reach",
            &["is not `hetero-kv doctor listen`"],
            &["doctor listen"],
        );
    }
    let begun = Instant::now();
    let report = check(scripted(Vec::new()));
    report.assert_only("reach", &["says nothing within 5 s"], &["another program"]);
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn strangers_and_their_number_do_not_stop_a_listener() {
    let listener = Listener::start("--listen 127.0.0.1:0");
    let dial = || std::net::TcpStream::connect(("127.0.0.1", listener.port)).expect("dialled");
    for garbage in [b"\n".as_slice(), b"{}\n", &[0xff; 8192]] {
        let mut stream = dial();
        // It may hang up in the middle.
        let _ = stream.write_all(garbage);
        let mut answer = Vec::new();
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .expect("set");
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer, b"", "no answer to {garbage:?}");
    }
    // More than are served at once: what is beyond is closed and not kept.
    let many: Vec<_> = (0..64).map(|_| dial()).collect();
    thread::sleep(Duration::from_millis(500));
    let closed = |mut stream: &std::net::TcpStream| {
        stream.set_nonblocking(true).expect("set");
        match stream.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
        }
    };
    assert_eq!(many.iter().filter(|stream| closed(stream)).count(), 64 - 16);
    drop(many);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(check(listener.port).code, 0);
}
