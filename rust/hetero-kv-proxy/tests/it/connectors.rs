//! Connectors whose legs go one after the other, and decode alone.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use serde_json::json;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script, pair};
use crate::{COMPLETIONS, PROMPT, metric, post, proxy, proxy_with, until, urls};

/// A prefill answer for its token limit, with params that a re-serialising proxy would change.
const HANDLE: &str = r#"{"do_remote_prefill":true, "remote_block_ids":[[1,2]],"tp_size":1,"f":1.50,"remote_dp_size":1,"remote_dp_rank":0}"#;
const PREFILLED: &str = r#"{"choices":[{"text":"t","finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true, "remote_block_ids":[[1,2]],"tp_size":1,"f":1.50,"remote_dp_size":1,"remote_dp_rank":0}}"#;
/// As Mooncake's prefill answers: no params.
const BARE: &str = r#"{"choices":[{"text":"t","finish_reason":"length"}]}"#;
/// The one token ended the answer.
const STOPPED: &str = r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#;

pub(crate) async fn engine(answer: &'static str) -> Engine {
    Engine::start(
        Script::Answer(200, "application/json", answer),
        &Blocks::default(),
    )
    .await
}

pub(crate) async fn proxy_of(connector: &str, prefill: &[String], decode: &[String]) -> Proxy {
    let settings = Settings {
        connector: Some(connector.to_owned()),
        ..Settings::default()
    };
    proxy_with(settings, prefill, decode).await
}

pub(crate) async fn fallbacks(proxy: &Proxy, reason: &str) -> f64 {
    metric(proxy, &format!("fallbacks_total{{reason=\"{reason}\"}}")).await
}

#[tokio::test]
async fn nixl_hands_the_returned_params_to_decode_byte_for_byte() {
    let (p, d) = (engine(PREFILLED).await, engine("{}").await);
    let proxy = proxy_of("nixl", &urls(&[&p]), &urls(&[&d])).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    let sent = p.seen()[0].json();
    assert_eq!(
        sent["kv_transfer_params"],
        json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        })
    );
    assert_eq!(
        (&sent["max_tokens"], &sent["min_tokens"]),
        (&json!(1), &json!(1))
    );
    let want = PROMPT.replacen('{', &format!("{{\"kv_transfer_params\":{HANDLE},"), 1);
    assert_eq!(d.seen()[0].text(), want);
}

/// With one handle for several children each would read, and release, the blocks of one of them.
#[tokio::test]
async fn several_sequences_fan_out_on_decode_where_one_transfer_cannot_serve_them() {
    let (p, d) = (engine(PREFILLED).await, engine("{}").await);
    let bodies = [
        r#"{"prompt":"a","n":2,"max_tokens":4}"#,
        r#"{"prompt":["a","b"],"max_tokens":4}"#,
        r#"{"prompt":[[1],[2]],"max_tokens":4}"#,
        r#"{"prompt":"a","best_of":3}"#,
        r#"{"prompt":"a","use_beam_search":true}"#,
    ];
    for connector in ["nixl", "mooncake", "moriio-read", "moriio-write"] {
        let proxy = proxy_of(connector, &urls(&[&p]), &urls(&[&d])).await;
        for body in bodies {
            assert_eq!(post(&proxy, COMPLETIONS, body).await.status, 200);
            assert_eq!(d.seen().last().expect("a leg").text(), body, "{connector}");
        }
        assert_eq!(p.count(), 0, "{connector}");
        let counted = fallbacks(&proxy, "several_sequences").await;
        assert_eq!(counted, 5.0, "{connector}");
    }
    // Ours tells them apart.
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    assert_eq!(post(&proxy, COMPLETIONS, bodies[0]).await.status, 200);
    assert_eq!((p.count(), p.seen()[0].json()["n"].clone()), (1, json!(1)));
    assert_eq!(d.seen()[0].json()["n"], 2);
}

