//! Workers that register, are drained, removed, and change their role, while requests run.

use std::sync::Arc;
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use crate::client::{Client, Reply};
use crate::engine::{Blocks, Ended, Engine, Script};
use crate::{COMPLETIONS, PROMPT, STREAM, metric, post, proxy_with, until};

const CHUNKS: [&str; 2] = ["data: {\"a\":1}\n\n", "data: [DONE]\n\n"];

/// A proxy with a listener for administrators, that probes often.
async fn managed(prefill: &[&Engine], decode: &[&Engine]) -> Proxy {
    managed_with(Settings::default(), prefill, decode).await
}

async fn managed_with(mut settings: Settings, prefill: &[&Engine], decode: &[&Engine]) -> Proxy {
    settings.admin_listen = Some("127.0.0.1:0".to_owned());
    settings.health_interval_ms.get_or_insert(20);
    proxy_with(settings, &crate::urls(prefill), &crate::urls(decode)).await
}

async fn admin(proxy: &Proxy) -> Client {
    Client::connect(proxy.admin_address.expect("a listener for administrators")).await
}

async fn tell(proxy: &Proxy, path: &str, body: &Value) -> Reply {
    let mut client = admin(proxy).await;
    client.post(path, &[], body.to_string().as_bytes()).await;
    client.reply().await
}

async fn look(proxy: &Proxy, path: &str) -> Reply {
    let mut client = admin(proxy).await;
    client.get(path).await;
    client.reply().await
}

async fn delete(proxy: &Proxy, path: &str) -> Reply {
    let mut client = admin(proxy).await;
    client.delete(path).await;
    client.reply().await
}

async fn list(proxy: &Proxy) -> Vec<Value> {
    let reply = look(proxy, "/workers").await;
    reply.json().as_array().expect("a list").clone()
}

async fn ids(proxy: &Proxy) -> Vec<String> {
    let id = |worker: &Value| worker["id"].as_str().expect("an id").to_owned();
    list(proxy).await.iter().map(id).collect()
}

/// One worker as `/workers` shows it; null where it does not.
async fn worker(proxy: &Proxy, id: &str) -> Value {
    let workers = list(proxy).await;
    let found = workers.into_iter().find(|worker| worker["id"] == id);
    found.unwrap_or(Value::Null)
}

/// Registers, or beats, and returns the status and the worker.
async fn register(proxy: &Proxy, role: &str, engine: &Engine, more: Value) -> (u16, Value) {
    let mut body = json!({"role": role, "url": engine.url()});
    for (name, value) in more.as_object().expect("members") {
        body[name] = value.clone();
    }
    let reply = tell(proxy, "/v1/workers", &body).await;
    (reply.status, reply.json())
}

