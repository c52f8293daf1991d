mod crowd;
mod keys;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hetero_kv_core::auth::Keys;
use hetero_kv_core::consumer::{Consumer, PeerAddress};
use hetero_kv_core::failure::FailureReason;
use hetero_kv_core::ids::{BlockId, Incarnation};
use hetero_kv_core::producer::Producer;
use hetero_kv_core::step::FailOrder;
use hetero_kv_core::wire::message::{Accept, Hello, Layout, Message, RejectCode};
use hetero_kv_core::wire::params::TransferParams;
use hetero_kv_core::wire::{FrameDecoder, WIRE_VERSION};

use rustix::net::sockopt;

use super::event_loop::{Key, Loop, Ready};
use super::{ControlLimits, ControlPlane, SharedDesk};
use crate::clock;
use crate::net::listen::listen_on;
use crate::testing::{
    PATIENCE, address, card, consumer_options, engine, fields, heads, identity, lease_times, prompt,
};
use crate::waker::Waker;

const QUICK: ControlLimits = ControlLimits {
    inbound_max: 1024,
    frame_timeout: Duration::from_millis(400),
};

struct Holder {
    _control: ControlPlane,
    at: SocketAddr,
}

fn holder(limits: ControlLimits) -> Holder {
    holder_with(limits, None)
}

fn holder_with(limits: ControlLimits, keys: Option<Keys>) -> Holder {
    let listener = listen_on(&address("127.0.0.1")).expect("a free port");
    let at = listener.local_addr().expect("bound");
    let desk = Arc::new(SharedDesk::default());
    let producer = Producer::new(identity("p", 7), fields(), vec![card()], lease_times(), 8);
    desk.lock().producer = Some(producer.with_keys(keys));
    let control = ControlPlane::start(desk, Some(listener.into()), limits).expect("a thread");
    Holder {
        _control: control,
        at,
    }
}

/// A peer that says what the test tells it to.
struct Scripted {
    stream: TcpStream,
    decoder: FrameDecoder,
}

impl Scripted {
    fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        Self {
            stream,
            decoder: FrameDecoder::new(),
        }
    }

    fn dial(holder: &Holder) -> Self {
        Self::new(TcpStream::connect(holder.at).expect("listening"))
    }

    fn accepted(holder: &Holder) -> Self {
        let mut peer = Self::dial(holder);
        peer.say(&hello(7));
        assert!(matches!(peer.hear(), Some(Message::Accept(_))));
        peer
    }

    fn say(&mut self, message: &Message) {
        self.say_bytes(&frame(message));
    }

    fn say_bytes(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Ok(()) => {}
            Err(error) if is_end(&error) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// The next message; `None` at the connection's end.
    fn hear(&mut self) -> Option<Message> {
        let mut buffer = [0; 4096];
        loop {
            let next = self.decoder.next_frame().expect("our own frames");
            if let Some((kind, payload)) = next {
                return Some(Message::from_frame(kind, &payload).expect("our own messages"));
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.decoder.push(&buffer[..count]),
                Err(error) if is_end(&error) => return None,
                Err(error) => panic!("neither a message nor the end: {error}"),
            }
        }
    }

    fn is_answered(&mut self) -> bool {
        self.say(&Message::Ping);
        self.hear() == Some(Message::Pong)
    }
}

fn is_end(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted
    )
}

fn frame(message: &Message) -> Vec<u8> {
    message.to_frame().expect("small")
}

/// Of another start each time: one start has one connection.
fn hello(expect_incarnation: u64) -> Message {
    static STARTS: AtomicU64 = AtomicU64::new(9);
    Message::Hello(Box::new(Hello {
        versions: (WIRE_VERSION, WIRE_VERSION),
        from: identity("d", STARTS.fetch_add(1, Ordering::Relaxed)),
        expect_engine: engine("p"),
        expect_incarnation: Incarnation(expect_incarnation),
        any_engine: false,
        compat_digest: fields().digest().to_vec(),
        nonce: None,
    }))
}

