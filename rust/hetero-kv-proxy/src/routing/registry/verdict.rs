//! What probes and legs say of instances.

use super::super::{Health, HealthRules, HealthState, InstanceIndex, LegFault};
use super::Pool;

impl Pool {
    /// Something was seen of an instance. Most of it changes nothing of where legs may go.
    fn see(&mut self, instance: InstanceIndex, seen: impl FnOnce(&mut Health, &HealthRules)) {
        let rules = self.rules;
        let Some(known) = self.get_mut(instance) else {
            return;
        };
        let (before, was_routable) = (known.health.grade(), known.is_routable());
        seen(&mut known.health, &rules);
        if (before, was_routable) != (known.health.grade(), known.is_routable()) {
            self.changed();
        }
    }

    /// A probe was answered well.
    pub fn on_probe_answered(&mut self, instance: InstanceIndex, now_ms: u64) {
        self.see(instance, |health, _| health.on_probe_answered(now_ms));
    }

    /// A leg that began at `began_ms` failed by the engine's fault.
    pub fn on_failed(
        &mut self,
        instance: InstanceIndex,
        fault: LegFault,
        began_ms: u64,
        now_ms: u64,
    ) {
        self.see(instance, |health, rules| {
            health.on_failed(rules, fault, began_ms, now_ms);
        });
    }

    /// A leg that began at `began_ms` was served.
    pub fn on_served(&mut self, instance: InstanceIndex, began_ms: u64, now_ms: u64) {
        self.see(instance, |health, _| health.on_served(began_ms, now_ms));
    }

    /// A leg got a response head with a status below 500.
    pub fn on_answer(&mut self, instance: InstanceIndex) {
        self.see(instance, |health, _| health.on_answer());
    }

    /// A probe failed.
    pub fn on_probe_failed(&mut self, instance: InstanceIndex) {
        self.see(instance, |health, rules| health.on_probe_failed(rules));
    }

    /// Traffic could not reach the instance.
    pub fn on_connect_failed(&mut self, instance: InstanceIndex) {
        self.see(instance, |health, _| health.on_connect_failed());
    }

    /// The state of one instance at `now_ms`; `None` where it is not there.
    pub fn state(&self, instance: InstanceIndex, now_ms: u64) -> Option<HealthState> {
        let at = self.position(instance)?;
        Some(self.instances[at].health.state(now_ms))
    }

    /// Number of instances that take legs and whose probe was answered recently.
    pub fn ready_count(&self, now_ms: u64) -> usize {
        self.instances
            .iter()
            .filter(|known| known.is_routable() && known.health.is_ready(&self.rules, now_ms))
            .count()
    }

    /// The instances that take legs at this moment.
    pub fn routable(&self) -> Vec<InstanceIndex> {
        let routable = self.instances.iter().filter(|known| known.is_routable());
        routable.map(|known| known.index).collect()
    }

    /// Whether any instance takes legs at this moment.
    pub fn has_routable(&self) -> bool {
        !self.census.takes_none()
    }
}
