//! The library's objects on a real device, two ends in one process: what the connections above
//! stand on, and what push mode will.
#![allow(unsafe_code)]

mod throughput;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::completion::{CompletionQueue, WorkCompletion};
use super::device::{self, Context, Port};
use super::error::{Verb, WorkFailure};
use super::memory::{Access, ProtectionDomain, Region, Words};
use super::path::fresh_packet_number;
use super::queue_pair::{Depth, PeerEnd, QueuePair, ReadyToReceive, ReadyToSend, Request};
use super::*;
use crate::clock::{now, time_left, timespec};

/// The device of this host; `None`, with the reason printed, where there is none.
fn opened() -> Option<(Arc<Context>, Port)> {
    match device::open(&DeviceChoice::default()) {
        Ok(opened) => Some(opened),
        Err(error) if std::env::var_os("HETERO_KV_REQUIRE_RDMA").is_some() => {
            panic!("RDMA is required: {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Anonymous memory that lasts as long as the process, so that nothing here can outlive it.
fn leaked(bytes: usize) -> u64 {
    // Known to the end, so that a search for leaks passes it by.
    static KEPT: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    let words = vec![0_u64; bytes / 8].leak();
    let address = words.as_mut_ptr().expose_provenance();
    KEPT.lock().expect("no test panics here").push(address);
    address as u64
}

fn fill(address: u64, bytes: usize, seed: u8) {
    for at in 0..bytes {
        // SAFETY: inside memory of `leaked`, which no reference covers.
        unsafe { pointer(address, at).write_volatile(seed.wrapping_add(at as u8)) };
    }
}

fn holds(address: u64, bytes: usize, seed: u8) -> bool {
    // SAFETY: as in `fill`.
    (0..bytes)
        .all(|at| unsafe { pointer(address, at).read_volatile() } == seed.wrapping_add(at as u8))
}

fn pointer(address: u64, at: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize + at)
}

const BYTES: usize = 256 << 10;

/// One side: its objects and 256 KiB that the other side may read and write.
struct Side {
    queue: Arc<CompletionQueue>,
    region: Region,
    address: u64,
    domain: Arc<ProtectionDomain>,
}

impl Side {
    fn new(context: &Arc<Context>, access: Access) -> Self {
        let domain = ProtectionDomain::new(Arc::clone(context)).expect("a domain");
        let address = leaked(BYTES);
        // SAFETY: the memory is never freed and only touched by volatile accesses.
        let region = unsafe { Region::register(&domain, address, BYTES as u64, access) }
            .expect("registered");
        Self {
            queue: CompletionQueue::new(context, 256).expect("a queue"),
            region,
            address,
            domain,
        }
    }

    fn piece(&self, offset: u64, bytes: u32) -> sys::ibv_sge {
        sys::ibv_sge {
            addr: self.address + offset,
            length: bytes,
            lkey: self.region.lkey,
        }
    }

    /// The next `count` completions, slept for.
    fn wait(&self, count: usize) -> Vec<WorkCompletion> {
        let deadline = now() + Duration::from_secs(30);
        let mut found = Vec::new();
        loop {
            self.queue.arm().expect("armed");
            while self.queue.poll(&mut found).expect("polled") > 0 {}
            if found.len() >= count {
                assert_eq!(found.len(), count, "{found:?}");
                return found;
            }
            let left = time_left(deadline);
            assert!(
                !left.is_zero(),
                "{} of {count} completions came",
                found.len()
            );
            let mut fds = [PollFd::from_borrowed_fd(
                self.queue.channel(),
                PollFlags::IN,
            )];
            poll(&mut fds, Some(&timespec(left))).expect("polled");
            self.queue.take_events().expect("taken");
        }
    }
}

const DEPTH: Depth = Depth {
    sends: 64,
    receives: 64,
    pieces: 4,
};

/// Two connected queue pairs: the first may send, the second answers with these rights.
fn connected(
    port: &Port,
    one: &Side,
    other: &Side,
    access: Access,
) -> (QueuePair<ReadyToSend>, QueuePair<ReadyToReceive>) {
    let gid = port.own_gid(None);
    let make = |side: &Side, access| {
        QueuePair::new(&side.domain, &side.queue, DEPTH)
            .and_then(|made| made.init(port, access))
            .expect("a queue pair")
    };
    let (first, second) = (make(one, Access::Local), make(other, access));
    let numbers = [first.number(), second.number()];
    let packets = [(); 2].map(|()| fresh_packet_number().expect("drawn"));
    let end = |at: usize| PeerEnd {
        number: numbers[at],
        packet_number: packets[at],
        gid: gid.raw,
        lid: port.lid,
        mtu: port.mtu,
        reads_in_flight: 8,
    };
    let first = first
        .ready_to_receive(port, gid.index, &end(1))
        .and_then(|ready| ready.ready_to_send(packets[0], 8))
        .expect("ready to send");
    let second = second
        .ready_to_receive(port, gid.index, &end(0))
        .expect("ready to receive");
    (first, second)
}

fn request<'a>(verb: Verb, id: u64, to: &Side, pieces: &'a [sys::ibv_sge]) -> Request<'a> {
    Request {
        verb,
        id,
        remote_address: to.address,
        remote_key: to.region.rkey,
        pieces,
        signalled: true,
        fenced: false,
        immediate: 0,
    }
}

fn post(queue_pair: &mut QueuePair<ReadyToSend>, requests: &[Request<'_>]) {
    // SAFETY: every piece is in memory of `leaked`, which is never freed or borrowed.
    unsafe { queue_pair.post(requests) }.expect("posted");
}

#[test]
fn a_write_arrives_and_one_with_immediate_is_told_to_the_receiver() {
    let Some((context, port)) = opened() else {
        return;
    };
    let one = Side::new(&context, Access::Local);
    let other = Side::new(&context, Access::RemoteWrite);
    let (mut sender, mut receiver) = connected(&port, &one, &other, Access::RemoteWrite);
    fill(one.address, BYTES, 3);
    // Scattered here, contiguous there.
    let half = BYTES as u32 / 2;
    let pieces = [one.piece(0, half), one.piece(u64::from(half), half)];
    post(&mut sender, &[request(Verb::Write, 1, &other, &pieces)]);
    let done = one.wait(1);
    assert_eq!((done[0].id, done[0].outcome), (1, Ok(())));
    assert!(holds(other.address, BYTES, 3));

    receiver.post_receive(77).expect("posted");
    fill(one.address, 4096, 9);
    let pieces = [one.piece(0, 4096)];
    let slot = Request {
        immediate: 0xdead_beef,
        ..request(Verb::WriteWithImmediate, 2, &other, &pieces)
    };
    post(&mut sender, &[slot]);
    let told = other.wait(1);
    assert_eq!(
        (told[0].id, told[0].outcome, told[0].immediate),
        (77, Ok(()), Some(0xdead_beef))
    );
    // The immediate is told after the bytes it stands for.
    assert!(holds(other.address, 4096, 9));
    assert_eq!(one.wait(1)[0].immediate, None);
}

#[test]
fn reads_arrive_in_order_and_only_what_is_signalled_is_told() {
    let Some((context, port)) = opened() else {
        return;
    };
    let one = Side::new(&context, Access::Local);
    let other = Side::new(&context, Access::RemoteRead);
    let (mut reader, _holder) = connected(&port, &one, &other, Access::RemoteRead);
    fill(other.address, BYTES, 5);
    let pieces: Vec<[sys::ibv_sge; 1]> = (0..32).map(|at| [one.piece(at * 8192, 8192)]).collect();
    let requests: Vec<Request<'_>> = pieces
        .iter()
        .enumerate()
        .map(|(at, pieces)| Request {
            remote_address: other.address + at as u64 * 8192,
            signalled: at == 31,
            fenced: at == 31,
            ..request(Verb::Read, at as u64, &other, pieces)
        })
        .collect();
    post(&mut reader, &requests);
    let done = one.wait(1);
    assert_eq!((done[0].id, done[0].outcome), (31, Ok(())));
    assert!(holds(one.address, BYTES, 5));
}

type Change = fn(&mut Request<'_>);

#[test]
fn a_key_that_does_not_cover_it_is_refused_and_what_follows_is_flushed() {
    let Some((context, port)) = opened() else {
        return;
    };
    let one = Side::new(&context, Access::Local);
    let readable = Side::new(&context, Access::RemoteRead);
    let closed = Side::new(&context, Access::Local);
    let bad: [(&str, Change); 4] = [
        ("unknown key", |request| request.remote_key ^= 0x0055_0000),
        ("past the end", |request| {
            request.remote_address += BYTES as u64 - 4095;
        }),
        ("before the begin", |request| request.remote_address -= 1),
        ("no right to write", |request| request.verb = Verb::Write),
    ];
    for (what, change) in bad {
        let (mut reader, _holder) = connected(&port, &one, &readable, Access::RemoteWrite);
        fill(one.address, 8192, 1);
        let pieces = [one.piece(0, 4096)];
        let mut wrong = request(Verb::Read, 1, &readable, &pieces);
        change(&mut wrong);
        let pieces = [one.piece(4096, 4096)];
        let next = request(Verb::Read, 2, &readable, &pieces);
        post(&mut reader, &[wrong, next]);
        let done = one.wait(2);
        assert_eq!(
            done[0].outcome,
            Err(WorkFailure::RemoteAccess),
            "{what}: {done:?}"
        );
        assert_eq!(done[1].outcome, Err(WorkFailure::Flushed), "{what}");
        assert!(holds(one.address, 8192, 1), "{what}: something was written");
    }
    let (mut reader, _holder) = connected(&port, &one, &closed, Access::RemoteRead);
    let pieces = [one.piece(0, 4096)];
    post(&mut reader, &[request(Verb::Read, 1, &closed, &pieces)]);
    assert_eq!(
        one.wait(1)[0].outcome,
        Err(WorkFailure::RemoteAccess),
        "memory that is not to be read"
    );
}

#[test]
fn a_receiver_that_is_never_ready_is_named() {
    let Some((context, port)) = opened() else {
        return;
    };
    let one = Side::new(&context, Access::Local);
    let other = Side::new(&context, Access::RemoteWrite);
    let (mut sender, _receiver) = connected(&port, &one, &other, Access::RemoteWrite);
    let pieces = [one.piece(0, 64)];
    post(
        &mut sender,
        &[request(Verb::WriteWithImmediate, 1, &other, &pieces)],
    );
    let failure = one.wait(1)[0].outcome.expect_err("no receive was posted");
    assert_eq!(failure, WorkFailure::ReceiverNotReady);
    let error = failure.error(Verb::WriteWithImmediate);
    assert!(
        error
            .problem
            .contains("RDMA WRITE WITH IMMEDIATE: receiver-not-ready"),
        "{error}"
    );
}

#[test]
fn a_peer_that_is_gone_uses_up_the_retries() {
    let Some((context, port)) = opened() else {
        return;
    };
    let one = Side::new(&context, Access::Local);
    let other = Side::new(&context, Access::RemoteRead);
    let (mut reader, holder) = connected(&port, &one, &other, Access::RemoteRead);
    drop(holder);
    let pieces = [one.piece(0, 64)];
    let began = now();
    post(&mut reader, &[request(Verb::Read, 1, &other, &pieces)]);
    let failure = one.wait(1)[0].outcome.expect_err("nobody answers");
    assert_eq!(failure, WorkFailure::RetriesExceeded);
    assert_eq!(failure.kind(), ReadFailureKind::PeerLost);
    assert!(now().since(began) < Duration::from_secs(20));
}

/// What a cancelled read stands on: once the last request is flushed, nothing more is written.
#[test]
fn a_failed_queue_pair_is_drained_by_its_last_request() {
    let Some((context, port)) = opened() else {
        return;
    };
    let one = Side::new(&context, Access::Local);
    let other = Side::new(&context, Access::RemoteRead);
    let (mut reader, _holder) = connected(&port, &one, &other, Access::RemoteRead);
    fill(other.address, BYTES, 5);
    let pieces = [one.piece(0, BYTES as u32)];
    let requests: Vec<Request<'_>> = (0..40)
        .map(|id| Request {
            signalled: false,
            ..request(Verb::Read, id, &other, &pieces)
        })
        .collect();
    post(&mut reader, &requests);
    let Ok(mut failed) = reader.fail() else {
        panic!("the queue pair does not fail");
    };
    failed.post_last(u64::MAX).expect("posted");
    let deadline = now() + Duration::from_secs(10);
    let mut found = Vec::new();
    while !found
        .iter()
        .any(|done: &WorkCompletion| done.id == u64::MAX)
    {
        assert!(!time_left(deadline).is_zero(), "not drained: {found:?}");
        one.queue.poll(&mut found).expect("polled");
    }
    let last = found.last().expect("the last request");
    assert_eq!(last.id, u64::MAX, "it comes after all others");
    assert!(last.outcome.is_err());
    fill(one.address, BYTES, 200);
    std::thread::sleep(Duration::from_millis(200));
    assert!(holds(one.address, BYTES, 200), "a late byte was written");
}

#[test]
fn devices_ports_and_gids_that_are_not_there_are_named() {
    let Some((context, port)) = opened() else {
        return;
    };
    let have = context.name.clone();
    let open = |choice: DeviceChoice| match device::open(&choice) {
        Ok(_) => panic!("{choice:?} opens"),
        Err(error) => error.to_string(),
    };
    let text = open(DeviceChoice {
        device: Some("mlx5_77".into()),
        ..DeviceChoice::default()
    });
    assert!(
        text.contains("mlx5_77 does not exist") && text.contains(&have),
        "{text}"
    );
    let named = |choice: DeviceChoice| DeviceChoice {
        device: Some(have.clone()),
        ..choice
    };
    let text = open(named(DeviceChoice {
        port: Some(200),
        ..DeviceChoice::default()
    }));
    assert!(text.contains("verbs_port 200 does not exist"), "{text}");
    let text = open(named(DeviceChoice {
        gid_index: Some(250),
        ..DeviceChoice::default()
    }));
    assert!(text.contains("has no GID of index 250"), "{text}");
    assert!(
        text.contains(&port.own_gid(None).index.to_string()),
        "{text}"
    );
}

#[test]
fn words_are_written_by_the_device_and_cleared() {
    let Some((context, port)) = opened() else {
        return;
    };
    let one = Side::new(&context, Access::Local);
    let other = Side::new(&context, Access::RemoteRead);
    let words = Words::new(&one.domain, 4).expect("mapped");
    let (mut reader, _holder) = connected(&port, &one, &other, Access::RemoteRead);
    fill(other.address, 8, 1);
    let pieces = [sys::ibv_sge {
        addr: words.address(2),
        length: 8,
        lkey: words.lkey(),
    }];
    post(&mut reader, &[request(Verb::Read, 1, &other, &pieces)]);
    assert_eq!(one.wait(1)[0].outcome, Ok(()));
    assert_eq!(words.read(2).to_ne_bytes(), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(words.read(1), 0);
    words.clear(2);
    assert_eq!(words.read(2), 0);
    drop(reader);
}

/// Started with a limit of 64 KiB and without the capability to pass it.
#[test]
#[ignore = "make test-rdma starts it with a low limit"]
fn memory_that_may_not_be_locked_is_told_with_the_limit() {
    let Some((context, _)) = opened() else {
        return;
    };
    let domain = ProtectionDomain::new(context).expect("a domain");
    let (address, bytes) = (leaked(BYTES), BYTES as u64);
    // SAFETY: the memory is never freed and never touched.
    let Err(error) = (unsafe { Region::register(&domain, address, bytes, Access::Local) }) else {
        panic!("{bytes} bytes are registered");
    };
    let limit_bytes = 64 << 10;
    assert_eq!(error, VerbsError::LockedMemory { bytes, limit_bytes });
    let text = error.to_string();
    for part in ["262144", "65536", "ulimit -l unlimited", "memlock=-1"] {
        assert!(text.contains(part), "{text}");
    }
}
