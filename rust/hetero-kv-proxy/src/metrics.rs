//! Every metric: its field here, and its name and its text for those who scrape where it is made.
//! Names begin `hetero_kv_proxy_`.

use std::sync::Mutex;

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::histogram::Durations;
use crate::meters::{DurationsBy, Pairs, parts_by};

mod labels;

pub use labels::{
    InstanceLabels, LEG_OUTCOMES, LegLabels, OutcomeLabels, PairLabels, PhaseLabels, ReasonLabels,
    RequestLabels, RevisionLabels, RoleLabels, RouteLabels, SlotLabels, WaitLabels, WorkerLabels,
};

/// The metrics of one proxy.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Held while gauges are set and written out.
    pub(crate) scrape: Mutex<()>,
    /// Requests from clients, when they end.
    pub requests: Family<RequestLabels, Counter>,
    /// Legs, when they end.
    pub legs: Family<LegLabels, Counter>,
    /// Legs in flight; set when scraped.
    pub in_flight: Family<SlotLabels, Gauge>,
    /// 1 for an instance that answered recently; set when scraped.
    pub ready: Family<InstanceLabels, Gauge>,
    /// 1 for an instance that is kept out or tried since its legs failed; set when scraped.
    pub breaker_open: Family<InstanceLabels, Gauge>,
    /// Requests that run; set when scraped.
    pub requests_running: Gauge,
    /// Transfers whose blocks prefill keeps for decode legs; set when scraped.
    pub kept_transfers: Family<WorkerLabels, Gauge>,
    /// Transfers that decode was not seen to take: their lease has to end them.
    pub transfers_left: Family<WorkerLabels, Counter>,
    /// Requests from clients, head to end.
    pub request_seconds: DurationsBy<RouteLabels>,
    /// From a request's head to its first slot on this instance.
    pub queue_seconds: DurationsBy<InstanceLabels>,
    /// From a request's head to the first chunk of its event stream.
    pub ttft_seconds: DurationsBy<WorkerLabels>,
    /// Between the chunks of event streams.
    pub inter_token_seconds: DurationsBy<WorkerLabels>,
    /// From sending a prefill leg to its whole answer.
    pub prefill_leg_seconds: DurationsBy<WorkerLabels>,
    /// From sending a decode leg to the head of its answer.
    pub decode_head_seconds: DurationsBy<WorkerLabels>,
    /// From sending a decode leg to the end of its answer.
    pub decode_leg_seconds: DurationsBy<WorkerLabels>,
    /// By pair of workers.
    pub pairs: Pairs,
    /// Prefill answers with status 2xx and no usable KV handle.
    pub kv_transfer_missing: Counter,
    /// Clients that left before their answer was complete.
    pub client_disconnects: Family<PhaseLabels, Counter>,
    /// Decode legs that lived on in the background so that prefill's blocks are freed.
    pub settles: Counter,
    /// Decode legs that were closed with their client, since as many lived on as may.
    pub settles_refused: Counter,
    /// Legs that were sent again.
    pub retries: Family<RoleLabels, Counter>,
    /// Requests whose prompt decode computed without KV from prefill.
    pub fallbacks: Family<ReasonLabels, Counter>,
    /// Requests with a list of prompts, of which the first is prefilled remotely.
    pub batch_prompts: Counter,
    /// Headers of a client's trace context that were not well-formed.
    pub trace_faults: Family<ReasonLabels, Counter>,
    /// Answers that broke after their head was sent.
    pub stream_breaks: Family<ReasonLabels, Counter>,
    /// Instances that were kept out because their legs failed.
    pub breaker_opens: Family<RoleLabels, Counter>,
    /// Pairs of engines that were avoided because KV did not get over.
    pub pair_quarantines: Counter,
    /// Requests that wait for room; set when scraped.
    pub queue_length: Family<WaitLabels, Gauge>,
    /// How long those waited that then found room.
    pub queue_wait_seconds: Durations,
    /// Requests that the queue sent away.
    pub queue_rejects: Family<ReasonLabels, Counter>,
    /// Requests refused for want of a key or a signature.
    pub unauthorized: Family<ReasonLabels, Counter>,
    /// Scrapes of engines by outcome.
    pub engine_scrapes: Family<OutcomeLabels, Counter>,
    /// Requests served by a revision that was drawn.
    pub revision_requests: Family<RevisionLabels, Counter>,
    /// Requests that were drawn to a revision whose workers were away.
    pub revision_moves: Family<RevisionLabels, Counter>,
    /// Registrations over ZeroMQ, and connections that brought none.
    pub zmq_frames: Family<OutcomeLabels, Counter>,
}

