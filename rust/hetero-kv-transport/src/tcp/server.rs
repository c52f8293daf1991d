//! The holding end: a listener, and a thread for each reader that sleeps while nothing is asked.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hetero_kv_core::auth::Keys;
use hetero_kv_core::ids::{PpRank, TpRank};
use hetero_kv_core::plan::Owner;
use hetero_kv_core::wire::card::TcpEndpoint;
use rustix::event::PollFlags;

use super::places::Places;
use super::serve;
use super::socket;
use crate::clock;
use crate::lease_page::LeasePage;
use crate::lines::{Cause, Lines};
use crate::memory::LocalMemory;
use crate::net::listen::{ListenAddress, ListenError, listen_on};
use crate::verbs;
use crate::waker::Waker;

/// Pause after the system had no descriptor or memory for a new connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Which rank a server serves. Readers that expect another one are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderPlace {
    /// The engine and its start.
    pub owner: Owner,
    /// Tensor parallel rank.
    pub tp_rank: TpRank,
    /// Pipeline rank.
    pub pp_rank: PpRank,
}

/// How a server listens and what it allows.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where; announced to readers.
    pub address: ListenAddress,
    /// Most readers served at once. Beyond it the connection that has not been taken as a reader's
    /// for the longest makes room for another.
    pub connections_max: usize,
    /// Longest time from connect to the reader's first frame, its proof included where keys are
    /// set, and for each begun frame to be complete.
    pub frame_timeout: Duration,
    /// Longest time in which a reader takes none of the bytes it asked for.
    pub stall_timeout: Duration,
    /// What readers have to prove, and this holder to them.
    pub keys: Option<Keys>,
    /// The device whose queue pairs are made for readers that ask for them.
    pub verbs: Option<Arc<verbs::Node>>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            address: ListenAddress {
                host: "127.0.0.1".into(),
                bind_host: None,
                port_range: None,
                ports_needed: 1,
            },
            connections_max: 256,
            frame_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            keys: None,
            verbs: None,
        }
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Its address or ports.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No thread or descriptor is left.
    #[error("cannot start the data listener: {0}")]
    Start(io::Error),
}

/// What a server has done, and serves at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStats {
    /// Readers served at the moment.
    pub connections: usize,
    /// Connections taken since the start, refused ones included.
    pub accepted: u64,
    /// Connections refused with a reason.
    pub refused: u64,
    /// Connections closed because of bytes that are not the protocol, or that came too slowly.
    pub broken: u64,
    /// Fetches answered, of any outcome.
    pub fetches: u64,
    /// Fetches that ended with a lease gone.
    pub leases_gone: u64,
    /// KV bytes handed to the kernel.
    pub sent_bytes: u64,
    /// Readers for whom queue pairs were made.
    pub verbs_readers: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) accepted: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) broken: AtomicU64,
    pub(super) fetches: AtomicU64,
    pub(super) leases_gone: AtomicU64,
    pub(super) sent_bytes: AtomicU64,
    pub(super) verbs_readers: AtomicU64,
}

/// What the listener and the connections share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) memory: Arc<LocalMemory>,
    pub(super) page: Arc<LeasePage>,
    pub(super) place: RwLock<Option<HolderPlace>>,
    /// Set once, never cleared: ends every thread.
    pub(super) stop: Waker,
    pub(super) counters: Counters,
    pub(super) options: ServerOptions,
    /// Lines of the log that peers may still cause.
    lines: Mutex<Lines>,
    places: Arc<Places>,
}

impl Shared {
    /// How many lines of `cause` were left out since its last one, where one is due.
    pub(super) fn line_due(&self, cause: Cause) -> Option<u64> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.due(cause, clock::now())
    }
}

/// The data listener of one rank. Dropping it ends every connection.
#[derive(Debug)]
pub struct DataServer {
    shared: Arc<Shared>,
    endpoint: TcpEndpoint,
    listener: Mutex<Option<JoinHandle<()>>>,
    pid: u32,
}