#[test]
fn an_accepted_peer_gets_the_layout_and_may_be_silent() {
    let holder = holder(QUICK);
    let mut peer = Scripted::accepted(&holder);
    peer.say(&Message::Layout(Box::new(Layout {
        from: identity("d", 9),
        workers: Vec::new(),
    })));
    let Some(Message::Layout(layout)) = peer.hear() else {
        panic!("no layout");
    };
    assert_eq!(layout.workers, [card()]);
    thread::sleep(QUICK.frame_timeout * 2);
    assert!(peer.is_answered());
}

#[test]
fn a_refused_peer_hears_why_before_the_end() {
    let holder = holder(QUICK);
    let mut peer = Scripted::dial(&holder);
    peer.say(&hello(8));
    let Some(Message::Reject(reject)) = peer.hear() else {
        panic!("not refused");
    };
    assert_eq!(reject.code, RejectCode::WrongIncarnation);
    assert_eq!(peer.hear(), None);
}

#[test]
fn broken_bytes_end_their_connection_only() {
    let holder = holder(ControlLimits::default());
    let mut other = Scripted::accepted(&holder);
    let mut long = frame(&hello(7));
    long.extend(vec![b'x'; 100]);
    let cases: [(&str, &[u8]); 5] = [
        ("an http client", b"GET / HTTP/1.1\r\n\r\n"),
        ("4 GiB announced", b"hK\x01\x01\xff\xff\xff\xff"),
        ("a data plane frame", b"hK\x01\x22\x01\0\0\0\x80"),
        ("push mode", b"hK\x01\x40\x01\0\0\0\x80"),
        ("garbage behind a good hello", &long),
    ];
    for (name, bytes) in cases {
        let mut peer = Scripted::dial(&holder);
        peer.say_bytes(bytes);
        // The good hello may still have been answered.
        while peer.hear().is_some() {}
        assert!(other.is_answered(), "{name}");
    }
}

/// Neither half a frame nor whole ones that do not say who it is buy a stranger more time.
#[test]
fn strangers_have_a_deadline() {
    let holder = holder(QUICK);
    let hello = frame(&hello(7));
    for (name, bytes) in [
        ("nothing", Vec::new()),
        ("half a header", hello[..5].to_vec()),
        ("half a payload", hello[..hello.len() - 1].to_vec()),
        ("a ping", frame(&Message::Ping)),
    ] {
        let started = Instant::now();
        let mut peer = Scripted::dial(&holder);
        peer.say_bytes(&bytes);
        while peer.hear().is_some() {}
        assert!(started.elapsed() >= QUICK.frame_timeout, "{name}: too soon");
    }
    let started = Instant::now();
    let mut slow = Scripted::dial(&holder);
    while started.elapsed() < PATIENCE {
        slow.say_bytes(&frame(&Message::Ping));
        slow.stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .expect("a socket");
        match slow.stream.read(&mut [0; 64]) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if is_end(&error) => break,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }
    assert!(started.elapsed() < PATIENCE, "a stranger that pings stays");
}

#[test]
fn an_accepted_peer_has_to_finish_the_frames_it_begins() {
    let holder = holder(QUICK);
    let mut other = Scripted::accepted(&holder);
    let mut peer = Scripted::accepted(&holder);
    let ping = frame(&Message::Ping);
    peer.say_bytes(&ping);
    peer.say_bytes(&ping[..4]);
    assert_eq!(peer.hear(), Some(Message::Pong));
    let started = Instant::now();
    assert_eq!(peer.hear(), None);
    assert!(started.elapsed() < PATIENCE / 2);
    assert!(other.is_answered());
}

#[test]
fn a_stranger_may_not_say_much() {
    let holder = holder(ControlLimits::default());
    let mut peer = Scripted::dial(&holder);
    let pings = frame(&Message::Ping).repeat(1000);
    let mut sent = 0;
    while sent < 1 << 20 && peer.stream.write_all(&pings).is_ok() {
        sent += pings.len();
    }
    while peer.hear().is_some() {}
}

