//! Limits of legs and requests, and the queue in front of them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::client::{Client, Reply};
use crate::engine::{Blocks, Ended, Engine, Script, engines, freed, pair, pair_on};
use crate::{COMPLETIONS, PROMPT, STREAM, metric, post, proxy_with, until, urls};

fn slow(ms: u64, script: Script) -> Script {
    Script::After(Duration::from_millis(ms), Box::new(script))
}

/// A request of its own connection whose answer is waited for elsewhere.
async fn send(proxy: &Proxy, body: &str) -> JoinHandle<Reply> {
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], body.as_bytes()).await;
    tokio::spawn(async move { client.reply().await })
}

fn waiting(proxy: &Proxy) -> usize {
    let (requests, slots) = proxy.app.admission.waiting();
    requests + slots
}

#[tokio::test]
async fn a_worker_gets_no_more_legs_than_it_may_and_the_rest_wait_in_order() {
    // One at a time comes to the engine in the order of the line; of several that go out together
    // each may be on its way for as long as it likes.
    for (limit, clients) in [(4, 60), (1, 20)] {
        a_limit_holds_and_is_used(limit, clients).await;
    }
}

async fn a_limit_holds_and_is_used(limit: usize, count: usize) {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let gate = Arc::new(Semaphore::new(0));
    for _ in 0..limit {
        p.once(Script::Held(Arc::clone(&gate), Box::new(Script::Prefill)));
    }
    p.always(slow(20, Script::Prefill));
    let settings = Settings {
        prefill_requests_max: Some(limit as u32),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let mut clients = Vec::new();
    for at in 0..count {
        let body = format!(r#"{{"prompt":"{at}","max_tokens":8}}"#);
        clients.push(send(&proxy, &body).await);
        // Each has come before the next is sent.
        until("the request waits or runs", || {
            p.count() + waiting(&proxy) > at
        })
        .await;
    }
    gate.add_permits(limit);
    for client in clients {
        let reply = client.await.expect("a client");
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(p.peak(), limit);
    let seen = p.seen();
    assert_eq!(seen.len(), count);
    for (place, seen) in seen.iter().enumerate().filter(|_| limit == 1) {
        let prompt = seen.json()["prompt"].clone();
        let at: usize = prompt.as_str().expect("text").parse().expect("a number");
        assert_eq!(place, at);
    }
    assert!(blocks.lock().expect("blocks").is_empty());
    let waited = metric(&proxy, "queue_wait_seconds_count").await;
    assert_eq!(waited, (count - limit) as f64);
    assert_eq!(metric(&proxy, "queue_length{wait=\"slots\"}").await, 0.0);
}

#[tokio::test]
async fn a_limit_holds_for_each_rank_of_each_instance() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    for engine in [&p0, &p1] {
        engine.always(slow(30, Script::Prefill));
    }
    let settings = Settings {
        worker_requests_max: Some(2),
        decode_requests_max: Some(0),
        ..Settings::default()
    };
    let prefill = [format!("{},dp=2", p0.url()), p1.url()];
    let proxy = proxy_with(settings, &prefill, &urls(&[&d])).await;
    let mut clients = Vec::new();
    for _ in 0..40 {
        clients.push(send(&proxy, PROMPT).await);
    }
    for client in clients {
        assert_eq!(client.await.expect("a client").status, 200);
    }
    assert_eq!((p0.peak(), p1.peak()), (4, 2));
}

#[tokio::test]
async fn a_full_queue_is_429_and_a_long_wait_503_both_with_retry_after() {
    let (p, d) = pair().await;
    p.once(slow(2_000, Script::Prefill));
    let settings = Settings {
        worker_requests_max: Some(1),
        queue_max: Some(2),
        queue_timeout_s: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let first = send(&proxy, PROMPT).await;
    until("the first runs", || p.count() == 1).await;
    let start = Instant::now();
    let (second, third) = (send(&proxy, PROMPT).await, send(&proxy, STREAM).await);
    until("two wait", || waiting(&proxy) == 2).await;
    assert_eq!(metric(&proxy, "queue_length{wait=\"slots\"}").await, 2.0);
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (429, "too_many_requests")
    );
    assert_eq!(reply.headers["retry-after"], "1");
    for client in [second, third] {
        let reply = client.await.expect("a client");
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (503, "queue_timeout")
        );
        assert_eq!(reply.headers["retry-after"], "1");
    }
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(900), "{took:?}");
    assert_eq!(first.await.expect("a client").status, 200);
    // Nothing was sent for those who were sent away.
    assert_eq!((p.count(), d.count()), (1, 1));
    let rejects = |reason| format!("queue_rejects_total{{reason=\"{reason}\"}}");
    assert_eq!(metric(&proxy, &rejects("full")).await, 1.0);
    assert_eq!(metric(&proxy, &rejects("timeout")).await, 2.0);
    assert_eq!(metric(&proxy, "queue_wait_seconds_count").await, 0.0);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
}