/// Waits until a worker takes legs.
async fn routable(proxy: &Proxy, id: &str) {
    let start = Instant::now();
    while worker(proxy, id).await["routable"] != json!(true) {
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{id} takes no legs"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until a worker is not listed any more.
async fn gone(proxy: &Proxy, id: &str) -> Duration {
    let start = Instant::now();
    while !worker(proxy, id).await.is_null() {
        assert!(start.elapsed() < Duration::from_secs(5), "{id} does not go");
        sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}

/// A stream whose head has come and whose chunks wait.
async fn stream(proxy: &Proxy) -> Client {
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client
}

async fn pair() -> (Blocks, Engine, Engine) {
    let blocks = Blocks::default();
    let (p, d) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    (blocks, p, d)
}

#[tokio::test]
async fn a_worker_registers_and_serves_once_its_probe_answers() {
    let (_blocks, p, d) = pair().await;
    let proxy = managed(&[], &[]).await;
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (503, "no_engine")
    );
    assert!(reply.headers.contains_key("retry-after"));

    d.set_healthy(false);
    let (status, told) = register(&proxy, "prefill", &p, json!({})).await;
    assert_eq!((status, &told["id"]), (201, &json!("prefill-0")));
    let (status, told) = register(&proxy, "decode", &d, json!({"dp": 2, "rank0": 4})).await;
    assert_eq!((status, &told["id"]), (201, &json!("decode-0")));
    assert_eq!(
        (&told["source"], &told["dp"], &told["rank0"]),
        (&json!("registered"), &json!(2), &json!(4))
    );
    routable(&proxy, "prefill-0").await;
    // Alive, since it registers and beats, and not ready: nothing is sent to it.
    sleep(Duration::from_millis(150)).await;
    assert_eq!(
        register(&proxy, "decode", &d, json!({"dp": 2, "rank0": 4}))
            .await
            .0,
        200
    );
    assert_eq!(worker(&proxy, "decode-0").await["routable"], json!(false));
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 503);
    assert_eq!(d.count(), 0);

    d.set_healthy(true);
    routable(&proxy, "decode-0").await;
    for _ in 0..2 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    let ranks: Vec<Option<String>> = d
        .seen()
        .iter()
        .map(|seen| seen.rank().map(str::to_owned))
        .collect();
    assert_eq!(ranks, [Some("4".to_owned()), Some("5".to_owned())]);

    // Ready no more, it is left alone again, and not tried as a last resort.
    d.set_healthy(false);
    let start = Instant::now();
    while worker(&proxy, "decode-0").await["routable"] == json!(true) {
        assert!(start.elapsed() < Duration::from_secs(5));
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 503);
    assert_eq!(d.count(), 2);
}

#[tokio::test]
async fn clients_do_not_reach_administration_nor_administrators_the_engines() {
    let (_blocks, p, d) = pair().await;
    let proxy = managed(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    for path in ["/v1/workers", "/v1/workers/decode-0/drain"] {
        client.post(path, &[], b"{}").await;
        let reply = client.reply().await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (404, "unknown_path")
        );
    }
    client.delete("/v1/workers/decode-0").await;
    assert_eq!(client.reply().await.status, 404);
    for path in [COMPLETIONS, "/abort_requests", "/start_profile"] {
        let reply = tell(&proxy, path, &json!({"prompt": "x"})).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (404, "unknown_path")
        );
    }
    assert_eq!((p.count(), d.count()), (0, 0));
    assert_eq!(ids(&proxy).await, ["prefill-0", "decode-0"]);
}

#[tokio::test]
async fn a_worker_that_is_not_heard_of_is_drained_out_and_its_streams_end_whole() {
    let (blocks, p, d) = pair().await;
    let gate = Arc::new(Semaphore::new(0));
    let proxy = managed(&[&p], &[]).await;
    let beat = json!({"heartbeat_interval_ms": 300});
    let (_, told) = register(&proxy, "decode", &d, beat.clone()).await;
    assert!(told["expires_in_ms"].as_u64() <= Some(900));
    routable(&proxy, "decode-0").await;
    // Longer than it lives without.
    for _ in 0..14 {
        sleep(Duration::from_millis(90)).await;
        let (status, told) = register(&proxy, "decode", &d, beat.clone()).await;
        assert_eq!((status, &told["id"]), (200, &json!("decode-0")));
    }
    d.once(Script::Gated(CHUNKS.to_vec(), Arc::clone(&gate)));
    let mut running = stream(&proxy).await;
    until("the stream is at its engine", || d.count() == 1).await;
    let silent = Instant::now();
    while worker(&proxy, "decode-0").await["standing"] != json!("leaving") {
        assert!(
            silent.elapsed() < Duration::from_secs(5),
            "it does not expire"
        );
        sleep(Duration::from_millis(5)).await;
    }
    assert!(silent.elapsed() >= Duration::from_millis(700), "too early");
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 503);
    gate.add_permits(2);
    let reply = running.reply().await;
    assert!(reply.whole && reply.text().ends_with("data: [DONE]\n\n"));
    gone(&proxy, "decode-0").await;
    assert_eq!(d.count(), 1);
    // Of a worker that has gone no gauge is left, nor any counter of its legs.
    let mut client = Client::connect(proxy.address).await;
    client.get("/metrics").await;
    let text = client.reply().await.text();
    assert!(!text.contains(&d.url()), "{text}");
    assert!(text.contains(&p.url()));

    // Heard of again, it is another one.
    let (status, told) = register(&proxy, "decode", &d, beat).await;
    assert_eq!((status, &told["id"]), (201, &json!("decode-1")));
    routable(&proxy, "decode-1").await;
    blocks.lock().expect("blocks").clear();
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
}

