//! What all requests share: the pools of both roles, the engines behind them, admission, metrics.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use http::{HeaderValue, header};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::admission::Admission;
use crate::answer::{self, Answer};
use crate::auth::Gate;
use crate::config::{Config, Worker};
use crate::instance::{Instance, Leave, Registration, WorkerWeights};
use crate::lease::KeptBlocks;
use crate::metrics::{Metrics, ReasonLabels, RoleLabels};
use crate::openai::error::ApiError;
use crate::probe;
use crate::revisions::Revisions;
use crate::routing::{
    BadPairs, BreakerRules, HealthRules, HealthState, InstanceIndex, InstanceView, Kinds, LegFault,
    Pool, PoolSettings, Role, SlotId, Standing, Traits,
};
use crate::running::Requests;
use crate::sync::lock;
use crate::timeline::Timelines;
use crate::trace_context::TraceIds;
use crate::upstream::PoolLimits;

/// The instances of one role, in the order of their indexes. A reader's list stays as it was.
pub type Snapshot = Arc<Vec<Arc<Instance>>>;

/// The engines of one role. Pool and list change together.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) pool: Pool,
    instances: Snapshot,
}

impl Side {
    pub(crate) fn get(&self, index: InstanceIndex) -> Option<&Arc<Instance>> {
        let at = self
            .instances
            .binary_search_by_key(&index, |known| known.index)
            .ok()?;
        self.instances.get(at)
    }
}

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
    /// The last requests that ended.
    pub(crate) timelines: Timelines,
    /// Ids of traces and of legs.
    pub(crate) trace_ids: TraceIds,
    prefill: Mutex<Side>,
    decode: Mutex<Side>,
}

