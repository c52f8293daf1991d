//! More strangers at the data port than it has places: readers get through, and the log stays
//! short.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hetero_kv_core::auth::Keys;
use hetero_kv_core::ids::{DpRank, Incarnation, PpRank, TpRank};
use hetero_kv_core::memory::Run;
use hetero_kv_core::wire::data::Attach;
use hetero_kv_core::wire::message::Proof;
use hetero_kv_core::wire::{HEADER_BYTES, Header, Kind, encode};
use hetero_kv_transport::lease_page::LeasePage;
use hetero_kv_transport::tcp::{DataServer, ServerOptions};
use hetero_kv_transport::transport::TransportName;
use tracing::{Event, Level, Metadata, Subscriber, span};

use super::buffer::{Buffer, check_exact, register};
use super::holder::{Holder, HolderConfig, engine, job, reader_with, wait_one};

const KEY: &str = "key-of-the-cluster-a";
const PLACES: usize = 8;

const RUN: [Run; 1] = [Run {
    source_region: 0,
    source_offset: 0,
    dest_region: 0,
    dest_offset: 0,
    bytes: 4096,
}];

/// Patient: no deadline ends what the strangers do here.
fn holder(keys: &str) -> Holder {
    Holder::start(HolderConfig {
        keys: keys.into(),
        connections_max: PLACES,
        frame_timeout_ms: 60_000,
        ..HolderConfig::default()
    })
}

fn dial(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).expect("listening")
}

fn attach(nonce: Option<Vec<u8>>) -> Vec<u8> {
    let attach = Attach {
        engine: engine(),
        incarnation: Incarnation(0x11),
        dp_rank: DpRank(1),
        tp_rank: TpRank(0),
        pp_rank: PpRank(0),
        nonce,
    };
    encode(Kind::Attach, &attach).expect("small")
}

/// Reads by a new reader, within a tenth of what a stranger may take.
fn is_read(holder: &Holder, keys: &str) {
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader_with(&buffers, TransportName::Tcp, |options| {
        options.keys = (!keys.is_empty()).then(|| Keys::parse(keys.as_bytes()).expect("keys"));
    });
    let begun = Instant::now();
    reader.submit(job(1, &holder.source, &RUN)).expect("taken");
    assert_eq!(wait_one(&reader).outcome, Ok(()));
    check_exact(&buffers, &RUN, 1, 0);
    assert!(begun.elapsed() < Duration::from_secs(6), "{begun:?}");
}

#[test]
fn silent_strangers_make_room_for_readers() {
    for keys in ["", KEY] {
        let holder = holder(keys);
        let port = holder.tcp_port();
        let mut strangers: Vec<TcpStream> = (0..4 * PLACES).map(|_| dial(port)).collect();
        is_read(&holder, keys);
        is_read(&holder, keys);
        // The first of them was told that it is over.
        let patience = Some(Duration::from_secs(10));
        strangers[0].set_read_timeout(patience).expect("a socket");
        assert_eq!(strangers[0].read(&mut [0]).expect("closed"), 0);
    }
}

/// Strangers that dial anew whenever they are closed, and say one byte at a time: of a greeting, or
/// behind it of a proof.
#[test]
fn slow_strangers_without_end_do_not_keep_readers_out() {
    for keys in ["", KEY] {
        let holder = holder(keys);
        let port = holder.tcp_port();
        let stop = Arc::new(AtomicBool::new(false));
        let dialled = Arc::new(AtomicUsize::new(0));
        let strangers: Vec<_> = (0..3 * PLACES)
            .map(|number| {
                let (stop, dialled) = (Arc::clone(&stop), Arc::clone(&dialled));
                let proves = number % 2 == 0 && !keys.is_empty();
                thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        dialled.fetch_add(1, Ordering::Relaxed);
                        let _ended = drip(port, proves, &stop);
                        thread::sleep(Duration::from_secs(1));
                    }
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(300));
        let deadline = Instant::now() + Duration::from_secs(60);
        // Until more than there are places have been there, and came again.
        while dialled.load(Ordering::Relaxed) <= 3 * PLACES {
            assert!(Instant::now() < deadline, "nobody makes room");
            is_read(&holder, keys);
            thread::sleep(Duration::from_millis(100));
        }
        stop.store(true, Ordering::Relaxed);
        for stranger in strangers {
            stranger.join().expect("no panic");
        }
    }
}

fn drip(port: u16, proves: bool, stop: &AtomicBool) -> std::io::Result<()> {
    let mut stream = dial(port);
    let patience = Some(Duration::from_secs(10));
    stream.set_read_timeout(patience)?;
    let bytes = match proves {
        true => {
            stream.write_all(&attach(Some(vec![1; 32])))?;
            let mut header = [0; HEADER_BYTES];
            stream.read_exact(&mut header)?;
            let challenge = Header::parse(header).expect("a frame");
            stream.read_exact(&mut vec![0; challenge.payload_bytes])?;
            encode(Kind::AttachProof, &Proof { proof: vec![0; 32] }).expect("small")
        }
        false => attach(None),
    };
    // Never the whole of it.
    for byte in &bytes[..bytes.len() - 1] {
        if stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        stream.write_all(&[*byte])?;
        thread::sleep(Duration::from_millis(50));
    }
    stream.read_exact(&mut [0])
}

/// Counts the warnings and errors of this process: of one test, as `cargo nextest` runs them.
struct Counting(Arc<AtomicUsize>);

impl Subscriber for Counting {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn strangers_do_not_fill_the_log() {
    let warnings = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::set_global_default(Counting(Arc::clone(&warnings))).expect("the first");
    let page = Arc::new(LeasePage::new(1).expect("mapped"));
    let options = ServerOptions {
        connections_max: PLACES,
        ..ServerOptions::default()
    };
    let server = DataServer::start(register(&[]), page, options).expect("listening");
    let port = server.endpoint().port;
    let talk = |number: usize| {
        let mut stream = dial(port);
        let greeting = attach(None);
        let said: &[u8] = match number % 3 {
            0 => b"GET / HTTP/1.1\r\n\r\n",
            // Refused: the server does not know which rank it is.
            1 => &greeting,
            _ => &greeting[..greeting.len() - 1],
        };
        // It makes room for others, silently, in the last case.
        let _ = stream.write_all(said);
        stream
    };
    let strangers: Vec<TcpStream> = (0..300).map(talk).collect();
    drop(strangers);
    let deadline = Instant::now() + Duration::from_secs(20);
    while server.stats().accepted < 300 || server.stats().connections > 0 {
        assert!(Instant::now() < deadline, "{:?}", server.stats());
        thread::sleep(Duration::from_millis(10));
    }
    let stats = server.stats();
    assert!(stats.refused + stats.broken >= 200, "{stats:?}");
    assert_eq!(warnings.load(Ordering::Relaxed), 8);
}

/// Each load asks a holder that has gone, and each is told why; the log is told now and then.
#[test]
fn a_holder_that_has_gone_does_not_fill_the_log() {
    let warnings = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::set_global_default(Counting(Arc::clone(&warnings))).expect("the first");
    let holder = holder("");
    let source = Arc::clone(&holder.source);
    drop(holder);
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader_with(&buffers, TransportName::Tcp, |_| {});
    for id in 0..40 {
        reader.submit(job(id, &source, &RUN)).expect("taken");
        wait_one(&reader).outcome.expect_err("nobody is there");
    }
    assert_eq!(warnings.load(Ordering::Relaxed), 8);
}
