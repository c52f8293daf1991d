//! A read of ours beside a bare loop of RDMA reads, in the same run.

use std::collections::VecDeque;

use hetero_kv_core::ids::{DpRank, Epoch, Incarnation, LeaseRef, PpRank, Slot, TpRank, TransferId};
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::plan::{Owner, Pairing, SourceChooser};

use super::*;
use crate::lease_page::LeasePage;
use crate::reader::{ReadJob, ReadPiece, Reader, ReaderOptions, TransportChoice};
use crate::tcp::{DataServer, HolderPlace, ServerOptions};
use crate::testing::engine;

const READ_BYTES: u64 = 64 << 10;
const READS: u64 = 512;
const ROUNDS: usize = 9;
/// Reads that the bare loop keeps under way.
const WINDOW: usize = 32;

/// The bar; below it our own code costs more than it may.
const RATIO_MIN: f64 = 0.8;

/// Offset of the n-th read at the source: neighbours are never read one after the other, so that
/// each of ours is a request of its own too.
fn offset(nth: u64) -> u64 {
    nth * 331 % READS * READ_BYTES
}

/// One round of the bare loop: as many reads as the window holds, each told, the next one posted as
/// soon as one has ended; sleeping while none has.
fn bare(
    reader: &mut QueuePair<ReadyToSend>,
    queue: &CompletionQueue,
    local: (u64, u32),
    remote: (u64, u32),
) {
    let mut posted: VecDeque<u64> = VecDeque::new();
    let mut next = 0;
    let mut found = Vec::new();
    let deadline = now() + Duration::from_secs(60);
    while next < READS || !posted.is_empty() {
        while next < READS && posted.len() < WINDOW {
            let pieces = [sys::ibv_sge {
                addr: local.0 + next * READ_BYTES,
                length: READ_BYTES as u32,
                lkey: local.1,
            }];
            let request = Request {
                verb: Verb::Read,
                id: next,
                remote_address: remote.0 + offset(next),
                remote_key: remote.1,
                pieces: &pieces,
                signalled: true,
                fenced: false,
                immediate: 0,
            };
            post(reader, &[request]);
            posted.push_back(next);
            next += 1;
        }
        queue.arm().expect("armed");
        found.clear();
        while queue.poll(&mut found).expect("polled") > 0 {}
        for done in &found {
            assert_eq!(done.outcome, Ok(()));
            assert_eq!(posted.pop_front(), Some(done.id));
        }
        if found.is_empty() {
            let left = time_left(deadline);
            assert!(!left.is_zero(), "{} reads never end", posted.len());
            let mut fds = [PollFd::from_borrowed_fd(queue.channel(), PollFlags::IN)];
            poll(&mut fds, Some(&timespec(left))).expect("polled");
            queue.take_events().expect("taken");
        }
    }
}

