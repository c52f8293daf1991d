//! One value names the rank that is read, everywhere.

use serde::Serialize;

use super::{RankPlan, TransferOutline, TransferPlan};
use crate::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank};

/// The engine that ran the prefill, as its response names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// Its id.
    pub engine: EngineId,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// For keys, logs and metrics; nothing is computed from it.
    pub dp_rank: DpRank,
}

/// One source rank of one start of one engine. Session key, handshake, dialled address, read and
/// acknowledgement all take a `Route`, and only a plan makes one: reading from one rank under the
/// name of another does not compile.
///
/// ```
/// # use hetero_kv_core::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank, TransferId};
/// # use hetero_kv_core::layout::KvHeads;
/// # use hetero_kv_core::plan::{Owner, Pairing, Route, SourceChooser};
/// # let engine = EngineId::new("prefill")?;
/// # let owner = Owner { engine: engine.clone(), incarnation: Incarnation(1), dp_rank: DpRank(0) };
/// # let pairing = Pairing::new(2, 1, KvHeads::Latent)?;
/// # let plan = pairing.rank_plan(TpRank(0), &SourceChooser::new(TransferId([0; 16])))?;
/// let route: Route = plan.routes(&owner, PpRank(0)).remove(0);
/// assert_eq!(route.tp_rank(), plan.sources[0].tp_rank);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The same with one by hand, by its parts:
///
/// ```compile_fail,E0451
/// # use hetero_kv_core::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank, TransferId};
/// # use hetero_kv_core::layout::KvHeads;
/// # use hetero_kv_core::plan::{Owner, Pairing, Route, SourceChooser};
/// # let engine = EngineId::new("prefill")?;
/// # let owner = Owner { engine: engine.clone(), incarnation: Incarnation(1), dp_rank: DpRank(0) };
/// # let pairing = Pairing::new(2, 1, KvHeads::Latent)?;
/// # let plan = pairing.rank_plan(TpRank(0), &SourceChooser::new(TransferId([0; 16])))?;
/// let route = Route {
///     engine,
///     incarnation: Incarnation(1),
///     dp_rank: DpRank(0),
///     tp_rank: TpRank(0),
///     pp_rank: PpRank(0),
/// };
/// assert_eq!(route.tp_rank(), plan.sources[0].tp_rank);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// or with another rank put into one that a plan made:
///
/// ```compile_fail,E0616
/// # use hetero_kv_core::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank, TransferId};
/// # use hetero_kv_core::layout::KvHeads;
/// # use hetero_kv_core::plan::{Owner, Pairing, Route, SourceChooser};
/// # let engine = EngineId::new("prefill")?;
/// # let owner = Owner { engine: engine.clone(), incarnation: Incarnation(1), dp_rank: DpRank(0) };
/// # let pairing = Pairing::new(2, 1, KvHeads::Latent)?;
/// # let plan = pairing.rank_plan(TpRank(0), &SourceChooser::new(TransferId([0; 16])))?;
/// let mut route: Route = plan.routes(&owner, PpRank(0)).remove(0);
/// route.tp_rank = TpRank(1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Route {
    engine: EngineId,
    incarnation: Incarnation,
    dp_rank: DpRank,
    tp_rank: TpRank,
    pp_rank: PpRank,
}

impl Route {
    /// The source's engine.
    pub fn engine(&self) -> &EngineId {
        &self.engine
    }

    /// Which start of that engine.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The engine's data parallel rank.
    pub fn dp_rank(&self) -> DpRank {
        self.dp_rank
    }

    /// The source's place in the engine's tensor parallel group.
    pub fn tp_rank(&self) -> TpRank {
        self.tp_rank
    }

    /// The source's place in the engine's pipeline.
    pub fn pp_rank(&self) -> PpRank {
        self.pp_rank
    }
}

impl RankPlan {
    /// The routes of this plan's sources in stage `pp_rank` of the owner, in the order of
    /// [`RankPlan::sources`].
    pub fn routes(&self, owner: &Owner, pp_rank: PpRank) -> Vec<Route> {
        self.sources
            .iter()
            .map(|source| route(owner, pp_rank, source.tp_rank))
            .collect()
    }
}

impl TransferPlan {
    /// The routes of this plan's reads, in the order of [`TransferPlan::reads`].
    pub fn routes(&self, owner: &Owner) -> Vec<Route> {
        self.reads
            .iter()
            .map(|read| route(owner, read.pp_rank, read.tp_rank))
            .collect()
    }
}

impl TransferOutline {
    /// The routes of this plan's reads, in the order of [`TransferOutline::reads`].
    pub fn routes(&self, owner: &Owner) -> Vec<Route> {
        self.reads
            .iter()
            .map(|read| route(owner, read.pp_rank(), read.tp_rank()))
            .collect()
    }
}

fn route(owner: &Owner, pp_rank: PpRank, tp_rank: TpRank) -> Route {
    Route {
        engine: owner.engine.clone(),
        incarnation: owner.incarnation,
        dp_rank: owner.dp_rank,
        tp_rank,
        pp_rank,
    }
}
