//! The thread against a listener by hand.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use serde_json::json;

use super::sign::Signed;
use super::*;

/// One request as it came: its line, its headers in lower case, its body.
struct Seen {
    line: String,
    head: String,
    body: Value,
}

/// Longer than any wait of the thread's.
const PATIENCE: Duration = Duration::from_secs(8);

/// The next connection; whoever waits for it in vain fails.
fn accept(listener: &TcpListener) -> TcpStream {
    let begun = Instant::now();
    listener.set_nonblocking(true).expect("a socket");
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).expect("a socket");
                stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
                stream.set_write_timeout(Some(PATIENCE)).expect("a socket");
                return stream;
            }
            Err(error) => assert!(begun.elapsed() < PATIENCE, "no connection: {error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Takes one request and answers it.
fn answer(listener: &TcpListener, status: &str, body: &str) -> Seen {
    let mut stream = accept(listener);
    let seen = read(&mut stream);
    let length = body.len();
    let text = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(text.as_bytes()).expect("it reads");
    seen
}

fn read(stream: &mut TcpStream) -> Seen {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while !bytes.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).expect("a head");
        bytes.push(byte[0]);
    }
    let head = String::from_utf8(bytes).expect("ASCII");
    let line = head.lines().next().expect("a line").to_owned();
    let head = head.to_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |length| length.parse().expect("a length"));
    let mut body = vec![0; length];
    stream.read_exact(&mut body).expect("a body");
    Seen {
        line,
        head,
        body: serde_json::from_slice(&body).unwrap_or_default(),
    }
}

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    (listener, url)
}

fn options(proxy_url: String) -> RegistrationOptions {
    RegistrationOptions {
        proxy_url,
        body: json!({"role": "decode", "url": "http://10.0.0.3:8200"}),
        interval: Duration::from_millis(50),
        keys: None,
    }
}

const SHOWN: &str = r#"{"id":"decode-7"}"#;

#[test]
fn it_registers_beats_and_says_goodbye() {
    let (listener, url) = listener();
    let registration = Registration::start(options(url)).expect("a thread");
    let start = Instant::now();
    for _ in 0..3 {
        let seen = answer(&listener, "200 OK", SHOWN);
        assert_eq!(seen.line, "POST /v1/workers HTTP/1.1");
        assert_eq!(seen.body["url"], json!("http://10.0.0.3:8200"));
        assert!(!seen.head.contains("x-hetero-kv-"), "{}", seen.head);
    }
    assert!(start.elapsed() >= Duration::from_millis(100));
    let goodbye = std::thread::spawn(move || {
        loop {
            let seen = answer(&listener, "202 Accepted", "{}");
            if seen.line.starts_with("DELETE") {
                return seen.line;
            }
        }
    });
    registration.stop();
    let line = goodbye.join().expect("a goodbye");
    assert_eq!(line, "DELETE /v1/workers/decode-7?wait_s=0 HTTP/1.1");
    registration.stop();
}

#[test]
fn a_proxy_that_comes_later_or_says_no_is_tried_again() {
    let (first, url) = listener();
    let port = first.local_addr().expect("an address").port();
    drop(first);
    let registration = Registration::start(options(url)).expect("a thread");
    std::thread::sleep(Duration::from_millis(120));
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("the same port");
    let refusal = r#"{"error":{"code":"worker_refused","message":"not here"}}"#;
    answer(&listener, "400 Bad Request", refusal);
    answer(&listener, "500 Oh", "no JSON");
    // Neither a lost connection nor silence ends it.
    drop(accept(&listener));
    let silent = accept(&listener);
    let begun = Instant::now();
    let seen = answer(&listener, "201 Created", SHOWN);
    assert!(seen.line.starts_with("POST"));
    let waited = begun.elapsed();
    assert!(waited >= WITHIN - Duration::from_millis(200), "{waited:?}");
    drop(silent);
    // Nobody answers the goodbye.
    drop(listener);
    let begun = Instant::now();
    registration.stop();
    assert!(begun.elapsed() < WITHIN + GOODBYE_WITHIN + Duration::from_secs(1));
}

