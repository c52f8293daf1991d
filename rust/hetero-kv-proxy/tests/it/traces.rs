//! The times of one request, as a Chrome trace and as a line of the log.

use std::collections::BTreeMap;
use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use serde_json::Value;

use crate::admin;
use crate::client::{Client, Reply};
use crate::engine::{Blocks, Engine, Script, engines, pair};
use crate::process::command;
use crate::{COMPLETIONS, STREAM, proxy_with, until, urls};

const PAUSE: Duration = Duration::from_millis(30);

async fn watched(kept: usize, prefill: &[&Engine], decode: &[&Engine]) -> Proxy {
    let settings = Settings {
        admin_listen: Some("127.0.0.1:0".to_owned()),
        trace_requests_max: Some(kept),
        ..Settings::default()
    };
    proxy_with(settings, &urls(prefill), &urls(decode)).await
}

async fn send(proxy: &Proxy, id: &str) -> Reply {
    let mut client = Client::connect(proxy.address).await;
    let headers = [
        ("x-request-id", id),
        (
            "traceparent",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ),
    ];
    client.post(COMPLETIONS, &headers, STREAM.as_bytes()).await;
    client.reply().await
}

async fn look(proxy: &Proxy, id: &str) -> Reply {
    admin::look(proxy, &format!("/v1/trace/{id}")).await
}

/// Name, row, begin and length of the complete events, after what Chrome's format asks of each:
/// spans of one row lie within one another or apart.
fn spans(trace: &Value) -> Vec<(String, u64, u64, u64)> {
    let number = |event: &Value, name: &str| event[name].as_u64().expect(name);
    let mut spans = Vec::new();
    let mut rows: BTreeMap<(u64, u64), Vec<(u64, u64)>> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().expect("a list of events") {
        let name = event["name"].as_str().expect("a name").to_owned();
        let (pid, tid) = (number(event, "pid"), number(event, "tid"));
        assert!(event["args"].is_object(), "{event}");
        match event["ph"].as_str() {
            Some("M") => {
                assert!(["process_name", "thread_name"].contains(&name.as_str()));
                assert!(event["args"]["name"].is_string());
            }
            Some("X") => {
                let (begin, length) = (number(event, "ts"), number(event, "dur"));
                rows.entry((pid, tid))
                    .or_default()
                    .push((begin, begin + length));
                spans.push((name, tid, begin, length));
            }
            other => panic!("{other:?} in {event}"),
        }
    }
    for row in rows.values() {
        for a in row {
            for b in row {
                let apart = a.1 <= b.0 || b.1 <= a.0;
                let within = a.0 <= b.0 && b.1 <= a.1 || b.0 <= a.0 && a.1 <= b.1;
                assert!(apart || within, "{a:?} and {b:?} overlap");
            }
        }
    }
    spans
}

#[tokio::test]
async fn a_request_is_shown_as_a_chrome_trace_with_its_legs_and_the_transfer() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    p0.once(Script::Busy(503));
    p1.always(Script::After(PAUSE, Box::new(Script::Prefill)));
    let stream = Script::Stream(vec!["data: 1\n\n", "data: [DONE]\n\n"], PAUSE);
    d.always(Script::After(PAUSE, Box::new(stream)));
    let proxy = watched(2, &[&p0, &p1], &[&d]).await;
    assert!(send(&proxy, "a/b").await.whole);

    let reply = look(&proxy, "a%2Fb").await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let trace = reply.json();
    let spans = spans(&trace);
    let of = |name: &str| -> Vec<(u64, u64)> {
        let of_it = spans.iter().filter(|span| span.0 == name);
        of_it.map(|span| (span.2, span.2 + span.3)).collect()
    };
    let pause = PAUSE.as_micros() as u64;
    let [request] = of("request")[..] else {
        panic!("one request")
    };
    for (name, count, least) in [
        ("admit", 1, 0),
        ("queue", 1, 0),
        ("prefill", 1, pause),
        ("handover", 1, pause),
        ("stream", 1, 2 * pause),
        // One was refused, and tried elsewhere.
        ("prefill leg", 2, 0),
        ("decode leg", 1, 3 * pause),
        ("chunks", 1, pause),
        ("transfer, and decode's first step", 1, 2 * pause),
    ] {
        let found = of(name);
        assert_eq!(found.len(), count, "{name} in {trace}");
        for (begin, end) in found {
            assert!(
                request.0 <= begin && end <= request.1,
                "{name} outside of the request"
            );
            assert!(
                end - begin >= least * 98 / 100,
                "{name}: {} us",
                end - begin
            );
        }
    }
    // Legs come one after the other: refused, prefilled, decoded.
    let (prefill, decode) = (of("prefill leg"), of("decode leg"));
    assert!(prefill[0].1 <= prefill[1].0 && prefill[1].1 <= decode[0].0);
    assert_eq!(of("transfer, and decode's first step")[0].0, prefill[1].1);
    let text = trace.to_string();
    for part in [
        "status_5xx",
        "4bf92f3577b34da6a3ce929d0e0e4736",
        "a/b",
        d.url().as_str(),
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let leg = &d.seen()[0].headers["traceparent"];
    let parent_id = leg.split('-').nth(2).expect("a parent id");
    assert!(text.contains(parent_id), "{parent_id} in {text}");
}