fn registered(address: u64) -> Arc<LocalMemory> {
    let region = MemoryRegion {
        base: address,
        bytes: READS * READ_BYTES,
    };
    // SAFETY: memory of `leaked`, which is never freed or borrowed.
    Arc::new(unsafe { LocalMemory::new(vec![region]) }.expect("in the address space"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "a measurement: run it by name with --nocapture"]
fn reads_of_64_kib_go_at_the_speed_of_a_bare_loop() {
    let Some((context, port)) = opened() else {
        return;
    };
    let bytes = (READS * READ_BYTES) as usize;
    let (from, to) = (leaked(bytes), leaked(bytes));
    fill(from, bytes, 11);

    // Bare: both ends by hand, on the same memory.
    let (one, other) = (
        Side::new(&context, Access::Local),
        Side::new(&context, Access::RemoteRead),
    );
    let register = |side: &Side, address, access| {
        // SAFETY: memory of `leaked`.
        unsafe { Region::register(&side.domain, address, bytes as u64, access) }
            .expect("registered")
    };
    let local = register(&one, to, Access::Local);
    let remote = register(&other, from, Access::RemoteRead);
    let (mut reads, _answers) = connected(&port, &one, &other, Access::RemoteRead);

    // Ours: a served rank and a reader of it.
    let page = Arc::new(LeasePage::new(4).expect("mapped"));
    let holding = registered(from);
    let node = |memory: &Arc<LocalMemory>, page| {
        Node::open(VerbsOptions::default(), None, Arc::clone(memory), page).expect("a device")
    };
    let holder = node(&holding, Some(Arc::clone(&page)));
    let options = ServerOptions {
        verbs: Some(Arc::clone(&holder)),
        ..ServerOptions::default()
    };
    let server = DataServer::start(Arc::clone(&holding), page, options).expect("listening");
    let owner = Owner {
        engine: engine("p"),
        incarnation: Incarnation(7),
        dp_rank: DpRank(0),
    };
    server.serve_as(HolderPlace {
        owner: owner.clone(),
        tp_rank: TpRank(0),
        pp_rank: PpRank(0),
    });
    let plan = Pairing::new(1, 1, KvHeads::Latent)
        .expect("pairs")
        .rank_plan(TpRank(0), &SourceChooser::new(TransferId([1; 16])))
        .expect("a plan");
    let source = Arc::new(Source {
        route: plan.routes(&owner, PpRank(0)).remove(0),
        endpoints: Endpoints {
            verbs: holder.endpoint(server.endpoint()),
            ..Endpoints::default()
        },
        regions: holding.regions().to_vec(),
    });
    let reading = registered(to);
    let reader = Reader::start(
        Arc::clone(&reading),
        ReaderOptions {
            choice: TransportChoice::Verbs,
            verbs: Some(node(&reading, None)),
            ..ReaderOptions::default()
        },
    );
    let ours = || {
        let runs: Vec<Run> = (0..READS)
            .map(|nth| Run {
                source_region: 0,
                source_offset: offset(nth),
                dest_region: 0,
                dest_offset: nth * READ_BYTES,
                bytes: READ_BYTES,
            })
            .collect();
        let job = ReadJob {
            id: 1,
            lease: LeaseRef {
                slot: Slot(0),
                epoch: Epoch(1),
            },
            deadline: now() + Duration::from_secs(60),
            pieces: vec![ReadPiece {
                source: Arc::clone(&source),
                runs: runs.into(),
            }],
        };
        reader.submit(job).expect("taken");
        while !reader.wait(Duration::from_secs(60)) {}
        let done = reader.drain().remove(0);
        done.outcome.expect("read");
    };

    // Connected, and every page touched, before it is measured.
    ours();
    bare(
        &mut reads,
        &one.queue,
        (to, local.lkey),
        (from, remote.rkey),
    );
    let mut rates = [const { Vec::new() }; 2];
    for _ in 0..ROUNDS {
        for (way, rates) in rates.iter_mut().enumerate() {
            fill(to, bytes, 0);
            let began = now();
            if way == 0 {
                bare(
                    &mut reads,
                    &one.queue,
                    (to, local.lkey),
                    (from, remote.rkey),
                );
            } else {
                ours();
            }
            rates.push(bytes as f64 / now().since(began).as_secs_f64() / 1e6);
            for nth in (0..READS).step_by(37) {
                let seed = 11_u8.wrapping_add(offset(nth) as u8);
                assert!(holds(to + nth * READ_BYTES, READ_BYTES as usize, seed));
            }
        }
    }
    let ratios = rates[1]
        .iter()
        .zip(&rates[0])
        .map(|(ours, bare)| ours / bare);
    let ratio = median(ratios.collect());
    let [bare, ours] = rates.map(median);
    println!(
        "{READS} reads of 64 KiB, median of {ROUNDS} rounds: bare loop {bare:.0} MB/s, ours \
         {ours:.0} MB/s, ratio of a round {ratio:.2}"
    );
    assert!(ratio >= RATIO_MIN, "below {RATIO_MIN} of the bare loop");
}
