//! Requests that are large, deep or slow, with the limits that a user gets who sets none.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use tokio::time::Instant;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script};
use crate::{CHAT, COMPLETIONS, PROMPT, post, proxy, proxy_with, urls};

const PREFILLED: &str =
    r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"k":1.50}}"#;
/// What the decode leg has that the client did not send.
const PARAMS: &str = r#""kv_transfer_params":{"k":1.50},"#;

/// Engines that take any body.
async fn pair() -> (Engine, Engine) {
    let start = async |answer| {
        let script = Script::Answer(200, "application/json", answer);
        Engine::start(script, &Blocks::default()).await
    };
    (start(PREFILLED).await, start("{}").await)
}

#[tokio::test]
async fn bodies_up_to_the_default_limit_pass_whole_and_one_over_it_is_413() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let body = |megabytes: usize| {
        let text = "x".repeat(megabytes * 1_000_000);
        format!(r#"{{"model":"m","prompt":"{text}","max_tokens":8}}"#)
    };
    for (at, megabytes) in [1, 3, 20].into_iter().enumerate() {
        let body = body(megabytes);
        let reply = post(&proxy, COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{megabytes} MB");
        let got = d.seen()[at].body.clone();
        assert_eq!(got.len(), body.len() + PARAMS.len(), "{megabytes} MB");
        assert!(got.ends_with(&body.as_bytes()[1..]), "{megabytes} MB");
    }
    let reply = post(&proxy, COMPLETIONS, &body(70)).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (413, "body_too_large")
    );
    assert!(reply.text().contains(&(64_usize << 20).to_string()));
    assert_eq!((p.count(), d.count()), (3, 3));
}

/// How deep is too deep is the engine's to say; a parser that recurses would end the proxy.
#[tokio::test]
async fn deep_json_costs_no_stack_and_is_the_engines_to_judge() {
    let (p, d) = pair().await;
    // What looks into prompts has to bear it too.
    let settings = Settings {
        policy: Some("prefix-aware".to_owned()),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    for depth in [2_000, 100_000] {
        let deep = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        for (path, body) in [
            (COMPLETIONS, format!(r#"{{"prompt":"p","x":{deep}}}"#)),
            (COMPLETIONS, format!(r#"{{"prompt":{deep}}}"#)),
            (CHAT, format!(r#"{{"messages":{deep},"tools":{deep}}}"#)),
            (
                "/v1/responses",
                format!(r#"{{"input":"x","tools":{deep}}}"#),
            ),
        ] {
            let reply = post(&proxy, path, &body).await;
            assert_eq!(reply.status, 200, "{path} {depth}: {}", reply.text());
            let seen = d.seen();
            let got = seen.last().expect("a leg").text();
            let want = body.replacen('{', &format!("{{{PARAMS}"), 1);
            assert!(got == want, "{path} {depth}: {} bytes", got.len());
            let seen = p.seen();
            let sent = seen.last().expect("a leg").text();
            assert!(sent.contains(&deep), "{path} {depth}");
        }
    }
    // Half of it is no JSON.
    let half = format!(r#"{{"prompt":"p","x":{}"#, "[".repeat(100_000));
    assert_eq!(
        post(&proxy, COMPLETIONS, &half).await.error_code(),
        "invalid_json"
    );
}

#[tokio::test]
async fn hundreds_of_half_requests_keep_nobody_waiting_and_are_all_ended() {
    const HEADS: usize = 300;
    const BODIES: usize = 100;
    hetero_kv_proxy::run::raise_open_files();
    let (p, d) = pair().await;
    let settings = Settings {
        header_read_timeout_s: Some(3),
        body_read_timeout_s: Some(3),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let begun = Instant::now();
    let mut slow = Vec::new();
    for at in 0..HEADS + BODIES {
        let part = match at < HEADS {
            true => "POST /v1/completions HTTP/1.1\r\nHost:",
            false => "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
        };
        let mut client = Client::connect(proxy.address).await;
        client.raw(part.as_bytes()).await;
        slow.push(client);
    }
    for _ in 0..20 {
        let start = Instant::now();
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
        assert!(
            start.elapsed() < Duration::from_millis(500),
            "{:?}",
            start.elapsed()
        );
    }
    assert!(
        begun.elapsed() < Duration::from_secs(3),
        "none was ended yet"
    );
    let mut told = 0;
    for (at, mut client) in slow.into_iter().enumerate() {
        // 408, or the end of the connection alone where there was no request.
        match client.head().await {
            Some(head) => {
                assert_eq!(head.status, 408);
                told += 1;
            }
            None => assert!(at < HEADS, "a body that does not come is answered"),
        }
    }
    assert!(told >= BODIES);
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!((p.count(), d.count()), (20, 20));
}
