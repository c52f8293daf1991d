//! Weights of workers, over a real proxy.

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use serde_json::{Value, json};

use crate::admin::{list, tell};
use crate::engine::{Blocks, Engine, engines, pair};
use crate::{COMPLETIONS, PROMPT, post, proxy_with, until};

async fn weight_of(proxy: &Proxy, url: &str) -> Value {
    let workers = list(proxy).await;
    let found = workers.iter().find(|worker| worker["url"] == url);
    found.expect("it is there")["weight"].clone()
}

async fn shares(proxy: &Proxy, engines: &[&Engine], requests: usize) -> Vec<usize> {
    let before: Vec<usize> = engines.iter().map(|engine| engine.count()).collect();
    for _ in 0..requests {
        assert_eq!(post(proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    let counts = engines.iter().zip(before);
    counts
        .map(|(engine, before)| engine.count() - before)
        .collect()
}

#[tokio::test]
async fn legs_follow_weights_of_flags_registrations_and_administrators() {
    let ([p], [d0, d1]) = engines(&Blocks::default()).await;
    let decode = [&d0, &d1];
    let settings = Settings {
        admin_listen: Some("127.0.0.1:0".to_owned()),
        health_interval_ms: Some(20),
        ..Settings::default()
    };
    let flags = [format!("{},weight=3", d0.url())];
    let proxy = proxy_with(settings, &[p.url()], &flags).await;
    let body = json!({"role": "decode", "url": d1.url(), "weight": 1});
    assert_eq!(tell(&proxy, "/v1/workers", &body).await.status, 201);
    until("the registered worker takes legs", || {
        let views = proxy.app.view(hetero_kv_proxy::routing::Role::Decode);
        views.iter().all(|view| view.routable)
    })
    .await;
    // Decode's default policy goes by load, and idle slots take turns.
    let got = shares(&proxy, &decode, 40).await;
    assert!((29..=31).contains(&got[0]), "{got:?}");

    // An administrator's word counts more than a heartbeat's.
    let set = tell(&proxy, "/v1/workers/decode-1/weight", &json!({"weight": 9})).await;
    assert_eq!((set.status, &set.json()["weight"]), (200, &json!(9)));
    let beat = tell(&proxy, "/v1/workers", &body).await;
    assert_eq!((beat.status, &beat.json()["id"]), (200, &json!("decode-1")));
    assert_eq!(weight_of(&proxy, &d1.url()).await, 9);
    let got = shares(&proxy, &decode, 40).await;
    assert!((29..=31).contains(&got[1]), "{got:?}");

    // Set aside, but not drained: it serves when the other is away.
    let set = tell(&proxy, "/v1/workers/decode-1/weight", &json!({"weight": 0})).await;
    assert_eq!(set.json()["standing"], "serving");
    assert_eq!(shares(&proxy, &decode, 10).await, [10, 0]);
    let drained = tell(&proxy, "/v1/workers/decode-0/drain", &json!({})).await;
    assert_eq!(drained.status, 200);
    assert_eq!(shares(&proxy, &decode, 4).await, [0, 4]);

    // Another start of the engine keeps what was set, and so does another role.
    let mut other = body.clone();
    other["engine_id"] = json!("a");
    tell(&proxy, "/v1/workers", &other).await;
    other["engine_id"] = json!("b");
    assert_eq!(tell(&proxy, "/v1/workers", &other).await.status, 201);
    assert_eq!(weight_of(&proxy, &d1.url()).await, 0);
    let role = tell(
        &proxy,
        "/v1/workers/decode-2/role",
        &json!({"role": "prefill"}),
    )
    .await;
    assert_eq!((role.status, &role.json()["weight"]), (200, &json!(0)));
}

#[tokio::test]
async fn weights_out_of_range_name_their_field_and_change_nothing() {
    let (p, d) = pair().await;
    let settings = Settings {
        admin_listen: Some("127.0.0.1:0".to_owned()),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &[p.url()], &[d.url()]).await;
    let to = "/v1/workers/decode-0/weight";
    for (body, code) in [
        (json!({}), "missing_field"),
        (json!({"weight": 1001}), "invalid_field"),
        (json!({"weight": -1}), "invalid_field"),
        (json!({"weight": 1.5}), "invalid_field"),
        (json!({"weight": "2"}), "invalid_field"),
        (json!({"weights": 2}), "unknown_field"),
    ] {
        let reply = tell(&proxy, to, &body).await;
        assert_eq!((reply.status, &*reply.error_code()), (400, code), "{body}");
    }
    let nobody = tell(&proxy, "/v1/workers/decode-9/weight", &json!({"weight": 2})).await;
    assert_eq!(
        (nobody.status, &*nobody.error_code()),
        (404, "unknown_worker")
    );
    let body = json!({"role": "decode", "url": "http://127.0.0.1:9", "weight": 1001});
    let reply = tell(&proxy, "/v1/workers", &body).await;
    assert_eq!(reply.json()["error"]["param"], "weight");
    assert_eq!(weight_of(&proxy, &d.url()).await, 1);
}