#[tokio::test]
async fn draining_under_50_streams_ends_them_all_and_begins_none() {
    let blocks = Blocks::default();
    let p = Engine::prefill(&blocks).await;
    let gate = Arc::new(Semaphore::new(0));
    let script = Script::Gated(CHUNKS.to_vec(), Arc::clone(&gate));
    let (a, b) = (
        Engine::start(script.clone(), &blocks).await,
        Engine::start(script, &blocks).await,
    );
    let proxy = managed(&[&p], &[&a, &b]).await;
    let mut streams = Vec::new();
    for _ in 0..50 {
        streams.push(stream(&proxy).await);
    }
    until("50 streams run", || a.count() + b.count() == 50).await;
    assert_eq!((a.count(), b.count()), (25, 25));

    let reply = tell(&proxy, "/v1/workers/decode-0/drain", &json!({})).await;
    let told = reply.json();
    assert_eq!(
        (reply.status, &told["standing"], &told["in_flight"]),
        (200, &json!("drained"), &json!(25))
    );
    // With a wait it answers when the last one has ended.
    let address = proxy.admin_address.expect("a listener");
    let waiting = tokio::spawn(async move {
        let mut client = Client::connect(address).await;
        client
            .post("/v1/workers/decode-0/drain?wait_s=15", &[], b"")
            .await;
        client.reply().await
    });
    for _ in 0..30 {
        streams.push(stream(&proxy).await);
    }
    until("30 more run", || a.count() + b.count() == 80).await;
    assert_eq!(a.count(), 25, "none is begun on the drained one");
    assert!(!waiting.is_finished());
    gate.add_permits(2 * 80);
    for mut stream in streams {
        let reply = stream.reply().await;
        assert!(reply.whole && reply.text().ends_with("data: [DONE]\n\n"));
    }
    let told = waiting.await.expect("an answer").json();
    assert_eq!(
        (&told["standing"], &told["in_flight"], &told["routable"]),
        (&json!("drained"), &json!(0), &json!(false))
    );

    a.always(Script::Decode);
    b.always(Script::Decode);
    let reply = tell(&proxy, "/v1/workers/decode-0/undrain", &json!({})).await;
    assert_eq!(reply.json()["standing"], json!("serving"));
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!(a.count(), 27);
    let ready = format!("instance_ready{{role=\"decode\",instance=\"{}\"}}", a.url());
    assert_eq!(metric(&proxy, &ready).await, 1.0);
}

#[tokio::test]
async fn removing_under_load_loses_no_request_and_waits_for_the_last() {
    let blocks = Blocks::default();
    let p = Engine::prefill(&blocks).await;
    let (a, b) = (Engine::decode(&blocks).await, Engine::decode(&blocks).await);
    let gate = Arc::new(Semaphore::new(0));
    let proxy = Arc::new(managed(&[&p], &[&a, &b]).await);
    a.once(Script::Gated(CHUNKS.to_vec(), Arc::clone(&gate)));
    let mut running = stream(&proxy).await;
    until("the stream is at its engine", || a.count() == 1).await;

    let load: Vec<_> = (0..4)
        .map(|_| {
            let proxy = Arc::clone(&proxy);
            tokio::spawn(async move {
                for _ in 0..40 {
                    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
                }
            })
        })
        .collect();
    until("both serve the load", || a.count() > 5 && b.count() > 5).await;
    let reply = delete(&proxy, "/v1/workers/decode-0?wait_s=0").await;
    assert_eq!(
        (reply.status, &reply.json()["removed"]),
        (202, &json!(false))
    );
    let known = a.count();
    for task in load {
        task.await.expect("no request is lost");
    }
    // A leg that had its slot may still have been on its way.
    assert!(a.count() <= known + 4, "{} after {known}", a.count());
    assert_eq!(worker(&proxy, "decode-0").await["in_flight"], json!(1));
    for path in ["drain", "undrain"] {
        let reply = tell(&proxy, &format!("/v1/workers/decode-0/{path}"), &json!({})).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (409, "worker_leaving")
        );
    }
    let (status, _) = register(&proxy, "decode", &a, json!({})).await;
    assert_eq!(status, 409, "it is not taken back in while it goes");

    let address = proxy.admin_address.expect("a listener");
    let waiting = tokio::spawn(async move {
        let mut client = Client::connect(address).await;
        client.delete("/v1/workers/decode-0").await;
        client.reply().await
    });
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    gate.add_permits(2);
    assert!(running.reply().await.whole);
    let reply = waiting.await.expect("an answer");
    assert_eq!(
        (reply.status, &reply.json()["removed"]),
        (200, &json!(true))
    );
    assert_eq!(ids(&proxy).await, ["prefill-0", "decode-1"]);
    let reply = delete(&proxy, "/v1/workers/decode-0").await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (404, "unknown_worker")
    );
}

