//! The data port against whatever comes in.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hetero_kv_core::ids::{DpRank, Epoch, Incarnation, PpRank, Slot, TpRank};
use hetero_kv_core::memory::Run;
use hetero_kv_core::wire::data::{
    Attach, Attached, FETCH_BYTES_MAX, FETCH_RUNS_MAX, Fetch, FetchData, FetchEnd, FetchStatus,
    SourceRun,
};
use hetero_kv_core::wire::{HEADER_BYTES, Header, Kind, decode, encode};
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::lease_page::LeasePage;
use hetero_kv_transport::net::listen::{ListenAddress, ListenError};
use hetero_kv_transport::tcp::{DataServer, ServeError, ServerOptions};
use hetero_kv_transport::transport::{Source, TransportName};

use super::buffer::{Buffer, check_exact, register};
use super::holder::{
    Holder, HolderConfig, Order, engine, failure_kind, job, reader, reader_with, route, wait_one,
};

fn run(bytes: u64) -> [Run; 1] {
    [Run {
        source_region: 0,
        source_offset: 0,
        dest_region: 0,
        dest_offset: 0,
        bytes,
    }]
}

fn dial(holder: &Holder) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", holder.tcp_port())).expect("listening");
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .expect("a socket");
    stream
}

fn attach_frame() -> Vec<u8> {
    let attach = Attach {
        engine: engine(),
        incarnation: Incarnation(0x11),
        dp_rank: DpRank(1),
        tp_rank: TpRank(0),
        pp_rank: PpRank(0),
        nonce: None,
    };
    encode(Kind::Attach, &attach).expect("small")
}

fn receive(stream: &mut TcpStream) -> (Kind, Vec<u8>) {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).expect("a header");
    let header = Header::parse(header).expect("a frame");
    let mut payload = vec![0; header.payload_bytes];
    stream.read_exact(&mut payload).expect("a payload");
    (header.kind, payload)
}

fn attached(holder: &Holder) -> TcpStream {
    let mut stream = dial(holder);
    stream.write_all(&attach_frame()).expect("sent");
    let (kind, payload) = receive(&mut stream);
    assert_eq!(kind, Kind::Attached);
    let attached: Attached = decode(kind, &payload).expect("own format");
    let lengths = holder.config.region_bytes.iter();
    assert!(lengths.map(|&bytes| bytes as u64).eq(attached.region_bytes));
    stream
}

