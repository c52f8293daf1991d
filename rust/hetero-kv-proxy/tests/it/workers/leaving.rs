//! Workers that are drained, removed, or not heard of any more, while requests run.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::{CHUNKS, managed, stream};
use crate::admin::{delete, gone, ids, list, register, routable, tell, worker};
use crate::client::Client;
use crate::engine::{Blocks, Engine, Script, engines, pair, pair_on};
use crate::{COMPLETIONS, PROMPT, metric, post, soon, until};

#[tokio::test]
async fn a_worker_that_is_not_heard_of_is_drained_out_and_its_streams_end_whole() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
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
    let silent = soon("it expires", async || {
        worker(&proxy, "decode-0").await["standing"] == json!("leaving")
    })
    .await;
    assert!(silent >= Duration::from_millis(700), "too early");
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
    let ([p], [a, b]) = engines(&Blocks::default()).await;
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
async fn a_prefill_worker_is_not_gone_before_decode_has_its_blocks() {
    let (p, d) = pair().await;
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
