//! What `/metrics` says of requests, workers and pairs.

use std::sync::Arc;
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use tokio::sync::Semaphore;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script, engines, pair};
use crate::{
    COMPLETIONS, PROMPT, STREAM, metric, metric_sum, post, proxy, proxy_with, soon, until, urls,
};

const PAUSE: Duration = Duration::from_millis(40);

/// The sum and the count of a histogram's one series.
async fn timed(proxy: &Proxy, name: &str, labels: &str) -> (f64, f64) {
    let sum = metric(proxy, &format!("{name}_sum{{{labels}}}")).await;
    (
        sum,
        metric(proxy, &format!("{name}_count{{{labels}}}")).await,
    )
}

#[tokio::test]
async fn a_request_is_timed_by_its_workers_and_their_pair() {
    let (p, d) = pair().await;
    p.always(Script::After(2 * PAUSE, Box::new(Script::Prefill)));
    let chunks = vec!["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"];
    let stream = Script::Stream(chunks, PAUSE);
    d.always(Script::After(3 * PAUSE, Box::new(stream)));
    let proxy = proxy(&[&p], &[&d]).await;
    assert!(post(&proxy, COMPLETIONS, STREAM).await.whole);

    let (prefill, decode) = (p.url(), d.url());
    let of = |url: &str| format!("instance=\"{url}\"");
    let pair = format!("prefill=\"{prefill}\",decode=\"{decode}\"");
    let role = |role: &str, url: &str| format!("role=\"{role}\",instance=\"{url}\"");
    let pause = PAUSE.as_secs_f64();
    // (name, labels, how often, at least so many pauses and no more than a few above)
    let expected = [
        ("queue_seconds", role("prefill", &prefill), 1.0, 0.0),
        ("prefill_leg_seconds", of(&prefill), 1.0, 2.0),
        ("decode_head_seconds", of(&decode), 1.0, 3.0),
        ("handover_seconds", pair, 1.0, 3.0),
        ("ttft_seconds", of(&decode), 1.0, 6.0),
        // Three chunks have two gaps.
        ("inter_token_seconds", of(&decode), 2.0, 2.0),
        ("decode_leg_seconds", of(&decode), 1.0, 6.0),
        (
            "request_seconds",
            "route=\"/v1/completions\"".to_owned(),
            1.0,
            8.0,
        ),
    ];
    for (name, labels, count, pauses) in expected {
        let (sum, counted) = timed(&proxy, name, &labels).await;
        assert_eq!(counted, count, "{name}");
        let least = pauses * pause;
        assert!(
            (0.98 * least..least + 2.0).contains(&sum),
            "{name}: {sum} s"
        );
    }
    // No decode slot was waited for before: it is chosen when prefill has answered.
    let (_, counted) = timed(&proxy, "queue_seconds", &role("decode", &decode)).await;
    assert_eq!(counted, 0.0);
    for (name, url) in [("prefill", &prefill), ("decode", &decode)] {
        let labels = role(name, url);
        let ok = format!("leg_requests_total{{{labels},outcome=\"ok\"}}");
        assert_eq!(metric(&proxy, &ok).await, 1.0);
    }
}

#[tokio::test]
async fn a_failed_hand_over_is_counted_by_its_pair() {
    let ([p], [d, dead]) = engines(&Blocks::default()).await;
    let proxy = proxy(&[&p], &[&dead, &d]).await;
    let failures = |engine: &Engine| {
        let (prefill, decode) = (p.url(), engine.url());
        format!("handover_failures_total{{prefill=\"{prefill}\",decode=\"{decode}\"}}")
    };
    dead.kill().await;
    // Stepped over.
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(metric(&proxy, &failures(&dead)).await, 1.0);
    // The request's own fault is nobody's failure.
    d.once(Script::Answer(400, "application/json", "{}"));
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 400);
    assert_eq!(metric(&proxy, &failures(&d)).await, 0.0);
    // Its blocks are released by a further leg.
    until("the release is there", || d.count() == 3).await;
    d.once(Script::Answer(500, "application/json", "{}"));
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 500);
    assert_eq!(metric(&proxy, &failures(&d)).await, 1.0);
}

#[tokio::test]
async fn what_is_held_is_shown_and_is_nothing_at_rest() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let held = async || {
        let mut held = Vec::new();
        for name in ["requests_running", "kept_transfers", "in_flight"] {
            held.push(metric_sum(&proxy, name).await);
        }
        held
    };
    assert_eq!(held().await, [0.0, 0.0, 0.0]);
    let gate = Arc::new(Semaphore::new(0));
    d.always(Script::Gated(vec!["data: [DONE]\n\n"], Arc::clone(&gate)));
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
        client.head().await.expect("a head");
        clients.push(client);
    }
    assert_eq!(held().await, [3.0, 3.0, 3.0]);
    // One leaves, the others end, and one breaks.
    clients.pop();
    gate.add_permits(3);
    for mut client in clients {
        while client.chunk().await.is_some_and(|chunk| !chunk.is_empty()) {}
    }
    d.always(Script::StreamThenClose(vec!["data: 1\n\n"]));
    post(&proxy, COMPLETIONS, STREAM).await;
    p.once(Script::Reset);
    post(&proxy, COMPLETIONS, STREAM).await;
    let idle = || {
        let views = proxy.app.view(hetero_kv_proxy::routing::Role::Decode);
        views[0].in_flight_by_rank == [0]
    };
    until("all legs have ended", idle).await;
    assert_eq!(held().await, [0.0, 0.0, 0.0]);
    assert_eq!(metric_sum(&proxy, "transfers_left_total").await, 0.0);
}

#[tokio::test]
async fn transfers_that_decode_never_took_are_counted() {
    let (p, d) = pair().await;
    // Longer than what decode takes for 20 ms, also where many wait for a core.
    let settings = Settings {
        handover_grace_ms: Some(3_000),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let left = format!("transfers_left_total{{instance=\"{}\"}}", p.url());
    // Taken: by an answer, by the first byte after the client left.
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    d.once(Script::After(
        Duration::from_millis(20),
        Box::new(Script::Decode),
    ));
    let leave = async |at: usize| {
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        until("decode has the leg", || d.count() == at).await;
        drop(client);
        until("the leg has ended", || d.ended(at - 1).is_some()).await;
    };
    leave(2).await;
    // Not kept: prefill refused, or has no handle.
    p.once(Script::Answer(400, "application/json", "{}"));
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 400);
    p.once(Script::Answer(200, "application/json", "{}"));
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 502);
    assert_eq!(metric(&proxy, &left).await, 0.0);
    // Kept, and left: decode says nothing within the grace, refuses, begins with an error.
    d.once(Script::Silence);
    leave(3).await;
    soon("the transfer is left", async || {
        metric(&proxy, &left).await == 1.0
    })
    .await;
    d.once(Script::Answer(500, "application/json", "{}"));
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 500);
    assert_eq!(metric(&proxy, &left).await, 2.0);
    d.once(Script::Stream(
        vec!["data: {\"error\":{\"code\":500}}\n\n"],
        Duration::ZERO,
    ));
    post(&proxy, COMPLETIONS, STREAM).await;
    assert_eq!(metric(&proxy, &left).await, 3.0);
}
