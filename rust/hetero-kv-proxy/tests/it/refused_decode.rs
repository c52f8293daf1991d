//! Requests that decode refuses after prefill has pinned their blocks, and those of which it is
//! known before.

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::Client;
use crate::connectors::{engine, proxy_of};
use crate::engine::{Blocks, Engine, Script, freed, pair_on};
use crate::{CHAT, COMPLETIONS, PROMPT, metric, post, proxy, soon, urls};

const REFUSED: &str = r#"{"error":{"message":"the context is too short","code":400}}"#;

fn sent(engine: &Engine) -> Vec<Value> {
    engine.seen().iter().map(|seen| seen.json()).collect()
}

fn params(body: &Value) -> Value {
    body["kv_transfer_params"].clone()
}

#[tokio::test]
async fn blocks_of_a_leg_that_decode_refuses_are_read_and_released_at_once() {
    for (status, path, body) in [
        (
            400,
            COMPLETIONS,
            r#"{"model":"m","prompt":"hello","max_tokens":900000,"stream":true,"n":3}"#,
        ),
        (
            422,
            CHAT,
            r#"{"model":"m","messages":[],"max_completion_tokens":9}"#,
        ),
        (404, COMPLETIONS, r#"{"model":"lora","prompt":["a","b"]}"#),
        (
            413,
            COMPLETIONS,
            r#"{"model":"m","prompt":"hello","stream":false}"#,
        ),
    ] {
        let blocks = Blocks::default();
        let (p, d) = pair_on(&blocks).await;
        let proxy = proxy(&[&p], &[&d]).await;
        d.once(Script::Answer(status, "application/json", REFUSED));
        let reply = post(&proxy, path, body).await;
        assert_eq!((reply.status, reply.text().as_str()), (status, REFUSED));
        let took = freed(&blocks).await;
        assert!(took < Duration::from_secs(1), "{took:?}");
        soon("nothing is kept", async || {
            let kept = format!("kept_transfers{{instance=\"{}\"}}", p.url());
            metric(&proxy, &kept).await == 0.0
        })
        .await;

        let (prefill, decode) = (sent(&p), sent(&d));
        assert_eq!((prefill.len(), decode.len()), (1, 2), "{decode:?}");
        // The client's own, and then what prefill took, by the handle of its answer.
        assert_eq!(params(&decode[0]), params(&decode[1]));
        assert_eq!(
            decode[1]["kv_transfer_params"]["do_remote_prefill"],
            json!(true)
        );
        let mut release = decode[1].clone();
        release["kv_transfer_params"] = params(&prefill[0]);
        assert_eq!(release, prefill[0]);

        let left = format!("transfers_left_total{{instance=\"{}\"}}", p.url());
        assert_eq!(metric(&proxy, &left).await, 0.0);
        assert_eq!(metric(&proxy, "requests_running").await, 0.0);
        // The next one is served as ever.
        assert_eq!(post(&proxy, COMPLETIONS, crate::PROMPT).await.status, 200);
        assert!(blocks.lock().expect("blocks").is_empty());
    }
}

#[tokio::test]
async fn a_client_that_left_before_the_refusal_leaves_no_blocks() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let proxy = proxy(&[&p], &[&d]).await;
    let refused = Script::Answer(400, "application/json", REFUSED);
    d.once(Script::After(Duration::from_millis(200), Box::new(refused)));
    let mut client = Client::connect(proxy.address).await;
    client
        .post(COMPLETIONS, &[], crate::PROMPT.as_bytes())
        .await;
    crate::until("the decode leg is there", || d.count() == 1).await;
    drop(client);
    freed(&blocks).await;
    assert_eq!(d.count(), 2);
}

#[tokio::test]
async fn a_release_that_is_refused_too_is_not_repeated_and_counts_as_left() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let proxy = proxy(&[&p], &[&d]).await;
    d.always(Script::Answer(404, "application/json", REFUSED));
    assert_eq!(post(&proxy, COMPLETIONS, crate::PROMPT).await.status, 404);
    let left = format!("transfers_left_total{{instance=\"{}\"}}", p.url());
    soon("it is counted", async || metric(&proxy, &left).await == 1.0).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(d.count(), 2);
}

/// An engine of these may have read the blocks: a second one would keep what is in them by then.
#[tokio::test]
async fn where_a_second_read_would_go_unnoticed_the_lease_frees_the_blocks() {
    const HANDLE: &str = r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"a":1}}"#;
    let (p, d) = (engine(HANDLE).await, engine("{}").await);
    let proxy = proxy_of("nixl", &urls(&[&p]), &urls(&[&d])).await;
    d.once(Script::Answer(400, "application/json", REFUSED));
    assert_eq!(post(&proxy, COMPLETIONS, crate::PROMPT).await.status, 400);
    let left = format!("transfers_left_total{{instance=\"{}\"}}", p.url());
    soon("it is counted", async || metric(&proxy, &left).await == 1.0).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(d.count(), 1);
}

#[tokio::test]
async fn several_greedy_sequences_are_for_decode_to_refuse_before_anything_is_prefilled() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let proxy = proxy(&[&p], &[&d]).await;
    let greedy = [
        r#"{"model":"m","prompt":"x","n":2,"temperature":0}"#,
        r#"{"model":"m","prompt":"x","n":2,"temperature":0.000001}"#,
        r#"{"model":"m","prompt":"x","best_of":2,"temperature":0.0}"#,
    ];
    for body in greedy {
        d.once(Script::Answer(400, "application/json", REFUSED));
        assert_eq!(post(&proxy, COMPLETIONS, body).await.status, 400, "{body}");
        assert_eq!(d.seen().last().expect("a leg").text(), body);
    }
    assert_eq!((p.count(), d.count()), (0, 3));
    let counted = "fallbacks_total{reason=\"greedy_sequences\"}";
    assert_eq!(metric(&proxy, counted).await, 3.0);
    let sampled = [
        r#"{"model":"m","prompt":"x","n":2}"#,
        r#"{"model":"m","prompt":"x","n":2,"temperature":null}"#,
        r#"{"model":"m","prompt":"x","n":2,"temperature":0.1}"#,
        r#"{"model":"m","prompt":"x","n":1,"temperature":0}"#,
        r#"{"model":"m","prompt":"x","n":2,"temperature":0,"use_beam_search":true}"#,
    ];
    for (count, body) in (1..).zip(sampled) {
        assert_eq!(post(&proxy, COMPLETIONS, body).await.status, 200, "{body}");
        assert_eq!(p.count(), count, "{body}");
    }
    freed(&blocks).await;
}

#[tokio::test]
async fn a_release_that_fails_takes_no_engine_out() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let proxy = proxy(&[&p], &[&d]).await;
    // Beyond what opens a breaker.
    for request in 1..=20 {
        d.once(Script::Answer(400, "application/json", REFUSED));
        d.once(Script::Answer(500, "application/json", REFUSED));
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 400);
        crate::until("both legs are there", || d.count() == 2 * request).await;
    }
    let opens = "breaker_opens_total{role=\"decode\"}";
    assert_eq!(metric(&proxy, opens).await, 0.0);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
}