impl App {
    /// A proxy for `config`, with nothing started.
    ///
    /// # Errors
    /// A URL that cannot be a `Host` header.
    pub fn new(config: Config) -> Result<Arc<Self>, http::Error> {
        let side = |role: Role| {
            let settings = pool_settings(&config, role);
            let mut pool = Pool::new(role, Vec::new(), settings.policy, settings.health);
            pool.set(settings);
            Mutex::new(Side {
                pool,
                instances: Snapshot::default(),
            })
        };
        let app = Arc::new(Self {
            prefill: side(Role::Prefill),
            decode: side(Role::Decode),
            metrics: Metrics::default(),
            admission: Admission::new(&config),
            gate: Gate::new(
                config.admin_keys.clone(),
                config.api_keys.clone(),
                config.forward_authorization,
            ),
            running: Requests::default(),
            tasks: TaskTracker::new(),
            stop: watch::Sender::new(false),
            changes: Mutex::new(()),
            told: AtomicBool::new(false),
            kinds: Mutex::default(),
            revisions: Revisions::new(config.revision_weights.clone()),
            start: Instant::now(),
            bad_pairs: Mutex::default(),
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
            let settings = pool_settings(&next, role);
            self.with_pool(role, |pool| pool.set(settings));
        }
        self.admission.set_limits(&next);
        *lock(&self.config) = Arc::new(next);
        self.reloaded.send_replace(());
        self.admission.ring();
    }

    /// An instance that is not taken in yet.
    ///
    /// # Errors
    /// A URL that cannot be a `Host` header.
    pub(crate) fn instance(
        &self,
        role: Role,
        worker: Worker,
        registration: Registration,
    ) -> Result<Instance, http::Error> {
        let config = self.config();
        let limits = PoolLimits {
            connect_timeout: config.connect_timeout,
            idle_max: config.pool_idle_max,
            idle_timeout: config.pool_idle_timeout,
        };
        let with_bootstrap = config.connector.needs_engine_id();
        Instance::new(role, worker, registration, limits, with_bootstrap)
    }

    /// Gives an instance its index and makes it known. Its probe is the caller's to start.
    pub(crate) fn take_in(&self, mut instance: Instance, standing: Standing) -> Arc<Instance> {
        let traits = &instance.worker.traits;
        let kind = lock(&self.kinds).enter(traits);
        if *traits != Traits::default() {
            self.told.store(true, Ordering::Relaxed);
        }
        let mut side = lock(self.side(instance.role));
        let spec = instance.worker.spec.clone();
        instance.index = side.pool.add(spec, instance.trust(), standing);
        side.pool.set_kind(instance.index, kind);
        // Under the lock by which others of its label are removed.
        instance.meters = self.metrics.meters(instance.role, &instance.label);
        side.pool
            .set_weight(instance.index, instance.weights().counts());
        let instance = Arc::new(instance);
        Arc::make_mut(&mut side.instances).push(Arc::clone(&instance));
        drop(side);
        self.admission.ring();
        instance
    }

    /// Gives an instance other weights.
    pub(crate) fn set_weight(&self, instance: &Instance, weights: WorkerWeights) {
        let before = instance.weights();
        instance.set_weights(weights);
        let weight = weights.counts();
        if weight == before.counts() {
            return;
        }
        self.with_pool(instance.role, |pool| {
            pool.set_weight(instance.index, weight);
        });
        // A spare one may serve who waits.
        self.admission.ring();
        let (id, url) = (instance.id(), &*instance.label);
        tracing::info!(id, url, weight, before = before.counts(), "worker weight");
    }

    /// As [`App::take_in`], and starts its probe.
    pub(crate) fn take_in_probed(
        self: &Arc<Self>,
        instance: Instance,
        standing: Standing,
    ) -> Arc<Instance> {
        let instance = self.take_in(instance, standing);
        probe::start(self, &instance);
        instance
    }

    /// Keeps an instance from new legs; it is removed when the last one has ended, which may be
    /// before this returns.
    pub(crate) fn let_go(&self, instance: &Instance, why: Leave) {
        {
            let mut side = lock(self.side(instance.role));
            instance.set_leave(Some(why));
            side.pool.set_standing(instance.index, Standing::Leaving);
        }
        let (id, url) = (instance.id(), &*instance.label);
        match why {
            Leave::Expired => tracing::warn!(id, url, reason = why.name(), "worker leaves"),
            Leave::Replaced | Leave::Removed | Leave::RoleChange => {
                tracing::info!(id, url, reason = why.name(), "worker leaves");
            }
        }
        self.remove_if(instance, |pool| has_left(pool, instance));
    }

    /// Removes an instance, with whatever legs it has: they go on, and release their slots without
    /// effect.
    pub(crate) fn remove(&self, instance: &Instance) {
        self.remove_if(instance, |_| true);
    }

    fn remove_if(&self, instance: &Instance, holds: impl FnOnce(&Pool) -> bool) {
        {
            let mut side = lock(self.side(instance.role));
            if !holds(&side.pool) {
                return;
            }
            if let Some(kind) = side.pool.kind(instance.index) {
                lock(&self.kinds).leave(kind);
            }
            if !side.pool.remove(instance.index) {
                return;
            }
            Arc::make_mut(&mut side.instances).retain(|known| known.index != instance.index);
            let alone = side
                .instances
                .iter()
                .all(|known| known.label != instance.label);
            if alone {
                self.metrics.forget(instance.role, &instance.label);
            }
        }
        lock(&self.bad_pairs).forget(instance.role, instance.index);
        instance.gone.cancel();
        self.metrics.pairs.forget(instance);
        tracing::info!(id = instance.id(), url = &*instance.label, "worker removed");
    }

    /// Takes back that an instance leaves; false where it is gone.
    pub(crate) fn stay(&self, instance: &Instance, standing: Standing) -> bool {
        let mut side = lock(self.side(instance.role));
        let here = side.pool.standing(instance.index).is_some();
        if here {
            instance.set_leave(None);
            side.pool.set_standing(instance.index, standing);
        }
        here
    }

    /// The last leg of an instance that takes no others has ended.
    fn emptied(&self, instance: &Instance) {
        instance.idle.notify_waiters();
        self.remove_if(instance, |pool| has_left(pool, instance));
    }

    /// The instance of this id.
    pub(crate) fn find(&self, id: &str) -> Option<Arc<Instance>> {
        let mut all = ROLES
            .into_iter()
            .flat_map(|role| self.snapshot(role).to_vec());
        all.find(|known| known.id() == id)
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

    pub(crate) fn side(&self, role: Role) -> &Mutex<Side> {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }

    /// The instances of a role as they are.
    pub fn snapshot(&self, role: Role) -> Snapshot {
        Arc::clone(&lock(self.side(role)).instances)
    }

    /// Whether a request's model decides about its workers.
    pub(crate) fn reads_model(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// The instances of a role that take legs at this moment.
    pub(crate) fn routable(&self, role: Role) -> Vec<InstanceIndex> {
        self.with_pool(role, |pool| pool.routable())
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

    /// A leg has ended.
    pub(crate) fn release(&self, instance: &Instance, slot: SlotId) {
        if self.with_pool(instance.role, |pool| pool.release(slot)) {
            self.emptied(instance);
        }
        self.admission.ring();
    }

    /// Counts blocks that a prefill instance keeps for a decode leg: until then it is not idle.
    pub(crate) fn keep_blocks(self: &Arc<Self>, instance: &Arc<Instance>) -> KeptBlocks {
        self.with_pool(instance.role, |pool| pool.keep(instance.index));
        KeptBlocks::new(Arc::clone(self), Arc::clone(instance))
    }

    /// They were read, or nobody will.
    pub(crate) fn blocks_read(&self, instance: &Instance) {
        if self.with_pool(instance.role, |pool| pool.unkeep(instance.index)) {
            self.emptied(instance);
        }
    }

    /// Runs `change` on a role's pool.
    pub fn with_pool<T>(&self, role: Role, change: impl FnOnce(&mut Pool) -> T) -> T {
        change(&mut lock(self.side(role)).pool)
    }

    /// An engine answered a probe well.
    pub fn note_probed(&self, instance: &Instance) {
        let now_ms = self.now_ms();
        self.note(instance, |pool| {
            pool.on_probe_answered(instance.index, now_ms);
        });
    }

    /// A leg that began at `began_ms` was served.
    pub(crate) fn note_served(&self, instance: &Instance, began_ms: u64) {
        let now_ms = self.now_ms();
        self.note(instance, |pool| {
            pool.on_served(instance.index, began_ms, now_ms);
        });
    }

    /// A leg that began at `began_ms` failed by the engine's fault.
    pub(crate) fn note_failed(&self, instance: &Instance, fault: LegFault, began_ms: u64) {
        let now_ms = self.now_ms();
        self.note(instance, |pool| {
            pool.on_failed(instance.index, fault, began_ms, now_ms);
        });
    }

    /// An engine answered a leg with a status below 500.
    pub fn note_answer(&self, instance: &Instance) {
        let now_ms = self.now_ms();
        self.note(instance, |pool| pool.on_answer(instance.index, now_ms));
    }

    /// A probe failed.
    pub fn note_probe_failed(&self, instance: &Instance) {
        self.note(instance, |pool| pool.on_probe_failed(instance.index));
    }

    /// Traffic could not reach an engine.
    pub fn note_unreachable(&self, instance: &Instance) {
        if let Some(bootstrap) = &instance.bootstrap {
            // Should it come back, it is another engine.
            bootstrap.forget();
        }
        self.note(instance, |pool| pool.on_connect_failed(instance.index));
    }

    /// Changes an instance's health; each change of state is one log line.
    fn note(&self, instance: &Instance, change: impl FnOnce(&mut Pool)) {
        let now_ms = self.now_ms();
        let changed = self.with_pool(instance.role, |pool| {
            let before = pool.state(instance.index, now_ms)?;
            change(pool);
            Some((before, pool.state(instance.index, now_ms)?))
        });
        let Some((before, after)) = changed.filter(|(before, after)| before != after) else {
            return;
        };
        // Others may take its place in the routing, or it takes legs again.
        self.admission.ring();
        let url = &*instance.label;
        let role = instance.role.name();
        if after == HealthState::Open {
            let labels = RoleLabels { role };
            self.metrics.breaker_opens.get_or_create(&labels).inc();
        }
        let (before, after_name) = (before.name(), after.name());
        match after {
            HealthState::Healthy | HealthState::Unknown | HealthState::HalfOpen => {
                tracing::info!(role, url, before, after = after_name, "engine state");
            }
            HealthState::Suspect | HealthState::Open | HealthState::Unhealthy => {
                tracing::warn!(role, url, before, after = after_name, "engine state");
            }
        }
    }

    /// A role's instances as they are.
    pub fn view(&self, role: Role) -> Vec<InstanceView> {
        let now_ms = self.now_ms();
        self.with_pool(role, |pool| pool.view(now_ms))
    }

    /// A role's instances, and beside each what its pool says of it.
    pub(crate) fn snapshot_with_view(&self, role: Role) -> (Snapshot, Vec<InstanceView>) {
        let now_ms = self.now_ms();
        let side = lock(self.side(role));
        (Arc::clone(&side.instances), side.pool.view(now_ms))
    }
}

/// What the settings say of the pool of a role.
fn pool_settings(config: &Config, role: Role) -> PoolSettings {
    let interval_ms = config.health_interval.as_millis() as u64;
    let timeout_ms = config.health_timeout.as_millis() as u64;
    let (policy, legs_max) = match role {
        Role::Prefill => (config.prefill_policy, config.prefill_requests_max),
        Role::Decode => (config.decode_policy, config.decode_requests_max),
    };
    PoolSettings {
        policy,
        outlook: config.auto.is_some(),
        legs_max: legs_max.unwrap_or(u32::MAX),
        load_fresh_ms: 3 * config.scrape_interval.as_millis() as u64,
        health: HealthRules {
            failures_max: config.health_failures_max,
            // An engine that answers each probe just in time stays ready.
            fresh_ms: 2 * interval_ms + timeout_ms,
            breaker: BreakerRules {
                failures_max: config.breaker_failures_max,
                open_ms: config.breaker_open.as_millis() as u64,
            },
        },
    }
}

/// Whether an instance that leaves has nothing left to wait for.
fn has_left(pool: &Pool, instance: &Instance) -> bool {
    pool.standing(instance.index) == Some(Standing::Leaving) && pool.is_idle(instance.index)
}

const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];
