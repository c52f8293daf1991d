use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hetero_kv_core::ids::TransferId;
use hetero_kv_core::wire::message::{Message, Release};
use hetero_kv_core::wire::{FrameDecoder, Kind};

use super::{ControlRelay, LATENESS_MAX, Limiter, limited};

const PATIENCE: Duration = Duration::from_secs(20);

fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = listener.local_addr().expect("bound").port();
    (listener, port)
}

fn dial(port: u16) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("somebody listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("not zero");
    stream
}

/// 400 kB at 1 MB/s cannot take less than 0.4 s, whatever else the machine does.
#[test]
fn a_rate_holds_over_all_connections_and_bytes_stay_in_order() {
    let (holder, port) = listener();
    let sent: Vec<u8> = (0..200_000_u32).map(|at| (at % 251) as u8).collect();
    let payload = sent.clone();
    thread::spawn(move || {
        for stream in holder.incoming() {
            let payload = payload.clone();
            thread::spawn(move || stream.expect("accepted").write_all(&payload));
        }
    });
    let limiter = Arc::new(Limiter::default());
    let relay = limited(port, Arc::clone(&limiter)).expect("a port");
    limiter.set(1_000_000);
    let begun = Instant::now();
    let readers: Vec<_> = (0..2)
        .map(|_| {
            thread::spawn(move || {
                let mut got = Vec::new();
                dial(relay).read_to_end(&mut got).expect("to the end");
                got
            })
        })
        .collect();
    for reader in readers {
        assert!(reader.join().expect("no panic") == sent);
    }
    assert!(
        begun.elapsed() >= Duration::from_millis(390),
        "{:?}",
        begun.elapsed()
    );
}

/// A host that does not run a connection for a moment takes nothing of its rate, and one that was idle
/// has saved nothing up.
#[test]
fn lateness_is_made_up_for_and_idleness_is_not() {
    const PIECES: u32 = 10;
    let pause_and_pay = |pause: Duration| {
        let limiter = Limiter::default();
        limiter.set(1_000_000);
        limiter.pay(20_000);
        let begun = Instant::now();
        for _ in 0..PIECES {
            thread::sleep(pause);
            limiter.pay(20_000);
        }
        begun.elapsed()
    };
    // 20 ms each; a pause is part of them.
    let mut quickest = Duration::MAX;
    for _ in 0..10 {
        let late = pause_and_pay(Duration::from_millis(10));
        assert!(late >= Duration::from_millis(199), "{late:?}");
        quickest = quickest.min(late);
        // The host may stand still for longer than that, but not each time.
        if quickest < Duration::from_millis(260) {
            break;
        }
    }
    assert!(quickest < Duration::from_millis(260), "{quickest:?}");
    // Idle, each piece takes its 20 ms after the pause.
    let idle = pause_and_pay(LATENESS_MAX + Duration::from_millis(5));
    assert!(
        idle >= (LATENESS_MAX + Duration::from_millis(24)) * PIECES,
        "{idle:?}"
    );
}

#[test]
fn acknowledgements_are_lost_and_nothing_else() {
    let (prefill, port) = listener();
    let relay = ControlRelay::start().expect("a port");
    relay.lead_to(port);
    let mut decode = dial(relay.port);
    let (mut accepted, _) = prefill.accept().expect("the relay dials");
    accepted.set_read_timeout(Some(PATIENCE)).expect("not zero");
    let release = Message::Release(Release {
        transfer_id: TransferId([3; 16]),
        number: None,
    });
    let mut say = |message: &Message| {
        let frame = message.to_frame().expect("small");
        decode.write_all(&frame).expect("taken");
    };
    let mut frames = FrameDecoder::new();
    let mut hear = || loop {
        if let Some((kind, _)) = frames.next_frame().expect("frames") {
            return kind;
        }
        let mut chunk = [0; 256];
        let bytes = accepted.read(&mut chunk).expect("in time");
        assert!(bytes > 0, "closed");
        frames.push(&chunk[..bytes]);
    };
    say(&release);
    assert_eq!(hear(), Kind::Release);
    relay.lose(|losses| losses.of_all = true);
    say(&release);
    say(&Message::Ping);
    assert_eq!(hear(), Kind::Ping, "the release before it is lost");
}
