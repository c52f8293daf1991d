//! A connection made only to see whether it can be: the product's own holder, listener and reading
//! end over a few MiB that nobody needs, for `hetero-kv doctor`.
#![allow(unsafe_code)]

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hetero_kv_core::ids::{
    DpRank, EngineId, Epoch, Incarnation, InvalidId, LeaseRef, PpRank, Slot, TpRank, TransferId,
};
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::plan::{Owner, Pairing, Route, SourceChooser};
use hetero_kv_core::wire::card::{Endpoints, VerbsEndpoint};

use super::{Node, VerbsError, VerbsOptions, VerbsTransport};
use crate::clock::{now, time_left};
use crate::error::{ReadFailureKind, TransportError};
use crate::lease_page::LeasePage;
use crate::memory::{LocalMemory, MemoryError};
use crate::net::listen::ListenAddress;
use crate::tcp::{DataServer, HolderPlace, ServeError, ServerOptions};
use crate::transport::{Interrupt, ReadBatch, Source, Transport};
use crate::waker::Waker;

/// Bytes that are read: many packets of any size, few enough for the least limit on locked memory
/// that distributions set (8 MiB).
pub const TRIAL_BYTES: usize = 4 << 20;

/// Bytes of one run: 16 packets of the largest kind.
const RUN_BYTES: usize = 64 << 10;

/// For quiescence after a read that did not end.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a trial failed, by how far it came.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// This side cannot open its device or register memory.
    #[error(transparent)]
    Device(#[from] VerbsError),
    /// The holder's listener cannot start.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// This process lacks memory, descriptors or random bytes.
    #[error("cannot prepare the trial: {0}")]
    Prepare(String),
    /// No queue pair reached the holder, or not even 8 bytes were read.
    #[error("no queue pair reaches the other side: {0}")]
    Connect(TransportError),
    /// 8 bytes were read by every queue pair, and then larger packets were not answered.
    #[error("8 bytes are read, {TRIAL_BYTES} bytes in packets of {mtu_bytes} are not: {error}")]
    Read {
        /// Payload of a full packet, as both sides agreed.
        mtu_bytes: u32,
        /// The transport's words.
        error: TransportError,
    },
    /// What was read is not what the holder has.
    #[error("word {0} was read wrong")]
    Differs(usize),
}

fn prepare(error: impl ToString) -> TrialError {
    TrialError::Prepare(error.to_string())
}

/// What a reader has to know of a [`TrialHolder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrialSite {
    /// As a prefill rank announces it.
    pub endpoint: VerbsEndpoint,
    /// Its only region.
    pub region: MemoryRegion,
    /// Largest payload of a packet of its port, in bytes.
    pub mtu_bytes: u32,
    /// Its device, port and GID.
    pub device: String,
}

/// Memory that a [`try_read`] of another host may read. Dropping it ends every connection.
#[derive(Debug)]
pub struct TrialHolder {
    site: TrialSite,
    _server: DataServer,
    _node: Arc<Node>,
}

impl TrialHolder {
    /// Opens the device and listens as a prefill worker does.
    ///
    /// # Errors
    /// [`TrialError`], whose text says what is missing and how to mend it.
    pub fn start(options: VerbsOptions, address: ListenAddress) -> Result<Self, TrialError> {
        let words = words();
        for (at, word) in words.iter().enumerate() {
            word.store(pattern(at), Ordering::Relaxed);
        }
        let (memory, region) = registered(words).map_err(prepare)?;
        let page = Arc::new(LeasePage::new(1).map_err(prepare)?);
        let node = Node::open(
            options,
            address.host.parse().ok(),
            Arc::clone(&memory),
            Some(Arc::clone(&page)),
        )?;
        let server = DataServer::start(
            memory,
            page,
            ServerOptions {
                address,
                connections_max: 4,
                verbs: Some(Arc::clone(&node)),
                ..ServerOptions::default()
            },
        )?;
        let endpoint = node
            .endpoint(server.endpoint())
            .ok_or_else(|| prepare("memory with a lease page is announced"))?;
        server.serve_as(HolderPlace {
            owner: owner(&endpoint).map_err(prepare)?,
            tp_rank: TpRank(0),
            pp_rank: PpRank(0),
        });
        Ok(Self {
            site: TrialSite {
                endpoint,
                region,
                mtu_bytes: node.mtu_bytes(),
                device: node.describe(),
            },
            _server: server,
            _node: node,
        })
    }

    /// What a reader has to know.
    pub fn site(&self) -> &TrialSite {
        &self.site
    }
}

/// A trial that went well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// This side's device, port and GID.
    pub device: String,
    /// Payload of a full packet, as both sides agreed.
    pub mtu_bytes: u32,
    /// From the dial to queue pairs that have read 8 bytes each.
    pub connected: Duration,
    /// For [`TRIAL_BYTES`].
    pub read: Duration,
}

