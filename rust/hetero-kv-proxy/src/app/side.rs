//! The engines of one role: the pool that gives their slots out, and the list that stands beside it.

use std::sync::{Arc, Mutex};

use super::App;
use crate::config::Config;
use crate::instance::Instance;
use crate::lease::KeptBlocks;
use crate::routing::{
    BreakerRules, HealthRules, InstanceIndex, InstanceView, Pool, PoolSettings, Role, SlotId,
};
use crate::sync::lock;

/// The instances of one role, in the order of their indexes. A reader's list stays as it was.
pub type Snapshot = Arc<Vec<Arc<Instance>>>;

/// The engines of one role. Pool and list change together.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) pool: Pool,
    pub(super) instances: Snapshot,
}

impl Side {
    /// A role as the settings have it, without an instance.
    pub(super) fn new(config: &Config, role: Role) -> Self {
        let settings = pool_settings(config, role);
        let mut pool = Pool::new(role, Vec::new(), settings.policy, settings.health);
        pool.set(settings);
        Self {
            pool,
            instances: Snapshot::default(),
        }
    }

    pub(crate) fn get(&self, index: InstanceIndex) -> Option<&Arc<Instance>> {
        let at = self
            .instances
            .binary_search_by_key(&index, |known| known.index)
            .ok()?;
        self.instances.get(at)
    }
}

impl App {
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

    /// The instances of a role that take legs at this moment.
    pub(crate) fn routable(&self, role: Role) -> Vec<InstanceIndex> {
        self.with_pool(role, |pool| pool.routable())
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

    /// Decode was not seen to take them: they stay until the engine's lease is over.
    pub(crate) fn blocks_left(&self, instance: &Instance) {
        if instance.is_lost() {
            self.blocks_read(instance);
            return;
        }
        let lease_ms = instance.facts().lease_ms();
        let lease_ms = lease_ms.unwrap_or_else(|| self.config().lease.as_millis() as u64);
        let until_ms = self.now_ms() + lease_ms;
        self.with_pool(instance.role, |pool| {
            pool.leave(instance.index, until_ms);
        });
    }

    /// Lets go of what was left for as long as a lease is.
    pub(crate) fn lapse(&self, role: Role) {
        let emptied: Vec<Arc<Instance>> = {
            let mut side = lock(self.side(role));
            let emptied = side.pool.lapse(self.now_ms());
            let known = emptied.into_iter().filter_map(|index| side.get(index));
            known.map(Arc::clone).collect()
        };
        for instance in emptied {
            self.emptied(&instance);
        }
    }

    /// They were read, or there were none.
    pub(crate) fn blocks_read(&self, instance: &Instance) {
        if self.with_pool(instance.role, |pool| pool.unkeep(instance.index)) {
            self.emptied(instance);
        }
    }

    /// Runs `change` on a role's pool.
    pub fn with_pool<T>(&self, role: Role, change: impl FnOnce(&mut Pool) -> T) -> T {
        change(&mut lock(self.side(role)).pool)
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
pub(super) fn pool_settings(config: &Config, role: Role) -> PoolSettings {
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
