//! `GET /metrics` of each engine: how much work it has from everyone, over the same connections as
//! traffic.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Method};
use http_body_util::{BodyExt, Limited};
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::app::App;
use crate::instance::Instance;
use crate::metrics::OutcomeLabels;
use crate::routing::EngineLoad;
use crate::upstream::{LegBody, Upstream};

/// vLLM writes some 40 KB for each engine; an answer over this is not used.
const SCRAPE_BYTES_MAX: usize = 8 << 20;

/// Scrapes one engine for as long as this runs, where scrapes are wanted.
pub(crate) async fn run(app: &App, instance: &Instance) {
    let mut reloaded = app.reloaded.subscribe();
    loop {
        let every = app.config().scrape_interval;
        let wanted = !every.is_zero() && app.with_pool(instance.role, |pool| pool.reads_load());
        let scrapes = async {
            match wanted {
                true => scrape_every(app, instance, every).await,
                false => std::future::pending().await,
            }
        };
        let changed = async {
            // The sender lives as long as the app.
            while reloaded.changed().await.is_ok() {
                let interval = app.config().scrape_interval;
                let reads = app.with_pool(instance.role, |pool| pool.reads_load());
                if interval != every || reads != wanted {
                    return;
                }
            }
        };
        tokio::select! {
            () = scrapes => {}
            () = changed => {}
        }
    }
}

async fn scrape_every(app: &App, instance: &Instance, every: Duration) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // What comes later is of no use.
        let outcome = timeout(3 * every, once(app, instance)).await;
        let outcome = outcome.unwrap_or("late");
        let labels = OutcomeLabels { outcome };
        app.metrics.engine_scrapes.get_or_create(&labels).inc();
    }
}

/// One scrape, and what came of it.
async fn once(app: &App, instance: &Instance) -> &'static str {
    let legs = || app.with_pool(instance.role, |pool| pool.legs(instance.index));
    let (before, asked_ms) = (legs(), app.now_ms());
    let upstream = &instance.upstream;
    // A kept connection that the engine just closed is no sign of anything.
    let text = match get(upstream, false).await {
        Err(Fault::Unreachable) => get(upstream, true).await,
        got => got,
    };
    let text = match text {
        Ok(text) => text,
        Err(Fault::Unreachable) => return "unreachable",
        Err(Fault::Answer) => return "refused",
    };
    let Some(loads) = EngineLoad::of_scrape(&text, instance.worker.spec.dp) else {
        return "unknown";
    };
    // Legs began and ended while the engine wrote it: none of them may pass for another proxy's.
    let own = before.into_iter().zip(legs());
    let own: Vec<u32> = own.map(|(before, after)| before.max(after)).collect();
    app.with_pool(instance.role, |pool| {
        pool.on_scraped(instance.index, &loads, &own, asked_ms);
    });
    "ok"
}

enum Fault {
    Unreachable,
    /// Another status, or too much.
    Answer,
}

async fn get(upstream: &Arc<Upstream>, fresh: bool) -> Result<String, Fault> {
    let body = LegBody::default();
    let answer = upstream
        .send(
            &Method::GET,
            "/metrics",
            &HeaderMap::new(),
            &[],
            body,
            fresh,
        )
        .await
        .map_err(|_| Fault::Unreachable)?;
    let well = answer.head.status.is_success();
    let read = Limited::new(answer.body, SCRAPE_BYTES_MAX).collect().await;
    let text = read.map_err(|_| Fault::Answer)?.to_bytes();
    match well {
        true => String::from_utf8(text.into()).map_err(|_| Fault::Answer),
        false => Err(Fault::Answer),
    }
}
