//! Bad input, sizes, numbers, times, and the end of the proxy.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use tokio::time::Instant;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script, pair, pair_on};
use crate::{
    CHAT, COMPLETIONS, PROMPT, STREAM, at_once, metric, post, proxy, proxy_with, until, urls,
};

#[tokio::test]
async fn bad_bodies_are_400_and_reach_no_engine() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    for (body, code) in [
        (&b""[..], "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b"{\"a\":\"\xff\"}", "invalid_json"),
        (b"{\"prompt\":1} trailing", "invalid_json"),
        (b"{\"max_tokens\":-4}", "invalid_field"),
        (b"{\"stream\":\"yes\"}", "invalid_field"),
        (
            b"{\"stream_options\":{\"include_usage\":true}}",
            "invalid_field",
        ),
        (b"{\"n\":1,\"n\":2}", "duplicate_field"),
        (
            b"{\"kv_transfer_params\":{\"do_remote_prefill\":true,\"remote_host\":\"10.0.0.1\"}}",
            "kv_transfer_params_not_allowed",
        ),
    ] {
        for path in [COMPLETIONS, CHAT] {
            client.post(path, &[], body).await;
            let reply = client.reply().await;
            let what = String::from_utf8_lossy(body);
            assert_eq!(
                (reply.status, reply.error_code().as_str()),
                (400, code),
                "{what}"
            );
        }
    }
    assert_eq!((p.count(), d.count()), (0, 0));
    // The connection lives on.
    client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
    assert_eq!(client.reply().await.status, 200);
}

#[tokio::test]
async fn paths_and_methods() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client.get("/nothing").await;
    let reply = client.reply().await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (404, "unknown_path")
    );
    client.get(COMPLETIONS).await;
    let reply = client.reply().await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (405, "method_not_allowed")
    );
    assert_eq!(reply.headers["allow"], "POST");
    client.post("/metrics", &[], b"{}").await;
    let reply = client.reply().await;
    assert_eq!(
        (reply.status, reply.headers["allow"].as_str()),
        (405, "GET, HEAD")
    );
    // On the clients' own listener, and asking no engine.
    for (path, part) in [("/metrics", "hetero_kv_proxy_"), ("/health", "ok")] {
        client.get(path).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, 200, "{path}");
        assert!(reply.text().contains(part), "{path}");
    }
    assert_eq!((p.count(), d.count()), (0, 0));
}

