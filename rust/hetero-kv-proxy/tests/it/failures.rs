//! Engines that fail: the client gets the status of the leg that failed, and never a 200 over it.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use tokio::time::Instant;

use crate::engine::{Blocks, Engine, Framing, Script, engines, freed, pair, pair_on};
use crate::{COMPLETIONS, PROMPT, STREAM, metric, post, proxy, proxy_with, urls};

/// Every leg over its own connection, so that a break is the engine's and not that of idleness.
fn no_kept_connections() -> Settings {
    Settings {
        pool_idle_timeout_ms: Some(0),
        ..Settings::default()
    }
}

const ERROR: &str = r#"{"error": {"message":"too long","code":400.0}}"#;

#[tokio::test]
async fn a_prefill_error_is_the_answer_and_decode_is_not_called() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    for (status, kind) in [
        (400, "application/json"),
        (404, "application/json"),
        (422, "text/plain; charset=utf-8"),
        (429, "application/json"),
        (500, "application/problem+json"),
        (503, "application/json"),
    ] {
        p.once(Script::Answer(status, kind, ERROR));
        let reply = post(&proxy, COMPLETIONS, STREAM).await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.text(), ERROR);
        assert_eq!(reply.headers["content-type"], kind);
        assert_eq!(reply.headers["x-engine"], "scripted");
    }
    assert_eq!((p.count(), d.count()), (6, 0));
}

#[tokio::test]
async fn a_decode_error_is_the_answer() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mut legs = 0;
    for status in [400, 404, 429, 500, 503] {
        d.once(Script::Answer(status, "application/problem+json", ERROR));
        let reply = post(&proxy, COMPLETIONS, STREAM).await;
        assert_eq!((reply.status, reply.text().as_str()), (status, ERROR));
        assert_eq!(reply.headers["content-type"], "application/problem+json");
        assert!(reply.whole);
        // Of a request that is refused the blocks are released by a further leg.
        legs += if status < 500 { 2 } else { 1 };
        crate::until("all legs are there", || d.count() == legs).await;
    }
    assert_eq!((p.count(), d.count()), (5, 8));
}

#[tokio::test]
async fn client_errors_never_take_an_engine_out() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    for _ in 0..50 {
        p.once(Script::Answer(400, "application/json", ERROR));
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 400);
    }
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    let state = proxy.app.view(hetero_kv_proxy::routing::Role::Prefill)[0].state;
    assert_eq!(state.name(), "healthy");
}

#[tokio::test]
async fn a_prefill_without_a_kv_handle_fails_by_name() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let cases = [
        r#"{"choices":[]}"#,
        r#"{"kv_transfer_params":null}"#,
        r#"{"kv_transfer_params":[1]}"#,
        r#"{"kv_transfer_params":"x"}"#,
        "not json",
        "",
    ];
    for body in cases {
        p.once(Script::Answer(200, "application/json", body));
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (502, "kv_transfer_missing")
        );
    }
    assert_eq!(d.count(), 0);
    assert_eq!(
        metric(&proxy, "kv_transfer_missing_total").await,
        cases.len() as f64
    );
}

