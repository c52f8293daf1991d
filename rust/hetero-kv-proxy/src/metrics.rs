//! Every metric, declared once. Names begin `hetero_kv_proxy_`.

use std::sync::{Arc, Mutex};

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::histogram::Durations;
use crate::meters::{DurationsBy, Pairs, parts_by};

/// How a leg can end.
pub const LEG_OUTCOMES: [&str; 10] = [
    "ok",
    "status_3xx",
    "status_4xx",
    "status_5xx",
    "connect",
    "reset",
    "broken",
    "unsent",
    "bootstrap",
    "cancelled",
];

/// Labels of a request from a client.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// The path, from a fixed set.
    pub route: &'static str,
    /// HTTP status; 499 for a client that left before its answer began.
    pub status: u16,
}

/// Labels of a leg.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LegLabels {
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// Base URL of the instance.
    pub instance: Arc<str>,
    /// How it ended, one of [`LEG_OUTCOMES`].
    pub outcome: &'static str,
}

/// Labels of a slot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SlotLabels {
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// Base URL of the instance.
    pub instance: Arc<str>,
    /// DP rank within the instance.
    pub rank: u32,
}

/// Labels of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct InstanceLabels {
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// Base URL of the instance.
    pub instance: Arc<str>,
}

/// Labels of an instance of a metric that one role has.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WorkerLabels {
    /// Base URL of the instance.
    pub instance: Arc<str>,
}

/// The label of a route.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RouteLabels {
    /// The path, from a fixed set.
    pub route: &'static str,
}

/// One label that says where in a request's life something happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PhaseLabels {
    /// The phase, from a fixed set.
    pub phase: &'static str,
}

/// One label that says why.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabels {
    /// The reason, from a fixed set.
    pub reason: &'static str,
}

/// One label that says what requests wait for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WaitLabels {
    /// `requests` or `slots`.
    pub wait: &'static str,
}

/// One label that says what became of something.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabels {
    /// The outcome, from a fixed set.
    pub outcome: &'static str,
}

/// One label for a revision.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RevisionLabels {
    /// As its workers tell it.
    pub revision: Arc<str>,
}

