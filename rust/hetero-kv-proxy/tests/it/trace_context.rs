//! W3C trace context through the proxy.

use std::collections::BTreeSet;

use hetero_kv_proxy::cli::Settings;

use crate::client::{Client, Reply};
use crate::engine::{Blocks, Engine, Script, Seen, engines, pair};
use crate::{COMPLETIONS, PROMPT, metric, proxy, proxy_with, urls};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const STATE: &str = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE";

async fn send(proxy: &hetero_kv_proxy::run::Proxy, path: &str, headers: &[(&str, &str)]) -> Reply {
    let mut client = Client::connect(proxy.address).await;
    client.post(path, headers, PROMPT.as_bytes()).await;
    client.reply().await
}

/// Trace id, parent id and flags of a leg; none without a `traceparent`.
fn trace(seen: &Seen) -> Option<(String, String, String)> {
    let header = seen.headers.get("traceparent")?;
    let parts: Vec<&str> = header.split('-').collect();
    assert_eq!(
        parts.iter().map(|part| part.len()).collect::<Vec<_>>(),
        [2, 32, 16, 2],
        "{header}"
    );
    let owned = |at: usize| parts[at].to_owned();
    Some((owned(1), owned(2), owned(3)))
}

#[tokio::test]
async fn a_trace_goes_on_under_a_parent_id_of_each_leg() {
    let ([p0, p1], [d]) = engines(&Blocks::default()).await;
    let proxy = proxy(&[&p0, &p1], &[&d]).await;
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("Traceparent", parent.as_str()), ("tracestate", STATE)];
    p0.once(Script::Busy(503));
    let reply = send(&proxy, COMPLETIONS, &headers).await;
    assert_eq!(reply.status, 200);
    assert!(!reply.headers.contains_key("traceparent"));
    assert_eq!(send(&proxy, "/v1/embeddings", &headers).await.status, 200);
    send(&proxy, "/start_profile", &headers).await;

    let legs: Vec<Seen> = [&p0, &p1, &d].map(Engine::seen).concat();
    assert_eq!(legs.len(), 2 + 2 + 3);
    let mut parents = BTreeSet::new();
    for leg in &legs {
        let (trace_id, parent_id, flags) = trace(leg).expect("a traceparent");
        assert_eq!((trace_id.as_str(), flags.as_str()), (TRACE, "01"));
        assert_eq!(leg.headers["tracestate"], STATE);
        parents.insert(parent_id);
    }
    // One for each leg, and one for what every engine gets; none of them the client's.
    assert_eq!(parents.len(), 3 + 1 + 1);
    assert!(!parents.contains(PARENT));
}

#[tokio::test]
async fn a_malformed_trace_is_not_passed_on_and_counted() {
    let (p, d) = pair().await;
    let proxy = proxy(&[&p], &[&d]).await;
    let good = format!("00-{TRACE}-{PARENT}-01");
    let upper = good.to_uppercase();
    let bad: [&[(&str, &str)]; 3] = [
        &[("traceparent", "00-0-0-0"), ("tracestate", STATE)],
        &[("traceparent", &upper)],
        &[("traceparent", &good), ("traceparent", &good)],
    ];
    for headers in bad {
        assert_eq!(send(&proxy, COMPLETIONS, headers).await.status, 200);
    }
    // A state without a trace says nothing, and is no fault.
    send(&proxy, COMPLETIONS, &[("tracestate", STATE)]).await;
    for leg in [&p, &d].map(Engine::seen).concat() {
        assert_eq!(trace(&leg), None);
        assert!(!leg.headers.contains_key("tracestate"));
    }
    let faults = async |reason: &str| {
        metric(
            &proxy,
            &format!("trace_faults_total{{reason=\"{reason}\"}}"),
        )
        .await
    };
    assert_eq!(faults("traceparent").await, 3.0);
    assert_eq!(faults("tracestate").await, 0.0);
    // A bad state costs the state only.
    let headers = [("traceparent", good.as_str()), ("tracestate", "A=1")];
    send(&proxy, COMPLETIONS, &headers).await;
    let leg = d.seen().pop().expect("a leg");
    assert_eq!(trace(&leg).expect("a traceparent").0, TRACE);
    assert!(!leg.headers.contains_key("tracestate"));
    assert_eq!(faults("tracestate").await, 1.0);
}

#[tokio::test]
async fn new_traces_are_made_where_asked_for_and_lead_both_legs() {
    let (p, d) = pair().await;
    let plain = proxy(&[&p], &[&d]).await;
    send(&plain, COMPLETIONS, &[]).await;
    assert_eq!(trace(&p.seen()[0]), None);
    let settings = Settings {
        trace_sample: Some(1.0),
        ..Settings::default()
    };
    let sampling = proxy_with(settings, &urls(&[&p]), &urls(&[&d])).await;
    send(&sampling, COMPLETIONS, &[]).await;
    send(&sampling, COMPLETIONS, &[("traceparent", "?")]).await;
    let mut ids = BTreeSet::new();
    for at in [1, 2] {
        let prefill = trace(&p.seen()[at]).expect("a traceparent");
        let decode = trace(&d.seen()[at]).expect("a traceparent");
        assert_eq!((&prefill.0, &prefill.2), (&decode.0, &decode.2));
        assert_eq!(prefill.2, "01");
        assert_ne!(prefill.1, decode.1);
        ids.insert(prefill.0);
    }
    assert_eq!(ids.len(), 2);
    // A client's own decision stands.
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    send(&sampling, COMPLETIONS, &[("traceparent", &unsampled)]).await;
    let (id, _, flags) = trace(&d.seen()[3]).expect("a traceparent");
    assert_eq!((id.as_str(), flags.as_str()), (TRACE, "00"));
}
