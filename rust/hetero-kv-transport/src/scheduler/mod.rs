//! The scheduler side of one engine: the machines, their control plane, and the calls that vLLM's
//! hooks make. No call fails for one request, none waits for a peer.

use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::consumer::{Consumer, ConsumerCounts, ConsumerOptions, PeerAddress};
use hetero_kv_core::ids::{BlockId, LeaseRef, PromptDigest, TransferId};
use hetero_kv_core::layout::{CompatFields, KvHeads};
use hetero_kv_core::producer::{
    FinishedPrefill, LeaseTimes, OfferError, Producer, ProducerCounts, ProducerGauges,
};
use hetero_kv_core::step::StepOrders;
use hetero_kv_core::wire::card::WorkerCard;
use hetero_kv_core::wire::message::EngineIdentity;
use hetero_kv_core::wire::params::{ParamsError, RemotePrefill, TransferParams};

use crate::clock;
use crate::control::listen::listen_on;
use crate::control::{ControlPlane, SharedDesk};

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
    /// Host that others reach this engine by; the control listener binds it.
    pub host: String,
    /// Address to bind instead of `host`, where peers dial a translated one.
    pub bind_host: Option<String>,
    /// Ports to take the first free one of; without, the system assigns one.
    pub ports: Option<RangeInclusive<u16>>,
    /// Times of leases.
    pub leases: LeaseTimes,
    /// Slots of each rank's lease page.
    pub lease_slots: u32,
    /// Times and rules of loads.
    pub consumer: ConsumerOptions,
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
    /// No free port, or a host that is not this machine's; the text names the setting.
    pub fn start(options: SchedulerOptions) -> io::Result<Self> {
        let mut port = None;
        let mut listener = None;
        let desk = Arc::new(SharedDesk::default());
        if options.roles.producer {
            let ranks = options.identity.tp_size * options.identity.pp_size;
            let bind_host = options.bind_host.as_deref().unwrap_or(&options.host);
            let (socket, address) = listen_on(bind_host, options.ports, 1 + ranks)?;
            port = Some(address.port());
            listener = Some(socket);
            desk.lock().producer = Some(Producer::new(
                options.identity.clone(),
                options.fields.clone(),
                options.workers,
                options.leases,
                options.lease_slots,
            ));
        }
        if options.roles.consumer {
            desk.lock().consumer = Some(Consumer::new(
                options.identity.clone(),
                options.fields,
                options.heads,
                options.consumer,
            ));
        }
        let control = ControlPlane::start(Arc::clone(&desk), listener)?;
        Ok(Self {
            desk,
            control,
            identity: options.identity,
            host: options.host,
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
        let mut desk = self.desk.lock();
        desk.consumer
            .as_mut()
            .map_or(0, |consumer| consumer.matched_tokens(request_id, computed_tokens))
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

    /// All workers have reported a load.
    pub fn received(&self, request_id: &str, failed: bool) {
        self.consumer(|consumer| consumer.handle_received(clock::now(), request_id, failed));
    }

    /// All workers have reported a release.
    pub fn sent(&self, request_id: &str) {
        if let Some(producer) = self.desk.lock().producer.as_mut() {
            producer.handle_sent(request_id);
        }
    }

    /// Orders for the next step.
    pub fn take_orders(&self) -> StepOrders {
        let now = clock::now();
        let mut desk = self.desk.lock();
        let mut orders = match desk.consumer.as_mut() {
            Some(consumer) => consumer.take_orders(now),
            None => StepOrders::default(),
        };
        if let Some(producer) = desk.producer.as_mut() {
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

    /// Ends every lease: the cache was reset or the engine goes down.
    pub fn revoke_leases(&self) {
        if let Some(producer) = self.desk.lock().producer.as_mut() {
            producer.revoke_all();
        }
        self.control.wake();
    }

    /// Figures for metrics.
    pub fn figures(&self) -> SchedulerFigures {
        let now = clock::now();
        let desk = self.desk.lock();
        SchedulerFigures {
            producer: desk
                .producer
                .as_ref()
                .map(|producer| (producer.counts(), producer.gauges(now))),
            consumer: desk.consumer.as_ref().map(|consumer| consumer.counts().clone()),
            consumer_open: desk.consumer.as_ref().map_or((0, 0), Consumer::open),
        }
    }

    fn hold(&self, finished: FinishedPrefill) -> Result<LeaseRef, OfferRefused> {
        let held = {
            let mut desk = self.desk.lock();
            let Some(producer) = desk.producer.as_mut() else {
                return Err(OfferRefused("this engine is no producer (kv_role)".into()));
            };
            producer.finish(clock::now(), finished)
        };
        // The sweep of this lease has to be armed.
        self.control.wake();
        held.map_err(|error: OfferError| OfferRefused(error.to_string()))
    }

    fn consumer(&self, call: impl FnOnce(&mut Consumer)) {
        if let Some(consumer) = self.desk.lock().consumer.as_mut() {
            call(consumer);
        }
        self.control.wake();
    }
}

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
