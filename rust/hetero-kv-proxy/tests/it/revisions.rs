//! Two revisions of a model behind one proxy: shares, sessions, and no request across both.

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::config::Config;
use hetero_kv_proxy::run::Proxy;
use serde_json::{Value, json};

use crate::admin;
use crate::client::{Client, Reply};
use crate::engine::{Blocks, Engine, freed};
use crate::pairs::{counts, engines, transfers};
use crate::{COMPLETIONS, PROMPT, metric, post, proxy_with};

const P: [&str; 3] = ["revision=v1", "revision=v1", "revision=v2"];
const D: [&str; 3] = ["revision=v1", "revision=v2", "revision=v2"];

fn canary(weights: &str) -> Settings {
    Settings {
        revision_weights: Some(weights.to_owned()),
        admin_listen: Some("127.0.0.1:0".to_owned()),
        ..Settings::default()
    }
}

/// The transfers of each revision: those that its prefill engines ran, and those that its decode
/// engines read.
fn by_revision(p: &[Engine], d: &[Engine]) -> [(Vec<String>, Vec<String>); 2] {
    let (p, d) = (transfers(p), transfers(d));
    let of = |told: &[&str], ids: &[Vec<String>], revision: &str| -> Vec<String> {
        let pairs = told
            .iter()
            .zip(ids)
            .filter(|(told, _)| told.ends_with(revision));
        let mut all: Vec<String> = pairs.flat_map(|(_, ids)| ids.clone()).collect();
        all.sort();
        all
    };
    ["v1", "v2"].map(|revision| (of(&P, &p, revision), of(&D, &d, revision)))
}

async fn put(proxy: &Proxy, body: &str) -> Reply {
    let mut client = admin::connect(proxy).await;
    client.put("/v1/revisions", body.as_bytes()).await;
    client.reply().await
}

async fn shown(proxy: &Proxy) -> Value {
    let reply = admin::look(proxy, "/v1/revisions").await;
    assert_eq!(reply.status, 200);
    reply.json()["revisions"].clone()
}

async fn drain(proxy: &Proxy, id: &str) {
    let path = format!("/v1/workers/{id}/drain");
    let reply = admin::order(proxy, &path).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

async fn many(proxy: &Proxy, count: usize) {
    let mut client = Client::connect(proxy.address).await;
    for _ in 0..count {
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
}

#[tokio::test]
async fn of_1000_requests_none_crosses_revisions_and_the_canary_gets_its_share() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &P, &D).await;
    let proxy = proxy_with(canary("v1=90,v2=10"), &pf, &df).await;
    many(&proxy, 1_000).await;
    let [(p1, d1), (p2, d2)] = by_revision(&p, &d);
    assert_eq!((p1.len() + p2.len(), d1.len() + d2.len()), (1_000, 1_000));
    assert_eq!(p1, d1, "a request crossed revisions");
    assert_eq!(p2, d2, "a request crossed revisions");
    assert!((90..=110).contains(&p2.len()), "{}", p2.len());
    freed(&blocks).await;
    let served = |name: &str| format!("revision_requests_total{{revision=\"{name}\"}}");
    assert_eq!(metric(&proxy, &served("v2")).await, p2.len() as f64);
    // Within a revision the policy decides: all workers of it are used.
    assert!(
        counts(&p)
            .iter()
            .chain(&counts(&d))
            .all(|count| *count > 40)
    );
}

#[tokio::test]
async fn a_revision_that_is_away_gives_its_share_to_the_other_and_none_is_served_across() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &P, &D).await;
    let proxy = proxy_with(canary("v1=1,v2=1"), &pf, &df).await;
    // Without a decode worker its prefill workers are of no use.
    drain(&proxy, "decode-0").await;
    many(&proxy, 40).await;
    let [(p1, _), (p2, d2)] = by_revision(&p, &d);
    assert_eq!((p1.len(), p2.len(), d2.len()), (0, 40, 40));
    let moves = metric(&proxy, "revision_moves_total{revision=\"v1\"}").await;
    assert!((18.0..=22.0).contains(&moves), "{moves}");
    assert_eq!(
        shown(&proxy).await,
        json!([
            {"revision": "v1", "weight": 1, "prefill": 2, "decode": 0, "requests": 0, "moved": moves as u64},
            {"revision": "v2", "weight": 1, "prefill": 1, "decode": 2, "requests": 40, "moved": 0},
        ])
    );
    // What is left of both is no pair.
    drain(&proxy, "prefill-2").await;
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (503, "no_pair")
    );
    assert_eq!(reply.json()["error"]["param"], "revision");
    // Nor are revisions without a weight a last resort.
    assert_eq!(put(&proxy, r#"{"weights":{"v3":1}}"#).await.status, 200);
    let undrain = "/v1/workers/prefill-2/undrain";
    admin::order(&proxy, undrain).await;
    let reply = post(&proxy, COMPLETIONS, PROMPT).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (503, "no_revision")
    );
}

