//! Workers that change from one role to the other.

use std::sync::Arc;

use serde_json::json;
use tokio::sync::Semaphore;

use super::{CHUNKS, managed, stream};
use crate::admin::{ids, register, routable, tell, worker};
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
