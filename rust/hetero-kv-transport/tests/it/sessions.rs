//! 512 sessions at once: every byte of each arrives, and afterwards neither side has a descriptor or
//! a thread more than before, nor a mapping of ours. Each check runs in a process of its own.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hetero_kv_core::memory::Run;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::reader::{Reader, ReaderOptions, TransportChoice};
use hetero_kv_transport::transport::TransportName;
use hetero_kv_transport::verbs::{Node, VerbsOptions};
use rustix::process::{Resource, Rlimit};

use super::buffer::{Buffer, check_exact, register};
use super::holder::{Holder, HolderConfig, Order, each_transport, job, wait_all};
use super::hygiene::in_own_process;

each_transport! {
    five_hundred_and_twelve_sessions_leave_nothing_behind;
}

/// Ranks that are read, each a process.
const HOLDERS: usize = 8;
/// A reader has one session to each rank.
const READERS: usize = 64;
const SESSIONS: usize = HOLDERS * READERS;
const BYTES: u64 = 4096;
const FILLER: u8 = 0xee;
const TRANSPORT: &str = "HKV_TEST_TRANSPORT";

/// glibc keeps stacks of ended threads and an arena for some of them, as many as happen to be
/// needed at a time: each is a mapping that is nobody's leak.
const TUNABLES: &str = "glibc.pthread.stack_cache_size=0:glibc.malloc.arena_max=1";

/// So many mappings may still be the allocator's: the stacks of the threads that ended last, two
/// mappings each, stay until another one ends. What each reader or session leaked would be more.
const MAPPINGS_SLACK: usize = 16;
const _: () = assert!(MAPPINGS_SLACK < READERS);

fn five_hundred_and_twelve_sessions_leave_nothing_behind(transport: TransportName) {
    let variables = [
        (TRANSPORT, transport.as_str()),
        ("GLIBC_TUNABLES", TUNABLES),
    ];
    in_own_process("sessions::all_at_once", &variables);
}

/// What a process has open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Usage {
    descriptors: usize,
    threads: usize,
    mappings: usize,
}

impl Usage {
    /// Of the process in this folder of procfs.
    fn of(process: &str) -> Self {
        let count = |name: &str| fs::read_dir(format!("/proc/{process}/{name}"));
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).expect("procfs");
        Self {
            descriptors: count("fd").expect("procfs").count(),
            threads: count("task").expect("procfs").count(),
            mappings: maps.lines().count(),
        }
    }

    fn within(self, other: Self) -> bool {
        self.descriptors <= other.descriptors
            && self.threads <= other.threads
            && self.mappings <= other.mappings + MAPPINGS_SLACK
    }
}

/// Of this process and of all holders.
fn usage(holders: &[Holder]) -> Vec<Usage> {
    let holders = holders.iter().map(|holder| holder.pid().to_string());
    std::iter::once("self".into())
        .chain(holders)
        .map(|process: String| Usage::of(&process))
        .collect()
}

#[test]
#[ignore = "a process that another test starts"]
fn all_at_once() {
    let name = std::env::var(TRANSPORT).expect("started by a test");
    let choice = match name.as_str() {
        "process" => TransportChoice::Process,
        "verbs" => TransportChoice::Verbs,
        "tcp" => TransportChoice::Tcp,
        other => panic!("{other} is no transport of the suite"),
    };
    // Three descriptors of each session, and room: more than many shells allow by themselves.
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    rustix::process::setrlimit(Resource::Nofile, raised).expect("up to the hard limit");
    let mut holders: Vec<Holder> = (0..HOLDERS)
        .map(|rank| {
            Holder::start(HolderConfig {
                tp_rank: rank as u32,
                ..HolderConfig::default()
            })
        })
        .collect();
    // What is there once for good: the library, its driver, what the allocator has grown by.
    read_all(choice, &mut holders);
    settled(&holders, &[]);
    let before = usage(&holders);
    read_all(choice, &mut holders);
    settled(&holders, &before);
}

/// Waits until nothing is left over; without a measure, until nothing changes.
fn settled(holders: &[Holder], before: &[Usage]) {
    let mut last = usage(holders);
    for _ in 0..100 {
        thread::sleep(Duration::from_millis(200));
        let found = usage(holders);
        let within = found
            .iter()
            .zip(before)
            .all(|(found, before)| found.within(*before));
        if within && (!before.is_empty() || found == last) {
            return;
        }
        last = found;
    }
    panic!("before: {before:?}, left: {last:?}");
}

/// Opens all sessions, reads by each, and closes them.
fn read_all(choice: TransportChoice, holders: &mut [Holder]) {
    let buffers = [Buffer::new(SESSIONS * BYTES as usize, FILLER)];
    let memory = register(&buffers);
    // One queue pair a session: the stand-in has 512 in all.
    let options = VerbsOptions {
        queue_pairs: 1,
        ..VerbsOptions::default()
    };
    let verbs = (choice == TransportChoice::Verbs)
        .then(|| Node::open(options, None, Arc::clone(&memory), None).expect("there is a device"));
    let readers: Vec<Reader> = (0..READERS)
        .map(|_| {
            let options = ReaderOptions {
                choice,
                verbs: verbs.clone(),
                connect_timeout: Duration::from_secs(60),
                ..ReaderOptions::default()
            };
            Reader::start(Arc::clone(&memory), options)
        })
        .collect();
    let mut runs = Vec::with_capacity(SESSIONS);
    for (at, reader) in readers.iter().enumerate() {
        for (rank, holder) in holders.iter().enumerate() {
            let nth = (at * HOLDERS + rank) as u64;
            let run = Run {
                source_region: 0,
                source_offset: nth * 331,
                dest_region: 0,
                dest_offset: nth * BYTES,
                bytes: BYTES,
            };
            reader
                .submit(job(nth, &holder.source, &[run]))
                .expect("taken");
            runs.push(run);
        }
    }
    for reader in &readers {
        for done in wait_all(reader, HOLDERS) {
            done.outcome.expect("read");
        }
    }
    check_exact(&buffers, &runs, HolderConfig::default().seed, FILLER);
    let open: usize = readers.iter().map(|reader| reader.stats().sessions).sum();
    assert_eq!(open, SESSIONS, "all at once");
    if choice != TransportChoice::Process {
        for holder in holders {
            assert_eq!(holder.order(Order::Connections), READERS as u64);
        }
    }
    for reader in &readers {
        reader
            .shutdown(now() + Duration::from_secs(30))
            .expect("quiescent");
    }
}
