//! Engines whose legs fail one after the other are kept out for a time, and tried again.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::routing::Role;
use hetero_kv_proxy::run::Proxy;
use tokio::time::sleep;

use crate::client::Client;
use crate::engine::{Blocks, Script, engines, pair};
use crate::{COMPLETIONS, PROMPT, STREAM, at_once, metric, post, proxy_with, until, urls};

const ERROR: &str = r#"{"error": {"message":"no","code":500}}"#;

fn answer(status: u16) -> Script {
    Script::Answer(status, "application/json", ERROR)
}

/// Three failures in a row keep an engine out for a second. Its probe is answered all the while.
fn settings() -> Settings {
    Settings {
        breaker_failures_max: Some(3),
        breaker_open_s: Some(1),
        health_interval_ms: Some(20),
        ..Settings::default()
    }
}

fn state(proxy: &Proxy, role: Role, at: usize) -> &'static str {
    proxy.app.view(role)[at].state.name()
}

async fn opens(proxy: &Proxy, role: &str) -> f64 {
    metric(proxy, &format!("breaker_opens_total{{role=\"{role}\"}}")).await
}

#[tokio::test]
async fn a_prefill_whose_legs_fail_is_kept_out_and_taken_back_by_one_trial() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let proxy = proxy_with(settings(), &urls(&[&p0, &p1]), &urls(&[&d])).await;
    p0.always(answer(500));
    let mut failed = 0;
    for _ in 0..30 {
        let status = post(&proxy, COMPLETIONS, PROMPT).await.status;
        failed += usize::from(status != 200);
    }
    assert_eq!((failed, p0.count()), (3, 3), "a 500 is not retried");
    assert_eq!(state(&proxy, Role::Prefill, 0), "open");
    assert_eq!(opens(&proxy, "prefill").await, 1.0);
    // It still fails when it is tried: one request notices, and the time doubles.
    sleep(Duration::from_millis(1_050)).await;
    assert_eq!(state(&proxy, Role::Prefill, 0), "half_open");
    for _ in 0..10 {
        post(&proxy, COMPLETIONS, PROMPT).await;
    }
    assert_eq!(p0.count(), 4);
    assert_eq!(opens(&proxy, "prefill").await, 2.0);
    p0.always(Script::Prefill);
    sleep(Duration::from_millis(1_050)).await;
    assert_eq!(state(&proxy, Role::Prefill, 0), "open");
    sleep(Duration::from_millis(1_000)).await;
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert!(p0.count() >= 5);
    assert_eq!(state(&proxy, Role::Prefill, 0), "healthy");
    // Nothing was computed on decode alone meanwhile.
    assert!(
        d.seen()
            .iter()
            .all(|leg| leg.text().contains("kv_transfer_params"))
    );
}

#[tokio::test]
async fn what_is_not_the_engines_fault_keeps_none_out() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let settings = Settings {
        request_timeout_s: Some(1),
        ..settings()
    };
    let proxy = proxy_with(settings, &urls(&[&p0, &p1]), &urls(&[&d])).await;
    for engine in [&p0, &p1] {
        for status in [400, 404, 422, 429, 429, 429, 429, 501] {
            engine.once(answer(status));
        }
    }
    for _ in 0..8 {
        post(&proxy, COMPLETIONS, PROMPT).await;
    }
    // Clients that leave, and one that waits for longer than it may.
    for engine in [&p0, &p1] {
        engine.always(Script::Silence);
    }
    let seen = || p0.count() + p1.count();
    for _ in 0..8 {
        let before = seen();
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        until("prefill has it", || seen() > before).await;
    }
    for _ in 0..2 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 504);
    }
    for at in [0, 1] {
        assert_eq!(state(&proxy, Role::Prefill, at), "healthy");
    }
    assert_eq!(opens(&proxy, "prefill").await, 0.0);
}

#[tokio::test]
async fn the_last_engine_of_a_role_is_tried_however_often_it_failed() {
    let (p, d) = pair().await;
    let proxy = proxy_with(settings(), &urls(&[&p]), &urls(&[&d])).await;
    p.always(answer(503));
    for _ in 0..20 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 503);
    }
    assert_eq!((p.count(), d.count()), (20, 0));
    assert_eq!(state(&proxy, Role::Prefill, 0), "open");
    p.always(Script::Prefill);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(state(&proxy, Role::Prefill, 0), "healthy");
}

#[tokio::test]
async fn a_burst_in_which_some_connections_break_keeps_none_out() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let settings = Settings {
        pool_idle_timeout_ms: Some(0),
        ..settings()
    };
    let proxy = proxy_with(settings, &urls(&[&p0, &p1]), &urls(&[&d])).await;
    for _ in 0..30 {
        p0.once(Script::Reset);
    }
    for reply in at_once(&proxy, 200, PROMPT).await {
        assert_eq!(reply.status, 200);
    }
    assert!(p0.count() >= 3, "{}", p0.count());
    assert_eq!(opens(&proxy, "prefill").await, 0.0);
}

#[tokio::test]
async fn a_prefill_without_handles_and_a_decode_whose_loads_fail_are_kept_out() {
    let ([p0, p1], [d0, d1]) = engines(&Blocks::default()).await;
    let proxy = proxy_with(settings(), &urls(&[&p0, &p1]), &urls(&[&d0, &d1])).await;
    p0.always(Script::Answer(200, "application/json", r#"{"choices":[]}"#));
    for _ in 0..12 {
        post(&proxy, COMPLETIONS, PROMPT).await;
    }
    assert_eq!((p0.count(), state(&proxy, Role::Prefill, 0)), (3, "open"));
    // An engine that fails a load says so with 500, or in the first event of a stream.
    d0.once(answer(500));
    d0.once(answer(500));
    d0.always(Script::Stream(
        vec!["data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n"],
        Duration::ZERO,
    ));
    let before = d0.count();
    for _ in 0..12 {
        post(&proxy, COMPLETIONS, STREAM).await;
    }
    assert_eq!(
        (d0.count() - before, state(&proxy, Role::Decode, 0)),
        (3, "open")
    );
    let before = d1.count();
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!(d1.count() - before, 4);
}
