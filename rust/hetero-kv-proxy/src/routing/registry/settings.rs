//! The settings of a pool, which may change while its slots are in use.

use super::super::HealthRules;
use super::super::policy::PolicyKind;
use super::Pool;

/// How a pool chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSettings {
    /// The policy over all slots.
    pub policy: PolicyKind,
    /// Whether somebody asks for the pool's outlook: load then counts whatever the policy.
    pub outlook: bool,
    /// Most legs in flight for each slot.
    pub legs_max: u32,
    /// Age in milliseconds at which what an engine said of its load says nothing any more.
    pub load_fresh_ms: u64,
    /// When an instance counts as failed.
    pub health: HealthRules,
}

impl Pool {
    /// Chooses by these settings from here on. Legs in flight go on, also those over a lower limit.
    /// A policy that stays keeps what it knows.
    pub fn set(&mut self, settings: PoolSettings) {
        let PoolSettings {
            policy,
            outlook,
            legs_max,
            load_fresh_ms,
            health,
        } = settings;
        if policy != self.policy_kind {
            self.policy = policy.build();
            self.policy_kind = policy;
        }
        self.reads_load = policy.reads_load() || outlook;
        self.legs_max = legs_max;
        self.load_fresh_ms = load_fresh_ms;
        self.rules = health;
        self.told.forget();
    }
}