#[tokio::test]
async fn requests_over_the_limit_in_all_wait_in_order_and_are_served() {
    let (p, d) = pair().await;
    p.always(slow(40, Script::Prefill));
    let settings = Settings {
        requests_max: Some(1),
        queue_max: Some(9),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let mut clients = Vec::new();
    for at in 0..10 {
        let body = format!(r#"{{"prompt":"{at}","max_tokens":8}}"#);
        clients.push(send(&proxy, &body).await);
        until("the request waits or runs", || {
            p.count() + waiting(&proxy) > at
        })
        .await;
    }
    for client in clients {
        assert_eq!(client.await.expect("a client").status, 200);
    }
    let prompts: Vec<String> = p
        .seen()
        .iter()
        .map(|seen| seen.json()["prompt"].as_str().expect("text").to_owned())
        .collect();
    assert_eq!(
        prompts,
        (0..10).map(|at| at.to_string()).collect::<Vec<_>>()
    );
    assert_eq!(p.peak(), 1);
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_makes_room_in_it_and_sends_nothing() {
    let (p, d) = pair().await;
    for (requests_max, phase) in [(4_096, "queue"), (1, "admit")] {
        let settings = Settings {
            worker_requests_max: Some(1),
            requests_max: Some(requests_max),
            ..Settings::default()
        };
        let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
        let before = p.count();
        p.once(slow(600, Script::Prefill));
        let first = send(&proxy, PROMPT).await;
        until("the first runs", || p.count() == before + 1).await;
        let mut leaver = Client::connect(proxy.address).await;
        // More than is read without asking for it.
        let body = STREAM.replace("hello", &"hello".repeat(300_000));
        leaver.post(COMPLETIONS, &[], body.as_bytes()).await;
        until("it waits", || waiting(&proxy) == 1).await;
        let last = send(&proxy, PROMPT).await;
        until("another waits", || waiting(&proxy) == 2).await;
        drop(leaver);
        let took = until("it left the queue", || waiting(&proxy) == 1).await;
        assert!(took < Duration::from_millis(300), "{took:?}");
        assert_eq!(p.count(), before + 1, "the first still runs");
        assert_eq!(first.await.expect("a client").status, 200);
        assert_eq!(last.await.expect("a client").status, 200);
        assert_eq!(p.count(), before + 2, "{phase}");
        let left = format!("client_disconnects_total{{phase=\"{phase}\"}}");
        assert_eq!(metric(&proxy, &left).await, 1.0);
    }
}

#[tokio::test]
async fn a_drain_sends_away_what_has_not_begun_and_ends_what_has() {
    let (p, d) = pair().await;
    let settings = Settings {
        worker_requests_max: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    p.once(slow(500, Script::Prefill));
    let first = send(&proxy, PROMPT).await;
    until("the first runs", || p.count() == 1).await;
    let second = send(&proxy, PROMPT).await;
    until("the second waits", || waiting(&proxy) == 1).await;
    let start = Instant::now();
    let drained = async { (proxy.drain(Duration::from_secs(10)).await, start.elapsed()) };
    let sent_away = async { (second.await.expect("a client"), start.elapsed()) };
    let ((drained, _), (reply, at)) = tokio::join!(drained, sent_away);
    assert!(drained);
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (503, "draining")
    );
    assert_eq!(reply.headers["retry-after"], "1");
    assert!(at < Duration::from_millis(300), "{at:?}");
    assert_eq!(first.await.expect("a client").status, 200);
    assert_eq!((p.count(), d.count()), (1, 1));
}

/// Blocks that wait for a decode slot would be held against a lease.
#[tokio::test]
async fn nothing_is_prefilled_before_decode_has_room() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let settings = Settings {
        decode_requests_max: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    d.once(slow(400, Script::Decode));
    let first = send(&proxy, PROMPT).await;
    until("the first decodes", || d.count() == 1).await;
    let second = send(&proxy, PROMPT).await;
    until("the second waits", || waiting(&proxy) == 1).await;
    assert_eq!((p.count(), p.ended(0)), (1, Some(Ended::Whole)));
    assert_eq!(first.await.expect("a client").status, 200);
    assert_eq!(second.await.expect("a client").status, 200);
    let waited = p.seen()[1].at - d.seen()[0].at;
    assert!(waited >= Duration::from_millis(400), "{waited:?}");
    assert_eq!((p.count(), d.count(), d.peak()), (2, 2, 1));
    freed(&blocks).await;
}

#[tokio::test]
async fn what_is_relayed_counts_against_the_limit_of_decode() {
    let (p, d) = pair().await;
    let settings = Settings {
        decode_requests_max: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    d.always(slow(50, Script::Answer(200, "application/json", "{}")));
    let mut clients = Vec::new();
    for _ in 0..6 {
        let mut client = Client::connect(proxy.address).await;
        client.post("/v1/embeddings", &[], b"{}").await;
        clients.push(tokio::spawn(async move { client.reply().await }));
    }
    for client in clients {
        assert_eq!(client.await.expect("a client").status, 200);
    }
    assert_eq!((d.count(), d.peak()), (6, 1));
}

/// A burst of one model fills its own workers and its part of the queue, and nobody else's.
#[tokio::test]
async fn a_burst_of_one_model_leaves_the_others_their_workers_and_room_in_the_queue() {
    let blocks = Blocks::default();
    let mut engines = Vec::new();
    for _ in 0..2 {
        let p = Engine::prefill(&blocks).await;
        engines.push((p, Engine::decode(&blocks).await));
    }
    let named = |url: String, at: usize| format!("{url},model={}", ["a", "b"][at]);
    let urls_of = |role: fn(&(Engine, Engine)) -> &Engine| {
        let urls = engines.iter().map(role).map(Engine::url).enumerate();
        urls.map(|(at, url)| named(url, at)).collect::<Vec<_>>()
    };
    let settings = Settings {
        prefill_requests_max: Some(1),
        queue_max: Some(4),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls_of(|pair| &pair.0), &urls_of(|pair| &pair.1)).await;
    let body = |model: &str| format!(r#"{{"model":"{model}","prompt":"hello","max_tokens":8}}"#);
    engines[0].0.always(Script::Silence);
    let mut burst = Vec::new();
    for at in 0..4 {
        burst.push(send(&proxy, &body("a")).await);
        until("it runs or waits", || {
            engines[0].0.count() + waiting(&proxy) > at
        })
        .await;
    }
    assert_eq!(waiting(&proxy), 3);
    let start = Instant::now();
    assert_eq!(post(&proxy, COMPLETIONS, &body("b")).await.status, 200);
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    // Three quarters of the queue are the burst's.
    assert_eq!(post(&proxy, COMPLETIONS, &body("a")).await.status, 429);
    engines[1].0.once(slow(300, Script::Prefill));
    let first = send(&proxy, &body("b")).await;
    until("it runs", || engines[1].0.count() == 2).await;
    let second = send(&proxy, &body("b")).await;
    until("it waits", || waiting(&proxy) == 4).await;
    for reply in [first, second] {
        assert_eq!(reply.await.expect("a client").status, 200);
    }
    assert_eq!(waiting(&proxy), 3);
}

/// Who names no model, or is relayed, may be served by any worker: it waits neither for the burst of
/// one model, nor do the others' requests wait for it.
#[tokio::test]
async fn a_request_without_a_model_stands_in_each_line_and_in_front_of_none() {
    let blocks = Blocks::default();
    let mut engines = Vec::new();
    for _ in 0..2 {
        let p = Engine::prefill(&blocks).await;
        engines.push((p, Engine::decode(&blocks).await));
    }
    let named = |url: String, at: usize| format!("{url},model={}", ["a", "b"][at]);
    let urls_of = |role: fn(&(Engine, Engine)) -> &Engine| {
        let urls = engines.iter().map(role).map(Engine::url).enumerate();
        urls.map(|(at, url)| named(url, at)).collect::<Vec<_>>()
    };
    let settings = Settings {
        prefill_requests_max: Some(1),
        decode_requests_max: Some(1),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls_of(|pair| &pair.0), &urls_of(|pair| &pair.1)).await;
    let body = |model: &str| format!(r#"{{"model":"{model}","prompt":"hello","max_tokens":8}}"#);
    let nameless = r#"{"prompt":"hello","max_tokens":8}"#;
    // Both workers of the one model are taken for good, and another of its requests waits.
    engines[0].0.always(Script::Silence);
    let mut burst = Vec::new();
    for at in 0..2 {
        burst.push(send(&proxy, &body("a")).await);
        until("it runs or waits", || {
            engines[0].0.count() + waiting(&proxy) > at
        })
        .await;
    }
    assert_eq!(waiting(&proxy), 1);
    let at_once = async |path: &str, body: &str| {
        let start = Instant::now();
        assert_eq!(post(&proxy, path, body).await.status, 200, "{path} {body}");
        let took = start.elapsed();
        assert!(took < Duration::from_secs(1), "{path} {body}: {took:?}");
    };
    for _ in 0..2 {
        at_once(COMPLETIONS, nameless).await;
        at_once("/tokenize", nameless).await;
        at_once(COMPLETIONS, &body("b")).await;
    }
    assert_eq!(
        engines[0].0.count(),
        1,
        "the burst's workers are not theirs"
    );
    // Where it has to wait, what came later for the worker that it waits for stands behind it.
    let served = Arc::new(Mutex::new(Vec::new()));
    let gate = Arc::new(Semaphore::new(0));
    let held = Script::Held(Arc::clone(&gate), Box::new(Script::Prefill));
    engines[1].0.once(held);
    let before = engines[1].0.count();
    let first = send(&proxy, &body("b")).await;
    until("it runs", || engines[1].0.count() > before).await;
    let mut waits = Vec::new();
    for (at, text) in [nameless.to_owned(), body("b")].into_iter().enumerate() {
        let (reply, served) = (send(&proxy, &text).await, Arc::clone(&served));
        waits.push(tokio::spawn(async move {
            assert_eq!(reply.await.expect("a client").status, 200);
            served.lock().expect("served").push(at);
        }));
        until("it waits", || waiting(&proxy) == 2 + at).await;
    }
    gate.add_permits(1);
    assert_eq!(first.await.expect("a client").status, 200);
    for wait in waits {
        wait.await.expect("served");
    }
    assert_eq!(*served.lock().expect("served"), [0, 1]);
    assert_eq!(waiting(&proxy), 1);
}
