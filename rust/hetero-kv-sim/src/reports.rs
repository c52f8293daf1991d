//! The workers' reports as vLLM's aggregator counts them, and what its scheduler makes of a load.

use hetero_kv_core::failure::FailureReason;

use crate::book::{Invariant, Outcome};
use crate::decode::Stage;
use crate::world::World;

impl World {
    /// vLLM's aggregator and scheduler: an id passes when every rank has reported it.
    pub(crate) fn collect_received(&mut self, d: usize) {
        let now = self.decode[d].clock.local(self.now);
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let whole = engine.ranks.len();
        let mut reports = Vec::new();
        for (rank, reading) in engine.ranks.iter_mut().enumerate() {
            reports.extend(reading.results.drain(..).map(|report| (rank, report)));
        }
        for (rank, report) in reports {
            let Some(engine) = &mut self.decode[d].engine else {
                return;
            };
            let id = report.request;
            let waiting = engine
                .requests
                .get_mut(&id)
                .filter(|request| matches!(request.stage, Stage::Loading { .. }));
            let fresh = waiting.and_then(|request| {
                let fresh = request.reported.insert(rank);
                fresh.then_some(request)
            });
            let Some(request) = fresh else {
                self.book.broken(
                    Invariant::StrayReport,
                    format!("decode {d} rank {rank}: {id} is not waited for"),
                );
                return;
            };
            if let Some(lost) = report.lost_source {
                engine.consumer.handle_source_lost(now, &id, lost);
            }
            if let Some(failure) = report.failure {
                request.load_failed.get_or_insert(failure);
            }
            if request.reported.len() < whole {
                continue;
            }
            request.reported.clear();
            let failed = request.load_failed.take();
            engine.consumer.handle_received(now, &id, failed.is_some());
            let aborted = request.aborted;
            self.book
                .trace(|| format!("decode {d}: {id} loaded by all ranks: {failed:?}"));
            if let Some((reason, explained)) = failed {
                self.book.load_failed(reason, explained, &id);
            }
            match failed {
                _ if aborted => self.drop_request(d, &id),
                None => request.stage = Stage::Loaded,
                Some((reason, _)) => self.load_has_failed(d, &id, reason),
            }
        }
    }

    pub(crate) fn load_has_failed(&mut self, d: usize, id: &str, reason: FailureReason) {
        let now = self.decode[d].clock.local(self.now);
        if let Some(engine) = &mut self.decode[d].engine
            && let Some(request) = engine.requests.get_mut(id)
        {
            request.failed = Some(reason);
            if !self.scenario.recompute {
                engine.consumer.handle_finished(now, id);
            }
        }
        if self.scenario.recompute {
            self.requeue(d, id);
        } else {
            self.drop_request(d, id);
            self.end_leg(id, Outcome::Failed(reason));
        }
    }
}
