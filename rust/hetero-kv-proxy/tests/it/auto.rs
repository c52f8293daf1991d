//! Policy `auto`: two legs, or decode alone.

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;
use serde_json::json;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script, freed};
use crate::pairs::counts;
use crate::{COMPLETIONS, metric, post, proxy_with, until, urls};

fn auto() -> Settings {
    Settings {
        policy: Some("auto".to_owned()),
        auto_prompt_bytes_min: Some(1_000),
        ..Settings::default()
    }
}

fn prompt(text: &str) -> String {
    json!({"model": "m", "prompt": text, "max_tokens": 8}).to_string()
}

/// A prompt of its own, of so many bytes.
fn long(mark: &str, bytes: usize) -> String {
    mark.repeat(bytes / mark.len() + 1)[..bytes].to_owned()
}

async fn alone(proxy: &Proxy, why: &str) -> f64 {
    metric(proxy, &format!("fallbacks_total{{reason=\"auto_{why}\"}}")).await
}

async fn engines(decode: usize) -> (Blocks, Vec<Engine>, Vec<Engine>) {
    let blocks = Blocks::default();
    let p = vec![Engine::prefill(&blocks).await];
    let mut d = Vec::new();
    for _ in 0..decode {
        d.push(Engine::decode(&blocks).await);
    }
    (blocks, p, d)
}

async fn proxy_for(p: &[Engine], d: &[Engine], settings: Settings) -> Proxy {
    let all = |engines: &[Engine]| urls(&engines.iter().collect::<Vec<_>>());
    proxy_with(settings, &all(p), &all(d)).await
}

#[tokio::test]
async fn short_prompts_and_known_ones_run_alone_and_new_long_ones_as_a_pair() {
    let (blocks, p, d) = engines(3).await;
    let proxy = proxy_for(&p, &d, auto()).await;
    let served =
        async |text: &str| assert_eq!(post(&proxy, COMPLETIONS, &prompt(text)).await.status, 200);
    served("hello").await;
    served(&long("a short one ", 990)).await;
    assert_eq!((counts(&p), alone(&proxy, "short").await), (vec![0], 2.0));
    // A conversation: its first turn is long and new.
    let mut talk = long("once upon a time ", 4_500);
    let before = counts(&d);
    served(&talk).await;
    assert_eq!((p[0].count(), alone(&proxy, "known").await), (1, 0.0));
    let home = (0..3)
        .find(|at| d[*at].count() > before[*at])
        .expect("one decoded it");
    // Others come between.
    for mark in ["x", "y", "z"] {
        served(&long(mark, 3_000)).await;
    }
    assert_eq!(p[0].count(), 4);
    // The engine that decoded it has it, and what is new is short.
    for turn in 0..3 {
        talk.push_str(&format!(" and then {turn}"));
        let before = counts(&d);
        served(&talk).await;
        assert_eq!(d[home].count(), before[home] + 1, "turn {turn}");
    }
    assert_eq!((p[0].count(), alone(&proxy, "known").await), (4, 3.0));
    // What is new is long again.
    talk.push_str(&long("a whole book ", 5_000));
    served(&talk).await;
    assert_eq!((p[0].count(), alone(&proxy, "known").await), (5, 3.0));
    freed(&blocks).await;
}

#[tokio::test]
async fn decode_helps_out_while_prefill_has_a_queue_and_it_has_nothing_to_do() {
    let (_blocks, p, d) = engines(1).await;
    let proxy = proxy_for(&p, &d, auto()).await;
    p[0].always(Script::Silence);
    let mut held = Vec::new();
    let mut hold = async |mark: &str| {
        let mut client = Client::connect(proxy.address).await;
        client
            .post(COMPLETIONS, &[], prompt(&long(mark, 2_000)).as_bytes())
            .await;
        held.push(client);
    };
    for at in 0..8_usize {
        hold(&format!("<{at}>")).await;
        until("prefill has the leg", || p[0].count() == at + 1).await;
    }
    let reply = post(&proxy, COMPLETIONS, &prompt(&long("another ", 2_000))).await;
    assert_eq!(reply.status, 200);
    assert_eq!(
        (p[0].count(), d[0].count(), alone(&proxy, "busy").await),
        (8, 1, 1.0)
    );
    // With two streams there, decode is spared.
    d[0].always(Script::Silence);
    for at in 1..=2 {
        hold(&format!("({at})")).await;
        until("decode has it", || d[0].count() == at + 1).await;
    }
    hold("one more").await;
    until("prefill has the leg", || p[0].count() == 9).await;
    assert_eq!((d[0].count(), alone(&proxy, "busy").await), (3, 3.0));
}

#[tokio::test]
async fn a_full_prefill_pool_is_a_queue() {
    let (_blocks, p, d) = engines(1).await;
    let settings = Settings {
        prefill_requests_max: Some(1),
        ..auto()
    };
    let proxy = proxy_for(&p, &d, settings).await;
    p[0].always(Script::Silence);
    let mut held = Client::connect(proxy.address).await;
    held.post(COMPLETIONS, &[], prompt(&long("held ", 2_000)).as_bytes())
        .await;
    until("prefill has the leg", || p[0].count() == 1).await;
    let reply = post(&proxy, COMPLETIONS, &prompt(&long("another ", 2_000))).await;
    assert_eq!((reply.status, d[0].count()), (200, 1));
    assert_eq!(alone(&proxy, "busy").await, 1.0);
}

#[tokio::test]
async fn who_names_the_prefill_worker_gets_it_for_any_prompt() {
    let (_blocks, p, d) = engines(1).await;
    let settings = Settings {
        allow_prefill_endpoint: Some(true),
        ..auto()
    };
    let proxy = proxy_for(&p, &d, settings).await;
    let body = json!({"prompt": "hello", "max_tokens": 8, "prefill_endpoint": p[0].url()});
    let reply = post(&proxy, COMPLETIONS, &body.to_string()).await;
    assert_eq!((reply.status, p[0].count(), d[0].count()), (200, 1, 1));
    assert_eq!(alone(&proxy, "short").await, 0.0);
}
