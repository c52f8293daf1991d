//! Sources that die, stop, come back as another start, and networks that break.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use hetero_kv_core::memory::Run;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::reader::{PassedOver, ReadJob, Reader, ReaderOptions, TransportChoice};
use hetero_kv_transport::transport::{Source, TransportName};

use super::buffer::{Buffer, check_exact, register};
use super::holder::{
    Holder, HolderConfig, each_transport, failure_kind, job, reader, reader_with, route, wait_one,
};
use super::relay::Relay;

each_transport! {
    a_killed_source_is_told_within_two_seconds;
    a_source_that_was_never_there_is_unreachable;
    a_killed_source_that_comes_back_is_read_at_once;
    another_start_at_the_same_address_is_not_read;
    a_stopped_source_holds_no_read_beyond_its_time;
}

const BYTES: usize = 64 << 20;

fn whole(bytes: u64) -> [Run; 1] {
    [Run {
        source_region: 0,
        source_offset: 0,
        dest_region: 0,
        dest_offset: 0,
        bytes,
    }]
}

fn large_holder() -> Holder {
    Holder::start(HolderConfig {
        region_bytes: vec![BYTES],
        ..HolderConfig::default()
    })
}

fn a_killed_source_is_told_within_two_seconds(transport: TransportName) {
    let mut holder = large_holder();
    let buffers = [Buffer::new(BYTES, 0)];
    let reader = reader(&buffers, transport);
    let source = holder.source.clone();
    let submit = |id| {
        reader
            .submit(job(id, &source, &whole(BYTES as u64)))
            .expect("taken");
    };
    submit(0);
    wait_one(&reader).outcome.expect("read while it lives");
    if transport == TransportName::Tcp {
        // A stopped holder keeps the read in flight until it is killed.
        holder.signal(libc::SIGSTOP);
    }
    submit(1);
    thread::sleep(Duration::from_millis(5));
    holder.kill();
    let killed = now();
    let mut done = wait_one(&reader);
    if done.outcome.is_ok() && transport != TransportName::Tcp {
        // The whole copy was faster than the kill; the next one meets nobody.
        submit(2);
        done = wait_one(&reader);
    }
    let took = now().since(killed);
    assert_eq!(failure_kind(&done), ReadFailureKind::PeerLost);
    assert!(took < Duration::from_secs(2), "{took:?}");
    let failure = done.outcome.expect_err("a loss");
    assert_eq!(failure.at.as_ref(), Some(&source.route), "who was lost");
}

fn a_source_that_was_never_there_is_unreachable(transport: TransportName) {
    let holder = Holder::start(HolderConfig::default());
    let mut source = Source::clone(&holder.source);
    drop(holder);
    // Another host, for one transport; a port where nobody listens, for the other.
    if let Some(process) = &mut source.endpoints.process {
        process.boot_id = "00000000-0000-0000-0000-000000000000".into();
    }
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader(&buffers, transport);
    reader
        .submit(job(1, &source.into(), &whole(4096)))
        .expect("taken");
    let done = wait_one(&reader);
    let failure = done.outcome.expect_err("nobody is there");
    assert_eq!(failure.kind, ReadFailureKind::Unreachable, "{failure}");
    assert!(failure.text.contains("prefill_dp1"), "{failure}");
    assert_eq!(done.reads[0].transport, None);
}

fn a_killed_source_that_comes_back_is_read_at_once(transport: TransportName) {
    let first = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader(&buffers, transport);
    reader
        .submit(job(1, &first.source, &whole(4096)))
        .expect("taken");
    wait_one(&reader).outcome.expect("read");
    let port = first.tcp_port();
    let old = first.source.clone();
    drop(first);
    let second = Holder::start(HolderConfig {
        ports: Some((port, port)),
        incarnation: 0x22,
        seed: 2,
        ..HolderConfig::default()
    });
    let began = now();
    reader
        .submit(job(2, &second.source, &whole(4096)))
        .expect("taken");
    wait_one(&reader).outcome.expect("read from the new start");
    assert!(now().since(began) < Duration::from_secs(4));
    check_exact(&buffers, &whole(4096), 2, 0);
    // The old start is refused as what it is, and stays no obstacle.
    reader.submit(job(3, &old, &whole(4096))).expect("taken");
    let kind = failure_kind(&wait_one(&reader));
    let expected = match transport {
        TransportName::Process => ReadFailureKind::PeerLost,
        TransportName::Verbs | TransportName::Tcp | TransportName::Mori => {
            ReadFailureKind::Incarnation
        }
    };
    assert_eq!(kind, expected);
    reader
        .submit(job(4, &second.source, &whole(4096)))
        .expect("taken");
    wait_one(&reader).outcome.expect("read from the new start");
}

