//! One engine at one address in both roles, as vLLM's `kv_role` `kv_both` allows.

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use serde_json::{Value, json};

use crate::client::{Client, Reply};
use crate::connectors::fallbacks;
use crate::engine::{Blocks, Engine, Script};
use crate::{COMPLETIONS, PROMPT, metric, metric_sum, metrics_text, post, proxy_with, urls};

async fn managed(prefill: &[&Engine], decode: &[&Engine]) -> Proxy {
    let settings = Settings {
        admin_listen: Some("127.0.0.1:0".to_owned()),
        ..Settings::default()
    };
    // Another spelling of the same address.
    let decode = urls(decode).into_iter();
    let decode: Vec<String> = decode
        .map(|url| url.replace("127.0.0.1", "localhost"))
        .collect();
    proxy_with(settings, &urls(prefill), &decode).await
}

async fn ask(proxy: &Proxy, method: &str, path: &str, body: &str) -> Reply {
    let mut client = Client::connect(proxy.admin_address.expect("a listener")).await;
    match method {
        "DELETE" => client.delete(path).await,
        "GET" => client.get(path).await,
        _ => client.post(path, &[], body.as_bytes()).await,
    }
    client.reply().await
}

/// Ids of the workers that take legs, in their order.
async fn routable(proxy: &Proxy) -> Vec<String> {
    let all = ask(proxy, "GET", "/workers", "").await.json();
    let all = all.as_array().expect("a list").iter();
    let routable = all.filter(|one| one["routable"] == json!(true));
    routable
        .map(|one| one["id"].as_str().expect("an id").to_owned())
        .collect()
}

fn asks_to_keep(body: &Value) -> bool {
    body["kv_transfer_params"]["do_remote_decode"] == json!(true)
}

/// Prefill legs and others.
fn legs(engine: &Engine) -> (usize, usize) {
    let seen = engine.seen();
    let prefill = seen.iter().filter(|one| asks_to_keep(&one.json())).count();
    (prefill, seen.len() - prefill)
}

#[tokio::test]
async fn an_engine_in_both_roles_hands_its_kv_to_another_and_never_to_itself() {
    let blocks = Blocks::default();
    let (a, b) = (
        Engine::start(Script::Both, &blocks).await,
        Engine::start(Script::Both, &blocks).await,
    );
    let proxy = managed(&[&a, &b], &[&a, &b]).await;
    for _ in 0..20 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert!(blocks.lock().expect("blocks").is_empty());
    let transfers = |engine: &Engine, prefilled: bool| {
        let seen = engine.seen().into_iter().map(|one| one.json());
        let of_role = seen.filter(|body| asks_to_keep(body) == prefilled);
        let ids = of_role.map(|body| body["kv_transfer_params"]["transfer_id"].clone());
        ids.collect::<Vec<_>>()
    };
    for engine in [&a, &b] {
        let (prefilled, decoded) = (transfers(engine, true), transfers(engine, false));
        assert_eq!((prefilled.len(), decoded.len()), (10, 10));
        for id in &decoded {
            assert!(id.is_string() && !prefilled.contains(id), "{id} to itself");
        }
    }
    assert_eq!(fallbacks(&proxy, "same_engine").await, 0.0);
}

#[tokio::test]
async fn an_engine_that_is_all_there_is_computes_alone_and_each_role_is_managed_for_itself() {
    let blocks = Blocks::default();
    let (a, b) = (
        Engine::start(Script::Both, &blocks).await,
        Engine::start(Script::Both, &blocks).await,
    );
    let proxy = managed(&[&a], &[&a, &b]).await;
    assert_eq!(
        routable(&proxy).await,
        ["prefill-0", "decode-0", "decode-1"]
    );
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!((legs(&a), legs(&b)), ((4, 0), (0, 4)));

    let drained = ask(&proxy, "POST", "/v1/workers/decode-1/drain", "{}").await;
    assert_eq!(drained.status, 200);
    assert_eq!(routable(&proxy).await, ["prefill-0", "decode-0"]);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!((legs(&a), legs(&b)), ((4, 1), (0, 4)));
    assert_eq!(fallbacks(&proxy, "same_engine").await, 1.0);
    let undrained = ask(&proxy, "POST", "/v1/workers/decode-1/undrain", "{}").await;
    assert_eq!(undrained.status, 200);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!((legs(&a), legs(&b)), ((5, 1), (0, 5)));

    // The other role is taken, by the engine itself.
    let role = r#"{"role":"decode"}"#;
    let changed = ask(&proxy, "POST", "/v1/workers/prefill-0/role", role).await;
    assert_eq!(
        (changed.status, changed.error_code().as_str()),
        (409, "role_taken")
    );

    // Removed in one role it stays in the other, with what is counted there.
    let removed = ask(&proxy, "DELETE", "/v1/workers/decode-0", "").await;
    assert_eq!(removed.status, 200);
    assert_eq!(routable(&proxy).await, ["prefill-0", "decode-1"]);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!((legs(&a), legs(&b)), ((6, 1), (0, 6)));
    let text = metrics_text(&proxy).await;
    let of = |role: &str, url: &str| format!("role=\"{role}\",instance=\"{url}\"");
    let elsewhere = a.url().replace("127.0.0.1", "localhost");
    let gone = of("decode", &elsewhere);
    assert!(!text.contains(&gone), "{gone}");
    let ok = format!(
        "leg_requests_total{{{},outcome=\"ok\"}}",
        of("prefill", &a.url())
    );
    assert_eq!(metric(&proxy, &ok).await, 6.0);
    assert_eq!(metric_sum(&proxy, "in_flight").await, 0.0);
    assert_eq!(metric_sum(&proxy, "kept_transfers").await, 0.0);
}

/// Whatever leaves one engine only: models, a named prefill worker, an engine that is down.
#[tokio::test]
async fn an_engine_that_is_chosen_for_both_legs_computes_alone() {
    let blocks = Blocks::default();
    let (a, b) = (
        Engine::start(Script::Both, &blocks).await,
        Engine::start(Script::Both, &blocks).await,
    );
    for one in [&a, &b] {
        one.always(Script::Both);
    }
    // Of two models each engine has one, in both roles.
    let of = |engine: &Engine, model: &str| format!("{},model={model}", engine.url());
    let models = [of(&a, "a"), of(&b, "b")];
    let proxy = proxy_with(Settings::default(), &models, &models).await;
    for model in ["a", "b"] {
        let body = format!(r#"{{"model":"{model}","prompt":"hello","max_tokens":8}}"#);
        assert_eq!(post(&proxy, COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!((legs(&a), legs(&b)), ((0, 1), (0, 1)));
    assert_eq!(fallbacks(&proxy, "same_engine").await, 2.0);

    // The client names the prefill worker, which is all there is of decode.
    let settings = Settings {
        allow_prefill_endpoint: Some(true),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&a, &b]), &urls(&[&a])).await;
    let body = format!(
        r#"{{"model":"m","prompt":"hello","max_tokens":8,"prefill_endpoint":"{}"}}"#,
        a.url()
    );
    assert_eq!(post(&proxy, COMPLETIONS, &body).await.status, 200);
    assert_eq!((legs(&a), legs(&b)), ((0, 2), (0, 1)));
    assert_eq!(fallbacks(&proxy, "same_engine").await, 1.0);
    assert!(blocks.lock().expect("blocks").is_empty());
}
