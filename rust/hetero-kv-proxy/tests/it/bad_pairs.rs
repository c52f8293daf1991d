//! Pairs of engines between which KV does not get over.

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use serde_json::Value;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script};
use crate::{COMPLETIONS, PROMPT, metric, post, proxy, proxy_with, until, urls};

/// Runs on decode alone, and so shifts the turns of decode against those of prefill.
const ALONE: &str = r#"{"model":"m","prompt":"hello","max_tokens":8,"prompt_logprobs":1}"#;

async fn quarantines(proxy: &Proxy) -> f64 {
    metric(proxy, "pair_quarantines_total").await
}

/// What `GET /workers` says of one of them.
async fn worker(proxy: &Proxy, id: &str) -> Value {
    let mut client = Client::connect(proxy.address).await;
    client.get("/workers").await;
    let all = client.reply().await.json();
    let all = all.as_array().expect("a list");
    let found = all.iter().find(|worker| worker["id"] == id);
    found.expect("the worker is there").clone()
}

#[tokio::test]
async fn a_pair_whose_kv_does_not_get_over_is_avoided_and_its_engines_are_not() {
    // With a limit of decode legs both slots are taken at once.
    for decode_requests_max in [None, Some(8)] {
        let (blocks0, blocks1) = (Blocks::default(), Blocks::default());
        let (p0, p1) = (
            Engine::prefill(&blocks0).await,
            Engine::prefill(&blocks1).await,
        );
        let (d0, d1) = (
            Engine::decode(&blocks1).await,
            Engine::decode(&blocks1).await,
        );
        d0.always(Script::DecodeBut(blocks0.clone()));
        let settings = Settings {
            decode_requests_max,
            ..Settings::default()
        };
        let proxy = proxy_with(settings, &urls(&[&p0, &p1]), &urls(&[&d0, &d1])).await;
        // D0 takes this one, then P0 goes with D1 and P1 with D0.
        for body in [ALONE, PROMPT, PROMPT] {
            assert_eq!(post(&proxy, COMPLETIONS, body).await.status, 200);
        }
        // D1 takes this one; P0 goes with D0.
        assert_eq!(post(&proxy, COMPLETIONS, ALONE).await.status, 200);
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 500);
        assert_eq!(quarantines(&proxy).await, 1.0);
        let counts = || [&p0, &p1, &d0, &d1].map(|engine| engine.count());
        let before = counts();
        for _ in 0..12 {
            assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
        }
        let used = [0, 1, 2, 3].map(|at| counts()[at] - before[at]);
        assert_eq!((used[0], used[1]), (6, 6), "{used:?}");
        assert_eq!(used[2] + used[3], 12, "{used:?}");
        assert!(used[2] >= 3 && used[3] >= 6, "{used:?}");
        for (id, other) in [("prefill-0", "decode-0"), ("decode-0", "prefill-0")] {
            let view = worker(&proxy, id).await;
            assert_eq!(view["state"], "healthy");
            let avoided = &view["avoided_with"][0];
            assert_eq!(avoided["id"], other);
            let left = avoided["for_ms"].as_u64().expect("a number");
            assert!((1..=5_000).contains(&left), "{left}");
        }
        let others = worker(&proxy, "prefill-1").await;
        assert_eq!(others["avoided_with"], Value::Array(vec![]));
        assert_eq!(quarantines(&proxy).await, 1.0);
    }
}

#[tokio::test]
async fn a_prefill_engine_without_a_pair_left_is_avoided_and_the_last_pair_is_not() {
    let (blocks0, blocks1) = (Blocks::default(), Blocks::default());
    let (p0, p1) = (
        Engine::prefill(&blocks0).await,
        Engine::prefill(&blocks1).await,
    );
    let d = Engine::decode(&blocks1).await;
    d.always(Script::DecodeBut(blocks0.clone()));
    let proxy_of_two = proxy(&[&p0, &p1], &[&d]).await;
    // Of the first failure nobody knows yet that D serves others.
    for status in [500, 200, 500] {
        assert_eq!(
            post(&proxy_of_two, COMPLETIONS, PROMPT).await.status,
            status
        );
    }
    let before = p0.count();
    for _ in 0..6 {
        assert_eq!(post(&proxy_of_two, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!(p0.count(), before);

    // The same, named by the engine, with no other pair.
    let proxy_of_one = proxy(&[&p0], &[&d]).await;
    for _ in 0..3 {
        d.once(Script::Answer(
            500,
            "application/json",
            r#"{"error":{"message":"x","type":"server_error","code":"lease_gone"}}"#,
        ));
        assert_eq!(post(&proxy_of_one, COMPLETIONS, PROMPT).await.status, 500);
    }
    assert_eq!(quarantines(&proxy_of_one).await, 1.0);
    d.once(Script::Decode);
    assert_eq!(post(&proxy_of_one, COMPLETIONS, PROMPT).await.status, 200);
    until("the pair is well", || {
        proxy_of_one
            .app
            .view(hetero_kv_proxy::routing::Role::Decode)[0]
            .in_flight_by_rank
            == [0]
    })
    .await;
    let view = worker(&proxy_of_one, "decode-0").await;
    assert_eq!(view["avoided_with"], Value::Array(vec![]));
}