#[tokio::test]
async fn a_missing_kv_handle_may_be_recomputed_and_is_counted() {
    let (p, d) = pair().await;
    p.always(Script::Answer(200, "application/json", r#"{"choices":[]}"#));
    let settings = Settings {
        require_kv: Some(false),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(d.seen()[0].text(), PROMPT);
    assert_eq!(metric(&proxy, "kv_transfer_missing_total").await, 1.0);
    let fallbacks = "fallbacks_total{reason=\"kv_transfer_missing\"}";
    assert_eq!(metric(&proxy, fallbacks).await, 1.0);
}

#[tokio::test]
async fn prefill_that_breaks_before_its_answer_is_retried_elsewhere_with_a_new_id() {
    for script in [Script::Close, Script::Reset] {
        let ([p0, p1], [d]) = engines(&Blocks::default()).await;
        let proxy = proxy_with(no_kept_connections(), &urls(&[&p0, &p1]), &urls(&[&d])).await;
        p0.once(script);
        for _ in 0..2 {
            assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
        }
        assert_eq!(
            (p0.count(), d.count()),
            (1, 2),
            "one try on the broken engine"
        );
        let id =
            |engine: &Engine| engine.seen()[0].json()["kv_transfer_params"]["transfer_id"].clone();
        assert_ne!(id(&p0), id(&p1));
        assert_eq!(id(&p1), id(&d));
        assert_eq!(metric(&proxy, "retries_total{role=\"prefill\"}").await, 1.0);
    }
}

#[tokio::test]
async fn when_every_prefill_breaks_before_its_answer_it_is_a_502_without_an_address() {
    for script in [Script::Close, Script::Reset] {
        let blocks = Blocks::default();
        let (p0, p1) = (
            Engine::prefill(&blocks).await,
            Engine::prefill(&blocks).await,
        );
        let d = Engine::decode(&blocks).await;
        let proxy = proxy_with(no_kept_connections(), &urls(&[&p0, &p1]), &urls(&[&d])).await;
        for engine in [&p0, &p1] {
            engine.always(script.clone());
        }
        for sent in 1..=3 {
            let reply = post(&proxy, COMPLETIONS, PROMPT).await;
            assert_eq!(
                (reply.status, reply.error_code().as_str()),
                (502, "prefill_reset")
            );
            assert!(!reply.text().contains("127.0.0.1"), "{}", reply.text());
            // Each try is bounded, and none is followed by decode.
            assert_eq!(p0.count() + p1.count(), 3 * sent);
        }
        assert_eq!(d.count(), 0);
    }
}

#[tokio::test]
async fn a_dead_prefill_costs_no_request_and_a_restarted_one_is_used_again() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let settings = Settings {
        health_interval_ms: Some(50),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p0, &p1]), &urls(&[&d])).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    p0.kill().await;
    let before = p1.count();
    for _ in 0..20 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!(p1.count() - before, 20);
    let p0 = p0.restart(Script::Prefill).await;
    let start = Instant::now();
    while p0.count() == 0 {
        assert!(start.elapsed() < Duration::from_secs(5), "not used again");
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
}

#[tokio::test]
async fn a_dead_decode_is_stepped_over_with_the_same_params() {
    let blocks = Blocks::default();
    let ([p], [d0, d1]) = engines(&blocks).await;
    let proxy = proxy(&[&p], &[&d0, &d1]).await;
    d0.kill().await;
    for _ in 0..10 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    // Prefill is never redone, and every block is freed by the engine that answered.
    assert_eq!((p.count(), d1.count()), (10, 10));
    // The first to meet it steps over; it is then known.
    assert_eq!(metric(&proxy, "retries_total{role=\"decode\"}").await, 1.0);
    assert!(blocks.lock().expect("blocks").is_empty());
}

#[tokio::test]
async fn a_decode_that_may_have_read_is_not_tried_again() {
    let ([p], [d0, d1]) = engines(&Blocks::default()).await;
    let proxy = proxy_with(no_kept_connections(), &urls(&[&p]), &urls(&[&d0, &d1])).await;
    for script in [Script::Close, Script::Reset] {
        for engine in [&d0, &d1] {
            engine.once(script.clone());
        }
        let before = d0.count() + d1.count();
        for _ in 0..2 {
            let reply = post(&proxy, COMPLETIONS, STREAM).await;
            assert_eq!(
                (reply.status, reply.error_code().as_str()),
                (502, "decode_reset")
            );
        }
        assert_eq!(d0.count() + d1.count() - before, 2);
    }
}

#[tokio::test]
async fn no_engine_to_connect_to_is_a_502_by_role() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    d.kill().await;
    let reply = post(&proxy, COMPLETIONS, STREAM).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "decode_unreachable")
    );
    // An address of an engine is none of the client's business.
    assert!(!reply.text().contains("127.0.0.1"), "{}", reply.text());
    p.kill().await;
    let reply = post(&proxy, COMPLETIONS, STREAM).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "prefill_unreachable")
    );
}

