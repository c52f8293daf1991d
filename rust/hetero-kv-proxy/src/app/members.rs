//! Instances that come, change and go.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{App, ROLES};
use crate::config::Worker;
use crate::instance::{Instance, Leave, Registration, WorkerWeights};
use crate::probe;
use crate::routing::{Pool, Role, Standing, Traits};
use crate::sync::lock;
use crate::upstream::PoolLimits;

impl App {
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
        self.note_twins(&instance);
        self.admission.ring();
        instance
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

    /// Keeps an instance from new legs; it is removed when the last one has ended, which may be
    /// before this returns.
    pub(crate) fn let_go(&self, instance: &Instance, why: Leave) {
        {
            let mut side = lock(self.side(instance.role));
            instance.set_leave(Some(why));
            side.pool.set_standing(instance.index, Standing::Leaving);
            if instance.is_lost() {
                side.pool.lapse_all(instance.index);
            }
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
        self.twins.leave(instance.role, instance.index);
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
    pub(super) fn emptied(&self, instance: &Instance) {
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
}

/// Whether an instance that leaves has nothing left to wait for.
fn has_left(pool: &Pool, instance: &Instance) -> bool {
    pool.standing(instance.index) == Some(Standing::Leaving) && pool.is_idle(instance.index)
}
