//! How long blocks that decode was not seen to take count: as long as the engine tells.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::managed_with;
use crate::admin::{register, routable, worker};
use crate::engine::{Script, pair};
use crate::{COMPLETIONS, PROMPT, post, soon};

const FAILED: Script = Script::Answer(500, "application/json", r#"{"error":{"code":500}}"#);

async fn kept(proxy: &hetero_kv_proxy::run::Proxy, id: &str) -> Value {
    worker(proxy, id).await["kept_transfers"].clone()
}

#[tokio::test]
async fn the_lease_of_an_engine_is_what_it_tells_and_else_the_setting() {
    for (told, setting_s, is_over) in [
        (
            json!({"kv": {"connector": "hetero", "lease_ms": 400}}),
            600,
            true,
        ),
        (json!({"kv": {"connector": "hetero"}}), 600, false),
        (json!({}), 600, false),
        (json!({"kv": {"lease_ms": 600_000}}), 0, false),
        (json!({"kv": {"lease_ms": 0}}), 600, true),
    ] {
        let (p, d) = pair().await;
        let settings = Settings {
            lease_s: Some(setting_s),
            ..Settings::default()
        };
        let proxy = managed_with(settings, &[], &[&d]).await;
        let (status, _) = register(&proxy, "prefill", &p, told.clone()).await;
        assert_eq!(status, 201, "{told}");
        routable(&proxy, "prefill-0").await;
        d.once(FAILED);
        let begun = Instant::now();
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 500);
        if is_over {
            soon("the lease is over", async || {
                kept(&proxy, "prefill-0").await == 0
            })
            .await;
            let lease_ms = told["kv"]["lease_ms"].as_u64().expect("told");
            assert!(begun.elapsed() >= Duration::from_millis(lease_ms), "{told}");
        } else {
            sleep(Duration::from_millis(600)).await;
            assert_eq!(kept(&proxy, "prefill-0").await, 1, "{told}");
        }
    }
}

#[tokio::test]
async fn a_flags_engine_that_registers_tells_its_lease_with_a_heartbeat() {
    let (p, d) = pair().await;
    let settings = Settings {
        lease_s: Some(600),
        ..Settings::default()
    };
    let proxy = managed_with(settings, &[&p], &[&d]).await;
    let told = json!({"kv": {"lease_ms": 100}});
    assert_eq!(register(&proxy, "prefill", &p, told).await.0, 200);
    d.once(FAILED);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 500);
    soon("the lease is over", async || {
        kept(&proxy, "prefill-0").await == 0
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_is_no_time_is_refused_by_name() {
    let (p, d) = pair().await;
    let proxy = managed_with(Settings::default(), &[], &[&d]).await;
    for lease in [
        json!(-1),
        json!("30"),
        json!(true),
        json!(86_400_001),
        json!(u64::MAX),
    ] {
        let told = json!({"kv": {"lease_ms": lease}});
        let (status, answer) = register(&proxy, "prefill", &p, told).await;
        let error = &answer["error"];
        assert_eq!(
            (status, &error["code"]),
            (400, &json!("invalid_field")),
            "{lease}"
        );
        let message = error["message"].as_str().expect("a message");
        for part in ["`kv.lease_ms` must be 0 to 86400000", &lease.to_string()] {
            assert!(message.contains(part), "{part} in {message}");
        }
    }
    let longest = json!({"kv": {"lease_ms": 86_400_000}});
    assert_eq!(register(&proxy, "prefill", &p, longest).await.0, 201);
}
