//! Workers by whichever way they become known: by a flag, over HTTP, over ZeroMQ.

use std::time::Duration;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::config::Config;
use hetero_kv_proxy::run::Proxy;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::sleep;

use crate::admin::{list, register, routable, tell, worker};
use crate::client::Client;
use crate::connectors::{engine, proxy_of};
use crate::engine::{Engine, Script};
use crate::workers::{managed, managed_with};
use crate::zmq::{announced, dealer, frame, frames, until_frames, until_routable};
use crate::{COMPLETIONS, PROMPT, STREAM, post, until, zmq};

const PREFILLED: &str = r#"{"choices":[{"text":"t","finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[1]],"tp_size":1,"remote_dp_rank":0}}"#;

/// What routing knows of the workers, and what four requests make of it.
async fn table(proxy: &Proxy, p: &Engine, d: &Engine) -> Value {
    until_routable(proxy, 2).await;
    let mut workers = zmq::workers(proxy).await;
    for worker in &mut workers {
        let worker = worker.as_object_mut().expect("an object");
        // How it became known, and when it will be forgotten.
        for own in ["source", "expires_in_ms"] {
            worker.remove(own).expect("a member");
        }
    }
    let (before, mut legs) = ([p.count(), d.count()], Vec::new());
    for _ in 0..4 {
        assert_eq!(post(proxy, COMPLETIONS, PROMPT).await.status, 200);
    }
    // Of both legs at once decode's may be the faster one.
    until("all legs have come", || p.count() == before[0] + 4).await;
    for (engine, before) in [p, d].into_iter().zip(before) {
        for leg in &engine.seen()[before..] {
            let id = leg.headers["x-request-id"].as_str();
            let mut params = leg.json()["kv_transfer_params"].clone();
            params["transfer_id"] = Value::Null;
            let addresses = id.rsplit_once('_').expect("its own part").0;
            legs.push(json!([addresses, leg.rank(), params]));
        }
    }
    legs.sort_by_key(Value::to_string);
    json!({"workers": workers, "legs": legs})
}

#[tokio::test]
async fn one_pool_makes_one_routing_table_by_flag_by_registration_and_by_zeromq() {
    let (p, d) = (engine(PREFILLED).await, engine("{}").await);
    let ports = "handshake=7301,notify=7405";
    let prefill = format!("{},dp=2,tp=1,kv-host=127.0.0.1,{ports}", p.url());
    let decode = format!("{},dp=1,tp=4,kv-host=127.0.0.1,{ports}", d.url());
    let flags = proxy_of("moriio-write", &[prefill], &[decode]).await;
    let by_flag = table(&flags, &p, &d).await;

    let settings = Settings {
        connector: Some("moriio-write".to_owned()),
        ..Settings::default()
    };
    let http = managed_with(settings, &[], &[]).await;
    let sizes = |dp: u32, tp: u32| {
        json!({
            "dp": dp, "tp": tp, "kv_host": "127.0.0.1", "handshake": 7301, "notify": 7405,
        })
    };
    assert_eq!(register(&http, "prefill", &p, sizes(2, 1)).await.0, 201);
    assert_eq!(register(&http, "decode", &d, sizes(1, 4)).await.0, 201);
    let by_registration = table(&http, &p, &d).await;

    let (over_zmq, at) = zmq::proxy("moriio-write", Settings::default()).await;
    let mut dealt = dealer(at).await;
    for (role, engine, dp, tp) in [("P", &p, 2, 1), ("D", &d, 1, 4)] {
        let mut told = announced(role, engine, "WRITE");
        told["dp_size"] = json!(dp);
        told["tp_size"] = json!(tp);
        told["zmq_address"] = json!("host:127.0.0.1,handshake:7301,notify:7405");
        dealt.write_all(&frame(&told)).await.expect("read");
    }
    let by_zmq = table(&over_zmq, &p, &d).await;
    assert_eq!(by_flag["workers"].as_array().map(Vec::len), Some(2));
    assert_eq!(by_flag, by_registration);
    assert_eq!(by_flag, by_zmq);
}

