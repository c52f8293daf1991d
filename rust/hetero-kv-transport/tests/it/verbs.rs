//! What only `verbs` has: queue pairs made over the data listener, memory keys, the choice of it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hetero_kv_core::ids::{DpRank, Incarnation, PpRank, TpRank};
use hetero_kv_core::memory::Run;
use hetero_kv_core::wire::data::{
    Attach, Attached, QUEUE_PAIRS_MAX, QueuePairEnd, QueuePairEnds, VerbsRefused,
};
use hetero_kv_core::wire::{HEADER_BYTES, Header, Kind, decode, encode};
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::reader::TransportChoice;
use hetero_kv_transport::transport::{Source, TransportName};

use super::buffer::{Buffer, check_exact};
use super::holder::{
    Holder, HolderConfig, engine, failure_kind, job, rdma_here, reader, reader_with, wait_one,
};
use super::hygiene::in_own_process;

fn run(bytes: u64) -> [Run; 1] {
    [Run {
        source_region: 0,
        source_offset: 0,
        dest_region: 0,
        dest_offset: 0,
        bytes,
    }]
}

fn receive(stream: &mut TcpStream) -> (Kind, Vec<u8>) {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).expect("a header");
    let header = Header::parse(header).expect("a frame");
    let mut payload = vec![0; header.payload_bytes];
    stream.read_exact(&mut payload).expect("a payload");
    (header.kind, payload)
}

/// A connection that the holder has taken.
fn attached(holder: &Holder) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", holder.tcp_port())).expect("listening");
    let patience = Some(Duration::from_secs(10));
    stream.set_read_timeout(patience).expect("a socket");
    let attach = Attach {
        engine: engine(),
        incarnation: Incarnation(0x11),
        dp_rank: DpRank(1),
        tp_rank: TpRank(0),
        pp_rank: PpRank(0),
        nonce: None,
    };
    let frame = encode(Kind::Attach, &attach).expect("small");
    stream.write_all(&frame).expect("sent");
    assert_eq!(receive(&mut stream).0, Kind::Attached);
    stream
}

fn ends() -> QueuePairEnds {
    QueuePairEnds {
        gid: vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1],
        lid: 0,
        mtu_bytes: 1024,
        reads_in_flight_max: 4,
        queue_pairs: vec![QueuePairEnd(0x12_3456, 7)],
    }
}

/// What the holder answers to these ends, and whether it then closes the connection.
fn ask(holder: &Holder, ends: &QueuePairEnds) -> (Kind, Vec<u8>, bool) {
    let mut stream = attached(holder);
    let frame = encode(Kind::VerbsConnect, ends).expect("small");
    stream.write_all(&frame).expect("sent");
    let (kind, payload) = receive(&mut stream);
    let patience = Some(Duration::from_millis(300));
    stream.set_read_timeout(patience).expect("a socket");
    let closed = matches!(stream.read(&mut [0]), Ok(0));
    (kind, payload, closed)
}

/// Every refusal names what is wrong, ends that connection and no other.
#[test]
fn queue_pairs_that_cannot_be_made_are_refused_in_words() {
    let rdma = rdma_here();
    let mut holder = Holder::start(HolderConfig::default());
    type Change = fn(&mut QueuePairEnds);
    let without: &[(&str, Change)] = &[("does not offer verbs", |_| {})];
    let with: &[(&str, Change)] = &[
        ("0 queue pairs", |ends| ends.queue_pairs.clear()),
        ("17 queue pairs", |ends| {
            ends.queue_pairs = vec![QueuePairEnd(1, 1); QUEUE_PAIRS_MAX + 1];
        }),
        ("GID has 15 bytes, not 16", |ends| ends.gid.truncate(15)),
        ("packets of 1000 bytes", |ends| ends.mtu_bytes = 1000),
        ("takes no read at all", |ends| ends.reads_in_flight_max = 0),
    ];
    for (expected, change) in if rdma { with } else { without } {
        let mut asked = ends();
        change(&mut asked);
        let (kind, payload, closed) = ask(&holder, &asked);
        assert_eq!(kind, Kind::VerbsRefused, "{expected}");
        let refused: VerbsRefused = decode(kind, &payload).expect("own format");
        assert!(refused.text.contains(expected), "{}", refused.text);
        assert!(closed, "{expected}");
    }
    if rdma {
        let (kind, payload, closed) = ask(&holder, &ends());
        assert_eq!(kind, Kind::VerbsConnected);
        let told: QueuePairEnds = decode(kind, &payload).expect("own format");
        assert_eq!((told.queue_pairs.len(), told.reads_in_flight_max), (1, 4));
        assert!(!closed, "the connection carries the queue pairs");
    }
    let nobody = (0..50).any(|_| {
        thread::sleep(Duration::from_millis(100));
        holder.order(super::holder::Order::Connections) == 0
    });
    assert!(nobody, "a connection stays");
}

