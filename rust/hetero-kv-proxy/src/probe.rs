//! `GET /health` to each engine, over the same connections as traffic.

use std::sync::Arc;

use http::{HeaderMap, Method};
use http_body_util::{BodyExt, Limited};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::app::App;
use crate::routing::{InstanceIndex, Role};
use crate::upstream::{LegBody, Upstream};

/// A health answer is a few bytes; of a longer one the status is enough.
const HEALTH_BYTES_MAX: usize = 64 << 10;

/// Starts one probe task for each engine; they end when `stop` turns true.
pub fn start(app: &Arc<App>, stop: &watch::Receiver<bool>) {
    for role in [Role::Prefill, Role::Decode] {
        for at in 0..app.instance_count(role) {
            let task = watch_one(Arc::clone(app), role, InstanceIndex(at));
            let mut stop = stop.clone();
            tokio::spawn(async move {
                tokio::select! {
                    () = task => {}
                    _ = stop.wait_for(|stop| *stop) => {}
                }
            });
        }
    }
}

async fn watch_one(app: Arc<App>, role: Role, instance: InstanceIndex) {
    let upstream = app.upstream(role, instance);
    let mut ticks = interval(app.config.health_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        upstream.close_stale();
        // A kept connection that the engine just closed is no sign of ill health.
        let probe = async { is_well(upstream, false).await || is_well(upstream, true).await };
        match timeout(app.config.health_timeout, probe).await {
            Ok(true) => app.note_answer(role, instance),
            Ok(false) | Err(_) => app.note_probe_failed(role, instance),
        }
    }
}

async fn is_well(upstream: &Arc<Upstream>, fresh: bool) -> bool {
    let body = LegBody::default();
    let sent = upstream
        .send(Method::GET, "/health", HeaderMap::new(), body, fresh)
        .await;
    let Ok(answer) = sent else {
        return false;
    };
    let well = answer.head.status.is_success();
    if Limited::new(answer.body, HEALTH_BYTES_MAX)
        .collect()
        .await
        .is_ok()
    {
        answer.connection.keep();
    }
    well
}