#[tokio::test]
async fn a_leg_outlives_the_forced_removal_of_its_worker_and_releases_nobody_elses_slot() {
    let blocks = Blocks::default();
    let p = Engine::prefill(&blocks).await;
    let gate = Arc::new(Semaphore::new(0));
    let first = Arc::new(Semaphore::new(0));
    let script = |gate| Script::Gated(CHUNKS.to_vec(), Arc::clone(gate));
    let (a, b) = (
        Engine::start(script(&first), &blocks).await,
        Engine::start(script(&gate), &blocks).await,
    );
    let proxy = managed(&[&p], &[&a, &b]).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        streams.push(stream(&proxy).await);
    }
    until("4 streams run", || (a.count(), b.count()) == (2, 2)).await;
    let reply = delete(&proxy, "/v1/workers/decode-0?force=true").await;
    assert_eq!(
        (reply.status, &reply.json()["removed"]),
        (200, &json!(true))
    );
    a.always(script(&gate));
    // The same address again, while legs of the removed one run.
    register(&proxy, "decode", &a, json!({})).await;
    routable(&proxy, "decode-2").await;
    streams.push(stream(&proxy).await);
    streams.push(stream(&proxy).await);
    until("2 more run", || a.count() + b.count() == 6).await;
    let counts = async || {
        let workers = list(&proxy).await;
        let count = |worker: &Value| worker["in_flight"].as_u64().expect("a count");
        workers.iter().map(count).collect::<Vec<_>>()
    };
    assert_eq!(counts().await, [0, 2, 2]);
    // The two of the removed one end, and the counts of the others stay.
    first.add_permits(2 * 2);
    until("they end", || a.ended(0).is_some() && a.ended(1).is_some()).await;
    sleep(Duration::from_millis(100)).await;
    assert_eq!(counts().await, [0, 2, 2]);
    gate.add_permits(2 * 4);
    for mut stream in streams {
        assert!(stream.reply().await.whole);
    }
    assert_eq!(counts().await, [0, 0, 0]);
}

#[tokio::test]
async fn another_start_of_an_engine_at_its_address_is_another_worker() {
    let (blocks, p, d) = pair().await;
    let gate = Arc::new(Semaphore::new(0));
    let proxy = managed(&[&p], &[]).await;
    let first = json!({"engine_id": "start-1"});
    let (_, told) = register(&proxy, "decode", &d, first.clone()).await;
    assert_eq!(told["engine_id"], json!("start-1"));
    routable(&proxy, "decode-0").await;
    d.once(Script::Gated(CHUNKS.to_vec(), Arc::clone(&gate)));
    let mut running = stream(&proxy).await;
    until("the stream is at its engine", || d.count() == 1).await;
    // What is known of it stays over its heartbeats.
    let (status, told) = register(&proxy, "decode", &d, first).await;
    assert_eq!(status, 200);
    assert_eq!(
        (&told["id"], &told["in_flight"], &told["state"]),
        (&json!("decode-0"), &json!(1), &json!("healthy"))
    );

    // Another start: nothing is known of it, so nothing is sent to it until its probe answers.
    d.set_healthy(false);
    let second = json!({"engine_id": "start-2"});
    let (status, told) = register(&proxy, "decode", &d, second.clone()).await;
    assert_eq!(
        (status, &told["id"], &told["routable"]),
        (201, &json!("decode-1"), &json!(false))
    );
    assert_eq!(
        worker(&proxy, "decode-0").await["standing"],
        json!("leaving")
    );
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 503);
    d.set_healthy(true);
    routable(&proxy, "decode-1").await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    gate.add_permits(2);
    assert!(running.reply().await.whole);
    gone(&proxy, "decode-0").await;

    // Other sizes are another worker too; what an operator drained stays drained.
    tell(&proxy, "/v1/workers/decode-1/drain", &json!({})).await;
    let sizes = json!({"engine_id": "start-2", "dp": 2});
    let (status, told) = register(&proxy, "decode", &d, sizes).await;
    assert_eq!(
        (status, &told["id"], &told["dp"], &told["standing"]),
        (201, &json!("decode-2"), &json!(2), &json!("drained"))
    );
    drop(blocks);
}

