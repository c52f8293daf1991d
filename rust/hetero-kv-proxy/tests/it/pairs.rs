//! Who is paired with whom, by what workers tell of themselves.

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::config::Config;
use hetero_kv_proxy::run::Proxy;
use serde_json::{Value, json};

use crate::admin::tell;
use crate::client::Client;
use crate::engine::{Blocks, Engine, Script, freed};
use crate::{COMPLETIONS, PROMPT, post, proxy_with, until};

/// A worker's flag: its URL and what it tells.
fn flag(engine: &Engine, told: &str) -> String {
    match told {
        "" => engine.url(),
        told => format!("{},{told}", engine.url()),
    }
}

/// As many scripted engines of each role as there are words, and their flags.
pub(crate) async fn engines(
    blocks: &Blocks,
    prefill: &[&str],
    decode: &[&str],
) -> (Vec<Engine>, Vec<Engine>, Vec<String>, Vec<String>) {
    let (mut p, mut d) = (Vec::new(), Vec::new());
    for _ in prefill {
        p.push(Engine::prefill(blocks).await);
    }
    for _ in decode {
        d.push(Engine::decode(blocks).await);
    }
    let flags = |engines: &[Engine], told: &[&str]| {
        let pairs = engines.iter().zip(told);
        pairs.map(|(engine, told)| flag(engine, told)).collect()
    };
    let (pf, df) = (flags(&p, prefill), flags(&d, decode));
    (p, d, pf, df)
}

pub(crate) fn counts(engines: &[Engine]) -> Vec<usize> {
    engines.iter().map(Engine::count).collect()
}

fn model(name: &str) -> String {
    json!({"model": name, "prompt": "hello", "max_tokens": 8}).to_string()
}

/// Transfer ids of the legs that each of these engines got.
pub(crate) fn transfers(engines: &[Engine]) -> Vec<Vec<String>> {
    let id = |body: Value| {
        body["kv_transfer_params"]["transfer_id"]
            .as_str()
            .expect("an id")
            .to_owned()
    };
    let of = |engine: &Engine| engine.seen().iter().map(|seen| id(seen.json())).collect();
    engines.iter().map(of).collect()
}

#[tokio::test]
async fn unlike_workers_are_never_a_pair() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(
        &blocks,
        &["dtype=bfloat16", "dtype=fp8", "dtype=int8"],
        &["dtype=fp8", "dtype=bfloat16", "dtype=bfloat16"],
    )
    .await;
    for settings in [
        Settings::default(),
        // With a limit of decode legs both slots are taken at once.
        Settings {
            decode_requests_max: Some(1),
            ..Settings::default()
        },
    ] {
        let proxy = proxy_with(settings, &pf, &df).await;
        for _ in 0..12 {
            assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
        }
    }
    let (of_prefill, of_decode) = (transfers(&p), transfers(&d));
    assert_eq!(counts(&p), [12, 12, 0], "those with a partner take turns");
    for id in &of_prefill[0] {
        assert!(!of_decode[0].contains(id), "a pair of unlike workers");
    }
    assert_eq!(of_decode[0].len(), 12);
    assert!(of_prefill[1].iter().all(|id| of_decode[0].contains(id)));
    freed(&blocks).await;
}

#[tokio::test]
async fn without_a_pair_503_names_the_field_and_nothing_is_sent() {
    for (own, other, field, values) in [
        ("model=a", "model=b", "model", ["`a`", "`b`"]),
        ("revision=1", "revision=2", "revision", ["`1`", "`2`"]),
        ("dtype=fp8", "dtype=bf16", "dtype", ["`fp8`", "`bf16`"]),
        ("kv-heads=8", "kv-heads=4", "kv-heads", ["`8`", "`4`"]),
        ("layout=HND", "layout=NHD", "layout", ["`HND`", "`NHD`"]),
        ("mode=read", "mode=write", "mode", ["`read`", "`write`"]),
        (
            "control=127.0.0.1:7000",
            "control=10.0.0.9:7000",
            "control",
            ["`loopback`", "`network`"],
        ),
    ] {
        let blocks = Blocks::default();
        let (p, d, pf, df) = engines(&blocks, &[own], &[other]).await;
        let proxy = proxy_with(Settings::default(), &pf, &df).await;
        let reply = post(&proxy, COMPLETIONS, r#"{"prompt":"hello"}"#).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (503, "no_pair")
        );
        assert_eq!(reply.headers["retry-after"], "1");
        let error = &reply.json()["error"];
        assert_eq!(error["param"], field);
        let message = error["message"].as_str().expect("a message");
        assert!(
            values.iter().all(|value| message.contains(value)),
            "{message}"
        );
        assert!(!message.contains("7000"), "no address: {message}");
        assert_eq!((counts(&p), counts(&d)), (vec![0], vec![0]));
    }
}

