//! Loads that wait for a reading session: as many sources as there may be are being read.
//!
//! They wait within their own time, in the order they came, and are tried again with each step: a
//! session that has nothing more to read makes room.

use std::collections::VecDeque;
use std::time::Duration;

use hetero_kv_core::failure::{Failure, FailureReason};
use hetero_kv_core::step::LoadOrder;
use hetero_kv_core::time::Time;

/// Loads tried again in one step at most, so that a long queue costs vLLM's thread little.
const TRIES_MAX: usize = 8;

/// An order that could not begin yet.
#[derive(Debug)]
pub(super) struct WaitingLoad {
    pub(super) order: LoadOrder,
    /// When the order's time began to count.
    pub(super) received_at: Time,
}

impl WaitingLoad {
    fn deadline(&self) -> Time {
        self.received_at + Duration::from_millis(self.order.deadline_ms)
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    loads: VecDeque<WaitingLoad>,
}

impl Waiting {
    pub(super) fn push(&mut self, load: WaitingLoad) {
        self.loads.push_back(load);
    }

    /// More time; whether the load waits.
    pub(super) fn extend(&mut self, request_id: &str, received_at: Time, deadline_ms: u64) -> bool {
        let Some(load) = self.find(request_id) else {
            return false;
        };
        load.received_at = received_at;
        load.order.deadline_ms = deadline_ms;
        true
    }

    /// Takes a load out that nobody wants any more. Nothing of it can be written.
    pub(super) fn cancel(&mut self, request_id: &str) -> Option<LoadOrder> {
        let at = self
            .loads
            .iter()
            .position(|load| load.order.request_id == request_id)?;
        self.loads.remove(at).map(|load| load.order)
    }

    /// Takes out the loads whose time is over.
    pub(super) fn overdue(&mut self, now: Time) -> Vec<(LoadOrder, Failure)> {
        let (over, left) = std::mem::take(&mut self.loads)
            .into_iter()
            .partition(|load| load.deadline() <= now);
        self.loads = left;
        let over: VecDeque<WaitingLoad> = over;
        over.into_iter()
            .map(|load| {
                let failure = Failure::new(
                    FailureReason::LeaseExpired,
                    "its time was over before one of the sources being read made room (sources_max)",
                );
                (load.order, failure)
            })
            .collect()
    }

    /// The loads to try again in this step, in order.
    pub(super) fn next(&mut self) -> Vec<WaitingLoad> {
        let count = self.loads.len().min(TRIES_MAX);
        self.loads.drain(..count).collect()
    }

    /// Puts loads back in front that could not begin.
    pub(super) fn put_back(&mut self, loads: Vec<WaitingLoad>) {
        for load in loads.into_iter().rev() {
            self.loads.push_front(load);
        }
    }

    fn find(&mut self, request_id: &str) -> Option<&mut WaitingLoad> {
        self.loads
            .iter_mut()
            .find(|load| load.order.request_id == request_id)
    }
}