#[tokio::test]
async fn a_dead_revision_loses_no_request_but_those_that_found_it_dead() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &P, &D).await;
    let proxy = proxy_with(canary("v1=1,v2=1"), &pf, &df).await;
    p[2].kill().await;
    let mut failed = 0;
    for _ in 0..40 {
        failed += usize::from(post(&proxy, COMPLETIONS, PROMPT).await.status != 200);
    }
    // A leg that is sent again draws once more: its revision is the worse one by then.
    assert_eq!(failed, 0);
    let [(p1, d1), (_, d2)] = by_revision(&p[..2], &d);
    assert_eq!((p1.len(), d1.len(), d2.len()), (40, 40, 0));
}

#[tokio::test]
async fn a_session_stays_with_its_revision() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &P, &D).await;
    let proxy = proxy_with(canary("v1=1,v2=1"), &pf, &df).await;
    let mut of_v2 = 0;
    for session in 0..20 {
        let session = format!("s{session}");
        let before = (counts(&p), counts(&d));
        for _ in 0..4 {
            let mut client = Client::connect(proxy.address).await;
            let headers = [("X-Session-Id", session.as_str())];
            client.post(COMPLETIONS, &headers, PROMPT.as_bytes()).await;
            assert_eq!(client.reply().await.status, 200);
        }
        let to_v2 = counts(&p)[2] - before.0[2];
        assert!(to_v2 == 0 || to_v2 == 4, "{session} went to both");
        let decoded = counts(&d)[1] + counts(&d)[2] - before.1[1] - before.1[2];
        assert_eq!(decoded, to_v2);
        of_v2 += usize::from(to_v2 > 0);
    }
    assert!((3..=17).contains(&of_v2), "{of_v2}");
}

#[tokio::test]
async fn weights_change_while_the_proxy_runs() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &P, &D).await;
    let settings = Settings {
        revision_weights: None,
        ..canary("")
    };
    let proxy = proxy_with(settings, &pf, &df).await;
    // Without weights no worker is kept out, and pairs are of one revision still.
    many(&proxy, 12).await;
    let [(p1, d1), (p2, d2)] = by_revision(&p, &d);
    assert_eq!((p1.len(), p2.len()), (8, 4));
    assert_eq!((p1, p2), (d1, d2));
    assert_eq!(shown(&proxy).await[0]["weight"], Value::Null);
    let reply = put(&proxy, r#"{"weights":{"v2":3,"v1":0}}"#).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json()["revisions"][1]["weight"], 3);
    many(&proxy, 12).await;
    let [(p1, _), (p2, _)] = by_revision(&p, &d);
    assert_eq!((p1.len(), p2.len()), (8, 16));
    // What is wrong changes nothing.
    for (body, code) in [
        (r#"{"weights":{"v1":1,"v1":2}}"#, "invalid_json"),
        (r#"{"weight":{}}"#, "invalid_json"),
        (r#"{"weights":{"v1":"1"}}"#, "invalid_field"),
        (r#"{"weights":{"v1":0}}"#, "invalid_field"),
        (r#"{"weights":{"v 1":1}}"#, "invalid_field"),
        (r#"{"weights":[]}"#, "invalid_json"),
    ] {
        let reply = put(&proxy, body).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (400, code),
            "{body}"
        );
    }
    assert_eq!(shown(&proxy).await[1]["weight"], 3);
    // None at all end the draw, and with it its counters.
    assert_eq!(put(&proxy, r#"{"weights":{}}"#).await.status, 200);
    many(&proxy, 3).await;
    let [(p1, _), (p2, _)] = by_revision(&p, &d);
    assert!(p1.len() > 8 && p2.len() < 19, "{} {}", p1.len(), p2.len());
    assert_eq!(
        metric(&proxy, "revision_requests_total{revision=\"v2\"}").await,
        0.0
    );
    let reply = admin::delete(&proxy, "/v1/revisions").await;
    assert_eq!(
        (reply.status, reply.headers["allow"].as_str()),
        (405, "GET, HEAD, PUT")
    );
}

#[test]
fn weights_of_a_flag_are_checked() {
    let settings = Settings {
        prefill: Some(vec!["http://h:1".to_owned()]),
        decode: Some(vec!["http://h:2".to_owned()]),
        revision_weights: Some("v1=95,v2".to_owned()),
        ..Settings::default()
    };
    let faults = Config::from_settings(settings).expect_err("no weight").0;
    assert_eq!(
        faults,
        ["--revision-weights v1=95,v2: `v2` is not REVISION=WEIGHT"]
    );
}
