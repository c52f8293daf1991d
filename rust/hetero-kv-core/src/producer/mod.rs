//! P's scheduler side: grants leases on finished prefills, answers claims, counts
//! acknowledgements, decides each release once.
//!
//! Driven by `handle_*(now, ..)`; after each call the caller drains [`Producer::poll_output`]
//! until `None` and arms its timer from [`Producer::poll_timeout`]. Releases leave through
//! [`Producer::take_releases`] into the next step's metadata, because only the workers can bump
//! the lease pages.

mod answers;
mod greeting;
mod lease;
mod slots;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub use lease::ConsumerKey;
use lease::{Lease, State};
use slots::Slots;

use crate::auth::{Keys, Nonce};
use crate::ids::{BlockId, LeaseRef, PromptDigest, TransferId};
use crate::layout::CompatFields;
use crate::time::Time;
use crate::wire::card::WorkerCard;
use crate::wire::message::{
    EngineIdentity, Gone, GoneReason, Hello, Layout, Message, Reject, RejectCode, bounded_reason,
};

/// Ended transfers remembered, so that a late claim hears `Expired` or `Released` and a second
/// owner of an id is refused; beyond it the oldest are forgotten and answer `Unknown`.
pub const ENDED_REMEMBERED: usize = 65_536;

/// One of the caller's connections; never re-used within a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// Times of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    /// From the end of prefill: covers queueing in the router and in D before the claim.
    pub lease: Duration,
    /// From each answered claim or renewal.
    pub renewal: Duration,
    /// Between the end of a lease and the release of its blocks.
    pub grace: Duration,
}

/// A prefill whose blocks are handed off.
#[derive(Clone, Debug)]
pub struct FinishedPrefill {
    /// vLLM's internal id.
    pub request_id: String,
    /// From the request's params, or minted by the caller at random.
    pub transfer_id: TransferId,
    /// Which prompt.
    pub digest: PromptDigest,
    /// Blocks per KV cache group.
    pub block_ids: Vec<Vec<BlockId>>,
    /// Tokens with KV in them.
    pub num_tokens: u32,
}

/// Why a prefill's blocks are not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    /// The id is in use or was; the first owner keeps it.
    #[error("transfer id belongs to another request of this engine")]
    TransferIdTaken,
    /// As many leases as a page has slots.
    #[error("no free lease slot: too many finished prefills wait for decode")]
    NoSlot,
}

/// A release on its way to the workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleaseOrder {
    /// vLLM's internal id, to be reported in `finished_sending`.
    pub request_id: String,
    /// The slot to bump and the epoch that ends.
    pub lease: LeaseRef,
}

/// What has happened so far; only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerCounts {
    /// Leases granted.
    pub granted: u64,
    /// Read out by one consumer engine's complete set.
    pub read_out: u64,
    /// Released without having been read.
    pub released: u64,
    /// Ended because their time was up.
    pub expired: u64,
    /// Claims and renewals answered `Gone`.
    pub gone: u64,
    /// Prefills not held because the id was taken or no slot was free.
    pub refused_offers: u64,
    /// Acknowledgements and releases of unknown or ended transfers, and whatever a consumer said of
    /// a transfer before something that has been heard.
    pub late: u64,
    /// Handshakes refused.
    pub rejected_peers: u64,
}

/// A moment's state, for gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerGauges {
    /// Leases whose blocks are still held.
    pub leases_alive: usize,
    /// Age of the oldest of them.
    pub oldest_lease: Duration,
}

/// A message for a connection, or its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProducerOutput {
    /// Send it.
    Send(ConnectionId, Message),
    /// Send what is queued, then close.
    Close(ConnectionId),
}

#[derive(Clone, Debug)]
enum Peer {
    /// Connected; has not said who it is. The nonce is for its challenge.
    Anonymous(Nonce),
    /// Has said who it is, and has to prove its key.
    Challenged { hello: Box<Hello>, nonce: Nonce },
    /// Accepted.
    Known { key: ConsumerKey, ranks: (u32, u32) },
}

/// See the module's text.
#[derive(Debug)]
pub struct Producer {
    identity: EngineIdentity,
    fields: CompatFields,
    keys: Option<Keys>,
    workers: Vec<WorkerCard>,
    times: LeaseTimes,
    leases: BTreeMap<TransferId, Lease>,
    by_request: BTreeMap<String, TransferId>,
    ended: BTreeMap<TransferId, GoneReason>,
    ended_order: VecDeque<TransferId>,
    slots: Slots,
    peers: BTreeMap<ConnectionId, Peer>,
    releases: Vec<ReleaseOrder>,
    outputs: VecDeque<ProducerOutput>,
    counts: ProducerCounts,
}