#[tokio::test]
async fn a_body_over_the_limit_is_413_declared_or_not_and_one_below_passes() {
    let (p, d) = pair().await;
    let settings = Settings {
        body_bytes_max: Some(3 << 20),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let body = |bytes: usize| {
        let frame = r#"{"prompt":""}"#.len();
        format!(r#"{{"prompt":"{}"}}"#, "x".repeat(bytes - frame))
    };
    assert_eq!(post(&proxy, COMPLETIONS, &body(3 << 20)).await.status, 200);
    assert_eq!(p.seen()[0].body.len(), (3 << 20) + params_bytes(&p));
    // The whole body is written before the answer is read, as simple clients do.
    for bytes in [(3 << 20) + 1, 40 << 20] {
        let reply = post(&proxy, COMPLETIONS, &body(bytes)).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (413, "body_too_large")
        );
    }
    let mut client = Client::connect(proxy.address).await;
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000000\r\n\r\n{";
    client.raw(head.as_bytes()).await;
    assert_eq!(client.reply().await.status, 413);

    let mut client = Client::connect(proxy.address).await;
    client
        .raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    let chunk = "x".repeat(1 << 20);
    for _ in 0..4 {
        client
            .raw(format!("{:x}\r\n{chunk}\r\n", chunk.len()).as_bytes())
            .await;
    }
    assert_eq!(client.reply().await.status, 413);
    assert_eq!(p.count(), 1);
}

/// What the prefill leg adds to a body without limits of its own.
fn params_bytes(engine: &Engine) -> usize {
    let text = engine.seen()[0].text().to_owned();
    text.find(r#""prompt""#).expect("the prompt") - 1
}

#[tokio::test]
async fn a_compressed_body_is_415() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client
        .post(COMPLETIONS, &[("Content-Encoding", "gzip")], b"\x1f\x8b")
        .await;
    assert_eq!(client.reply().await.status, 415);
}

#[tokio::test]
async fn two_lengths_in_either_order_are_400_and_close_the_connection() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let chunked = format!("{:x}\r\n{PROMPT}\r\n0\r\n\r\n", PROMPT.len());
    let two = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-LENGTH: 5",
    ];
    for lengths in two {
        for earlier in [0, 2] {
            let mut client = Client::connect(proxy.address).await;
            // Also on a connection that has served others.
            for _ in 0..earlier {
                client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
                assert_eq!(client.reply().await.status, 200);
            }
            let head = format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\n{lengths}\r\n\r\n");
            let (first, second) = head.split_at(head.len() - 2);
            client.raw(first.as_bytes()).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
            client.raw([second, &chunked].concat().as_bytes()).await;
            let reply = client.reply().await;
            assert_eq!(
                (reply.status, reply.error_code().as_str()),
                (400, "two_lengths")
            );
            assert!(client.head().await.is_none(), "the connection is closed");
        }
    }
    // In one piece with a request before it, whatever length that has.
    let both = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\n{}\r\n\r\n{chunked}",
        two[0]
    );
    for before in [
        "GET /health HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{PROMPT}",
            PROMPT.len()
        ),
        format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{chunked}"
        ),
    ] {
        let mut client = Client::connect(proxy.address).await;
        client.raw([before, both.clone()].concat().as_bytes()).await;
        assert_eq!(client.reply().await.error_code(), "two_lengths");
        assert!(client.head().await.is_none(), "the connection is closed");
    }
    // Either length alone is fine.
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
}