/// Only where a prompt is computed are there log probabilities of it.
#[tokio::test]
async fn log_probabilities_of_a_prompt_come_from_decode_alone() {
    const ANSWER: &str = r#"{"choices":[{"prompt_logprobs":[null,{"1":-0.10}]}]}"#;
    let (p, d) = (engine(PREFILLED).await, engine(ANSWER).await);
    for connector in ["hetero", "nixl", "moriio-read", "moriio-write"] {
        let proxy = proxy_of(connector, &urls(&[&p]), &urls(&[&d])).await;
        for body in [
            r#"{"prompt":"a","prompt_logprobs":1, "max_tokens":4}"#,
            r#"{"prompt":"a","echo":true,"logprobs":2}"#,
        ] {
            let reply = post(&proxy, COMPLETIONS, body).await;
            assert_eq!((reply.status, reply.text().as_str()), (200, ANSWER));
            assert_eq!(d.seen().last().expect("a leg").text(), body, "{connector}");
        }
        assert_eq!(fallbacks(&proxy, "prompt_logprobs").await, 2.0);
    }
    assert_eq!(p.count(), 0);
}

#[tokio::test]
async fn none_sends_the_clients_bytes_to_decode_and_is_ready_without_prefill() {
    let d = engine("{}").await;
    let proxy = proxy_of("none", &[], &urls(&[&d])).await;
    let body = r#"{ "prompt":["a","b"], "n":3,"temperature":0.30000000000000004}"#;
    assert_eq!(post(&proxy, COMPLETIONS, body).await.status, 200);
    assert_eq!(d.seen()[0].text(), body);
    let mut client = Client::connect(proxy.address).await;
    client.get("/ready").await;
    assert_eq!(client.reply().await.status, 200);
    // It is what was asked for, not a fallback.
    assert_eq!(fallbacks(&proxy, "several_sequences").await, 0.0);
}

/// No block waits for this leg: it does not outlive its client.
#[tokio::test]
async fn a_client_that_leaves_decode_alone_closes_the_leg_at_once() {
    let d = engine("{}").await;
    let settings = Settings {
        connector: Some("none".to_owned()),
        handover_grace_ms: Some(60_000),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &[], &urls(&[&d])).await;
    // Before the answer's head, and between the head and the first chunk.
    for (at, script) in [Script::Silence, Script::StreamThenSilence(vec![])]
        .into_iter()
        .enumerate()
    {
        d.once(script);
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        until("the leg", || d.count() == at + 1).await;
        if at == 1 {
            client.head().await.expect("a head");
        }
        drop(client);
        let took = until("the leg's end", || d.ended(at).is_some()).await;
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
    assert_eq!(metric(&proxy, "settles_total").await, 0.0);
}

#[tokio::test]
async fn mooncake_names_the_engine_of_each_rank_and_learns_that_it_changed() {
    let (p, d, boot) = (engine(BARE).await, engine("{}").await, engine("{}").await);
    boot.set_engine_ids(&["e0", "e1"]);
    let worker = format!("{},dp=2,bootstrap={}", p.url(), boot.address);
    let settings = Settings {
        connector: Some("mooncake".to_owned()),
        health_interval_ms: Some(10),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &[worker], &urls(&[&d])).await;
    let round = async |ids: [&str; 2]| {
        for _ in 0..2 {
            assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
            let (p, d) = (p.seen(), d.seen());
            let (p, d) = (p.last().expect("a leg"), d.last().expect("a leg"));
            let rank: usize = p.rank().expect("a rank").parse().expect("a number");
            let prefill = &p.json()["kv_transfer_params"];
            let id = prefill["transfer_id"].as_str().expect("an id").to_owned();
            assert!(id.starts_with("xfer-") && id.len() == 37, "{id}");
            assert_eq!(
                d.json()["kv_transfer_params"],
                json!({
                    "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
                    "remote_bootstrap_addr": boot.url(), "remote_engine_id": ids[rank],
                })
            );
        }
    };
    round(["e0", "e1"]).await;
    boot.set_engine_ids(&["f0", "f1"]);
    tokio::time::sleep(Duration::from_millis(30)).await;
    round(["f0", "f1"]).await;
}

#[tokio::test]
async fn mooncake_without_a_bootstrap_answer_prefills_nothing_there() {
    let (p0, p1, d) = (engine(BARE).await, engine(BARE).await, engine("{}").await);
    let (dead, boot) = (engine("{}").await, engine("{}").await);
    boot.set_engine_ids(&["e0"]);
    let workers = [
        format!("{},bootstrap={}", p0.url(), dead.address),
        format!("{},bootstrap={}", p1.url(), boot.address),
    ];
    let proxy = proxy_of("mooncake", &workers, &urls(&[&d])).await;
    // Reachable, but it knows no rank.
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!((p0.count(), p1.count()), (0, 4));
    dead.kill().await;
    boot.kill().await;
    let only = proxy_of("mooncake", &workers[..1], &urls(&[&d])).await;
    let reply = post(&only, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "prefill_bootstrap")
    );
    assert_eq!(p0.count(), 0);
}

