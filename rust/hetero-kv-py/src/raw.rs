//! The transports without an engine around them: memory that can be read, and a reader of it. For
//! the transports' tests and benchmarks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hetero_kv_core::ids::{
    DpRank, EngineId, Epoch, Incarnation, LeaseRef, PpRank, Slot, TpRank, TransferId,
};
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::plan::{Owner, Pairing, Route, SourceChooser};
use hetero_kv_core::wire::card::Endpoints;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::lease_page::LeasePage;
use hetero_kv_transport::memory::LocalMemory;
use hetero_kv_transport::mori::{MoriArrivals, MoriHolder, MoriHost, MoriTransport, Notifications};
use hetero_kv_transport::net::listen::ListenAddress;
use hetero_kv_transport::process::{self, ProcessHolder};
use hetero_kv_transport::reader::{
    JobDone, ReadJob, ReadPiece, Reader, ReaderOptions, TransportChoice,
};
use hetero_kv_transport::tcp::{DataServer, HolderPlace, ServerOptions};
use hetero_kv_transport::transport::Source;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::detached::Detached;
use crate::error;

/// Ranks that sources may stand for.
const RANKS: u32 = 64;

/// What a source announces.
#[derive(Serialize, Deserialize)]
struct Card {
    tp_rank: u32,
    incarnation: u64,
    endpoints: Endpoints,
    regions: Vec<MemoryRegion>,
}

fn owner(incarnation: u64) -> PyResult<Owner> {
    Ok(Owner {
        engine: EngineId::new("memory").map_err(|e| error::broken(&e.to_string()))?,
        incarnation: Incarnation(incarnation),
        dp_rank: DpRank(0),
    })
}

/// Only a plan makes a route.
fn route(tp_rank: u32, incarnation: u64) -> PyResult<Route> {
    let heads = RANKS.try_into().map(KvHeads::Grouped);
    let heads = heads.map_err(|_| error::broken("no heads"))?;
    let pairing = Pairing::new(RANKS, RANKS, heads).map_err(|e| error::broken(&e.to_string()))?;
    let plan = pairing
        .rank_plan(TpRank(tp_rank), &SourceChooser::new(TransferId([1; 16])))
        .map_err(|e| error::value("tp_rank", e))?;
    let routes = plan.routes(&owner(incarnation)?, PpRank(0));
    routes
        .into_iter()
        .next()
        .ok_or_else(|| error::broken("a plan without a source"))
}

/// Whom a card is of.
pub(crate) fn peer_of(card: &[u8]) -> PyResult<Source> {
    let read: Card = rmp_serde::from_slice(card).map_err(|e| error::value("card", e))?;
    Ok(Source {
        route: route(read.tp_rank, read.incarnation)?,
        endpoints: read.endpoints,
        regions: read.regions,
    })
}

#[allow(unsafe_code)]
pub(crate) fn register(regions: Vec<(u64, u64)>) -> PyResult<Arc<LocalMemory>> {
    let regions = regions
        .into_iter()
        .map(|(base, bytes)| MemoryRegion { base, bytes })
        .collect();
    // SAFETY: every class that calls this tells their caller to keep the memory mapped until the object is gone,
    // and no Rust reference to it is ever made.
    let memory = unsafe { LocalMemory::new(regions) };
    Ok(Arc::new(memory.map_err(|e| error::value("regions", e))?))
}

struct Offered {
    page: Arc<LeasePage>,
    card: Card,
    _process: ProcessHolder,
    _server: DataServer,
    /// What was asked of writers, by their descriptors.
    arrivals: Mutex<HashMap<Vec<u8>, MoriArrivals>>,
    mori: Option<MoriHolder>,
}

/// Memory of this process that a [`MemoryReader`] of another one may read, and a
/// [`crate::push::MemoryWriter`] write. The caller keeps it mapped until the object is gone.
#[pyclass(frozen, module = "hetero_kv._core")]
pub(crate) struct MemorySource {
    offered: Detached<Offered>,
}

