//! Producers and consumers on a virtual network with a virtual clock. Every message crosses it as
//! the bytes of its frame.

use std::collections::BTreeMap;
use std::time::Duration;

use super::network::{Direction, Fate, Flight, Link, Network};
use super::{Workers, cards, common_fields, heads, identity, lease_times, options};
use crate::consumer::{Consumer, ConsumerOptions};
use crate::ids::{BlockId, PromptDigest, TransferId};
use crate::layout::CompatFields;
use crate::producer::{FinishedPrefill, LeaseTimes, Producer, ReleaseOrder};
use crate::time::Time;
use crate::wire::Kind;
use crate::wire::message::{EngineIdentity, Message};
use crate::wire::params::{RemotePrefill, TransferParams};

pub(crate) const CONTROL_PORT: u16 = 4711;

/// One or more prefill engines, one or more decode engines.
pub(crate) struct Pair {
    pub(crate) now: Time,
    pub(crate) latency: Duration,
    pub(crate) producers: Vec<Producer>,
    pub(crate) consumers: Vec<Consumer>,
    pub(crate) workers: Vec<Workers>,
    pub(super) identities: Vec<EngineIdentity>,
    /// Who listens where; nobody: the dial fails.
    pub(crate) listening: BTreeMap<u16, usize>,
    /// Everything sent, for tests that ask what went over the wire.
    pub(crate) sent: Vec<(Time, Direction, Message)>,
    /// Releases on their way to P's workers, by producer.
    pub(crate) ordered: Vec<(usize, ReleaseOrder)>,
    /// Releases that P's workers have carried out.
    pub(crate) released: Vec<ReleaseOrder>,
    /// Dials that never come back.
    pub(crate) dials_hang: bool,
    pub(super) network: Network,
    pub(super) links: Vec<Link>,
    pub(super) flights: BTreeMap<(Time, u64), Flight>,
    pub(super) next_flight: u64,
    next_block: u32,
}

impl Pair {
    /// One prefill engine of `tp_p` ranks and one decode engine of `tp_d`, 1 ms apart.
    pub(crate) fn new(tp_p: u32, tp_d: u32) -> Self {
        Self::with(tp_p, tp_d, lease_times(), options())
    }

    pub(crate) fn with(tp_p: u32, tp_d: u32, times: LeaseTimes, options: ConsumerOptions) -> Self {
        let mut pair = Self {
            now: Time::from_origin(Duration::from_secs(1000)),
            latency: Duration::from_millis(1),
            producers: Vec::new(),
            consumers: Vec::new(),
            workers: Vec::new(),
            identities: Vec::new(),
            listening: BTreeMap::new(),
            sent: Vec::new(),
            ordered: Vec::new(),
            released: Vec::new(),
            dials_hang: false,
            network: Box::new(|_, _| Fate::Deliver),
            links: Vec::new(),
            flights: BTreeMap::new(),
            next_flight: 0,
            next_block: 0,
        };
        pair.add_producer(
            identity("prefill", 1, tp_p),
            common_fields(),
            times,
            CONTROL_PORT,
        );
        pair.add_consumer(identity("decode", 100, tp_d), common_fields(), options);
        pair
    }

    /// Another prefill engine, or a new start of one: whoever listened on `port` does no more.
    pub(crate) fn add_producer(
        &mut self,
        identity: EngineIdentity,
        fields: CompatFields,
        times: LeaseTimes,
        port: u16,
    ) -> usize {
        let cards = cards(identity.tp_size);
        let producer = Producer::new(identity.clone(), fields, cards, times, 64);
        self.producers.push(producer);
        self.identities.push(identity);
        let index = self.producers.len() - 1;
        self.listening.insert(port, index);
        index
    }

    pub(crate) fn add_consumer(
        &mut self,
        identity: EngineIdentity,
        fields: CompatFields,
        options: ConsumerOptions,
    ) -> usize {
        let consumer = Consumer::new(identity, fields, heads(4), options);
        self.consumers.push(consumer);
        self.workers.push(Workers::new(options.margin));
        self.consumers.len() - 1
    }