#[tokio::test]
async fn a_worker_given_by_a_flag_may_register_and_never_expires() {
    let (_blocks, p, d) = pair().await;
    let proxy = managed(&[&p], &[&d]).await;
    let beat = json!({"heartbeat_interval_ms": 100, "engine_id": "start-1"});
    let (status, told) = register(&proxy, "decode", &d, beat).await;
    assert_eq!(
        (status, &told["id"], &told["source"], &told["expires_in_ms"]),
        (200, &json!("decode-0"), &json!("flag"), &Value::Null)
    );
    sleep(Duration::from_millis(500)).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    let (status, told) = register(&proxy, "decode", &d, json!({"engine_id": "start-2"})).await;
    assert_eq!(
        (status, &told["id"], &told["source"]),
        (201, &json!("decode-1"), &json!("flag"))
    );
    assert_eq!(ids(&proxy).await, ["prefill-0", "decode-1"]);
}

#[tokio::test]
async fn a_role_changes_after_the_last_leg_and_stays_changed_over_heartbeats() {
    let blocks = Blocks::default();
    let (p, q, d) = (
        Engine::prefill(&blocks).await,
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    let proxy = managed(&[&p], &[&d]).await;
    let beat = json!({"engine_id": "start-1"});
    register(&proxy, "prefill", &q, beat.clone()).await;
    routable(&proxy, "prefill-1").await;
    q.once(Script::Silence);
    p.once(Script::Silence);
    let (one, two) = (stream(&proxy).await, stream(&proxy).await);
    until("a leg runs on both", || (p.count(), q.count()) == (1, 1)).await;

    // Legs that do not end in time: it stays what it was, and serves.
    let role = "/v1/workers/prefill-1/role?wait_s=0";
    let reply = tell(&proxy, role, &json!({"role": "decode"})).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (409, "worker_busy")
    );
    assert_eq!(worker(&proxy, "prefill-1").await["routable"], json!(true));

    let address = proxy.admin_address.expect("a listener");
    let waiting = tokio::spawn(async move {
        let mut client = Client::connect(address).await;
        let path = "/v1/workers/prefill-1/role?wait_s=15";
        client.post(path, &[], br#"{"role":"decode"}"#).await;
        client.reply().await
    });
    let start = Instant::now();
    while worker(&proxy, "prefill-1").await["standing"] != json!("leaving") {
        assert!(start.elapsed() < Duration::from_secs(5));
        sleep(Duration::from_millis(5)).await;
    }
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!(q.count(), 1, "no leg is begun there");
    assert!(!waiting.is_finished());
    q.always(Script::Decode);
    drop((one, two));
    let reply = waiting.await.expect("an answer");
    let told = reply.json();
    assert_eq!(
        (reply.status, &told["id"], &told["role"], &told["standing"]),
        (200, &json!("decode-1"), &json!("decode"), &json!("serving"))
    );
    routable(&proxy, "decode-1").await;
    // The engine goes on saying what it was started as.
    let (status, told) = register(&proxy, "prefill", &q, beat).await;
    assert_eq!((status, &told["id"]), (200, &json!("decode-1")));
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert!(q.count() > 1, "decode legs go there");
    assert_eq!(ids(&proxy).await, ["prefill-0", "decode-0", "decode-1"]);
    // To change to what it is changes nothing.
    let same = tell(
        &proxy,
        "/v1/workers/decode-1/role",
        &json!({"role": "decode"}),
    )
    .await;
    assert_eq!((same.status, &same.json()["id"]), (200, &json!("decode-1")));
    until("clients that left are seen", || {
        q.ended(0) == Some(Ended::ProxyClosed)
    })
    .await;
}

#[tokio::test]
async fn a_prefill_worker_is_not_gone_before_decode_has_its_blocks() {
    let (_blocks, p, d) = pair().await;
    let gate = Arc::new(Semaphore::new(0));
    let proxy = managed(&[&p], &[&d]).await;
    d.once(Script::Gated(CHUNKS.to_vec(), Arc::clone(&gate)));
    let mut running = stream(&proxy).await;
    until("decode is reached", || d.count() == 1).await;
    let reply = delete(&proxy, "/v1/workers/prefill-0?wait_s=0").await;
    assert_eq!(reply.status, 202, "its blocks are not read yet");
    let told = worker(&proxy, "prefill-0").await;
    assert_eq!(
        (&told["in_flight"], &told["kept_transfers"]),
        (&json!(0), &json!(1))
    );
    // The first chunk proves that decode has read them, the rest of the stream is not waited for.
    gate.add_permits(1);
    gone(&proxy, "prefill-0").await;
    gate.add_permits(1);
    assert!(running.reply().await.whole);
}

#[tokio::test]
async fn bad_bodies_and_orders_name_their_field_and_change_nothing() {
    let (_blocks, p, d) = pair().await;
    let proxy = managed(&[&p], &[&d]).await;
    let deep = format!(
        r#"{{"role":"decode","url":{}1{}}}"#,
        "[".repeat(5_000),
        "]".repeat(5_000)
    );
    let long = format!(
        r#"{{"role":"decode","url":"http://h/{}"}}"#,
        "x".repeat(2_000)
    );
    let mut client = admin(&proxy).await;
    for (body, code, param) in [
        ("", "invalid_json", None),
        ("[1]", "invalid_json", None),
        ("{", "invalid_json", None),
        (
            r#"{"role":"decode","role":"prefill"}"#,
            "invalid_json",
            None,
        ),
        (deep.as_str(), "invalid_json", None),
        ("{}", "missing_field", Some("role")),
        (r#"{"role":"decode"}"#, "missing_field", Some("url")),
        (
            r#"{"role":"both","url":"http://h:1"}"#,
            "invalid_field",
            Some("role"),
        ),
        (
            r#"{"role":"decode","url":"https://h:1"}"#,
            "invalid_field",
            Some("url"),
        ),
        (
            r#"{"role":"decode","url":"http://h:0"}"#,
            "invalid_field",
            Some("url"),
        ),
        (
            r#"{"role":"decode","url":"http://h:1,dp=2"}"#,
            "invalid_field",
            Some("url"),
        ),
        (r#"{"role":"decode","url":7}"#, "invalid_field", Some("url")),
        (long.as_str(), "invalid_field", Some("url")),
        (
            r#"{"role":"decode","url":"http://h:1","dp":0}"#,
            "invalid_field",
            Some("dp"),
        ),
        (
            r#"{"role":"decode","url":"http://h:1","dp":-1}"#,
            "invalid_field",
            Some("dp"),
        ),
        (
            r#"{"role":"decode","url":"http://h:1","dp":1.5}"#,
            "invalid_field",
            Some("dp"),
        ),
        (
            r#"{"role":"decode","url":"http://h:1","dpp":1}"#,
            "unknown_field",
            Some("dpp"),
        ),
        (
            r#"{"role":"decode","url":"http://h:1","engine_id":"a b"}"#,
            "invalid_field",
            Some("engine_id"),
        ),
        (
            r#"{"role":"decode","url":"http://h:1","ttl_ms":14999}"#,
            "invalid_field",
            Some("ttl_ms"),
        ),
        (
            r#"{"role":"decode","url":"http://h:1","heartbeat_interval_ms":1}"#,
            "invalid_field",
            Some("heartbeat_interval_ms"),
        ),
        // What a flag would be refused for.
        (
            r#"{"role":"decode","url":"http://h:1","tp":8}"#,
            "worker_refused",
            Some("tp"),
        ),
    ] {
        client.post("/v1/workers", &[], body.as_bytes()).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, 400, "{body}");
        assert_eq!(reply.error_code(), code, "{body}");
        assert_eq!(reply.json()["error"]["param"].as_str(), param, "{body}");
    }
    for (path, body, status, code) in [
        ("/v1/workers/decode-7/drain", "", 404, "unknown_worker"),
        (
            "/v1/workers/decode-0/drain?wait=1",
            "",
            400,
            "invalid_query",
        ),
        (
            "/v1/workers/decode-0/drain?wait_s=x",
            "",
            400,
            "invalid_query",
        ),
        (
            "/v1/workers/decode-0/drain?wait_s=9999",
            "",
            400,
            "invalid_query",
        ),
        (
            "/v1/workers/decode-0/drain?force=true",
            "",
            400,
            "invalid_query",
        ),
        ("/v1/workers/decode-0/role", "{}", 400, "missing_field"),
        (
            "/v1/workers/decode-0/role",
            r#"{"role":1}"#,
            400,
            "invalid_field",
        ),
        ("/v1/workers/decode-0", "", 405, "method_not_allowed"),
        ("/v1/workers/", "", 405, "method_not_allowed"),
        ("/workers", "", 405, "method_not_allowed"),
        ("/v1/workersx", "", 404, "unknown_path"),
        ("/v1/workers/decode-0/x", "", 404, "unknown_path"),
    ] {
        client.post(path, &[], body.as_bytes()).await;
        let reply = client.reply().await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (status, code),
            "{path}"
        );
    }
    let large = "x".repeat((64 << 10) + 1);
    client.post("/v1/workers", &[], large.as_bytes()).await;
    assert_eq!(client.reply().await.status, 413);
    let views = list(&proxy).await;
    assert!(
        views
            .iter()
            .all(|view| view["standing"] == json!("serving"))
    );
    assert_eq!(views.len(), 2);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
}

#[tokio::test]
async fn a_registration_that_never_ends_is_given_up() {
    let (_blocks, p, d) = pair().await;
    let settings = Settings {
        body_read_timeout_s: Some(1),
        ..Settings::default()
    };
    let proxy = managed_with(settings, &[&p], &[&d]).await;
    let mut client = admin(&proxy).await;
    client
        .raw(b"POST /v1/workers HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{\"role\"")
        .await;
    let start = Instant::now();
    let mut writer = 0;
    // A byte now and then does not keep it alive.
    let reply = loop {
        tokio::select! {
            reply = client.head() => break reply.expect("an answer"),
            () = sleep(Duration::from_millis(300)) => writer += 1,
        }
        assert!(writer < 20);
        client.raw(b" ").await;
    };
    assert_eq!(reply.status, 408);
    assert!(start.elapsed() < Duration::from_secs(4));
}

#[tokio::test]
async fn a_worker_that_the_connector_cannot_serve_is_refused_with_the_reason() {
    let (_blocks, p, d) = pair().await;
    let settings = Settings {
        connector: Some("moriio-write".to_owned()),
        ..Settings::default()
    };
    let proxy = managed_with(settings, &[&p], &[&d]).await;
    for (more, part) in [
        (json!({"dp": 2, "tp": 2}), "share"),
        (json!({"dp": 2, "dp_size": 4}), "moriio-read"),
    ] {
        let (status, told) = register(&proxy, "decode", &d, more).await;
        let message = told["error"]["message"].as_str().expect("a message");
        assert_eq!(
            (status, &told["error"]["code"]),
            (400, &json!("worker_refused"))
        );
        assert!(message.contains(part), "{message}");
    }
    let alone = Settings {
        connector: Some("none".to_owned()),
        ..Settings::default()
    };
    let proxy = managed_with(alone, &[], &[&d]).await;
    let (status, told) = register(&proxy, "prefill", &p, json!({})).await;
    assert_eq!((status, &told["error"]["param"]), (400, &json!("role")));
    let reply = tell(
        &proxy,
        "/v1/workers/decode-0/role",
        &json!({"role": "prefill"}),
    )
    .await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (400, "worker_refused")
    );
    assert_eq!(ids(&proxy).await, ["decode-0"]);
}

