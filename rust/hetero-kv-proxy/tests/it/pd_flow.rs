//! The ordinary life of a request.

use std::collections::BTreeMap;
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use serde_json::json;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script, engines, handle, pair, pair_on};
use crate::{CHAT, COMPLETIONS, PROMPT, STREAM, metric, post, proxy, proxy_with, urls};

#[tokio::test]
async fn decode_gets_the_clients_bytes_and_prefills_params_verbatim() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let proxy = proxy(&[&p], &[&d]).await;
    let body = concat!(
        "{ \"seed\":123456789012345678901234567890, \"temperature\":0.30000000000000004,\n",
        "\"top_p\" : 1E0 ,\"prompt\":\"caf\\u00e9 \\ud83d\\ude00 \\/ \u{e9}\",\"z\":{\"kv_transfer_params\":1},",
        "\"max_tokens\":500,\"min_tokens\":100,\"unknown\":[1.0,-0,{\"a\":null}],\"a\":\"last\"}"
    );
    let reply = post(&proxy, COMPLETIONS, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.headers["content-type"], "application/json");
    assert_eq!(reply.headers["x-engine"], "scripted");

    let sent = &p.seen()[0];
    let id = sent.json()["kv_transfer_params"]["transfer_id"].clone();
    let id = id.as_str().expect("an id");
    let got = &d.seen()[0];
    let want = body.replacen('{', &format!("{{\"kv_transfer_params\":{},", handle(id)), 1);
    assert_eq!(got.text(), want);
    // The prefill leg keeps every byte that it does not name.
    let tail = "\"unknown\":[1.0,-0,{\"a\":null}],\"a\":\"last\"}";
    assert!(sent.text().ends_with(tail), "{}", sent.text());
    assert!(
        sent.text()
            .contains("\"temperature\":0.30000000000000004,\n\"top_p\" : 1E0 ,")
    );
    assert!(blocks.lock().expect("blocks").is_empty());
}

#[tokio::test]
async fn chat_limits_are_cut_on_the_prefill_leg_only() {
    let (p, d) = pair().await;
    d.always(Script::Stream(vec!["data: [DONE]\n\n"], Duration::ZERO));
    let proxy = proxy(&[&p], &[&d]).await;
    let body = json!({
        "model": "m", "messages": [{"role": "user", "content": "hi", "custom": null}],
        "max_completion_tokens": 400, "min_tokens": 100, "n": 4, "stream": true,
        "stream_options": {"include_usage": true}, "chat_template_kwargs": {"a": 1},
        "return_token_ids": true,
    });
    let reply = post(&proxy, CHAT, &body.to_string()).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let prefill = p.seen()[0].json();
    for (name, want) in [
        ("max_tokens", json!(1)),
        ("max_completion_tokens", json!(1)),
        ("n", json!(1)),
        ("stream", json!(false)),
        ("min_tokens", json!(1)),
        ("stream_options", json!(null)),
        ("messages", body["messages"].clone()),
        ("chat_template_kwargs", json!({"a": 1})),
        ("return_token_ids", json!(true)),
    ] {
        assert_eq!(prefill[name], want, "{name}");
    }
    let mut decode = d.seen()[0].json();
    decode
        .as_object_mut()
        .expect("object")
        .remove("kv_transfer_params");
    assert_eq!(decode, body);
}

#[tokio::test]
async fn slots_of_unequal_instances_get_equal_shares_and_ranks_in_range() {
    let ([p0, p1], [d0, d1]) = engines(&Blocks::default()).await;
    let prefill = [
        format!("{},dp=8", p0.url()),
        format!("{},dp=4,rank0=8", p1.url()),
    ];
    let decode = [format!("{},dp=2,rank0=2", d0.url()), d1.url()];
    let proxy = proxy_with(Settings::default(), &prefill, &decode).await;
    let mut client = Client::connect(proxy.address).await;
    for _ in 0..120 {
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        assert_eq!(client.reply().await.status, 200);
    }
    let shares = |engine: &Engine| {
        let mut shares: BTreeMap<Option<String>, usize> = BTreeMap::new();
        for seen in engine.seen() {
            *shares.entry(seen.rank().map(str::to_owned)).or_default() += 1;
        }
        shares
    };
    let ranks = |from: usize, to: usize, share: usize| -> BTreeMap<Option<String>, usize> {
        (from..to)
            .map(|rank| (Some(rank.to_string()), share))
            .collect()
    };
    assert_eq!(shares(&p0), ranks(0, 8, 10));
    assert_eq!(shares(&p1), ranks(8, 12, 10));
    assert_eq!(shares(&d0), ranks(2, 4, 40));
    // One rank: no header, and never the rank of the prefill leg.
    assert_eq!(shares(&d1), BTreeMap::from([(None, 40)]));
}

