//! Seats of requests that run: as many as a limit says, which may change while they are taken.

use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::sync::lock;

/// A number of seats. Who waits for one is served first come, first served.
#[derive(Debug)]
pub(crate) struct Seats {
    free: Arc<Semaphore>,
    size: Mutex<Size>,
}

#[derive(Debug)]
struct Size {
    max: usize,
    /// Seats over the limit that are still taken: they vanish when they are given back.
    over: usize,
}

/// A taken seat, given back when dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    seats: Arc<Seats>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Seats {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            free: Arc::new(Semaphore::new(max)),
            size: Mutex::new(Size { max, over: 0 }),
        }
    }

    /// Changes how many there are. Taken ones stay so.
    pub(crate) fn set(&self, max: usize) {
        let mut size = lock(&self.size);
        let more = max.saturating_sub(size.max);
        let fewer = size.max.saturating_sub(max);
        size.max = max;
        let kept = more.min(size.over);
        size.over -= kept;
        self.free.add_permits(more - kept);
        size.over += fewer - self.free.forget_permits(fewer);
    }

    /// How many are taken.
    pub(crate) fn taken_count(&self) -> usize {
        let size = lock(&self.size);
        (size.max + size.over).saturating_sub(self.free.available_permits())
    }

    /// A seat, if one is free.
    pub(crate) fn try_take(self: &Arc<Self>) -> Option<Seat> {
        let permit = Arc::clone(&self.free).try_acquire_owned().ok()?;
        Some(self.taken(permit))
    }

    /// Waits for a seat. `None` never comes: the seats are not closed.
    pub(crate) async fn take(self: &Arc<Self>) -> Option<Seat> {
        let permit = Arc::clone(&self.free).acquire_owned().await.ok()?;
        Some(self.taken(permit))
    }

    fn taken(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> Seat {
        Seat {
            seats: Arc::clone(self),
            permit: Some(permit),
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut size = lock(&self.seats.size);
        // Given back under the lock: a limit that falls meanwhile finds it free or taken.
        match self.permit.take() {
            Some(permit) if size.over > 0 => {
                size.over -= 1;
                permit.forget();
            }
            permit => drop(permit),
        }
    }
}

#[cfg(test)]
mod tests;
