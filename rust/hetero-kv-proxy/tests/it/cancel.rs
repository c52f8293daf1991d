//! Clients that leave, in each phase.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use tokio::io::AsyncWriteExt;

use crate::client::Client;
use crate::engine::{Blocks, Ended, Engine, Script, freed, pair, pair_on};
use crate::{
    COMPLETIONS, PROMPT, STREAM, metric, metric_sum, post, proxy, proxy_with, until, urls,
};

/// What "at once" means on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(1);

async fn disconnects(proxy: &hetero_kv_proxy::run::Proxy, phase: &str) -> f64 {
    let line = format!("client_disconnects_total{{phase=\"{phase}\"}}");
    metric(proxy, &line).await
}

async fn requests(proxy: &hetero_kv_proxy::run::Proxy, status: u16) -> f64 {
    let line = format!("requests_total{{route=\"/v1/completions\",status=\"{status}\"}}");
    metric(proxy, &line).await
}

#[tokio::test]
async fn leaving_during_prefill_closes_the_prefill_leg_and_sends_no_decode() {
    let (p, d) = pair().await;
    p.once(Script::After(
        Duration::from_secs(4),
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
    assert_eq!(requests(&proxy, 499).await, 1.0);
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

/// Leaves at many moments around the end of prefill: wherever prefill's answer was by then, decode
/// gets the leg, and no block stays.
#[tokio::test]
async fn leaving_around_the_end_of_prefill_never_strands_blocks() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let pause = Duration::from_millis(10);
    p.always(Script::After(pause, Box::new(Script::Prefill)));
    d.always(Script::After(pause, Box::new(Script::Decode)));
    let settings = Settings {
        handover_grace_ms: Some(4_000),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    for at in 0..60 {
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        until("the prefill leg", || p.count() == at + 1).await;
        tokio::time::sleep(Duration::from_micros(400 * at as u64)).await;
        drop(client);
        // The proxy has noticed, or had answered before; prefill has been closed, or has pinned.
        while requests(&proxy, 499).await + requests(&proxy, 200).await <= at as f64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        until("the prefill leg's end", || p.ended(at).is_some()).await;
        freed(&blocks).await;
    }
    let late = 60.0 - disconnects(&proxy, "prefill").await;
    assert!(late >= 10.0, "{late} clients left after prefill");
    assert!(d.count() as f64 >= late, "{} decode legs", d.count());
}

/// The answer is in the proxy's socket, or a few milliseconds away in the engine's server, when the
/// client goes: the proxy has not seen it, and is the only one that can hand it over.
#[tokio::test]
async fn an_answer_that_was_on_its_way_when_the_client_left_is_handed_over() {
    const COUNT: usize = 100;
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    let proxy = proxy(&[&p], &[&d]).await;
    for at in 0..COUNT {
        // Every other answer is on its way for a moment after the blocks were pinned.
        let way = Duration::from_millis(if at % 2 == 0 { 0 } else { 5 });
        p.once(Script::PinThen(way));
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        while blocks.lock().expect("blocks").is_empty() && d.count() <= at {
            tokio::task::yield_now().await;
        }
        drop(client);
        until("the decode leg", || d.count() > at).await;
        freed(&blocks).await;
    }
    assert_eq!(d.count(), COUNT);
    let settled = metric(&proxy, "settles_total").await;
    let in_prefill = disconnects(&proxy, "prefill").await;
    assert!(in_prefill >= COUNT as f64 / 2.0, "{in_prefill} left so");
    assert_eq!(settled, COUNT as f64);
    assert_eq!(metric_sum(&proxy, "kept_transfers").await, 0.0);
    assert_eq!(metric_sum(&proxy, "in_flight").await, 0.0);
}

#[tokio::test]
async fn a_decode_leg_without_a_sign_of_life_ends_after_the_grace() {
    let (p, d) = pair().await;
    let settings = Settings {
        handover_grace_ms: Some(1_500),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    // Without a head, and with one: vLLM sends the head of a stream before it has the request.
    for (at, script) in [Script::Silence, Script::StreamThenSilence(vec![])]
        .into_iter()
        .enumerate()
    {
        let has_head = at == 1;
        d.once(script);
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
        until("the decode leg", || d.count() == at + 1).await;
        if has_head {
            client.head().await.expect("a head");
        }
        drop(client);
        let took = until("the decode leg's end", || d.ended(at).is_some()).await;
        assert_eq!(d.ended(at), Some(Ended::ProxyClosed));
        assert!(
            took > Duration::from_millis(500) && took < Duration::from_secs(4),
            "{took:?}"
        );
        assert_eq!(metric(&proxy, "settles_total").await, (at + 1) as f64);
    }
}

#[tokio::test]
async fn a_decode_leg_older_than_the_grace_ends_at_once() {
    let (p, d) = pair().await;
    d.once(Script::Silence);
    d.once(Script::StreamThenSilence(vec![]));
    let settings = Settings {
        handover_grace_ms: Some(2_000),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    for at in 0..2 {
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        until("the decode leg", || d.count() == at + 1).await;
        tokio::time::sleep(Duration::from_millis(2_200)).await;
        drop(client);
        let took = until("the decode leg's end", || d.ended(at).is_some()).await;
        assert!(took < AT_ONCE, "{took:?}");
    }
    assert_eq!(disconnects(&proxy, "handover").await, 1.0);
    assert_eq!(disconnects(&proxy, "stream").await, 1.0);
}

#[tokio::test]
async fn leaving_in_mid_stream_closes_the_decode_leg_at_once() {
    let (p, d) = pair().await;
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
    let (p, d) = pair().await;
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
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let mut client = Client::connect(proxy.address).await;
    client
        .raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        .await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(client);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!((p.count(), d.count()), (0, 0));
    let ended = requests(&proxy, 499).await + requests(&proxy, 400).await;
    assert_eq!(ended, 1.0);
}

/// Each leg that outlives its client holds a connection and a body, and no place among those that
/// run: as many may be as requests may run.
#[tokio::test]
async fn legs_that_outlive_their_clients_are_bounded_and_those_beyond_are_counted() {
    let blocks = Blocks::default();
    let (p, d) = pair_on(&blocks).await;
    d.always(Script::Silence);
    let settings = Settings {
        requests_max: Some(2),
        handover_grace_ms: Some(20_000),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    for at in 0..4 {
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        until("the decode leg", || d.count() == at + 1).await;
        drop(client);
        while requests(&proxy, 499).await <= at as f64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    assert_eq!(metric(&proxy, "settles_total").await, 2.0);
    assert_eq!(metric(&proxy, "settles_refused_total").await, 2.0);
    // Theirs are closed at once, and the blocks are known to be left; the others live on.
    until("the end of two legs", || {
        d.ended(2).is_some() && d.ended(3).is_some()
    })
    .await;
    assert_eq!((d.ended(0), d.ended(1)), (None, None));
    assert_eq!(metric_sum(&proxy, "in_flight").await, 2.0);
    assert_eq!(metric_sum(&proxy, "transfers_left_total").await, 2.0);
    assert_eq!(blocks.lock().expect("blocks").len(), 4);
}
