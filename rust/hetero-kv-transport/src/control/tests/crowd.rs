//! More strangers at the control port than it has places.

use std::sync::atomic::AtomicBool;

use super::keys::{A, keyed_hello, keys, proof};
use super::*;

/// Strangers that dial anew whenever they are closed, and say one byte at a time: of a greeting, or
/// behind it of a proof.
#[test]
fn slow_strangers_without_end_do_not_keep_peers_out() {
    let limits = ControlLimits {
        inbound_max: 8,
        frame_timeout: PATIENCE * 3,
    };
    let holder = holder_with(limits, keys(A));
    let stop = Arc::new(AtomicBool::new(false));
    let dialled = Arc::new(AtomicU64::new(0));
    let strangers: Vec<_> = (0..24)
        .map(|number| {
            let (stop, dialled) = (Arc::clone(&stop), Arc::clone(&dialled));
            let at = holder.at;
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    dialled.fetch_add(1, Ordering::Relaxed);
                    drip(at, number % 2 == 0, &stop);
                    thread::sleep(Duration::from_secs(1));
                }
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(300));
    let deadline = Instant::now() + PATIENCE * 3;
    // Until more than there are places have been there, and came again.
    while dialled.load(Ordering::Relaxed) <= 24 {
        assert!(Instant::now() < deadline, "nobody makes room");
        thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        let reader = reader_with(keys(A));
        reader.request("127.0.0.1", holder.at.port());
        // The holder has no lease of that id: a pair that is made ends with that.
        let failure = reader.failure().failure;
        assert_eq!(failure.reason, FailureReason::LeaseGone, "{failure}");
        assert!(begun.elapsed() < PATIENCE / 2);
    }
    stop.store(true, Ordering::Relaxed);
    for stranger in strangers {
        stranger.join().expect("no panic");
    }
}

fn drip(at: SocketAddr, proves: bool, stop: &AtomicBool) {
    let mut peer = Scripted::new(TcpStream::connect(at).expect("listening"));
    let hello = keyed_hello();
    let bytes = match proves {
        true => {
            peer.say(&Message::Hello(Box::new(hello.clone())));
            let Some(Message::Challenge(challenge)) = peer.hear() else {
                return;
            };
            let listener = hetero_kv_core::auth::Nonce::parse(&challenge.nonce).expect("32 bytes");
            frame(&proof(&hello, listener, "a-key-of-somebody-else"))
        }
        false => frame(&Message::Hello(Box::new(hello))),
    };
    // Never the whole of it.
    for byte in &bytes[..bytes.len() - 1] {
        if stop.load(Ordering::Relaxed) || peer.stream.write_all(&[*byte]).is_err() {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
}