impl DataServer {
    /// Binds, listens and starts to take readers. Until [`Self::serve_as`] has said which rank
    /// this is, readers are told to try again.
    pub fn start(
        memory: Arc<LocalMemory>,
        page: Arc<LeasePage>,
        options: ServerOptions,
    ) -> Result<Self, ServeError> {
        let listener = listen_on(&options.address)?;
        let port = listener.local_addr().map_err(ServeError::Start)?.port();
        let endpoint = TcpEndpoint {
            host: options.address.host.clone(),
            port,
        };
        let shared = Arc::new(Shared {
            memory,
            page,
            place: RwLock::new(None),
            stop: Waker::new().map_err(ServeError::Start)?,
            counters: Counters::default(),
            lines: Mutex::default(),
            places: Places::new(options.connections_max),
            options,
        });
        let thread = {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name("hkv-listen".into())
                .spawn(move || listen(&listener, &shared))
                .map_err(ServeError::Start)?
        };
        Ok(Self {
            shared,
            endpoint,
            listener: Mutex::new(Some(thread)),
            pid: std::process::id(),
        })
    }

    /// What to announce: the advertised host and the port it got.
    pub fn endpoint(&self) -> &TcpEndpoint {
        &self.endpoint
    }

    /// Says which rank this is. A later call replaces it for connections that come later.
    pub fn serve_as(&self, place: HolderPlace) {
        *self
            .shared
            .place
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(place);
    }

    /// What it has done and does.
    pub fn stats(&self) -> ServerStats {
        let counters = &self.shared.counters;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerStats {
            connections: self.shared.places.open(),
            accepted: count(&counters.accepted),
            refused: count(&counters.refused),
            broken: count(&counters.broken),
            fetches: count(&counters.fetches),
            leases_gone: count(&counters.leases_gone),
            sent_bytes: count(&counters.sent_bytes),
            verbs_readers: count(&counters.verbs_readers),
        }
    }

    /// Ends every connection and the listener, and waits for their threads: afterwards nothing of
    /// this server reads the memory it was given. In a forked child, which has none of the threads
    /// and shares their stop signal with the parent, it does nothing.
    pub fn shutdown(&self) {
        if self.pid != std::process::id() {
            return;
        }
        self.shared.stop.wake();
        let thread = self
            .listener
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the data listener's thread panicked");
        }
    }
}

impl Drop for DataServer {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// The listener's thread: takes connections until the server stops, then waits for all of them.
fn listen(listener: &TcpListener, shared: &Arc<Shared>) {
    let listening = match listener.try_clone() {
        Ok(clone) => OwnedFd::from(clone),
        Err(error) => {
            tracing::error!(%error, "the data listener cannot start");
            return;
        }
    };
    let mut connections: Vec<JoinHandle<()>> = Vec::new();
    loop {
        match socket::wait_any(&listening, PollFlags::IN, &shared.stop, None) {
            Ok(ready) if ready.woken => break,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "the data listener cannot poll");
                break;
            }
        }
        connections.retain(|connection| !connection.is_finished());
        match listener.accept() {
            Ok((stream, peer)) => {
                let taken = take(stream.into(), peer, shared, &mut connections);
                if let Err(error) = taken
                    && let Some(unlogged) = shared.line_due(Cause::Crowd)
                {
                    tracing::warn!(%peer, %error, unlogged, "cannot serve a reader");
                }
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::Interrupted
                        | io::ErrorKind::ConnectionAborted
                ) => {}
            Err(error) => {
                if let Some(unlogged) = shared.line_due(Cause::System) {
                    tracing::warn!(%error, unlogged, "cannot accept a reader");
                }
                // The connection stays in the queue and the listener stays ready; without a pause
                // this would spin until a descriptor is free.
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
    for connection in connections {
        if connection.join().is_err() {
            tracing::error!("a data connection's thread panicked");
        }
    }
}

fn take(
    stream: OwnedFd,
    peer: SocketAddr,
    shared: &Arc<Shared>,
    connections: &mut Vec<JoinHandle<()>>,
) -> io::Result<()> {
    shared.counters.accepted.fetch_add(1, Ordering::Relaxed);
    rustix::io::ioctl_fionbio(&stream, true)?;
    socket::set_options(&stream)?;
    let stream = Arc::new(stream);
    let Some(place) = shared.places.take(&stream) else {
        shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        return Err(io::Error::other("far more readers than are served at once"));
    };
    let shared = Arc::clone(shared);
    connections.push(
        thread::Builder::new()
            .name("hkv-serve".into())
            .spawn(move || serve::serve(&stream, peer, place, &shared))?,
    );
    Ok(())
}
