//! The proxy's own paths: liveness, readiness, metrics, workers.

use http::StatusCode;
use serde::Serialize;

use crate::answer::{self, Answer};
use crate::app::App;
use crate::connectors::Order;
use crate::metrics::{InstanceLabels, SlotLabels};
use crate::openai::error::ApiError;
use crate::routing::{InstanceIndex, InstanceView, Role};

const JSON: &str = "application/json";
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];

/// Alive: 200 for as long as the proxy serves. Says nothing of the engines.
pub fn health() -> Answer {
    answer::full(StatusCode::OK, JSON, r#"{"status":"ok"}"#)
}

#[derive(Serialize)]
struct Readiness {
    ready: bool,
    prefill: Count,
    decode: Count,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Clone, Copy, Serialize)]
struct Count {
    ready: usize,
    required: usize,
    configured: usize,
}

/// 200 when enough engines of each role answered `/health` recently: one of each that the connector
/// needs, or as many as `?prefill=N&decode=M` asks for. Otherwise 503 with the reason.
pub fn ready(app: &App, query: Option<&str>) -> Answer {
    let mut required = match app.config.connector.order() {
        Order::DecodeAlone => [0, 1],
        Order::PrefillFirst | Order::Together => [1, 1],
    };
    for pair in query
        .unwrap_or_default()
        .split('&')
        .filter(|p| !p.is_empty())
    {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let slot = match name {
            "prefill" => &mut required[0],
            "decode" => &mut required[1],
            _ => return bad_query(name),
        };
        match value.parse() {
            Ok(count) => *slot = count,
            Err(_) => return bad_query(name),
        }
    }
    let now_ms = app.now_ms();
    let [prefill, decode] = [0, 1].map(|at| Count {
        ready: app.with_pool(ROLES[at], |pool| pool.ready_count(now_ms)),
        required: required[at],
        configured: app.instance_count(ROLES[at]),
    });
    let short: Vec<String> = [("prefill", prefill), ("decode", decode)]
        .into_iter()
        .filter(|(_, count)| count.ready < count.required)
        .map(|(role, count)| {
            format!(
                "{} of {} {role} engines answered /health recently, {} required",
                count.ready, count.configured, count.required
            )
        })
        .collect();
    let readiness = Readiness {
        ready: short.is_empty(),
        prefill,
        decode,
        reason: (!short.is_empty()).then(|| short.join("; ")),
    };
    let status = if readiness.ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    json(status, &readiness)
}

fn bad_query(name: &str) -> Answer {
    let message = format!("`{name}`: the query takes prefill=N and decode=N");
    answer::error(&ApiError::new(400, "invalid_query", message))
}

#[derive(Serialize)]
struct WorkerView {
    id: String,
    url: String,
    role: &'static str,
    dp: u32,
    rank0: u32,
    in_flight: u32,
    in_flight_by_rank: Vec<u32>,
    state: &'static str,
    healthy: bool,
}

/// The engines as a JSON list, prefill first, in flag order.
pub fn workers(app: &App) -> Answer {
    let views: Vec<WorkerView> = ROLES
        .into_iter()
        .flat_map(|role| {
            let views: Vec<InstanceView> = app.view(role);
            views.into_iter().enumerate().map(move |(at, view)| {
                let role = role.name();
                WorkerView {
                    id: format!("{role}-{at}"),
                    role,
                    dp: view.spec.dp,
                    rank0: view.spec.rank0,
                    url: view.spec.url,
                    in_flight: view.in_flight_by_rank.iter().sum(),
                    in_flight_by_rank: view.in_flight_by_rank,
                    state: view.state.name(),
                    healthy: view.ready,
                }
            })
        })
        .collect();
    json(StatusCode::OK, &views)
}

/// The OpenMetrics text.
pub fn metrics(app: &App) -> Answer {
    for role in ROLES {
        for (at, view) in app.view(role).into_iter().enumerate() {
            let instance = app.label(role, InstanceIndex(at));
            let labels = InstanceLabels {
                role: role.name(),
                instance: instance.clone(),
            };
            let ready = i64::from(view.ready);
            app.metrics.ready.get_or_create(&labels).set(ready);
            for (rank, count) in (0..).zip(view.in_flight_by_rank) {
                let labels = SlotLabels {
                    role: role.name(),
                    instance: instance.clone(),
                    rank,
                };
                let count = i64::from(count);
                app.metrics.in_flight.get_or_create(&labels).set(count);
            }
        }
    }
    match app.metrics.encode() {
        Ok(text) => answer::full(StatusCode::OK, OPENMETRICS, text),
        Err(error) => answer::error(&ApiError::new(500, "internal", error.to_string())),
    }
}

fn json(status: StatusCode, value: &impl Serialize) -> Answer {
    match serde_json::to_vec(value) {
        Ok(body) => answer::full(status, JSON, body),
        Err(error) => answer::error(&ApiError::new(500, "internal", error.to_string())),
    }
}
