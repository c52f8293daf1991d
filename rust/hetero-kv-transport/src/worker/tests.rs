#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::net::TcpListener;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use hetero_kv_core::failure::{Failure, FailureReason};
use hetero_kv_core::ids::{
    BlockId, DpRank, Epoch, Incarnation, LeaseRef, PpRank, Slot, TpRank, TransferId,
};
use hetero_kv_core::plan::Striping;
use hetero_kv_core::producer::ReleaseOrder;
use hetero_kv_core::step::{
    CancelOrder, Extension, FailOrder, LoadOrder, PeerCard, PeerId, SourceChoice, StepOrders,
};
use hetero_kv_core::wire::card::{Endpoints, TcpEndpoint};
use hetero_kv_core::wire::message::Layout;

use super::{LoadReport, VerbsUse, WorkerError, WorkerOptions, WorkerPlace, WorkerSide};
use crate::clock;
use crate::reader::{ReaderOptions, TransportChoice};
use crate::scheduler::Roles;
use crate::tcp::ServerOptions;
use crate::testing::{NUM_BLOCKS, PAGE_BYTES, PATIENCE, cache, engine, heads, identity};
use crate::verbs::{self, DeviceChoice, VerbsOptions};

const LEASE: LeaseRef = LeaseRef {
    slot: Slot(2),
    epoch: Epoch(1),
};

/// A cache that is written behind the compiler's back.
struct Memory(Box<[UnsafeCell<u8>]>);

impl Memory {
    fn new(fill: impl Fn(usize) -> u8) -> Self {
        let bytes = NUM_BLOCKS as usize * PAGE_BYTES as usize;
        Self((0..bytes).map(|at| UnsafeCell::new(fill(at))).collect())
    }

    fn base(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }

    fn block(&self, block: usize) -> Vec<u8> {
        let bytes = PAGE_BYTES as usize;
        self.0[block * bytes..(block + 1) * bytes]
            .iter()
            // SAFETY: the cell is alive, and no read is under way when a test looks at it.
            .map(|cell| unsafe { cell.get().read_volatile() })
            .collect()
    }
}

struct Rank {
    side: WorkerSide,
    memory: Memory,
}

fn place(name: &str) -> WorkerPlace {
    WorkerPlace {
        engine: engine(name),
        dp_rank: DpRank(0),
        tp_rank: TpRank(0),
        tp_size: 1,
        pp_rank: PpRank(0),
        pp_size: 1,
        heads: heads(),
    }
}

fn options(producer: bool, choice: TransportChoice) -> WorkerOptions {
    WorkerOptions {
        roles: Roles {
            producer,
            consumer: !producer,
        },
        server: ServerOptions::default(),
        reader: ReaderOptions {
            choice,
            ..ReaderOptions::default()
        },
        allow_ptracer: true,
        lease_slots: 4,
        offer_process: true,
        offer_tcp: true,
        verbs: match choice {
            TransportChoice::Auto => VerbsUse::IfThere(VerbsOptions::default()),
            TransportChoice::Verbs => VerbsUse::Required(VerbsOptions::default()),
            TransportChoice::Process | TransportChoice::Tcp | TransportChoice::Mori => {
                VerbsUse::Off
            }
        },
        mori: None,
        block_size: 16,
        striping: Striping::OFF,
    }
}

fn rank(name: &str, producer: bool, choice: TransportChoice) -> Rank {
    rank_with(place(name), options(producer, choice))
}

fn rank_with(place: WorkerPlace, options: WorkerOptions) -> Rank {
    let seed = place.engine.as_str().len();
    let memory = Memory::new(|at| (at * 7 + seed) as u8);
    // SAFETY: `Rank` drops the side before the memory (order of its fields), and the memory is
    // only ever looked at through cells.
    let side = unsafe { WorkerSide::start(place, cache(memory.base()), options) };
    Rank {
        side: side.expect("a free port"),
        memory,
    }
}

const P_INCARNATION: Incarnation = Incarnation(7);

/// A producer that knows its engine's incarnation, and serves.
fn named_producer(name: &str) -> Rank {
    let mut p = rank(name, true, TransportChoice::Auto);
    p.side.step(
        StepOrders {
            incarnation: Some(P_INCARNATION),
            ..StepOrders::default()
        },
        Duration::ZERO,
    );
    p
}