impl Producer {
    /// A producer without leases. `workers` are the cards of all of the engine's ranks.
    pub fn new(
        identity: EngineIdentity,
        fields: CompatFields,
        workers: Vec<WorkerCard>,
        times: LeaseTimes,
        lease_slots: u32,
    ) -> Self {
        Self {
            identity,
            fields,
            keys: None,
            workers,
            times,
            leases: BTreeMap::new(),
            by_request: BTreeMap::new(),
            ended: BTreeMap::new(),
            ended_order: VecDeque::new(),
            slots: Slots::new(lease_slots),
            peers: BTreeMap::new(),
            releases: Vec::new(),
            outputs: VecDeque::new(),
            counts: ProducerCounts::default(),
        }
    }

    /// Takes only consumers that prove one of these keys.
    #[must_use]
    pub fn with_keys(mut self, keys: Option<Keys>) -> Self {
        self.keys = keys;
        self
    }

    /// Takes the blocks of a finished prefill under a lease.
    pub fn finish(&mut self, now: Time, prefill: FinishedPrefill) -> Result<LeaseRef, OfferError> {
        let id = prefill.transfer_id;
        if self.leases.contains_key(&id)
            || self.ended.contains_key(&id)
            || self.by_request.contains_key(&prefill.request_id)
        {
            self.counts.refused_offers += 1;
            return Err(OfferError::TransferIdTaken);
        }
        let Some(fence) = self.slots.take() else {
            self.counts.refused_offers += 1;
            return Err(OfferError::NoSlot);
        };
        self.counts.granted += 1;
        self.by_request.insert(prefill.request_id.clone(), id);
        self.leases.insert(
            id,
            Lease {
                request_id: prefill.request_id,
                transfer_id: id,
                fence,
                digest: prefill.digest,
                block_ids: prefill.block_ids,
                num_tokens: prefill.num_tokens,
                granted_at: now,
                state: State::Held {
                    expires: now + self.times.lease,
                },
                ended: None,
                consumers: BTreeMap::new(),
            },
        );
        Ok(fence)
    }

    /// A consumer has connected. The nonce is for this connection alone.
    pub fn handle_connected(&mut self, connection: ConnectionId, nonce: Nonce) {
        self.peers.insert(connection, Peer::Anonymous(nonce));
    }

    /// A connection is gone. Its leases stay until their time: the consumer may come back.
    pub fn handle_closed(&mut self, connection: ConnectionId) {
        self.peers.remove(&connection);
    }

    /// A message has come. Anything out of place closes that connection only.
    pub fn handle_message(&mut self, now: Time, connection: ConnectionId, message: Message) {
        let Some(peer) = self.peers.get(&connection).cloned() else {
            return;
        };
        match (peer, message) {
            (Peer::Anonymous(nonce), Message::Hello(hello)) => {
                self.handle_hello(connection, nonce, hello);
            }
            (Peer::Challenged { hello, nonce }, Message::Proof(proof)) => {
                self.handle_proof(connection, &hello, nonce, &proof);
            }
            (Peer::Known { .. }, Message::Layout(_)) => {
                let layout = Layout {
                    from: self.identity.clone(),
                    workers: self.workers.clone(),
                };
                self.send(connection, Message::Layout(Box::new(layout)));
            }
            (Peer::Known { key, .. }, Message::Claim(claim)) => {
                if let Some(answer) = self.handle_claim(now, &key, &claim) {
                    self.send(connection, answer);
                }
            }
            (Peer::Known { key, .. }, Message::Renew(renew)) => {
                if let Some(answer) = self.handle_renew(now, &key, &renew) {
                    self.send(connection, answer);
                }
            }
            (Peer::Known { key, ranks }, Message::Ack(ack)) => self.handle_ack(&key, ranks, ack),
            (Peer::Known { key, .. }, Message::Release(release)) => {
                self.handle_release(&key, &release);
            }
            (_, Message::Ping) => self.send(connection, Message::Pong),
            (_, Message::Pong) => {}
            (_, Message::Bye) => self.close(connection),
            (
                Peer::Known { .. },
                Message::Hello(_)
                | Message::Accept(_)
                | Message::Reject(_)
                | Message::Granted(_)
                | Message::Gone(_)
                | Message::Challenge(_)
                | Message::Proof(_),
            )
            | (Peer::Challenged { .. }, Message::Hello(_))
            | (Peer::Anonymous(_), Message::Proof(_))
            | (
                Peer::Anonymous(_) | Peer::Challenged { .. },
                Message::Accept(_)
                | Message::Reject(_)
                | Message::Layout(_)
                | Message::Claim(_)
                | Message::Granted(_)
                | Message::Gone(_)
                | Message::Renew(_)
                | Message::Ack(_)
                | Message::Release(_)
                | Message::Challenge(_),
            ) => self.reject(
                connection,
                RejectCode::Protocol,
                "this message does not belong here".into(),
                None,
            ),
        }
    }