    /// From here on messages meet what `network` says.
    pub(crate) fn network(&mut self, network: impl FnMut(Direction, &Message) -> Fate + 'static) {
        self.network = Box::new(network);
    }

    /// From here on every message of this kind is lost.
    pub(crate) fn drop_all(&mut self, kind: Kind) {
        self.network(move |_, message| {
            if message.kind() == kind {
                Fate::Drop
            } else {
                Fate::Deliver
            }
        });
    }

    pub(crate) fn heal(&mut self) {
        self.network(|_, _| Fate::Deliver);
        self.dials_hang = false;
    }

    /// P finishes a prefill of `tokens` prompt tokens; what D gets.
    pub(crate) fn prefill(
        &mut self,
        request_id: &str,
        transfer_id: TransferId,
        digest: PromptDigest,
        tokens: u32,
    ) -> RemotePrefill {
        self.prefill_at(0, CONTROL_PORT, request_id, transfer_id, digest, tokens)
    }

    pub(crate) fn prefill_at(
        &mut self,
        producer: usize,
        port: u16,
        request_id: &str,
        transfer_id: TransferId,
        digest: PromptDigest,
        tokens: u32,
    ) -> RemotePrefill {
        let blocks = tokens.div_ceil(super::BLOCK_SIZE);
        let block_ids = vec![
            (self.next_block..self.next_block + blocks)
                .map(BlockId)
                .collect::<Vec<_>>(),
        ];
        self.next_block += blocks;
        let finished = FinishedPrefill {
            request_id: request_id.into(),
            transfer_id,
            digest,
            block_ids: block_ids.clone(),
            num_tokens: tokens,
        };
        let lease = self.producers[producer]
            .finish(self.now, finished)
            .expect("the test's transfer ids and slots suffice");
        let identity = &self.identities[producer];
        RemotePrefill {
            transfer_id,
            engine: identity.engine.clone(),
            incarnation: identity.incarnation,
            host: "p".into(),
            port,
            dp_rank: identity.dp_rank,
            request_id: request_id.into(),
            tp_size: identity.tp_size,
            pp_size: identity.pp_size,
            block_ids,
            num_tokens: tokens,
            lease_epoch: lease.epoch.0,
            prompt_digest: digest,
        }
    }

    /// D's API server hands a request over; its prompt is the one of the params.
    pub(crate) fn arrive(&mut self, request_id: &str, params: &RemotePrefill) {
        self.arrive_as(
            0,
            request_id,
            params,
            params.prompt_digest,
            params.num_tokens,
        );
    }

    pub(crate) fn arrive_as(
        &mut self,
        consumer: usize,
        request_id: &str,
        params: &RemotePrefill,
        digest: PromptDigest,
        tokens: u32,
    ) {
        let text = params.to_json().to_string();
        self.consumers[consumer].handle_new_request(
            self.now,
            request_id,
            TransferParams::parse(&text),
            digest,
            tokens,
        );
        self.check();
    }

    /// D's scheduler takes the request up with `computed` tokens of its own; returns the tokens
    /// expected from outside.
    pub(crate) fn admit(&mut self, request_id: &str, computed: u32) -> u32 {
        self.admit_at(0, request_id, computed)
    }

    pub(crate) fn admit_at(&mut self, consumer: usize, request_id: &str, computed: u32) -> u32 {
        let external = self.consumers[consumer].matched_tokens(request_id, computed);
        let blocks: Vec<BlockId> = (500..564).map(BlockId).collect();
        self.consumers[consumer].handle_allocated(self.now, request_id, &blocks, external);
        self.check();
        external
    }

    /// One engine step of each decode engine: orders reach the workers.
    pub(crate) fn step(&mut self) {
        for (consumer, workers) in self.consumers.iter_mut().zip(&mut self.workers) {
            let orders = consumer.take_orders(self.now);
            workers.take(self.now, orders);
        }
    }

