//! A decode engine: the real [`Consumer`] under a toy vLLM scheduler that obeys vLLM's contract
//! (docs/vllm-contract.md), and what the reference model knows of its grants.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use hetero_kv_core::auth::Nonce;
use hetero_kv_core::consumer::{Consumer, ConsumerOutput, PeerAddress};
use hetero_kv_core::failure::FailureReason;
use hetero_kv_core::ids::{BlockId, DpRank, EngineId, Incarnation, LeaseRef, TransferId};
use hetero_kv_core::step::PeerId;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::message::{EngineIdentity, Message};

use crate::clock::Clock;
use crate::memory::RankMemory;
use crate::pool::Pool;
use crate::reader::ReadingRank;
use crate::router::fields;
use crate::scenario::Shape;
use crate::world::{Event, Host, World};

/// What the API server hands over between steps.
#[derive(Clone, Debug)]
pub(crate) enum DecodeMail {
    Add(String),
    Abort(String),
    /// vLLM has rejected the leg in front of the scheduler.
    Rejected(String),
}

/// Where a request is in vLLM's scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Waits for blocks.
    Queued,
    /// WAITING_FOR_REMOTE_KVS.
    Loading {
        /// Since then, in true time.
        since: Time,
    },
    /// Loaded; scheduled in the next step.
    Loaded,
    /// Computes; so many steps are left.
    Running { steps: u32 },
}

#[derive(Clone, Debug)]
pub(crate) struct DecodeRequest {
    pub(crate) stage: Stage,
    pub(crate) blocks: Vec<BlockId>,
    /// Tokens cached here when it was admitted.
    pub(crate) computed: u32,
    /// Tokens from outside.
    pub(crate) external: u32,
    /// Whether vLLM has asked for matched tokens and allocated before.
    pub(crate) asked: bool,
    pub(crate) aborted: bool,
    pub(crate) failed: Option<FailureReason>,
    /// Ranks that have reported its load, and the first failure among them.
    pub(crate) reported: BTreeSet<usize>,
    pub(crate) load_failed: Option<(FailureReason, bool)>,
    /// Whom it was told to read.
    pub(crate) peer: Option<PeerId>,
}

/// What P has granted, by what crossed the wire.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) fence: LeaseRef,
    pub(crate) blocks: Vec<BlockId>,
    /// By D's clock: from the question, a margin early.
    pub(crate) until: Time,
}

#[derive(Debug)]
pub(crate) struct DecodeEngine {
    pub(crate) identity: EngineIdentity,
    pub(crate) consumer: Consumer,
    pub(crate) ranks: Vec<ReadingRank>,
    pub(crate) pool: Pool,
    pub(crate) mail: VecDeque<DecodeMail>,
    pub(crate) waiting: VecDeque<String>,
    pub(crate) requests: BTreeMap<String, DecodeRequest>,
    pub(crate) stepping: bool,
    /// Questions by their number: when they were sent.
    questions: BTreeMap<u64, Time>,
    pub(crate) grants: BTreeMap<(PeerId, TransferId), Grant>,
    pub(crate) addresses: BTreeMap<PeerId, PeerAddress>,
    dials: BTreeMap<PeerId, u64>,
    margin: Duration,
}

/// A place where a decode engine runs, and over restarts another.
#[derive(Debug)]
pub(crate) struct DecodeHost {
    pub(crate) shape: Shape,
    pub(crate) clock: Clock,
    pub(crate) paused_until: Time,
    pub(crate) engine: Option<DecodeEngine>,
}

impl DecodeHost {
    pub(crate) fn new(shape: Shape, clock: Clock) -> Self {
        Self {
            shape,
            clock,
            paused_until: Time::ZERO,
            engine: None,
        }
    }

    pub(crate) fn is(&self, incarnation: u64) -> bool {
        self.engine
            .as_ref()
            .is_some_and(|engine| engine.identity.incarnation.0 == incarnation)
    }

    pub(crate) fn timer(&self) -> Option<Time> {
        let due = self.engine.as_ref()?.consumer.poll_timeout()?;
        Some(self.clock.global(due))
    }

    /// True when the machine asks for the same time again.
    pub(crate) fn fire(&mut self, now: Time) -> bool {
        let now = self.clock.local(now);
        let Some(engine) = &mut self.engine else {
            return false;
        };
        engine.consumer.handle_timeout(now);
        engine.consumer.poll_timeout().is_some_and(|due| due <= now)
    }

    pub(crate) fn poll_output(&mut self) -> Option<ConsumerOutput> {
        self.engine.as_mut()?.consumer.poll_output()
    }

    /// A dial under this number is on its way; the engine's incarnation.
    pub(crate) fn note_dial(
        &mut self,
        peer: PeerId,
        generation: u64,
        address: &PeerAddress,
    ) -> Option<u64> {
        let engine = self.engine.as_mut()?;
        engine.dials.insert(peer, generation);
        engine.addresses.insert(peer, address.clone());
        Some(engine.identity.incarnation.0)
    }

    pub(crate) fn forget_dial(&mut self, peer: PeerId) {
        if let Some(engine) = &mut self.engine {
            engine.dials.remove(&peer);
        }
    }