#[tokio::test]
async fn what_a_connector_says_of_itself_is_shown_and_changes_no_worker() {
    let (_blocks, p, _d) = pair().await;
    let proxy = managed(&[], &[]).await;
    let kv =
        json!({"connector": "hetero", "block_size": 16, "control": "10.0.0.1:7000", "mla": false});
    let compat = json!({"model": "m", "dtype": "bfloat16"});
    let (status, told) = register(&proxy, "prefill", &p, json!({"kv": kv, "compat": compat})).await;
    assert_eq!((status, &told["kv"], &told["compat"]), (201, &kv, &compat));
    let more = json!({"kv": {"block_size": 32}, "compat": compat});
    let (status, told) = register(&proxy, "prefill", &p, more).await;
    assert_eq!((status, &told["id"]), (200, &json!("prefill-0")));
    assert_eq!(
        worker(&proxy, "prefill-0").await["kv"],
        json!({"block_size": 32})
    );
    // What pairs are made by is another thing: with other KV it is another worker.
    let (status, told) = register(&proxy, "prefill", &p, json!({})).await;
    assert_eq!((status, &told["id"]), (201, &json!("prefill-1")));
    assert!(told["compat"].is_null());
    for (more, field) in [
        (json!({"kv": [1]}), "kv"),
        (json!({"kv": {"a": [1]}}), "kv"),
        (json!({"kv": {"a": 1.5}}), "kv"),
        (json!({"kv": {"A b": 1}}), "kv"),
        (json!({"kv": {"a": "x".repeat(4097)}}), "kv"),
        (json!({"compat": {"a": 1}}), "compat"),
        (json!({"compat": {"": "x"}}), "compat"),
    ] {
        let (status, told) = register(&proxy, "prefill", &p, more.clone()).await;
        let error = &told["error"];
        assert_eq!(
            (status, &error["code"], &error["param"]),
            (400, &json!("invalid_field"), &json!(field)),
            "{more}"
        );
    }
    let many: serde_json::Map<String, Value> =
        (0..65).map(|i| (format!("a{i}"), json!(i))).collect();
    assert_eq!(
        register(&proxy, "prefill", &p, json!({"kv": many})).await.0,
        400
    );
}

