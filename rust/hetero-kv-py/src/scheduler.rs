//! The scheduler side for `hetero_kv.scheduler`.

use std::time::Duration;

use hetero_kv_core::consumer::PeerAddress;
use hetero_kv_core::ids::{BlockId, EngineId, Incarnation, TpRank};
use hetero_kv_core::wire::card::WorkerCard;
use hetero_kv_core::wire::params::TransferParams;
use hetero_kv_transport::control::ControlLimits;
use hetero_kv_transport::registration::Registration;
use hetero_kv_transport::scheduler::{
    Prefilled, SchedulerFigures, SchedulerOptions, SchedulerSide, random_bytes,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::json;

use crate::options::SchedulerStart;
use crate::{digest, error};

/// Scheduler side of one engine: control listener, leases, claims.
#[pyclass(frozen, module = "hetero_kv._core")]
pub(crate) struct Scheduler {
    side: SchedulerSide,
    registration: Option<Registration>,
}

#[pymethods]
impl Scheduler {
    /// Binds the control listener (producer) and starts the control thread. `cards` are those of
    /// all of the engine's workers.
    #[new]
    fn new(py: Python<'_>, options_json: &str, cards: Vec<Vec<u8>>) -> PyResult<Self> {
        let start: SchedulerStart =
            serde_json::from_str(options_json).map_err(|e| error::value("scheduler options", e))?;
        let workers = cards
            .iter()
            .map(|card| rmp_serde::from_slice::<WorkerCard>(card))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| error::value("worker card", e))?;
        let incarnation = random_bytes().map_err(|e| error::system("random bytes", e))?;
        let incarnation = Incarnation(u64::from_le_bytes(incarnation));
        let identity = start.engine.identity(incarnation);
        let (fields, host) = (start.fields.clone(), start.settings.host.clone());
        let block_size = start.engine.block_size;
        let keys = (start.settings.keys()).map_err(|e| error::value("scheduler options", e))?;
        let options = SchedulerOptions {
            identity: identity.clone(),
            fields: start.fields,
            heads: start.engine.heads(),
            workers,
            roles: start.engine.roles(),
            address: start.settings.address(&start.engine),
            limits: ControlLimits::default(),
            leases: start.settings.leases(),
            lease_slots: start.settings.lease_slots,
            consumer: start.settings.consumer(start.engine.block_size),
            keys,
        };
        let side = py
            .detach(|| SchedulerSide::start(options))
            .map_err(|e| error::system("scheduler side", e))?;
        for (host, port) in start.settings.connect {
            side.keep_connected(host, port);
        }
        let registration = match start.registration {
            Some(registration) => {
                let control = side.port().map(|port| (host.as_str(), port));
                let options = registration
                    .options(&identity, control, block_size, &fields)
                    .map_err(|fault| error::value("registration", fault))?;
                let started = Registration::start(options);
                Some(started.map_err(|e| error::system("registration", e))?)
            }
            None => None,
        };
        Ok(Self { side, registration })
    }

    /// Port of the control listener; `None` for a consumer.
    #[getter]
    fn port(&self) -> Option<u16> {
        self.side.port()
    }

    /// `on_new_request`.
    fn new_request(
        &self,
        py: Python<'_>,
        request_id: &str,
        params_json: &str,
        token_ids: Vec<u32>,
        ingredients: Vec<(String, Vec<u8>)>,
        prompt_tokens: u32,
    ) {
        py.detach(|| {
            let prompt = digest(&token_ids, &ingredients);
            let params = TransferParams::parse(params_json);
            self.side
                .new_request(request_id, params, prompt, prompt_tokens);
        });
    }

    /// `get_num_new_matched_tokens`: tokens to load beyond `computed_tokens`.
    fn matched_tokens(&self, request_id: &str, computed_tokens: u32) -> u32 {
        self.side.matched_tokens(request_id, computed_tokens)
    }

    /// `update_state_after_alloc`.
    fn allocated(&self, request_id: &str, block_ids: Vec<u32>, external_tokens: u32) {
        let blocks: Vec<BlockId> = block_ids.into_iter().map(BlockId).collect();
        self.side.allocated(request_id, &blocks, external_tokens);
    }

    /// `request_finished` of a prefill for another engine: the params to answer with, as JSON, or
    /// `None` and the reason why its blocks are not held.
    // The hook's own values, one by one: a class for them would only be for this call.
    #[allow(clippy::too_many_arguments)]
    fn prefilled(
        &self,
        py: Python<'_>,
        request_id: String,
        params_json: &str,
        token_ids: Vec<u32>,
        ingredients: Vec<(String, Vec<u8>)>,
        block_ids: Vec<Vec<u32>>,
        num_tokens: u32,
    ) -> (Option<String>, Option<String>) {
        py.detach(|| {
            let transfer_id = match TransferParams::parse(params_json) {
                Ok(TransferParams::Prefill { transfer_id }) => transfer_id,
                Ok(TransferParams::Absent | TransferParams::Decode(_)) => {
                    return (None, Some("the request asks for no hand-off".into()));
                }
                Err(error) => return (None, Some(error.to_string())),
            };
            let prefilled = Prefilled {
                request_id,
                transfer_id,
                digest: digest(&token_ids, &ingredients),
                block_ids: block_ids
                    .into_iter()
                    .map(|group| group.into_iter().map(BlockId).collect())
                    .collect(),
                num_tokens,
            };
            match self.side.prefilled(prefilled) {
                Ok(params) => (Some(params.to_json().to_string()), None),
                Err(refused) => (None, Some(refused.to_string())),
            }
        })
    }

    /// `request_finished` of a request of the consumer side.
    fn finished(&self, request_id: &str) {
        self.side.finished(request_id);
    }

    /// `request_finished` of a request that never reached the scheduler.
    fn rejected(&self, params_json: &str) {
        self.side.rejected(TransferParams::parse(params_json));
    }

    /// A worker could not read from this source rank.
    fn source_lost(&self, request_id: &str, tp_rank: u32) {
        self.side.source_lost(request_id, TpRank(tp_rank));
    }

    /// `finished_recving` of all workers.
    fn received(&self, request_id: &str, failed: bool) {
        self.side.received(request_id, failed);
    }

    /// `finished_sending` of all workers.
    fn sent(&self, request_id: &str) {
        self.side.sent(request_id);
    }

    /// Orders for the next step, for every worker.
    fn take_orders<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let orders = self.side.take_orders();
        let bytes = orders.encode().map_err(|e| error::broken(&e.to_string()))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Waits for an order to give, at most `timeout_ms`.
    fn wait_for_orders(&self, py: Python<'_>, timeout_ms: f64) {
        let timeout = Duration::try_from_secs_f64(timeout_ms / 1e3).unwrap_or_default();
        py.detach(|| self.side.wait_for_orders(timeout));
    }

    /// Pairs with a prefill engine before any request needs it.
    fn connect(&self, host: String, port: u16, engine_id: &str, incarnation: &str) -> PyResult<()> {
        let incarnation =
            u64::from_str_radix(incarnation, 16).map_err(|e| error::value("incarnation", e))?;
        self.side.connect(PeerAddress {
            host,
            port,
            engine: EngineId::new(engine_id).map_err(|e| error::value("engine_id", e))?,
            incarnation: Incarnation(incarnation),
        });
        Ok(())
    }

    /// Ends every lease.
    fn revoke_leases(&self) {
        self.side.revoke_leases();
    }

    /// Says goodbye to the proxy, closes every connection and waits for the threads.
    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| {
            // First: while it is registered it gets requests.
            if let Some(registration) = &self.registration {
                registration.stop();
            }
            self.side.shutdown();
        });
    }

    /// Counters and gauges, as JSON.
    fn figures(&self) -> String {
        figures_json(&self.side.figures()).to_string()
    }
}

