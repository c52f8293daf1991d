//! The proxy's own paths: liveness, readiness, metrics, workers.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::StatusCode;
use serde::Serialize;

use crate::answer::{self, Answer};
use crate::app::App;
use crate::config::Worker;
use crate::connectors::Order;
use crate::instance::Instance;
use crate::metrics::{InstanceLabels, SlotLabels, WaitLabels, WorkerLabels};
use crate::openai::error::ApiError;
use crate::routing::{Field, HealthState, InstanceView, Role, Standing};
use crate::sync::lock;
use crate::timeline;

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
    let mut required = match app.config().connector.order() {
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
        configured: app.snapshot(ROLES[at]).len(),
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

/// One engine in an answer.
#[derive(Serialize)]
pub struct WorkerView {
    id: String,
    url: String,
    role: &'static str,
    dp: u32,
    rank0: u32,
    weight: u32,
    in_flight: u32,
    in_flight_by_rank: Vec<u32>,
    elsewhere_by_rank: Option<Vec<u32>>,
    kept_transfers: u32,
    state: &'static str,
    healthy: bool,
    standing: &'static str,
    routable: bool,
    source: &'static str,
    engine_id: Option<String>,
    expires_in_ms: Option<u64>,
    /// What it tells of itself.
    told: BTreeMap<String, String>,
    /// With whom it is not paired for a time.
    avoided_with: Vec<AvoidedWith>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<Arc<serde_json::Map<String, serde_json::Value>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compat: Option<Arc<std::collections::BTreeMap<String, String>>>,
}

/// An engine of the other role with which one is not paired for a time.
#[derive(Serialize)]
pub struct AvoidedWith {
    id: String,
    for_ms: u64,
}

/// What a worker tells, by the fields of its registration.
fn told(worker: &Worker) -> BTreeMap<String, String> {
    let told = Field::ALL.into_iter().filter_map(|field| {
        let value = match field {
            Field::Control => worker.control.as_deref(),
            Field::Model
            | Field::Revision
            | Field::Dtype
            | Field::KvHeads
            | Field::Layout
            | Field::Mode => worker.traits.get(field),
        };
        Some((field.key().replace('-', "_"), value?.to_owned()))
    });
    told.collect()
}

fn worker_view(app: &App, instance: &Instance, view: InstanceView, now_ms: u64) -> WorkerView {
    let registration = &instance.registration;
    let facts = instance.facts();
    WorkerView {
        id: instance.id(),
        role: instance.role.name(),
        dp: view.spec.dp,
        rank0: view.spec.rank0,
        weight: instance.weights().counts(),
        url: view.spec.url,
        in_flight: view.in_flight_by_rank.iter().sum(),
        in_flight_by_rank: view.in_flight_by_rank,
        elsewhere_by_rank: view.elsewhere_by_rank,
        kept_transfers: view.kept,
        state: view.state.name(),
        healthy: view.ready,
        standing: match view.standing {
            Standing::Serving => "serving",
            Standing::Drained => "drained",
            Standing::Leaving => "leaving",
        },
        routable: view.routable,
        source: match registration.by_flag {
            true => "flag",
            false => "registered",
        },
        engine_id: instance.engine_id(),
        expires_in_ms: instance.expires_in_ms(now_ms),
        avoided_with: app
            .avoided_pairs(instance)
            .into_iter()
            .map(|(id, for_ms)| AvoidedWith { id, for_ms })
            .collect(),
        told: told(&instance.worker),
        kv: facts.kv,
        compat: facts.compat,
    }
}

/// One engine; `None` once it is removed.
pub fn worker(app: &App, instance: &Instance) -> Option<WorkerView> {
    let views = app.view(instance.role);
    let mut views = views.into_iter();
    let view = views.find(|view| view.index == instance.index)?;
    Some(worker_view(app, instance, view, app.now_ms()))
}

/// The engines as a JSON list, prefill first, in the order of their ids.
pub fn workers(app: &App) -> Answer {
    let now_ms = app.now_ms();
    let mut views: Vec<WorkerView> = Vec::new();
    for role in ROLES {
        let (instances, all) = app.snapshot_with_view(role);
        let pairs = instances.iter().zip(all);
        views.extend(pairs.map(|(instance, view)| worker_view(app, instance, view, now_ms)));
    }
    json(StatusCode::OK, &views)
}

/// The OpenMetrics text.
pub fn metrics(app: &App) -> Answer {
    // Gauges of engines that were removed end with them; another scrape must not see them half set.
    let scrape = lock(&app.metrics.scrape);
    app.metrics.ready.clear();
    app.metrics.in_flight.clear();
    app.metrics.breaker_open.clear();
    app.metrics.kept_transfers.clear();
    for role in ROLES {
        let (instances, views) = app.snapshot_with_view(role);
        for (instance, view) in instances.iter().zip(views) {
            let labels = InstanceLabels {
                role: role.name(),
                instance: Arc::clone(&instance.label),
            };
            // Two starts of one engine share a label while the older one ends.
            let ready = i64::from(view.ready);
            let known = app.metrics.ready.get_or_create(&labels);
            known.set(known.get().max(ready));
            let open = matches!(view.state, HealthState::Open | HealthState::HalfOpen);
            let known = app.metrics.breaker_open.get_or_create(&labels);
            known.set(known.get().max(i64::from(open)));
            if role == Role::Prefill {
                let labels = WorkerLabels {
                    instance: Arc::clone(&instance.label),
                };
                let kept = i64::from(view.kept);
                app.metrics
                    .kept_transfers
                    .get_or_create(&labels)
                    .inc_by(kept);
            }
            for (rank, count) in (0..).zip(view.in_flight_by_rank) {
                let labels = SlotLabels {
                    role: role.name(),
                    instance: Arc::clone(&instance.label),
                    rank,
                };
                let count = i64::from(count);
                app.metrics.in_flight.get_or_create(&labels).inc_by(count);
            }
        }
    }
    let (requests, slots) = app.admission.waiting();
    for (wait, length) in [("requests", requests), ("slots", slots)] {
        let labels = WaitLabels { wait };
        let length = i64::try_from(length).unwrap_or(i64::MAX);
        app.metrics.queue_length.get_or_create(&labels).set(length);
    }
    let running = app.admission.running();
    let running = i64::try_from(running).unwrap_or(i64::MAX);
    app.metrics.requests_running.set(running);
    let text = app.metrics.encode();
    drop(scrape);
    match text {
        Ok(text) => answer::full(StatusCode::OK, OPENMETRICS, text),
        Err(error) => answer::error(&ApiError::new(500, "internal", error.to_string())),
    }
}

/// The times of the last requests of this id, as a Chrome trace. In a path an id may be written
/// with `%` escapes.
pub(crate) fn trace(app: &App, id: &str) -> Answer {
    let found = unescaped(id).map(|id| app.timelines.of(&id));
    match found {
        Some(found) if !found.is_empty() => {
            json(StatusCode::OK, &timeline::chrome(&found, app.epoch_us()))
        }
        Some(_) | None => {
            let message = format!(
                "no request of this id is among the last {} that ended (--trace-requests-max)",
                app.config().trace_requests_max
            );
            answer::error(&ApiError::new(404, "unknown_request", message))
        }
    }
}

fn unescaped(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        bytes.extend(hex::decode(digits).ok()?);
        bytes.extend(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Answer {
    match serde_json::to_vec(value) {
        Ok(body) => answer::full(status, JSON, body),
        Err(error) => answer::error(&ApiError::new(500, "internal", error.to_string())),
    }
}