#[tokio::test]
async fn two_spellings_of_an_address_are_one_worker() {
    let (_blocks, p, d) = pair().await;
    let proxy = managed(&[&p], &[]).await;
    let port = d.address.port();
    for (url, status) in [
        (format!("http://127.0.0.1:{port}"), 201),
        (format!("http://localhost:{port}/"), 200),
        (format!("http://LOCALHOST:{port}"), 200),
    ] {
        let body = json!({"role": "decode", "url": url});
        assert_eq!(
            tell(&proxy, "/v1/workers", &body).await.status,
            status,
            "{url}"
        );
    }
    // Whom a flag named too.
    let url = format!("http://localhost:{}", p.address.port());
    let body = json!({"role": "prefill", "url": url});
    assert_eq!(tell(&proxy, "/v1/workers", &body).await.status, 200);
    assert_eq!(ids(&proxy).await, ["prefill-0", "decode-0"]);
    // And nobody takes the other role beside it.
    let body = json!({"role": "prefill", "url": format!("http://localhost:{port}")});
    assert_eq!(tell(&proxy, "/v1/workers", &body).await.status, 201);
    let change = tell(
        &proxy,
        "/v1/workers/decode-0/role",
        &json!({"role": "prefill"}),
    )
    .await;
    assert_eq!(
        (change.status, change.error_code().as_str()),
        (409, "role_taken")
    );
}

