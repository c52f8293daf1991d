//! The worker side of one rank: its lease page and data listener (producer), its reader
//! (consumer), and what one step of vLLM asks of them.
//!
//! Called by vLLM's worker thread only. Nothing here waits for a peer: reads run in the reader's
//! threads, and [`WorkerSide::take_results`] hands out what they have finished.

mod holder;
mod loads;
mod waiting;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::Duration;

use hetero_kv_core::failure::Failure;
use hetero_kv_core::ids::{BlockId, DpRank, EngineId, PpRank, TpRank, TransferId};
use hetero_kv_core::layout::{KvHeads, RankCache};
use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::plan::{Owner, Route, Striping};
use hetero_kv_core::step::{LoadOrder, StepOrders};
use hetero_kv_core::wire::card::{Endpoints, WorkerCard};

use crate::clock;
use crate::lease_page::LeasePage;
use crate::memory::{LocalMemory, MemoryError};
use crate::mori::{MoriError, MoriHolder, MoriHost, MoriHostError, MoriLibrary, MoriTransport};
use crate::reader::{Reader, ReaderOptions, ReaderStats};
use crate::scheduler::Roles;
use crate::tcp::{DataServer, HolderPlace, ServeError, ServerOptions, ServerStats};
use crate::verbs::{Node, VerbsError, VerbsOptions};
use holder::Holder;
use loads::ConsumerRank;
use waiting::WaitingLoad;

/// This rank's place in its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerPlace {
    /// vLLM's engine id.
    pub engine: EngineId,
    /// vLLM's `data_parallel_index`.
    pub dp_rank: DpRank,
    /// Tensor parallel rank.
    pub tp_rank: TpRank,
    /// Tensor parallel size.
    pub tp_size: u32,
    /// Pipeline stage.
    pub pp_rank: PpRank,
    /// Pipeline stages.
    pub pp_size: u32,
    /// KV heads over all ranks.
    pub heads: KvHeads,
}

/// Settings of the worker side.
#[derive(Clone)]
pub struct WorkerOptions {
    /// Which sides to run.
    pub roles: Roles,
    /// The data listener.
    pub server: ServerOptions,
    /// The reader.
    pub reader: ReaderOptions,
    /// Whether other processes of this user may read this one's memory under Yama.
    pub allow_ptracer: bool,
    /// Slots of the lease page.
    pub lease_slots: u32,
    /// Whether the `process` endpoint is announced.
    pub offer_process: bool,
    /// Whether the `tcp` endpoint is announced.
    pub offer_tcp: bool,
    /// Whether and how RDMA is used, by either side.
    pub verbs: VerbsUse,
    /// MoRI-IO, where it is set: its endpoint is announced, and sources are read by it.
    pub mori: Option<Arc<dyn MoriLibrary>>,
    /// Tokens of a block of this engine.
    pub block_size: u32,
    /// When a read is split over several sources.
    pub striping: Striping,
}

/// Whether a worker uses RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VerbsUse {
    /// Not at all.
    Off,
    /// Where there is a device; else the other transports serve.
    IfThere(VerbsOptions),
    /// Without it the worker does not start.
    Required(VerbsOptions),
}