/// Whether the holder closes the connection, within the read timeout.
fn is_closed(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

/// Whatever bytes come: that connection is closed, a reader beside it reads on, and the holder
/// keeps no connection.
#[test]
fn bytes_that_are_not_the_protocol_close_their_connection_only() {
    let mut holder = Holder::start(HolderConfig {
        frame_timeout_ms: 3000,
        ..HolderConfig::default()
    });
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    let read = |id| {
        reader
            .submit(job(id, &holder.source, &run(4096)))
            .expect("taken");
        assert_eq!(wait_one(&reader).outcome, Ok(()));
    };
    read(0);
    let oversized = Header {
        kind: Kind::Fetch,
        payload_bytes: (16 << 20) - 1,
    };
    let wrong_kind = encode(Kind::Fetch, &0).expect("small");
    let not_the_map = encode(Kind::Attach, &["a", "list"]).expect("small");
    let endless = Header {
        kind: Kind::Attach,
        payload_bytes: 100,
    };
    let attach = attach_frame();
    let first: Vec<(&str, Vec<u8>)> = vec![
        ("an http client", b"GET /metrics HTTP/1.1\r\n\r\n".to_vec()),
        ("zeros", vec![0; 4096]),
        ("another version", [b'h', b'K', 9, 32, 0, 0, 0, 0].to_vec()),
        ("an unknown kind", [b'h', b'K', 1, 255, 0, 0, 0, 0].to_vec()),
        (
            "4 GiB announced",
            [b'h', b'K', 1, 32, 255, 255, 255, 255].to_vec(),
        ),
        (
            "a frame over the data plane's limit",
            oversized.to_bytes().to_vec(),
        ),
        ("a fetch before the attach", wrong_kind),
        ("a payload of another shape", not_the_map),
        ("half a header", attach[..5].to_vec()),
        ("half a payload", attach[..attach.len() - 3].to_vec()),
        ("a payload that never comes", endless.to_bytes().to_vec()),
        ("nothing", Vec::new()),
    ];
    let after_attach = [
        ("garbage after the attach", b"garbage!garbage!".to_vec()),
        ("a second attach", attach.clone()),
        (
            "half a fetch",
            encode(Kind::Fetch, &0).expect("small")[..4].to_vec(),
        ),
    ];
    // All at once, since some of them are closed only when their time is over.
    let mut open: Vec<(&str, TcpStream)> = Vec::new();
    for (name, bytes) in &first {
        let mut stream = dial(&holder);
        stream.write_all(bytes).expect("sent");
        open.push((name, stream));
    }
    for (name, bytes) in &after_attach {
        let mut stream = attached(&holder);
        stream.write_all(bytes).expect("sent");
        open.push((name, stream));
    }
    for (id, (name, stream)) in open.iter_mut().enumerate() {
        read(id as u64 + 1);
        assert!(is_closed(stream), "{name}");
    }
    read(100);
    check_exact(&buffers, &run(4096), holder.config.seed, 0);
    let left = (0..100).find_map(|_| {
        thread::sleep(Duration::from_millis(100));
        (holder.order(Order::Connections) == 1).then_some(())
    });
    assert!(left.is_some(), "only the reader's connection is left");
}

/// A reader that does not keep to the bounds by itself.
#[test]
fn a_fetch_out_of_bounds_is_refused_and_the_connection_lives() {
    let holder = Holder::start(HolderConfig::default());
    let mut stream = attached(&holder);
    let whole = SourceRun(0, 0, 1 << 20);
    let bad = [
        vec![SourceRun(0, (1 << 20) - 1, 2)],
        vec![SourceRun(2, 0, 1)],
        vec![SourceRun(u32::MAX, u64::MAX, u64::MAX)],
        vec![SourceRun(0, 1, u64::MAX)],
        vec![SourceRun(0, 0, 0)],
        vec![whole; (FETCH_BYTES_MAX >> 20) as usize + 1],
        vec![SourceRun(0, 0, 1); FETCH_RUNS_MAX + 1],
    ];
    for (id, runs) in bad.into_iter().enumerate() {
        let fetch = Fetch {
            id: id as u64,
            slot: Slot(0),
            epoch: Epoch(1),
            runs,
        };
        stream
            .write_all(&encode(Kind::Fetch, &fetch).expect("below the frame limit"))
            .expect("sent");
        let (kind, payload) = receive(&mut stream);
        assert_eq!(kind, Kind::FetchEnd, "case {id}");
        let end: FetchEnd = decode(kind, &payload).expect("own format");
        assert_eq!((end.id, end.status), (id as u64, FetchStatus::OutOfBounds));
        assert!(!end.text.is_empty());
    }
}

/// The lease ends while the holder is in the middle of a fetch, because its reader does not take
/// the bytes: exactly that fetch ends as gone after its bytes, those before it are good, those
/// behind it send none.
#[test]
fn a_lease_that_ends_inside_a_fetch_is_told_after_its_bytes() {
    const FETCHES: u64 = 20;
    let mut holder = Holder::start(HolderConfig::default());
    let mut stream = attached(&holder);
    for id in 0..FETCHES {
        let fetch = Fetch {
            id,
            slot: Slot(0),
            epoch: Epoch(1),
            runs: vec![SourceRun(0, 0, 1 << 20); 4],
        };
        stream
            .write_all(&encode(Kind::Fetch, &fetch).expect("small"))
            .expect("sent");
    }
    // Far more than the socket buffers of both ends hold, so it stands still inside a fetch.
    thread::sleep(Duration::from_millis(500));
    holder.order(Order::Bump { slot: 0, epoch: 2 });
    let mut story = Vec::new();
    for id in 0..FETCHES {
        let (mut kind, mut payload) = receive(&mut stream);
        let mut bytes = 0;
        if kind == Kind::FetchData {
            let data: FetchData = decode(kind, &payload).expect("own format");
            bytes = data.bytes;
            stream
                .read_exact(&mut vec![0; bytes as usize])
                .expect("the announced bytes");
            (kind, payload) = receive(&mut stream);
        }
        assert_eq!(kind, Kind::FetchEnd);
        let end: FetchEnd = decode(kind, &payload).expect("own format");
        assert_eq!(end.id, id);
        story.push((bytes > 0, end.status));
    }
    let good = story
        .iter()
        .take_while(|part| **part == (true, FetchStatus::Ok))
        .count();
    assert!(good > 0, "{story:?}");
    assert_eq!(story[good], (true, FetchStatus::LeaseGone), "{story:?}");
    assert!(
        story[good + 1..]
            .iter()
            .all(|part| *part == (false, FetchStatus::LeaseGone)),
        "{story:?}"
    );
}

/// A reader that asks and does not take holds up nobody else.
#[test]
fn a_reader_that_takes_nothing_delays_no_other() {
    let holder = Holder::start(HolderConfig::default());
    let mut lazy = attached(&holder);
    let fetch = Fetch {
        id: 1,
        slot: Slot(0),
        epoch: Epoch(1),
        runs: vec![SourceRun(0, 0, 1 << 20); 4],
    };
    let frame = encode(Kind::Fetch, &fetch).expect("small");
    for _ in 0..20 {
        lazy.write_all(&frame).expect("sent");
    }
    let buffers = [Buffer::new(1 << 20, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    reader
        .submit(job(1, &holder.source, &run(1 << 20)))
        .expect("taken");
    let done = wait_one(&reader);
    assert_eq!(done.outcome, Ok(()));
    // The lazy one would be given up after 30 s.
    assert!(done.elapsed < Duration::from_secs(10), "{:?}", done.elapsed);
}

#[test]
fn a_reader_too_many_is_refused_with_the_reason() {
    let holder = Holder::start(HolderConfig {
        connections_max: 1,
        ..HolderConfig::default()
    });
    let first = attached(&holder);
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    reader
        .submit(job(1, &holder.source, &run(4096)))
        .expect("taken");
    let failure = wait_one(&reader).outcome.expect_err("one is served");
    assert_eq!(failure.kind, ReadFailureKind::Refused, "{failure}");
    assert!(failure.text.contains("readers_max"), "{failure}");
    drop(first);
    let again = (2..100).find(|&id| {
        thread::sleep(Duration::from_millis(100));
        reader
            .submit(job(id, &holder.source, &run(4096)))
            .expect("taken");
        wait_one(&reader).outcome.is_ok()
    });
    assert!(again.is_some(), "served once the first has left");
}

#[test]
fn another_engine_or_rank_is_refused_by_field() {
    let holder = Holder::start(HolderConfig::default());
    let nameless = Holder::start(HolderConfig {
        nameless: true,
        ..HolderConfig::default()
    });
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    let wrong_rank = Source {
        route: route(0x11, 3),
        ..Source::clone(&holder.source)
    };
    let wrong_start = Source {
        route: route(0x99, 0),
        ..Source::clone(&holder.source)
    };
    for (id, source, kind, text) in [
        (
            1,
            Arc::new(wrong_rank),
            ReadFailureKind::Refused,
            "tp_rank is 0 here, 3 was dialled",
        ),
        (
            2,
            Arc::new(wrong_start),
            ReadFailureKind::Incarnation,
            "incarnation is 0000000000000011 here",
        ),
        (
            3,
            nameless.source.clone(),
            ReadFailureKind::Refused,
            "does not know",
        ),
    ] {
        reader.submit(job(id, &source, &run(4096))).expect("taken");
        let done = wait_one(&reader);
        assert_eq!(failure_kind(&done), kind);
        let failure = done.outcome.expect_err("refused");
        assert!(failure.text.contains(text), "{failure}");
    }
}

#[test]
fn ipv6_and_host_names_work() {
    let buffers = [Buffer::new(4096, 0)];
    for (host, seed) in [("::1", 5), ("localhost", 6)] {
        let holder = Holder::start(HolderConfig {
            host: host.into(),
            seed,
            ..HolderConfig::default()
        });
        let reader = reader(&buffers, TransportName::Tcp);
        reader
            .submit(job(1, &holder.source, &run(4096)))
            .expect("taken");
        assert_eq!(wait_one(&reader).outcome, Ok(()), "{host}");
        check_exact(&buffers, &run(4096), seed, 0);
    }
}

/// A holder that answers with these frames, whatever it is asked, and then waits.
pub(crate) fn scripted(answers: Vec<Vec<u8>>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            for answer in &answers {
                let mut asked = [0; 4096];
                // The reader hangs up in the middle of some scripts.
                if stream.read(&mut asked).is_err() || stream.write_all(answer).is_err() {
                    break;
                }
            }
            thread::spawn(move || stream.read_to_end(&mut Vec::new()));
        }
    });
    port
}

