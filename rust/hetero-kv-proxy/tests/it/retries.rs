//! Legs that an engine refuses, or never got, and what is sent again.

use hetero_kv_proxy::cli::Settings;
use serde_json::Value;

use crate::connectors::{engine, proxy_of};
use crate::engine::{BUSY, Blocks, Engine, Script, engines};
use crate::{COMPLETIONS, PROMPT, STREAM, metric, post, proxy, proxy_with, urls};

fn params(engine: &Engine, at: usize) -> Value {
    engine.seen()[at].json()["kv_transfer_params"].clone()
}

async fn retries(proxy: &hetero_kv_proxy::run::Proxy, role: &str) -> f64 {
    metric(proxy, &format!("retries_total{{role=\"{role}\"}}")).await
}

#[tokio::test]
async fn a_prefill_that_refuses_is_stepped_over_with_a_new_id() {
    for status in [429, 502, 503, 504] {
        let ([p0, p1], [d]) = engines(&Blocks::default()).await;
        let proxy = proxy(&[&p0, &p1], &[&d]).await;
        p0.once(Script::Busy(status));
        assert_eq!(post(&proxy, COMPLETIONS, STREAM).await.status, 200);
        assert_eq!((p0.count(), p1.count(), d.count()), (1, 1, 1), "{status}");
        let id = |engine| params(engine, 0)["transfer_id"].clone();
        assert_ne!(id(&p0), id(&p1));
        assert_eq!(id(&p1), id(&d));
        assert_eq!(retries(&proxy, "prefill").await, 1.0);
    }
}

#[tokio::test]
async fn other_statuses_of_prefill_are_the_answer() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let proxy = proxy(&[&p0, &p1], &[&d]).await;
    for status in [400, 401, 404, 422, 500, 501] {
        for engine in [&p0, &p1] {
            engine.once(Script::Busy(status));
        }
        let before = p0.count() + p1.count();
        for _ in 0..2 {
            let reply = post(&proxy, COMPLETIONS, PROMPT).await;
            assert_eq!((reply.status, reply.text().as_str()), (status, BUSY));
        }
        assert_eq!(p0.count() + p1.count() - before, 2, "{status}");
    }
    assert_eq!(d.count(), 0);
}

#[tokio::test]
async fn when_all_refuse_the_last_refusal_is_the_answer_with_its_retry_after() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    for (retries_max, tries) in [(None, 3), (Some(0), 1), (Some(1), 2)] {
        let settings = Settings {
            retries_max,
            ..Settings::default()
        };
        let proxy = proxy_with(settings, &urls(&[&p0, &p1]), &urls(&[&d])).await;
        for status in [429, 503] {
            for engine in [&p0, &p1] {
                engine.always(Script::Busy(status));
            }
            let before = p0.count() + p1.count();
            let reply = post(&proxy, COMPLETIONS, PROMPT).await;
            assert_eq!((reply.status, reply.text().as_str()), (status, BUSY));
            assert_eq!(reply.headers["retry-after"], "7");
            assert_eq!(p0.count() + p1.count() - before, tries);
        }
    }
    // One that cannot be reached says less than one that says when to come again.
    let settings = Settings {
        retries_max: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p0, &p1]), &urls(&[&d])).await;
    p0.always(Script::Busy(429));
    p1.kill().await;
    for _ in 0..4 {
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!((reply.status, reply.text().as_str()), (429, BUSY));
    }
    assert_eq!(d.count(), 0);
}

#[tokio::test]
async fn a_decode_that_refuses_is_stepped_over_with_the_same_params() {
    for status in [429, 503] {
        let blocks = Blocks::default();
        let ([p], [d0, d1]) = engines(&blocks).await;
        let proxy = proxy(&[&p], &[&d0, &d1]).await;
        d0.once(Script::Busy(status));
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
        assert_eq!((p.count(), d0.count(), d1.count()), (1, 1, 1), "{status}");
        assert_eq!(params(&d0, 0), params(&d1, 0));
        assert!(blocks.lock().expect("blocks").is_empty());
        assert_eq!(retries(&proxy, "decode").await, 1.0);
        for engine in [&d0, &d1] {
            engine.always(Script::Busy(status));
        }
        let reply = post(&proxy, COMPLETIONS, STREAM).await;
        assert_eq!((reply.status, reply.text().as_str()), (status, BUSY));
        assert_eq!(reply.headers["retry-after"], "7");
    }
}

#[tokio::test]
async fn a_decode_that_may_have_taken_its_leg_is_not_replaced() {
    let blocks = Blocks::default();
    let ([p], [d0, d1]) = engines(&blocks).await;
    let proxy = proxy(&[&p], &[&d0, &d1]).await;
    for status in [500, 502, 504] {
        for engine in [&d0, &d1] {
            engine.once(Script::Busy(status));
        }
        let before = d0.count() + d1.count();
        for _ in 0..2 {
            let reply = post(&proxy, COMPLETIONS, PROMPT).await;
            assert_eq!((reply.status, reply.text().as_str()), (status, BUSY));
        }
        assert_eq!(d0.count() + d1.count() - before, 2, "{status}");
    }
    assert_eq!(retries(&proxy, "decode").await, 0.0);
}

/// NIXL frees the blocks of a transfer that was read, and a second read gets what is in them then.
#[tokio::test]
async fn a_connector_that_would_read_twice_gets_a_refused_leg_once() {
    const HANDLE: &str = r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"a":1}}"#;
    let p = engine(HANDLE).await;
    let (d0, d1) = (engine("{}").await, engine("{}").await);
    let proxy = proxy_of("nixl", &urls(&[&p]), &urls(&[&d0, &d1])).await;
    d0.once(Script::Busy(503));
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!((reply.status, reply.text().as_str()), (503, BUSY));
    assert_eq!((d0.count(), d1.count()), (1, 0));
    // A limit of rate is decided before anything is read.
    d1.once(Script::Busy(429));
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!((d0.count(), d1.count()), (2, 1));

    // A kept connection that breaks was almost surely closed for idleness, which is not enough.
    d1.once(Script::Close);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 502);
    assert_eq!((d0.count(), d1.count(), p.count()), (2, 2, 3));

    // Without a handle there is nothing to read.
    let proxy = proxy_of("none", &[], &urls(&[&d0, &d1])).await;
    d0.once(Script::Busy(503));
    let before = d0.count() + d1.count();
    for _ in 0..2 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!(d0.count() + d1.count() - before, 3);
}

/// Each engine of a role fails one request: no client notices.
#[tokio::test]
async fn one_failure_of_every_engine_is_seen_by_nobody() {
    let fails = [Script::Busy(503), Script::Close, Script::Reset];
    for (at, script) in fails.into_iter().enumerate() {
        let blocks = Blocks::default();
        let ([p0, p1], [d0, d1]) = engines(&blocks).await;
        let proxy = proxy(&[&p0, &p1], &[&d0, &d1]).await;
        for engine in [&p0, &p1] {
            engine.once(script.clone());
        }
        // A decode leg that broke may have been taken.
        if at == 0 {
            for engine in [&d0, &d1] {
                engine.once(script.clone());
            }
        }
        for _ in 0..4 {
            assert_eq!(post(&proxy, COMPLETIONS, STREAM).await.status, 200);
        }
        assert!(blocks.lock().expect("blocks").is_empty());
    }
}
