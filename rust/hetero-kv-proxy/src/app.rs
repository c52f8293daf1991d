//! What all requests share: the settings, the engines of both roles, admission, metrics.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Instant, SystemTime};

use http::{HeaderValue, header};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::admission::Admission;
use crate::answer::{self, Answer};
use crate::auth::Gate;
use crate::config::Config;
use crate::handover::Settling;
use crate::instance::Registration;
use crate::metrics::{Metrics, ReasonLabels};
use crate::openai::error::ApiError;
use crate::prefill::LateAnswers;
use crate::revisions::Revisions;
use crate::routing::{BadPairs, Kinds, Role, Standing};
use crate::running::Requests;
use crate::sync::lock;
use crate::timeline::Timelines;
use crate::trace_context::TraceIds;
use crate::twins::Twins;

mod health;
mod members;
mod side;

pub(crate) use side::Side;
pub use side::Snapshot;

/// One running proxy.
#[derive(Debug)]
pub struct App {
    /// As resolved, with what was changed since.
    config: Mutex<Arc<Config>>,
    /// Told when it has changed.
    pub(crate) reloaded: watch::Sender<()>,
    /// Every metric.
    pub metrics: Metrics,
    /// Who may run, and who waits.
    pub admission: Admission,
    /// The requests that run, by id.
    pub running: Requests,
    /// Client connections and decode legs that outlive their client: what a drain waits for.
    pub tasks: TaskTracker,
    /// Who may do what.
    pub(crate) gate: Gate,
    /// Decode legs whose clients have left.
    pub(crate) settling: Settling,
    /// Room for prefill legs whose clients have left.
    pub(crate) late_answers: LateAnswers,
    /// Where the proxy itself listens, each address with the setting that names it.
    pub(crate) listeners: OnceLock<Vec<(&'static str, SocketAddr)>>,
    /// Turns true when the proxy is to end.
    pub stop: watch::Sender<bool>,
    /// Held over what an administrator's request finds and changes.
    pub(crate) changes: Mutex<()>,
    /// Whether some worker has told something of itself; without, nobody looks at the kinds.
    pub(crate) told: AtomicBool,
    /// What workers tell of themselves. Locked behind the sides, or alone.
    pub(crate) kinds: Mutex<Kinds>,
    /// The shares of revisions.
    pub(crate) revisions: Revisions,
    start: Instant,
    /// Pairs of engines that are avoided. Locked behind all others, or alone.
    pub(crate) bad_pairs: Mutex<BadPairs>,
    /// Engines that serve both roles.
    pub(crate) twins: Twins,
    /// The last requests that ended.
    pub(crate) timelines: Timelines,
    /// Ids of traces and of legs.
    pub(crate) trace_ids: TraceIds,
    /// The engines of each role. Who locks both locks prefill's first.
    prefill: Mutex<Side>,
    decode: Mutex<Side>,
}

impl App {
    /// A proxy for `config`, with nothing started.
    ///
    /// # Errors
    /// A URL that cannot be a `Host` header.
    pub fn new(config: Config) -> Result<Arc<Self>, http::Error> {
        let app = Arc::new(Self {
            prefill: Mutex::new(Side::new(&config, Role::Prefill)),
            decode: Mutex::new(Side::new(&config, Role::Decode)),
            metrics: Metrics::default(),
            admission: Admission::new(&config),
            gate: Gate::new(
                config.admin_keys.clone(),
                config.api_keys.clone(),
                config.forward_authorization,
            ),
            running: Requests::default(),
            tasks: TaskTracker::new(),
            settling: Settling::default(),
            late_answers: LateAnswers::default(),
            listeners: OnceLock::new(),
            stop: watch::Sender::new(false),
            changes: Mutex::new(()),
            told: AtomicBool::new(false),
            kinds: Mutex::default(),
            revisions: Revisions::new(config.revision_weights.clone()),
            start: Instant::now(),
            bad_pairs: Mutex::default(),
            twins: Twins::default(),
            timelines: Timelines::default(),
            trace_ids: TraceIds::default(),
            reloaded: watch::Sender::new(()),
            config: Mutex::new(Arc::new(config)),
        });
        let config = app.config();
        for (role, workers) in [
            (Role::Prefill, &config.prefill),
            (Role::Decode, &config.decode),
        ] {
            for worker in workers {
                let registration = Registration {
                    told_role: role,
                    by_flag: true,
                };
                let instance = app.instance(role, worker.clone(), registration)?;
                app.take_in(instance, Standing::Serving);
            }
        }
        Ok(app)
    }

    /// The settings as they are. Who holds them sees no change.
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&lock(&self.config))
    }

    /// Runs with `next` from here on. What a proxy keeps for its life is the same in both, and the
    /// workers, the keys and the shares of revisions are the caller's to change.
    pub(crate) fn set_config(&self, next: Config) {
        for role in ROLES {
            let settings = side::pool_settings(&next, role);
            self.with_pool(role, |pool| pool.set(settings));
        }
        self.admission.set_limits(&next);
        *lock(&self.config) = Arc::new(next);
        self.reloaded.send_replace(());
        self.admission.ring();
    }

    /// Milliseconds since this proxy was made: the clock of routing.
    pub fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// A time of tokio's clock by the clock of routing, in microseconds.
    pub(crate) fn us_at(&self, at: tokio::time::Instant) -> u64 {
        let since = at.into_std().saturating_duration_since(self.start);
        since.as_micros() as u64
    }

    /// The zero of that clock, in microseconds since 1970.
    pub(crate) fn epoch_us(&self) -> u64 {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_us = now.map_or(0, |now| now.as_micros() as u64);
        now_us.saturating_sub(self.now_us())
    }

    /// Microseconds since this proxy was made.
    pub(crate) fn now_us(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    /// Whether a request's model decides about its workers.
    pub(crate) fn reads_model(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// Counts a request whose prompt decode computes.
    pub fn count_fallback(&self, reason: &'static str) {
        let labels = ReasonLabels { reason };
        self.metrics.fallbacks.get_or_create(&labels).inc();
    }

    /// Whether a slot of some role may be without room.
    pub(crate) fn has_limits(&self) -> bool {
        let config = self.config();
        config.prefill_requests_max.is_some() || config.decode_requests_max.is_some()
    }

    /// The answer to a request that lacks a key or a signature, counted.
    pub(crate) fn unauthorized(&self, error: &ApiError) -> Answer {
        let labels = ReasonLabels { reason: error.code };
        self.metrics.unauthorized.get_or_create(&labels).inc();
        let mut answer = answer::error(error);
        if error.code.ends_with("api_key") {
            let scheme = HeaderValue::from_static("Bearer");
            answer
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, scheme);
        }
        answer
    }
}

const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];