/// Whatever a holder answers: the job fails in time and nothing hangs.
#[test]
fn a_holder_that_breaks_the_protocol_fails_the_job() {
    let holder = Holder::start(HolderConfig::default());
    let region_bytes: Vec<u64> = holder.source.regions.iter().map(|r| r.bytes).collect();
    let attached = encode(
        Kind::Attached,
        &Attached {
            region_bytes,
            proof: None,
        },
    )
    .expect("small");
    let other = Attached {
        region_bytes: vec![5],
        proof: None,
    };
    let data = |id, bytes| encode(Kind::FetchData, &FetchData { id, bytes }).expect("small");
    let end = |id| {
        let end = FetchEnd {
            id,
            status: FetchStatus::Ok,
            text: String::new(),
        };
        encode(Kind::FetchEnd, &end).expect("small")
    };
    let cases = [
        ("silence", vec![], ReadFailureKind::Unreachable),
        (
            "http",
            vec![b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()],
            ReadFailureKind::Unreachable,
        ),
        (
            "4 GiB announced",
            vec![[b'h', b'K', 1, 33, 255, 255, 255, 255].to_vec()],
            ReadFailureKind::Unreachable,
        ),
        ("an end at once", vec![end(0)], ReadFailureKind::Unreachable),
        (
            "other regions",
            vec![encode(Kind::Attached, &other).expect("small")],
            ReadFailureKind::Refused,
        ),
        (
            "no bytes",
            vec![attached.clone(), end(0)],
            ReadFailureKind::PeerLost,
        ),
        (
            "bytes of another fetch",
            vec![attached.clone(), data(7, 4096)],
            ReadFailureKind::PeerLost,
        ),
        (
            "too many bytes",
            vec![attached.clone(), data(0, 4097)],
            ReadFailureKind::PeerLost,
        ),
        (
            "bytes twice",
            vec![
                attached.clone(),
                [data(0, 4096), vec![0; 4096], data(0, 4096)].concat(),
            ],
            ReadFailureKind::PeerLost,
        ),
        (
            "garbage",
            vec![attached.clone(), vec![0; 64]],
            ReadFailureKind::PeerLost,
        ),
        (
            "silence after the attach",
            vec![attached.clone()],
            ReadFailureKind::Deadline,
        ),
        (
            "half of the bytes",
            vec![attached, [data(0, 4096), vec![0; 2048]].concat()],
            ReadFailureKind::Deadline,
        ),
    ];
    for (name, answers, kind) in cases {
        // The memory behind the run is watched: nothing is written past it.
        let buffers = [Buffer::new(8192, 0)];
        let reader = reader_with(&buffers, TransportName::Tcp, |options| {
            options.connect_timeout = Duration::from_secs(2);
        });
        let source = holder.via(scripted(answers));
        let mut job = job(1, &source, &run(4096));
        job.deadline = now() + Duration::from_secs(4);
        reader.submit(job).expect("taken");
        let done = wait_one(&reader);
        let failure = done.outcome.expect_err("no holder");
        // Ids count on over reconnects, so a script for fetch 0 may fail as another.
        assert_eq!(failure.kind, kind, "{name}: {failure}");
        assert!(done.elapsed < Duration::from_secs(10), "{name}");
        assert!(
            buffers[0].copied()[4096..].iter().all(|&byte| byte == 0),
            "{name}"
        );
    }
}