#[tokio::test]
async fn garbage_of_every_kind_is_counted_and_the_next_registration_is_taken() {
    let (proxy, at) = zmq::proxy("moriio-read", Settings::default()).await;
    let p = engine(PREFILLED).await;
    let mut typeless = announced("P", &p, "READ");
    typeless.as_object_mut().expect("a map").remove("type");
    let bomb: Vec<u8> = [vec![0x91; 5_000], vec![0]].concat();
    let long = (bomb.len() as u64).to_be_bytes();
    let nested = [&[2], long.as_slice(), &bomb].concat();
    let mut dealt = dealer(at).await;
    for (count, garbage) in [b"\0\0".to_vec(), frame(&typeless), nested]
        .iter()
        .enumerate()
    {
        dealt.write_all(garbage).await.expect("read");
        until_frames(&proxy, "malformed", (count + 1) as f64).await;
    }
    // A megabyte of noise: its connection ends, unread.
    let mut noisy = dealer(at).await;
    let noise: Vec<u8> = (0..1_u32 << 20)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let length = (noise.len() as u64).to_be_bytes();
    // The proxy may have closed before all of it is written.
    let _cut = noisy
        .write_all(&[&[2], length.as_slice(), &noise].concat())
        .await;
    until_frames(&proxy, "too_large", 1.0).await;
    let mut rest = Vec::new();
    let _closed = noisy.read_to_end(&mut rest).await;
    assert_eq!(frames(&proxy, "malformed").await, 3.0);
    assert_eq!(frames(&proxy, "registered").await, 0.0);
    // On the connection that brought garbage, and on a new one.
    let good = frame(&announced("P", &p, "READ"));
    dealt.write_all(&good).await.expect("read");
    until_frames(&proxy, "registered", 1.0).await;
    let mut other = dealer(at).await;
    other.write_all(&good).await.expect("read");
    until_frames(&proxy, "heartbeat", 1.0).await;
    assert_eq!(zmq::workers(&proxy).await.len(), 1);
}

#[tokio::test]
async fn readiness_counts_those_that_registered_and_the_list_shows_what_they_are() {
    let (p0, p1, d) = (
        engine(PREFILLED).await,
        engine(PREFILLED).await,
        engine("{}").await,
    );
    let proxy = managed(&[], &[]).await;
    let ready = async || {
        let mut client = Client::connect(proxy.address).await;
        client.get("/ready?prefill=2&decode=1").await;
        let reply = client.reply().await;
        (reply.status, reply.json())
    };
    assert_eq!(ready().await.0, 503);
    let told = json!({"dp": 4, "mode": "read", "kv": {"tp_size": 2}});
    register(&proxy, "prefill", &p0, told.clone()).await;
    register(&proxy, "decode", &d, json!({"dp": 1, "mode": "read"})).await;
    routable(&proxy, "prefill-0").await;
    routable(&proxy, "decode-0").await;
    let (status, why) = ready().await;
    assert_eq!((status, &why["prefill"]["ready"]), (503, &json!(1)));
    let reason = why["reason"].as_str().expect("a reason");
    assert!(reason.contains("1 of 1 prefill"), "{reason}");
    register(&proxy, "prefill", &p1, told).await;
    routable(&proxy, "prefill-1").await;
    assert_eq!(ready().await.0, 200);
    let all = list(&proxy).await;
    assert_eq!(all.len(), 3);
    for worker in all {
        assert_eq!(worker["source"], "registered");
        assert_eq!(worker["told"]["mode"], "read");
        let left = worker["expires_in_ms"].as_u64().expect("its age shows");
        assert!((1..=15_000).contains(&left), "{left}");
        let prefill = worker["role"] == "prefill";
        assert_eq!(worker["dp"], json!(if prefill { 4 } else { 1 }));
        assert_eq!(prefill, worker["kv"]["tp_size"] == json!(2));
    }
}

/// Loading a model, or capturing graphs, an engine may be silent for longer than in ordinary times.
#[tokio::test]
async fn a_worker_that_is_silent_while_it_starts_is_kept_for_its_own_time_and_gets_nothing() {
    let (p, d) = (engine(PREFILLED).await, engine("{}").await);
    let proxy = managed(&[&p], &[]).await;
    d.set_healthy(false);
    let grace = json!({"heartbeat_interval_ms": 300, "ttl_ms": 4_000});
    assert_eq!(register(&proxy, "decode", &d, grace).await.0, 201);
    // Eight heartbeats are missed.
    for _ in 0..8 {
        sleep(Duration::from_millis(300)).await;
        let kept = worker(&proxy, "decode-0").await;
        assert_eq!(
            (&kept["standing"], &kept["routable"]),
            (&json!("serving"), &json!(false))
        );
        assert_eq!(
            post(&proxy, COMPLETIONS, PROMPT).await.error_code(),
            "no_engine"
        );
    }
    assert_eq!((p.count(), d.count()), (0, 0));
    d.set_healthy(true);
    routable(&proxy, "decode-0").await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    assert_eq!(d.count(), 1);
}