fn another_start_at_the_same_address_is_not_read(transport: TransportName) {
    let holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(4096, 3)];
    let reader = reader(&buffers, transport);
    let mut source = Source::clone(&holder.source);
    source.route = route(0x77, 0);
    if let Some(process) = &mut source.endpoints.process {
        process.lease_page_nonce ^= 1;
    }
    reader
        .submit(job(1, &source.into(), &whole(4096)))
        .expect("taken");
    let done = wait_one(&reader);
    assert_eq!(failure_kind(&done), ReadFailureKind::Incarnation);
    assert_eq!(done.reads[0].bytes, 0);
}

/// Stopped before anybody was connected, or under a read: what needs the source's help fails in
/// time, what does not arrives, and a source that goes on is read again.
fn a_stopped_source_holds_no_read_beyond_its_time(transport: TransportName) {
    for connected in [false, true] {
        let holder = Holder::start(HolderConfig::default());
        let buffers = [Buffer::new(1 << 20, 0)];
        let reader = reader_with(&buffers, transport, |options| {
            options.connect_timeout = Duration::from_secs(2);
        });
        if connected {
            reader
                .submit(job(1, &holder.source, &whole(4096)))
                .expect("taken");
            wait_one(&reader).outcome.expect("read");
        }
        holder.stop();
        let began = now();
        let brief = ReadJob {
            deadline: began + Duration::from_secs(3),
            ..job(2, &holder.source, &whole(1 << 20))
        };
        reader.submit(brief).expect("taken");
        let done = wait_one(&reader);
        assert!(now().since(began) < Duration::from_secs(6));
        let without_help = match transport {
            TransportName::Process => true,
            // Queue pairs are made with the source's help, and read without.
            TransportName::Verbs => connected,
            TransportName::Tcp | TransportName::Mori => false,
        };
        match done.outcome {
            Ok(()) => {
                assert!(without_help, "{transport} {connected}");
                check_exact(&buffers, &whole(1 << 20), holder.config.seed, 0);
            }
            Err(failure) => {
                assert!(!without_help, "{transport} {connected}: {failure}");
                let expected = if connected {
                    ReadFailureKind::Deadline
                } else {
                    ReadFailureKind::Unreachable
                };
                assert_eq!(failure.kind, expected, "{transport}: {failure}");
            }
        }
        holder.signal(libc::SIGCONT);
        reader
            .submit(job(3, &holder.source, &whole(1 << 20)))
            .expect("taken");
        wait_one(&reader).outcome.expect("it goes on");
        check_exact(&buffers, &whole(1 << 20), holder.config.seed, 0);
    }
}

