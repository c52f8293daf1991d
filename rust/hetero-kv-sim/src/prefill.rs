//! A prefill engine: the real [`Producer`] under a toy vLLM scheduler that obeys vLLM's contract
//! (docs/vllm-contract.md), and its ranks with memory and lease pages.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use hetero_kv_core::auth::Nonce;
use hetero_kv_core::ids::{BlockId, DpRank, EngineId, Incarnation, LeaseRef, PpRank, TpRank};
use hetero_kv_core::producer::{ConnectionId, Producer, ProducerOutput, ReleaseOrder};
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::{Endpoints, ProcessEndpoint, TcpEndpoint, WorkerCard};
use hetero_kv_core::wire::message::EngineIdentity;

use crate::clock::Clock;
use crate::ledger::{End, Ledger};
use crate::memory::{LeasePage, RankMemory};
use crate::pool::Pool;
use crate::router::fields;
use crate::scenario::Shape;
use crate::world::{Event, Host, World};

/// One rank that is read.
#[derive(Debug)]
pub(crate) struct HolderRank {
    pub(crate) memory: RankMemory,
    pub(crate) page: LeasePage,
    pub(crate) alive: bool,
    /// Reported as sent in this step.
    pub(crate) sent: Vec<String>,
}

/// What the API server hands over between steps.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PrefillMail {
    Add(usize),
    Abort(usize),
}

#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) client: usize,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) tokens_done: u32,
}

/// A finished prefill whose blocks vLLM keeps until `finished_sending`.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) lease: LeaseRef,
    /// Why its release was ordered.
    pub(crate) end: Option<End>,
    /// Ranks that have reported it.
    pub(crate) reported: BTreeSet<usize>,
}

#[derive(Debug)]
pub(crate) struct PrefillEngine {
    pub(crate) identity: EngineIdentity,
    pub(crate) producer: Producer,
    pub(crate) ledger: Ledger,
    pub(crate) ranks: Vec<HolderRank>,
    pub(crate) pool: Pool,
    pub(crate) mail: VecDeque<PrefillMail>,
    pub(crate) waiting: VecDeque<usize>,
    pub(crate) running: Vec<Running>,
    pub(crate) held: BTreeMap<String, Held>,
    /// Decided since the last step.
    pub(crate) orders: Vec<ReleaseOrder>,
    pub(crate) outbox: VecDeque<ProducerOutput>,
    /// Connections greeted as another start, which must not be accepted.
    pub(crate) strays: BTreeMap<ConnectionId, Incarnation>,
    pub(crate) stepping: bool,
}

/// A place where a prefill engine runs, and over restarts another.
#[derive(Debug)]
pub(crate) struct PrefillHost {
    pub(crate) shape: Shape,
    pub(crate) clock: Clock,
    pub(crate) paused_until: Time,
    /// Without power: nothing answers, nothing refuses.
    pub(crate) vanished: bool,
    pub(crate) engine: Option<PrefillEngine>,
}

impl PrefillHost {
    pub(crate) fn new(shape: Shape, clock: Clock) -> Self {
        Self {
            shape,
            clock,
            paused_until: Time::ZERO,
            vanished: false,
            engine: None,
        }
    }

    pub(crate) fn incarnation(&self) -> Option<u64> {
        self.engine
            .as_ref()
            .map(|engine| engine.identity.incarnation.0)
    }

    pub(crate) fn is(&self, incarnation: u64) -> bool {
        self.incarnation() == Some(incarnation)
    }

    pub(crate) fn timer(&self) -> Option<Time> {
        let due = self.engine.as_ref()?.producer.poll_timeout()?;
        Some(self.clock.global(due))
    }

    /// True when the machine asks for the same time again.
    pub(crate) fn fire(&mut self, now: Time) -> bool {
        let now = self.clock.local(now);
        let Some(engine) = &mut self.engine else {
            return false;
        };
        engine.producer.handle_timeout(now);
        engine.producer.poll_timeout().is_some_and(|due| due <= now)
    }

    pub(crate) fn poll_output(&mut self) -> Option<ProducerOutput> {
        let engine = self.engine.as_mut()?;
        engine
            .outbox
            .pop_front()
            .or_else(|| engine.producer.poll_output())
    }

    pub(crate) fn connected(&mut self, connection: ConnectionId, nonce: Nonce) {
        if let Some(engine) = &mut self.engine {
            engine.producer.handle_connected(connection, nonce);
        }
    }

