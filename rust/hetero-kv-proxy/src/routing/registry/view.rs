//! What is shown of the instances of a pool.

use super::super::{HealthState, InstanceIndex};
use super::{InstanceSpec, Pool, Standing};

/// What `/workers` and `/ready` show of one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceView {
    /// Its number among those of its role.
    pub index: InstanceIndex,
    /// As configured.
    pub spec: InstanceSpec,
    /// Legs in flight for each DP rank, rank 0 first.
    pub in_flight_by_rank: Vec<u32>,
    /// Requests that each rank has from others; `None` where that is not known.
    pub elsewhere_by_rank: Option<Vec<u32>>,
    /// The present state.
    pub state: HealthState,
    /// Whether it answered recently.
    pub ready: bool,
    /// Transfers whose blocks it keeps for a decode leg.
    pub kept: u32,
    /// Whether it takes legs at all.
    pub standing: Standing,
    /// Whether it takes legs at this moment.
    pub routable: bool,
}

impl Pool {
    /// Number of instances, whether they take legs or not.
    pub fn instance_count(&self) -> usize {
        self.instances.len()
    }

    /// Legs in flight at an instance by DP rank; none where it is not there.
    pub fn legs(&self, instance: InstanceIndex) -> Vec<u32> {
        let at = self.position(instance);
        at.map(|at| self.instances[at].in_flight())
            .unwrap_or_default()
    }

    /// Whether no leg is in flight at an instance and it keeps no blocks, or it is not there.
    pub fn is_idle(&self, instance: InstanceIndex) -> bool {
        self.position(instance)
            .is_none_or(|at| self.instances[at].is_idle())
    }

    /// All instances, in the order of their indexes.
    pub fn view(&self, now_ms: u64) -> Vec<InstanceView> {
        self.instances
            .iter()
            .map(|known| InstanceView {
                index: known.index,
                spec: known.spec.clone(),
                in_flight_by_rank: known.in_flight(),
                elsewhere_by_rank: known.elsewhere.known(now_ms, self.load_fresh_ms),
                state: known.health.state(now_ms),
                ready: known.health.is_ready(&self.rules, now_ms),
                kept: known.kept,
                standing: known.standing,
                routable: known.is_routable(),
            })
            .collect()
    }
}