#[tokio::test]
async fn least_loaded_keeps_away_from_a_busy_engine() {
    let ([p], [d0, d1]) = engines(&Blocks::default()).await;
    let settings = Settings {
        decode_policy: Some("least-loaded".to_owned()),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d0, &d1])).await;
    d0.always(Script::Silence);
    d1.always(Script::Silence);
    let mut busy = Client::connect(proxy.address).await;
    busy.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
    crate::until("one decode leg", || d0.count() + d1.count() == 1).await;
    let (loaded, idle) = if d0.count() == 1 {
        (&d0, &d1)
    } else {
        (&d1, &d0)
    };
    idle.always(Script::Decode);
    for _ in 0..6 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!((loaded.count(), idle.count()), (1, 6));
}

#[tokio::test]
async fn headers_cross_both_legs_but_for_those_of_the_edge() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    let headers = [
        ("Authorization", "Bearer key"),
        (
            "traceparent",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ),
        ("X-Custom", "kept"),
        ("X-data-parallel-rank", "7"),
        ("x-prefiller-host-port", "127.0.0.1:22"),
        ("Accept-Encoding", "gzip"),
        ("Connection", "keep-alive, x-hop"),
        ("X-Hop", "1"),
    ];
    client.post(COMPLETIONS, &headers, PROMPT.as_bytes()).await;
    let reply = client.reply().await;
    assert_eq!(reply.status, 200);
    let (p, d) = (&p.seen()[0], &d.seen()[0]);
    for leg in [p, d] {
        assert_eq!(leg.headers["authorization"], "Bearer key");
        assert_eq!(leg.headers["x-custom"], "kept");
        assert!(leg.headers["traceparent"].starts_with("00-4bf9"));
        for gone in [
            "x-data-parallel-rank",
            "x-prefiller-host-port",
            "accept-encoding",
            "connection",
            "x-hop",
        ] {
            assert!(!leg.headers.contains_key(gone), "{gone}");
        }
    }
    // One minted id on both legs and in the answer.
    let id = &p.headers["x-request-id"];
    assert_eq!(id.len(), 32);
    assert_eq!(
        (id, id),
        (&d.headers["x-request-id"], &reply.headers["x-request-id"])
    );
    assert_ne!(p.headers["host"], d.headers["host"]);
}

#[tokio::test]
async fn a_clients_request_id_is_on_both_legs() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client
        .post(COMPLETIONS, &[("X-Request-Id", "mine")], PROMPT.as_bytes())
        .await;
    assert_eq!(client.reply().await.headers["x-request-id"], "mine");
    for leg in [p.seen(), d.seen()] {
        assert_eq!(leg[0].headers["x-request-id"], "mine");
    }
}

#[tokio::test]
async fn an_error_of_the_proxy_names_its_request_too() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mine = [("X-Request-Id", "mine")];
    let foreign = r#"{"kv_transfer_params":{"k":1}}"#;
    p.kill().await;
    for (path, body, status) in [
        (COMPLETIONS, "{", 400),
        (COMPLETIONS, PROMPT, 502),
        ("/v1/embeddings", foreign, 400),
    ] {
        let mut client = Client::connect(proxy.address).await;
        client.post(path, &mine, body.as_bytes()).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, status, "{}", reply.text());
        assert_eq!(reply.headers["x-request-id"], "mine", "{path} {body}");
    }
    // Minted: it is what the trace goes by.
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(reply.status, 502);
    assert_eq!(reply.headers["x-request-id"].len(), 32);
    d.kill().await;
    let reply = post(&proxy, "/v1/embeddings", "{}").await;
    assert_eq!(reply.status, 502, "{}", reply.text());
    assert_eq!(reply.headers["x-request-id"].len(), 32);
}

