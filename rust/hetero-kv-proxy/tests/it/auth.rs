//! Keys: requests that administrators sign, clients that show theirs, and files read again.

use std::path::Path;

use hetero_kv_proxy::cli::Settings;
use serde_json::{Value, json};

use crate::client::{Client, Reply, get, send};
use crate::engine::pair;
use crate::process::{Serving, command, lines};
use crate::{COMPLETIONS, PROMPT, metric, proxy_with, urls};

/// The headers that `hetero-kv-proxy sign` prints.
fn sign(key_file: &Path, method: &str, target: &str, body: &str) -> Vec<(String, String)> {
    let output = command()
        .args(["sign", "--key-file"])
        .arg(key_file)
        .args(["--data", body, method, target])
        .output()
        .expect("the executable runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let headers: Vec<(String, String)> = text
        .lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    assert_eq!(headers.len(), 3, "{text}");
    headers
}

fn bearer(key: &str) -> Vec<(String, String)> {
    vec![("Authorization".to_owned(), format!("Bearer {key}"))]
}

fn refusal(reply: &Reply) -> (u16, String) {
    (reply.status, reply.error_code())
}

#[tokio::test]
async fn administration_needs_a_signature_that_is_used_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let (key, log) = (folder.path().join("admin.key"), folder.path().join("log"));
    std::fs::write(&key, "# ours\nan-admin-key-of-ours\n").expect("written");
    let at = key.to_str().expect("UTF-8");
    let serving = Serving::start(&["--admin-key-file", at], &log);
    let (_p, d) = pair().await;
    let body = json!({"role": "decode", "url": d.url()}).to_string();
    let bare = send(serving.admin, "/v1/workers", &[], &body).await;
    assert_eq!(refusal(&bare), (401, "signature_missing".to_owned()));
    let headers = sign(&key, "post", "/v1/workers", &body);
    let other = send(serving.admin, "/v1/workers", &headers, "{}").await;
    assert_eq!(refusal(&other), (401, "bad_signature".to_owned()));
    let drain = "/v1/workers/decode-0/drain";
    let elsewhere = send(serving.admin, drain, &headers, &body).await;
    assert_eq!(refusal(&elsewhere), (401, "bad_signature".to_owned()));
    assert_eq!(get(serving.admin, "/workers").await.json(), json!([]));

    let first = send(serving.admin, "/v1/workers", &headers, &body).await;
    assert_eq!(first.status, 201);
    let again = send(serving.admin, "/v1/workers", &headers, &body).await;
    assert_eq!(refusal(&again), (401, "replayed_nonce".to_owned()));
    let beat = sign(&key, "POST", "/v1/workers", &body);
    assert_eq!(
        send(serving.admin, "/v1/workers", &beat, &body)
            .await
            .status,
        200
    );
    let target = "/v1/workers/decode-0/drain?wait_s=1";
    let drained = send(serving.admin, target, &sign(&key, "POST", target, ""), "").await;
    assert_eq!(drained.json()["standing"], json!("drained"));
    // A change without one is refused whatever it is; what is only read is open.
    for path in ["undrain", "role"] {
        let path = format!("/v1/workers/decode-0/{path}");
        let reply = send(serving.admin, &path, &[], "").await;
        assert_eq!(refusal(&reply), (401, "signature_missing".to_owned()));
    }
    let mut client = Client::connect(serving.admin).await;
    client.delete("/v1/workers/decode-0").await;
    assert_eq!(client.reply().await.status, 401);
    let shown = get(serving.admin, "/v1/workers/decode-0").await;
    assert_eq!(shown.json()["standing"], json!("drained"));
    let metrics = get(serving.clients, "/metrics").await.text();
    for line in [
        "unauthorized_total{reason=\"signature_missing\"} 4",
        "unauthorized_total{reason=\"bad_signature\"} 2",
        "unauthorized_total{reason=\"replayed_nonce\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
}

#[tokio::test]
async fn clients_need_a_key_which_no_engine_gets_unless_told() {
    let (p, d) = pair().await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "key-of-one\nkey-of-two\n").expect("written");
    for forwards in [None, Some(true)] {
        let settings = Settings {
            api_key_file: Some(file.clone()),
            forward_authorization: forwards,
            ..Settings::default()
        };
        let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
        let at = proxy.address;
        let before = p.count();
        let bare = send(at, COMPLETIONS, &[], PROMPT).await;
        assert_eq!(refusal(&bare), (401, "missing_api_key".to_owned()));
        assert_eq!(bare.headers["www-authenticate"], "Bearer");
        assert_eq!(bare.json()["error"]["type"], json!("invalid_request_error"));
        let wrong = send(at, COMPLETIONS, &bearer("key-of-three"), PROMPT).await;
        assert_eq!(refusal(&wrong), (401, "invalid_api_key".to_owned()));
        for path in ["/v1/models", "/workers", "/v1/files"] {
            assert_eq!(get(at, path).await.status, 401, "{path}");
        }
        for path in ["/health", "/metrics"] {
            assert_eq!(get(at, path).await.status, 200, "{path}");
        }
        assert_eq!(p.count(), before);
        let good = send(at, COMPLETIONS, &bearer("key-of-two"), PROMPT).await;
        assert_eq!(good.status, 200);
        for engine in [&p, &d] {
            let seen = engine.seen();
            let told = seen
                .last()
                .and_then(|seen| seen.headers.get("authorization"));
            let want = forwards.map(|_| "Bearer key-of-two");
            assert_eq!(told.map(String::as_str), want);
        }
        let reason = "unauthorized_total{reason=\"invalid_api_key\"}";
        assert_eq!(metric(&proxy, reason).await, 1.0);
    }
}

