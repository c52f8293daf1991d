//! What probes and legs tell of an engine, and what becomes of its state by it.

use super::App;
use crate::instance::{Instance, Subject};
use crate::metrics::RoleLabels;
use crate::routing::{HealthState, LegFault, Pool};

impl App {
    /// An engine answered a probe well.
    pub fn note_probed(&self, instance: &Instance) {
        self.note(instance, "GET /health: answered", |pool, now_ms| {
            pool.on_probe_answered(instance.index, now_ms);
        });
    }

    /// A leg that began at `began_ms` was served.
    pub(crate) fn note_served(&self, instance: &Instance, began_ms: u64) {
        self.note(instance, "a leg was served", |pool, now_ms| {
            pool.on_served(instance.index, began_ms, now_ms);
        });
    }

    /// A leg that began at `began_ms` failed by the engine's fault.
    pub(crate) fn note_failed(&self, instance: &Instance, fault: LegFault, began_ms: u64) {
        self.note(instance, "a leg failed", |pool, now_ms| {
            pool.on_failed(instance.index, fault, began_ms, now_ms);
        });
    }

    /// An engine answered a leg with a status below 500.
    pub fn note_answer(&self, instance: &Instance) {
        let reason = "a leg was answered";
        self.note(instance, reason, |pool, _| pool.on_answer(instance.index));
    }

    /// A probe failed, for the reason given.
    pub fn note_probe_failed(&self, instance: &Instance, reason: &str) {
        self.note(instance, reason, |pool, _| {
            pool.on_probe_failed(instance.index)
        });
    }

    /// Traffic could not reach an engine.
    pub fn note_unreachable(&self, instance: &Instance) {
        if let Some(bootstrap) = &instance.bootstrap {
            // Should it come back, it is another engine.
            bootstrap.forget();
        }
        let reason = "a leg found no connection, or it broke before an answer";
        self.note(instance, reason, |pool, _| {
            pool.on_connect_failed(instance.index)
        });
    }

    /// Changes an instance's health; each change of state is one log line, with its reason.
    fn note(&self, instance: &Instance, reason: &str, change: impl FnOnce(&mut Pool, u64)) {
        let now_ms = self.now_ms();
        let changed = self.with_pool(instance.role, |pool| {
            let before = pool.state(instance.index, now_ms)?;
            change(pool, now_ms);
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
        let Some(unlogged) = instance.line_about(Subject::State) else {
            return;
        };
        let (before, after_name) = (before.name(), after.name());
        match after {
            HealthState::Healthy | HealthState::Unknown | HealthState::HalfOpen => {
                tracing::info!(
                    role,
                    url,
                    before,
                    after = after_name,
                    reason,
                    unlogged,
                    "engine state"
                );
            }
            HealthState::Suspect | HealthState::Open | HealthState::Unhealthy => {
                tracing::warn!(
                    role,
                    url,
                    before,
                    after = after_name,
                    reason,
                    unlogged,
                    "engine state"
                );
            }
        }
    }
}