#[tokio::test]
async fn every_form_of_prompt_is_served_and_a_list_is_prefilled_by_its_first() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let proxy = proxy(&[&p], &[&d]).await;
    for (prompt, first) in [
        (json!("a"), json!("a")),
        (json!([1, 2, 3]), json!([1, 2, 3])),
        (json!(["a"]), json!(["a"])),
        (json!(["a", "b", "c"]), json!("a")),
        (json!([[1, 2], [3]]), json!([1, 2])),
    ] {
        let body = json!({"model": "m", "prompt": prompt, "max_tokens": 3}).to_string();
        assert_eq!(post(&proxy, COMPLETIONS, &body).await.status, 200);
        let (p, d) = (p.seen(), d.seen());
        assert_eq!(p.last().expect("a leg").json()["prompt"], first);
        assert_eq!(d.last().expect("a leg").json()["prompt"], prompt);
    }
    assert_eq!(metric(&proxy, "batch_prompts_total").await, 2.0);
    assert!(blocks.lock().expect("blocks").is_empty());
}

#[tokio::test]
async fn connections_to_engines_are_kept() {
    let (p, d) = pair().await;
    d.always(Script::Stream(
        vec!["data: 1\n\n", "data: [DONE]\n\n"],
        Duration::ZERO,
    ));
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    for _ in 0..10 {
        client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
        assert!(client.reply().await.whole);
    }
    // The probe at the start may have opened one of its own.
    for engine in [&p, &d] {
        let last = engine.seen().last().expect("a leg").connection;
        assert!(last <= 3, "{last} connections for 10 requests");
    }
}

#[tokio::test]
async fn models_come_from_a_decode_engine_with_the_clients_key() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let dead = Engine::decode(&blocks).await;
    let proxy = proxy(&[&p], &[&dead, &d]).await;
    dead.kill().await;
    for _ in 0..4 {
        let mut client = Client::connect(proxy.address).await;
        let request = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n\r\n";
        client.raw(request.as_bytes()).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.json(), json!({"object": "list", "auth": "Bearer k"}));
    }
    assert_eq!((p.count(), d.count()), (0, 0));
}

#[tokio::test]
async fn readiness_follows_the_engines_and_liveness_does_not() {
    let (p, d) = pair().await;
    d.set_healthy(false);
    let settings = Settings {
        health_interval_ms: Some(20),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let get = async |path: &str| {
        let mut client = Client::connect(proxy.address).await;
        client.get(path).await;
        client.reply().await
    };
    let ready = async |path: &str, want: u16| {
        for _ in 0..250 {
            let reply = get(path).await;
            if reply.status == want {
                return reply.json();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{path} never answered {want}");
    };
    let state = async || get("/workers").await.json()[1]["state"].clone();
    let body = ready("/ready?decode=0", 200).await;
    assert_eq!(body["prefill"]["ready"], 1);
    let body = ready("/ready", 503).await;
    assert!(
        body["reason"]
            .as_str()
            .expect("a reason")
            .contains("0 of 1 decode")
    );
    assert_eq!(get("/health").await.status, 200);
    while state().await != json!("unhealthy") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    d.set_healthy(true);
    assert_eq!(ready("/ready", 200).await["ready"], true);
    assert_eq!(get("/ready?prefill=2").await.status, 503);
    assert_eq!(get("/ready?prefil=2").await.error_code(), "invalid_query");

    d.kill().await;
    ready("/ready", 503).await;
    let workers = get("/workers").await.json();
    assert_eq!(workers[0]["url"], p.url());
    assert_eq!(workers[0]["role"], "prefill");
    assert_eq!(workers[0]["healthy"], true);
    assert_eq!(workers[1]["id"], "decode-0");
    assert_eq!(
        (&workers[1]["dp"], &workers[1]["rank0"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(workers[1]["healthy"], false);
}

#[tokio::test]
async fn in_flight_counts_are_true_while_and_after() {
    let (p, d) = pair().await;
    d.once(Script::StreamThenSilence(vec!["data: 1\n\n"]));
    let proxy = proxy(&[&p], &[&d]).await;
    let flying = async || {
        let line = format!(
            "in_flight{{role=\"decode\",instance=\"{}\",rank=\"0\"}}",
            d.url()
        );
        metric(&proxy, &line).await
    };
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    assert_eq!(flying().await, 1.0);
    drop(client);
    crate::until("the leg ended", || d.ended(0).is_some()).await;
    assert_eq!(flying().await, 0.0);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(flying().await, 0.0);
    let ok = "requests_total{route=\"/v1/completions\",status=\"200\"}";
    assert_eq!(metric(&proxy, ok).await, 2.0);
}
