//! Policies that go by what a request says, from its bytes to the engine that gets it.

use hetero_kv_proxy::cli::Settings;

use crate::client::Client;
use crate::engine::{Blocks, Engine, engines};
use crate::{CHAT, COMPLETIONS, proxy_with, urls};

/// The position of the one engine that a request reached.
async fn lands(
    address: std::net::SocketAddr,
    engines: &[&Engine],
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> usize {
    let before: Vec<usize> = engines.iter().map(|engine| engine.count()).collect();
    let mut client = Client::connect(address).await;
    client.post(path, headers, body.as_bytes()).await;
    let reply = client.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let reached: Vec<usize> = (0..engines.len())
        .filter(|&at| engines[at].count() > before[at])
        .collect();
    assert_eq!(reached.len(), 1, "{reached:?}");
    reached[0]
}

fn settings(policy: &str) -> Settings {
    Settings {
        prefill_policy: Some(policy.to_owned()),
        decode_policy: Some("power-of-two".to_owned()),
        hash_header: Some("X-User".to_owned()),
        ..Settings::default()
    }
}

#[tokio::test]
async fn consistent_hash_keeps_a_session_and_a_prompt_on_one_engine() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let p = [&p0, &p1];
    let proxy = proxy_with(settings("consistent-hash"), &urls(&p), &urls(&[&d])).await;
    let body = |text: &str| format!(r#"{{"model":"m","prompt":"{text}","max_tokens":8}}"#);
    let mut used = [false; 2];
    for user in 0..12 {
        let user = user.to_string();
        let headers = [("x-user", user.as_str())];
        let first = lands(proxy.address, &p, COMPLETIONS, &headers, &body("one")).await;
        let second = lands(proxy.address, &p, COMPLETIONS, &headers, &body("two")).await;
        assert_eq!(first, second, "user {user}");
        used[first] = true;
    }
    assert_eq!(used, [true, true]);
    for prompt in 0..6 {
        let start = prompt.to_string().repeat(300);
        let short = lands(proxy.address, &p, COMPLETIONS, &[], &body(&start)).await;
        let long = lands(
            proxy.address,
            &p,
            COMPLETIONS,
            &[],
            &body(&format!("{start}..")),
        )
        .await;
        assert_eq!(short, long, "prompt {prompt}");
    }
}

#[tokio::test]
async fn prefix_aware_keeps_a_conversation_on_the_engine_that_has_it() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let p = [&p0, &p1];
    let proxy = proxy_with(settings("prefix-aware"), &urls(&p), &urls(&[&d])).await;
    let mut talks: Vec<(String, usize)> = Vec::new();
    // An odd number: taking turns would not bring each back to its engine.
    for talk in 0..3 {
        let said = format!(r#"{{"role":"user","content":"{talk}{}"}}"#, "a".repeat(150));
        let body = format!(r#"{{"model":"m","messages":[{said}]}}"#);
        let home = lands(proxy.address, &p, CHAT, &[], &body).await;
        talks.push((said, home));
    }
    // New conversations are shared out.
    let homes: Vec<usize> = talks.iter().map(|(_, home)| *home).collect();
    assert!(homes.contains(&0) && homes.contains(&1), "{homes:?}");
    for turn in 0..5 {
        for (said, home) in &mut talks {
            said.push_str(&format!(
                r#",{{"role":"user","content":"{turn}{}"}}"#,
                "b".repeat(90)
            ));
            let body = format!(r#"{{"model":"m","messages":[{said}]}}"#);
            assert_eq!(
                lands(proxy.address, &p, CHAT, &[], &body).await,
                *home,
                "turn {turn}"
            );
        }
    }
    // Its engine fails: the conversation goes on at the other, and stays there.
    let (said, home) = &talks[0];
    p[*home].kill().await;
    let body = format!(r#"{{"model":"m","messages":[{said}]}}"#);
    for _ in 0..3 {
        assert_eq!(lands(proxy.address, &p, CHAT, &[], &body).await, 1 - home);
    }
}