#[tokio::test]
async fn a_prefill_worker_keeps_its_role_while_decode_has_not_read_its_blocks() {
    let (_blocks, p, d) = pair().await;
    let gate = Arc::new(Semaphore::new(0));
    let proxy = managed(&[&p], &[&d]).await;
    d.once(Script::Gated(CHUNKS.to_vec(), Arc::clone(&gate)));
    let mut running = stream(&proxy).await;
    until("decode is reached", || d.count() == 1).await;
    let told = worker(&proxy, "prefill-0").await;
    assert_eq!(
        (&told["in_flight"], &told["kept_transfers"]),
        (&json!(0), &json!(1))
    );
    let (path, decode) = (
        "/v1/workers/prefill-0/role?wait_s=0",
        json!({"role": "decode"}),
    );
    let refused = tell(&proxy, path, &decode).await;
    assert_eq!(
        (refused.status, refused.error_code().as_str()),
        (409, "worker_busy")
    );
    let told = worker(&proxy, "prefill-0").await;
    assert_eq!(told["standing"], json!("serving"));
    gate.add_permits(2);
    assert!(running.reply().await.whole);
    let changed = tell(&proxy, "/v1/workers/prefill-0/role?wait_s=5", &decode).await;
    assert_eq!(
        (changed.status, &changed.json()["role"]),
        (200, &json!("decode"))
    );
}
