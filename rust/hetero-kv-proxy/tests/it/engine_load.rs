//! What engines say of their load, on the way into the choice of a slot.

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::routing::Role;
use hetero_kv_proxy::run::Proxy;

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script};
use crate::{COMPLETIONS, PROMPT, metric, post, proxy_with, until, urls};

/// Scrapes often, with the policies that a user gets who names none.
fn scraping() -> Settings {
    Settings {
        scrape_interval_ms: Some(20),
        ..Settings::default()
    }
}

fn gauges(engine: &str, running: &str, waiting: u32) -> String {
    format!(
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"{engine}\",model_name=\"m\"}} {running}\n\
         vllm:num_requests_waiting{{engine=\"{engine}\",model_name=\"m\"}} {waiting}.0\n\
         vllm:kv_cache_usage_perc{{engine=\"{engine}\",model_name=\"m\"}} 0.25\n"
    )
}

fn elsewhere(proxy: &Proxy, at: usize) -> Option<Vec<u32>> {
    proxy.app.view(Role::Decode)[at].elsewhere_by_rank.clone()
}

async fn told(proxy: &Proxy, at: usize, ranks: &[u32]) {
    until("the engine was asked", || {
        elsewhere(proxy, at).as_deref() == Some(ranks)
    })
    .await;
}

async fn trio() -> (Engine, Engine, Engine) {
    let blocks = Blocks::default();
    (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
        Engine::decode(&blocks).await,
    )
}

#[tokio::test]
async fn decode_goes_by_what_engines_say_and_only_while_it_is_fresh() {
    let (p, d0, d1) = trio().await;
    d0.set_metrics(Some(&gauges("0", "5", 3)));
    d1.set_metrics(Some(&gauges("0", "1", 0)));
    let proxy = proxy_with(scraping(), &urls(&[&p]), &urls(&[&d0, &d1])).await;
    told(&proxy, 0, &[8]).await;
    told(&proxy, 1, &[1]).await;
    for _ in 0..6 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!((d0.count(), d1.count()), (0, 6));
    // It fills up, and the other gets empty.
    d0.set_metrics(Some(&gauges("0", "0", 0)));
    told(&proxy, 0, &[0]).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!((d0.count(), d1.count()), (1, 6));
    // It says nothing any more: three intervals later it counts as the others do on average.
    d0.set_metrics(None);
    until("the last word is old", || elsewhere(&proxy, 0).is_none()).await;
    for _ in 0..6 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!((d0.count(), d1.count()), (4, 9));
    let scrapes = |outcome: &str| format!("engine_scrapes_total{{outcome=\"{outcome}\"}}");
    assert!(metric(&proxy, &scrapes("ok")).await > 0.0);
    assert!(metric(&proxy, &scrapes("refused")).await > 0.0);
}

#[tokio::test]
async fn another_proxys_legs_are_seen_and_ones_own_are_not_seen_twice() {
    let (p, d0, d1) = trio().await;
    for engine in [&d0, &d1] {
        engine.set_metrics(Some(&gauges("0", "RUNNING", 0)));
        engine.always(Script::Silence);
    }
    let one = proxy_with(scraping(), &urls(&[&p]), &urls(&[&d0])).await;
    let other = proxy_with(scraping(), &urls(&[&p]), &urls(&[&d0, &d1])).await;
    let mut held = Vec::new();
    for at in 1..=3 {
        let mut client = Client::connect(one.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        held.push(client);
        until("decode has the leg", || d0.count() == at).await;
    }
    told(&other, 0, &[3]).await;
    assert_eq!(elsewhere(&one, 0), Some(vec![0]), "they are its own");
    // Three go to the empty engine before both are equal.
    for at in 1..=3 {
        let mut client = Client::connect(other.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        held.push(client);
        until("decode has the leg", || d1.count() == at).await;
    }
    assert_eq!(d0.count(), 3);
    drop(held);
}

#[tokio::test]
async fn each_rank_has_its_own_load() {
    let (p, d, _) = trio().await;
    // Ranks 6 and 7 of a larger engine.
    let both = gauges("6", "9", 0) + &gauges("7", "0", 1);
    d.set_metrics(Some(&both));
    let flag = format!("{},dp=2,rank0=6", d.url());
    let proxy = proxy_with(scraping(), &urls(&[&p]), &[flag]).await;
    told(&proxy, 0, &[9, 1]).await;
    for _ in 0..4 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert!(d.seen().iter().all(|seen| seen.rank() == Some("7")));
}

#[tokio::test]
async fn engines_that_say_nonsense_or_nothing_serve_as_ever() {
    let (p, d0, d1) = trio().await;
    d0.set_metrics(Some("<html>\u{0}vllm:num_requests_running{engine=\"0"));
    let proxy = proxy_with(scraping(), &urls(&[&p]), &urls(&[&d0, &d1])).await;
    let unknown = "engine_scrapes_total{outcome=\"unknown\"}";
    while metric(&proxy, unknown).await < 2.0 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    for _ in 0..6 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!((d0.count(), d1.count()), (3, 3));
    // Larger than any engine's answer: not held in memory, and of no consequence.
    let many = "x 1\n".repeat(3 << 20);
    d0.set_metrics(Some(&many));
    let refused = "engine_scrapes_total{outcome=\"refused\"}";
    let before = metric(&proxy, refused).await;
    // The other's are 404s.
    while metric(&proxy, refused).await < before + 8.0 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(elsewhere(&proxy, 0), None);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
}