fn peer(p: &Rank, name: &str) -> PeerCard {
    PeerCard {
        peer: PeerId(0),
        layout: Layout {
            from: identity(name, P_INCARNATION.0),
            workers: vec![p.side.card().clone()],
        },
    }
}

fn load(request_id: &str) -> LoadOrder {
    LoadOrder {
        request_id: request_id.into(),
        peer: PeerId(0),
        transfer_id: TransferId([1; 16]),
        lease: LEASE,
        deadline_ms: 20_000,
        choice: SourceChoice::default(),
        first_block: 0,
        past_token: 32,
        source_block_tokens: 16,
        source_first_block: 0,
        source_blocks: vec![BlockId(5), BlockId(6)],
        dest_blocks: vec![BlockId(1), BlockId(9)],
    }
}

fn orders_of(load: LoadOrder) -> StepOrders {
    StepOrders {
        loads: vec![load],
        ..StepOrders::default()
    }
}

fn release(request_id: &str) -> StepOrders {
    StepOrders {
        releases: vec![ReleaseOrder {
            request_id: request_id.into(),
            lease: LEASE,
        }],
        ..StepOrders::default()
    }
}

fn wait_report(d: &mut Rank) -> LoadReport {
    let [report] = wait_reports(d);
    report
}

/// So many reports, in their order, and no more.
fn wait_reports<const COUNT: usize>(d: &mut Rank) -> [LoadReport; COUNT] {
    let deadline = Instant::now() + PATIENCE;
    let mut received = Vec::new();
    while received.len() < COUNT {
        received.extend(d.side.take_results().received);
        assert!(Instant::now() < deadline, "the load never ends");
        thread::sleep(Duration::from_millis(2));
    }
    received.try_into().expect("no report more")
}

/// vLLM re-uses the blocks as soon as every rank has reported `sent`.
#[test]
fn the_page_is_bumped_before_sent_is_reported() {
    let mut p = named_producer("p");
    let page = |p: &Rank| {
        let holder = p.side.holder.as_ref().expect("a producer");
        holder.page.holds(LEASE)
    };
    assert!(page(&p));
    p.side.step(release("r"), Duration::ZERO);
    assert!(!page(&p), "fenced by the step itself");
    assert_eq!(p.side.take_results().sent, ["r"]);
    assert!(p.side.take_results().sent.is_empty(), "once");
}

#[test]
fn a_release_of_a_slot_that_is_not_there_is_still_reported() {
    let mut p = named_producer("p");
    let mut orders = release("r");
    orders.releases[0].lease.slot = Slot(99);
    p.side.step(orders, Duration::ZERO);
    assert_eq!(p.side.take_results().sent, ["r"]);
}

/// Those that work on this host.
fn choices() -> Vec<TransportChoice> {
    let mut choices = vec![TransportChoice::Process, TransportChoice::Tcp];
    match verbs::probe(&DeviceChoice::default(), None) {
        Ok(_) => choices.push(TransportChoice::Verbs),
        Err(error) => eprintln!("without verbs: {error}"),
    }
    choices
}

#[test]
fn blocks_are_read_by_each_transport() {
    for choice in choices() {
        let p = named_producer("p");
        let mut d = rank("dd", false, choice);
        let before = d.memory.block(2);
        let mut orders = orders_of(load("r"));
        orders.peers = vec![peer(&p, "p")];
        d.side.step(orders, Duration::ZERO);
        let report = wait_report(&mut d);
        assert_eq!(report.failure, None);
        assert!(report.invalid_blocks.is_empty());
        assert_eq!(report.planned_bytes, 2 * PAGE_BYTES);
        assert_eq!(report.reads.len(), 1);
        assert_eq!(report.reads[0].bytes, 2 * PAGE_BYTES);
        assert_eq!(d.memory.block(1), p.memory.block(5));
        assert_eq!(d.memory.block(9), p.memory.block(6));
        assert_eq!(d.memory.block(2), before);
        assert!(d.side.shutdown(PATIENCE));
    }
}

