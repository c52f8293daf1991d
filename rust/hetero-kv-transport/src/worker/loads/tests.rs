use hetero_kv_core::ids::{DpRank, Incarnation};
use hetero_kv_core::plan::SourceChooser;

use super::*;
use crate::testing::engine;

/// What a rank did itself costs it the next loads, and nothing else does.
#[test]
fn only_a_source_that_is_gone_or_out_of_reach_is_avoided() {
    let owner = Owner {
        engine: engine("p"),
        incarnation: Incarnation(1),
        dp_rank: DpRank(0),
    };
    let plan = Pairing::new(1, 1, KvHeads::Latent)
        .expect("alike")
        .rank_plan(TpRank(0), &SourceChooser::new(TransferId([0; 16])))
        .expect("a rank");
    let route = plan.routes(&owner, PpRank(0)).remove(0);
    let avoided: Vec<ReadFailureKind> = ReadFailureKind::ALL
        .iter()
        .copied()
        .filter(|kind| {
            let failure = ReadFailure {
                kind: *kind,
                text: String::new(),
                at: Some(route.clone()),
            };
            lost_source(&failure).is_some()
        })
        .collect();
    assert_eq!(
        avoided,
        [ReadFailureKind::PeerLost, ReadFailureKind::Unreachable]
    );
    // The scheduler side's own words for a lost control connection name no source.
    let nobody = ReadFailure {
        kind: ReadFailureKind::PeerLost,
        text: String::new(),
        at: None,
    };
    assert_eq!(lost_source(&nobody), None);
}
