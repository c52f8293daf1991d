//! A client that names the prefill worker of its request.

use hetero_kv_proxy::cli::Settings;
use serde_json::json;
use tokio::net::TcpListener;

use crate::engine::{Blocks, Engine};
use crate::pairs::{counts, engines};
use crate::{COMPLETIONS, metric, post, proxy_with, urls};

fn allowed() -> Settings {
    Settings {
        allow_prefill_endpoint: Some(true),
        ..Settings::default()
    }
}

fn naming(url: &str) -> String {
    json!({"model": "m", "prompt": "hello", "max_tokens": 8, "prefill_endpoint": url}).to_string()
}

#[tokio::test]
async fn the_named_worker_runs_the_prefill_and_no_engine_sees_the_member() {
    let blocks = Blocks::default();
    let (p, d, _, _) = engines(&blocks, &["", "", ""], &[""]).await;
    let port = p[1].address.port();
    // Registered in another spelling.
    let prefill = [p[0].url(), format!("http://LocalHost:{port}/"), p[2].url()];
    let proxy = proxy_with(allowed(), &prefill, &urls(&[&d[0]])).await;
    for url in [
        format!("http://localhost:{port}"),
        format!("http://LOCALHOST:{port}/"),
    ] {
        // Bytes that a parsed form would not keep.
        let member = json!(url).to_string().replace('/', "\\/");
        let body = format!(
            "{{ \"prefill_endpoint\" : {member},\n\"temperature\":1.50e0, \"prompt\":\"h\\u0065\", \"max_tokens\":8}}"
        );
        assert_eq!(post(&proxy, COMPLETIONS, &body).await.status, 200);
        let (ran, read) = (p[1].seen(), d[0].seen());
        let (prefill, decode) = (ran.last().expect("its leg"), read.last().expect("its leg"));
        for leg in [prefill, decode] {
            assert!(!leg.text().contains("prefill_endpoint"), "{}", leg.text());
            assert!(
                leg.text()
                    .contains("\"temperature\":1.50e0, \"prompt\":\"h\\u0065\"")
            );
        }
    }
    // A request that runs alone takes it out too, and says null as if nothing.
    for rest in [
        format!("\"prefill_endpoint\":\"http://localhost:{port}\",\"prompt_logprobs\":1"),
        "\"prefill_endpoint\":null,\"prompt_logprobs\":1".to_owned(),
    ] {
        let body = format!("{{\"prompt\":\"x\",{rest}}}");
        assert_eq!(post(&proxy, COMPLETIONS, &body).await.status, 200);
        let read = d[0].seen();
        let text = read.last().expect("its leg").text().to_owned();
        assert_eq!(text, "{\"prompt\":\"x\",\"prompt_logprobs\":1}");
    }
    assert_eq!((counts(&p), counts(&d)), (vec![0, 2, 0], vec![4]));
}

#[tokio::test]
async fn what_is_no_prefill_worker_is_403_and_not_dialled() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &[""], &[""]).await;
    let stranger = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let elsewhere = format!("http://{}", stranger.local_addr().expect("address"));
    let proxy = proxy_with(allowed(), &pf, &df).await;
    for url in [
        elsewhere.clone(),
        d[0].url(),
        format!("{}/v1", p[0].url()),
        format!("http://user@{}", p[0].address),
        p[0].url().replace("http:", "https:"),
        p[0].address.to_string(),
        String::new(),
        format!("{}#{elsewhere}", p[0].url()),
    ] {
        let reply = post(&proxy, COMPLETIONS, &naming(&url)).await;
        let code = reply.error_code();
        assert_eq!(
            (reply.status, code.as_str()),
            (403, "prefill_endpoint_unknown"),
            "{url}"
        );
        assert_eq!(reply.json()["error"]["param"], "prefill_endpoint");
    }
    let reply = post(
        &proxy,
        COMPLETIONS,
        r#"{"prompt":"x","prefill_endpoint":7}"#,
    )
    .await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (400, "invalid_field")
    );
    assert_eq!((counts(&p), counts(&d)), (vec![0], vec![0]));
    let dialled = tokio::time::timeout(std::time::Duration::from_millis(50), stranger.accept());
    assert!(dialled.await.is_err(), "a URL of a client's was dialled");
}

#[tokio::test]
async fn without_the_flag_it_is_400_that_names_it() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &[""], &[""]).await;
    let proxy = proxy_with(Settings::default(), &pf, &df).await;
    let reply = post(&proxy, COMPLETIONS, &naming(&p[0].url())).await;
    let code = reply.error_code();
    assert_eq!(
        (reply.status, code.as_str()),
        (400, "prefill_endpoint_not_allowed")
    );
    assert!(
        reply.text().contains("--allow-prefill-endpoint"),
        "{}",
        reply.text()
    );
    assert_eq!((counts(&p), counts(&d)), (vec![0], vec![0]));
}

#[tokio::test]
async fn a_named_worker_that_is_dead_is_not_replaced() {
    let blocks = Blocks::default();
    let (p, d, pf, df) = engines(&blocks, &["", ""], &[""]).await;
    let proxy = proxy_with(allowed(), &pf, &df).await;
    p[0].kill().await;
    let reply = post(&proxy, COMPLETIONS, &naming(&p[0].url())).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (502, "prefill_unreachable")
    );
    assert_eq!((p[1].count(), counts(&d)), (0, vec![0]));
    // Nor is it dialled again in vain.
    assert_eq!(metric(&proxy, "retries_total{role=\"prefill\"}").await, 0.0);
}

#[tokio::test]
async fn a_named_worker_brings_its_revision_and_only_its_partners() {
    let blocks = Blocks::default();
    let told = ["revision=v1,model=m", "revision=v2,model=m"];
    let (p, d, pf, df) = engines(&blocks, &told, &told).await;
    let settings = Settings {
        revision_weights: Some("v1=1".to_owned()),
        ..allowed()
    };
    let proxy = proxy_with(settings, &pf, &df).await;
    // A revision without a share can be tried before it gets one.
    assert_eq!(
        post(&proxy, COMPLETIONS, &naming(&p[1].url())).await.status,
        200
    );
    assert_eq!((counts(&p), counts(&d)), (vec![0, 1], vec![0, 1]));
    let other = naming(&p[1].url()).replace("\"m\"", "\"n\"");
    let reply = post(&proxy, COMPLETIONS, &other).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (404, "model_not_found")
    );
    let alone = Engine::prefill(&blocks).await;
    let flag = format!("{},revision=v3", alone.url());
    let proxy = proxy_with(allowed(), &[flag, pf[0].clone()], &df).await;
    let reply = post(&proxy, COMPLETIONS, &naming(&alone.url())).await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (503, "no_pair")
    );
    assert_eq!(alone.count(), 0);
}
