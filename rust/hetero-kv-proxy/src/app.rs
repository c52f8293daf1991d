//! What all requests share: the pools of both roles, the engines behind them, admission, metrics.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::bootstrap::Bootstrap;
use crate::config::{Config, Worker};
use crate::connectors::PeerSpec;
use crate::metrics::{LegLabels, Metrics, ReasonLabels};
use crate::routing::{
    HealthRules, HealthState, InstanceIndex, InstanceView, Picked, Pool, Role, policy::PolicyKind,
};
use crate::running::Requests;
use crate::sync::lock;
use crate::upstream::{PoolLimits, Upstream};

/// The engines of one role.
#[derive(Debug)]
struct Side {
    pool: Mutex<Pool>,
    upstreams: Vec<Arc<Upstream>>,
    labels: Vec<Arc<str>>,
    peers: Vec<PeerSpec>,
}

/// One running proxy.
#[derive(Debug)]
pub struct App {
    /// As resolved.
    pub config: Config,
    /// Every metric.
    pub metrics: Metrics,
    /// One permit for each request that may run.
    pub admission: Arc<Semaphore>,
    /// The requests that run, by id.
    pub running: Requests,
    /// Client connections and decode legs that outlive their client: what a drain waits for.
    pub tasks: TaskTracker,
    /// The bootstrap servers of the prefill instances, where the connector has them.
    pub(crate) bootstrap: Vec<Bootstrap>,
    start: Instant,
    prefill: Side,
    decode: Side,
}

/// A chosen slot, in flight until dropped; the leg is then counted by how it ended.
#[derive(Debug)]
pub struct SlotLease {
    app: Arc<App>,
    role: Role,
    /// What was chosen.
    pub picked: Picked,
    outcome: &'static str,
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        lock(&self.app.side(self.role).pool).release(self.picked.slot);
        self.app
            .count_leg(self.role, self.picked.instance, self.outcome);
    }
}

impl SlotLease {
    /// The engine to send the leg to.
    pub fn upstream(&self) -> &Arc<Upstream> {
        self.app.upstream(self.role, self.picked.instance)
    }

    /// The role of the leg.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The engine gave a response head with a status below 500.
    pub fn note_answer(&self) {
        self.app.note_answer(self.role, self.picked.instance);
    }

