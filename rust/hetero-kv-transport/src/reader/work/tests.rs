use std::time::Duration;

use hetero_kv_core::ids::{DpRank, Epoch, Incarnation, LeaseRef, PpRank, Slot, TpRank, TransferId};
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::plan::{Owner, Pairing, SourceChooser};
use hetero_kv_core::wire::card::Endpoints;

use super::super::job::DoneQueue;
use super::super::session::SessionHandle;
use super::*;
use crate::clock::now;
use crate::testing::engine;

fn run(source_offset: u64, dest_offset: u64, bytes: u64) -> Run {
    Run {
        source_region: 0,
        source_offset,
        dest_region: 0,
        dest_offset,
        bytes,
    }
}

#[test]
fn runs_that_follow_on_both_sides_are_merged_and_no_others() {
    let other_region = Run {
        dest_region: 1,
        ..run(40, 140, 5)
    };
    let runs = [
        run(0, 100, 10),
        run(10, 110, 20),
        run(30, 140, 10),
        run(50, 150, 4),
        other_region,
    ];
    assert_eq!(
        merge(&runs),
        [
            run(0, 100, 30),
            run(30, 140, 10),
            run(50, 150, 4),
            other_region
        ]
    );
}

#[test]
fn long_runs_are_cut_to_what_a_fetch_takes() {
    let long = run(7, 9, 2 * FETCH_BYTES_MAX + 3);
    assert_eq!(
        cut(&[run(0, 0, 5), long]),
        [
            run(0, 0, 5),
            run(7, 9, FETCH_BYTES_MAX),
            run(7 + FETCH_BYTES_MAX, 9 + FETCH_BYTES_MAX, FETCH_BYTES_MAX),
            run(7 + 2 * FETCH_BYTES_MAX, 9 + 2 * FETCH_BYTES_MAX, 3),
        ]
    );
}

/// Making the runs may panic, and then nothing of them was read.
#[test]
fn a_piece_that_ends_before_its_runs_are_made_fails_its_job() {
    let outcome = |prepare: bool| {
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
        let session = Arc::new(SessionHandle::new(route.clone()).expect("a descriptor"));
        let queue = Arc::<DoneQueue>::default();
        let lease = LeaseRef {
            slot: Slot(0),
            epoch: Epoch(1),
        };
        let deadline = now() + Duration::from_secs(60);
        let job = Arc::new(Job::new(
            1,
            lease,
            deadline,
            vec![session],
            Arc::clone(&queue),
        ));
        let source = Arc::new(Source {
            route,
            endpoints: Endpoints::default(),
            regions: Vec::new(),
        });
        let runs = Vec::new().into();
        let mut piece = Piece::new(job, ReadPiece { source, runs });
        // As a panic in the middle of it leaves the piece.
        piece.unchecked.take();
        if prepare {
            piece.prepared = true;
        }
        drop(piece);
        queue
            .take()
            .remove(0)
            .outcome
            .map_err(|failure| failure.kind)
    };
    assert_eq!(outcome(false), Err(ReadFailureKind::Local));
    assert_eq!(outcome(true), Ok(()));
}