#[tokio::test]
async fn the_last_requests_are_kept_and_no_more() {
    let (p, d) = pair().await;
    let proxy = watched(2, &[&p], &[&d]).await;
    for id in ["one", "two", "two", "three"] {
        assert_eq!(send(&proxy, id).await.status, 200);
    }
    let known = async |id: &str| {
        let reply = look(&proxy, id).await;
        match reply.status {
            200 => spans(&reply.json())
                .iter()
                .filter(|span| span.0 == "request")
                .count(),
            _ => {
                assert_eq!(
                    (reply.status, reply.error_code().as_str()),
                    (404, "unknown_request")
                );
                0
            }
        }
    };
    assert_eq!(
        (known("one").await, known("two").await, known("three").await),
        (0, 1, 1)
    );
    assert_eq!(known("%zz").await, 0);
    // Not on the clients' listener.
    let mut client = Client::connect(proxy.address).await;
    client.get("/v1/trace/three").await;
    let relayed = client.reply().await;
    assert!(!relayed.text().contains("traceEvents"));

    let off = watched(0, &[&p], &[&d]).await;
    send(&off, "four").await;
    assert_eq!(look(&off, "four").await.status, 404);
}

#[tokio::test]
async fn a_request_that_failed_or_whose_client_left_is_shown_as_far_as_it_went() {
    let (p, d) = pair().await;
    let proxy = watched(8, &[&p], &[&d]).await;
    p.once(Script::Answer(400, "application/json", "{}"));
    assert_eq!(send(&proxy, "refused").await.status, 400);
    p.once(Script::Silence);
    let mut client = Client::connect(proxy.address).await;
    client
        .post(COMPLETIONS, &[("x-request-id", "left")], STREAM.as_bytes())
        .await;
    until("prefill has the leg", || p.count() == 2).await;
    drop(client);
    until("the leg is closed", || p.ended(1).is_some()).await;
    for (id, status, outcome) in [("refused", 400, "status_4xx"), ("left", 499, "cancelled")] {
        let mut reply = look(&proxy, id).await;
        while reply.status == 404 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            reply = look(&proxy, id).await;
        }
        let trace = reply.json();
        let names: Vec<String> = spans(&trace).into_iter().map(|span| span.0).collect();
        assert!(names.contains(&"prefill leg".to_owned()), "{names:?}");
        assert!(!names.contains(&"decode leg".to_owned()), "{names:?}");
        let text = trace.to_string();
        assert!(text.contains(&format!("\"status\":{status}")), "{text}");
        assert!(text.contains(outcome), "{text}");
    }
}

/// What `hetero-kv-proxy trace` gives: its exit code, and what it says.
async fn trace(admin: &str, id: &str) -> (Option<i32>, String, String) {
    let mut trace = command();
    trace.args(["trace", "--admin", admin, id]);
    let output = tokio::task::spawn_blocking(move || trace.output());
    let output = output.await.expect("no panic").expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[tokio::test]
async fn the_command_fetches_a_trace_and_says_why_there_is_none() {
    let (p, d) = pair().await;
    let proxy = watched(2, &[&p], &[&d]).await;
    let id = "a/b c?d%e";
    let mut client = Client::connect(proxy.address).await;
    let headers = [("x-request-id", id)];
    client.post(COMPLETIONS, &headers, STREAM.as_bytes()).await;
    assert_eq!(client.reply().await.status, 200);
    let admin = proxy.admin_address.expect("an admin listener");
    let admin = format!("http://{admin}/");
    let (code, told, errors) = trace(&admin, id).await;
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert!(
        spans(&told).iter().any(|span| span.0 == "decode leg"),
        "{told}"
    );

    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let silent = format!("http://{}", nobody.local_addr().expect("address"));
    let gone = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
        format!("http://{}", listener.local_addr().expect("address"))
    };
    let clients = format!("http://{}", proxy.address);
    let begun = std::time::Instant::now();
    for (admin, id, parts) in [
        (
            &*admin,
            "other",
            ["other: no request of this id", "still runs"],
        ),
        (&gone, "id", ["no connection: ", "--admin-listen of serve"]),
        (
            &clients,
            "id",
            ["that is not the admin listener", "not that of --listen"],
        ),
        (&silent, "id", ["--admin http://", "no answer within 10 s"]),
        ("https://h:1", "id", ["--admin https://h:1: ", "plain HTTP"]),
        ("h:1", "id", ["--admin h:1: ", "begins with http://"]),
        (&admin, "", ["REQUEST_ID", "1 to 8192 bytes"]),
    ] {
        let (code, told, errors) = trace(admin, id).await;
        assert_eq!((code, told.as_str()), (Some(1), ""), "{admin} {id}");
        for part in parts {
            assert!(errors.contains(part), "{part} in {errors}");
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(20));
    let usage = command().arg("trace").output().expect("it runs");
    assert_eq!(usage.status.code(), Some(2));
    let help = command().args(["trace", "--help"]).output();
    let help = String::from_utf8_lossy(&help.expect("it runs").stdout).into_owned();
    for part in ["ui.perfetto.dev", "--trace-requests-max", "Exit status"] {
        assert!(help.contains(part), "{part} in {help}");
    }
}

#[tokio::test]
async fn a_proxy_that_asks_for_signatures_shows_traces_without_one() {
    let (p, d) = pair().await;
    let keys = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(keys.path(), "an-admin-key-of-ours\n").expect("written");
    let settings = Settings {
        admin_listen: Some("127.0.0.1:0".to_owned()),
        admin_key_file: Some(keys.path().to_owned()),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    assert_eq!(send(&proxy, "signed").await.status, 200);
    let admin = format!("http://{}", proxy.admin_address.expect("a listener"));
    let (code, told, errors) = trace(&admin, "signed").await;
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(told.contains("traceEvents"));
}