#[pymethods]
impl MemorySource {
    /// Offers `regions` (address and length) by `process`, `tcp`, and `mori` where a
    /// `hetero_kv.mori.Library` is given; whether that is with notifications of writes.
    #[new]
    #[pyo3(signature = (
        regions, host="127.0.0.1", tp_rank=0, lease_slots=64, mori=None, notifications=false
    ))]
    fn new(
        py: Python<'_>,
        regions: Vec<(u64, u64)>,
        host: &str,
        tp_rank: u32,
        lease_slots: u32,
        mori: Option<Py<PyAny>>,
        notifications: bool,
    ) -> PyResult<Self> {
        let memory = register(regions)?;
        let notifications = if notifications {
            Notifications::On
        } else {
            Notifications::Off
        };
        let mori = mori.map(crate::mori::library);
        let address = ListenAddress {
            host: host.into(),
            ..ServerOptions::default().address
        };
        let incarnation = getrandom()?;
        let place = HolderPlace {
            owner: owner(incarnation)?,
            tp_rank: TpRank(tp_rank),
            pp_rank: PpRank(0),
        };
        py.detach(|| {
            let page = LeasePage::new(lease_slots).map_err(|e| error::system("lease page", e))?;
            let page = Arc::new(page);
            let holder = process::of_this_process(Arc::clone(&page), true)
                .map_err(|e| error::system("process", e))?;
            let options = ServerOptions {
                address: address.clone(),
                ..ServerOptions::default()
            };
            let server = DataServer::start(Arc::clone(&memory), Arc::clone(&page), options)
                .map_err(|e| error::system("tcp", e))?;
            server.serve_as(place);
            let mori = match &mori {
                Some(library) => {
                    let host = MoriHost::new(&address).map_err(|e| error::value("host", e))?;
                    let holder = MoriHolder::start(
                        library.as_ref(),
                        &host,
                        Arc::clone(&memory),
                        Arc::clone(&page),
                        notifications,
                    );
                    Some(holder.map_err(|e| error::system("mori", e))?)
                }
                None => None,
            };
            let card = Card {
                tp_rank,
                incarnation,
                endpoints: Endpoints {
                    process: Some(holder.endpoint().clone()),
                    tcp: Some(server.endpoint().clone()),
                    mori: mori.as_ref().map(|holder| holder.endpoint().clone()),
                    ..Endpoints::default()
                },
                regions: memory.regions().to_vec(),
            };
            Ok(Self {
                offered: Detached::new(Offered {
                    page,
                    card,
                    _process: holder,
                    _server: server,
                    arrivals: Mutex::default(),
                    mori,
                }),
            })
        })
    }

    /// What a reader needs to know.
    fn card<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = rmp_serde::to_vec_named(&self.offered.card)
            .map_err(|e| error::broken(&format!("card: {e}")))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Raises a slot's epoch; whether that changed it.
    fn bump(&self, slot: u32, epoch: u64) -> PyResult<bool> {
        let bumped = self.offered.page.bump(Slot(slot), Epoch(epoch));
        bumped.map_err(|e| error::value("slot", e))
    }

    /// Whether the write of this number by the writer of this descriptor is here, by `mori`.
    fn arrived(&self, py: Python<'_>, writer: Vec<u8>, uid: u64) -> PyResult<bool> {
        py.detach(|| {
            let mut all = self
                .offered
                .arrivals
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let found = match all.remove(&writer) {
                Some(known) => known,
                None => self
                    .holder()?
                    .arrivals(&writer)
                    .map_err(|e| error::value("writer", e))?,
            };
            let arrived = found.arrived(uid);
            all.insert(writer, found);
            arrived.map_err(|e| error::system("arrived", e))
        })
    }

    /// Takes back the registrations of `mori`: nobody reads or writes the memory by it any more.
    fn revoke(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let revoked = self.holder()?.revoke();
            revoked.map_err(|e| error::system("revoke", e))
        })
    }
}

impl MemorySource {
    fn holder(&self) -> PyResult<&MoriHolder> {
        let holder = self.offered.mori.as_ref();
        holder.ok_or_else(|| error::value("mori", "the memory is not offered by it"))
    }
}

fn getrandom() -> PyResult<u64> {
    let page = LeasePage::new(1).map_err(|e| error::system("random", e))?;
    Ok(page.nonce())
}

/// Reads memory of other processes into this one's. The caller keeps it mapped until the object
/// is gone.
#[pyclass(frozen, module = "hetero_kv._core")]
pub(crate) struct MemoryReader {
    reader: Detached<Reader>,
    source: Mutex<Option<(Vec<u8>, Arc<Source>)>>,
}

