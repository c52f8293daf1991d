//! Chunks as they come, and streams that break.

use std::sync::Arc;
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::client::Client;
use crate::engine::{Blocks, Framing, Script, freed, pair, pair_on};
use crate::{
    CHAT, COMPLETIONS, PROMPT, STREAM, at_once, metric, metric_sum, post, proxy, proxy_with, urls,
};

#[tokio::test]
async fn each_chunk_reaches_the_client_before_the_next_is_made() {
    let (p, d) = pair().await;
    let chunks = vec![
        "data: 0\n\n",
        "data: 1\n",
        "\n",
        "data: 3\n\n",
        "data: [DONE]\n\n",
    ];
    let gate = Arc::new(Semaphore::new(0));
    d.always(Script::Gated(chunks.clone(), Arc::clone(&gate)));
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(CHAT, &[], STREAM.as_bytes()).await;
    let head = client.head().await.expect("a head");
    assert_eq!(head.status, 200);
    assert!(head.headers["content-type"].starts_with("text/event-stream"));
    for want in &chunks {
        // The engine makes one chunk: a proxy that waits for more would wait for ever.
        gate.add_permits(1);
        assert_eq!(client.chunk().await.as_deref(), Some(want.as_bytes()));
    }
    assert_eq!(client.chunk().await.as_deref(), Some(&b""[..]));
    assert_eq!(metric_sum(&proxy, "ttft_seconds_count").await, 1.0);
}

#[tokio::test]
async fn the_head_waits_for_decode_and_not_for_its_first_chunk() {
    let (p, d) = pair().await;
    d.always(Script::StreamThenSilence(vec![]));
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    assert_eq!(client.head().await.expect("a head").status, 200);
}

#[tokio::test]
async fn a_plain_answer_keeps_its_length_and_bytes() {
    let (p, d) = pair().await;
    let body = r#"{"choices":[], "logprob":-0.10000000149011612}"#;
    d.always(Script::Answer(200, "application/json; charset=utf-8", body));
    let proxy = proxy(&[&p], &[&d]).await;
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(reply.text(), body);
    assert_eq!(reply.headers["content-length"], body.len().to_string());
    assert_eq!(
        reply.headers["content-type"],
        "application/json; charset=utf-8"
    );
    assert_eq!(metric_sum(&proxy, "ttft_seconds_count").await, 0.0);
}

#[tokio::test]
async fn a_broken_stream_ends_with_an_error_event_and_no_done() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    for (sent, before) in [
        (vec!["data: {\"t\":1}\n\n"], "data: {\"t\":1}\n\n"),
        (
            vec!["data: {\"t\":1}\n\n", "data: {\"t\""],
            "data: {\"t\":1}\n\ndata: {\"t\"\n\n",
        ),
        (vec![], ""),
    ] {
        d.once(Script::StreamThenClose(sent));
        let reply = post(&proxy, COMPLETIONS, STREAM).await;
        assert!(reply.whole, "the body ends in order");
        let text = reply.text();
        let event = text.strip_prefix(before).expect("what came is passed on");
        let event = event.strip_prefix("data: ").expect("an event");
        let error: serde_json::Value = serde_json::from_str(event.trim()).expect("JSON");
        assert_eq!(error["error"]["code"], "decode_stream_broken");
        assert!(!text.contains("[DONE]"));
    }
    assert_eq!(
        metric(&proxy, "stream_breaks_total{reason=\"engine\"}").await,
        3.0
    );
    // Nothing is tried again after the first byte.
    assert_eq!((p.count(), d.count()), (3, 3));
}

#[tokio::test]
async fn a_stream_that_breaks_behind_its_done_event_is_whole() {
    let (p, d) = pair().await;
    d.always(Script::StreamThenClose(vec![
        "data: 1\n\n",
        "data: [DONE]\n\n",
    ]));
    let proxy = proxy(&[&p], &[&d]).await;
    let reply = post(&proxy, COMPLETIONS, STREAM).await;
    assert!(reply.whole);
    assert_eq!(reply.text(), "data: 1\n\ndata: [DONE]\n\n");
}

#[tokio::test]
async fn a_stream_that_only_its_connection_ends_is_whole_with_its_done_event_alone() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    for path in [COMPLETIONS, CHAT] {
        d.once(Script::StreamUntilClose(vec![
            "data: 1\n\n",
            "data: [DONE]\n\n",
        ]));
        let reply = post(&proxy, path, STREAM).await;
        assert_eq!(reply.text(), "data: 1\n\ndata: [DONE]\n\n");
        for sent in [vec!["data: 1\n\n"], vec!["data: 1\n\nda"], vec![]] {
            let before = sent.concat();
            d.once(Script::StreamUntilClose(sent));
            let text = post(&proxy, path, STREAM).await.text();
            assert!(text.starts_with(&before), "{text}");
            assert!(text.contains("\"code\":\"decode_stream_broken\""), "{text}");
        }
    }
    // Other streams have other last events.
    d.once(Script::StreamUntilClose(vec!["event: message_stop\n\n"]));
    let reply = post(&proxy, "/v1/messages", STREAM).await;
    assert_eq!(reply.text(), "event: message_stop\n\n");
}

#[tokio::test]
async fn a_plain_answer_that_breaks_is_cut_short_for_the_client_too() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    for framing in [Framing::Length, Framing::Chunks] {
        d.once(Script::Truncated("{\"choices\":", framing));
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert!(!reply.whole);
        assert_eq!(reply.text(), "{\"choices\":");
    }
}

