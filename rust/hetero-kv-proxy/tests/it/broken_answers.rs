//! Answers of engines that are no HTTP, or stop being it: what the client is told, and what is sent
//! again.

use hetero_kv_proxy::cli::Settings;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Framing, Script, engines, pair};
use crate::{CHAT, COMPLETIONS, PROMPT, STREAM, metric, post, proxy, proxy_with, urls};

const JSON_CHUNKS: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";

/// A head with a fault of the framing behind it.
fn faulty(framing: &str) -> Script {
    Script::Raw(Box::leak(
        format!("{JSON_CHUNKS}{framing}").into_boxed_str(),
    ))
}

/// Nothing of the answer has gone to the client: it is told by name and status.
#[tokio::test]
async fn a_fault_right_behind_the_head_is_a_502() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let events = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n";
    let cases = [
        (
            faulty("xyz\r\n"),
            "decode_stream_malformed",
            "a chunk has no size: `xyz`",
        ),
        (
            faulty("2\n{}"),
            "decode_stream_malformed",
            "does not end in CR LF: `2`",
        ),
        (
            Script::Raw(events),
            "decode_stream_malformed",
            "a chunk has no size: `xyz`",
        ),
        (
            Script::Truncated("", Framing::Length),
            "decode_stream_broken",
            "broke off",
        ),
        (
            Script::StreamThenClose(vec![]),
            "decode_stream_broken",
            "broke off",
        ),
    ];
    for (at, (script, code, text)) in cases.into_iter().enumerate() {
        d.once(script);
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        let reply = client.reply().await;
        if at == 4 {
            // The head of an event stream is not held back: its break comes as an event.
            assert!(reply.text().contains(code), "{}", reply.text());
        } else {
            assert_eq!(
                (reply.status, reply.error_code().as_str()),
                (502, code),
                "{at}"
            );
        }
        assert!(reply.text().contains(text), "{}", reply.text());
        // The client's connection is as good as ever.
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        assert_eq!(client.reply().await.status, 200, "{at}");
    }
    let count = metric(
        &proxy,
        "requests_total{route=\"/v1/completions\",status=\"502\"}",
    )
    .await;
    assert_eq!(count, 4.0);
    let relayed = ["/v1/embeddings", "/tokenize"];
    for path in relayed {
        d.once(faulty("xyz\r\n"));
        let reply = post(&proxy, path, "{}").await;
        let told = (reply.status, reply.error_code());
        assert_eq!(told, (502, "decode_stream_malformed".to_owned()));
    }
    assert_eq!(metric(&proxy, "in_flight").await, 0.0);
}

/// What is there together is looked at together; behind what has gone out, an event can tell.
#[tokio::test]
async fn a_fault_in_mid_body_is_told_where_it_can_be() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    d.once(faulty("2\r\n{}\r\nxyz\r\n"));
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "decode_stream_malformed")
    );
    let events = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n\u{1}\u{fc}\r\n";
    d.once(Script::Raw(events));
    let reply = post(&proxy, CHAT, STREAM).await;
    let text = reply.text();
    assert!(text.starts_with("data: 1\n\n"), "{text}");
    assert!(text.contains("decode_stream_malformed"), "{text}");
    // What the engine sent is shown, and harms nobody.
    assert!(
        text.contains(r"a chunk has no size: `\\x01\\xc3\\xbc`"),
        "{text}"
    );
    let count = metric(&proxy, "stream_breaks_total{reason=\"malformed\"}").await;
    assert_eq!(count, 2.0);
}

