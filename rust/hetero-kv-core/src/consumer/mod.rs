//! D's scheduler side: pairs with prefill engines, claims leases before anything is read, keeps
//! them alive, tells the workers what to read, and settles with the holder when the last sibling
//! is done.
//!
//! Driven by vLLM's hooks and by the control plane, both as `handle_*(now, ..)`; after each call
//! the caller drains [`Consumer::poll_output`] until `None` and arms its timer from
//! [`Consumer::poll_timeout`]. Orders to the workers leave through [`Consumer::take_orders`].
//!
//! No call fails for one request: what cannot be served becomes a load failure of that request,
//! the only way vLLM offers.

mod claims;
mod connect;
mod greeting;
mod health;
mod hooks;
mod loads;
mod pairing;
mod peer;
mod transfer;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub use connect::STANDING_MAX;
use connect::Standing;
pub use peer::PeerAddress;
use peer::{Peer, PeerState};
use transfer::{Claiming, Phase, Request, Transfer};

use crate::auth::Keys;
use crate::failure::{Failure, FailureReason};
use crate::ids::TransferId;
use crate::layout::{CompatFields, KvHeads};
use crate::plan::SourcePolicy;
use crate::step::{PeerId, StepOrders};
use crate::time::Time;
use crate::wire::message::{EngineIdentity, Message};

/// Peers kept at once. Beyond it the one longest unused and without transfers makes room; when all
/// are busy the new one is refused, so that invented addresses cannot exhaust sockets.
pub const PEERS_MAX: usize = 1024;

/// Times and rules of the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsumerOptions {
    /// Tokens a block holds.
    pub block_size: u32,
    /// Fail a request whose prompt is not the one prefilled, instead of computing it here.
    pub require_kv: bool,
    /// From a request's arrival to the holder's answer, dialling and handshake included.
    pub claim_timeout: Duration,
    /// From the first read to the last byte.
    pub load_timeout: Duration,
    /// Taken off each granted time: covers the answer's way and the reader's last check.
    pub margin: Duration,
    /// How long a transfer waits for another sibling after its last one is done.
    pub sibling_linger: Duration,
    /// Between heartbeats on a quiet connection.
    pub heartbeat: Duration,
    /// Silence after which a peer counts as lost; three heartbeats where it is set shorter.
    pub peer_silence: Duration,
    /// After the first failed attempt; doubles up to [`BACKOFF_MAX`].
    pub backoff: Duration,
    /// Which of several equal holders is read.
    pub source_policy: SourcePolicy,
}

/// How long a transfer whose id came with another prompt waits for the right one. A router that
/// copies one prompt's params to a list of prompts spreads them over engines and steps; a release
/// by the first of them would take the blocks from under the one that reads.
pub const MISMATCH_LINGER: Duration = Duration::from_secs(2);

/// Longest pause between attempts to reach a peer.
pub const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// How long a second try for a connection that broke may take before what waits for it fails: a
/// prefill engine that is gone is to be known in two seconds, and one that lives answers in less.
pub const RESUME_MAX: Duration = Duration::from_secs(2);

/// How long an incompatible pair is refused without asking again.
pub const REFUSAL_KEPT: Duration = Duration::from_secs(10);

/// Most (reason, field) pairs counted apart. Fields of a refused pair are named by the peer, so an
/// inventive one could make any number of them; beyond it failures are counted without a field.
pub const FAILURE_FIELDS_MAX: usize = 256;

/// What the caller has to do for the control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConsumerOutput {
    /// Connect, then call [`Consumer::handle_dialed`] or [`Consumer::handle_closed`].
    Dial(PeerId, PeerAddress),
    /// Send.
    Send(PeerId, Message),
    /// Close; [`Consumer::handle_closed`] is not expected.
    Close(PeerId),
}

/// What has happened so far; only grows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsumerCounts {
    /// Claims answered `Gone`.
    pub claims_gone: u64,
    /// Requests whose prompt is not the one prefilled.
    pub digest_mismatches: u64,
    /// Loads that workers were told to begin.
    pub loads: u64,
    /// Failures seen on the scheduler side, by reason and field.
    pub failures: BTreeMap<(FailureReason, String), u64>,
    /// Connections made after the first to the same peer.
    pub reconnects: u64,
    /// Times a source rank was put into quarantine.
    pub quarantines: u64,
    /// Attempts to connect to a prefill engine.
    pub dials: u64,
}

/// Something worth a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Whether somebody should look.
    pub warning: bool,
    /// The text.
    pub text: String,
}

/// See the module's text.
#[derive(Debug)]
pub struct Consumer {
    identity: EngineIdentity,
    fields: CompatFields,
    keys: Option<Keys>,
    heads: KvHeads,
    options: ConsumerOptions,
    peers: BTreeMap<PeerId, Peer>,
    by_address: BTreeMap<PeerAddress, PeerId>,
    standing: Vec<Standing>,
    next_peer: u64,
    next_question: u64,
    transfers: BTreeMap<TransferId, Transfer>,
    requests: BTreeMap<String, Request>,
    orders: StepOrders,
    outputs: VecDeque<ConsumerOutput>,
    counts: ConsumerCounts,
    notes: Vec<Note>,
}