#[tokio::test]
async fn an_error_event_of_the_engine_passes() {
    let (p, d) = pair().await;
    let events = vec!["data: {\"error\":{\"code\":500}}\n\n", "data: [DONE]\n\n"];
    d.always(Script::Stream(events.clone(), Duration::ZERO));
    let proxy = proxy(&[&p], &[&d]).await;
    assert_eq!(
        post(&proxy, COMPLETIONS, STREAM).await.text(),
        events.concat()
    );
}

#[tokio::test]
async fn a_silent_stream_ends_at_the_idle_limit_and_a_slow_one_does_not() {
    let (p, d) = pair().await;
    let settings = Settings {
        stream_idle_timeout_s: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    // Longer in all than the limit, each gap shorter.
    d.once(Script::Stream(
        vec!["data: 1\n\n"; 4],
        Duration::from_millis(300),
    ));
    let reply = post(&proxy, COMPLETIONS, STREAM).await;
    assert_eq!(reply.text(), "data: 1\n\n".repeat(4));
    d.once(Script::StreamThenSilence(vec!["data: 1\n\n"]));
    let start = Instant::now();
    let reply = post(&proxy, COMPLETIONS, STREAM).await;
    assert!(reply.text().contains("decode_stream_idle"));
    assert!(
        (1..5).contains(&start.elapsed().as_secs()),
        "{:?}",
        start.elapsed()
    );
    crate::until("the engine's leg closed", || d.ended(1).is_some()).await;
}

#[tokio::test]
async fn the_deadline_ends_a_stream_with_an_error_event() {
    let (p, d) = pair().await;
    d.always(Script::Stream(
        vec!["data: 1\n\n"; 100],
        Duration::from_millis(40),
    ));
    let settings = Settings {
        request_timeout_s: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let reply = post(&proxy, COMPLETIONS, STREAM).await;
    assert!(reply.text().ends_with("\n\n"), "{}", reply.text());
    assert!(reply.text().contains("\"code\":\"deadline_exceeded\""));
    assert!(reply.pieces.len() > 10);
}

#[tokio::test]
async fn two_hundred_streams_at_once_keep_their_pace() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let count = 16;
    let mut chunks = vec!["data: 1\n\n"; count - 1];
    chunks.push("data: [DONE]\n\n");
    d.always(Script::Stream(chunks, Duration::from_millis(20)));
    let proxy = proxy(&[&p], &[&d]).await;
    let start = Instant::now();
    for reply in at_once(&proxy, 200, STREAM).await {
        assert!(reply.whole);
        assert!(reply.text().ends_with("data: [DONE]\n\n"));
        // Chunks of one stream may meet in one read when the machine is busy, not most of them.
        assert!(
            reply.pieces.len() >= count / 2,
            "{} pieces",
            reply.pieces.len()
        );
    }
    assert!(
        start.elapsed() < Duration::from_secs(15),
        "{:?}",
        start.elapsed()
    );
    freed(&blocks).await;
}

#[tokio::test]
async fn requests_follow_each_other_on_one_connection_also_pipelined() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    let one = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{PROMPT}",
        PROMPT.len()
    );
    client.raw(one.repeat(3).as_bytes()).await;
    for _ in 0..3 {
        assert_eq!(client.reply().await.status, 200);
    }
    // A chunked request body, in pieces.
    client
        .raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    for piece in [&PROMPT[..5], &PROMPT[5..]] {
        client
            .raw(format!("{:x}\r\n{piece}\r\n", piece.len()).as_bytes())
            .await;
        client.stream.flush().await.expect("flushed");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    client.raw(b"0\r\n\r\n").await;
    assert_eq!(client.reply().await.status, 200);
    assert_eq!(d.count(), 4);
}

/// Decode counts the whole prompt as cached; only prefill knows what was.
#[tokio::test]
async fn cached_tokens_are_prefills_in_plain_and_streamed_answers() {
    const PREFILLED: &str = r#"{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}},"kv_transfer_params":{"do_remote_prefill":true}}"#;
    const PLAIN: &str = r#"{ "odd":1.50e1, "usage": {"prompt_tokens":9, "prompt_tokens_details": {"cached_tokens":9 }} }"#;
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let told = |text: &str| text.replace("\"cached_tokens\":9", "\"cached_tokens\":3");
    // Without a count of prefill's nothing changes, not even the framing.
    d.always(Script::Answer(200, "application/json", PLAIN));
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(reply.text(), PLAIN);
    assert_eq!(reply.headers["content-length"], PLAIN.len().to_string());

    p.always(Script::Answer(200, "application/json", PREFILLED));
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!((reply.text(), reply.whole), (told(PLAIN), true));
    let events = [
        "data: {\"choices\":[{\"text\":\"a\"}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":9}}}\n\n",
        "data: [DONE]\n\n",
    ];
    d.always(Script::Stream(events.to_vec(), Duration::from_millis(5)));
    let reply = post(&proxy, CHAT, STREAM).await;
    assert_eq!((reply.text(), reply.whole), (told(&events.concat()), true));
    assert_eq!(reply.pieces.len(), 3, "chunk by chunk");

    // What breaks is still told, and what is refused stays as it is.
    d.always(Script::StreamThenClose(events[..2].to_vec()));
    let reply = post(&proxy, COMPLETIONS, STREAM).await;
    assert!(reply.text().starts_with(&told(&events[..2].concat())));
    assert!(reply.text().contains("decode_stream_broken"));
    d.always(Script::Answer(400, "application/json", PLAIN));
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.text(), PLAIN);
    // A list of prompts is counted by decode.
    d.always(Script::Answer(200, "application/json", PLAIN));
    let list = r#"{"model":"m","prompt":["a","b"],"max_tokens":8}"#;
    assert_eq!(post(&proxy, COMPLETIONS, list).await.text(), PLAIN);
}