    pub(crate) fn closed(&mut self, connection: ConnectionId) {
        if let Some(engine) = &mut self.engine {
            engine.producer.handle_closed(connection);
        }
    }

    pub(crate) fn has_leases(&self) -> bool {
        self.engine
            .as_ref()
            .is_some_and(|engine| !engine.held.is_empty())
    }
}

/// The address of a data listener: ports are given out by host and rank.
pub(crate) fn data_port(p: usize, rank: usize) -> u16 {
    u16::try_from(6000 + 16 * p + rank).unwrap_or(u16::MAX)
}

impl World {
    /// A new start of a prefill engine.
    pub(crate) fn start_prefill(&mut self, p: usize) {
        let incarnation = self.number();
        let shape = self.prefill[p].shape;
        let identity = EngineIdentity {
            engine: EngineId::new(&format!("prefill-{p}")).expect("short and printable"),
            incarnation: Incarnation(incarnation),
            dp_rank: DpRank(u32::try_from(p).unwrap_or(0)),
            tp_size: shape.tp,
            pp_size: shape.pp,
            dp_size: 1,
        };
        let slots = self.scenario.lease_slots;
        let mut ranks = Vec::new();
        let mut cards = Vec::new();
        for (tp, pp) in shape.ranks() {
            let memory = RankMemory::new(&self.scenario, shape, (tp, pp), &mut self.rng);
            let page = LeasePage::new(slots, self.rng.bits() | 1);
            cards.push(WorkerCard {
                dp_rank: identity.dp_rank,
                tp_rank: TpRank(tp),
                pp_rank: PpRank(pp),
                cache: memory.cache.clone(),
                endpoints: Endpoints {
                    process: Some(ProcessEndpoint {
                        boot_id: "simulated".into(),
                        pid_namespace: 1,
                        pid: u32::try_from(incarnation).unwrap_or(u32::MAX),
                        start_ticks: incarnation,
                        nonce_address: 0,
                        nonce: Vec::new(),
                        lease_page_address: 0,
                        lease_slots: slots,
                        lease_page_nonce: page.nonce(),
                    }),
                    tcp: Some(TcpEndpoint {
                        host: format!("prefill-{p}"),
                        port: data_port(p, shape.index(tp, pp)),
                    }),
                    verbs: None,
                    mori: None,
                },
            });
            ranks.push(HolderRank {
                memory,
                page,
                alive: true,
                sent: Vec::new(),
            });
        }
        let times = self.scenario.times;
        self.book
            .trace(|| format!("prefill {p} starts, {shape:?}, incarnation {incarnation}"));
        self.prefill[p].vanished = false;
        self.prefill[p].engine = Some(PrefillEngine {
            producer: Producer::new(identity.clone(), fields(), cards, times, slots)
                .with_keys(self.scenario.keys()),
            ledger: Ledger::new(times),
            identity,
            ranks,
            pool: Pool::new(self.scenario.num_blocks),
            mail: VecDeque::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            held: BTreeMap::new(),
            orders: Vec::new(),
            outbox: VecDeque::new(),
            strays: BTreeMap::new(),
            stepping: false,
        });
    }

    pub(crate) fn mail_prefill(&mut self, p: usize, mail: PrefillMail) {
        if let Some(engine) = &mut self.prefill[p].engine {
            engine.mail.push_back(mail);
        }
        self.wake_prefill(p);
    }

    pub(crate) fn wake_prefill(&mut self, p: usize) {
        if let Some(engine) = &mut self.prefill[p].engine
            && !std::mem::replace(&mut engine.stepping, true)
        {
            let step = Event::PrefillStep(p, engine.identity.incarnation.0);
            self.after(Duration::ZERO, step);
        }
    }

    pub(crate) fn reset_cache(&mut self, p: usize) {
        if let Some(engine) = &mut self.prefill[p].engine {
            engine.ledger.revoked();
            engine.producer.revoke_all();
        }
        self.collect_orders(p);
    }

    /// Every client whose prefill was under way there is told that it failed.
    pub(crate) fn kill_prefill(&mut self, p: usize, seen: bool) {
        self.prefill[p].engine = None;
        self.prefill[p].vanished = !seen;
        self.prefill[p].paused_until = Time::ZERO;
        self.end_links(Host::Prefill(p), seen);
        for client in &mut self.clients {
            client.prefill_lost(p);
        }
    }
}