/// All of a read is in the device when it is cancelled. What stands at the report stays: whatever
/// comes later would hit blocks that were handed back.
#[test]
fn a_cancelled_read_writes_nothing_after_its_report() {
    if !rdma_here() {
        return;
    }
    const BYTES: usize = 32 << 20;
    let holder = Holder::start(HolderConfig {
        region_bytes: vec![BYTES],
        ..HolderConfig::default()
    });
    let buffers = [Buffer::new(BYTES, 0)];
    let reader = reader(&buffers, TransportName::Verbs);
    reader
        .submit(job(99, &holder.source, &run(4096)))
        .expect("taken");
    wait_one(&reader).outcome.expect("connected");
    let mut midway = 0;
    for attempt in 0..12 {
        buffers[0].fill_with(|_| 0);
        reader
            .submit(job(attempt, &holder.source, &run(BYTES as u64)))
            .expect("taken");
        thread::sleep(Duration::from_millis(1 + attempt));
        reader.cancel(attempt);
        while !reader.wait(Duration::from_secs(10)) {}
        // At once: a late write is seen only while it is still to come.
        let at_report = buffers[0].copied();
        let done = reader.drain().remove(0);
        thread::sleep(Duration::from_millis(300));
        assert!(
            buffers[0].copied() == at_report,
            "attempt {attempt} wrote after its report"
        );
        let arrived = at_report.iter().any(|&byte| byte != 0);
        midway += u32::from(done.outcome.is_err() && arrived);
    }
    assert!(midway > 0, "no cancel hit a read in its middle");
}

/// Keys that are not the holder's own read nothing, and the next job goes well.
#[test]
fn a_wrong_key_is_refused_by_the_holders_device() {
    if !rdma_here() {
        return;
    }
    let holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(8192, 6)];
    let reader = reader(&buffers, TransportName::Verbs);
    let mut wrong = Source::clone(&holder.source);
    let verbs = wrong.endpoints.verbs.as_mut().expect("offered");
    verbs.region_keys[0] ^= 0x0050_0000;
    let wrong = Arc::new(wrong);
    reader.submit(job(1, &wrong, &run(8192))).expect("taken");
    let done = wait_one(&reader);
    assert_eq!(failure_kind(&done), ReadFailureKind::OutOfBounds);
    let text = done.outcome.expect_err("refused").text;
    assert!(text.contains("RDMA READ: remote access error"), "{text}");
    assert_eq!(buffers[0].copied(), [6; 8192]);
    reader
        .submit(job(2, &holder.source, &run(8192)))
        .expect("taken");
    // The session keeps to the keys it was made with until its connection is gone, which the
    // refusal ended.
    wait_one(&reader).outcome.expect("read");
    check_exact(&buffers, &run(8192), holder.config.seed, 6);
}

/// A lease page that is announced with a wrong key, nonce or address fails the probe.
#[test]
fn a_lease_page_that_is_not_there_fails_the_probe() {
    if !rdma_here() {
        return;
    }
    let holder = Holder::start(HolderConfig::default());
    type Change = fn(&mut hetero_kv_core::wire::card::VerbsEndpoint);
    let cases: [(Change, ReadFailureKind); 4] = [
        (
            |verbs| verbs.lease_page_nonce ^= 1,
            ReadFailureKind::Incarnation,
        ),
        (
            |verbs| verbs.lease_page_key ^= 0x0050_0000,
            ReadFailureKind::OutOfBounds,
        ),
        (
            |verbs| verbs.lease_page_address = 4096,
            ReadFailureKind::OutOfBounds,
        ),
        (|verbs| verbs.region_keys.clear(), ReadFailureKind::Refused),
    ];
    for (at, (change, kind)) in cases.into_iter().enumerate() {
        let buffers = [Buffer::new(4096, 6)];
        let reader = reader(&buffers, TransportName::Verbs);
        let mut source = Source::clone(&holder.source);
        change(source.endpoints.verbs.as_mut().expect("offered"));
        reader
            .submit(job(1, &source.into(), &run(4096)))
            .expect("taken");
        let done = wait_one(&reader);
        assert_eq!(failure_kind(&done), kind, "case {at}: {:?}", done.outcome);
        assert_eq!(buffers[0].copied(), [6; 4096]);
    }
}

/// `Auto` takes verbs where process memory cannot be read, and tcp where the probe of verbs fails.
#[test]
fn verbs_is_chosen_between_process_and_tcp() {
    if !rdma_here() {
        return;
    }
    let holder = Holder::start(HolderConfig::default());
    let here = Source::clone(&holder.source);
    let mut elsewhere = here.clone();
    let process = elsewhere.endpoints.process.as_mut().expect("offered");
    process.boot_id.push('x');
    let mut broken = elsewhere.clone();
    let verbs = broken.endpoints.verbs.as_mut().expect("offered");
    verbs.lease_page_nonce ^= 1;
    for (source, transport, why) in [
        (here, TransportName::Process, "probe passed"),
        (elsewhere, TransportName::Verbs, "another host"),
        (broken, TransportName::Tcp, "nonce is not the one"),
    ] {
        let buffers = [Buffer::new(4096, 0)];
        let reader = reader_with(&buffers, TransportName::Verbs, |options| {
            options.choice = TransportChoice::Auto;
        });
        reader
            .submit(job(1, &source.into(), &run(4096)))
            .expect("taken");
        let done = wait_one(&reader);
        done.outcome.expect("read");
        assert_eq!(done.reads[0].transport, Some(transport));
        let peer = reader.stats().peers.remove(0);
        assert!(peer.why.contains(why), "{}", peer.why);
    }
}

