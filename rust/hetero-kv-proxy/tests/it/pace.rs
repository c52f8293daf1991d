//! Engines that are faster than their clients, and clients that are slow or have stopped.

use std::net::SocketAddr;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use tokio::io::AsyncReadExt;
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::client::Client;
use crate::engine::{Engine, Script, pair};
use crate::{COMPLETIONS, STREAM, metric, proxy_with, until, urls};

const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"text\":\" token\"}]}\n\n";

async fn firehose(settings: Settings) -> (Engine, Engine, hetero_kv_proxy::run::Proxy) {
    let (p, d) = pair().await;
    d.always(Script::Firehose(TOKEN));
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    (p, d, proxy)
}

/// A client that reads 16 KiB at a time with a pause between, on a thread of its own, so that nobody
/// in the proxy's runtime waits for it: the last bytes of its answer.
fn reader(address: SocketAddr, pause: Duration) -> JoinHandle<String> {
    use std::io::{Read, Write};
    tokio::task::spawn_blocking(move || {
        let mut stream = std::net::TcpStream::connect(address).expect("the proxy accepts");
        let head = format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{STREAM}",
            STREAM.len()
        );
        stream.write_all(head.as_bytes()).expect("the proxy reads");
        let mut tail = Vec::new();
        let mut room = vec![0; 16 << 10];
        while let Ok(count @ 1..) = stream.read(&mut room) {
            tail.extend_from_slice(&room[..count]);
            tail.drain(..tail.len().saturating_sub(1_000));
            if tail.ends_with(b"0\r\n\r\n") {
                break;
            }
            std::thread::sleep(pause);
        }
        String::from_utf8_lossy(&tail).into_owned()
    })
}

/// A decode engine on threads of its own, which always has the next chunk there: the runtime of the
/// proxy has no part in that. Tells when the legs end.
fn ready_engine() -> (String, Receiver<std::time::Instant>) {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let (tell, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, tell) = (stream.expect("a connection"), tell.clone());
            std::thread::spawn(move || {
                let mut room = [0; 4_096];
                while let Ok(count @ 1..) = stream.read(&mut room) {
                    if room[..count].starts_with(b"GET ") {
                        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                        stream.write_all(answer).expect("the proxy reads");
                        continue;
                    }
                    let head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
                    let lump = format!("{:x}\r\n{TOKEN}\r\n", TOKEN.len()).repeat(4_096);
                    let _closed = stream.write_all(head);
                    while stream.write_all(lump.as_bytes()).is_ok() {}
                    // The test may be over.
                    let _unheard = tell.send(std::time::Instant::now());
                    return;
                }
            });
        }
    });
    (url, ended)
}

async fn end_of_leg(
    ended: Receiver<std::time::Instant>,
) -> (Instant, Receiver<std::time::Instant>) {
    tokio::task::spawn_blocking(move || {
        let at = ended.recv_timeout(Duration::from_secs(10));
        (Instant::from_std(at.expect("the leg ends")), ended)
    })
    .await
    .expect("a thread")
}

async fn proxy_of_ready(
    settings: Settings,
) -> (hetero_kv_proxy::run::Proxy, Receiver<std::time::Instant>) {
    let (url, ended) = ready_engine();
    let settings = Settings {
        connector: Some("none".to_owned()),
        ..settings
    };
    (proxy_with(settings, &[], &[url]).await, ended)
}

/// The next chunk is always there, so that the stream never waits: neither for the engine nor, with
/// a client as fast, for room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_deadline_ends_a_stream_that_never_waits() {
    let settings = Settings {
        request_timeout_s: Some(1),
        ..Settings::default()
    };
    let (proxy, mut ended) = proxy_of_ready(settings).await;
    for pause_ms in [0, 1] {
        let start = Instant::now();
        let reading = reader(proxy.address, Duration::from_millis(pause_ms));
        let at;
        (at, ended) = end_of_leg(ended).await;
        let took = at - start;
        // 50 ms on a machine that has nothing else to do.
        assert!(
            took > Duration::from_millis(950) && took < Duration::from_millis(1_300),
            "{pause_ms} ms: {took:?}"
        );
        let tail = reading.await.expect("a client");
        assert!(tail.contains("\"code\":\"deadline_exceeded\""), "{tail}");
    }
}

/// Whoever takes nothing has no event of the deadline either, but holds no engine longer.
#[tokio::test]
async fn the_deadline_ends_an_answer_that_its_client_does_not_take() {
    let settings = Settings {
        request_timeout_s: Some(1),
        client_write_timeout_s: Some(3_600),
        ..Settings::default()
    };
    let (_p, d, proxy) = firehose(settings).await;
    let mut client = Client::connect(proxy.address).await;
    let start = Instant::now();
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    until("the decode leg's end", || d.ended(0).is_some()).await;
    let took = start.elapsed();
    assert!(
        took > Duration::from_millis(950) && took < Duration::from_millis(1_500),
        "{took:?}"
    );
    let count = metric(&proxy, "stream_breaks_total{reason=\"deadline\"}").await;
    assert_eq!(count, 1.0);
}

/// Its window is full all the time, and what it takes in a second is far less than what the kernel
/// waits for before it calls a socket writable.
#[tokio::test]
async fn a_client_that_reads_slowly_is_not_one_that_takes_nothing() {
    let settings = Settings {
        client_write_timeout_s: Some(1),
        ..Settings::default()
    };
    let (_p, d, proxy) = firehose(settings).await;
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4_096).expect("a small window");
    let mut stream = socket
        .connect(proxy.address)
        .await
        .expect("the proxy accepts");
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{STREAM}",
        STREAM.len()
    );
    tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes())
        .await
        .expect("the proxy reads");
    let start = Instant::now();
    let mut room = vec![0; 1_024];
    while start.elapsed() < Duration::from_secs(6) {
        let count = stream.read(&mut room).await.expect("the answer goes on");
        assert_ne!(count, 0, "ended after {:?}", start.elapsed());
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(d.ended(0), None);
    // Then it stops.
    let stopped = Instant::now();
    until("the decode leg's end", || d.ended(0).is_some()).await;
    assert!(
        stopped.elapsed() > Duration::from_millis(500),
        "{:?}",
        stopped.elapsed()
    );
}
