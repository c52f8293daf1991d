//! The worker side for `hetero_kv.worker`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hetero_kv_core::layout::RankCache;
use hetero_kv_core::step::StepOrders;
use hetero_kv_transport::worker::{LoadReport, WorkerOptions, WorkerSide};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::json;

use crate::detached::Detached;
use crate::error;
use crate::options::WorkerStart;

/// Worker side of one rank: lease page, data listener, reader.
#[pyclass(frozen, module = "hetero_kv._core")]
pub(crate) struct Worker {
    side: Mutex<Detached<WorkerSide>>,
}

#[pymethods]
impl Worker {
    /// Takes the rank's KV cache as JSON (`regions` by address and length, `layers` by strides).
    ///
    /// `mori` is a `hetero_kv.mori.Library`, for that transport. The caller keeps the tensors behind
    /// the regions alive until this object is gone.
    #[new]
    #[pyo3(signature = (options_json, cache_json, mori=None))]
    #[allow(unsafe_code)]
    fn new(
        py: Python<'_>,
        options_json: &str,
        cache_json: &str,
        mori: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let start: WorkerStart =
            serde_json::from_str(options_json).map_err(|e| error::value("worker options", e))?;
        let cache: RankCache =
            serde_json::from_str(cache_json).map_err(|e| error::value("KV cache", e))?;
        let options = WorkerOptions {
            mori: mori.map(crate::mori::library),
            ..start
                .options()
                .map_err(|e| error::value("worker options", e))?
        };
        let side = py.detach(|| {
            // SAFETY: `hetero_kv.worker.WorkerConnector` builds the regions from the storages of
            // the tensors that vLLM registered and holds on to those tensors for longer than to
            // this object; torch moves no storage, and no Rust reference to them is ever made.
            unsafe { WorkerSide::start(start.place(), cache, options) }
        });
        let side = side.map_err(|e| error::system("worker", e))?;
        Ok(Self {
            side: Mutex::new(Detached::new(side)),
        })
    }

    /// What this rank announces of itself.
    fn card<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = rmp_serde::to_vec_named(self.side().card())
            .map_err(|e| error::broken(&format!("worker card: {e}")))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Carries out one step's orders, which this process has had for `age_s` seconds.
    fn step(&self, py: Python<'_>, orders: &[u8], age_s: f64) -> PyResult<()> {
        py.detach(|| {
            let orders = StepOrders::decode(orders).map_err(|e| error::broken(&e.to_string()))?;
            let age = Duration::try_from_secs_f64(age_s).unwrap_or_default();
            self.side().step(orders, age);
            Ok(())
        })
    }

    /// Waits on an empty step while something is pending, at most `timeout_ms`.
    fn wait(&self, py: Python<'_>, timeout_ms: f64) {
        let timeout = Duration::try_from_secs_f64(timeout_ms / 1e3).unwrap_or_default();
        py.detach(|| self.side().wait(timeout));
    }

    /// What has finished: ids for `finished_sending`, and one JSON text per ended load.
    fn take_results(&self, py: Python<'_>) -> (Vec<String>, Vec<String>) {
        py.detach(|| {
            let results = self.side().take_results();
            let received = results.received.iter().map(report_json).collect();
            (results.sent, received)
        })
    }

    /// Counters and gauges, as JSON.
    fn figures(&self) -> String {
        let figures = self.side().figures();
        let mut out = serde_json::Map::new();
        if let Some(reader) = figures.reader {
            out.insert("jobs_in_flight".into(), json!(reader.jobs_in_flight));
            out.insert("unquiesced".into(), json!(reader.jobs_unquiesced));
            out.insert("sessions".into(), json!(reader.sessions));
            let passed_over = reader.passed_over.iter();
            let passed_over: Vec<_> = passed_over
                .map(|((transport, why), count)| json!([transport.as_str(), why.as_str(), count]))
                .collect();
            out.insert("passed_over".into(), json!(passed_over));
            out.insert(
                "reconnects".into(),
                json!(reader.peers.iter().map(|peer| peer.reconnects).sum::<u64>()),
            );
        }
        if let Some(server) = figures.server {
            out.insert("bytes_served".into(), json!(server.sent_bytes));
            out.insert("fetches".into(), json!(server.fetches));
            out.insert("connections".into(), json!(server.connections));
            out.insert("fenced_fetches".into(), json!(server.leases_gone));
        }
        serde_json::Value::Object(out).to_string()
    }

    /// Ends reads and serving; true when nothing can write the KV cache any more.
    fn shutdown(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
        py.detach(|| self.side().shutdown(timeout))
    }
}

impl Worker {
    fn side(&self) -> MutexGuard<'_, Detached<WorkerSide>> {
        self.side.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn report_json(report: &LoadReport) -> String {
    json!({
        "request_id": report.request_id,
        "transfer_id": report.transfer_id,
        "engine": report.engine.as_ref().map(|engine| engine.as_str()),
        "reason": report.failure.as_ref().map(|failure| failure.reason.label()),
        "field": report.failure.as_ref().map(|failure| failure.field.as_str()),
        "text": report.failure.as_ref().map(|failure| failure.text.as_str()),
        "ordered": report.ordered,
        "invalid_blocks": report.invalid_blocks,
        "planned_bytes": report.planned_bytes,
        "sources": report.reads.iter().map(|read| json!({
            "dp": read.route.dp_rank(),
            "tp": read.route.tp_rank(),
            "pp": read.route.pp_rank(),
            "bytes": read.bytes,
            "transport": read.transport,
        })).collect::<Vec<_>>(),
        "lost_tp_rank": report.lost_source,
        "ms": report.elapsed.as_secs_f64() * 1e3,
    })
    .to_string()
}
