//! `verbs`: RDMA reads straight from a rank's KV memory into ours, by libibverbs.
//!
//! The library is found at run time ([`library`]); without it, or without a device, there is one
//! clear reason and the other transports go on. Queue pairs are made over a connection to the
//! holder's data listener, which stays open: its end tells either side that the other has gone.
//!
//! The holder's processor takes no part in a read, so the reader fences by the holder's lease page,
//! which it reads by the same queue pair behind the data. A cancelled read is over when its queue
//! pairs are in their error state and drained.
//!
//! | file | what |
//! |---|---|
//! | `sys` | the library's types, written by a script |
//! | `library`, `device`, `memory`, `completion`, `queue_pair` | its objects, one each; whatever is made of another keeps it alive |
//! | `node` | what one process has: a device, registered memory, its events |
//! | `gid` | addresses of a port, and which of them can be used |
//! | `survey`, `trial` | what `hetero-kv doctor` looks at: every device, and a connection between two hosts |
//! | `path` | what two ports agree on |
//! | `work`, `lane`, `connection` | runs to requests; one queue pair's queue; the reading end |
//! | `holder` | the holding end |

mod completion;
mod connection;
mod device;
mod error;
mod gid;
pub(crate) mod holder;
mod lane;
mod library;
mod memory;
mod node;
mod path;
mod queue_pair;
mod survey;
mod sys;
pub mod trial;
mod work;

use std::net::IpAddr;
use std::sync::Arc;

use hetero_kv_core::auth::Keys;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::{Endpoints, VerbsEndpoint};
use hetero_kv_core::wire::data::{QueuePairEnd, QueuePairEnds, VerbsRefused};
use hetero_kv_core::wire::{Kind, decode, encode};

pub use device::DeviceChoice;
pub use error::{RAISE_LOCKED_MEMORY, Verb, VerbsError, WorkFailure};
pub use node::{Node, VerbsOptions};
pub use survey::{DeviceSeen, PortSeen, survey};

use crate::error::{ReadFailureKind, TransportError};
use crate::memory::LocalMemory;
use crate::tcp::attach::{self, AttachedStream};
use crate::transport::{
    Capabilities, Connection, Interrupt, POLL_BYTES_MAX, Source, Transport, TransportName,
};
use completion::CompletionQueue;
use connection::{BATCHES_PER_QUEUE_PAIR, Parts, VerbsConnection, words_needed};
use lane::Lane;
use memory::{Access, Words};
use node::BATCH_REQUESTS_MAX;
use path::{Path, fresh_packet_number};
use queue_pair::QueuePair;

/// Opens the device and port of the choice and closes them again: which ones they are, and the GID
/// that a process takes which `advertised` is the address of; or why there is no RDMA.
///
/// # Errors
/// [`VerbsError`], whose text says what is missing and how to mend it.
pub fn probe(choice: &DeviceChoice, advertised: Option<IpAddr>) -> Result<String, VerbsError> {
    let (context, port) = device::open(choice)?;
    Ok(port.describe(&context.name, port.own_gid(advertised)))
}

/// Reads by the queue pairs of one opened device.
#[derive(Clone, Debug)]
pub struct VerbsTransport {
    node: Arc<Node>,
    keys: Option<Keys>,
}

impl VerbsTransport {
    /// Reads into the memory that `node` has registered; with keys only from holders that prove one
    /// of them.
    pub fn new(node: Arc<Node>, keys: Option<Keys>) -> Self {
        Self { node, keys }
    }
}

impl Transport for VerbsTransport {
    fn name(&self) -> TransportName {
        TransportName::Verbs
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: true,
            // At most one request each, so that a batch ends with one completion.
            batch_runs_max: BATCH_REQUESTS_MAX,
            batch_bytes_max: POLL_BYTES_MAX as u64,
            in_flight_max: self.node.options.queue_pairs * BATCHES_PER_QUEUE_PAIR,
        }
    }

    fn offered(&self, endpoints: &Endpoints) -> bool {
        endpoints.verbs.is_some()
    }

    fn connect(
        &self,
        source: &Source,
        memory: Arc<LocalMemory>,
        deadline: Time,
        interrupt: &Interrupt<'_>,
    ) -> Result<Box<dyn Connection>, TransportError> {
        let endpoint = source
            .endpoints
            .verbs
            .as_ref()
            .ok_or_else(|| unreachable("connect", "the source does not offer verbs"))?;
        if self.node.fault.happened() {
            return Err(unreachable(
                "connect",
                &format!(
                    "the RDMA device of this rank failed: {}; only a restart opens it anew",
                    self.node.describe()
                ),
            ));
        }
        if !Arc::ptr_eq(&memory, &self.node.memory) {
            return Err(TransportError::new(
                ReadFailureKind::Local,
                "connect",
                "the reader's memory is not the memory that was registered",
            ));
        }
        if endpoint.region_keys.len() != source.regions.len() {
            return Err(TransportError::new(
                ReadFailureKind::Refused,
                "connect",
                format!(
                    "the source announces {} regions and {} memory keys",
                    source.regions.len(),
                    endpoint.region_keys.len()
                ),
            ));
        }
        let stream = attach::reach(
            &endpoint.host,
            endpoint.port,
            source,
            deadline,
            self.keys.as_ref(),
            interrupt,
        )?;
        let mut connection =
            connect_queue_pairs(&self.node, endpoint, source, stream, deadline, interrupt)?;
        connection.probe(deadline, interrupt).map_err(not_open)?;
        Ok(Box::new(connection))
    }
}

