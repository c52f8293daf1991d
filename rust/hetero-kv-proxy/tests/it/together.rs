//! `moriio-write`: both legs at once.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use serde_json::json;

use crate::client::Client;
use crate::connectors::{engine, proxy_of};
use crate::engine::{BUSY, Ended, Engine, Framing, Script};
use crate::{COMPLETIONS, PROMPT, STREAM, metric, post, proxy_with, until, urls};

/// What "at once" means on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(1);
const OK: &str = r#"{"choices":[{"finish_reason":"length"}]}"#;

fn slow(script: Script, ms: u64) -> Script {
    Script::After(Duration::from_millis(ms), Box::new(script))
}

fn answer(status: u16, body: &'static str) -> Script {
    Script::Answer(status, "application/json", body)
}

fn transfer_id(engine: &Engine, at: usize) -> String {
    let params = engine.seen()[at].json()["kv_transfer_params"].clone();
    params["transfer_id"].as_str().expect("an id").to_owned()
}

#[tokio::test]
async fn both_legs_go_out_at_once_under_one_id_with_each_others_sizes() {
    let (p, d) = (engine(OK).await, engine("{}").await);
    p.always(slow(answer(200, OK), 300));
    d.always(slow(answer(200, "{}"), 400));
    let prefill = format!("{},dp=4", p.url());
    let decode = format!("{},tp=8", d.url());
    let proxy = proxy_of("moriio-write", &[prefill], &[decode]).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    let (p, d) = (p.seen()[0].clone(), d.seen()[0].clone());
    let apart = p.at.max(d.at) - p.at.min(d.at);
    assert!(apart < Duration::from_millis(200), "{apart:?}");
    let (sent, got) = (p.json(), d.json());
    let id = sent["kv_transfer_params"]["transfer_id"].clone();
    assert_eq!(
        sent["kv_transfer_params"],
        json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "transfer_id": id, "remote_dp_size": 1,
            "remote_dp_size_local": 1, "remote_tp_size": 8,
        })
    );
    let rank: u32 = p.rank().expect("a rank").parse().expect("a number");
    assert_eq!(
        got["kv_transfer_params"],
        json!({
            "do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": null,
            "remote_block_ids": null, "transfer_id": id, "remote_dp_size": 4,
            "remote_dp_size_local": 4, "remote_dp_rank": rank, "is_request_leader": true,
        })
    );
    assert_eq!(p.headers["x-request-id"], d.headers["x-request-id"]);
    assert_eq!(
        (sent["max_tokens"].clone(), got["max_tokens"].clone()),
        (json!(1), json!(8))
    );
}

/// Decode's first byte proves the transfer: the client does not wait for prefill's answer.
#[tokio::test]
async fn the_stream_begins_with_decodes_first_chunk_and_ends_whole() {
    let (p, d) = (engine(OK).await, engine("{}").await);
    d.always(Script::Stream(
        vec!["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"],
        Duration::from_millis(20),
    ));
    let proxy = proxy_of("moriio-write", &urls(&[&p]), &urls(&[&d])).await;
    // No answer, a head alone, and a body without an end.
    let late = [
        Script::Silence,
        Script::StreamThenSilence(vec![]),
        Script::Stream(vec![": keep-alive\n\n"; 10_000], Duration::from_millis(10)),
    ];
    for (at, script) in late.into_iter().enumerate() {
        p.once(script);
        let reply = post(&proxy, COMPLETIONS, STREAM).await;
        assert!(reply.whole);
        assert_eq!(reply.text(), "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n");
        assert!(reply.pieces[0].0 < AT_ONCE, "{:?}", reply.pieces[0].0);
        // What prefill would still say interests nobody.
        until("the prefill leg's end", || p.ended(at).is_some()).await;
        assert_eq!(p.ended(at), Some(Ended::ProxyClosed));
    }
    let line = format!(
        "in_flight{{role=\"prefill\",instance=\"{}\",rank=\"0\"}}",
        p.url()
    );
    assert_eq!(metric(&proxy, &line).await, 0.0);
}