#[test]
fn strangers_make_room_and_accepted_peers_do_not() {
    let holder = holder(ControlLimits {
        inbound_max: 3,
        frame_timeout: PATIENCE * 2,
    });
    let mut kept = vec![Scripted::accepted(&holder)];
    let mut strangers: Vec<Scripted> = (0..5).map(|_| Scripted::dial(&holder)).collect();
    for stranger in &mut strangers[..3] {
        assert_eq!(stranger.hear(), None, "the oldest go first");
    }
    kept.push(Scripted::accepted(&holder));
    kept.push(Scripted::accepted(&holder));
    for stranger in &mut strangers[3..] {
        assert_eq!(stranger.hear(), None);
    }
    let mut late = Scripted::dial(&holder);
    assert_eq!(late.hear(), None, "no place is left");
    for peer in &mut kept {
        assert!(peer.is_answered());
    }
    // A place that becomes free is given out again.
    drop(kept.pop());
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut next = Scripted::dial(&holder);
        next.say(&hello(7));
        if matches!(next.hear(), Some(Message::Accept(_))) {
            break;
        }
        assert!(Instant::now() < deadline);
    }
}

/// It sends without end and takes no answer: its own connection fills up, and ends there.
#[test]
fn a_peer_that_never_stops_does_not_hold_up_others() {
    let holder = holder(ControlLimits::default());
    let mut other = Scripted::accepted(&holder);
    let flood = Scripted::accepted(&holder);
    let pings = frame(&Message::Ping).repeat(7000);
    let flooding = thread::spawn(move || {
        let mut stream = flood.stream;
        let until = Instant::now() + Duration::from_millis(700);
        while Instant::now() < until && stream.write_all(&pings).is_ok() {}
    });
    let mut answered = 0;
    while !flooding.is_finished() {
        assert!(other.is_answered());
        answered += 1;
    }
    assert!(answered > 1);
    flooding.join().expect("no panic");
    assert!(other.is_answered());
}

#[test]
fn the_end_is_announced() {
    let holder = holder(QUICK);
    let mut peer = Scripted::accepted(&holder);
    drop(holder);
    assert_eq!(peer.hear(), Some(Message::Bye));
    assert_eq!(peer.hear(), None);
}

/// A loop whose turns the test takes itself.
fn by_hand(desk: SharedDesk, listener: Option<TcpListener>) -> Loop {
    let waker = Arc::new(Waker::new().expect("a descriptor"));
    Loop::new(
        Arc::new(desk),
        listener.map(Into::into),
        QUICK,
        waker,
        Arc::default(),
    )
}

#[test]
fn a_closing_peer_that_sends_and_takes_nothing_costs_no_cpu_and_has_a_deadline() {
    let listener = listen_on(&address("127.0.0.1")).expect("a free port");
    let at = listener.local_addr().expect("bound");
    let mut control = by_hand(SharedDesk::default(), Some(listener));
    let mut peer = Scripted::new(TcpStream::connect(at).expect("listening"));
    assert_eq!(control.sleep(Some(PATIENCE)).len(), 1);
    control.accept();
    let (id, connection) = control.inbound.iter_mut().next().expect("accepted");
    let key = Key::Inbound(*id);
    assert!(sockopt::socket_keepalive(&connection.stream).expect("a socket"));
    connection.accept_stranger();
    let layout = Message::Layout(Box::new(Layout {
        from: identity("p", 7),
        workers: vec![card(); 64],
    }));
    while !connection.wants_write() {
        connection.push(&layout).expect("below the limit");
        connection.flush().expect("connected");
    }
    peer.say(&Message::Ping);
    assert!(
        matches!(control.sleep(Some(PATIENCE)).as_slice(), [Ready::Connection(k)] if *k == key),
        "an open connection is read"
    );
    let now = clock::now();
    control.connection(key).expect("open").close_when_sent(now);
    assert!(
        control.sleep(Some(Duration::from_millis(100))).is_empty(),
        "its unread bytes are nothing to do"
    );
    control.drop_overdue(now + QUICK.frame_timeout / 2);
    assert_eq!(control.inbound.len(), 1);
    control.drop_overdue(now + QUICK.frame_timeout);
    assert!(control.inbound.is_empty());
}