/// Prefill keeps no blocks of a request that ended by itself: decode gives that answer.
#[tokio::test]
async fn a_first_token_that_ends_the_answer_is_an_answer() {
    let (p, d, boot) = (
        engine(STOPPED).await,
        engine("{}").await,
        engine("{}").await,
    );
    boot.set_engine_ids(&["e0"]);
    for (connector, extra) in [
        ("hetero", String::new()),
        ("nixl", String::new()),
        ("moriio-read", String::new()),
        ("mooncake", format!(",bootstrap={}", boot.address)),
    ] {
        let worker = format!("{}{extra}", p.url());
        let proxy = proxy_of(connector, &[worker], &urls(&[&d])).await;
        assert_eq!(
            post(&proxy, COMPLETIONS, PROMPT).await.status,
            200,
            "{connector}"
        );
        assert_eq!(d.seen().last().expect("a leg").text(), PROMPT);
        assert_eq!(fallbacks(&proxy, "prefill_stopped").await, 1.0);
        assert_eq!(metric(&proxy, "kv_transfer_missing_total").await, 0.0);
    }
}

#[tokio::test]
async fn moriio_read_embeds_addresses_for_the_engines_and_not_for_the_client() {
    let (p, d) = (engine(PREFILLED).await, engine("{}").await);
    p.always(Script::After(
        Duration::from_millis(100),
        Box::new(Script::Answer(200, "application/json", PREFILLED)),
    ));
    let prefill = format!("{},tp=8,handshake=7000,notify=7100", p.url());
    let decode = format!("{},dp=2,kv-host=10.0.0.2", d.url());
    let proxy = proxy_of("moriio-read", &[prefill], &[decode]).await;
    let mut client = Client::connect(proxy.address).await;
    let forged = "___prefill_addr_host:6.6.6.6,handshake:1,notify:1___decode_addr_x_0";
    client
        .post(COMPLETIONS, &[("X-Request-Id", forged)], PROMPT.as_bytes())
        .await;
    let reply = client.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.headers["x-request-id"], forged);
    let (p, d) = (&p.seen()[0], &d.seen()[0]);
    assert!(d.at - p.at >= Duration::from_millis(100));
    let sent = p.json()["kv_transfer_params"].clone();
    let id = sent["transfer_id"].as_str().expect("an id");
    let id = id.strip_prefix("tx-").expect("a prefix");
    let want = format!(
        "___prefill_addr_host:127.0.0.1,handshake:7000,notify:7100___decode_addr_host:10.0.0.2,\
         handshake:6301,notify:61005_{id}"
    );
    assert_eq!(sent["remote_dp_size"], 2);
    for leg in [p, d] {
        assert_eq!(leg.headers["x-request-id"], want);
    }
    // The decode leg's own rank in its header, prefill's in the params.
    assert_eq!((p.rank(), d.rank()), (None, Some("0")));
    assert_eq!(d.json()["kv_transfer_params"]["remote_dp_rank"], 0);
    assert_eq!(
        d.json()["kv_transfer_params"]["remote_block_ids"],
        json!([[1, 2]])
    );
}

/// The decode slot was named to prefill; another that takes its place names itself.
#[tokio::test]
async fn moriio_read_names_the_decode_engine_that_took_the_leg() {
    let (p, d0, d1) = (
        engine(PREFILLED).await,
        engine("{}").await,
        engine("{}").await,
    );
    let decode = [
        format!("{},kv-host=10.0.0.1", d0.url()),
        format!("{},kv-host=10.0.0.2", d1.url()),
    ];
    let proxy = proxy_of("moriio-read", &urls(&[&p]), &decode).await;
    d0.kill().await;
    for _ in 0..2 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    let seen = d1.seen();
    assert_eq!((p.count(), seen.len()), (2, 2));
    for leg in seen {
        let id = &leg.headers["x-request-id"];
        assert!(id.contains("___decode_addr_host:10.0.0.2,"), "{id}");
    }
}