#[tokio::test]
async fn a_plain_answer_that_began_before_prefills_keeps_its_length() {
    let (p, d) = (engine(OK).await, engine("{}").await);
    p.always(slow(answer(200, OK), 100));
    d.always(answer(200, r#"{"choices":[]}"#));
    let proxy = proxy_of("moriio-write", &urls(&[&p]), &urls(&[&d])).await;
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(reply.text(), r#"{"choices":[]}"#);
    assert_eq!(reply.headers["content-length"], "14");
}

#[tokio::test]
async fn prefills_refusal_is_the_answer_and_closes_decode_at_once() {
    const REFUSAL: &str = r#"{"error":{"message":"too long"}}"#;
    for status in [400, 401, 500] {
        let (p, d) = (engine(OK).await, engine("{}").await);
        p.always(slow(answer(status, REFUSAL), 50));
        // Its head is out, as an event stream's may be before the engine has a token.
        d.always(Script::StreamThenSilence(vec![]));
        let proxy = proxy_of("moriio-write", &urls(&[&p]), &urls(&[&d])).await;
        let start = tokio::time::Instant::now();
        let reply = post(&proxy, COMPLETIONS, STREAM).await;
        assert_eq!((reply.status, reply.text().as_str()), (status, REFUSAL));
        assert!(start.elapsed() < AT_ONCE);
        let took = until("the decode leg's end", || d.ended(0).is_some()).await;
        assert!(took < AT_ONCE, "{took:?}");
        assert_eq!(d.ended(0), Some(Ended::ProxyClosed));
    }
}

#[tokio::test]
async fn decodes_refusal_is_the_answer_and_closes_prefill_at_once() {
    const REFUSAL: &str = r#"{"error":{"message":"max_model_len"}}"#;
    let (p, d) = (engine(OK).await, engine("{}").await);
    p.always(Script::Silence);
    d.always(slow(answer(400, REFUSAL), 50));
    let proxy = proxy_of("moriio-write", &urls(&[&p]), &urls(&[&d])).await;
    let reply = post(&proxy, COMPLETIONS, STREAM).await;
    assert_eq!((reply.status, reply.text().as_str()), (400, REFUSAL));
    let took = until("the prefill leg's end", || p.ended(0).is_some()).await;
    assert!(took < AT_ONCE, "{took:?}");
}

/// Of a pair of which one engine refuses its leg, or breaks off in its answer, nothing reaches the
/// client: another pair serves it, under an id and with blocks of its own.
#[tokio::test]
async fn a_pair_of_which_one_refuses_is_replaced_by_another() {
    const PART: &str = r#"{"choices":["#;
    for script in [
        Script::Busy(429),
        Script::Busy(503),
        Script::Busy(504),
        Script::Truncated(PART, Framing::Length),
    ] {
        let (p0, p1, d) = (engine(OK).await, engine(OK).await, engine("{}").await);
        d.always(slow(answer(200, "{}"), 200));
        let proxy = proxy_of("moriio-write", &urls(&[&p0, &p1]), &urls(&[&d])).await;
        p0.once(script.clone());
        assert_eq!(
            post(&proxy, COMPLETIONS, PROMPT).await.status,
            200,
            "{script:?}"
        );
        assert_eq!((p0.count(), p1.count()), (1, 1));
        assert_ne!(transfer_id(&p0, 0), transfer_id(&p1, 0));
        assert_eq!(transfer_id(&d, d.count() - 1), transfer_id(&p1, 0));
        assert_eq!(metric(&proxy, "retries_total{role=\"prefill\"}").await, 1.0);
    }
    for status in [429, 503] {
        let (p, d0, d1) = (engine(OK).await, engine("{}").await, engine("{}").await);
        p.always(slow(answer(200, OK), 100));
        let proxy = proxy_of("moriio-write", &urls(&[&p]), &urls(&[&d0, &d1])).await;
        d0.once(Script::Busy(status));
        assert_eq!(
            post(&proxy, COMPLETIONS, PROMPT).await.status,
            200,
            "{status}"
        );
        assert_eq!((d0.count(), d1.count()), (1, 1));
        assert_ne!(transfer_id(&d0, 0), transfer_id(&d1, 0));
        assert_eq!(metric(&proxy, "retries_total{role=\"decode\"}").await, 1.0);
        // When all refuse, the last refusal is the answer.
        d0.always(Script::Busy(status));
        d1.always(Script::Busy(status));
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!((reply.status, reply.text().as_str()), (status, BUSY));
        assert_eq!(reply.headers["retry-after"], "7");
    }
    // What a decode engine may be running is not run twice.
    let (p, d0, d1) = (engine(OK).await, engine("{}").await, engine("{}").await);
    let proxy = proxy_of("moriio-write", &urls(&[&p]), &urls(&[&d0, &d1])).await;
    for engine in [&d0, &d1] {
        engine.always(Script::Busy(502));
    }
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 502);
    assert_eq!(d0.count() + d1.count(), 1);
}

/// Prefill's answer is there before decode's as a rule: its blocks were written by then.
#[tokio::test]
async fn cached_tokens_are_prefills_where_its_answer_is_there_first() {
    const PREFILLED: &str =
        r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}}"#;
    const DECODED: &str =
        r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9}}}"#;
    let (p, d) = (engine(PREFILLED).await, engine(DECODED).await);
    d.always(slow(answer(200, DECODED), 100));
    let proxy = proxy_of("moriio-write", &urls(&[&p]), &urls(&[&d])).await;
    let told = DECODED.replace("\"cached_tokens\":9", "\"cached_tokens\":3");
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!((reply.status, reply.text()), (200, told));
    // Late, it changes nothing.
    p.always(slow(answer(200, PREFILLED), 200));
    d.always(answer(200, DECODED));
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!((reply.status, reply.text().as_str()), (200, DECODED));
}