/// Only chunks are taken off a body: the rest of what was done to it would be read as JSON, and
/// passed on.
#[tokio::test]
async fn a_body_that_is_coded_otherwise_than_chunked_is_501_and_closes_the_connection() {
    let (p, d) = pair().await;
    let settings = Settings {
        admin_listen: Some("127.0.0.1:0".to_owned()),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let chunked = format!("{:x}\r\n{PROMPT}\r\n0\r\n\r\n", PROMPT.len());
    let admin = proxy.admin_address.expect("an admin listener");
    for (lines, status, word) in [
        ("Transfer-Encoding: gzip, chunked", 501, "gzip"),
        ("transfer-encoding:GZIP ,Chunked", 501, "GZIP"),
        (
            "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
            501,
            "gzip",
        ),
        ("Transfer-Encoding: identity,\tchunked", 501, "identity"),
        ("Transfer-Encoding: chunked, chunked", 400, "more than once"),
        (
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            400,
            "more than once",
        ),
    ] {
        for (at, path) in [
            (proxy.address, COMPLETIONS),
            (proxy.address, "/v1/embeddings"),
            (proxy.address, "/abort_requests"),
            (admin, "/v1/workers"),
        ] {
            let mut client = Client::connect(at).await;
            let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n\r\n");
            client
                .raw([head, chunked.clone()].concat().as_bytes())
                .await;
            let reply = client.reply().await;
            let told = (reply.status, reply.error_code());
            assert_eq!(
                told,
                (status, "transfer_coding".to_owned()),
                "{path} {lines}"
            );
            assert!(reply.text().contains(word), "{}", reply.text());
            assert!(client.head().await.is_none(), "the connection is closed");
        }
    }
    // Where `chunked` is not the last of them nobody knows where the body ends.
    for lines in [
        "chunked, gzip",
        "gzip",
        "chunked\r\nTransfer-Encoding: gzip",
    ] {
        let mut client = Client::connect(proxy.address).await;
        let head =
            format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: {lines}\r\n\r\n");
        client
            .raw([head, chunked.clone()].concat().as_bytes())
            .await;
        assert_eq!(client.head().await.expect("a head").status, 400, "{lines}");
        while client.chunk().await.is_some() {}
        assert!(client.head().await.is_none(), "the connection is closed");
    }
    assert_eq!((p.count(), d.count()), (0, 0));
    let mut client = Client::connect(proxy.address).await;
    let head =
        format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n");
    client.raw([head, chunked].concat().as_bytes()).await;
    assert_eq!(client.reply().await.status, 200);
}

#[tokio::test]
async fn more_requests_than_may_run_get_429_and_the_others_are_served() {
    let (p, d) = pair().await;
    d.always(Script::After(
        Duration::from_millis(1_000),
        Box::new(Script::Decode),
    ));
    let settings = Settings {
        requests_max: Some(8),
        queue_max: Some(0),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let mut statuses = Vec::new();
    for reply in at_once(&proxy, 20, PROMPT).await {
        if reply.status == 429 {
            assert_eq!(reply.error_code(), "too_many_requests");
            assert_eq!(reply.headers["retry-after"], "1");
        }
        statuses.push(reply.status);
    }
    let count = |status| statuses.iter().filter(|seen| **seen == status).count();
    assert_eq!((count(200), count(429)), (8, 12));
    // A slot that was given back serves again, and what is not a completion is never limited.
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(
        metric(
            &proxy,
            "requests_total{route=\"/v1/completions\",status=\"429\"}"
        )
        .await,
        12.0
    );
}

#[tokio::test]
async fn a_burst_of_connects_loses_none_and_keeps_no_engine_out() {
    const CLIENTS: usize = 2_048;
    hetero_kv_proxy::run::raise_open_files();
    let blocks = Blocks::default();
    let mut engines = Vec::new();
    for _ in 0..4 {
        let (p, d) = pair_on(&blocks).await;
        p.always(Script::After(
            Duration::from_millis(200),
            Box::new(Script::Prefill),
        ));
        engines.push((p, d));
    }
    let prefill: Vec<&Engine> = engines.iter().map(|(p, _)| p).collect();
    let decode: Vec<&Engine> = engines.iter().map(|(_, d)| d).collect();
    let proxy = proxy(&prefill, &decode).await;
    for reply in at_once(&proxy, CLIENTS, PROMPT).await {
        assert_eq!(reply.status, 200);
    }
    assert!(blocks.lock().expect("blocks").is_empty());
    for role in ["prefill", "decode"] {
        let opens = format!("breaker_opens_total{{role=\"{role}\"}}");
        assert_eq!(metric(&proxy, &opens).await, 0.0);
    }
}

/// Faults that the proxy does not have to see are the engine's to tell, in its own words.
#[tokio::test]
async fn what_is_the_engines_to_judge_reaches_it_as_sent() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    for body in [
        r#"{"prompt":"no model"}"#,
        r#"{"model":"nobody has it","prompt":[1,2,3]}"#,
        r#"{"messages":[{"role":"narrator","content":"x"}]}"#,
        r#"{"prompt":"x","return_token_ids":true,"chat_template_kwargs":{"a":[null,1e3,"\u00e9"]},"temperature":-7}"#,
    ] {
        let mut client = Client::connect(proxy.address).await;
        // As a body without a length: the legs have one.
        let chunked = format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n\
             {:x}\r\n{body}\r\n0\r\n\r\n",
            body.len()
        );
        client.raw(chunked.as_bytes()).await;
        assert_eq!(client.reply().await.status, 200, "{body}");
        let seen = d.seen().last().expect("a leg").text().to_owned();
        let params = seen.find(r#""kv_transfer_params":"#).expect("params");
        let end = seen.find(r#""deep":{"a":[null]}},"#).expect("their end");
        let rest = format!("{}{}", &seen[..params], &seen[end + 21..]);
        assert_eq!(rest, body);
    }
    assert_eq!((p.count(), d.count()), (4, 4));
}

/// A probe that spoke of the engine otherwise than traffic does could be wrong about it.
#[tokio::test]
async fn probes_name_the_host_as_traffic_does() {
    let (p, d) = pair().await;
    let named = |engine: &Engine| format!("localhost:{}", engine.address.port());
    let url = |engine: &Engine| format!("http://{}/base", named(engine));
    let proxy = proxy_with(Settings::default(), &[url(&p)], &[url(&d)]).await;
    post(&proxy, COMPLETIONS, PROMPT).await;
    for engine in [&p, &d] {
        let asked = engine.asked();
        let want = |line: &str| (format!("{line} HTTP/1.1"), named(engine));
        assert_eq!(asked[0], want("GET /base/health"));
        assert!(
            asked.contains(&want("POST /base/v1/completions")),
            "{asked:?}"
        );
    }
}

#[tokio::test]
async fn slow_heads_and_bodies_are_ended() {
    let (p, d) = pair().await;
    let settings = Settings {
        header_read_timeout_s: Some(1),
        body_read_timeout_s: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let start = Instant::now();
    let mut slow_head = Client::connect(proxy.address).await;
    slow_head
        .raw(b"POST /v1/completions HTTP/1.1\r\nHost:")
        .await;
    let mut slow_body = Client::connect(proxy.address).await;
    slow_body
        .raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        .await;
    let reply = slow_body.reply().await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (408, "body_timeout")
    );
    if let Some(head) = slow_head.head().await {
        assert_eq!(head.status, 408);
    }
    let took = start.elapsed();
    assert!(
        took >= Duration::from_millis(900) && took < Duration::from_secs(4),
        "{took:?}"
    );
    assert_eq!(p.count(), 0);
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_ended_and_so_is_its_decode_leg() {
    let (p, d) = pair().await;
    let lump: &'static str = Box::leak("data: x\n\n".repeat(100_000).into_boxed_str());
    d.always(Script::Stream(vec![lump; 100], Duration::ZERO));
    let settings = Settings {
        client_write_timeout_s: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    until("the decode leg's end", || d.ended(0).is_some()).await;
    assert_ne!(d.ended(0), None);
    assert_eq!(post_small(&proxy, &d).await, 200);
}

async fn post_small(proxy: &hetero_kv_proxy::run::Proxy, d: &Engine) -> u16 {
    d.once(Script::Decode);
    post(proxy, COMPLETIONS, PROMPT).await.status
}

#[tokio::test]
async fn a_drain_lets_streams_end_and_accepts_no_more() {
    let (p, d) = pair().await;
    d.once(Script::Stream(
        vec!["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"],
        Duration::from_millis(50),
    ));
    let proxy = proxy(&[&p], &[&d]).await;
    let mut idle = Client::connect(proxy.address).await;
    idle.get("/health").await;
    assert_eq!(idle.reply().await.status, 200);
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    let reading = tokio::spawn(async move {
        let mut text = Vec::new();
        while let Some(chunk) = client.chunk().await {
            if chunk.is_empty() {
                return (text, true);
            }
            text.extend(chunk);
        }
        (text, false)
    });
    let start = Instant::now();
    assert!(proxy.drain(Duration::from_secs(10)).await);
    // An idle client does not hold the drain up.
    assert!(
        start.elapsed() < Duration::from_millis(1_900),
        "{:?}",
        start.elapsed()
    );
    let (text, whole) = reading.await.expect("a client");
    assert!(whole && text.ends_with(b"[DONE]\n\n"));
    assert!(tokio::net::TcpStream::connect(proxy.address).await.is_err());
    assert!(idle.head().await.is_none());
}

#[tokio::test]
async fn a_drain_ends_at_its_limit() {
    let (p, d) = pair().await;
    d.once(Script::StreamThenSilence(vec!["data: 1\n\n"]));
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    let start = Instant::now();
    assert!(!proxy.drain(Duration::from_millis(200)).await);
    assert!(start.elapsed() < Duration::from_secs(2));
}
