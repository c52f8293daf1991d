//! The scheduler side of one engine: the machines, their control plane, and the calls that vLLM's
//! hooks make. No call fails for one request, none waits for a peer.

use std::io;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use hetero_kv_core::auth::Keys;
use hetero_kv_core::consumer::{Consumer, ConsumerCounts, ConsumerOptions, PeerAddress};
use hetero_kv_core::ids::{BlockId, LeaseRef, PromptDigest, TpRank, TransferId};
use hetero_kv_core::layout::{CompatFields, KvHeads};
use hetero_kv_core::producer::{
    FinishedPrefill, LeaseTimes, OfferError, Producer, ProducerCounts, ProducerGauges,
};
use hetero_kv_core::step::StepOrders;
use hetero_kv_core::wire::card::WorkerCard;
use hetero_kv_core::wire::message::EngineIdentity;
use hetero_kv_core::wire::params::{ParamsError, RemotePrefill, TransferParams};

use crate::clock;
use crate::control::{ControlLimits, ControlPlane, Desk, SharedDesk};
use crate::net::listen::{ListenAddress, ListenError, listen_on};

/// What an engine does with KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    /// Hands KV off.
    pub producer: bool,
    /// Takes KV over.
    pub consumer: bool,
}

/// Everything the scheduler side is told at start.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// Who this engine is; its incarnation is drawn by the caller for each start.
    pub identity: EngineIdentity,
    /// What must be equal in a pair.
    pub fields: CompatFields,
    /// KV heads over all ranks.
    pub heads: KvHeads,
    /// Cards of all ranks.
    pub workers: Vec<WorkerCard>,
    /// Which sides to run.
    pub roles: Roles,
    /// Where the control listener is; its host goes into the params.
    pub address: ListenAddress,
    /// What the control plane takes from peers.
    pub limits: ControlLimits,
    /// Times of leases.
    pub leases: LeaseTimes,
    /// Slots of each rank's lease page.
    pub lease_slots: u32,
    /// Times and rules of loads.
    pub consumer: ConsumerOptions,
    /// What both sides of a pair prove to each other; without it peers are not asked.
    pub keys: Option<Keys>,
}

/// A finished prefill as vLLM's hook reports it.
#[derive(Clone, Debug)]
pub struct Prefilled {
    /// vLLM's internal id.
    pub request_id: String,
    /// The router's id, if it minted one.
    pub transfer_id: Option<TransferId>,
    /// Digest of the prompt.
    pub digest: PromptDigest,
    /// Blocks per KV cache group.
    pub block_ids: Vec<Vec<BlockId>>,
    /// Tokens with KV.
    pub num_tokens: u32,
}

/// A moment's figures of the scheduler side.
#[derive(Clone, Debug, Default)]
pub struct SchedulerFigures {
    /// Of the producer, if there is one.
    pub producer: Option<(ProducerCounts, ProducerGauges)>,
    /// Of the consumer, if there is one.
    pub consumer: Option<ConsumerCounts>,
    /// Requests and transfers the consumer still knows.
    pub consumer_open: (usize, usize),
    /// Source ranks that are avoided.
    pub sources_avoided: usize,
    /// Prefill engines paired with.
    pub peers_ready: usize,
}

