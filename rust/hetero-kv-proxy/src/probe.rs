//! `GET /health` to each engine, over the same connections as traffic.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Method};
use http_body_util::{BodyExt, Limited};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use crate::app::App;
use crate::instance::Instance;
use crate::scrape;
use crate::upstream::{LegBody, Upstream};

/// A health answer is a few bytes; of a longer one the status is enough.
const HEALTH_BYTES_MAX: usize = 64 << 10;

/// Starts the probe of one engine, and the scrapes; both end when the engine is removed, or the proxy stops.
pub fn start(app: &Arc<App>, instance: &Arc<Instance>) {
    let probes = watch_one(Arc::clone(app), Arc::clone(instance));
    let (scraping, scraped) = (Arc::clone(app), Arc::clone(instance));
    let task = async move { tokio::join!(probes, scrape::run(&scraping, &scraped)) };
    let gone = instance.gone.clone();
    let mut stop = app.stop.subscribe();
    tokio::spawn(async move {
        tokio::select! {
            _ = task => {}
            () = gone.cancelled() => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    });
}

async fn watch_one(app: Arc<App>, instance: Arc<Instance>) {
    let upstream = &instance.upstream;
    let mut reloaded = app.reloaded.subscribe();
    let mut every = app.config().health_interval;
    let mut ticks = ticks_of(every);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            // The sender lives as long as the app.
            _ = reloaded.changed() => {
                let next = app.config().health_interval;
                if next != every {
                    every = next;
                    ticks = ticks_of(every);
                }
                continue;
            }
        }
        upstream.close_stale();
        // A kept connection that the engine just closed is no sign of ill health.
        let probe = async {
            match ask(upstream, false).await {
                Ok(()) => Ok(()),
                Err(_) => ask(upstream, true).await,
            }
        };
        let limit = app.config().health_timeout;
        match timeout(limit, probe).await {
            Ok(Ok(())) => app.note_probed(&instance),
            Ok(Err(fault)) => app.note_probe_failed(&instance, &format!("GET /health: {fault}")),
            Err(_) => {
                let fault = format!("GET /health: no answer within {} ms", limit.as_millis());
                app.note_probe_failed(&instance, &fault);
            }
        }
    }
}

fn ticks_of(every: Duration) -> Interval {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Asks once; an error says what came instead of a good answer.
async fn ask(upstream: &Arc<Upstream>, fresh: bool) -> Result<(), String> {
    let body = LegBody::default();
    let sent = upstream
        .send(&Method::GET, "/health", &HeaderMap::new(), &[], body, fresh)
        .await;
    let answer = sent.map_err(|error| error.to_string())?;
    let status = answer.head.status;
    // Read whole, its connection serves traffic too.
    let _read = Limited::new(answer.body, HEALTH_BYTES_MAX).collect().await;
    match status.is_success() {
        true => Ok(()),
        false => Err(status.as_u16().to_string()),
    }
}
