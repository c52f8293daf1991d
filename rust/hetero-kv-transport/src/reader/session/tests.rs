#![allow(unsafe_code)]

use std::sync::atomic::AtomicBool;
use std::thread;

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
use crate::transport::{Capabilities, Connection};

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

static WORDS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

fn region() -> MemoryRegion {
    MemoryRegion {
        base: WORDS.as_ptr().expose_provenance() as u64,
        bytes: 64,
    }
}

fn session() -> (Session, Arc<SessionHandle>) {
    // SAFETY: the words stay as long as the process, and are atomics.
    let memory = unsafe { LocalMemory::new(vec![region()]) }.expect("a region");
    let shared = Arc::new(Shared {
        memory: Arc::new(memory),
        options: ReaderOptions::default(),
        done: Arc::default(),
        passed_over: Mutex::default(),
        live: Mutex::new(1),
        ended: std::sync::Condvar::new(),
    });
    let handle = Arc::new(SessionHandle::new(route()).expect("a descriptor"));
    (Session::new(Arc::clone(&handle), shared), handle)
}

/// A job of 8 bytes from a source that offers no transport, given to the session.
fn job(id: u64, left: Duration, handle: &Arc<SessionHandle>, queue: &Arc<DoneQueue>) -> Arc<Job> {
    let lease = LeaseRef {
        slot: Slot(0),
        epoch: Epoch(1),
    };
    let sessions = vec![Arc::clone(handle)];
    let job = Arc::new(Job::new(
        id,
        lease,
        now() + left,
        sessions,
        Arc::clone(queue),
    ));
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
        regions: vec![region()],
    });
    let piece = ReadPiece {
        source,
        runs: vec![run].into(),
    };
    let piece = Piece::new(Arc::clone(&job), piece);
    Arc::clone(handle).hold().push(piece);
    job
}

/// A lost connection that refuses, at once, to say that it is quiet.
#[derive(Clone, Default)]
struct Stubborn {
    asked: Arc<AtomicU64>,
    relents: Arc<AtomicBool>,
}

impl Connection for Stubborn {
    fn transport(&self) -> TransportName {
        TransportName::Verbs
    }

    fn post(&mut self, _: ReadBatch) -> Result<(), TransportError> {
        Ok(())
    }

    fn poll(
        &mut self,
        _: Duration,
        _: &Waker,
        _: &mut Vec<Completion>,
    ) -> Result<(), TransportError> {
        Err(TransportError::new(
            ReadFailureKind::PeerLost,
            "poll",
            "lost",
        ))
    }

    fn cancel_and_quiesce(&mut self, _: Time) -> Result<(), TransportError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if self.relents.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(TransportError::new(
            ReadFailureKind::NotQuiesced,
            "destroy",
            "busy",
        ))
    }
}

impl Stubborn {
    fn chosen(&self) -> Chosen {
        Chosen {
            connection: Box::new(self.clone()),
            capabilities: Capabilities {
                one_sided: true,
                batch_runs_max: 1,
                batch_bytes_max: 64,
                in_flight_max: 1,
            },
            why: String::new(),
            passed_over: Vec::new(),
        }
    }

    /// How often it is asked in a second.
    fn asked_in_a_second(&self) -> u64 {
        let before = self.asked.load(Ordering::Relaxed);
        thread::sleep(Duration::from_secs(1));
        self.asked.load(Ordering::Relaxed) - before
    }
}

/// What cannot be proven quiet is asked for again, with pauses: neither its read nor an idle
/// session takes a processor or fills the log meanwhile.
#[test]
fn a_connection_that_stays_unquiet_is_tried_again_with_pauses() {
    for with_job in [true, false] {
        let (mut session, handle) = session();
        let queue = Arc::<DoneQueue>::default();
        let stubborn = Stubborn::default();
        session.connection = Some(stubborn.chosen());
        let job = with_job.then(|| job(1, Duration::from_secs(60), &handle, &queue));
        let thread = thread::spawn(move || session.run());
        let asked = stubborn.asked_in_a_second();
        assert!((1..=20).contains(&asked), "asked {asked} times");
        if let Some(job) = &job {
            assert!(job.unquiesced(Duration::ZERO), "it has failed and is held");
            job.stop(ReadFailureKind::Cancelled, "cancelled");
            // Its blocks stay held, and the stop is no reason to ask more often.
            let asked = stubborn.asked_in_a_second();
            assert!((1..=20).contains(&asked), "asked {asked} times");
            assert!(queue.take().is_empty(), "reported unproven");
        }
        stubborn.relents.store(true, Ordering::Relaxed);
        if let Some(job) = &job {
            let deadline = now() + Duration::from_secs(20);
            while !job.done() && !time_left(deadline).is_zero() {
                thread::sleep(Duration::from_millis(10));
            }
            let ended = queue.take();
            let kinds: Vec<ReadFailureKind> = ended
                .into_iter()
                .map(|done| done.outcome.expect_err("stopped").kind)
                .collect();
            assert_eq!(kinds, [ReadFailureKind::PeerLost]);
        }
        handle.retire();
        thread.join().expect("no panic");
    }
}

/// A piece that is not posted ends in time although the connection beside it stays unquiet.
#[test]
fn beside_an_unquiet_connection_other_reads_end_in_time() {
    let (mut session, handle) = session();
    let queue = Arc::<DoneQueue>::default();
    let stubborn = Stubborn::default();
    session.connection = Some(stubborn.chosen());
    let _posted = job(1, Duration::from_secs(60), &handle, &queue);
    let thread = thread::spawn(move || session.run());
    // The seventh is followed by the longest pause.
    while stubborn.asked.load(Ordering::Relaxed) < 7 {
        thread::sleep(Duration::from_millis(5));
    }
    let begun = now();
    let other = job(2, Duration::from_millis(300), &handle, &queue);
    while !other.done() && now().since(begun) < Duration::from_secs(20) {
        thread::sleep(Duration::from_millis(5));
    }
    let took = now().since(begun);
    let ids: Vec<u64> = queue.take().into_iter().map(|done| done.id).collect();
    assert_eq!(ids, [2]);
    assert!(took < Duration::from_millis(900), "{took:?}");
    stubborn.relents.store(true, Ordering::Relaxed);
    handle.retire();
    thread.join().expect("no panic");
}

/// Lists of runs are megabytes, and a cancelled job waits for its sessions.
#[test]
fn runs_of_a_job_that_is_over_are_not_made() {
    let (mut session, handle) = session();
    let queue = Arc::<DoneQueue>::default();
    let jobs: Vec<Arc<Job>> = (0..3)
        .map(|id| {
            let left = Duration::from_secs(if id == 2 { 0 } else { 60 });
            job(id, left, &handle, &queue)
        })
        .collect();
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
