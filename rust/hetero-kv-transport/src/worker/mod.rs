//! The worker side of one rank: its lease page and data listener (producer), its reader
//! (consumer), and what one step of vLLM asks of them.
//!
//! Called by vLLM's worker thread only. Nothing here waits for a peer: reads run in the reader's
//! threads, and [`WorkerSide::take_results`] hands out what they have finished.

mod holder;
mod loads;
mod report;
mod start;
mod waiting;

use std::thread;
use std::time::Duration;

use hetero_kv_core::plan::Owner;
use hetero_kv_core::step::StepOrders;
use hetero_kv_core::wire::card::WorkerCard;

use crate::clock;
use crate::tcp::{DataServer, HolderPlace};
use holder::Holder;
use loads::ConsumerRank;
use waiting::WaitingLoad;

pub use report::{LoadReport, SourceRead, StepResults, WorkerFigures};
pub use start::{VerbsUse, WorkerError, WorkerOptions, WorkerPlace};

/// See the module's text.
pub struct WorkerSide {
    place: WorkerPlace,
    card: WorkerCard,
    holder: Option<Holder>,
    consumer: Option<ConsumerRank>,
    results: StepResults,
    pending: u32,
}

impl WorkerSide {
    /// What this rank announces of itself.
    pub fn card(&self) -> &WorkerCard {
        &self.card
    }

    /// Carries out one step's orders, which this process has had for `age`: times in them count from
    /// when they came, and vLLM may have run a forward pass since.
    pub fn step(&mut self, orders: StepOrders, age: Duration) {
        self.pending = orders.pending;
        if let (Some(holder), Some(incarnation)) = (self.holder.as_mut(), orders.incarnation) {
            holder.name(HolderPlace {
                owner: Owner {
                    engine: self.place.engine.clone(),
                    incarnation,
                    dp_rank: self.place.dp_rank,
                },
                tp_rank: self.place.tp_rank,
                pp_rank: self.place.pp_rank,
            });
        }
        for release in orders.releases {
            if let Some(holder) = &self.holder {
                holder.end(release.lease);
            }
            self.results.sent.push(release.request_id);
        }
        for fail in orders.fails {
            self.results.received.push(LoadReport {
                request_id: fail.request_id,
                transfer_id: None,
                engine: None,
                failure: Some(fail.failure),
                ordered: true,
                invalid_blocks: fail.dest_blocks,
                planned_bytes: 0,
                reads: Vec::new(),
                lost_source: None,
                ordered_at: None,
                elapsed: Duration::ZERO,
            });
        }
        let Some(consumer) = self.consumer.as_mut() else {
            return;
        };
        let received_at = clock::now() - age;
        for peer in orders.peers {
            consumer.learn(peer);
        }
        for order in orders.loads {
            let load = WaitingLoad { order, received_at };
            match consumer.begin(&self.place, &self.card.cache, load) {
                Ok(None) => {}
                Ok(Some(load)) => consumer.waiting.push(load),
                Err(end) => {
                    let (order, failure) = *end;
                    self.results
                        .received
                        .push(LoadReport::unread(order, failure));
                }
            }
        }
        for extension in orders.extensions {
            if let Some(job) = consumer.by_request.get(&extension.request_id) {
                let deadline = received_at + Duration::from_millis(extension.deadline_ms);
                consumer.reader.extend(*job, deadline);
            } else {
                let (request, left_ms) = (&extension.request_id, extension.deadline_ms);
                consumer.waiting.extend(request, received_at, left_ms);
            }
        }
        for cancel in orders.cancels {
            if let Some(order) = consumer.waiting.cancel(&cancel.request_id) {
                let report = LoadReport::unread(order, cancel.failure);
                self.results.received.push(report);
            } else if let Some(job) = consumer.by_request.get(&cancel.request_id) {
                if let Some(load) = consumer.loads.get_mut(job) {
                    load.cancelled.get_or_insert(cancel.failure);
                }
                consumer.reader.cancel(*job);
            }
        }
    }

    /// Waits on an empty step while something is pending, at most `timeout`; a finished read ends
    /// the wait. The engine would otherwise take empty steps as fast as it can.
    pub fn wait(&self, timeout: Duration) {
        if self.pending == 0 || !self.results.sent.is_empty() || !self.results.received.is_empty() {
            return;
        }
        match &self.consumer {
            Some(consumer) if !consumer.loads.is_empty() => {
                consumer.reader.wait(timeout);
            }
            Some(_) | None => thread::sleep(timeout),
        }
    }

    /// What has finished since the last call.
    pub fn take_results(&mut self) -> StepResults {
        if let Some(consumer) = self.consumer.as_mut() {
            for done in consumer.reader.drain() {
                if let Some(report) = consumer.end(done) {
                    self.results.received.push(report);
                }
            }
            for (order, failure) in
                consumer.begin_waiting(&self.place, &self.card.cache, clock::now())
            {
                self.results
                    .received
                    .push(LoadReport::unread(order, failure));
            }
        }
        std::mem::take(&mut self.results)
    }

    /// Figures for metrics.
    pub fn figures(&self) -> WorkerFigures {
        WorkerFigures {
            reader: self
                .consumer
                .as_ref()
                .map(|consumer| consumer.reader.stats()),
            server: self
                .holder
                .as_ref()
                .and_then(|holder| holder.server.as_ref())
                .map(DataServer::stats),
        }
    }

    /// Ends reads and serving; true when nothing can write this rank's memory any more.
    pub fn shutdown(&mut self, timeout: Duration) -> bool {
        self.holder = None;
        let deadline = clock::now() + timeout;
        match self.consumer.take() {
            Some(consumer) => match consumer.reader.shutdown(deadline) {
                Ok(()) => true,
                Err(error) => {
                    tracing::error!("{error}");
                    false
                }
            },
            None => true,
        }
    }
}

#[cfg(test)]
mod tests;