/// A worker's steps are as long as its forward passes are.
#[test]
fn a_loads_time_ends_with_the_read_and_not_with_the_step_that_takes_its_report() {
    const STEP: Duration = Duration::from_secs(2);
    let p = named_producer("p");
    let mut d = rank("dd", false, TransportChoice::Tcp);
    let mut orders = orders_of(load("r"));
    orders.peers = vec![peer(&p, "p")];
    let before = clock::now();
    d.side.step(orders, Duration::ZERO);
    let after = clock::now();
    thread::sleep(STEP);
    let report = wait_report(&mut d);
    assert_eq!(report.failure, None);
    let ordered_at = report.ordered_at.expect("it was started");
    assert!(before <= ordered_at && ordered_at <= after);
    assert!(report.elapsed > Duration::ZERO && report.elapsed < STEP);
}

/// RDMA that is asked for by name, and cannot be had, is told at start; where it may be left out,
/// the rank starts without.
#[test]
fn rdma_that_cannot_be_used_stops_only_a_rank_that_requires_it() {
    let absent = VerbsOptions {
        choice: DeviceChoice {
            device: Some("absent_0".into()),
            ..DeviceChoice::default()
        },
        ..VerbsOptions::default()
    };
    let start = |verbs| {
        let memory = Memory::new(|at| at as u8);
        let options = WorkerOptions {
            verbs,
            ..options(true, TransportChoice::Auto)
        };
        // SAFETY: as in `rank`.
        let side = unsafe { WorkerSide::start(place("p"), cache(memory.base()), options) };
        side.map(|side| Rank { side, memory })
    };
    match start(VerbsUse::Required(absent.clone())) {
        Err(error @ WorkerError::Verbs(_)) => {
            let text = error.to_string();
            assert!(
                text.starts_with("transport verbs: verbs_device absent_0 does not exist")
                    || text.starts_with("transport verbs: no RDMA: "),
                "{text}"
            );
            // Whoever prints the chain of causes says it once.
            let said_again = std::error::Error::source(&error).map(ToString::to_string);
            assert_eq!(said_again, None);
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("a device of this name opens"),
    }
    let without = start(VerbsUse::IfThere(absent)).expect("the other transports serve");
    let endpoints = &without.side.card().endpoints;
    assert!(endpoints.verbs.is_none() && endpoints.tcp.is_some());
}

#[test]
fn a_released_lease_is_not_read() {
    for choice in choices() {
        let mut p = named_producer("p");
        let mut d = rank("dd", false, choice);
        p.side.step(release("r"), Duration::ZERO);
        let mut orders = orders_of(load("r"));
        orders.peers = vec![peer(&p, "p")];
        d.side.step(orders, Duration::ZERO);
        let report = wait_report(&mut d);
        let failure = report.failure.expect("fenced");
        assert_eq!(failure.reason, FailureReason::Fenced, "{failure}");
        assert_eq!(report.invalid_blocks, [BlockId(1), BlockId(9)]);
    }
}

/// Time in an order counts from when the order came.
#[test]
fn an_order_older_than_its_deadline_is_not_read() {
    let p = named_producer("p");
    let mut d = rank("dd", false, TransportChoice::Auto);
    let untouched = d.memory.block(1);
    let mut orders = orders_of(load("r"));
    orders.peers = vec![peer(&p, "p")];
    d.side.step(orders, Duration::from_secs(21));
    let failure = wait_report(&mut d).failure.expect("too late");
    assert_eq!(failure.reason, FailureReason::LeaseExpired, "{failure}");
    assert_eq!(d.memory.block(1), untouched);
}

#[test]
fn orders_that_cannot_be_carried_out_are_reported_as_failed() {
    let p = named_producer("p");
    let mut d = rank("dd", false, TransportChoice::Auto);
    let cases: [(&str, LoadOrder); 7] = [
        (
            "not known",
            LoadOrder {
                peer: PeerId(8),
                ..load("stranger")
            },
        ),
        (
            "tokens 0 to 32 are wanted; the source's blocks hold 0 to 16",
            LoadOrder {
                source_blocks: vec![BlockId(5)],
                ..load("short")
            },
        ),
        (
            "1 blocks to fill 0 to 16",
            LoadOrder {
                dest_blocks: vec![BlockId(1)],
                ..load("no room")
            },
        ),
        (
            "2 blocks to fill 0 to 32",
            LoadOrder {
                past_token: 16,
                ..load("room for nothing")
            },
        ),
        (
            "the source's blocks hold 16 to 48",
            LoadOrder {
                source_first_block: 1,
                ..load("late")
            },
        ),
        (
            "page_format",
            LoadOrder {
                source_block_tokens: 8,
                source_blocks: vec![BlockId(5), BlockId(6), BlockId(7), BlockId(8)],
                ..load("uncuttable")
            },
        ),
        (
            "num_blocks",
            LoadOrder {
                dest_blocks: vec![BlockId(1), BlockId(NUM_BLOCKS)],
                ..load("outside")
            },
        ),
    ];
    let peers = StepOrders {
        peers: vec![peer(&p, "p")],
        ..StepOrders::default()
    };
    d.side.step(peers, Duration::ZERO);
    for (word, order) in cases {
        let dest_blocks = order.dest_blocks.clone();
        let request_id = order.request_id.clone();
        d.side.step(orders_of(order), Duration::ZERO);
        let report = wait_report(&mut d);
        assert_eq!(report.request_id, request_id);
        let failure = report.failure.expect("not carried out");
        assert_eq!(failure.reason, FailureReason::Plan);
        assert!(failure.text.contains(word), "{failure}");
        assert_eq!(report.invalid_blocks, dest_blocks);
        assert!(!report.ordered, "this rank found it, and counts it");
    }
}

#[test]
fn an_ordered_failure_is_reported_as_such() {
    let mut d = rank("dd", false, TransportChoice::Auto);
    let failure = Failure::new(FailureReason::LeaseGone, "gone");
    let orders = StepOrders {
        fails: vec![FailOrder {
            request_id: "r".into(),
            dest_blocks: vec![BlockId(3)],
            failure: failure.clone(),
        }],
        ..StepOrders::default()
    };
    d.side.step(orders, Duration::ZERO);
    let report = wait_report(&mut d);
    assert_eq!(report.failure, Some(failure));
    assert!(report.ordered);
    assert_eq!(report.invalid_blocks, [BlockId(3)]);
}

/// A worker serves nobody before it knows its engine's incarnation, so the load stays under way.
#[test]
fn a_cancelled_load_says_why_it_was_cancelled() {
    let p = rank("p", true, TransportChoice::Auto);
    let mut d = rank("dd", false, TransportChoice::Tcp);
    let mut orders = orders_of(load("r"));
    orders.peers = vec![peer(&p, "p")];
    d.side.step(orders, Duration::ZERO);
    let failure = Failure::new(FailureReason::PeerLost, "the prefill engine is gone");
    let cancels = StepOrders {
        cancels: vec![CancelOrder {
            request_id: "r".into(),
            failure: failure.clone(),
        }],
        ..StepOrders::default()
    };
    d.side.step(cancels, Duration::ZERO);
    let report = wait_report(&mut d);
    assert_eq!(report.failure, Some(failure));
    assert_eq!(report.invalid_blocks, [BlockId(1), BlockId(9)]);
    assert!(d.side.take_results().received.is_empty(), "once");
}

/// The scheduler side sees the end of a lease before it hears of the read that met the fence.
#[test]
fn a_load_that_failed_before_it_was_cancelled_says_why_it_failed() {
    let mut p = named_producer("p");
    let mut d = rank("dd", false, TransportChoice::Auto);
    p.side.step(release("r"), Duration::ZERO);
    let mut orders = orders_of(load("r"));
    orders.peers = vec![peer(&p, "p")];
    d.side.step(orders, Duration::ZERO);
    let deadline = Instant::now() + PATIENCE;
    while d.side.figures().reader.expect("a reader").jobs_in_flight > 0 {
        assert!(Instant::now() < deadline, "the load never ends");
        thread::sleep(Duration::from_millis(2));
    }
    let cancels = StepOrders {
        cancels: vec![CancelOrder {
            request_id: "r".into(),
            failure: Failure::new(FailureReason::LeaseExpired, "its lease ran out"),
        }],
        ..StepOrders::default()
    };
    d.side.step(cancels, Duration::ZERO);
    let failure = wait_report(&mut d).failure.expect("fenced");
    assert_eq!(failure.reason, FailureReason::Fenced, "{failure}");
}

/// The scheduler side weighs sources by it.
#[test]
fn a_source_that_is_gone_is_named() {
    let p = named_producer("p");
    let peer = peer(&p, "p");
    drop(p);
    let mut d = rank("dd", false, TransportChoice::Tcp);
    let mut orders = orders_of(load("r"));
    orders.peers = vec![peer];
    d.side.step(orders, Duration::ZERO);
    let report = wait_report(&mut d);
    let failure = report.failure.expect("nobody is there");
    assert_eq!(failure.reason, FailureReason::Unreachable, "{failure}");
    assert_eq!(report.lost_source, Some(TpRank(0)));
}

#[test]
fn an_empty_step_waits_only_for_what_is_pending() {
    let mut p = named_producer("p");
    let waited = |p: &Rank| {
        let started = Instant::now();
        p.side.wait(Duration::from_millis(50));
        started.elapsed()
    };
    assert!(waited(&p) < Duration::from_millis(40), "nothing is pending");
    let pending = StepOrders {
        pending: 1,
        ..StepOrders::default()
    };
    p.side.step(pending, Duration::ZERO);
    assert!(waited(&p) >= Duration::from_millis(50));
    let mut released = release("r");
    released.pending = 1;
    p.side.step(released, Duration::ZERO);
    assert!(
        waited(&p) < Duration::from_millis(40),
        "a release is to be reported at once"
    );
}

#[test]
fn regions_outside_of_the_words_given_are_refused() {
    const BYTES: usize = NUM_BLOCKS as usize * PAGE_BYTES as usize;
    static WORDS: [AtomicU64; BYTES / 8] = [const { AtomicU64::new(0) }; BYTES / 8];
    let base = WORDS.as_ptr().expose_provenance() as u64;
    let start = |base| {
        let options = options(false, TransportChoice::Auto);
        WorkerSide::start_on(&WORDS, place("w"), cache(base), options)
    };
    assert!(start(base).is_ok());
    for outside in [base - 8, base + 8, base + BYTES as u64] {
        assert!(matches!(start(outside), Err(WorkerError::Elsewhere(0))));
    }
}

/// Blocks past the last token that can be counted are none of the plan's.
#[test]
fn a_plan_that_leaves_blocks_out_is_refused() {
    let p = named_producer("p");
    let mut d = rank("dd", false, TransportChoice::Tcp);
    let mut orders = orders_of(LoadOrder {
        first_block: (1 << 28) - 1,
        source_first_block: (1 << 28) - 1,
        past_token: u32::MAX,
        ..load("r")
    });
    orders.peers = vec![peer(&p, "p")];
    d.side.step(orders, Duration::ZERO);
    let failure = wait_report(&mut d).failure.expect("refused");
    assert_eq!(failure.reason, FailureReason::Plan, "{failure}");
    assert!(failure.text.contains("2 blocks to fill"), "{failure}");
}

/// A decode rank that reads at most so many sources at once.
fn narrow(sources_max: usize, striping: Striping) -> Rank {
    let mut options = options(false, TransportChoice::Tcp);
    options.reader.sessions_max = sources_max;
    options.striping = striping;
    rank_with(place("dd"), options)
}

/// What arrived is counted where it arrives, what was planned where the plan is made.
#[test]
fn a_read_that_brought_other_than_its_plan_is_no_success() {
    let p = named_producer("p");
    for more in [1, -1] {
        let mut d = rank("dd", false, TransportChoice::Auto);
        let mut orders = orders_of(load("r"));
        orders.peers = vec![peer(&p, "p")];
        d.side.step(orders, Duration::ZERO);
        let consumer = d.side.consumer.as_mut().expect("a consumer");
        for load in consumer.loads.values_mut() {
            load.planned_bytes = load.planned_bytes.wrapping_add_signed(more);
        }
        let report = wait_report(&mut d);
        let failure = report.failure.expect("a gap, or bytes that nobody planned");
        assert_eq!(failure.reason, FailureReason::Transport, "{failure}");
        assert!(failure.text.contains("planned bytes arrived"), "{failure}");
        assert_eq!(report.invalid_blocks, [BlockId(1), BlockId(9)]);
        assert_eq!(report.lost_source, None);
    }
}

/// A load of request "a" from a host that takes connections and says nothing, so that it stays under
/// way; and another engine that serves.
fn crowded(d: &mut Rank) -> (TcpListener, Rank) {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let named = named_producer("ppp");
    let served = PeerCard {
        peer: PeerId(1),
        ..peer(&named, "ppp")
    };
    let mut unserved = peer(&named, "p");
    unserved.layout.workers[0].endpoints = Endpoints {
        tcp: Some(TcpEndpoint {
            host: "127.0.0.1".into(),
            port: silent.local_addr().expect("bound").port(),
        }),
        ..Endpoints::default()
    };
    let mut orders = orders_of(load("a"));
    orders.peers = vec![unserved, served];
    d.side.step(orders, Duration::ZERO);
    (silent, named)
}

fn from_the_other(request_id: &str, deadline_ms: u64) -> StepOrders {
    orders_of(LoadOrder {
        peer: PeerId(1),
        deadline_ms,
        ..load(request_id)
    })
}

fn cancel(request_id: &str) -> StepOrders {
    StepOrders {
        cancels: vec![CancelOrder {
            request_id: request_id.into(),
            failure: Failure::new(FailureReason::Cancelled, "the client left"),
        }],
        ..StepOrders::default()
    }
}

#[test]
fn a_load_that_finds_no_session_waits_for_one() {
    let mut d = narrow(1, Striping::OFF);
    let (_silent, named) = crowded(&mut d);
    d.side.step(from_the_other("b", 20_000), Duration::ZERO);
    for _ in 0..20 {
        assert!(d.side.take_results().received.is_empty(), "nothing fails");
        thread::sleep(Duration::from_millis(2));
    }
    d.side.step(cancel("a"), Duration::ZERO);
    let [cancelled, read] = wait_reports(&mut d);
    assert_eq!(cancelled.request_id, "a");
    assert_eq!((read.request_id.as_str(), read.failure), ("b", None));
    assert!(read.elapsed >= Duration::from_millis(40), "the wait too");
    assert_eq!(d.memory.block(1), named.memory.block(5));
    assert!(d.side.take_results().received.is_empty(), "once");
}

#[test]
fn a_load_that_waits_is_cancelled_extended_and_ended_by_its_time() {
    let mut d = narrow(1, Striping::OFF);
    let (_silent, _named) = crowded(&mut d);
    let untouched = d.memory.block(1);
    for request in ["b", "c", "e"] {
        d.side.step(from_the_other(request, 150), Duration::ZERO);
    }
    d.side.step(cancel("b"), Duration::ZERO);
    let report = wait_report(&mut d);
    assert_eq!(report.request_id, "b");
    assert_eq!(
        report.failure.expect("cancelled").reason,
        FailureReason::Cancelled
    );
    assert_eq!(report.invalid_blocks, [BlockId(1), BlockId(9)]);
    let more = StepOrders {
        extensions: vec![Extension {
            request_id: "c".into(),
            deadline_ms: 20_000,
        }],
        ..StepOrders::default()
    };
    d.side.step(more, Duration::ZERO);
    let report = wait_report(&mut d);
    assert_eq!(report.request_id, "e", "c has more time");
    let failure = report.failure.expect("its time is over");
    assert_eq!(failure.reason, FailureReason::LeaseExpired);
    assert!(failure.text.contains("sources_max"), "{failure}");
    assert_eq!(d.memory.block(1), untouched);
    d.side.step(cancel("a"), Duration::ZERO);
    assert_eq!(wait_report(&mut d).request_id, "a");
    let report = wait_report(&mut d);
    assert_eq!((report.request_id.as_str(), report.failure), ("c", None));
}

#[test]
fn a_striped_read_that_finds_too_few_sessions_is_read_from_one_source() {
    let engine = |tp_rank| {
        let place = WorkerPlace {
            tp_rank: TpRank(tp_rank),
            tp_size: 2,
            ..place("p")
        };
        let mut p = rank_with(place, options(true, TransportChoice::Auto));
        p.side.step(
            StepOrders {
                incarnation: Some(P_INCARNATION),
                ..StepOrders::default()
            },
            Duration::ZERO,
        );
        p
    };
    let ranks = [engine(0), engine(1)];
    let mut card = peer(&ranks[0], "p");
    card.layout.from.tp_size = 2;
    card.layout.workers.push(ranks[1].side.card().clone());
    let always = Striping {
        threshold_bytes: 1,
        holders_max: 2,
    };
    for (sources_max, sources) in [(2, 2), (1, 1)] {
        let mut d = narrow(sources_max, always);
        let mut orders = orders_of(load("r"));
        orders.peers = vec![card.clone()];
        d.side.step(orders, Duration::ZERO);
        let report = wait_report(&mut d);
        assert_eq!(report.failure, None);
        assert_eq!(report.reads.len(), sources);
        assert_eq!(d.memory.block(1), ranks[0].memory.block(5));
        assert_eq!(d.memory.block(9), ranks[0].memory.block(6));
    }
}
