//! Engines behind something that routes by host and path.

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::routing::{HealthState, Role};

use crate::client::Client;
use crate::engine::{Blocks, Engine};
use crate::{CHAT, COMPLETIONS, PROMPT, STREAM, metric, post, proxy_with, until};

const METRICS: &str = "# TYPE vllm:num_requests_running gauge\n\
    vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 0\n\
    vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 0\n\
    vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0\n";

fn named(engine: &Engine) -> String {
    format!("localhost:{}", engine.address.port())
}

fn url(engine: &Engine) -> String {
    format!("http://{}/base", named(engine))
}

/// If probes named it otherwise, an engine could be healthy that no leg reaches, or unhealthy
/// though every leg would.
#[tokio::test]
async fn whatever_is_asked_of_an_engine_names_host_version_and_base_path_alike() {
    let blocks = Blocks::default();
    let (p, d, elsewhere) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
        Engine::decode(&blocks).await,
    );
    for engine in [&p, &d] {
        engine.demand_host(&named(engine));
        engine.set_metrics(Some(METRICS));
        engine.set_models(200, r#"{"object":"list","data":[{"id":"m"}]}"#);
    }
    // This one answers to another name than it is given by.
    elsewhere.demand_host("engine.internal");
    let settings = Settings {
        policy: Some("least-loaded".to_owned()),
        health_interval_ms: Some(20),
        scrape_interval_ms: Some(20),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &[url(&p)], &[url(&d), url(&elsewhere)]).await;
    let states = |role| proxy.app.view(role).into_iter().map(|view| view.state);
    until("probes have told the engines apart", || {
        states(Role::Prefill).eq([HealthState::Healthy])
            && states(Role::Decode).eq([HealthState::Healthy, HealthState::Unhealthy])
    })
    .await;
    let mut client = Client::connect(proxy.address).await;
    for (path, body) in [
        (COMPLETIONS, PROMPT),
        (COMPLETIONS, STREAM),
        (CHAT, PROMPT),
        ("/v1/embeddings", r#"{"input":"x"}"#),
        ("/tokenize", r#"{"prompt":"x"}"#),
    ] {
        client.post(path, &[], body.as_bytes()).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
    }
    client.get("/v1/models").await;
    assert_eq!(client.reply().await.json()["data"][0]["id"], "m");
    while metric(&proxy, "engine_scrapes_total{outcome=\"ok\"}").await < 2.0 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    // All engines are asked: the one that is not to be reached is named.
    let reply = post(&proxy, "/start_profile", "").await;
    assert_eq!(reply.error_code(), "workers_failed");
    assert!(reply.text().contains("decode-1: answered 421"));
    for (engine, lines) in [
        (
            &p,
            &[
                "POST /base/v1/completions",
                "POST /base/v1/chat/completions",
            ][..],
        ),
        (
            &d,
            &[
                "POST /base/v1/embeddings",
                "POST /base/tokenize",
                "GET /base/v1/models",
            ],
        ),
    ] {
        let asked = engine.asked();
        for (line, host) in &asked {
            assert_eq!(*host, named(engine), "{line}");
            assert!(
                line.contains(" /base/") && line.ends_with(" HTTP/1.1"),
                "{line}"
            );
        }
        let was_asked = |wanted: &str| asked.iter().any(|(line, _)| line.starts_with(wanted));
        for wanted in [
            "GET /base/health ",
            "GET /base/metrics ",
            "POST /base/start_profile ",
        ] {
            assert!(was_asked(wanted), "{wanted}");
        }
        for wanted in lines {
            assert!(was_asked(wanted), "{wanted}");
        }
    }
    assert_eq!(elsewhere.count(), 0);
}