    /// Ends the leg with an outcome other than `cancelled`, the word for one that was dropped.
    pub fn end(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl App {
    /// A proxy for `config`, with nothing started.
    ///
    /// # Errors
    /// A URL that cannot be a `Host` header.
    pub fn new(config: Config) -> Result<Arc<Self>, http::Error> {
        let interval_ms = config.health_interval.as_millis() as u64;
        let timeout_ms = config.health_timeout.as_millis() as u64;
        let rules = HealthRules {
            failures_max: config.health_failures_max,
            // An engine that answers each probe just in time stays ready.
            fresh_ms: 2 * interval_ms + timeout_ms,
        };
        let limits = PoolLimits {
            connect_timeout: config.connect_timeout,
            idle_max: config.pool_idle_max,
            idle_timeout: config.pool_idle_timeout,
        };
        let side = |workers: &[Worker], policy: PolicyKind| -> Result<Side, http::Error> {
            Ok(Side {
                pool: Mutex::new(Pool::new(
                    workers.iter().map(|worker| worker.spec.clone()).collect(),
                    policy,
                    rules,
                )),
                upstreams: workers
                    .iter()
                    .map(|worker| Upstream::new(worker.base.clone(), limits))
                    .collect::<Result<_, _>>()?,
                labels: workers
                    .iter()
                    .map(|worker| Arc::from(worker.spec.url.as_str()))
                    .collect(),
                peers: workers.iter().map(|worker| worker.peer.clone()).collect(),
            })
        };
        let bootstrap = match config.connector.needs_engine_id() {
            true => config
                .prefill
                .iter()
                .map(|worker| Bootstrap::new(&worker.peer.bootstrap, limits))
                .collect::<Result<_, _>>()?,
            false => Vec::new(),
        };
        Ok(Arc::new(Self {
            bootstrap,
            prefill: side(&config.prefill, config.prefill_policy)?,
            decode: side(&config.decode, config.decode_policy)?,
            metrics: Metrics::default(),
            admission: Arc::new(Semaphore::new(config.requests_max)),
            running: Requests::default(),
            tasks: TaskTracker::new(),
            start: Instant::now(),
            config,
        }))
    }

    /// Milliseconds since this proxy was made: the clock of routing.
    pub fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    fn side(&self, role: Role) -> &Side {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }

    /// Number of instances of a role.
    pub fn instance_count(&self, role: Role) -> usize {
        self.side(role).upstreams.len()
    }

    /// One engine.
    pub fn upstream(&self, role: Role, instance: InstanceIndex) -> &Arc<Upstream> {
        &self.side(role).upstreams[instance.0]
    }

    /// The label of one engine in metrics.
    pub fn label(&self, role: Role, instance: InstanceIndex) -> &Arc<str> {
        &self.side(role).labels[instance.0]
    }

    /// What connectors know of one instance.
    pub fn peer(&self, role: Role, instance: InstanceIndex) -> &PeerSpec {
        &self.side(role).peers[instance.0]
    }

    /// Counts a request whose prompt decode computes.
    pub fn count_fallback(&self, reason: &'static str) {
        let labels = ReasonLabels { reason };
        self.metrics.fallbacks.get_or_create(&labels).inc();
    }

    /// Chooses a slot; `None` when the role has none.
    pub fn pick(self: &Arc<Self>, role: Role, avoid: Option<InstanceIndex>) -> Option<SlotLease> {
        let picked = lock(&self.side(role).pool).pick(avoid)?;
        Some(SlotLease {
            app: Arc::clone(self),
            role,
            picked,
            outcome: "cancelled",
        })
    }

    /// Takes a slot of one instance.
    pub fn pick_at(self: &Arc<Self>, role: Role, instance: InstanceIndex) -> Option<SlotLease> {
        let picked = lock(&self.side(role).pool).pick_at(instance)?;
        Some(SlotLease {
            app: Arc::clone(self),
            role,
            picked,
            outcome: "cancelled",
        })
    }

    /// Runs `change` on a role's pool.
    pub fn with_pool<T>(&self, role: Role, change: impl FnOnce(&mut Pool) -> T) -> T {
        change(&mut lock(&self.side(role).pool))
    }

    /// An engine answered a probe well, or a leg with a status below 500.
    pub fn note_answer(&self, role: Role, instance: InstanceIndex) {
        let now_ms = self.now_ms();
        self.note(role, instance, |pool| pool.on_answer(instance, now_ms));
    }

    /// A probe failed.
    pub fn note_probe_failed(&self, role: Role, instance: InstanceIndex) {
        self.note(role, instance, |pool| pool.on_probe_failed(instance));
    }

    /// Traffic could not reach an engine.
    pub fn note_unreachable(&self, role: Role, instance: InstanceIndex) {
        if role == Role::Prefill
            && let Some(bootstrap) = self.bootstrap.get(instance.0)
        {
            // Should it come back, it is another engine.
            bootstrap.forget();
        }
        self.note(role, instance, |pool| pool.on_connect_failed(instance));
    }

    /// Changes an instance's health; each change of state is one log line.
    fn note(&self, role: Role, instance: InstanceIndex, change: impl FnOnce(&mut Pool)) {
        let (before, after) = self.with_pool(role, |pool| {
            let before = pool.state(instance);
            change(pool);
            (before, pool.state(instance))
        });
        if before == after {
            return;
        }
        let url = &**self.label(role, instance);
        let (role, before, after_name) = (role.name(), before.name(), after.name());
        match after {
            HealthState::Healthy | HealthState::Unknown => {
                tracing::info!(role, url, before, after = after_name, "engine state");
            }
            HealthState::Suspect | HealthState::Unhealthy => {
                tracing::warn!(role, url, before, after = after_name, "engine state");
            }
        }
    }

    /// A role's instances as they are.
    pub fn view(&self, role: Role) -> Vec<InstanceView> {
        let now_ms = self.now_ms();
        self.with_pool(role, |pool| pool.view(now_ms))
    }

    fn count_leg(&self, role: Role, instance: InstanceIndex, outcome: &'static str) {
        let labels = LegLabels {
            role: role.name(),
            instance: Arc::clone(self.label(role, instance)),
            outcome,
        };
        self.metrics.legs.get_or_create(&labels).inc();
    }
}