#[tokio::test]
async fn a_dead_prefill_is_replaced_under_a_new_id_on_both_legs() {
    let (p0, p1, d) = (engine(OK).await, engine(OK).await, engine("{}").await);
    d.always(slow(answer(200, "{}"), 200));
    let proxy = proxy_of("moriio-write", &urls(&[&p0, &p1]), &urls(&[&d])).await;
    p0.kill().await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(p1.count(), 2);
    // The decode leg of the pair that failed was closed, if it was sent at all.
    let legs = d.count();
    let retries = metric(&proxy, "retries_total{role=\"prefill\"}").await;
    assert_eq!(retries, 1.0);
    let last = transfer_id(&d, legs - 1);
    assert_eq!(last, transfer_id(&p1, 1));
    for at in 0..legs - 1 {
        assert_ne!(transfer_id(&d, at), last);
    }
}

#[tokio::test]
async fn a_dead_decode_is_replaced_and_the_first_prefill_leg_closed() {
    let (p, d0, d1) = (engine(OK).await, engine("{}").await, engine("{}").await);
    // After decode's, whose answer then ends the wait: prefill's has its time to come.
    p.always(slow(answer(200, OK), 300));
    let proxy = proxy_of("moriio-write", &urls(&[&p]), &urls(&[&d0, &d1])).await;
    d0.kill().await;
    for _ in 0..2 {
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    assert_eq!(d1.count(), 2);
    let retries = metric(&proxy, "retries_total{role=\"decode\"}").await;
    assert_eq!(retries, 1.0);
    let whole = |at: usize| p.ended(at) == Some(Ended::Whole);
    until("two whole prefill legs", || {
        (0..p.count()).filter(|at| whole(*at)).count() == 2
    })
    .await;
    for at in 0..p.count() {
        let named = &p.seen()[at].headers["x-request-id"];
        // A closed leg's id is no served leg's.
        let served = d1
            .seen()
            .iter()
            .any(|leg| leg.headers["x-request-id"] == *named);
        assert_eq!(served, whole(at), "{named}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_closes_prefill_at_once_and_decode_after_its_grace() {
    let (p, d) = (engine(OK).await, engine("{}").await);
    p.always(Script::Silence);
    d.always(Script::Silence);
    let settings = Settings {
        connector: Some("moriio-write".to_owned()),
        handover_grace_ms: Some(1_500),
        ..Settings::default()
    };
    let proxy = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    until("both legs", || p.count() == 1 && d.count() == 1).await;
    drop(client);
    let took = until("the prefill leg's end", || p.ended(0).is_some()).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert_eq!(d.ended(0), None, "decode must have its grace");
    let took = until("the decode leg's end", || d.ended(0).is_some()).await;
    assert!(took < Duration::from_secs(3), "{took:?}");
    for (role, engine) in [("prefill", &p), ("decode", &d)] {
        let url = engine.url();
        let line = format!("in_flight{{role=\"{role}\",instance=\"{url}\",rank=\"0\"}}");
        assert_eq!(metric(&proxy, &line).await, 0.0);
    }
}
