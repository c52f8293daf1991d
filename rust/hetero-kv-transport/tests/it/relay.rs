//! A network in between that tests can slow down, stop and cut.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

#[derive(Default)]
struct Terms {
    /// Bytes per second in each direction; 0: as fast as it goes.
    rate: AtomicU64,
    paused: AtomicBool,
    /// Bytes that went from the holder to the reader.
    bytes: AtomicU64,
    /// Cut each connection after so many bytes to the reader, once; 0: never.
    cut_after: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
    ended: AtomicBool,
}

/// Passes connections on to a port of this host.
pub(crate) struct Relay {
    pub(crate) port: u16,
    terms: Arc<Terms>,
}

impl Relay {
    pub(crate) fn start(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let terms = Arc::new(Terms::default());
        let shared = Arc::clone(&terms);
        thread::spawn(move || {
            for reader in listener.incoming() {
                if shared.ended.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(reader), Ok(holder)) = (reader, TcpStream::connect(("127.0.0.1", target)))
                else {
                    continue;
                };
                let mut open = shared.open.lock().expect("no panic under the lock");
                for stream in [&reader, &holder] {
                    stream.set_nodelay(true).expect("a socket");
                    open.push(stream.try_clone().expect("a descriptor"));
                }
                drop(open);
                let clone = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
                let (up, down) = (Arc::clone(&shared), Arc::clone(&shared));
                let (from, to) = (clone(&reader), clone(&holder));
                thread::spawn(move || pass(from, to, &up, false));
                thread::spawn(move || pass(holder, reader, &down, true));
            }
        });
        Self { port, terms }
    }

    pub(crate) fn set_rate(&self, bytes_per_s: u64) {
        self.terms.rate.store(bytes_per_s, Ordering::Relaxed);
    }

    pub(crate) fn pause(&self, paused: bool) {
        self.terms.paused.store(paused, Ordering::Relaxed);
    }

    pub(crate) fn cut_after(&self, bytes: u64) {
        self.terms.cut_after.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.terms.bytes.load(Ordering::Relaxed)
    }

    /// Ends every connection that is open.
    pub(crate) fn cut(&self) {
        for stream in self.terms.open.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.terms.ended.store(true, Ordering::Relaxed);
        self.cut();
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, terms: &Terms, to_reader: bool) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        while terms.paused.load(Ordering::Relaxed) && !terms.ended.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
        let rate = terms.rate.load(Ordering::Relaxed);
        let slice = if rate == 0 { buffer.len() } else { 4096 };
        let Ok(bytes) = from.read(&mut buffer[..slice]) else {
            break;
        };
        if bytes == 0 || to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
        if to_reader {
            let passed = terms.bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
            let cut_after = terms.cut_after.load(Ordering::Relaxed);
            if cut_after > 0 && passed >= cut_after {
                terms.cut_after.store(0, Ordering::Relaxed);
                break;
            }
        }
        if let Some(nanos) = (bytes as u64 * 1_000_000_000).checked_div(rate) {
            thread::sleep(Duration::from_nanos(nanos));
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
