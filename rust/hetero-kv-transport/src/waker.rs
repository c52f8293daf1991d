//! Wakes a thread that sleeps in `poll(2)`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

/// A flag that a sleeping thread can wait for together with sockets: an eventfd.
#[derive(Debug)]
pub struct Waker {
    event: OwnedFd,
}

impl Waker {
    /// A waker that is not set. Fails when the process has no file descriptor left.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event })
    }

    /// Sets it. Setting a set one does nothing more.
    pub fn wake(&self) {
        loop {
            match write(&self.event, &1_u64.to_ne_bytes()) {
                Err(Errno::INTR) => {}
                // Full means that it is set already.
                Ok(_) | Err(_) => return,
            }
        }
    }

    /// Clears it.
    pub fn clear(&self) {
        let mut count = [0; 8];
        while read(&self.event, &mut count) == Err(Errno::INTR) {}
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
