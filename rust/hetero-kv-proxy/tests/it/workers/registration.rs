//! Who registers: when it serves, by what it is known again, and what is shown of it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::{CHUNKS, managed, stream};
use crate::admin::{gone, ids, register, routable, tell, worker};
use crate::engine::{Blocks, Script, pair, pair_on};
use crate::{COMPLETIONS, PROMPT, post, soon, until};

#[tokio::test]
async fn a_worker_registers_and_serves_once_its_probe_answers() {
    let (p, d) = pair().await;
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
    soon("it takes no legs", async || {
        worker(&proxy, "decode-0").await["routable"] == json!(false)
    })
    .await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 503);
    assert_eq!(d.count(), 2);
}

#[tokio::test]
async fn two_spellings_of_an_address_are_one_worker() {
    let (p, d) = pair().await;
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
async fn another_start_of_an_engine_at_its_address_is_another_worker() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
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
    let (p, d) = pair().await;
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
async fn what_a_connector_says_of_itself_is_shown_and_changes_no_worker() {
    let (p, _d) = pair().await;
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