/// Why a worker side cannot start.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The cache's regions cannot be used.
    #[error("KV cache: {0}")]
    Memory(#[from] MemoryError),
    /// The lease page or the process endpoint.
    #[error("lease page: {0}")]
    Page(io::Error),
    /// The data listener.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The reader.
    #[error("reader: {0}")]
    Reader(String),
    /// RDMA is required and cannot be used.
    #[error("transport verbs: {0}")]
    Verbs(#[from] VerbsError),
    /// MoRI-IO.
    #[error("transport mori: {0}")]
    Mori(#[from] MoriError),
    /// The address for MoRI-IO.
    #[error(transparent)]
    MoriHost(#[from] MoriHostError),
    /// A region outside of the words that [`WorkerSide::start_on`] was given.
    #[error("KV cache: region {0} lies outside of the memory given")]
    Elsewhere(usize),
}

/// What a step has finished, each id exactly once per rank.
#[derive(Clone, Debug, Default)]
pub struct StepResults {
    /// For vLLM's `finished_sending`.
    pub sent: Vec<String>,
    /// For vLLM's `finished_recving`.
    pub received: Vec<LoadReport>,
}

/// One load's end on this rank.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// vLLM's internal id.
    pub request_id: String,
    /// `None` for a load that was never started.
    pub transfer_id: Option<TransferId>,
    /// The engine read; `None` for a load that was never started.
    pub engine: Option<EngineId>,
    /// `None`: every byte arrived and was proven right.
    pub failure: Option<Failure>,
    /// Whether the scheduler side ordered the failure, and has counted it.
    pub ordered: bool,
    /// Blocks that hold nothing usable when the load failed.
    pub invalid_blocks: Vec<BlockId>,
    /// Bytes that the plan moves.
    pub planned_bytes: u64,
    /// Bytes moved by source.
    pub reads: Vec<SourceRead>,
    /// The source rank that was lost or out of reach, when that is why it failed.
    pub lost_source: Option<TpRank>,
    /// From order to end.
    pub elapsed: Duration,
}

impl LoadReport {
    /// Of a load that never began on this rank.
    fn unread(order: LoadOrder, failure: Failure) -> Self {
        Self {
            request_id: order.request_id,
            transfer_id: Some(order.transfer_id),
            engine: None,
            failure: Some(failure),
            ordered: false,
            invalid_blocks: order.dest_blocks,
            planned_bytes: 0,
            reads: Vec::new(),
            lost_source: None,
            elapsed: Duration::ZERO,
        }
    }
}

/// Bytes read from one source rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceRead {
    /// The source rank.
    pub route: Route,
    /// Key of the session that read it; `None` when none had taken it up.
    pub session: Option<Route>,
    /// The other end of its connection, as the system says: `ADDRESS:PORT`, or `pid N`.
    pub dialled: Option<Arc<str>>,
    /// Data parallel rank of the source.
    pub dp_rank: DpRank,
    /// Tensor parallel rank of the source.
    pub tp_rank: TpRank,
    /// Pipeline stage of the source.
    pub pp_rank: PpRank,
    /// Bytes.
    pub bytes: u64,
    /// Transport that moved them.
    pub transport: &'static str,
}

/// A moment's figures of the worker side.
#[derive(Clone, Debug, Default)]
pub struct WorkerFigures {
    /// Of the reader.
    pub reader: Option<ReaderStats>,
    /// Of the data listener.
    pub server: Option<ServerStats>,
}

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
    /// As [`WorkerSide::start`], over words that last as long as the process and that everybody
    /// touches as atomics: nothing is left for the caller to promise.
    ///
    /// # Errors
    /// [`WorkerError`]; [`WorkerError::Elsewhere`] for a region that is not within `words`.
    #[allow(unsafe_code)]
    pub fn start_on(
        words: &'static [AtomicU64],
        place: WorkerPlace,
        cache: RankCache,
        options: WorkerOptions,
    ) -> Result<Self, WorkerError> {
        let first = words.as_ptr().expose_provenance() as u64;
        let past_last = first + size_of_val(words) as u64;
        let inside = |region: &MemoryRegion| {
            let end = region.base.checked_add(region.bytes);
            first <= region.base && end.is_some_and(|end| end <= past_last)
        };
        if let Some(elsewhere) = cache.regions().iter().position(|region| !inside(region)) {
            return Err(WorkerError::Elsewhere(elsewhere));
        }
        // SAFETY: every region lies within `words`, which are never freed nor moved; references to
        // them are to atomics, so none claims that the bytes stand still.
        unsafe { Self::start(place, cache, options) }
    }

    /// Starts what the roles need. Nothing is read or served before the first step.
    ///
    /// # Safety
    /// The memory of `cache`'s regions stays mapped and in place until the returned value is
    /// dropped, and no Rust reference ever covers it.
    #[allow(unsafe_code)]
    pub unsafe fn start(
        place: WorkerPlace,
        cache: RankCache,
        options: WorkerOptions,
    ) -> Result<Self, WorkerError> {
        // SAFETY: the caller vouches for the regions, for longer than `memory` lives: it is owned
        // by this value and by threads that end when it is dropped.
        let memory = Arc::new(unsafe { LocalMemory::new(cache.regions().to_vec()) }?);
        let mut endpoints = Endpoints::default();
        let page = options
            .roles
            .producer
            .then(|| LeasePage::new(options.lease_slots).map(Arc::new))
            .transpose()
            .map_err(WorkerError::Page)?;
        let mori = match &options.mori {
            Some(library) => Some((Arc::clone(library), MoriHost::new(&options.server.address)?)),
            None => None,
        };
        let node = open_verbs(&options, &memory, page.as_ref())?;
        let holder = if let Some(page) = page {
            let process = if options.offer_process {
                let holder =
                    crate::process::of_this_process(Arc::clone(&page), options.allow_ptracer)
                        .map_err(WorkerError::Page)?;
                endpoints.process = Some(holder.endpoint().clone());
                Some(holder)
            } else {
                None
            };
            let server = if options.offer_tcp || node.is_some() {
                let server = DataServer::start(
                    Arc::clone(&memory),
                    Arc::clone(&page),
                    ServerOptions {
                        verbs: node.clone(),
                        ..options.server.clone()
                    },
                )?;
                let listener = server.endpoint().clone();
                endpoints.verbs = node.as_ref().and_then(|node| node.endpoint(&listener));
                endpoints.tcp = options.offer_tcp.then_some(listener);
                Some(server)
            } else {
                None
            };
            let mori = match &mori {
                Some((library, host)) => Some(MoriHolder::start(
                    library.as_ref(),
                    host,
                    Arc::clone(&memory),
                    Arc::clone(&page),
                )?),
                None => None,
            };
            endpoints.mori = mori.as_ref().map(|holder| holder.endpoint().clone());
            Some(Holder {
                page,
                server,
                _process: process,
                _mori: mori,
                named: false,
            })
        } else {
            None
        };
        let consumer = if options.roles.consumer {
            let mut reader = ReaderOptions {
                verbs: node,
                ..options.reader
            };
            if let Some((library, host)) = mori {
                let transport = MoriTransport::start(library, host, &memory)?;
                reader.mori = Some(Arc::new(transport));
            }
            Some(ConsumerRank::new(
                Reader::start(Arc::clone(&memory), reader),
                options.block_size,
                options.striping,
            ))
        } else {
            None
        };
        let card = WorkerCard {
            dp_rank: place.dp_rank,
            tp_rank: place.tp_rank,
            pp_rank: place.pp_rank,
            cache,
            endpoints,
        };
        Ok(Self {
            place,
            card,
            holder,
            consumer,
            results: StepResults::default(),
            pending: 0,
        })
    }

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

/// Opens the RDMA device where it is to be used.
fn open_verbs(
    options: &WorkerOptions,
    memory: &Arc<LocalMemory>,
    page: Option<&Arc<LeasePage>>,
) -> Result<Option<Arc<Node>>, VerbsError> {
    let (wanted, required) = match &options.verbs {
        VerbsUse::Off => return Ok(None),
        VerbsUse::IfThere(wanted) => (wanted, false),
        VerbsUse::Required(wanted) => (wanted, true),
    };
    let advertised = options.server.address.host.parse().ok();
    match Node::open(
        wanted.clone(),
        advertised,
        Arc::clone(memory),
        page.map(Arc::clone),
    ) {
        Ok(node) => Ok(Some(node)),
        Err(error) if required => Err(error),
        Err(error @ (VerbsError::NoLibrary(_) | VerbsError::NoDevice(_))) => {
            tracing::debug!(%error, "the other transports serve");
            Ok(None)
        }
        Err(error) => {
            // There is a device, so somebody expects it to be used.
            tracing::warn!(%error, "RDMA is not used");
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests;