#[tokio::test]
async fn a_decode_leg_that_is_sent_again_keeps_to_the_prefill_worker_that_ran() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(
        &blocks,
        &["revision=1"],
        &["revision=1", "revision=2", "revision=1"],
    )
    .await;
    let proxy = proxy_with(Settings::default(), &pf, &df).await;
    d[0].kill().await;
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!(
        (counts(&p), counts(&d)[1..].to_vec()),
        (vec![4], vec![0, 4])
    );
}

#[tokio::test]
async fn requests_go_to_the_workers_of_their_model() {
    let blocks = Blocks::default();
    let told = ["model=org/a|a-lora", "model=b", ""];
    let (p, d, pf, df) = engines(&blocks, &told, &told).await;
    let proxy = proxy_with(Settings::default(), &pf, &df).await;
    for (name, at) in [("org/a", 0), ("a-lora", 0), ("b", 1), ("unheard", 2)] {
        let before = (counts(&p), counts(&d));
        for _ in 0..3 {
            assert_eq!(post(&proxy, COMPLETIONS, &model(name)).await.status, 200);
        }
        let (mut prefill, mut decode) = before;
        prefill[at] += 3;
        decode[at] += 3;
        assert_eq!((counts(&p), counts(&d)), (prefill, decode), "{name}");
    }
    // As JSON may spell it.
    let before = counts(&p)[0];
    let spelled = r#"{"model":"org\/\u0061","prompt":"hello","max_tokens":8}"#;
    assert_eq!(post(&proxy, COMPLETIONS, spelled).await.status, 200);
    assert_eq!(counts(&p)[0], before + 1);
}

#[tokio::test]
async fn a_model_that_no_worker_tells_is_404_where_all_tell_theirs() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &["model=a"], &["model=a"]).await;
    let proxy = proxy_with(Settings::default(), &pf, &df).await;
    for path in [COMPLETIONS, crate::CHAT] {
        let reply = post(&proxy, path, &model("c")).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (404, "model_not_found")
        );
        let error = &reply.json()["error"];
        assert_eq!(error["param"], "model");
        assert_eq!(error["message"], "The model `c` does not exist.");
    }
    assert_eq!((counts(&p), counts(&d)), (vec![0], vec![0]));
    // A request without a model is the engine's to judge.
    let reply = post(&proxy, COMPLETIONS, r#"{"prompt":"hello"}"#).await;
    assert_eq!(reply.status, 200);
}

async fn admin(proxy: &Proxy, path: &str, body: &Value) -> (u16, Value) {
    let reply = tell(proxy, path, body).await;
    (reply.status, reply.json())
}