/// Whatever a holder answers when queue pairs are asked for: the job fails in time.
#[test]
fn a_holder_that_answers_nonsense_fails_the_job() {
    if !rdma_here() {
        return;
    }
    let holder = Holder::start(HolderConfig::default());
    let region_bytes: Vec<u64> = holder.source.regions.iter().map(|r| r.bytes).collect();
    let taken = encode(
        Kind::Attached,
        &Attached {
            region_bytes,
            proof: None,
        },
    )
    .expect("small");
    let connected = |change: fn(&mut QueuePairEnds)| {
        let mut told = ends();
        told.queue_pairs = vec![QueuePairEnd(5, 5), QueuePairEnd(6, 6)];
        change(&mut told);
        encode(Kind::VerbsConnected, &told).expect("small")
    };
    let answers = [
        (
            "one too few",
            connected(|told| told.queue_pairs.truncate(1)),
        ),
        ("no GID", connected(|told| told.gid.clear())),
        ("no MTU", connected(|told| told.mtu_bytes = 9000)),
        // Well formed, and nobody is there: the probe uses up its retries.
        ("queue pairs of nobody", connected(|_| {})),
        (
            "another frame",
            encode(
                Kind::Attached,
                &Attached {
                    region_bytes: vec![],
                    proof: None,
                },
            )
            .expect("small"),
        ),
        ("garbage", vec![0; 64]),
    ];
    for (name, answer) in answers {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let taken = taken.clone();
        thread::spawn(move || {
            let Ok((mut stream, _)) = listener.accept() else {
                return;
            };
            for answer in [taken, answer] {
                let mut asked = [0; 4096];
                if stream.read(&mut asked).is_err() || stream.write_all(&answer).is_err() {
                    return;
                }
            }
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let buffers = [Buffer::new(4096, 6)];
        let reader = reader(&buffers, TransportName::Verbs);
        let began = now();
        reader
            .submit(job(1, &holder.via(port), &run(4096)))
            .expect("taken");
        let done = wait_one(&reader);
        let failure = done.outcome.expect_err("no holder");
        assert_eq!(
            failure.kind,
            ReadFailureKind::Unreachable,
            "{name}: {failure}"
        );
        assert!(now().since(began) < Duration::from_secs(15), "{name}");
        assert_eq!(buffers[0].copied(), [6; 4096], "{name}");
    }
}

/// The device says by itself, in the middle of a read, that it has failed as a whole: the read
/// fails by that and its blocks come back; later reads of this rank go by tcp. Only the stand-in
/// does so on demand.
#[test]
fn a_device_that_says_it_failed_ends_its_reads_and_is_left() {
    let named = std::env::var("HETERO_KV_LIBIBVERBS").unwrap_or_default();
    if !rdma_here() || !named.contains("double") {
        eprintln!("skipped: no stand-in for libibverbs by HETERO_KV_LIBIBVERBS");
        return;
    }
    // Some requests after the one that connects, each slow enough for the reader to sleep.
    let faults = "event=fatal:after=8:count=1;delay=20000";
    in_own_process(
        "verbs::reads_while_the_device_fails",
        &[("HKV_VERBS_FAULTS", faults)],
    );
}

#[test]
#[ignore = "a process that another test starts"]
fn reads_while_the_device_fails() {
    const BYTES: u64 = 1 << 20;
    let holder = Holder::start(HolderConfig::default());
    // Its process is not named: verbs comes before tcp.
    let mut source = Source::clone(&holder.source);
    source.endpoints.process = None;
    let source = Arc::new(source);
    let buffers = [Buffer::new(BYTES as usize, 6)];
    let reader = reader_with(&buffers, TransportName::Verbs, |options| {
        options.choice = TransportChoice::Auto;
    });
    let scattered: Vec<Run> = (0..BYTES / 65_536)
        .rev()
        .map(|at| Run {
            source_region: 0,
            source_offset: at * 65_536,
            dest_region: 0,
            dest_offset: at * 65_536,
            bytes: 65_536,
        })
        .collect();
    reader.submit(job(1, &source, &scattered)).expect("taken");
    let done = wait_one(&reader);
    assert_eq!(done.reads[0].transport, Some(TransportName::Verbs));
    let failure = done.outcome.expect_err("the device failed");
    assert_eq!(failure.kind, ReadFailureKind::Local, "{failure}");
    assert!(failure.text.contains("the RDMA device failed"), "{failure}");
    let at_report = buffers[0].copied();
    thread::sleep(Duration::from_millis(300));
    assert!(buffers[0].copied() == at_report, "written after its report");
    for id in 2..5 {
        reader.submit(job(id, &source, &scattered)).expect("taken");
        let done = wait_one(&reader);
        done.outcome.expect("tcp works");
        assert_eq!(done.reads[0].transport, Some(TransportName::Tcp));
    }
    check_exact(&buffers, &scattered, holder.config.seed, 6);
}