/// What is no answer of HTTP/1 is told as that, with the part that is wrong.
#[tokio::test]
async fn an_answer_that_is_no_http_is_told_as_that() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let long: &'static str = Box::leak(format!("{}\r\n\r\n", "a".repeat(10_000)).into_boxed_str());
    let cases = [
        ("SSH-2.0-x\u{7}\r\n\r\n", r"`SSH-2.0-x\x07`"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\n",
            "Content-Length is not one number: `5x`",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "Transfer-Encoding is not `chunked` alone",
        ),
        ("HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n", "header name"),
        (long, "`aaaaaaaa"),
    ];
    for (script, text) in cases {
        d.once(Script::Raw(script));
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (502, "decode_malformed")
        );
        let message = reply.json()["error"]["message"]
            .as_str()
            .expect("text")
            .to_owned();
        assert!(message.contains(text) && message.len() < 300, "{message}");
        p.once(Script::Raw(script));
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (502, "prefill_malformed")
        );
        d.once(Script::Raw(script));
        let reply = post(&proxy, "/tokenize", "{}").await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (502, "decode_malformed")
        );
    }
    let outcome = "leg_requests_total{role=\"decode\",instance=\"URL\",outcome=\"malformed\"}";
    let url = urls(&[&d]).remove(0);
    assert_eq!(metric(&proxy, &outcome.replace("URL", &url)).await, 10.0);
    // Who closes without a word is told as before.
    d.once(Script::Close);
    let reply = post(&proxy, "/tokenize", "{}").await;
    assert_eq!(reply.error_code(), "decode_reset");
}

/// Nothing of it has reached the client, and a new id makes another prefill harmless.
#[tokio::test]
async fn a_prefill_answer_that_breaks_off_is_retried_elsewhere_with_a_new_id() {
    const PART: &str = r#"{"kv_transfer_params":{"#;
    for (script, code) in [
        (
            Script::Truncated(PART, Framing::Length),
            "prefill_answer_broken",
        ),
        (
            Script::Truncated(PART, Framing::Chunks),
            "prefill_answer_broken",
        ),
        (faulty("2\r\n{}\r\nxyz\r\n"), "prefill_malformed"),
    ] {
        let ([p0, p1], [d]) = engines(&Blocks::default()).await;
        let proxy = proxy(&[&p0, &p1], &[&d]).await;
        p0.once(script.clone());
        assert_eq!(post(&proxy, COMPLETIONS, STREAM).await.status, 200);
        assert_eq!((p0.count(), p1.count(), d.count()), (1, 1, 1));
        let id =
            |engine: &Engine| engine.seen()[0].json()["kv_transfer_params"]["transfer_id"].clone();
        assert_ne!(id(&p0), id(&p1));
        assert_eq!(id(&p1), id(&d));
        assert_eq!(metric(&proxy, "retries_total{role=\"prefill\"}").await, 1.0);
        // As often as other legs, and told in the end.
        for engine in [&p0, &p1] {
            engine.always(script.clone());
        }
        let before = p0.count() + p1.count();
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (502, code));
        assert_eq!(p0.count() + p1.count() - before, 3);
        assert_eq!(d.count(), 1);
        assert_eq!(metric(&proxy, "in_flight").await, 0.0);
    }
}

/// Another engine's would be as large.
#[tokio::test]
async fn a_prefill_answer_over_the_limit_is_told_and_not_retried() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let settings = Settings {
        prefill_answer_bytes_max: Some(1_024),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p0, &p1]), &urls(&[&d])).await;
    let large: &'static str = Box::leak(format!("\"{}\"", "x".repeat(2_000)).into_boxed_str());
    p0.once(Script::Answer(200, "application/json", large));
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "prefill_answer_too_large")
    );
    assert!(
        reply.text().contains("--prefill-answer-bytes-max"),
        "{}",
        reply.text()
    );
    assert!(reply.text().contains("1024"), "{}", reply.text());
    assert_eq!((p0.count(), p1.count(), d.count()), (1, 0, 0));
}

/// The proxy has always more to read than it may in one turn of a task: the deadline holds all the
/// same, and an answer in small pieces takes no more memory than one in large ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_deadline_holds_for_a_prefill_answer_that_never_waits() {
    let (p, d) = pair().await;
    let settings = Settings {
        request_timeout_s: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    p.once(faulty(&"1\r\n \r\n".repeat(10_000_000)));
    let begun = std::time::Instant::now();
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    let took = begun.elapsed();
    let told = (reply.status, reply.error_code());
    assert_eq!(told, (504, "deadline_exceeded".to_owned()));
    assert!(took.as_secs_f64() < 5.0, "{took:?}");
}
