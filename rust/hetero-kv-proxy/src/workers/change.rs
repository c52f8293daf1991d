//! Workers that come, are heard of, are drained, change their role and go.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::body::{Told, fault, refused};
use super::facts::Facts;
use crate::app::App;
use crate::config::{Worker, base_url, own_listener, worker_faults};
use crate::connectors::{Order, other_connector};
use crate::instance::{Instance, Leave, Registration, WorkerWeights};
use crate::openai::error::ApiError;
use crate::routing::{Role, Standing};
use crate::sync::lock;

/// Instances of both roles together; each has a probe and, with traffic, connections.
pub(super) const WORKERS_MAX: usize = 1_024;
/// How often times to live are looked at.
const SWEEP: Duration = Duration::from_millis(100);

fn unknown(id: &str) -> ApiError {
    let shown: String = id.chars().take(64).collect();
    ApiError {
        param: Some("id".to_owned()),
        ..ApiError::new(
            404,
            "unknown_worker",
            format!("no worker `{shown}`; GET /workers lists them"),
        )
    }
}

fn leaving(instance: &Instance, why: Leave) -> ApiError {
    let message = format!(
        "worker `{}` is leaving ({}); try again when GET /workers does not list it",
        instance.id(),
        why.name()
    );
    ApiError::new(409, "worker_leaving", message)
}

fn internal(error: &http::Error) -> ApiError {
    ApiError::new(500, "internal", error.to_string())
}

/// The worker of this id.
pub(super) fn find(app: &App, id: &str) -> Result<Arc<Instance>, ApiError> {
    app.find(id).ok_or_else(|| unknown(id))
}

/// Whether a worker can serve a role here: what a flag would be refused for.
pub(super) fn check(app: &App, role: Role, worker: &Worker) -> Result<(), ApiError> {
    let connector = app.config().connector;
    if role == Role::Prefill && connector.order() == Order::DecodeAlone {
        let message = format!(
            "--connector {} sends no prefill leg; register the worker as decode",
            connector.name()
        );
        return Err(ApiError {
            param: Some("role".to_owned()),
            ..ApiError::new(400, "worker_refused", message)
        });
    }
    check_place(app, worker)?;
    match worker_faults(connector, role, worker).first() {
        Some(found) => Err(refused(found)),
        None => Ok(()),
    }
}