#[pymethods]
impl MemoryReader {
    /// Reads into `regions` (address and length) by one transport: `auto`, `process`, `tcp`, or
    /// `mori` with a `hetero_kv.mori.Library`.
    #[new]
    #[pyo3(signature = (regions, transport, host="127.0.0.1", mori=None, quiesce_timeout_s=10.0))]
    fn new(
        py: Python<'_>,
        regions: Vec<(u64, u64)>,
        transport: &str,
        host: &str,
        mori: Option<Py<PyAny>>,
        quiesce_timeout_s: f64,
    ) -> PyResult<Self> {
        let memory = register(regions)?;
        let choice = match transport {
            "auto" => TransportChoice::Auto,
            "process" => TransportChoice::Process,
            "tcp" => TransportChoice::Tcp,
            "mori" => TransportChoice::Mori,
            other => return Err(error::value("transport", format!("{other:?} is none"))),
        };
        let mori = match mori.map(crate::mori::library) {
            Some(library) => {
                let host = MoriHost::new(&ListenAddress {
                    host: host.into(),
                    ..ServerOptions::default().address
                });
                let host = host.map_err(|e| error::value("host", e))?;
                let started =
                    py.detach(|| MoriTransport::start(library, host, &memory, Notifications::Off));
                Some(Arc::new(started.map_err(|e| error::system("mori", e))?))
            }
            None => None,
        };
        let options = ReaderOptions {
            choice,
            mori,
            quiesce_timeout: Duration::try_from_secs_f64(quiesce_timeout_s).unwrap_or_default(),
            ..ReaderOptions::default()
        };
        Ok(Self {
            reader: Detached::new(Reader::start(memory, options)),
            source: Mutex::default(),
        })
    }

    /// Begins to read `runs` (source region, offset, own region, offset, bytes) under the lease of
    /// a slot's epoch.
    #[pyo3(signature = (id, card, runs, slot=0, epoch=1, deadline_s=60.0))]
    #[allow(clippy::too_many_arguments)]
    fn submit(
        &self,
        py: Python<'_>,
        id: u64,
        card: &[u8],
        runs: Vec<(u32, u64, u32, u64, u64)>,
        slot: u32,
        epoch: u64,
        deadline_s: f64,
    ) -> PyResult<()> {
        let source = self.source_of(card)?;
        let runs = runs_of(runs);
        let job = ReadJob {
            id,
            lease: LeaseRef {
                slot: Slot(slot),
                epoch: Epoch(epoch),
            },
            deadline: now() + Duration::try_from_secs_f64(deadline_s).unwrap_or_default(),
            pieces: vec![ReadPiece {
                source,
                runs: runs.into(),
            }],
        };
        py.detach(|| self.reader.submit(job))
            .map_err(|e| error::system("submit", e))
    }

    /// Stops a job; whether it was in flight.
    fn cancel(&self, py: Python<'_>, id: u64) -> bool {
        py.detach(|| self.reader.cancel(id))
    }

    /// Waits until a job is done; whether one is.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
        py.detach(|| self.reader.wait(timeout))
    }

    /// Jobs that are done, one JSON text each.
    fn drain(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.reader.drain().iter().map(done_json).collect())
    }

    /// Gauges, as JSON.
    fn figures(&self, py: Python<'_>) -> String {
        let stats = py.detach(|| self.reader.stats());
        json!({
            "jobs_in_flight": stats.jobs_in_flight,
            "unquiesced": stats.jobs_unquiesced,
            "sessions": stats.sessions,
            "reconnects": stats.peers.iter().map(|peer| peer.reconnects).sum::<u64>(),
        })
        .to_string()
    }

    /// Ends every read; true when nothing can write this process's memory any more.
    fn shutdown(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
        py.detach(|| self.reader.shutdown(now() + timeout).is_ok())
    }
}

impl MemoryReader {
    /// The source of a card; that of the last one again where it is the same.
    fn source_of(&self, card: &[u8]) -> PyResult<Arc<Source>> {
        let mut last: MutexGuard<'_, _> =
            self.source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((bytes, source)) = last.as_ref()
            && bytes == card
        {
            return Ok(Arc::clone(source));
        }
        let source = Arc::new(peer_of(card)?);
        *last = Some((card.to_vec(), Arc::clone(&source)));
        Ok(source)
    }
}

/// Runs from their columns: source region, offset, destination region, offset, bytes.
pub(crate) fn runs_of(runs: Vec<(u32, u64, u32, u64, u64)>) -> Vec<Run> {
    let run = |(source_region, source_offset, dest_region, dest_offset, bytes)| Run {
        source_region,
        source_offset,
        dest_region,
        dest_offset,
        bytes,
    };
    runs.into_iter().map(run).collect()
}

fn done_json(done: &JobDone) -> String {
    let failure = done.outcome.as_ref().err();
    json!({
        "id": done.id,
        "kind": failure.map(|failure| failure.kind.as_str()),
        "text": failure.map(|failure| failure.text.as_str()),
        "bytes": done.reads.iter().map(|read| read.bytes).sum::<u64>(),
        "transport": done.reads.first().and_then(|read| read.transport).map(|name| name.as_str()),
        "ms": done.elapsed.as_secs_f64() * 1e3,
    })
    .to_string()
}