/// A holder that stands still for five seconds delays the reads from it and no others.
#[test]
fn a_stopped_tcp_source_delays_only_its_own_reads() {
    let stopped = large_holder();
    let healthy = Holder::start(HolderConfig {
        tp_rank: 1,
        ..HolderConfig::default()
    });
    let buffers = [Buffer::new(BYTES, 0), Buffer::new(1 << 20, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    let aside = whole(1 << 20).map(|run| Run {
        dest_region: 1,
        ..run
    });
    // Both are connected before one is stopped.
    for (id, holder) in [(1, &stopped), (2, &healthy)] {
        reader
            .submit(job(id, &holder.source, &whole(4096)))
            .expect("taken");
        wait_one(&reader).outcome.expect("read");
    }
    stopped.signal(libc::SIGSTOP);
    let began = now();
    reader
        .submit(job(3, &stopped.source, &whole(BYTES as u64)))
        .expect("taken");
    let mut others = 0;
    let mut slowest = Duration::ZERO;
    while now().since(began) < Duration::from_secs(5) {
        reader
            .submit(job(100 + others, &healthy.source, &aside))
            .expect("taken");
        let done = wait_one(&reader);
        assert_eq!((done.id, done.outcome), (100 + others, Ok(())));
        slowest = slowest.max(done.elapsed);
        others += 1;
        thread::sleep(Duration::from_millis(20));
    }
    assert!(others > 5, "{others} reads in five seconds");
    assert!(slowest < Duration::from_secs(4), "one took {slowest:?}");
    stopped.signal(libc::SIGCONT);
    let done = wait_one(&reader);
    assert_eq!((done.id, done.outcome), (3, Ok(())));
    let seeds = [stopped.config.seed, healthy.config.seed];
    check_exact(&buffers[..1], &whole(BYTES as u64), seeds[0], 0);
    // As the only region of its list.
    check_exact(&buffers[1..], &whole(1 << 20), seeds[1], 0);
}

/// The time to connect is that of an attempt: a job that is cancelled in the middle of one takes no
/// time from the jobs that come later.
#[test]
fn a_cancelled_attempt_to_connect_is_forgotten() {
    let holder = Holder::start(HolderConfig::default());
    // Takes connections into its queue and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = silent.local_addr().expect("bound").port();
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader_with(&buffers, TransportName::Tcp, |options| {
        options.connect_timeout = Duration::from_secs(2);
    });
    reader
        .submit(job(1, &holder.via(port), &whole(4096)))
        .expect("taken");
    assert!(!reader.wait(Duration::from_millis(300)), "it waits");
    assert!(reader.cancel(1));
    assert_eq!(failure_kind(&wait_one(&reader)), ReadFailureKind::Cancelled);
    thread::sleep(Duration::from_millis(2200));
    reader
        .submit(job(2, &holder.source, &whole(4096)))
        .expect("taken");
    assert_eq!(wait_one(&reader).outcome, Ok(()));
}

/// What no packet tells: the connection went away while nobody used it.
#[test]
fn a_connection_cut_while_idle_costs_the_next_read_nothing() {
    let holder = Holder::start(HolderConfig::default());
    let relay = Relay::start(holder.tcp_port());
    let source = holder.via(relay.port);
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    for id in 0..3 {
        reader
            .submit(job(id, &source, &whole(4096)))
            .expect("taken");
        wait_one(&reader).outcome.expect("read");
        relay.cut();
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(reader.stats().peers[0].reconnects, 2);
}

#[test]
fn a_connection_cut_in_a_read_is_made_again_once() {
    let holder = large_holder();
    let relay = Relay::start(holder.tcp_port());
    let source = holder.via(relay.port);
    let buffers = [Buffer::new(BYTES, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    relay.cut_after(20 << 20);
    reader
        .submit(job(1, &source, &whole(BYTES as u64)))
        .expect("taken");
    let done = wait_one(&reader);
    assert_eq!(done.outcome, Ok(()));
    assert_eq!(done.reads[0].bytes, BYTES as u64);
    assert_eq!(reader.stats().peers[0].reconnects, 1);
    check_exact(&buffers, &whole(BYTES as u64), holder.config.seed, 0);
}

/// `Auto` takes process memory where the probe passes, tcp where it does not, and says why.
#[test]
fn the_transport_is_chosen_by_a_probe() {
    let holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(4096, 0)];
    let mut elsewhere = Source::clone(&holder.source);
    let mut forbidden = Source::clone(&holder.source);
    let mut silent = Source::clone(&holder.source);
    if let Some(process) = &mut elsewhere.endpoints.process {
        process.pid_namespace += 1;
    }
    if let Some(process) = &mut forbidden.endpoints.process {
        process.nonce[3] ^= 1;
    }
    silent.endpoints.process = None;
    let (tcp, not_reached) = (TransportName::Tcp, Some(PassedOver::NotReached));
    for (source, transport, why, passed_over) in [
        (
            Source::clone(&holder.source),
            TransportName::Process,
            "probe passed",
            None,
        ),
        (elsewhere, tcp, "another pid namespace", not_reached),
        (forbidden, tcp, "does not hold the nonce", not_reached),
        (
            silent,
            tcp,
            "process is not offered",
            Some(PassedOver::NotOffered),
        ),
    ] {
        let options = ReaderOptions {
            choice: TransportChoice::Auto,
            ..ReaderOptions::default()
        };
        let reader = Reader::start(register(&buffers), options);
        reader
            .submit(job(1, &source.into(), &whole(4096)))
            .expect("taken");
        let done = wait_one(&reader);
        done.outcome.expect("read");
        assert_eq!(done.reads[0].transport, Some(transport));
        let mut stats = reader.stats();
        let peer = stats.peers.remove(0);
        assert!(peer.why.contains(why), "{}", peer.why);
        let counted = passed_over.map(|why| ((TransportName::Process, why), 1));
        assert_eq!(stats.passed_over, counted.into_iter().collect());
    }
}