/// One label for the leg.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RoleLabels {
    /// `prefill` or `decode`.
    pub role: &'static str,
}

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
    fn default() -> Self {
        let mut registry = Registry::with_prefix("hetero_kv_proxy");
        let mut new = Self {
            requests: Family::default(),
            legs: Family::default(),
            in_flight: Family::default(),
            ready: Family::default(),
            breaker_open: Family::default(),
            requests_running: Gauge::default(),
            kept_transfers: Family::default(),
            transfers_left: Family::default(),
            request_seconds: parts_by(),
            queue_seconds: parts_by(),
            ttft_seconds: parts_by(),
            inter_token_seconds: Family::new_with_constructor(Durations::gaps),
            prefill_leg_seconds: parts_by(),
            decode_head_seconds: parts_by(),
            decode_leg_seconds: parts_by(),
            pairs: Pairs::default(),
            kv_transfer_missing: Counter::default(),
            client_disconnects: Family::default(),
            settles: Counter::default(),
            retries: Family::default(),
            fallbacks: Family::default(),
            batch_prompts: Counter::default(),
            trace_faults: Family::default(),
            stream_breaks: Family::default(),
            breaker_opens: Family::default(),
            pair_quarantines: Counter::default(),
            queue_length: Family::default(),
            queue_wait_seconds: Durations::parts(),
            queue_rejects: Family::default(),
            unauthorized: Family::default(),
            engine_scrapes: Family::default(),
            revision_requests: Family::default(),
            revision_moves: Family::default(),
            zmq_frames: Family::default(),
            registry: Registry::default(),
            scrape: Mutex::new(()),
        };
        let r = &mut registry;
        r.register(
            "requests",
            "Requests from clients by route and status (499: the client left first)",
            new.requests.clone(),
        );
        r.register("leg_requests", "Legs by outcome", new.legs.clone());
        r.register("in_flight", "Legs in flight", new.in_flight.clone());
        r.register(
            "instance_ready",
            "1 when the instance answered recently",
            new.ready.clone(),
        );
        r.register(
            "breaker_open",
            "1 while the instance is kept out, or tried, since its legs failed",
            new.breaker_open.clone(),
        );
        r.register(
            "requests_running",
            "Requests that run, those that wait for slots included; 0 at rest",
            new.requests_running.clone(),
        );
        r.register(
            "kept_transfers",
            "Transfers whose blocks a prefill instance keeps for decode legs; 0 at rest",
            new.kept_transfers.clone(),
        );
        r.register(
            "transfers_left",
            "Transfers that decode was not seen to take, so that the lease of their blocks ends them",
            new.transfers_left.clone(),
        );
        seconds(
            r,
            "request",
            "Requests from clients, head to end, however they ended",
            new.request_seconds.clone(),
        );
        seconds(
            r,
            "queue",
            "Request head to its first slot on this instance: its body, and what it waited for",
            new.queue_seconds.clone(),
        );
        seconds(
            r,
            "ttft",
            "Time to first token: request head to first chunk of its event stream",
            new.ttft_seconds.clone(),
        );
        seconds(
            r,
            "inter_token",
            "Between two chunks of an event stream",
            new.inter_token_seconds.clone(),
        );
        seconds(
            r,
            "prefill_leg",
            "Good prefill legs, sent to answered",
            new.prefill_leg_seconds.clone(),
        );
        seconds(
            r,
            "decode_head",
            "Good decode legs, sent to the head of the answer",
            new.decode_head_seconds.clone(),
        );
        seconds(
            r,
            "decode_leg",
            "Good decode legs, sent to the end of the answer",
            new.decode_leg_seconds.clone(),
        );
        seconds(
            r,
            "handover",
            "End of the prefill answer to the head of a good decode answer",
            new.pairs.seconds.clone(),
        );
        seconds(
            r,
            "queue_wait",
            "Wait of requests that then found room",
            new.queue_wait_seconds.clone(),
        );
        r.register(
            "handover_failures",
            "Decode legs with a handle that failed by the fault of an engine",
            new.pairs.failures.clone(),
        );
        r.register(
            "kv_transfer_missing",
            "Good prefill answers without a usable kv_transfer_params",
            new.kv_transfer_missing.clone(),
        );
        r.register(
            "client_disconnects",
            "Clients that left before their answer was complete",
            new.client_disconnects.clone(),
        );
        r.register(
            "settles",
            "Decode legs kept alive after their client left, to free prefill's blocks",
            new.settles.clone(),
        );
        r.register("retries", "Legs sent again", new.retries.clone());
        r.register(
            "fallbacks",
            "Requests computed on decode alone",
            new.fallbacks.clone(),
        );
        r.register(
            "batch_prompts",
            "Requests with a list of prompts, the first of which is prefilled remotely",
            new.batch_prompts.clone(),
        );
        r.register(
            "trace_faults",
            "Headers of a client's trace context that were not well-formed, and not passed on",
            new.trace_faults.clone(),
        );
        r.register(
            "stream_breaks",
            "Answers that broke after their head was sent",
            new.stream_breaks.clone(),
        );
        r.register(
            "breaker_opens",
            "Times that an instance was kept out because its legs failed",
            new.breaker_opens.clone(),
        );
        r.register(
            "pair_quarantines",
            "Times that a pair of engines was avoided because KV did not get over",
            new.pair_quarantines.clone(),
        );
        r.register(
            "queue_length",
            "Requests that wait for room",
            new.queue_length.clone(),
        );
        r.register(
            "queue_rejects",
            "Requests that the queue sent away",
            new.queue_rejects.clone(),
        );
        r.register(
            "unauthorized",
            "Requests refused for want of a key or a signature",
            new.unauthorized.clone(),
        );
        r.register(
            "engine_scrapes",
            "GET /metrics of engines, for their load, by outcome",
            new.engine_scrapes.clone(),
        );
        r.register(
            "revision_requests",
            "Requests by the revision that serves them, where revisions have weights",
            new.revision_requests.clone(),
        );
        r.register(
            "revision_moves",
            "Requests drawn to this revision and served by another, since its workers are away",
            new.revision_moves.clone(),
        );
        r.register(
            "zmq_frames",
            "Registrations over ZeroMQ by outcome, and connections that broke",
            new.zmq_frames.clone(),
        );
        new.registry = registry;
        new
    }
}

fn seconds(registry: &mut Registry, name: &str, help: &str, metric: impl Metric) {
    registry.register_with_unit(name, help, Unit::Seconds, metric);
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