// === the dialling side ===

/// Two ends of a connection.
fn pair(listener: &TcpListener) -> (TcpStream, Scripted) {
    let at = listener.local_addr().expect("bound");
    let ours = TcpStream::connect(at).expect("listening");
    ours.set_nonblocking(true).expect("a socket");
    (ours, accept_one(listener))
}

#[test]
fn a_dial_that_was_given_up_neither_replaces_nor_breaks_the_next_one() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let desk = SharedDesk::default();
    let mut consumer = Consumer::new(identity("d", 9), fields(), heads(), consumer_options());
    let address = PeerAddress {
        host: "127.0.0.1".into(),
        port: 1,
        engine: engine("p"),
        incarnation: Incarnation(7),
    };
    let id = consumer
        .connect(clock::now(), address)
        .expect("an empty table");
    // The dial is made by hand below.
    while consumer.poll_output().is_some() {}
    desk.lock().consumer = Some(consumer);
    let mut control = by_hand(desk, None);
    control.dialing.insert(id, 2);
    let (stale, mut stale_end) = pair(&listener);
    let (fresh, mut fresh_end) = pair(&listener);
    let results = control.dialed.clone();
    let give = |number, result| results.send((id, number, result)).expect("open");
    give(0, Err(ErrorKind::TimedOut.into()));
    give(2, Ok(fresh.into()));
    give(1, Ok(stale.into()));
    give(1, Err(ErrorKind::TimedOut.into()));
    control.turn();
    assert_eq!(stale_end.hear(), None);
    assert!(matches!(fresh_end.hear(), Some(Message::Hello(_))));
    fresh_end.say(&Message::Accept(Accept {
        version: WIRE_VERSION,
        from: identity("p", 7),
        proof: None,
    }));
    for ready in control.sleep(Some(PATIENCE)) {
        control.serve(ready);
    }
    control.turn();
    assert!(
        matches!(fresh_end.hear(), Some(Message::Layout(_))),
        "the pair goes on"
    );
}

struct Reader {
    desk: Arc<SharedDesk>,
    control: ControlPlane,
}

fn reader() -> Reader {
    reader_with(None)
}

fn reader_with(keys: Option<Keys>) -> Reader {
    let desk = Arc::new(SharedDesk::default());
    let consumer = Consumer::new(identity("d", 9), fields(), heads(), consumer_options());
    desk.lock().consumer = Some(consumer.with_keys(keys));
    let control =
        ControlPlane::start(Arc::clone(&desk), None, ControlLimits::default()).expect("a thread");
    Reader { desk, control }
}

impl Reader {
    /// A request for a prompt that an engine at this address is said to hold.
    fn request(&self, host: &str, port: u16) {
        let params = serde_json::json!({
            "do_remote_prefill": true,
            "hetero_version": 1,
            "transfer_id": "ab".repeat(16),
            "remote_engine_id": "p",
            "remote_incarnation": format!("{:016x}", 7),
            "remote_host": host,
            "remote_port": port,
            "remote_dp_rank": 0,
            "remote_request_id": "r",
            "tp_size": 1,
            "pp_size": 1,
            "remote_block_ids": [[1, 2]],
            "remote_num_tokens": 8,
            "lease_epoch": 1,
            "prompt_digest": prompt().to_string(),
        });
        {
            let mut desk = self.desk.lock();
            let consumer = desk.consumer.as_mut().expect("made with one");
            let params = TransferParams::parse(&params.to_string());
            assert!(matches!(params, Ok(TransferParams::Decode(_))));
            consumer.handle_new_request(clock::now(), "r", params, prompt(), 8);
            assert_eq!(consumer.matched_tokens("r", 0), 7);
            consumer.handle_allocated(clock::now(), "r", &[BlockId(0), BlockId(1)], 7);
        }
        self.control.wake();
    }