/// Why a scheduler side cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The control listener's address or ports.
    #[error("control listener: {0}")]
    Listen(#[from] ListenError),
    /// No thread or descriptor is left.
    #[error("control plane: {0}")]
    Start(#[from] io::Error),
}

/// See the module's text. Dropping it closes every connection.
#[derive(Debug)]
pub struct SchedulerSide {
    desk: Arc<SharedDesk>,
    control: ControlPlane,
    identity: EngineIdentity,
    host: String,
    port: Option<u16>,
}

impl SchedulerSide {
    /// Binds the control listener (producer) and starts the control plane's thread.
    ///
    /// # Errors
    /// [`StartError`]: no free port, or a host that is not this machine's; the text names both.
    pub fn start(options: SchedulerOptions) -> Result<Self, StartError> {
        let mut port = None;
        let mut listener = None;
        let desk = Arc::new(SharedDesk::default());
        if options.roles.producer {
            let socket = listen_on(&options.address)?;
            port = Some(socket.local_addr()?.port());
            listener = Some(socket.into());
            let producer = Producer::new(
                options.identity.clone(),
                options.fields.clone(),
                options.workers,
                options.leases,
                options.lease_slots,
            );
            desk.lock().producer = Some(producer.with_keys(options.keys.clone()));
        }
        if options.roles.consumer {
            let consumer = Consumer::new(
                options.identity.clone(),
                options.fields,
                options.heads,
                options.consumer,
            );
            desk.lock().consumer = Some(consumer.with_keys(options.keys));
        }
        let control = ControlPlane::start(Arc::clone(&desk), listener, options.limits)?;
        Ok(Self {
            desk,
            control,
            identity: options.identity,
            host: options.address.host,
            port,
        })
    }

    /// The control listener's port; `None` for a consumer.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// vLLM has a new request.
    pub fn new_request(
        &self,
        request_id: &str,
        params: Result<TransferParams, ParamsError>,
        digest: PromptDigest,
        prompt_tokens: u32,
    ) {
        self.consumer(|consumer| {
            consumer.handle_new_request(clock::now(), request_id, params, digest, prompt_tokens);
        });
    }

    /// Tokens to load beyond those cached here.
    pub fn matched_tokens(&self, request_id: &str, computed_tokens: u32) -> u32 {
        self.desk()
            .and_then(|mut desk| {
                let consumer = desk.consumer.as_mut()?;
                Some(consumer.matched_tokens(request_id, computed_tokens))
            })
            .unwrap_or(0)
    }

    /// vLLM has allocated the request's blocks.
    pub fn allocated(&self, request_id: &str, blocks: &[BlockId], external_tokens: u32) {
        self.consumer(|consumer| {
            consumer.handle_allocated(clock::now(), request_id, blocks, external_tokens);
        });
    }

    /// A prefill that another engine decodes has finished: holds its blocks and says where.
    pub fn prefilled(&self, prefilled: Prefilled) -> Result<RemotePrefill, OfferRefused> {
        let transfer_id = match prefilled.transfer_id {
            Some(id) => id,
            None => TransferId(random_bytes().map_err(|error| OfferRefused(error.to_string()))?),
        };
        let Some(port) = self.port else {
            return Err(OfferRefused("this engine is no producer (kv_role)".into()));
        };
        let finished = FinishedPrefill {
            request_id: prefilled.request_id.clone(),
            transfer_id,
            digest: prefilled.digest,
            block_ids: prefilled.block_ids.clone(),
            num_tokens: prefilled.num_tokens,
        };
        let lease = self.hold(finished)?;
        Ok(RemotePrefill {
            transfer_id,
            engine: self.identity.engine.clone(),
            incarnation: self.identity.incarnation,
            host: self.host.clone(),
            port,
            dp_rank: self.identity.dp_rank,
            request_id: prefilled.request_id,
            tp_size: self.identity.tp_size,
            pp_size: self.identity.pp_size,
            block_ids: prefilled.block_ids,
            num_tokens: prefilled.num_tokens,
            lease_epoch: lease.epoch.0,
            prompt_digest: prefilled.digest,
        })
    }

    /// A request of this engine's consumer side is finished.
    pub fn finished(&self, request_id: &str) {
        self.consumer(|consumer| consumer.handle_finished(clock::now(), request_id));
    }

    /// A request was rejected before the scheduler knew it.
    pub fn rejected(&self, params: Result<TransferParams, ParamsError>) {
        self.consumer(|consumer| consumer.handle_rejected(clock::now(), params));
    }

    /// A worker could not read from this source rank.
    pub fn source_lost(&self, request_id: &str, tp_rank: TpRank) {
        self.consumer(|consumer| {
            consumer.handle_source_lost(clock::now(), request_id, tp_rank);
        });
    }

    /// All workers have reported a load.
    pub fn received(&self, request_id: &str, failed: bool) {
        self.consumer(|consumer| consumer.handle_received(clock::now(), request_id, failed));
    }

    /// All workers have reported a release.
    pub fn sent(&self, request_id: &str) {
        self.producer(|producer| producer.handle_sent(request_id));
    }

    /// Orders for the next step.
    pub fn take_orders(&self) -> StepOrders {
        let now = clock::now();
        let Some(mut desk) = self.desk() else {
            return StepOrders::default();
        };
        // The control thread sweeps as well. Without it (it has panicked) a step still ends leases
        // and claims whose time is up, so that nothing stays pinned.
        let mut orders = match desk.consumer.as_mut() {
            Some(consumer) => {
                if consumer.poll_timeout().is_some_and(|due| due <= now) {
                    consumer.handle_timeout(now);
                }
                consumer.take_orders(now)
            }
            None => StepOrders::default(),
        };
        if let Some(producer) = desk.producer.as_mut() {
            if producer.poll_timeout().is_some_and(|due| due <= now) {
                producer.handle_timeout(now);
            }
            orders.incarnation = Some(self.identity.incarnation);
            orders.releases = producer.take_releases();
            let held = u32::try_from(producer.gauges(now).leases_alive).unwrap_or(u32::MAX);
            orders.pending = orders.pending.saturating_add(held);
        }
        orders
    }

    /// Waits until a release or a load can be ordered, at most `timeout`: for an engine that would
    /// otherwise take empty steps as fast as it can.
    pub fn wait_for_orders(&self, timeout: Duration) {
        if self.control.is_forked() {
            return;
        }
        self.desk.wait_until(timeout, |desk| {
            desk.producer.as_ref().is_some_and(Producer::has_releases)
        });
    }

    /// Pairs with an engine before any request needs it.
    pub fn connect(&self, address: PeerAddress) {
        self.consumer(|consumer| {
            // A full table is noted by the requests that need a place in it.
            let _ = consumer.connect(clock::now(), address);
        });
    }

    /// Pairs with whichever engine listens at this address, now and whenever that is lost.
    pub fn keep_connected(&self, host: String, port: u16) {
        self.consumer(|consumer| consumer.keep_connected(clock::now(), host, port));
    }

    /// Ends every lease: the cache was reset or the engine goes down.
    pub fn revoke_leases(&self) {
        self.producer(Producer::revoke_all);
        self.control.wake();
    }

    /// Closes every connection and ends the control thread; no call does anything useful after.
    pub fn shutdown(&self) {
        self.control.stop();
    }

    /// Figures for metrics.
    pub fn figures(&self) -> SchedulerFigures {
        let now = clock::now();
        let Some(desk) = self.desk() else {
            return SchedulerFigures::default();
        };
        SchedulerFigures {
            producer: desk
                .producer
                .as_ref()
                .map(|producer| (producer.counts(), producer.gauges(now))),
            consumer: desk
                .consumer
                .as_ref()
                .map(|consumer| consumer.counts().clone()),
            sources_avoided: desk
                .consumer
                .as_ref()
                .map_or(0, |consumer| consumer.sources_avoided(now)),
            peers_ready: desk.consumer.as_ref().map_or(0, Consumer::peers_ready),
            consumer_open: desk.consumer.as_ref().map_or((0, 0), Consumer::open),
        }
    }

    fn hold(&self, finished: FinishedPrefill) -> Result<LeaseRef, OfferRefused> {
        let held = {
            let Some(mut desk) = self.desk() else {
                return Err(OfferRefused(FORKED.into()));
            };
            let Some(producer) = desk.producer.as_mut() else {
                return Err(OfferRefused("this engine is no producer (kv_role)".into()));
            };
            producer.finish(clock::now(), finished)
        };
        // The sweep of this lease has to be armed.
        self.control.wake();
        held.map_err(|error: OfferError| OfferRefused(error.to_string()))
    }

    #[track_caller]
    fn consumer(&self, call: impl FnOnce(&mut Consumer)) {
        let Some(mut desk) = self.desk() else {
            return;
        };
        if let Some(consumer) = desk.consumer.as_mut() {
            call(consumer);
        }
        drop(desk);
        self.control.wake();
    }

    #[track_caller]
    fn producer(&self, call: impl FnOnce(&mut Producer)) {
        if let Some(mut desk) = self.desk()
            && let Some(producer) = desk.producer.as_mut()
        {
            call(producer);
        }
    }

    /// `None` in a forked child, where the lock may be held by a thread that is not there.
    #[track_caller]
    fn desk(&self) -> Option<MutexGuard<'_, Desk>> {
        if self.control.is_forked() {
            tracing::error!("{FORKED}");
            return None;
        }
        Some(self.desk.lock())
    }
}

/// What a forked child gets to hear.
const FORKED: &str = "the scheduler side belongs to the process that started it; a forked child has to start its own";

/// Why a prefill is not held: its blocks are freed at once and decode has to compute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OfferRefused(String);

/// Random bytes of the operating system.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
