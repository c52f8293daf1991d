//! Lines of the log by which operators find what happened.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::client::send;
use crate::engine::{Blocks, Engine, pair};
use crate::process::{Serving, lines};
use crate::{COMPLETIONS, PROMPT};

/// The fields of the first line that begins so.
async fn said(log: &Path, beginning: &str) -> Value {
    let start = Instant::now();
    loop {
        let fields = lines(log).into_iter().map(|line| line["fields"].clone());
        let begins = |fields: &Value| {
            let message = fields["message"].as_str().unwrap_or_default();
            message.starts_with(beginning)
        };
        if let Some(found) = fields.into_iter().find(begins) {
            return found;
        }
        let waited = start.elapsed();
        assert!(
            waited < Duration::from_secs(5),
            "{beginning}: {:?}",
            lines(log)
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_drain_and_its_end_are_told_as_what_they_are() {
    let (p, d) = pair().await;
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let serving = Serving::start(&["--prefill", &p.url(), "--decode", &d.url()], &log);
    for (order, beginning) in [
        ("drain", "worker drained: it gets no new legs"),
        ("undrain", "worker undrained: it gets legs again"),
    ] {
        let path = format!("/v1/workers/decode-0/{order}");
        assert_eq!(send(serving.admin, &path, &[], "").await.status, 200);
        let fields = said(&log, beginning).await;
        assert_eq!(
            (&fields["id"], &fields["url"]),
            (&"decode-0".into(), &d.url().into())
        );
        assert!(fields["drained"].is_null(), "{fields}");
    }
}

#[tokio::test]
async fn a_bootstrap_server_that_does_not_answer_is_told_by_its_address() {
    let blocks = Blocks::default();
    let ((p, d), dead) = (pair().await, Engine::decode(&blocks).await);
    dead.kill().await;
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let prefill = format!("{},bootstrap={}", p.url(), dead.address);
    let workers = ["--prefill", &prefill, "--decode", &d.url()];
    let flags = [&["--connector", "mooncake"][..], &workers].concat();
    let serving = Serving::start(&flags, &log);
    let reply = send(serving.clients, COMPLETIONS, &[], PROMPT).await;
    assert_eq!(reply.error_code(), "prefill_bootstrap");
    let fields = said(&log, "Mooncake's bootstrap server").await;
    assert_eq!(fields["bootstrap"], dead.url().as_str());
    assert_eq!(fields["url"], p.url().as_str());
    let message = fields["message"].as_str().expect("a text");
    assert!(message.contains("the worker's `bootstrap`"), "{message}");
    let reason = fields["reason"].as_str().expect("a reason");
    assert!(reason.contains("no connection"), "{reason}");
}