    /// Sweeps leases whose time is up.
    pub fn handle_timeout(&mut self, now: Time) {
        let due: Vec<TransferId> = self
            .leases
            .values()
            .filter(|lease| lease.due().is_some_and(|due| due <= now))
            .map(|lease| lease.transfer_id)
            .collect();
        for id in due {
            let Some(lease) = self.leases.get_mut(&id) else {
                continue;
            };
            match lease.state {
                State::Held { .. } => {
                    lease.ended = Some(GoneReason::Expired);
                    self.counts.expired += 1;
                    if self.times.grace.is_zero() {
                        self.order_release(id);
                        continue;
                    }
                    lease.state = State::Expiring {
                        release_at: now + self.times.grace,
                    };
                }
                State::Expiring { .. } => self.order_release(id),
                State::Ordered => {}
            }
        }
    }

    /// When [`Producer::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.leases.values().filter_map(Lease::due).min()
    }

    /// What to send next.
    pub fn poll_output(&mut self) -> Option<ProducerOutput> {
        self.outputs.pop_front()
    }

    /// Releases decided since the last call, for the next step's metadata. Each comes once.
    pub fn take_releases(&mut self) -> Vec<ReleaseOrder> {
        std::mem::take(&mut self.releases)
    }

    /// Whether a release waits for a step.
    pub fn has_releases(&self) -> bool {
        !self.releases.is_empty()
    }

    /// All workers have reported `finished_sending`: the slot can be used again.
    pub fn handle_sent(&mut self, request_id: &str) {
        let Some(id) = self.by_request.remove(request_id) else {
            return;
        };
        let Some(lease) = self.leases.remove(&id) else {
            return;
        };
        self.slots.give_back(lease.fence);
        self.remember(id, lease.ended.unwrap_or(GoneReason::Released));
    }

    /// Ends every lease at once: the engine is going down or its cache was reset.
    pub fn revoke_all(&mut self) {
        let ids: Vec<TransferId> = self
            .leases
            .values()
            .filter(|lease| lease.state != State::Ordered)
            .map(|lease| lease.transfer_id)
            .collect();
        for id in ids {
            self.end(id, GoneReason::Released);
            self.counts.released += 1;
        }
    }

    /// Counters.
    pub fn counts(&self) -> ProducerCounts {
        self.counts
    }

    /// Gauges at `now`.
    pub fn gauges(&self, now: Time) -> ProducerGauges {
        ProducerGauges {
            leases_alive: self.leases.len(),
            oldest_lease: self
                .leases
                .values()
                .map(|lease| now.since(lease.granted_at))
                .max()
                .unwrap_or_default(),
        }
    }

    fn end(&mut self, id: TransferId, reason: GoneReason) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.ended.get_or_insert(reason);
        }
        self.order_release(id);
    }

    fn order_release(&mut self, id: TransferId) {
        let Some(lease) = self.leases.get_mut(&id) else {
            return;
        };
        if lease.state == State::Ordered {
            return;
        }
        lease.state = State::Ordered;
        self.releases.push(ReleaseOrder {
            request_id: lease.request_id.clone(),
            lease: lease.fence,
        });
    }

    fn remember(&mut self, id: TransferId, reason: GoneReason) {
        if self.ended.insert(id, reason).is_none() {
            self.ended_order.push_back(id);
        }
        while self.ended_order.len() > ENDED_REMEMBERED {
            if let Some(oldest) = self.ended_order.pop_front() {
                self.ended.remove(&oldest);
            }
        }
    }

    fn gone(&mut self, transfer_id: TransferId, reason: GoneReason, question: u64) -> Message {
        self.counts.gone += 1;
        Message::Gone(Gone {
            transfer_id,
            reason,
            question,
        })
    }

    fn send(&mut self, connection: ConnectionId, message: Message) {
        self.outputs
            .push_back(ProducerOutput::Send(connection, message));
    }

    fn reject(
        &mut self,
        connection: ConnectionId,
        code: RejectCode,
        reason: String,
        fields: Option<CompatFields>,
    ) {
        let reject = Reject {
            code,
            reason: bounded_reason(&reason),
            fields,
        };
        self.send(connection, Message::Reject(Box::new(reject)));
        self.close(connection);
    }

    fn close(&mut self, connection: ConnectionId) {
        self.peers.remove(&connection);
        self.outputs.push_back(ProducerOutput::Close(connection));
    }
}

#[cfg(test)]
mod tests;
