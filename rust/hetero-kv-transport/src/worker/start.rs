//! What a worker side is started with, and its start.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hetero_kv_core::ids::{DpRank, EngineId, PpRank, TpRank};
use hetero_kv_core::layout::{KvHeads, RankCache};
use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::plan::Striping;
use hetero_kv_core::wire::card::{Endpoints, WorkerCard};

use super::WorkerSide;
use super::holder::Holder;
use super::loads::ConsumerRank;
use super::report::StepResults;
use crate::lease_page::LeasePage;
use crate::memory::{LocalMemory, MemoryError};
use crate::mori::{
    MoriError, MoriHolder, MoriHost, MoriHostError, MoriLibrary, MoriTransport, Notifications,
};
use crate::reader::{Reader, ReaderOptions};
use crate::scheduler::Roles;
use crate::tcp::{DataServer, ServeError, ServerOptions};
use crate::verbs::{Node, VerbsError, VerbsOptions};

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
// Each text is whole, so what it quotes is not its source too: a chain would say it twice.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The cache's regions cannot be used.
    #[error("KV cache: {0}")]
    Memory(MemoryError),
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
    Verbs(VerbsError),
    /// MoRI-IO.
    #[error("transport mori: {0}")]
    Mori(MoriError),
    /// The address for MoRI-IO.
    #[error(transparent)]
    MoriHost(#[from] MoriHostError),
    /// A region outside of the words that [`WorkerSide::start_on`] was given.
    #[error("KV cache: region {0} lies outside of the memory given")]
    Elsewhere(usize),
}

impl From<MemoryError> for WorkerError {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
}

impl From<VerbsError> for WorkerError {
    fn from(error: VerbsError) -> Self {
        Self::Verbs(error)
    }
}

impl From<MoriError> for WorkerError {
    fn from(error: MoriError) -> Self {
        Self::Mori(error)
    }
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
                    Notifications::Off,
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
                let transport = MoriTransport::start(library, host, &memory, Notifications::Off)?;
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