/// Makes queue pairs with the holder at the other end of the stream.
fn connect_queue_pairs(
    node: &Arc<Node>,
    endpoint: &VerbsEndpoint,
    source: &Source,
    mut stream: AttachedStream,
    deadline: Time,
    interrupt: &Interrupt<'_>,
) -> Result<VerbsConnection, TransportError> {
    let cannot = |error: VerbsError| unreachable("verbs", &error.to_string());
    let count = node.options.queue_pairs;
    let depth = node.depth();
    let sends = depth.sends as usize;
    let gid =
        path::towards(node, path::gid_bytes(&endpoint.gid).map_err(cannot)?).map_err(cannot)?;
    let queue = CompletionQueue::new(&node.domain.context, count * sends).map_err(cannot)?;
    let words = Words::new(&node.domain, words_needed(count)).map_err(cannot)?;
    let mut bound = Vec::with_capacity(count);
    let mut ends = Vec::with_capacity(count);
    for _ in 0..count {
        let queue_pair = QueuePair::new(&node.domain, &queue, depth)
            .and_then(|made| made.init(&node.port, Access::Local))
            .map_err(cannot)?;
        let end = QueuePairEnd(queue_pair.number(), fresh_packet_number().map_err(cannot)?);
        bound.push(queue_pair);
        ends.push(end);
    }
    let asked = path::ends(node, gid, ends.clone());
    let answer = exchange(&mut stream, &asked, deadline, interrupt)?;
    if answer.queue_pairs.len() != count {
        return Err(unreachable(
            "VerbsConnect",
            &format!(
                "{} queue pairs came for the {count} asked for",
                answer.queue_pairs.len()
            ),
        ));
    }
    let path = Path::to(node, &answer).map_err(cannot)?;
    let mut lanes = Vec::with_capacity(count);
    for (at, (queue_pair, (own, peer))) in bound
        .into_iter()
        .zip(ends.iter().zip(&answer.queue_pairs))
        .enumerate()
    {
        let queue_pair = queue_pair
            .ready_to_receive(&node.port, path.gid.index, &path.peer_end(*peer))
            .and_then(|ready| ready.ready_to_send(own.1, path.reads_to_start))
            .map_err(cannot)?;
        // One place stays for the request that drains the queue.
        lanes.push(Lane::new(at as u32, queue_pair, sends - 1));
    }
    let parts = Parts {
        node: Arc::clone(node),
        lanes,
        words,
        queue,
        stream,
        peer: endpoint.clone(),
        peer_regions: source.regions.clone(),
    };
    Ok(VerbsConnection::new(parts, sends - 1))
}

/// Tells the holder our ends and hears its own.
fn exchange(
    stream: &mut AttachedStream,
    asked: &QueuePairEnds,
    deadline: Time,
    interrupt: &Interrupt<'_>,
) -> Result<QueuePairEnds, TransportError> {
    let frame = encode(Kind::VerbsConnect, asked).map_err(|error| {
        TransportError::new(ReadFailureKind::Local, "VerbsConnect", error.to_string())
    })?;
    let (kind, payload) = stream.exchange(frame, "VerbsConnect", deadline, interrupt)?;
    let undecoded =
        |error: hetero_kv_core::wire::FrameError| unreachable("VerbsConnect", &error.to_string());
    if kind == Kind::VerbsRefused {
        let refused: VerbsRefused = decode(kind, &payload).map_err(undecoded)?;
        // The peer's words, bounded: they go to our log.
        let text: String = refused.text.chars().take(500).collect();
        return Err(TransportError::new(
            ReadFailureKind::Refused,
            "VerbsConnect",
            text,
        ));
    }
    if kind != Kind::VerbsConnected {
        return Err(unreachable(
            "VerbsConnect",
            &format!("{kind:?} came as the answer"),
        ));
    }
    decode(kind, &payload).map_err(undecoded)
}

fn unreachable(call: &'static str, problem: &str) -> TransportError {
    TransportError::new(ReadFailureKind::Unreachable, call, problem)
}

/// A way that was never open is not a peer that was lost.
fn not_open(error: TransportError) -> TransportError {
    if error.kind == ReadFailureKind::PeerLost {
        return unreachable(error.call, &format!("probe: {}", error.problem));
    }
    error
}

#[cfg(test)]
mod tests;