    /// Whether this dial is still wanted.
    pub(crate) fn dials(&self, incarnation: u64, peer: PeerId, generation: u64) -> bool {
        self.engine.as_ref().is_some_and(|engine| {
            engine.identity.incarnation.0 == incarnation
                && engine.dials.get(&peer) == Some(&generation)
        })
    }

    pub(crate) fn connected(&mut self, now: Time, peer: PeerId, nonce: Nonce) {
        let now = self.clock.local(now);
        if let Some(engine) = &mut self.engine {
            engine.consumer.handle_dialed(now, peer, nonce);
        }
    }

    pub(crate) fn closed(&mut self, now: Time, peer: PeerId, why: &str) {
        let now = self.clock.local(now);
        if let Some(engine) = &mut self.engine {
            engine.consumer.handle_closed(now, peer, why);
        }
    }

    pub(crate) fn note_sent(&mut self, now: Time, message: &Message) {
        let now = self.clock.local(now);
        if let Some(engine) = &mut self.engine {
            let question = match message {
                Message::Claim(claim) => claim.question,
                Message::Renew(renew) => renew.question,
                Message::Hello(_)
                | Message::Accept(_)
                | Message::Reject(_)
                | Message::Layout(_)
                | Message::Granted(_)
                | Message::Gone(_)
                | Message::Ack(_)
                | Message::Release(_)
                | Message::Ping
                | Message::Pong
                | Message::Bye
                | Message::Challenge(_)
                | Message::Proof(_) => return,
            };
            engine.questions.insert(question, now);
        }
    }

    /// A message reaches D's control thread; the reference model notes what it grants.
    pub(crate) fn hears(&mut self, now: Time, peer: PeerId, message: Message) {
        let now = self.clock.local(now);
        let Some(engine) = &mut self.engine else {
            return;
        };
        if let Message::Granted(granted) = &message
            && let Some(asked_at) = engine.questions.get(&granted.question)
        {
            let time = Duration::from_millis(granted.granted_ms).saturating_sub(engine.margin);
            let until = *asked_at + time;
            let grant = engine
                .grants
                .entry((peer, granted.transfer_id))
                .or_insert_with(|| Grant {
                    fence: granted.lease,
                    blocks: granted.block_ids.concat(),
                    until,
                });
            grant.until = grant.until.max(until);
        }
        engine.consumer.handle_message(now, peer, message);
    }
}

impl World {
    /// A new start of a decode engine.
    pub(crate) fn start_decode(&mut self, d: usize) {
        let incarnation = self.number();
        let shape = self.decode[d].shape;
        let identity = EngineIdentity {
            engine: EngineId::new(&format!("decode-{d}")).expect("short and printable"),
            incarnation: Incarnation(incarnation),
            dp_rank: DpRank(u32::try_from(d).unwrap_or(0)),
            tp_size: shape.tp,
            pp_size: shape.pp,
            dp_size: 1,
        };
        let ranks = shape
            .ranks()
            .map(|rank| {
                let memory = RankMemory::new(&self.scenario, shape, rank, &mut self.rng);
                ReadingRank::new(memory)
            })
            .collect();
        self.book
            .trace(|| format!("decode {d} starts, {shape:?}, incarnation {incarnation}"));
        self.decode[d].engine = Some(DecodeEngine {
            consumer: Consumer::new(
                identity.clone(),
                fields(),
                self.scenario.heads,
                self.scenario.options,
            )
            .with_keys(self.scenario.keys()),
            identity,
            ranks,
            pool: Pool::new(self.scenario.num_blocks),
            mail: VecDeque::new(),
            waiting: VecDeque::new(),
            requests: BTreeMap::new(),
            stepping: false,
            questions: BTreeMap::new(),
            grants: BTreeMap::new(),
            addresses: BTreeMap::new(),
            dials: BTreeMap::new(),
            margin: self.scenario.options.margin,
        });
    }

    pub(crate) fn mail_decode(&mut self, d: usize, mail: DecodeMail) {
        if let Some(engine) = &mut self.decode[d].engine {
            engine.mail.push_back(mail);
        }
        self.wake_decode(d);
    }

    pub(crate) fn wake_decode(&mut self, d: usize) {
        if let Some(engine) = &mut self.decode[d].engine
            && !std::mem::replace(&mut engine.stepping, true)
        {
            let step = Event::DecodeStep(d, engine.identity.incarnation.0);
            self.after(Duration::ZERO, step);
        }
    }

    pub(crate) fn kill_decode(&mut self, d: usize) {
        self.decode[d].engine = None;
        self.decode[d].paused_until = Time::ZERO;
        self.end_links(Host::Decode(d), true);
        self.ops.retain(|_, op| op.decode != d);
        let lost: Vec<String> = self
            .legs
            .iter()
            .filter(|(_, leg)| leg.decode == d && leg.delivered && leg.outcome.is_none())
            .map(|(id, _)| id.clone())
            .collect();
        for id in lost {
            self.end_leg(&id, crate::book::Outcome::EngineLost);
        }
    }
}
