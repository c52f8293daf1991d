//! Paths other than completions: responses, what is relayed, what every engine gets, aborts.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use serde_json::{Value, json};

use crate::client::{Client, Reply};
use crate::connectors::{engine, fallbacks};
use crate::engine::{Blocks, Ended, Script, freed, pair, pair_on};
use crate::{COMPLETIONS, PROMPT, STREAM, metric, post, proxy, proxy_with, until, urls};

const AT_ONCE: Duration = Duration::from_secs(1);

async fn get(proxy: &hetero_kv_proxy::run::Proxy, path: &str) -> Reply {
    let mut client = Client::connect(proxy.address).await;
    client.get(path).await;
    client.reply().await
}

fn answer(status: u16, body: &'static str) -> Script {
    Script::Answer(status, "application/json", body)
}

#[tokio::test]
async fn responses_run_both_legs_and_stored_ones_decode_alone() {
    const PREFILLED: &str =
        r#"{"id":"resp_1","status":"incomplete","kv_transfer_params":{"k":1.50}}"#;
    let (p, d) = (engine(PREFILLED).await, engine(r#"{"id":"resp_2"}"#).await);
    let proxy = proxy(&[&p], &[&d]).await;
    let body = r#"{"input":"hi","max_output_tokens":1,"store":true}"#;
    let reply = post(&proxy, "/v1/responses", body).await;
    assert_eq!(
        (reply.status, reply.text().as_str()),
        (200, r#"{"id":"resp_2"}"#)
    );
    for leg in [&p.seen()[0], &d.seen()[0]] {
        assert_eq!(leg.line, "POST /v1/responses HTTP/1.1");
    }
    let sent = p.seen()[0].json();
    assert_eq!(
        (&sent["max_output_tokens"], &sent["store"]),
        (&json!(1), &json!(false))
    );
    assert_eq!(sent.get("max_tokens"), None);
    let want = body.replacen('{', r#"{"kv_transfer_params":{"k":1.50},"#, 1);
    assert_eq!(d.seen()[0].text(), want);

    let next = r#"{"input":"more","previous_response_id":"resp_2"}"#;
    assert_eq!(post(&proxy, "/v1/responses", next).await.status, 200);
    assert_eq!((p.count(), d.seen()[1].text()), (1, next));
    assert_eq!(fallbacks(&proxy, "stored_response").await, 1.0);
    // A stored response is asked for where it may be.
    assert_eq!(get(&proxy, "/v1/responses/resp_2").await.status, 200);
    assert_eq!(d.seen()[2].line, "GET /v1/responses/resp_2 HTTP/1.1");
}

#[tokio::test]
async fn other_paths_are_relayed_to_decode_byte_for_byte() {
    let (p, d) = (engine("{}").await, engine(r#"{ "data":[0.10] }"#).await);
    let worker = format!("{},dp=2,rank0=4", d.url());
    let proxy = proxy_with(Settings::default(), &urls(&[&p]), &[worker]).await;
    let form = b"--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n\xff\x00{\r\n--b--";
    let types = ["multipart/form-data; boundary=b", "application/json"];
    for (path, body) in [
        (
            "/v1/embeddings?x=1&y",
            &br#"{ "input":["a"],"n":0.30000000000000004}"#[..],
        ),
        ("/v1/audio/transcriptions", form),
        ("/tokenize", br#"{"prompt":"a"}"#),
        ("/detokenize", br#"{"tokens":[1]}"#),
        ("/v1/messages", b""),
    ] {
        let mut client = Client::connect(proxy.address).await;
        let kind = types[usize::from(body != form)];
        let (kind, key) = (("Content-Type", kind), ("Authorization", "Bearer k"));
        client.post_as(path, &[kind, key], body).await;
        let reply = client.reply().await;
        assert_eq!(
            (reply.status, reply.text().as_str()),
            (200, r#"{ "data":[0.10] }"#)
        );
        let seen = d.seen();
        let leg = seen.last().expect("a leg");
        assert_eq!(leg.line, format!("POST {path} HTTP/1.1"));
        assert_eq!(leg.body, body);
        assert_eq!(leg.headers["authorization"], "Bearer k");
        assert_eq!(reply.headers["x-request-id"], leg.headers["x-request-id"]);
        assert!(["4", "5"].contains(&leg.rank().expect("a rank")));
    }
    assert_eq!(p.count(), 0);
    assert_eq!(
        metric(&proxy, "requests_total{route=\"/v1/*\",status=\"200\"}").await,
        3.0
    );
    assert_eq!(
        metric(&proxy, "requests_total{route=\"/tokenize\",status=\"200\"}").await,
        1.0
    );
}

#[tokio::test]
async fn a_relayed_stream_comes_chunk_by_chunk_and_ends_with_its_client() {
    let (p, d) = (engine("{}").await, engine("{}").await);
    d.once(Script::Stream(
        vec!["event: a\n\n"; 3],
        Duration::from_millis(100),
    ));
    let proxy = proxy(&[&p], &[&d]).await;
    let reply = post(&proxy, "/v1/messages", r#"{"stream":true}"#).await;
    assert!(reply.whole && reply.pieces.len() == 3, "{:?}", reply.pieces);
    assert!(reply.pieces[2].0 - reply.pieces[0].0 >= Duration::from_millis(150));
    d.once(Script::Silence);
    let mut client = Client::connect(proxy.address).await;
    client.post("/v1/messages", &[], b"{}").await;
    until("the leg", || d.count() == 2).await;
    drop(client);
    let took = until("the leg's end", || d.ended(1).is_some()).await;
    assert!(took < AT_ONCE, "{took:?}");
}

#[tokio::test]
async fn a_relayed_body_may_not_name_a_transfer_nor_a_path_another() {
    let (p, d) = (engine("{}").await, engine("{}").await);
    let proxy = proxy(&[&p], &[&d]).await;
    for body in [
        r#"{"kv_transfer_params":{"remote_host":"6.6.6.6"}}"#,
        r#"{"vllm_xargs":{"kv_transfer_params":"x"}}"#,
        r#"{"kv_transfer_params":null,"kv_transfer_params":{}}"#,
    ] {
        let reply = post(&proxy, "/v1/messages", body).await;
        assert_eq!(reply.status, 400, "{body}");
        assert_eq!(reply.error_code(), "kv_transfer_params_not_allowed");
    }
    for path in [
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/%63ompletions",
        "/v1/chat%5Fcompletions",
        "/v1/%zz",
        "/v1/x%",
        "/v1/./x",
        "/sleep",
        "/v2/x",
        "/collective_rpc",
    ] {
        assert_eq!(
            post(&proxy, path, "{}").await.error_code(),
            "unknown_path",
            "{path}"
        );
    }
    assert_eq!((p.count(), d.count()), (0, 0));
}

#[tokio::test]
async fn a_relayed_body_that_only_an_engine_can_read_is_refused() {
    let (p, d) = (engine("{}").await, engine("{}").await);
    let proxy = proxy(&[&p], &[&d]).await;
    const PARAMS: &str = r#"{"kv_transfer_params":{"remote_host":"6.6.6.6"}}"#;
    let utf16: Vec<u8> = PARAMS.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let behind = |start: &[u8]| [start, &PARAMS.as_bytes()[1..]].concat();
    let unread = [
        [b"\xef\xbb\xbf", PARAMS.as_bytes()].concat(),
        behind(br#"{"a":NaN,"#),
        behind(b"{\"a\":\"\xed\xa0\x80\","),
        utf16,
    ];
    let send = async |kind: &[(&str, &str)], body: &[u8]| {
        let mut client = Client::connect(proxy.address).await;
        client.post_as("/v1/messages", kind, body).await;
        client.reply().await
    };
    for body in &unread {
        for kind in [
            &[("Content-Type", "application/json")][..],
            &[("Content-Type", "application/X+JSON; charset=utf-16")],
            &[
                ("Content-Type", "text/plain"),
                ("Content-Type", "application/json"),
            ],
            &[],
        ] {
            let reply = send(kind, body).await;
            let shown = String::from_utf8_lossy(body);
            assert_eq!(reply.status, 400, "{kind:?} {shown}");
            assert_eq!(reply.error_code(), "invalid_json");
        }
    }
    assert_eq!(d.count(), 0);
    // What no engine reads as JSON, and JSON that has no members, is theirs to judge.
    for body in &unread {
        let reply = send(&[("Content-Type", "audio/wav")], body).await;
        assert_eq!(reply.status, 200);
    }
    for body in ["[1,[2]]", "\"text\"", ""] {
        let reply = send(&[("Content-Type", "application/json")], body.as_bytes()).await;
        assert_eq!(reply.status, 200, "{body}");
    }
}

#[tokio::test]
async fn an_engine_that_lacks_the_path_or_is_dead_is_stepped_over() {
    const NO: &str = r#"{"error":"no such model"}"#;
    let (p, d0, d1, d2) = (
        engine("{}").await,
        engine("{}").await,
        engine("{}").await,
        engine("{}").await,
    );
    d0.always(answer(404, NO));
    let proxy = proxy(&[&p], &[&d0, &d1, &d2]).await;
    d1.kill().await;
    for _ in 0..6 {
        assert_eq!(post(&proxy, "/v1/embeddings", "{}").await.status, 200);
    }
    assert_eq!(d2.count(), 6);
    assert!(d0.count() >= 2, "its turns");
    // All say no: that is the answer.
    d2.always(answer(404, NO));
    let reply = post(&proxy, "/v1/embeddings", "{}").await;
    assert_eq!((reply.status, reply.text().as_str()), (404, NO));
    // One that may have done it is not asked twice, nor another in its place.
    let before = d0.count() + d2.count();
    d0.always(Script::Close);
    d2.always(Script::Close);
    let reply = post(&proxy, "/v1/embeddings", "{}").await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "decode_reset")
    );
    let tries = d0.count() + d2.count() - before;
    assert!(
        tries <= 2,
        "{tries}: a kept connection may be tried anew, once"
    );
}

#[tokio::test]
async fn models_of_all_decode_engines_are_one_list() {
    let (p, d0, d1, d2) = (
        engine("{}").await,
        engine("{}").await,
        engine("{}").await,
        engine("{}").await,
    );
    let proxy = proxy(&[&p], &[&d0, &d1, &d2]).await;
    d0.set_models(
        200,
        r#"{"object":"list","data":[{"id":"a","created":1.50},{"id":"b"}]}"#,
    );
    d1.set_models(
        200,
        r#"{"object":"list","data":[{ "id":"b","x":2 },{"id":"c"}]}"#,
    );
    d2.kill().await;
    let reply = get(&proxy, "/v1/models").await;
    let want = r#"{"object":"list","data":[{"id":"a","created":1.50},{"id":"b"},{"id":"c"}]}"#;
    assert_eq!((reply.status, reply.text().as_str()), (200, want));
    d0.set_models(401, r#"{"error":"key"}"#);
    let reply = get(&proxy, "/v1/models").await;
    assert_eq!(
        reply.text(),
        r#"{"object":"list","data":[{ "id":"b","x":2 },{"id":"c"}]}"#
    );
    d1.set_models(401, r#"{"error":"key"}"#);
    let reply = get(&proxy, "/v1/models").await;
    assert_eq!(
        (reply.status, reply.text().as_str()),
        (401, r#"{"error":"key"}"#)
    );
    d0.kill().await;
    d1.kill().await;
    assert_eq!(
        get(&proxy, "/v1/models").await.error_code(),
        "decode_unreachable"
    );
}

#[tokio::test]
async fn profiling_and_adapters_reach_every_engine_of_both_roles() {
    let (p0, p1, d) = (engine("{}").await, engine("").await, engine("{}").await);
    let proxy = proxy(&[&p0, &p1], &[&d]).await;
    let mut sent = 0;
    for path in [
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ] {
        let reply = post(&proxy, path, r#"{"lora_name":"x"}"#).await;
        let want = json!({"workers": [
            {"id": "prefill-0", "status": 200}, {"id": "prefill-1", "status": 200},
            {"id": "decode-0", "status": 200},
        ]});
        assert_eq!((reply.status, reply.json()), (200, want));
        sent += 1;
        for engine in [&p0, &p1, &d] {
            let seen = engine.seen();
            let last = seen.last().expect("a request");
            assert_eq!(seen.len(), sent);
            assert_eq!(last.line, format!("POST {path} HTTP/1.1"));
            assert_eq!(last.text(), r#"{"lora_name":"x"}"#);
        }
        assert_eq!(get(&proxy, path).await.status, 405);
    }
    p1.always(answer(404, "{}"));
    d.kill().await;
    let reply = post(&proxy, "/start_profile", "").await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "workers_failed")
    );
    let text = reply.text();
    for part in ["2 of 3", "prefill-1: answered 404", "decode-0: unreachable"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // An engine that failed does not keep the others from it.
    assert_eq!(p0.count(), sent + 1);
}

async fn abort(proxy: &hetero_kv_proxy::run::Proxy, ids: &[&str]) -> Value {
    let body = json!({ "request_ids": ids }).to_string();
    let reply = post(proxy, "/abort_requests", &body).await;
    assert_eq!(reply.status, 200);
    reply.json()
}

async fn start(proxy: &hetero_kv_proxy::run::Proxy, id: &str, body: &str) -> Client {
    let mut client = Client::connect(proxy.address).await;
    let headers = [("X-Request-Id", id)];
    client.post(COMPLETIONS, &headers, body.as_bytes()).await;
    client
}

#[tokio::test]
async fn an_aborted_stream_ends_with_an_error_event_and_others_go_on() {
    let (p, d) = pair().await;
    d.always(Script::StreamThenSilence(vec!["data: 1\n\n"]));
    let proxy = proxy(&[&p], &[&d]).await;
    let mut mine = start(&proxy, "mine", STREAM).await;
    let mut other = start(&proxy, "other", STREAM).await;
    for client in [&mut mine, &mut other] {
        client.head().await.expect("a head");
        client.chunk().await.expect("a chunk");
    }
    let done = abort(&proxy, &["mine", "nobody"]).await;
    assert_eq!(done, json!({"aborted": ["mine"], "unknown": ["nobody"]}));
    let event = String::from_utf8(mine.chunk().await.expect("an event")).expect("UTF-8");
    assert!(event.contains(r#""code":"aborted""#), "{event}");
    assert_eq!(
        mine.chunk().await,
        Some(Vec::new()),
        "the end, without [DONE]"
    );
    let closed = || {
        (0..2)
            .filter(|at| d.ended(*at) == Some(Ended::ProxyClosed))
            .count()
    };
    let took = until("the leg's end", || closed() == 1).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert_eq!(
        metric(&proxy, "stream_breaks_total{reason=\"aborted\"}").await,
        1.0
    );
    // It is over, and known no more.
    assert_eq!(abort(&proxy, &["mine"]).await["aborted"], json!([]));
    assert_eq!(closed(), 1);
    assert_eq!(abort(&proxy, &["other"]).await["aborted"], json!(["other"]));
    // So is one that ended by itself.
    d.once(Script::Decode);
    let mut whole = start(&proxy, "whole", PROMPT).await;
    assert_eq!(whole.reply().await.status, 200);
    assert_eq!(abort(&proxy, &["whole"]).await["aborted"], json!([]));
}

#[tokio::test]
async fn an_abort_before_the_head_closes_prefill_or_settles_decode() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let settings = Settings {
        handover_grace_ms: Some(1_500),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    p.once(Script::Silence);
    let mut client = start(&proxy, "a", PROMPT).await;
    until("the prefill leg", || p.count() == 1).await;
    assert_eq!(abort(&proxy, &["a"]).await["aborted"], json!(["a"]));
    let reply = client.reply().await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (409, "aborted")
    );
    let took = until("the prefill leg's end", || p.ended(0).is_some()).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert_eq!(d.count(), 0);

    // Prefill holds blocks: decode must take the leg before it is closed.
    for (at, slow) in [Script::Decode, Script::StreamThenSilence(vec![])]
        .into_iter()
        .enumerate()
    {
        d.once(match at {
            0 => Script::After(Duration::from_millis(400), Box::new(slow)),
            _ => slow,
        });
        let mut client = start(&proxy, "b", STREAM).await;
        until("the decode leg", || d.count() == at + 1).await;
        if at == 1 {
            client.head().await.expect("a head");
        }
        assert_eq!(abort(&proxy, &["b"]).await["aborted"], json!(["b"]));
        if at == 0 {
            assert_eq!(client.reply().await.error_code(), "aborted");
        } else {
            let event = client.chunk().await.expect("an event");
            assert!(String::from_utf8_lossy(&event).contains("aborted"));
        }
        freed(&blocks).await;
        if at == 1 {
            // Long enough for a close to be seen, and well within the grace.
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        // The first has answered whole by now; the second never will.
        assert_ne!(
            d.ended(at),
            Some(Ended::ProxyClosed),
            "closed before its grace"
        );
        until("the decode leg's end", || d.ended(at).is_some()).await;
    }
    let reply = post(&proxy, "/abort_requests", r#"{"request_ids":"a"}"#).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (400, "invalid_json")
    );
}