/// Connects to a holder as a decode worker does, reads all its bytes and compares them.
///
/// # Errors
/// [`TrialError`] by how far it came, within `timeout` and what quiescence takes.
pub fn try_read(
    options: VerbsOptions,
    advertised: Option<IpAddr>,
    site: &TrialSite,
    timeout: Duration,
) -> Result<Tried, TrialError> {
    let words = words();
    let (memory, _) = registered(words).map_err(prepare)?;
    let node = Node::open(options, advertised, Arc::clone(&memory), None)?;
    let mtu_bytes = node.mtu_bytes().min(site.mtu_bytes);
    let source = Source {
        route: route(&site.endpoint)?,
        endpoints: Endpoints {
            verbs: Some(site.endpoint.clone()),
            ..Endpoints::default()
        },
        regions: vec![site.region],
    };
    let waker = Waker::new().map_err(prepare)?;
    let interrupt = Interrupt {
        waker: &waker,
        should_stop: &|| false,
    };
    let (begun, deadline) = (now(), now() + timeout);
    let mut connection = VerbsTransport::new(Arc::clone(&node), None)
        .connect(&source, memory, deadline, &interrupt)
        .map_err(TrialError::Connect)?;
    let connected = now();
    let runs: Arc<[Run]> = (0..TRIAL_BYTES / RUN_BYTES)
        .map(|at| Run {
            source_region: 0,
            source_offset: (at * RUN_BYTES) as u64,
            dest_region: 0,
            dest_offset: (at * RUN_BYTES) as u64,
            bytes: RUN_BYTES as u64,
        })
        .collect();
    let batch = ReadBatch {
        ticket: 0,
        lease: LeaseRef {
            slot: Slot(0),
            epoch: Epoch(1),
        },
        range: 0..runs.len(),
        runs,
    };
    let mut completions = Vec::new();
    let mut outcome = connection.post(batch);
    while outcome.is_ok() && completions.is_empty() && !time_left(deadline).is_zero() {
        outcome = connection.poll(time_left(deadline), &waker, &mut completions);
    }
    let outcome = match completions.pop() {
        Some(completion) => completion.outcome,
        None => outcome.and(Err(TransportError::new(
            ReadFailureKind::Deadline,
            "ibv_poll_cq",
            format!("nothing came within {} s", timeout.as_secs()),
        ))),
    };
    let ended = now();
    // Nothing is handed back: the words are this process's until it ends.
    let quiet = connection.cancel_and_quiesce(now() + QUIESCE_TIMEOUT);
    outcome
        .and(quiet)
        .map_err(|error| TrialError::Read { mtu_bytes, error })?;
    if let Some(at) = (0..words.len()).find(|&at| words[at].load(Ordering::Relaxed) != pattern(at))
    {
        return Err(TrialError::Differs(at));
    }
    Ok(Tried {
        device: node.describe(),
        mtu_bytes,
        connected: connected.since(begun),
        read: ended.since(connected),
    })
}

/// Words that are never freed, so that nothing can outlive them. A process tries once.
fn words() -> &'static [AtomicU64] {
    let mut words = Vec::new();
    words.resize_with(TRIAL_BYTES / 8, AtomicU64::default);
    words.leak()
}

fn registered(
    words: &'static [AtomicU64],
) -> Result<(Arc<LocalMemory>, MemoryRegion), MemoryError> {
    let region = MemoryRegion {
        base: words.as_ptr().expose_provenance() as u64,
        bytes: size_of_val(words) as u64,
    };
    // SAFETY: the words are mapped for the life of the process, and references to them are to
    // atomics, so none claims that the bytes stand still.
    let memory = unsafe { LocalMemory::new(vec![region]) }?;
    Ok((Arc::new(memory), region))
}

/// A word of the holder's.
fn pattern(at: usize) -> u64 {
    (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// One rank alone; its start is told apart from any other by the nonce of its lease page.
fn owner(endpoint: &VerbsEndpoint) -> Result<Owner, InvalidId> {
    Ok(Owner {
        engine: EngineId::new("hetero_kv_doctor")?,
        incarnation: Incarnation(endpoint.lease_page_nonce),
        dp_rank: DpRank(0),
    })
}

fn route(endpoint: &VerbsEndpoint) -> Result<Route, TrialError> {
    let pairing = Pairing::new(1, 1, KvHeads::Latent).map_err(prepare)?;
    let plan = pairing
        .rank_plan(TpRank(0), &SourceChooser::new(TransferId([0; 16])))
        .map_err(prepare)?;
    let mut routes = plan.routes(&owner(endpoint).map_err(prepare)?, PpRank(0));
    routes.pop().ok_or_else(|| prepare("a plan of one rank"))
}

#[cfg(test)]
mod tests;