    fn failure(&self) -> FailOrder {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut desk = self.desk.lock();
            let consumer = desk.consumer.as_mut().expect("made with one");
            if let Some(fail) = consumer.take_orders(clock::now()).fails.pop() {
                return fail;
            }
            drop(desk);
            assert!(Instant::now() < deadline, "the request never fails");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

fn accept_one(listener: &TcpListener) -> Scripted {
    Scripted::new(listener.accept().expect("dialled").0)
}

#[test]
fn a_wake_that_never_comes_costs_a_second_at_most() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let reader = reader();
    // By now the thread sleeps, with nothing due.
    thread::sleep(Duration::from_millis(200));
    let address = PeerAddress {
        host: "127.0.0.1".into(),
        port: listener.local_addr().expect("bound").port(),
        engine: engine("p"),
        incarnation: Incarnation(7),
    };
    let mut desk = reader.desk.lock();
    let consumer = desk.consumer.as_mut().expect("made with one");
    consumer.connect(clock::now(), address).expect("room");
    drop(desk);
    listener.set_nonblocking(true).expect("a socket");
    let until = Instant::now() + PATIENCE;
    while listener.accept().is_err() {
        assert!(Instant::now() < until, "it still sleeps");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_failed_dial_names_the_address_and_the_reason() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = free.local_addr().expect("bound").port();
    drop(free);
    for (host, word) in [("127.0.0.1", "refused"), ("host.invalid", "host.invalid")] {
        let reader = reader();
        reader.request(host, port);
        let fail = reader.failure();
        assert_eq!(fail.failure.reason, FailureReason::Unreachable);
        let text = fail.failure.text;
        assert!(text.contains(&format!("{host}:{port}")), "{text}");
        assert!(text.contains(word), "{text}");
        assert_eq!(fail.dest_blocks, [BlockId(0), BlockId(1)]);
    }
}

#[test]
fn ipv6_is_dialled_without_brackets() {
    let listener = TcpListener::bind("[::1]:0").expect("IPv6 loopback");
    let port = listener.local_addr().expect("bound").port();
    let reader = reader();
    reader.request("::1", port);
    let mut peer = accept_one(&listener);
    assert!(matches!(peer.hear(), Some(Message::Hello(_))));
}

#[test]
fn a_goodbye_a_close_and_garbage_lose_the_peer() {
    for (said, word) in [
        (Some(frame(&Message::Bye)), "going down"),
        (None, "closed by the peer"),
        (Some(b"SSH-2.0-x\r\n".to_vec()), "bad magic"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let reader = reader();
        reader.request("127.0.0.1", port);
        let mut peer = accept_one(&listener);
        assert!(matches!(peer.hear(), Some(Message::Hello(_))));
        if let Some(said) = said {
            peer.say_bytes(&said);
        } else {
            drop(peer);
        }
        let failure = reader.failure().failure;
        assert_eq!(failure.reason, FailureReason::PeerLost, "{failure}");
        assert!(failure.text.contains(word), "{failure}");
    }
}

#[test]
fn a_pair_is_made_before_any_request_needs_it() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = PeerAddress {
        host: "127.0.0.1".into(),
        port: listener.local_addr().expect("bound").port(),
        engine: engine("p"),
        incarnation: Incarnation(7),
    };
    let reader = reader();
    {
        let mut desk = reader.desk.lock();
        let consumer = desk.consumer.as_mut().expect("made with one");
        consumer
            .connect(clock::now(), address)
            .expect("an empty table");
    }
    reader.control.wake();
    let mut peer = accept_one(&listener);
    let Some(Message::Hello(hello)) = peer.hear() else {
        panic!("no hello");
    };
    assert_eq!(hello.expect_engine, engine("p"));
    peer.say(&Message::Accept(Accept {
        version: WIRE_VERSION,
        from: identity("p", 7),
        proof: None,
    }));
    assert!(matches!(peer.hear(), Some(Message::Layout(_))));
    peer.say(&Message::Layout(Box::new(Layout {
        from: identity("p", 7),
        workers: vec![card()],
    })));
    // Paired: a claim comes over the same connection.
    reader.request("127.0.0.1", listener.local_addr().expect("bound").port());
    assert!(matches!(peer.hear(), Some(Message::Claim(_))));
}
