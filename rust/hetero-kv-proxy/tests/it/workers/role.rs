//! Workers that change from one role to the other.

use std::sync::Arc;
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{CHUNKS, managed, managed_with, stream};
use crate::admin::{delete, gone, ids, register, routable, tell, worker};
use crate::client::Client;
use crate::engine::{Blocks, Ended, Script, engines, pair};
use crate::{COMPLETIONS, PROMPT, post, soon, until};

#[tokio::test]
async fn a_role_changes_after_the_last_leg_and_stays_changed_over_heartbeats() {
    let ([p, q], [d]) = engines(&Blocks::default()).await;
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
    soon("it leaves", async || {
        worker(&proxy, "prefill-1").await["standing"] == json!("leaving")
    })
    .await;
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
async fn a_prefill_worker_keeps_its_role_while_decode_has_not_read_its_blocks() {
    let (p, d) = pair().await;
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

const FAILED: Script = Script::Answer(500, "application/json", "{}");

#[tokio::test]
async fn blocks_that_decode_did_not_take_hold_the_role_until_their_lease_is_over() {
    let (p, d) = pair().await;
    let lease = Settings {
        lease_s: Some(2),
        ..Settings::default()
    };
    let proxy = managed_with(lease, &[&p], &[&d]).await;
    d.once(FAILED);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 500);
    let failed = Instant::now();
    assert_eq!(
        worker(&proxy, "prefill-0").await["kept_transfers"],
        json!(1)
    );
    let decode = json!({"role": "decode"});
    let refused = tell(&proxy, "/v1/workers/prefill-0/role?wait_s=0", &decode).await;
    assert_eq!(
        (refused.status, refused.error_code().as_str()),
        (409, "worker_busy")
    );
    assert!(refused.text().contains("force=true"), "{}", refused.text());
    let told = worker(&proxy, "prefill-0").await;
    assert_eq!(told["standing"], json!("serving"));
    let changed = tell(&proxy, "/v1/workers/prefill-0/role?wait_s=15", &decode).await;
    assert_eq!(
        (changed.status, &changed.json()["role"]),
        (200, &json!("decode"))
    );
    assert!(failed.elapsed() > Duration::from_millis(1_800), "too early");
}

#[tokio::test]
async fn blocks_that_decode_did_not_take_hold_a_removal_but_not_a_forced_order() {
    let ([p, q], [d]) = engines(&Blocks::default()).await;
    let lease = Settings {
        lease_s: Some(600),
        ..Settings::default()
    };
    let proxy = managed_with(lease, &[&p, &q], &[&d]).await;
    for _ in 0..2 {
        d.once(FAILED);
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 500);
    }
    for id in ["prefill-0", "prefill-1"] {
        assert_eq!(worker(&proxy, id).await["kept_transfers"], json!(1), "{id}");
    }
    let reply = delete(&proxy, "/v1/workers/prefill-0?wait_s=0").await;
    assert_eq!(reply.status, 202, "its blocks are not free yet");
    assert_eq!(
        worker(&proxy, "prefill-0").await["standing"],
        json!("leaving")
    );
    let reply = delete(&proxy, "/v1/workers/prefill-0?wait_s=0&force=true").await;
    assert_eq!(reply.status, 200);
    gone(&proxy, "prefill-0").await;
    let path = "/v1/workers/prefill-1/role?wait_s=0&force=true";
    let changed = tell(&proxy, path, &json!({"role": "decode"})).await;
    assert_eq!(
        (changed.status, &changed.json()["role"]),
        (200, &json!("decode"))
    );
}

#[tokio::test]
async fn blocks_of_an_engine_that_started_anew_hold_nothing() {
    let (p, d) = pair().await;
    let lease = Settings {
        lease_s: Some(600),
        ..Settings::default()
    };
    let proxy = managed_with(lease, &[], &[&d]).await;
    register(&proxy, "prefill", &p, json!({"engine_id": "start-1"})).await;
    routable(&proxy, "prefill-0").await;
    d.once(FAILED);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 500);
    assert_eq!(
        worker(&proxy, "prefill-0").await["kept_transfers"],
        json!(1)
    );
    register(&proxy, "prefill", &p, json!({"engine_id": "start-2"})).await;
    gone(&proxy, "prefill-0").await;
    assert_eq!(
        worker(&proxy, "prefill-1").await["kept_transfers"],
        json!(0)
    );
}