    /// All ranks of decode engine 0 report a load.
    pub(crate) fn report(&mut self, request_id: &str, failed: bool) {
        self.report_at(0, request_id, failed);
    }

    pub(crate) fn report_at(&mut self, consumer: usize, request_id: &str, failed: bool) {
        self.workers[consumer].report(request_id);
        self.consumers[consumer].handle_received(self.now, request_id, failed);
        self.check();
    }

    /// D's engine is done with the request, or its client has left.
    pub(crate) fn finish(&mut self, request_id: &str) {
        self.consumers[0].handle_finished(self.now, request_id);
        self.check();
    }

    /// Steps of the prefill engines: workers carry out releases and report them.
    pub(crate) fn step_producers(&mut self) {
        self.check();
        for (producer, release) in std::mem::take(&mut self.ordered) {
            self.producers[producer].handle_sent(&release.request_id);
            let again = self
                .released
                .iter()
                .any(|r| r.request_id == release.request_id);
            assert!(!again, "{release:?} twice");
            self.released.push(release);
        }
    }

    pub(crate) fn held(&self) -> usize {
        self.producers
            .iter()
            .map(|producer| producer.gauges(self.now).leases_alive)
            .sum()
    }

    /// Ids of the prefills released so far, in order.
    pub(crate) fn released_ids(&self) -> Vec<&str> {
        self.released
            .iter()
            .map(|r| r.request_id.as_str())
            .collect()
    }

    /// How many of the messages sent so far are of this kind of interest.
    pub(crate) fn count_sent(&self, of: impl Fn(&Message) -> bool) -> usize {
        self.sent
            .iter()
            .filter(|(_, _, message)| of(message))
            .count()
    }

    /// Lets time pass, event by event.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        // More events than any test needs: a loop that never gets anywhere fails here.
        for _ in 0..100_000 {
            self.pump();
            let next = self
                .flights
                .keys()
                .map(|(at, _)| *at)
                .chain(self.producers.iter().filter_map(Producer::poll_timeout))
                .chain(self.consumers.iter().filter_map(Consumer::poll_timeout))
                .min();
            let Some(next) = next.filter(|next| *next <= end) else {
                self.now = end;
                return;
            };
            self.now = self.now.max(next);
            self.deliver();
            self.sweep();
            self.check();
        }
        panic!("the machines spin at {:?}", self.now);
    }

    /// This process is stopped for a while: time passes and nothing is handled.
    pub(crate) fn freeze(&mut self, time: Duration) {
        self.now = self.now + time;
        self.sweep();
        self.check();
    }

    fn sweep(&mut self) {
        let now = self.now;
        for producer in &mut self.producers {
            producer.handle_timeout(now);
            let next = producer.poll_timeout();
            assert!(
                next.is_none_or(|next| next > now),
                "producer spins: {next:?}"
            );
        }
        for consumer in &mut self.consumers {
            consumer.handle_timeout(now);
            let next = consumer.poll_timeout();
            assert!(
                next.is_none_or(|next| next > now),
                "consumer spins: {next:?}"
            );
        }
    }

    /// What holds after every event.
    fn check(&mut self) {
        self.pump();
        if let ([consumer], [workers]) = (self.consumers.as_slice(), self.workers.as_slice()) {
            let (requests, _) = consumer.open();
            assert!(
                workers.unreported().count() <= requests,
                "a request that workers still have to report is forgotten"
            );
        }
        let reading: Vec<_> = self
            .workers
            .iter()
            .flat_map(|w| w.reading(self.now))
            .collect();
        for (index, producer) in self.producers.iter_mut().enumerate() {
            for order in producer.take_releases() {
                let source = (order.lease, self.identities[index].incarnation);
                // With one reader nobody else can end a lease that it may still read under.
                assert!(
                    self.consumers.len() > 1 || !reading.contains(&source),
                    "{order:?} is released under a reader"
                );
                self.ordered.push((index, order));
            }
        }
    }
}
