//! Relays between a dialler and a listener of the product, for faults that belong to the network:
//! a rate, or control messages that get lost. The product's own paths stay as they are.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hetero_kv_core::wire::message::Message;
use hetero_kv_core::wire::{FrameDecoder, HEADER_BYTES, Header, Kind};

/// Most bytes moved at a time.
const CHUNK_BYTES: usize = 256 << 10;
/// A limited relay moves at most what it may in so long, so that a rate is even.
const SLICE: Duration = Duration::from_millis(5);
/// A connection that is late by less is taken for one that the host did not run, and the rate makes up
/// for that. So short a pause between two reads is made up for, too.
const LATENESS_MAX: Duration = Duration::from_millis(20);
/// Stack of a pump, which has its chunk on the heap.
const STACK_BYTES: usize = 128 << 10;

/// A rate that all connections of a rank share; unlimited at first.
#[derive(Debug, Default)]
pub(super) struct Limiter {
    /// 0: unlimited.
    bytes_per_s: AtomicU64,
    /// When the bytes granted so far have been paid for.
    paid_until: Mutex<Option<Instant>>,
}

impl Limiter {
    pub(super) fn set(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
    }

    /// Most bytes to move at once.
    fn chunk(&self) -> usize {
        match self.bytes_per_s.load(Ordering::Relaxed) {
            0 => CHUNK_BYTES,
            rate => {
                let slice = (rate as f64 * SLICE.as_secs_f64()) as usize;
                slice.clamp(1, CHUNK_BYTES)
            }
        }
    }

    /// Waits until these bytes may pass.
    fn pay(&self, bytes: usize) {
        let rate = self.bytes_per_s.load(Ordering::Relaxed);
        if rate == 0 {
            return;
        }
        let price = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let until = {
            let mut paid = self
                .paid_until
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let late = |paid: &Instant| now.saturating_duration_since(*paid) <= LATENESS_MAX;
            let until = paid.filter(late).unwrap_or(now) + price;
            *paid = Some(until);
            until
        };
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

/// Which control messages are lost.
#[derive(Debug, Default)]
pub(super) struct Losses {
    pub(super) of_all: bool,
    /// Of these decode engines.
    pub(super) of: BTreeSet<String>,
}

/// Relays what a reader is sent by the listener at `port` of this host, at the limiter's rate:
/// where to dial instead.
pub(super) fn limited(port: u16, limiter: Arc<Limiter>) -> io::Result<u16> {
    listen(move |dialler| {
        let holder = dial(port)?;
        let (up, down) = (twin(&dialler, &holder)?, twin(&holder, &dialler)?);
        let limiter = Arc::clone(&limiter);
        spawn(move || pump(up, None))?;
        spawn(move || pump(down, Some(&limiter)))
    })
}

/// Where a control relay leads, 0 while there is nobody.
#[derive(Debug)]
pub(super) struct ControlRelay {
    pub(super) port: u16,
    target: Arc<AtomicU16>,
    losses: Arc<Mutex<Losses>>,
}

impl ControlRelay {
    /// Relays the control connections of one prefill engine.
    pub(super) fn start() -> io::Result<Self> {
        let target = Arc::new(AtomicU16::new(0));
        let losses = Arc::<Mutex<Losses>>::default();
        let (to, lost) = (Arc::clone(&target), Arc::clone(&losses));
        let port = listen(move |decode| {
            let prefill = dial(to.load(Ordering::Relaxed))?;
            let (up, down) = (twin(&decode, &prefill)?, twin(&prefill, &decode)?);
            let lost = Arc::clone(&lost);
            spawn(move || lossy(up, &lost))?;
            spawn(move || pump(down, None))
        })?;
        Ok(Self {
            port,
            target,
            losses,
        })
    }

    /// The engine has (re)started.
    pub(super) fn lead_to(&self, port: u16) {
        self.target.store(port, Ordering::Relaxed);
    }

    /// What gets lost from here on.
    pub(super) fn lose(&self, change: impl FnOnce(&mut Losses)) {
        change(&mut self.losses.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// A listener for as long as the process lives.
fn listen(mut take: impl FnMut(TcpStream) -> io::Result<()> + Send + 'static) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    spawn(move || {
        for stream in listener.incoming() {
            // One that cannot be served is closed, as a broken network would do.
            let _ = stream.and_then(&mut take);
        }
    })?;
    Ok(port)
}

fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name("lab-relay".into())
        .stack_size(STACK_BYTES)
        .spawn(run)?;
    Ok(())
}

fn dial(port: u16) -> io::Result<TcpStream> {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port))
}

/// One direction of a connection.
fn twin(from: &TcpStream, to: &TcpStream) -> io::Result<(TcpStream, TcpStream)> {
    from.set_nodelay(true)?;
    to.set_nodelay(true)?;
    Ok((from.try_clone()?, to.try_clone()?))
}

fn close((from, to): &(TcpStream, TcpStream)) {
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn pump(mut ends: (TcpStream, TcpStream), limiter: Option<&Limiter>) {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let most = limiter.map_or(CHUNK_BYTES, Limiter::chunk);
        let bytes = match ends.0.read(&mut chunk[..most]) {
            Ok(0) | Err(_) => break,
            Ok(bytes) => bytes,
        };
        if let Some(limiter) = limiter {
            limiter.pay(bytes);
        }
        if ends.1.write_all(&chunk[..bytes]).is_err() {
            break;
        }
    }
    close(&ends);
}

/// Decode to prefill, frame by frame.
fn lossy(mut ends: (TcpStream, TcpStream), losses: &Mutex<Losses>) {
    let mut frames = FrameDecoder::new();
    let mut chunk = vec![0; 16 << 10];
    let mut dialler = String::new();
    loop {
        match ends.0.read(&mut chunk) {
            Ok(0) | Err(_) => break,
            Ok(bytes) => frames.push(&chunk[..bytes]),
        }
        if forward(&mut frames, &mut ends.1, &mut dialler, losses).is_err() {
            break;
        }
    }
    close(&ends);
}

fn forward(
    frames: &mut FrameDecoder,
    to: &mut TcpStream,
    dialler: &mut String,
    losses: &Mutex<Losses>,
) -> io::Result<()> {
    while let Some((kind, payload)) = frames.next_frame().map_err(io::Error::other)? {
        if kind == Kind::Hello
            && let Ok(Message::Hello(hello)) = Message::from_frame(kind, &payload)
        {
            *dialler = hello.from.engine.as_str().to_owned();
        }
        if matches!(kind, Kind::Ack | Kind::Release) {
            let losses = losses.lock().unwrap_or_else(PoisonError::into_inner);
            if losses.of_all || losses.of.contains(dialler) {
                continue;
            }
        }
        let header = Header {
            kind,
            payload_bytes: payload.len(),
        };
        let mut frame = Vec::with_capacity(HEADER_BYTES + payload.len());
        frame.extend_from_slice(&header.to_bytes());
        frame.extend_from_slice(&payload);
        to.write_all(&frame)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
