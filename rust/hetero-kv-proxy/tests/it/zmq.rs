//! MoRI-IO workers that register over ZeroMQ, by hand: what vLLM's own code sends is in
//! `tests/vllm/test_proxy_registration.py`.

use std::net::SocketAddr;
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::config::Config;
use hetero_kv_proxy::run::Proxy;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};

use crate::connectors::engine;
use crate::engine::Engine;
use crate::{COMPLETIONS, PROMPT, metric, post, soon};

const PREFILLED: &str = r#"{"choices":[{"text":"t","finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[1]],"tp_size":1,"remote_dp_rank":0}}"#;

/// A proxy that listens for ZeroMQ, and where.
pub(crate) async fn proxy(connector: &str, settings: Settings) -> (Proxy, SocketAddr) {
    let settings = Settings {
        connector: Some(connector.to_owned()),
        zmq_listen: Some("127.0.0.1:0".to_owned()),
        health_interval_ms: Some(20),
        ..settings
    };
    let config = Config::from_settings(settings).expect("a valid configuration");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let zmq = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let at = zmq.local_addr().expect("an address");
    let proxy = Proxy::start_all(config, listener, None, Some(zmq)).expect("the proxy starts");
    (proxy, at)
}

/// The end of a DEALER that has shaken hands.
pub(crate) async fn dealer(at: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(at).await.expect("the proxy accepts");
    let mut hello = vec![0; 64];
    hello[0] = 0xff;
    hello[9] = 0x7f;
    hello[10] = 3;
    hello[12..16].copy_from_slice(b"NULL");
    hello.extend_from_slice(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER");
    stream.write_all(&hello).await.expect("the proxy reads");
    stream
}

pub(crate) fn frame(value: &Value) -> Vec<u8> {
    let body = rmp_serde::to_vec(value).expect("packs");
    match u8::try_from(body.len()) {
        Ok(length) => [&[0, length], body.as_slice()].concat(),
        Err(_) => {
            let length = (body.len() as u64).to_be_bytes();
            [&[2], length.as_slice(), body.as_slice()].concat()
        }
    }
}

pub(crate) fn announced(role: &str, engine: &Engine, mode: &str) -> Value {
    let url = engine.url();
    json!({
        "type": role, "http_address": url.strip_prefix("http://").expect("a URL"),
        "zmq_address": "host:127.0.0.1,handshake:6301,notify:61005",
        "dp_size": 1, "tp_size": 1, "transfer_mode": mode,
    })
}

pub(crate) async fn frames(proxy: &Proxy, outcome: &str) -> f64 {
    metric(proxy, &format!("zmq_frames_total{{outcome=\"{outcome}\"}}")).await
}

/// Waits until so many frames ended so.
pub(crate) async fn until_frames(proxy: &Proxy, outcome: &str, count: f64) {
    soon(outcome, async || frames(proxy, outcome).await >= count).await;
}

pub(crate) async fn workers(proxy: &Proxy) -> Vec<Value> {
    let mut client = crate::client::Client::connect(proxy.address).await;
    client.get("/workers").await;
    let list = client.reply().await.json();
    list.as_array().expect("a list").clone()
}

pub(crate) async fn until_routable(proxy: &Proxy, count: usize) {
    let start = Instant::now();
    loop {
        let all = workers(proxy).await;
        let routable = all.iter().filter(|one| one["routable"] == json!(true));
        if routable.count() == count {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{all:?}");
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn workers_of_both_forms_register_serve_and_expire() {
    let (proxy, at) = proxy("moriio-read", Settings::default()).await;
    let (p, d) = (engine(PREFILLED).await, engine("{}").await);
    let mut prefill = dealer(at).await;
    let told = frame(&announced("P", &p, "READ"));
    prefill.write_all(&told).await.expect("the proxy reads");
    let mut decode = dealer(at).await;
    let older = json!({
        "type": "register", "role": "D", "index": "1",
        "request_address": format!("{}/v1/completions", d.url()), "handshake_port": 6302,
        "notify_port": 61006, "dp_size": 2, "tp_size": 1, "transfer_mode": "READ",
    });
    decode
        .write_all(&frame(&older))
        .await
        .expect("the proxy reads");
    until_routable(&proxy, 2).await;
    prefill.write_all(&told).await.expect("the proxy reads");
    until_frames(&proxy, "heartbeat", 1.0).await;
    assert_eq!(frames(&proxy, "registered").await, 2.0);
    let all = workers(&proxy).await;
    assert_eq!(
        (&all[0]["url"], &all[0]["source"]),
        (&json!(p.url()), &json!("registered"))
    );
    assert_eq!(all[1]["dp"], json!(2));
    let left = all[0]["expires_in_ms"].as_u64().expect("it expires");
    assert!((9_000..=15_000).contains(&left), "{left}");

    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    // The ports that were registered are those that the legs name.
    let id = d.seen()[0].headers["x-request-id"].clone();
    assert!(
        id.starts_with(
            "___prefill_addr_host:127.0.0.1,handshake:6301,notify:61005___decode_addr_host:127.0.0.1,\
             handshake:6302,notify:61006_"
        ),
        "{id}"
    );
}

#[tokio::test]
async fn a_worker_that_is_silent_for_its_time_leaves() {
    let settings = Settings {
        zmq_ttl_ms: Some(9_000),
        ..Settings::default()
    };
    let (proxy, at) = proxy("moriio-write", settings).await;
    let p = engine(PREFILLED).await;
    let mut prefill = dealer(at).await;
    let told = frame(&announced("P", &p, "WRITE"));
    prefill.write_all(&told).await.expect("the proxy reads");
    until_routable(&proxy, 1).await;
    sleep(Duration::from_millis(8_500)).await;
    assert_eq!(workers(&proxy).await.len(), 1);
    let start = Instant::now();
    while !workers(&proxy).await.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(3), "it stays");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_counted_and_harms_nobody() {
    let (proxy, at) = proxy("moriio-read", Settings::default()).await;
    let p = engine(PREFILLED).await;
    let mut dealt = dealer(at).await;
    let mut other = announced("P", &p, "WRITE");
    dealt.write_all(&frame(&other)).await.expect("read");
    until_frames(&proxy, "mode_mismatch", 1.0).await;
    other = announced("P", &p, "READ");
    other["dp_size"] = json!(2);
    other["tp_size"] = json!(2);
    dealt.write_all(&frame(&other)).await.expect("read");
    until_frames(&proxy, "refused", 1.0).await;
    dealt.write_all(b"\0\x02no").await.expect("read");
    until_frames(&proxy, "malformed", 1.0).await;
    assert!(workers(&proxy).await.is_empty());
    // The connection is still good for a good frame.
    let good = frame(&announced("P", &p, "READ"));
    dealt.write_all(&good).await.expect("read");
    until_frames(&proxy, "registered", 1.0).await;

    // A length that is only claimed ends its connection, and no other.
    let mut claims = dealer(at).await;
    claims
        .write_all(b"\x02\x40\0\0\0\0\0\0\0")
        .await
        .expect("read");
    until_frames(&proxy, "too_large", 1.0).await;
    let mut rest = Vec::new();
    claims.read_to_end(&mut rest).await.expect("it is closed");
    let mut http = TcpStream::connect(at).await.expect("the proxy accepts");
    let head = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", "x".repeat(80));
    http.write_all(head.as_bytes()).await.expect("read");
    until_frames(&proxy, "handshake", 1.0).await;
    dealt.write_all(&good).await.expect("read");
    until_frames(&proxy, "heartbeat", 1.0).await;
}

#[tokio::test]
async fn registered_sizes_win_over_the_flags_but_for_which_part_it_is() {
    let p = engine(PREFILLED).await;
    let part = engine(PREFILLED).await;
    let settings = Settings {
        prefill: Some(vec![
            format!("{},dp=3,handshake=1", p.url()),
            format!("{},dp=2,dp-size=4,dp-rank0=2,rank0=2", part.url()),
        ]),
        ..Settings::default()
    };
    let (proxy, at) = proxy("moriio-read", settings).await;
    let mut dealt = dealer(at).await;
    for (engine, dp_size) in [(&p, 2), (&part, 4)] {
        let mut told = announced("P", engine, "READ");
        told["dp_size"] = json!(dp_size);
        dealt.write_all(&frame(&told)).await.expect("read");
    }
    let start = Instant::now();
    let sizes = json!([[p.url(), 2, 0, "flag"], [part.url(), 2, 2, "flag"]]);
    loop {
        let mut all = workers(&proxy).await;
        all.retain(|one| one["standing"] == json!("serving"));
        let seen: Vec<Value> = all
            .iter()
            .map(|one| json!([one["url"], one["dp"], one["rank0"], one["source"]]))
            .collect();
        if json!(seen) == sizes {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{seen:?}");
        sleep(Duration::from_millis(5)).await;
    }
}