#[tokio::test]
async fn a_connection_that_the_engine_closed_for_idleness_costs_nothing() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    for _ in 0..5 {
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        // The kept connection is closed at the moment of the next request: with one engine of each
        // role, only a fresh connection to the same one can help.
        p.once(Script::Close);
        d.once(Script::Close);
    }
    assert_eq!(metric(&proxy, "retries_total{role=\"prefill\"}").await, 4.0);
    assert_eq!(metric(&proxy, "retries_total{role=\"decode\"}").await, 4.0);
}

#[tokio::test]
async fn a_prefill_answer_that_breaks_off_is_a_502() {
    let (p, d) = pair().await;
    p.always(Script::Truncated(
        r#"{"kv_transfer_params":{"#,
        Framing::Length,
    ));
    let proxy = proxy(&[&p], &[&d]).await;
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "prefill_answer_broken")
    );
    assert_eq!(d.count(), 0);
}

#[tokio::test]
async fn the_deadline_is_a_504_in_each_leg_and_frees_what_prefill_pinned() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let settings = Settings {
        request_timeout_s: Some(2),
        handover_grace_ms: Some(3_000),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    p.once(Script::Silence);
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (504, "deadline_exceeded")
    );
    crate::until("the prefill leg closed", || p.ended(0).is_some()).await;
    assert_eq!(d.count(), 0);

    d.once(Script::Silence);
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (504, "deadline_exceeded")
    );
    crate::until("the decode leg closed", || d.ended(0).is_some()).await;

    // Prefill is done just before the deadline: decode is told although nobody waits any more.
    blocks.lock().expect("blocks").clear();
    p.once(Script::After(
        Duration::from_millis(1_200),
        Box::new(Script::Prefill),
    ));
    d.once(Script::After(
        Duration::from_millis(1_500),
        Box::new(Script::Decode),
    ));
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(reply.status, 504);
    freed(&blocks).await;
    assert_eq!(d.count(), 2);
}

#[tokio::test]
async fn no_prefill_engine_is_an_error_and_decode_alone_only_where_that_was_chosen() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let start = async |on_no_prefill: Option<&str>, prefill: &[String]| {
        let settings = Settings {
            on_no_prefill: on_no_prefill.map(str::to_owned),
            admin_listen: Some("127.0.0.1:0".to_owned()),
            ..Settings::default()
        };
        proxy_with(settings, prefill, &urls(&[&d])).await
    };
    let fallbacks = "fallbacks_total{reason=\"no_prefill\"}";
    let dead = {
        let engine = Engine::prefill(&blocks).await;
        engine.kill().await;
        engine.url()
    };
    for (prefill, status, code) in [
        (vec![], 503, "no_engine"),
        (vec![dead.clone()], 502, "prefill_unreachable"),
    ] {
        let proxy = start(None, &prefill).await;
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (status, code));
        if status == 503 {
            assert_eq!(reply.headers["retry-after"], "1");
            // Where to look, on this port and on the other.
            let text = reply.text();
            let way = "GET /workers, here or on the listener of --admin-listen";
            assert!(text.contains(way), "{text}");
        }
        assert_eq!(d.count(), 0);
        assert_eq!(metric(&proxy, fallbacks).await, 0.0);
    }
    for (count, prefill) in [vec![], vec![dead]].into_iter().enumerate() {
        let proxy = start(Some("decode-only"), &prefill).await;
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(d.count(), count + 1);
        assert_eq!(d.seen()[count].text(), PROMPT, "no kv_transfer_params");
        assert_eq!(metric(&proxy, fallbacks).await, 1.0);
    }
    // An engine that answers is there, whatever it answers.
    let proxy = start(Some("decode-only"), &urls(&[&p])).await;
    for status in [500, 503, 400] {
        p.once(Script::Answer(status, "application/json", ERROR));
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, status);
    }
    assert_eq!(d.count(), 2);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(metric(&proxy, fallbacks).await, 0.0);
}
