//! Who is served at once: so many readers, of whom one that has not been taken makes room for
//! another.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};

/// Connections above the limit that are still told so; more are closed without a word.
const REFUSALS_MAX: usize = 32;

/// Connections that have made room, and whose threads have not ended.
const ENDING_MAX: usize = 64;

/// Longest wait for one of these threads: each finds its socket shut down.
const ENDING_WAIT: Duration = Duration::from_millis(100);

/// All places of a server.
#[derive(Debug)]
pub(super) struct Places {
    most: usize,
    taken: Mutex<Taken>,
    /// Told when a connection that has made room has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    /// Readers that have been taken.
    readers: usize,
    /// Connections that have not, the longest of them first.
    strangers: BTreeMap<u64, Arc<OwnedFd>>,
    refused: usize,
    ending: usize,
}

/// How a connection is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Terms {
    /// As it should be.
    Serve,
    /// There are enough readers already.
    Refuse {
        /// How many are served at once.
        most: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Stranger,
    Reader,
    Refused,
}

/// The place of one connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    kind: Kind,
}

impl Places {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            taken: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    /// Connections served at the moment, refused ones included.
    pub(super) fn open(&self) -> usize {
        let taken = self.lock();
        taken.readers + taken.strangers.len() + taken.refused + taken.ending
    }

    /// A place for a connection; without one left, that of the stranger who has been one for the
    /// longest, whose socket is shut down. Where all are readers it is to be refused, and `None`
    /// where that is too much to ask.
    pub(super) fn take(self: &Arc<Self>, stream: &Arc<OwnedFd>) -> Option<Place> {
        let taken = self.lock();
        // Else strangers that dial faster than threads end make ever more threads.
        let (mut taken, _) = self
            .ended
            .wait_timeout_while(taken, ENDING_WAIT, |taken| taken.ending >= ENDING_MAX)
            .unwrap_or_else(PoisonError::into_inner);
        if taken.ending >= ENDING_MAX {
            return None;
        }
        let number = taken.next;
        taken.next += 1;
        let kind = if taken.readers >= self.most {
            if taken.refused >= REFUSALS_MAX {
                return None;
            }
            taken.refused += 1;
            Kind::Refused
        } else {
            if taken.readers + taken.strangers.len() >= self.most
                && let Some((_, oldest)) = taken.strangers.pop_first()
            {
                // Its thread sees the end of its socket. One that is not connected any more needs
                // no shutdown.
                let _ = shutdown(&*oldest, Shutdown::Both);
                taken.ending += 1;
            }
            taken.strangers.insert(number, Arc::clone(stream));
            Kind::Stranger
        };
        drop(taken);
        Some(Place {
            places: Arc::clone(self),
            number,
            kind,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    pub(super) fn terms(&self) -> Terms {
        match self.kind {
            Kind::Stranger | Kind::Reader => Terms::Serve,
            Kind::Refused => Terms::Refuse {
                most: self.places.most,
            },
        }
    }

    /// The connection is one of a reader from here on and makes room for nobody; false where it has
    /// made room before.
    pub(super) fn is_of_reader(&mut self) -> bool {
        let mut taken = self.places.lock();
        let is_here = taken.strangers.remove(&self.number).is_some();
        if is_here {
            taken.readers += 1;
            self.kind = Kind::Reader;
        }
        is_here
    }

    /// Whether it has made room for another.
    pub(super) fn is_lost(&self) -> bool {
        self.kind == Kind::Stranger && !self.places.lock().strangers.contains_key(&self.number)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        match self.kind {
            Kind::Reader => taken.readers -= 1,
            Kind::Refused => taken.refused -= 1,
            Kind::Stranger => {
                if taken.strangers.remove(&self.number).is_none() {
                    taken.ending -= 1;
                    self.places.ended.notify_all();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
