//! What the router chooses: engines, and ids for transfers.

use hetero_kv_core::ids::{TpRank, TransferId};
use hetero_kv_core::plan::{Pairing, SourceChooser};

use super::{Role, Router, State, mix};
use crate::lab::Policy;

/// Ids tried for the fixed policy; with 64 holders 1 in 10^27 runs needs more.
const IDS_TRIED_MAX: usize = 4096;

impl Router<'_> {
    pub(super) fn draw(&mut self) -> u64 {
        self.random = mix(self.random);
        self.random
    }

    /// The engine with the least under way, of several such any.
    pub(super) fn choose(&mut self, role: Role) -> Option<usize> {
        let alive: Vec<(usize, usize)> = (0..)
            .zip(&self.cluster.engines)
            .filter(|(_, engine)| engine.role == role && engine.state == State::Alive)
            .map(|(index, engine)| (engine.in_flight, index))
            .collect();
        let least = alive.iter().map(|(in_flight, _)| *in_flight).min()?;
        let equal: Vec<usize> = alive
            .into_iter()
            .filter(|(in_flight, _)| *in_flight == least)
            .map(|(_, index)| index)
            .collect();
        let nth = self.draw() % equal.len() as u64;
        Some(equal[nth as usize])
    }

    /// As a router mints it. The fixed policy takes an id whose hash leads to the first holder:
    /// what is measured is the same code, with the choice taken away.
    pub(super) fn transfer_id(&mut self, prefill: usize) -> TransferId {
        let shape = self.cluster.engines[prefill].shape;
        let decode_tp = self.plan.decode.first().map_or(1, |decode| decode.tp);
        let pairing = Pairing::new(shape.tp, decode_tp, self.plan.model.heads());
        for _ in 0..IDS_TRIED_MAX {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&self.draw().to_le_bytes());
            bytes[8..].copy_from_slice(&self.draw().to_le_bytes());
            let id = TransferId(bytes);
            let first = |pairing: &Pairing| {
                let plan = pairing.rank_plan(TpRank(0), &SourceChooser::new(id)).ok()?;
                Some(plan.sources.first()?.tp_rank == *plan.holders.first()?)
            };
            match (self.plan.policy, &pairing) {
                (Policy::Fixed, Ok(pairing)) if first(pairing) == Some(false) => {}
                (Policy::Fixed | Policy::Hash | Policy::RoundRobin, _) => return id,
            }
        }
        TransferId(u128::from(self.draw()).to_le_bytes())
    }
}