#[tokio::test]
async fn what_workers_tell_is_the_same_by_flag_and_by_registration() {
    let blocks = Blocks::default();
    let (p, d, pf, _) = engines(&blocks, &["dtype=fp8,kv-heads=8"], &[""]).await;
    let settings = Settings {
        admin_listen: Some("127.0.0.1:0".to_owned()),
        health_interval_ms: Some(20),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &pf, &[]).await;
    let mut body = json!({
        "role": "decode", "url": d[0].url(), "model": "m", "revision": "1", "dtype": "bf16",
        "kv_heads": 8, "layout": "HND", "mode": "read", "control": "10.0.0.9:7000",
    });
    let (status, worker) = admin(&proxy, "/v1/workers", &body).await;
    assert_eq!(status, 201, "{worker}");
    assert_eq!(
        worker["told"],
        json!({"model": "m", "revision": "1", "dtype": "bf16", "kv_heads": "8", "layout": "HND",
            "mode": "read", "control": "10.0.0.9:7000"})
    );
    let probed = || {
        let view = proxy.app.view(hetero_kv_proxy::routing::Role::Decode);
        view.iter().all(|view| view.routable)
    };
    until("the probe has answered", probed).await;
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (503, "no_pair")
    );
    // It restarts with what its partner has: the old one, and what it told, is gone.
    body["dtype"] = json!("fp8");
    assert_eq!(admin(&proxy, "/v1/workers", &body).await.0, 201);
    until("the probe has answered", probed).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!((p[0].count(), d[0].count()), (1, 1));
    for (field, value) in [
        ("kv_heads", json!("many")),
        ("kv_heads", json!(0)),
        ("control", json!("0.0.0.0:7000")),
        ("control", json!("10.0.0.9")),
        ("model", json!("")),
        ("dtype", json!("a b")),
    ] {
        let mut bad = body.clone();
        bad[field] = value;
        let (status, error) = admin(&proxy, "/v1/workers", &bad).await;
        assert_eq!(
            (status, &error["error"]["param"]),
            (400, &json!(field)),
            "{error}"
        );
    }
}

#[test]
fn what_a_flag_tells_is_checked() {
    for (told, fault) in [
        ("dtype=", "dtype must be 1 to 512"),
        ("kv-heads=x", "kv-heads must be a number of heads, not `x`"),
        ("control=[::]:7000", "peers can dial"),
        ("control=h:0", "peers can dial"),
    ] {
        let settings = Settings {
            prefill: Some(vec![format!("http://h:1,{told}")]),
            decode: Some(vec!["http://h:2".to_owned()]),
            ..Settings::default()
        };
        let faults = Config::from_settings(settings)
            .expect_err(told)
            .0
            .join("\n");
        assert!(faults.contains(fault), "{faults}");
    }
}

#[tokio::test]
async fn room_is_looked_for_at_a_partner() {
    // The pair of revision 1 is full; the one of revision 2 serves meanwhile.
    let blocks = Blocks::default();
    let told = ["revision=1", "revision=2"];
    let (p, d, pf, df) = engines(&blocks, &told, &told).await;
    let settings = Settings {
        decode_requests_max: Some(1),
        queue_max: Some(0),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &pf, &df).await;
    d[0].always(Script::Silence);
    let mut held = Client::connect(proxy.address).await;
    held.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
    until("decode has the leg", || d[0].count() == 1).await;
    for _ in 0..3 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!((counts(&p), counts(&d)), (vec![1, 3], vec![1, 3]));
}

#[tokio::test]
async fn engines_whose_handshake_would_fail_are_no_pair_and_a_flags_words_stay() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &["revision=v1"], &["revision=v1"]).await;
    let settings = Settings {
        admin_listen: Some("127.0.0.1:0".to_owned()),
        health_interval_ms: Some(20),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &pf, &df).await;
    let register = async |role: &str, engine: &Engine, block_size: &str| {
        let compat = json!({"block_size": block_size, "revision": "none"});
        let body =
            json!({"role": role, "url": engine.url(), "compat": compat, "engine_id": block_size});
        let (status, worker) = admin(&proxy, "/v1/workers", &body).await;
        assert!(status == 200 || status == 201, "{worker}");
        // It names itself as an operator did.
        assert_eq!(worker["told"], json!({"revision": "v1"}));
        until("the probe has answered", || {
            let roles = [
                hetero_kv_proxy::routing::Role::Prefill,
                hetero_kv_proxy::routing::Role::Decode,
            ];
            roles
                .iter()
                .all(|role| proxy.app.view(*role).iter().all(|view| view.ready))
        })
        .await;
    };
    register("prefill", &p[0], "16").await;
    register("decode", &d[0], "32").await;
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (503, "no_pair")
    );
    let error = &reply.json()["error"];
    assert_eq!(error["param"], "block_size");
    let message = error["message"].as_str().expect("a message");
    assert!(
        message.contains("`16` on prefill and `32` on decode"),
        "{message}"
    );
    register("decode", &d[0], "16").await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!((counts(&p), counts(&d)), (vec![1], vec![1]));
}