/// Whether a worker is elsewhere than this proxy itself.
fn check_place(app: &App, worker: &Worker) -> Result<(), ApiError> {
    let listeners = app.listeners.get().map(Vec::as_slice).unwrap_or_default();
    let listeners: Vec<(&'static str, String, u16)> = listeners
        .iter()
        .map(|(setting, at)| (*setting, at.ip().to_string(), at.port()))
        .collect();
    let listeners = listeners.iter();
    let listeners = listeners.map(|(setting, host, port)| (*setting, &**host, *port));
    match own_listener(&worker.base, listeners) {
        Some(text) => {
            let text = format!("{} {text}", worker.spec.url);
            Err(fault("worker_refused", "url", text))
        }
        None => Ok(()),
    }
}

/// Whether a worker's connector is of the kind that legs are made for here.
fn check_kind(app: &App, facts: &Facts) -> Result<(), ApiError> {
    let told = facts.connector();
    let found = told.and_then(|told| other_connector(app.config().connector, told));
    match found {
        Some(text) => Err(fault("worker_refused", "kv", text)),
        None => Ok(()),
    }
}

/// What is known of the worker of a role at `url`.
pub(super) fn known_part(app: &App, role: Role, url: &str) -> Option<Worker> {
    let base = base_url(url).ok()?;
    let here = app.snapshot(role);
    let mut known = here
        .iter()
        .filter(|known| known.worker.base.is_same_place(&base));
    known
        .find(|known| known.leave().is_none())
        .map(|known| known.worker.clone())
}

/// A worker registers, or is heard of again. Returns its instance and whether that is a new one.
pub(super) fn register(app: &Arc<App>, mut told: Told) -> Result<(Arc<Instance>, bool), ApiError> {
    check(app, told.role, &told.worker)?;
    check_kind(app, &told.facts)?;
    let held = lock(&app.changes);
    let here: Vec<Arc<Instance>> = [Role::Prefill, Role::Decode]
        .into_iter()
        .flat_map(|role| app.snapshot(role).to_vec())
        .collect();
    let same = |known: &&Arc<Instance>| {
        // What has expired or was replaced is over; the worker begins anew.
        let over = matches!(known.leave(), Some(Leave::Expired | Leave::Replaced));
        known.worker.base.is_same_place(&told.worker.base) && !over
    };
    // Told first: an operator may have changed the role since, which a heartbeat does not undo.
    let known = here
        .iter()
        .filter(same)
        .find(|known| known.registration.told_role == told.role)
        .or_else(|| {
            here.iter()
                .filter(same)
                .find(|known| known.role == told.role)
        });
    let now_ms = app.now_ms();
    let Some(known) = known else {
        if here.len() >= WORKERS_MAX {
            let message = format!("{WORKERS_MAX} workers are registered; remove some first");
            return Err(ApiError::new(409, "too_many_workers", message));
        }
        let registration = Registration {
            told_role: told.role,
            by_flag: false,
        };
        let instance = app
            .instance(told.role, told.worker, registration)
            .map_err(|error| internal(&error))?;
        instance.heard(now_ms, told.ttl_ms);
        instance.is_start(told.engine_id.as_deref());
        instance.set_facts(told.facts);
        let instance = app.take_in_probed(instance, Standing::Serving);
        drop(held);
        tracing::info!(
            id = instance.id(),
            url = &*instance.label,
            "worker registered"
        );
        return Ok((instance, true));
    };
    if let Some(why) = known.leave() {
        return Err(leaving(known, why));
    }
    if known.registration.by_flag {
        // An operator's words for it, such as its revision, which no engine knows.
        told.worker.traits = told.worker.traits.or(&known.worker.traits);
        told.worker.weight = known.weights().told.or(told.worker.weight);
    }
    let weights = WorkerWeights {
        told: told.worker.weight.or(known.weights().told),
        ..known.weights()
    };
    let same_start = known.is_start(told.engine_id.as_deref());
    if same_start && known.worker.says_the_same(&told.worker) {
        known.heard(now_ms, told.ttl_ms);
        known.set_facts(told.facts);
        app.set_weight(known, weights);
        return Ok((Arc::clone(known), false));
    }
    check(app, known.role, &told.worker)?;
    let engine_id = told.engine_id.or_else(|| known.engine_id());
    let next = app
        .instance(known.role, told.worker, known.registration)
        .map_err(|error| internal(&error))?;
    next.is_start(engine_id.as_deref());
    next.heard(now_ms, told.ttl_ms);
    next.set_facts(told.facts);
    next.set_weights(weights);
    // What an operator keeps from traffic stays so when it restarts.
    let standing = app.with_pool(known.role, |pool| pool.standing(known.index));
    let next = app.take_in_probed(next, standing.unwrap_or(Standing::Serving));
    app.let_go(known, Leave::Replaced);
    drop(held);
    tracing::info!(
        id = next.id(),
        url = &*next.label,
        replaces = known.id(),
        "worker registered again"
    );
    Ok((next, true))
}

/// Keeps a worker from new legs, or lets it have them again.
pub(super) fn set_drained(app: &App, instance: &Instance, drained: bool) -> Result<(), ApiError> {
    let held = lock(&app.changes);
    if let Some(why) = instance.leave() {
        return Err(leaving(instance, why));
    }
    let standing = match drained {
        true => Standing::Drained,
        false => Standing::Serving,
    };
    app.with_pool(instance.role, |pool| {
        pool.set_standing(instance.index, standing);
    });
    drop(held);
    let (id, url) = (instance.id(), &*instance.label);
    match drained {
        true => tracing::info!(id, url, "worker drained: it gets no new legs"),
        false => tracing::info!(id, url, "worker undrained: it gets legs again"),
    }
    Ok(())
}

/// Gives a worker the weight that counts from here on, whatever it tells.
pub(super) fn set_weight(app: &App, instance: &Instance, weight: u32) -> Result<(), ApiError> {
    let _held = lock(&app.changes);
    if let Some(why) = instance.leave() {
        return Err(leaving(instance, why));
    }
    let set = Some(weight);
    app.set_weight(
        instance,
        WorkerWeights {
            set,
            ..instance.weights()
        },
    );
    Ok(())
}

/// Waits until a drained worker has no leg left, at most until `until`.
pub(super) async fn wait_idle(app: &App, instance: &Instance, until: Instant) {
    let idle = || app.with_pool(instance.role, |pool| pool.is_idle(instance.index));
    let ended = async {
        loop {
            let told = instance.idle.notified();
            // The last leg may end between the look and the wait.
            tokio::pin!(told);
            told.as_mut().enable();
            if idle() {
                return;
            }
            told.await;
        }
    };
    wait(app, ended, until).await;
}

/// Waits for `what`, until `until` or the end of the proxy. Returns whether it came.
async fn wait(app: &App, what: impl Future<Output = ()>, until: Instant) -> bool {
    let mut stop = app.stop.subscribe();
    tokio::select! {
        () = what => true,
        () = sleep_until(until) => false,
        _ = stop.wait_for(|stop| *stop) => false,
    }
}

/// Removes a worker when its last leg has ended, or at once. Returns whether it has gone by `until`;
/// otherwise it goes later.
pub(super) async fn remove(
    app: &App,
    instance: &Instance,
    force: bool,
    until: Instant,
) -> Result<bool, ApiError> {
    {
        let _held = lock(&app.changes);
        match instance.leave() {
            Some(Leave::RoleChange) => return Err(leaving(instance, Leave::RoleChange)),
            Some(Leave::Expired | Leave::Replaced | Leave::Removed) => {}
            None => app.let_go(instance, Leave::Removed),
        }
        if force {
            app.remove(instance);
        }
    }
    Ok(wait(app, instance.gone.cancelled(), until).await)
}

/// Lets a worker's legs end and makes it one of the other role, under a new id. Where they do not
/// end by `until` it stays what it was. With `force` they are not waited for, and go on to their end.
pub(super) async fn change_role(
    app: &Arc<App>,
    instance: &Arc<Instance>,
    role: Role,
    force: bool,
    until: Instant,
) -> Result<Arc<Instance>, ApiError> {
    let before = {
        let _held = lock(&app.changes);
        if let Some(why) = instance.leave() {
            return Err(leaving(instance, why));
        }
        if instance.role == role {
            return Ok(Arc::clone(instance));
        }
        check(app, role, &instance.worker)?;
        let there = app.snapshot(role);
        let twin = there.iter().find(|known| {
            known.worker.base.is_same_place(&instance.worker.base) && known.leave().is_none()
        });
        if let Some(twin) = twin {
            let message = format!(
                "worker `{}` serves {} at the same address; remove it first",
                twin.id(),
                role.name()
            );
            return Err(ApiError::new(409, "role_taken", message));
        }
        let standing = app.with_pool(instance.role, |pool| pool.standing(instance.index));
        app.let_go(instance, Leave::RoleChange);
        if force {
            app.remove(instance);
        }
        standing.unwrap_or(Standing::Serving)
    };
    let gone = wait(app, instance.gone.cancelled(), until).await;
    let _held = lock(&app.changes);
    if !gone && app.stay(instance, before) {
        let message = format!(
            "worker `{}` had legs or kept blocks when the time was over and stays {}; try again, \
             with a longer wait_s, or with force=true",
            instance.id(),
            instance.role.name()
        );
        return Err(ApiError::new(409, "worker_busy", message));
    }
    let next = app
        .instance(role, instance.worker.clone(), instance.registration)
        .map_err(|error| internal(&error))?;
    next.is_start(instance.engine_id().as_deref());
    next.set_facts(instance.facts());
    next.set_weights(instance.weights());
    let (_, ttl_ms) = instance.last_heard();
    next.heard(app.now_ms(), ttl_ms);
    let next = app.take_in_probed(next, Standing::Serving);
    tracing::info!(
        id = next.id(),
        url = &*next.label,
        was = instance.id(),
        "worker changed its role"
    );
    Ok(next)
}

/// Lets go of workers that were not heard of for their time to live, and of transfers whose lease
/// is over, and tells of revisions that nobody serves, until the proxy stops.
pub(crate) async fn sweep(app: Arc<App>) {
    let mut stop = app.stop.subscribe();
    let mut ticks = interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let _held = lock(&app.changes);
        let now_ms = app.now_ms();
        app.lapse(Role::Prefill);
        app.tell_unheard_revisions();
        for role in [Role::Prefill, Role::Decode] {
            for instance in app.snapshot(role).iter() {
                if instance.expires_in_ms(now_ms) == Some(0) && instance.leave().is_none() {
                    app.let_go(instance, Leave::Expired);
                }
            }
        }
    }
}
