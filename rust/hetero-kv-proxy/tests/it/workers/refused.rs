//! What the admin listener refuses, and says why.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{managed, managed_with};
use crate::admin::{self, ids, list, register, tell};
use crate::client::Client;
use crate::engine::pair;
use crate::{COMPLETIONS, PROMPT, post};

#[tokio::test]
async fn clients_do_not_reach_administration_nor_administrators_the_engines() {
    let (p, d) = pair().await;
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
async fn bad_bodies_and_orders_name_their_field_and_change_nothing() {
    let (p, d) = pair().await;
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
    let mut client = admin::connect(&proxy).await;
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
        (
            r#"{"role":"decode","url":"http://h:1/v1/"}"#,
            "invalid_field",
            Some("url"),
        ),
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
    let (p, d) = pair().await;
    let settings = Settings {
        body_read_timeout_s: Some(1),
        ..Settings::default()
    };
    let proxy = managed_with(settings, &[&p], &[&d]).await;
    let mut client = admin::connect(&proxy).await;
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
    let (p, d) = pair().await;
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
async fn a_worker_of_another_mode_or_connector_is_refused_by_name() {
    let (p, d) = pair().await;
    let of = |connector: &str| Settings {
        connector: Some(connector.to_owned()),
        ..Settings::default()
    };
    let told_mode = json!({"mode": "write"});
    let told_kind = json!({"kv": {"connector": "NixlConnector"}});
    let unknown_kind = json!({"kv": {"connector": "MultiConnector"}, "mode": "read"});
    let proxy = managed_with(of("moriio-read"), &[], &[]).await;
    for (more, param, parts) in [
        (
            &told_mode,
            "mode",
            ["`write`", "`read`", "--connector moriio-write"],
        ),
        (
            &told_kind,
            "kv",
            ["`NixlConnector`", "MoRIIOConnector", "--connector nixl"],
        ),
    ] {
        let (status, told) = register(&proxy, "prefill", &p, more.clone()).await;
        assert_eq!((status, &told["error"]["param"]), (400, &json!(param)));
        assert_eq!(told["error"]["code"], "worker_refused");
        let message = told["error"]["message"].to_string();
        for part in parts {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
    assert!(ids(&proxy).await.is_empty());
    let (status, _) = register(&proxy, "prefill", &p, unknown_kind.clone()).await;
    assert_eq!(status, 201);
    // A heartbeat of the engine's next start may tell what its first did not.
    let (status, _) = register(&proxy, "prefill", &p, told_mode.clone()).await;
    assert_eq!(status, 400);
    assert_eq!(ids(&proxy).await, ["prefill-0"]);

    // Only MoRI-IO's kinds have a mode of their own.
    let hetero = managed_with(of("hetero"), &[], &[]).await;
    let ours = json!({"mode": "read", "kv": {"connector": "hetero", "mode": "read"}});
    for (role, engine, more, status) in [
        ("prefill", &p, &ours, 201),
        ("decode", &d, &told_mode, 201),
        ("decode", &d, &told_kind, 400),
    ] {
        assert_eq!(
            register(&hetero, role, engine, more.clone()).await.0,
            status
        );
    }
}

#[tokio::test]
async fn the_proxy_itself_does_not_register() {
    let (p, d) = pair().await;
    let proxy = managed(&[&p], &[&d]).await;
    let admin = proxy.admin_address.expect("a listener for administrators");
    for (url, setting) in [
        (format!("http://{}", proxy.address), "own --listen,"),
        (
            format!("http://localhost:{}/base", proxy.address.port()),
            "own --listen,",
        ),
        (format!("http://{admin}"), "own --admin-listen,"),
    ] {
        let body = json!({"role": "decode", "url": url});
        let reply = tell(&proxy, "/v1/workers", &body).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (400, "worker_refused")
        );
        let error = &reply.json()["error"];
        assert_eq!(error["param"], "url");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(setting), "{message}");
    }
    assert_eq!(ids(&proxy).await, ["prefill-0", "decode-0"]);
}

#[tokio::test]
async fn a_query_that_a_path_does_not_take_is_told_with_what_it_takes_and_changes_nothing() {
    let (p, d) = pair().await;
    let proxy = managed(&[&p], &[&d]).await;
    let mut client = admin::connect(&proxy).await;
    let (drain, worker) = ("/v1/workers/decode-0/drain", "/v1/workers/decode-0");
    for (method, path, query, parts) in [
        ("POST", drain, "wait=1", ["`wait` ", "wait_s=N"]),
        ("POST", drain, "wait_s=0.5", ["`wait_s` ", "not `0.5`"]),
        ("POST", drain, "wait_s", ["`wait_s` ", "0 to 3600 seconds"]),
        ("POST", drain, "wait_s=1&wait_s=2", ["`wait_s` ", "twice"]),
        ("POST", drain, "force=true", ["`force` ", "wait_s=N"]),
        ("DELETE", worker, "forced=true", ["`forced` ", "force=true"]),
        ("DELETE", worker, "force=yes", ["`force` ", "not `yes`"]),
        ("DELETE", worker, "force", ["`force` ", "true or false"]),
        (
            "POST",
            "/v1/workers/decode-0/undrain",
            "wait_s=1",
            ["`wait_s` ", "no query"],
        ),
        (
            "POST",
            "/v1/workers/decode-0/weight",
            "weight=3",
            ["`weight` ", "no query"],
        ),
        (
            "POST",
            "/v1/workers",
            "dry_run=1",
            ["`dry_run` ", "no query"],
        ),
        ("PUT", "/v1/revisions", "x", ["`x` ", "no query"]),
        ("GET", "/v1/revisions", "x", ["`x` ", "no query"]),
        ("GET", "/v1/workers", "role=decode", ["`role` ", "no query"]),
        ("GET", "/workers", "role=decode", ["`role` ", "no query"]),
        ("GET", worker, "x=1", ["`x` ", "no query"]),
        ("GET", "/v1/trace/id", "x=1", ["`x` ", "no query"]),
    ] {
        let head = format!("{method} {path}?{query} HTTP/1.1\r\nHost: x\r\n");
        let body = r#"{"weight":0}"#;
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        client.raw(request.as_bytes()).await;
        let reply = client.reply().await;
        let told = (reply.status, reply.error_code());
        assert_eq!(
            told,
            (400, "invalid_query".to_owned()),
            "{method} {path}?{query}"
        );
        let message = reply.json()["error"]["message"].to_string();
        for part in parts {
            assert!(message.contains(part), "{part} in {message}");
        }
    }
    let worker = &list(&proxy).await[1];
    assert_eq!(
        (&worker["standing"], &worker["weight"]),
        (&json!("serving"), &json!(1))
    );
    // As true.
    client.delete("/v1/workers/decode-0?force=1&wait_s=0").await;
    let reply = client.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}