fn serve(options: ServerOptions) -> Result<DataServer, ServeError> {
    let page = Arc::new(LeasePage::new(1).expect("mapped"));
    DataServer::start(register(&[]), page, options)
}

#[test]
fn each_server_takes_the_next_free_port_until_the_range_is_exhausted() {
    // A range of three that is free, below the ports that the system assigns to others.
    let start = 20_000 + u16::try_from(std::process::id() % 10_000).expect("small");
    let first = (start..32_000).find(|&port| {
        let three = [0, 1, 2].map(|more| TcpListener::bind((Ipv4Addr::LOCALHOST, port + more)));
        three.iter().all(Result::is_ok)
    });
    let first = first.expect("three free ports in a row");
    let options = ServerOptions {
        address: ListenAddress {
            port_range: Some(first..=first + 2),
            ports_needed: 4,
            ..ServerOptions::default().address
        },
        ..ServerOptions::default()
    };
    let servers: Vec<DataServer> = (0..3)
        .map(|_| serve(options.clone()).expect("a port is left"))
        .collect();
    let ports: Vec<u16> = servers
        .iter()
        .map(|server| server.endpoint().port)
        .collect();
    assert_eq!(ports, [first, first + 1, first + 2]);
    let error = serve(options.clone()).expect_err("no port is left");
    assert!(
        matches!(
            error,
            ServeError::Listen(ListenError::PortRangeExhausted { needed: 4, .. })
        ),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.contains(&format!("{first}-{}", first + 2)), "{text}");
    drop(servers);
    serve(options).expect("the ports are free again");
}

#[test]
fn addresses_that_cannot_be_served_are_refused_in_words() {
    let at = |host: &str, bind_host: Option<&str>| ServerOptions {
        address: ListenAddress {
            host: host.into(),
            bind_host: bind_host.map(Into::into),
            ..ServerOptions::default().address
        },
        ..ServerOptions::default()
    };
    for all in ["0.0.0.0", "::"] {
        let error = serve(at(all, None)).expect_err("all interfaces");
        assert!(
            matches!(error, ServeError::Listen(ListenError::Unspecified { .. })),
            "{error}"
        );
    }
    // 192.0.2.0/24 is reserved for documentation (RFC 5737): no host has it.
    let error = serve(at("192.0.2.1", None)).expect_err("not ours");
    assert!(error.to_string().contains("192.0.2.1"), "{error}");
    let told = serve(at("192.0.2.1", Some("0.0.0.0")));
    let server = told.expect("all interfaces were asked for");
    assert_eq!(server.endpoint().host, "192.0.2.1");
}
