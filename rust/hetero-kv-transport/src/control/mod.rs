//! The control plane of one engine: one thread, all connections, in the scheduler process.
//!
//! The thread feeds the core's machines with time, messages and the fate of connections, and
//! carries out what they put out. vLLM's hooks work on the same machines from the scheduler's
//! thread, under one lock that is never held over a system call of ours, and wake the thread when
//! there is something to send.

mod connection;
mod dial;
mod event_loop;
mod standstill;

use std::io;
use std::os::fd::OwnedFd;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub use event_loop::ACKNOWLEDGED;
use event_loop::Loop;
use hetero_kv_core::consumer::Consumer;
use hetero_kv_core::producer::Producer;
use standstill::Steps;

use crate::waker::Waker;

/// What the control plane takes from peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlLimits {
    /// Consumers connected to one producer at once. The stranger who has been one for the longest
    /// makes room for another; one more than so many accepted ones is closed at once.
    pub inbound_max: usize,
    /// Longest time from connect until a peer is accepted, and for each begun frame to be whole.
    pub frame_timeout: Duration,
}

impl Default for ControlLimits {
    fn default() -> Self {
        Self {
            inbound_max: 1024,
            frame_timeout: Duration::from_secs(10),
        }
    }
}

/// The machines of one engine's scheduler side.
#[derive(Debug, Default)]
pub struct Desk {
    /// Present when the engine hands KV off.
    pub producer: Option<Producer>,
    /// Present when the engine takes KV over.
    pub consumer: Option<Consumer>,
}

/// The machines, shared between vLLM's thread and the control thread.
#[derive(Debug, Default)]
pub struct SharedDesk {
    desk: Mutex<Desk>,
    /// Signalled when a message or a timer changed the machines.
    changed: Condvar,
    /// Source line of whoever took the machines last, for the log of one that waits for long.
    taken_at_line: AtomicU32,
}

impl SharedDesk {
    /// The machines. A panic under the lock leaves them usable: each call is one mutation.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, Desk> {
        let caller = Location::caller();
        let desk = match self.desk.try_lock() {
            Ok(desk) => desk,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.wait_for_lock(caller),
        };
        self.taken_at_line.store(caller.line(), Ordering::Relaxed);
        desk
    }

    /// Held for microseconds as a rule; a wait that peers would notice is told.
    fn wait_for_lock(&self, caller: &Location<'_>) -> MutexGuard<'_, Desk> {
        let holder = self.taken_at_line.load(Ordering::Relaxed);
        let mut steps = Steps::new();
        let desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        steps.end(&format!(
            "line {} waited for the machines, taken at line {holder}",
            caller.line()
        ));
        desk
    }

    /// Waits until the control plane changes something `until` accepts, or the time is over.
    pub fn wait_until(&self, timeout: Duration, mut until: impl FnMut(&mut Desk) -> bool) {
        let desk = self.lock();
        let _ = self
            .changed
            .wait_timeout_while(desk, timeout, |desk| !until(desk));
    }
}

/// The running control plane. Dropping it stops the thread and closes every connection.
#[derive(Debug)]
pub struct ControlPlane {
    waker: Arc<Waker>,
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
    pid: u32,
}

impl ControlPlane {
    /// Starts the thread. `listener` is present for a producer.
    pub fn start(
        desk: Arc<SharedDesk>,
        listener: Option<OwnedFd>,
        limits: ControlLimits,
    ) -> io::Result<Self> {
        let waker = Arc::new(Waker::new()?);
        let stop = Arc::new(AtomicBool::new(false));
        let mut control = Loop::new(
            desk,
            listener,
            limits,
            Arc::clone(&waker),
            Arc::clone(&stop),
        );
        let thread = thread::Builder::new()
            .name("hkv-control".into())
            .spawn(move || control.run())?;
        Ok(Self {
            waker,
            stop,
            thread: Mutex::new(Some(thread)),
            pid: std::process::id(),
        })
    }

    /// Whether this is a child forked from the process that started it. The child has no thread of
    /// ours, and whatever lock the thread held when it was forked stays locked there.
    pub fn is_forked(&self) -> bool {
        self.pid != std::process::id()
    }

    /// Lets the thread look at the machines: call after each mutation from outside.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Says goodbye to every peer, closes every connection and waits for the thread. Later calls
    /// do nothing.
    pub fn stop(&self) {
        if self.is_forked() {
            // The waker is the parent's as well, and the thread to wait for is not here.
            return;
        }
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // A panic there has already been printed by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests;