impl Consumer {
    /// A consumer without peers.
    pub fn new(
        identity: EngineIdentity,
        fields: CompatFields,
        heads: KvHeads,
        options: ConsumerOptions,
    ) -> Self {
        Self {
            identity,
            fields,
            keys: None,
            heads,
            options,
            peers: BTreeMap::new(),
            by_address: BTreeMap::new(),
            standing: Vec::new(),
            next_peer: 0,
            next_question: 0,
            transfers: BTreeMap::new(),
            requests: BTreeMap::new(),
            orders: StepOrders::default(),
            outputs: VecDeque::new(),
            counts: ConsumerCounts::default(),
            notes: Vec::new(),
        }
    }

    /// Pairs only with engines that prove one of these keys.
    #[must_use]
    pub fn with_keys(mut self, keys: Option<Keys>) -> Self {
        self.keys = keys;
        self
    }

    /// Deadlines, renewals, heartbeats, settlements.
    pub fn handle_timeout(&mut self, now: Time) {
        self.sweep_peers(now);
        self.sweep_standing(now);
        let ids: Vec<TransferId> = self.transfers.keys().copied().collect();
        for id in ids {
            self.sweep_transfer(now, id);
        }
        let late: Vec<String> = self
            .requests
            .iter()
            .filter(|(_, request)| {
                matches!(request.phase, Phase::Loading { until, cancelled: false } if until <= now)
            })
            .map(|(id, _)| id.clone())
            .collect();
        for request_id in late {
            let failure = Failure::new(
                FailureReason::LoadTimeout,
                format!(
                    "not loaded within {:?} (load_timeout_s)",
                    self.options.load_timeout
                ),
            );
            self.order_cancel(&request_id, failure);
        }
    }

    /// When [`Consumer::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        let peers = self.peers.values().filter_map(|peer| match &peer.state {
            PeerState::Dialing | PeerState::Greeting | PeerState::Asking(_) => {
                Some(peer.handshake_due(&self.options))
            }
            PeerState::Ready(_) => Some(
                peer.ping_due(&self.options)
                    .min(peer.lost_due(&self.options).unwrap_or(Time::MAX)),
            ),
            PeerState::Idle | PeerState::Down { .. } => None,
        });
        let transfers = self.transfers.values().filter_map(|transfer| {
            let claim = match &transfer.claiming {
                Claiming::Waiting | Claiming::Asked { .. } => {
                    Some(transfer.created_at + self.options.claim_timeout)
                }
                Claiming::Granted {
                    deadline,
                    renew_at,
                    renewal,
                    ..
                } => Some(if renewal.is_some() || !self.is_ready(transfer.peer) {
                    *deadline
                } else {
                    (*renew_at).min(*deadline)
                }),
                Claiming::Failed(_) => None,
            };
            [claim, transfer.linger_until].into_iter().flatten().min()
        });
        let loads = self
            .requests
            .values()
            .filter_map(|request| match request.phase {
                Phase::Loading {
                    until,
                    cancelled: false,
                } => Some(until),
                Phase::Loading { .. }
                | Phase::Waiting
                | Phase::Broken(_)
                | Phase::Pending { .. }
                | Phase::Reporting
                | Phase::Settled => None,
            });
        peers
            .chain(transfers)
            .chain(loads)
            .chain(self.standing_due())
            .min()
    }

    /// What to do next on the control plane.
    pub fn poll_output(&mut self) -> Option<ConsumerOutput> {
        self.outputs.pop_front()
    }

    /// Log lines since the last call.
    pub fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    /// Counters.
    pub fn counts(&self) -> &ConsumerCounts {
        &self.counts
    }

    /// Source ranks of all peers that are avoided at this moment.
    pub fn sources_avoided(&self, now: Time) -> usize {
        self.peers
            .values()
            .map(|peer| peer.health.avoided(now))
            .sum()
    }

    /// Prefill engines that are paired at this moment.
    pub fn peers_ready(&self) -> usize {
        self.peers.values().filter(|peer| peer.is_ready()).count()
    }

    /// Requests and transfers still known, for leak tests: (requests, transfers).
    pub fn open(&self) -> (usize, usize) {
        (self.requests.len(), self.transfers.len())
    }

    fn is_ready(&self, peer_id: PeerId) -> bool {
        self.peers.get(&peer_id).is_some_and(Peer::is_ready)
    }

    fn note(&mut self, warning: bool, text: String) {
        // Bounded: nobody drains the notes of an engine that takes no steps.
        if self.notes.len() < 1024 {
            self.notes.push(Note { warning, text });
        }
    }

    fn send(&mut self, peer_id: PeerId, message: Message) {
        self.outputs
            .push_back(ConsumerOutput::Send(peer_id, message));
    }
}

/// A time that is over is 0, so that no order made of it lets a worker read.
fn millis_left(now: Time, deadline: Time) -> u64 {
    u64::try_from(deadline.since(now).as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
