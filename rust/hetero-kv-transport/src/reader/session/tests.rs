#![allow(unsafe_code)]

use hetero_kv_core::ids::{DpRank, Epoch, Incarnation, LeaseRef, PpRank, Slot, TpRank, TransferId};
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::plan::{Owner, Pairing, SourceChooser};
use hetero_kv_core::wire::card::Endpoints;

use super::super::job::{DoneQueue, Job};
use super::super::{ReadPiece, ReaderOptions};
use super::*;
use crate::memory::LocalMemory;
use crate::testing::engine;

fn route() -> Route {
    let owner = Owner {
        engine: engine("p"),
        incarnation: Incarnation(1),
        dp_rank: DpRank(0),
    };
    let plan = Pairing::new(1, 1, KvHeads::Latent)
        .expect("alike")
        .rank_plan(TpRank(0), &SourceChooser::new(TransferId([0; 16])))
        .expect("a rank");
    plan.routes(&owner, PpRank(0)).remove(0)
}

/// Lists of runs are megabytes, and a cancelled job waits for its sessions.
#[test]
fn runs_of_a_job_that_is_over_are_not_made() {
    static WORDS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
    let region = MemoryRegion {
        base: WORDS.as_ptr().expose_provenance() as u64,
        bytes: 64,
    };
    // SAFETY: the words stay as long as the process, and are atomics.
    let memory = unsafe { LocalMemory::new(vec![region]) }.expect("a region");
    let shared = Arc::new(Shared {
        memory: Arc::new(memory),
        options: ReaderOptions::default(),
        done: Arc::default(),
        live: Mutex::new(0),
        ended: std::sync::Condvar::new(),
    });
    let handle = Arc::new(SessionHandle::new(route()).expect("a descriptor"));
    let mut session = Session::new(Arc::clone(&handle), shared);
    let queue = Arc::<DoneQueue>::default();
    let jobs: Vec<Arc<Job>> = (0..3)
        .map(|id| {
            let lease = LeaseRef {
                slot: Slot(0),
                epoch: Epoch(1),
            };
            let left = Duration::from_secs(if id == 2 { 0 } else { 60 });
            let sessions = vec![Arc::clone(&handle)];
            let job = Job::new(id, lease, now() + left, sessions, Arc::clone(&queue));
            Arc::new(job)
        })
        .collect();
    for job in &jobs {
        let run = Run {
            source_region: 0,
            source_offset: 0,
            dest_region: 0,
            dest_offset: 0,
            bytes: 8,
        };
        let source = Arc::new(Source {
            route: route(),
            endpoints: Endpoints::default(),
            regions: vec![region],
        });
        let piece = ReadPiece {
            source,
            runs: vec![run].into(),
        };
        let piece = Piece::new(Arc::clone(job), piece);
        Arc::clone(&handle).hold().push(piece);
    }
    // The second is cancelled while it waits, the third's time is over.
    jobs[1].stop(ReadFailureKind::Cancelled, "cancelled");
    session.take_mail();
    let made: Vec<usize> = session
        .pieces
        .iter()
        .map(|active| active.piece.runs.len())
        .collect();
    assert_eq!(made, [1, 0, 0]);
    session.end_stopped();
    assert_eq!(session.pieces.len(), 1);
    let ends: Vec<(u64, ReadFailureKind)> = queue
        .take()
        .into_iter()
        .map(|done| (done.id, done.outcome.expect_err("stopped").kind))
        .collect();
    assert_eq!(
        ends,
        [
            (1, ReadFailureKind::Cancelled),
            (2, ReadFailureKind::Deadline)
        ]
    );
}