#[tokio::test]
async fn sighup_reads_the_keys_again_and_a_bad_file_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let (admin, clients, log) = (path("admin"), path("clients"), path("log"));
    std::fs::write(&admin, "an-admin-key-of-ours").expect("written");
    std::fs::write(&clients, "key-of-one").expect("written");
    let flags = ["--admin-key-file", admin.to_str().expect("UTF-8")];
    let more = ["--api-key-file", clients.to_str().expect("UTF-8")];
    let serving = Serving::start(&[flags, more].concat(), &log);
    let asked = async |key: &str| {
        let mut client = Client::connect(serving.clients).await;
        let head =
            format!("GET /workers HTTP/1.1\r\nHost: p\r\nAuthorization: Bearer {key}\r\n\r\n");
        client.raw(head.as_bytes()).await;
        client.reply().await.status
    };
    assert_eq!(
        (asked("key-of-one").await, asked("key-of-two").await),
        (200, 401)
    );

    std::fs::write(&clients, "key-of-two\nshort").expect("written");
    serving.reload(&log, 1).await;
    assert_eq!(
        (asked("key-of-one").await, asked("key-of-two").await),
        (200, 401)
    );
    let faults: Vec<Value> = lines(&log)
        .into_iter()
        .map(|line| line["fields"]["fault"].clone())
        .filter(|fault| !fault.is_null())
        .collect();
    let fault = format!(
        "--api-key-file {}: line 2: a key has 8 to 512 characters, not 5",
        clients.display()
    );
    assert_eq!(faults, [json!(fault)]);

    std::fs::write(&clients, "key-of-two").expect("written");
    std::fs::write(&admin, "another-admin-key").expect("written");
    serving.reload(&log, 2).await;
    assert_eq!(
        (asked("key-of-one").await, asked("key-of-two").await),
        (401, 200)
    );
    let body = r#"{"role":"decode","url":"http://127.0.0.1:9"}"#;
    let headers = sign(&admin, "POST", "/v1/workers", body);
    assert_eq!(
        send(serving.admin, "/v1/workers", &headers, body)
            .await
            .status,
        201
    );
}

#[test]
fn a_method_that_no_path_has_is_not_signed() {
    let folder = tempfile::tempdir().expect("a folder");
    let key = folder.path().join("admin.key");
    std::fs::write(&key, "an-admin-key-of-ours\n").expect("written");
    for (method, target, part) in [
        (
            "pots",
            "/v1/workers",
            "pots: no method of the admin listener; one of GET, HEAD, POST",
        ),
        (
            "/v1/workers",
            "POST",
            "POST: the path and query of the request",
        ),
    ] {
        let mut sign = command();
        let sign = sign.args(["sign", "--key-file"]).arg(&key);
        let output = sign.args([method, target]).output();
        let output = output.expect("the executable runs");
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(errors.contains(part), "{errors}");
    }
}