#[tokio::test]
async fn a_heartbeat_keeps_what_is_in_flight_and_load_goes_by_it() {
    let (p, d0, d1) = (
        engine(PREFILLED).await,
        engine("{}").await,
        engine("{}").await,
    );
    let proxy = managed(&[&p], &[]).await;
    register(&proxy, "decode", &d0, json!({})).await;
    routable(&proxy, "decode-0").await;
    d0.always(Script::StreamThenSilence(vec!["data: 1\n\n"]));
    let mut streams = Vec::new();
    for _ in 0..5 {
        let mut client = Client::connect(proxy.address).await;
        client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
        client.head().await.expect("a head");
        streams.push(client);
    }
    register(&proxy, "decode", &d1, json!({})).await;
    routable(&proxy, "decode-1").await;
    for sent in 1..=5 {
        let (status, told) = register(&proxy, "decode", &d0, json!({})).await;
        assert_eq!(
            (status, &told["id"], &told["in_flight"]),
            (200, &json!("decode-0"), &json!(5))
        );
        assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
        assert_eq!((d0.count(), d1.count()), (5, sent));
    }
}

/// Blocks that nobody will read would stay until their lease ends.
#[tokio::test]
async fn nothing_is_prefilled_while_nobody_may_decode() {
    let (p, d) = (engine(PREFILLED).await, engine("{}").await);
    let proxy = managed(&[&p], &[&d]).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
    tell(&proxy, "/v1/workers/decode-0/drain", &json!({})).await;
    for _ in 0..4 {
        let reply = post(&proxy, COMPLETIONS, PROMPT).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (503, "no_engine")
        );
        assert!(reply.headers.contains_key("retry-after"));
    }
    assert_eq!((p.count(), d.count()), (1, 1));
    tell(&proxy, "/v1/workers/decode-0/undrain", &json!({})).await;
    assert_eq!(post(&proxy, COMPLETIONS, PROMPT).await.status, 200);
}

/// An engine that tells `0.0.0.0` would be looked for on the proxy's own host.
#[tokio::test]
async fn an_address_that_means_every_interface_is_refused_whichever_way_it_is_told() {
    let d = engine("{}").await;
    for (connector, told, part) in [
        ("hetero", "http://0.0.0.0:8100", "0.0.0.0"),
        ("hetero", "http://[::]:8100", "::"),
        (
            "moriio-read",
            "http://10.0.0.1:8100,kv-host=0.0.0.0",
            "kv-host",
        ),
        (
            "mooncake",
            "http://10.0.0.1:8100,bootstrap=0.0.0.0:8998",
            "bootstrap",
        ),
    ] {
        let settings = Settings {
            connector: Some(connector.to_owned()),
            prefill: Some(vec![told.to_owned()]),
            decode: Some(vec![d.url()]),
            ..Settings::default()
        };
        let fault = Config::from_settings(settings).expect_err(told).to_string();
        assert!(fault.contains(part) && fault.contains("dial"), "{fault}");
    }
    let proxy = managed(&[], &[&d]).await;
    let body = json!({"role": "prefill", "url": "http://0.0.0.0:8100"});
    let reply = tell(&proxy, "/v1/workers", &body).await;
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (400, &json!("url"))
    );

    let (proxy, at) = zmq::proxy("moriio-read", Settings::default()).await;
    let mut dealt = dealer(at).await;
    let p = engine(PREFILLED).await;
    let mut told = announced("P", &p, "READ");
    for (count, (name, address)) in [
        ("http_address", "0.0.0.0:8100"),
        ("zmq_address", "host:0.0.0.0,handshake:6301,notify:61005"),
    ]
    .into_iter()
    .enumerate()
    {
        let good = std::mem::replace(&mut told[name], json!(address));
        dealt.write_all(&frame(&told)).await.expect("read");
        until_frames(&proxy, "refused", (count + 1) as f64).await;
        told[name] = good;
    }
    assert!(zmq::workers(&proxy).await.is_empty());
    dealt.write_all(&frame(&told)).await.expect("read");
    until_frames(&proxy, "registered", 1.0).await;
}