#[test]
fn an_engine_that_never_registered_says_no_goodbye() {
    let (listener, url) = listener();
    let registration = Registration::start(options(url)).expect("a thread");
    answer(&listener, "401 Unauthorized", "{}");
    listener.set_nonblocking(true).expect("a socket");
    registration.stop();
    while let Ok((mut stream, _)) = listener.accept() {
        stream.set_nonblocking(false).expect("a socket");
        let seen = read(&mut stream);
        assert!(seen.line.starts_with("POST"), "{}", seen.line);
    }
}

#[test]
fn an_endless_answer_is_given_up() {
    let (listener, url) = listener();
    let registration = Registration::start(options(url)).expect("a thread");
    let mut stream = accept(&listener);
    read(&mut stream);
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).expect("it reads");
    let chunk = [b"10000\r\n".as_slice(), &[b'x'; 0x10000], b"\r\n"].concat();
    let written = (0..1000).take_while(|_| stream.write_all(&chunk).is_ok());
    let written = written.count();
    assert!(written < 200, "{written} chunks of 64 KiB were read");
    drop(stream);
    answer(&listener, "200 OK", SHOWN);
    drop(listener);
    registration.stop();
}

#[test]
fn requests_are_signed_as_the_proxy_expects() {
    // The same case as in the proxy's own test, by `openssl dgst -sha256 -hmac`.
    let signed = Signed {
        method: "POST",
        target: "/v1/workers?x=1",
        timestamp_s: 1_800_000_000,
        nonce: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
        body: br#"{"role":"decode","url":"http://10.0.0.3:8200"}"#,
    };
    let text = b"# ours\n\n  an-admin-key-of-ours \nanother-key-of-ours\n";
    let keys = Keys::parse(text).expect("keys");
    assert_eq!(
        signed.sign(keys.first()),
        "c86ee77008dcefbbba8e22d65244adb208377b991def30559632b394696659c2"
    );
    let (listener, url) = listener();
    let with_key = RegistrationOptions {
        keys: Some(keys.clone()),
        ..options(format!("{url}/behind"))
    };
    let body = with_key.body.to_string();
    let registration = Registration::start(with_key).expect("a thread");
    let mut nonces = Vec::new();
    for _ in 0..2 {
        let seen = answer(&listener, "200 OK", SHOWN);
        assert_eq!(seen.line, "POST /behind/v1/workers HTTP/1.1");
        let header = |name: &str| {
            let mut lines = seen.head.lines();
            let found = lines.find_map(|line| line.strip_prefix(&format!("{name}: ")));
            found.expect("a header").to_owned()
        };
        let timestamp_s: u64 = header("x-hetero-kv-timestamp").parse().expect("seconds");
        assert!(timestamp_s.abs_diff(clock::unix_s()) <= 5);
        let nonce = header("x-hetero-kv-nonce");
        let bytes: Vec<u8> = (0..16)
            .map(|at| u8::from_str_radix(&nonce[2 * at..2 * at + 2], 16).expect("hex"))
            .collect();
        let signed = Signed {
            method: "POST",
            target: "/behind/v1/workers",
            timestamp_s,
            nonce: bytes.try_into().expect("16"),
            body: body.as_bytes(),
        };
        assert_eq!(header("x-hetero-kv-signature"), signed.sign(keys.first()));
        nonces.push(nonce);
    }
    assert_ne!(nonces[0], nonces[1]);
    drop(listener);
    registration.stop();
}

#[test]
fn pauses_double_up_to_the_interval() {
    let ms =
        |failures, interval_ms| pause(failures, Duration::from_millis(interval_ms)).as_millis();
    let doubling: Vec<u128> = (0..7).map(|failures| ms(failures, 5_000)).collect();
    assert_eq!(doubling, [200, 400, 800, 1_600, 3_200, 5_000, 5_000]);
    assert_eq!(ms(u32::MAX, 600_000), 10_000);
    assert_eq!(ms(0, 50), 200);
}