impl Default for Metrics {
    /// In the order in which they are scraped.
    fn default() -> Self {
        let mut all = Registered(Registry::with_prefix("hetero_kv_proxy"));
        Self {
            requests: all.metric(
                "requests",
                "Requests from clients by route and status (499: the client left first)",
            ),
            legs: all.metric("leg_requests", "Legs by outcome"),
            in_flight: all.metric("in_flight", "Legs in flight"),
            ready: all.metric(
                "instance_ready",
                "1 when the instance is healthy and answered a probe (GET /health) recently",
            ),
            breaker_open: all.metric(
                "breaker_open",
                "1 while the instance is kept out, or tried, since its legs failed",
            ),
            requests_running: all.metric(
                "requests_running",
                "Requests that run, those that wait for slots included; 0 at rest",
            ),
            kept_transfers: all.metric(
                "kept_transfers",
                "Transfers whose blocks a prefill instance keeps for decode legs; 0 at rest",
            ),
            transfers_left: all.metric(
                "transfers_left",
                "Transfers that decode was not seen to take, so that the lease of their \
                 blocks ends them",
            ),
            request_seconds: all.seconds(
                "request",
                "Requests from clients, head to end, however they ended",
                parts_by(),
            ),
            queue_seconds: all.seconds(
                "queue",
                "Request head to its first slot on this instance: its body, and what it \
                 waited for",
                parts_by(),
            ),
            ttft_seconds: all.seconds(
                "ttft",
                "Time to first token: request head to first chunk of its event stream",
                parts_by(),
            ),
            inter_token_seconds: all.seconds(
                "inter_token",
                "Between two chunks of an event stream",
                Family::new_with_constructor(Durations::gaps),
            ),
            prefill_leg_seconds: all.seconds(
                "prefill_leg",
                "Good prefill legs, sent to answered",
                parts_by(),
            ),
            decode_head_seconds: all.seconds(
                "decode_head",
                "Good decode legs, sent to the head of the answer",
                parts_by(),
            ),
            decode_leg_seconds: all.seconds(
                "decode_leg",
                "Good decode legs, sent to the end of the answer",
                parts_by(),
            ),
            pairs: Pairs::new(
                all.seconds(
                    "handover",
                    "End of the prefill answer to the head of a good decode answer",
                    parts_by(),
                ),
                all.metric(
                    "handover_failures",
                    "Decode legs with a handle that failed by the fault of an engine",
                ),
            ),
            queue_wait_seconds: all.seconds(
                "queue_wait",
                "Wait of requests that then found room",
                Durations::parts(),
            ),
            kv_transfer_missing: all.metric(
                "kv_transfer_missing",
                "Good prefill answers without a usable kv_transfer_params",
            ),
            client_disconnects: all.metric(
                "client_disconnects",
                "Clients that left before their answer was complete",
            ),
            settles: all.metric(
                "settles",
                "Decode legs kept alive after their client left, to free prefill's blocks",
            ),
            settles_refused: all.metric(
                "settles_refused",
                "Decode legs closed with their client, since as many as may lived on without one",
            ),
            retries: all.metric("retries", "Legs sent again"),
            fallbacks: all.metric("fallbacks", "Requests computed on decode alone"),
            batch_prompts: all.metric(
                "batch_prompts",
                "Requests with a list of prompts, the first of which is prefilled remotely",
            ),
            trace_faults: all.metric(
                "trace_faults",
                "Headers of a client's trace context that were not well-formed, and not \
                 passed on",
            ),
            stream_breaks: all.metric(
                "stream_breaks",
                "Answers that broke after their head was sent",
            ),
            breaker_opens: all.metric(
                "breaker_opens",
                "Times that an instance was kept out because its legs failed",
            ),
            pair_quarantines: all.metric(
                "pair_quarantines",
                "Times that a pair of engines was avoided because KV did not get over",
            ),
            queue_length: all.metric("queue_length", "Requests that wait for room"),
            queue_rejects: all.metric("queue_rejects", "Requests that the queue sent away"),
            unauthorized: all.metric(
                "unauthorized",
                "Requests refused for want of a key or a signature",
            ),
            engine_scrapes: all.metric(
                "engine_scrapes",
                "GET /metrics of engines, for their load, by outcome",
            ),
            revision_requests: all.metric(
                "revision_requests",
                "Requests by the revision that serves them, where revisions have weights",
            ),
            revision_moves: all.metric(
                "revision_moves",
                "Requests drawn to this revision and served by another, since its workers \
                 are away",
            ),
            zmq_frames: all.metric(
                "zmq_frames",
                "Registrations over ZeroMQ by outcome, and connections that broke",
            ),
            scrape: Mutex::new(()),
            registry: all.0,
        }
    }
}

/// What is scraped.
struct Registered(Registry);

impl Registered {
    /// A metric that is scraped under this name.
    fn metric<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        let metric = M::default();
        self.0.register(name, help, metric.clone());
        metric
    }

    /// One whose name ends in `_seconds`.
    fn seconds<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0
            .register_with_unit(name, help, Unit::Seconds, metric.clone());
        metric
    }
}

impl Metrics {
    /// The OpenMetrics text.
    ///
    /// # Errors
    /// Formatting into a string, which does not fail.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests;
