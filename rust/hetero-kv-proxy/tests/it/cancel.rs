//! Clients that leave, in each phase.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use tokio::io::AsyncWriteExt;

use crate::client::Client;
use crate::engine::{Blocks, Ended, Engine, Script, freed};
use crate::{COMPLETIONS, PROMPT, STREAM, metric, post, proxy, proxy_with, until, urls};

/// What "at once" means on a busy machine.
const AT_ONCE: Duration = Duration::from_millis(150);

async fn disconnects(proxy: &hetero_kv_proxy::run::Proxy, phase: &str) -> f64 {
    let line = format!("client_disconnects_total{{phase=\"{phase}\"}}");
    metric(proxy, &line).await
}

#[tokio::test]
async fn leaving_during_prefill_closes_the_prefill_leg_and_sends_no_decode() {
    let blocks = Blocks::default();
    let (p, d) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    p.once(Script::After(
        Duration::from_secs(2),
        Box::new(Script::Prefill),
    ));
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
    until("the prefill leg", || p.count() == 1).await;
    drop(client);
    let took = until("the prefill leg's end", || p.ended(0).is_some()).await;
    assert_eq!(p.ended(0), Some(Ended::ProxyClosed));
    assert!(took < AT_ONCE, "{took:?}");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(d.count(), 0);
    assert_eq!(disconnects(&proxy, "prefill").await, 1.0);
    let left = "requests_total{route=\"/v1/completions\",status=\"499\"}";
    assert_eq!(metric(&proxy, left).await, 1.0);
    assert_eq!(metric(&proxy, "settles_total").await, 0.0);
}

#[tokio::test]
async fn leaving_while_decode_is_being_reached_still_sends_the_decode_leg_and_then_ends_it() {
    // The port of the decode engine accepts and stays silent until the client is gone: the leg is
    // then certainly not taken yet.
    let blocks = Blocks::default();
    let p = Engine::prefill(&blocks).await;
    let d = Engine::start(
        Script::After(Duration::from_millis(100), Box::new(Script::Decode)),
        &blocks,
    )
    .await;
    let settings = Settings {
        handover_grace_ms: Some(2_000),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
    until("pinned blocks", || {
        !blocks.lock().expect("blocks").is_empty()
    })
    .await;
    drop(client);
    freed(&blocks).await;
    assert_eq!(d.count(), 1);
    assert!(d.seen()[0].json()["kv_transfer_params"]["do_remote_prefill"] == true);
    assert_eq!(disconnects(&proxy, "handover").await, 1.0);
}

/// Leaves at many moments around the end of prefill. Whatever the moment: if prefill's answer was
/// taken, decode gets the leg, and no block stays.
#[tokio::test]
async fn leaving_around_the_end_of_prefill_never_strands_blocks() {
    let blocks = Blocks::default();
    let (p, d) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    let pause = Duration::from_millis(10);
    p.always(Script::After(pause, Box::new(Script::Prefill)));
    d.always(Script::After(pause, Box::new(Script::Decode)));
    let proxy = proxy(&[&p], &[&d]).await;
    let mut pinned = 0;
    for at in 0..60 {
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        until("the prefill leg", || p.count() == at + 1).await;
        if at % 3 == 0 {
            // Straight after prefill's answer, before decode can have answered.
            until("pinned blocks", || {
                !blocks.lock().expect("blocks").is_empty()
            })
            .await;
        } else {
            tokio::time::sleep(Duration::from_micros(400 * at as u64)).await;
        }
        drop(client);
        until("the prefill leg's end", || p.ended(at).is_some()).await;
        // An answer that was on the wire when the client left is the one case that the lease
        // bounds; the proxy then has no disconnect in the hand-over and no decode leg.
        let whole = p.ended(at) == Some(Ended::Whole);
        pinned += usize::from(whole);
        if whole && at % 3 != 0 {
            tokio::time::sleep(4 * pause).await;
            blocks.lock().expect("blocks").clear();
        }
        freed(&blocks).await;
    }
    assert!(pinned >= 20, "{pinned} requests got past prefill");
    assert!(d.count() >= 20);
}

#[tokio::test]
async fn a_decode_leg_without_a_sign_of_life_ends_after_the_grace() {
    let blocks = Blocks::default();
    let (p, d) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    d.once(Script::Silence);
    let settings = Settings {
        handover_grace_ms: Some(400),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
    until("the decode leg", || d.count() == 1).await;
    drop(client);
    let took = until("the decode leg's end", || d.ended(0).is_some()).await;
    assert_eq!(d.ended(0), Some(Ended::ProxyClosed));
    assert!(
        took > Duration::from_millis(300) && took < Duration::from_millis(800),
        "{took:?}"
    );
    assert_eq!(metric(&proxy, "settles_total").await, 1.0);
}

#[tokio::test]
async fn a_decode_leg_older_than_the_grace_ends_at_once() {
    let blocks = Blocks::default();
    let (p, d) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    d.once(Script::Silence);
    d.once(Script::StreamThenSilence(vec![]));
    let settings = Settings {
        handover_grace_ms: Some(100),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    for at in 0..2 {
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        until("the decode leg", || d.count() == at + 1).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        drop(client);
        let took = until("the decode leg's end", || d.ended(at).is_some()).await;
        assert!(took < AT_ONCE, "{took:?}");
    }
    assert_eq!(disconnects(&proxy, "handover").await, 1.0);
    assert_eq!(disconnects(&proxy, "stream").await, 1.0);
}

#[tokio::test]
async fn leaving_in_mid_stream_closes_the_decode_leg_at_once() {
    let blocks = Blocks::default();
    let (p, d) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    d.once(Script::Stream(
        vec!["data: 1\n\n"; 200],
        Duration::from_millis(20),
    ));
    let settings = Settings {
        handover_grace_ms: Some(60_000),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    client.chunk().await.expect("a chunk");
    drop(client);
    let took = until("the decode leg's end", || d.ended(0).is_some()).await;
    assert_eq!(d.ended(0), Some(Ended::ProxyClosed));
    assert!(took < AT_ONCE, "{took:?}");
    assert_eq!(disconnects(&proxy, "stream").await, 1.0);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
}

/// A client that closes its sending side only looks like one that left: HTTP gives no other sign.
#[tokio::test]
async fn a_half_closed_client_counts_as_one_that_left() {
    let blocks = Blocks::default();
    let (p, d) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    p.once(Script::Silence);
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
    until("the prefill leg", || p.count() == 1).await;
    client.stream.shutdown().await.expect("half closed");
    let took = until("the prefill leg's end", || p.ended(0).is_some()).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert!(client.head().await.is_none());
}

#[tokio::test]
async fn leaving_in_mid_body_sends_nothing() {
    let blocks = Blocks::default();
    let (p, d) = (
        Engine::prefill(&blocks).await,
        Engine::decode(&blocks).await,
    );
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client
        .raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        .await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(client);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!((p.count(), d.count()), (0, 0));
    let line = "requests_total{route=\"/v1/completions\",status=\"499\"}";
    let broken = "requests_total{route=\"/v1/completions\",status=\"400\"}";
    let ended = metric(&proxy, line).await + metric(&proxy, broken).await;
    assert_eq!(ended, 1.0);
}