fn figures_json(figures: &SchedulerFigures) -> serde_json::Value {
    let mut counters = serde_json::Map::new();
    let mut gauges = serde_json::Map::new();
    let mut failures = Vec::new();
    if let Some((counts, held)) = &figures.producer {
        for (name, value) in [
            ("leases_granted", counts.granted),
            ("leases_read_out", counts.read_out),
            ("leases_released", counts.released),
            ("leases_expired", counts.expired),
            ("claims_refused", counts.gone),
            ("offers_refused", counts.refused_offers),
            ("late_messages", counts.late),
            ("peers_rejected", counts.rejected_peers),
        ] {
            counters.insert(name.into(), json!(value));
        }
        gauges.insert("leases_alive".into(), json!(held.leases_alive));
        gauges.insert(
            "oldest_lease_s".into(),
            json!(held.oldest_lease.as_secs_f64()),
        );
    }
    if let Some(counts) = &figures.consumer {
        for (name, value) in [
            ("claims_gone", counts.claims_gone),
            ("digest_mismatches", counts.digest_mismatches),
            ("loads_ordered", counts.loads),
            ("reconnects", counts.reconnects),
            ("quarantines", counts.quarantines),
            ("dials", counts.dials),
        ] {
            counters.insert(name.into(), json!(value));
        }
        gauges.insert("sources_avoided".into(), json!(figures.sources_avoided));
        gauges.insert("peers_ready".into(), json!(figures.peers_ready));
        gauges.insert("requests_open".into(), json!(figures.consumer_open.0));
        gauges.insert("transfers_open".into(), json!(figures.consumer_open.1));
        for ((reason, field), count) in &counts.failures {
            failures.push(json!([reason.label(), field, count]));
        }
    }
    json!({"counters": counters, "gauges": gauges, "failures": failures})
}
