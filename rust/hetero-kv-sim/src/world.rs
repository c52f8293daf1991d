//! The whole cluster: hosts, the queue of what is to come, and the loop that lets it happen.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use hetero_kv_core::consumer::PeerAddress;
use hetero_kv_core::producer::ReleaseOrder;
use hetero_kv_core::step::PeerId;
use hetero_kv_core::time::Time;

use crate::book::{Book, Invariant};
use crate::clock::{Clock, DRIFT_PPM_MAX};
use crate::decode::DecodeHost;
use crate::fault::Fault;
use crate::network::{Link, Way};
use crate::ops::Op;
use crate::prefill::PrefillHost;
use crate::rng::Rng;
use crate::router::{Client, Leg};
use crate::scenario::Scenario;

/// Events of one run; a run that needs more does not get anywhere.
const EVENTS_MAX: u64 = 3_000_000;

/// One of the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    Prefill(usize),
    Decode(usize),
}

/// What is to come. Events of an engine name its incarnation: they die with it.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A client sends its prompt.
    Client(usize),
    /// Prefill's answer is at the router.
    Prefilled(usize),
    /// A decode leg reaches its engine.
    DecodeLeg(String),
    PrefillStep(usize, u64),
    /// One rank gets its step's orders.
    PrefillRank(usize, u64, usize, Rc<Vec<ReleaseOrder>>),
    PrefillStepEnd(usize, u64),
    DecodeStep(usize, u64),
    /// One rank gets its step's orders, encoded, and the local time they were made at.
    DecodeRank(usize, u64, usize, Rc<Vec<u8>>, Time),
    DecodeStepEnd(usize, u64),
    /// The next item of a link is there.
    Arrive(u64, Way),
    Dialed {
        decode: usize,
        incarnation: u64,
        peer: PeerId,
        generation: u64,
        address: PeerAddress,
    },
    /// A connection breaks; with `true`, what is under way to prefill still arrives.
    BreakLink(u64, bool),
    /// Half of an operation's bytes have been copied.
    OpHalf(u64),
    OpDone(u64),
    /// The data connection that an operation is on breaks.
    DataBreaks(u64),
    /// (decode, incarnation, rank, request)
    ReaderDeadline(usize, u64, usize, String),
    Quiesced(usize, u64, usize, String),
    /// Something goes wrong.
    Trouble,
    /// Nothing goes wrong any more.
    Heal,
    KillPrefill(usize, u64),
    Start(Host),
}

impl Event {
    /// The host that has to run for it to happen.
    fn host(&self) -> Option<Host> {
        match self {
            Self::PrefillStep(p, _) | Self::PrefillRank(p, ..) | Self::PrefillStepEnd(p, _) => {
                Some(Host::Prefill(*p))
            }
            Self::DecodeStep(d, _)
            | Self::DecodeRank(d, ..)
            | Self::DecodeStepEnd(d, _)
            | Self::ReaderDeadline(d, ..)
            | Self::Quiesced(d, ..)
            | Self::Dialed { decode: d, .. } => Some(Host::Decode(*d)),
            Self::Client(_)
            | Self::Prefilled(_)
            | Self::DecodeLeg(_)
            | Self::Arrive(..)
            | Self::BreakLink(..)
            // The hardware and the kernel go on while a process stands still.
            | Self::OpHalf(_)
            | Self::OpDone(_)
            | Self::DataBreaks(_)
            | Self::Trouble
            | Self::Heal
            | Self::KillPrefill(..)
            | Self::Start(_) => None,
        }
    }
}

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) rng: Rng,
    pub(crate) book: Book,
    pub(crate) now: Time,
    queue: BTreeMap<(Time, u64), Event>,
    sequence: u64,
    pub(crate) prefill: Vec<PrefillHost>,
    pub(crate) decode: Vec<DecodeHost>,
    pub(crate) links: BTreeMap<u64, Link>,
    pub(crate) ops: BTreeMap<u64, Op>,
    /// Numbers for links, operations, incarnations.
    pub(crate) numbers: u64,
    pub(crate) clients: Vec<Client>,
    pub(crate) legs: BTreeMap<String, Leg>,
    /// (prefill, decode) hosts that cannot reach each other until then.
    pub(crate) partitions: BTreeMap<(usize, usize), Time>,
    /// How late a timer may be: hosts stand still.
    pub(crate) slack: Duration,
}

impl World {
    pub(crate) fn new(scenario: Scenario, traced: bool) -> Self {
        let mut rng = Rng::new(scenario.seed);
        let book = Book::new(scenario.faults.clone(), traced);
        let mut clock = || {
            let drift = if book.may(Fault::ClockDrift) {
                i64::try_from(rng.within(0, 2 * DRIFT_PPM_MAX)).unwrap_or(0)
                    - i64::try_from(DRIFT_PPM_MAX).unwrap_or(0)
            } else {
                0
            };
            Clock {
                origin: Duration::from_millis(rng.within(0, 10_000_000)),
                drift_ppm: drift,
            }
        };
        let prefill = scenario
            .prefill
            .iter()
            .map(|shape| PrefillHost::new(*shape, clock()))
            .collect();
        let decode = scenario
            .decode
            .iter()
            .map(|shape| DecodeHost::new(*shape, clock()))
            .collect();
        let mut world = Self {
            scenario,
            rng,
            book,
            now: Time::ZERO,
            queue: BTreeMap::new(),
            sequence: 0,
            prefill,
            decode,
            links: BTreeMap::new(),
            ops: BTreeMap::new(),
            numbers: 0,
            clients: Vec::new(),
            legs: BTreeMap::new(),
            partitions: BTreeMap::new(),
            slack: Duration::from_millis(1),
        };
        if world.book.may(Fault::ClockDrift) {
            world.book.happened(Fault::ClockDrift);
        }
        for p in 0..world.prefill.len() {
            world.start(Host::Prefill(p));
        }
        for d in 0..world.decode.len() {
            world.start(Host::Decode(d));
        }
        world.plan_clients();
        let until = world.scenario.trouble_until;
        world.after(until, Event::Heal);
        if !world.scenario.faults.is_empty() {
            world.after(Duration::from_millis(300), Event::Trouble);
        }
        world
    }

    /// Runs to the end or to the first broken invariant.
    pub(crate) fn run(&mut self) {
        let end = Time::ZERO + self.scenario.settled_by;
        let mut ended = false;
        for _ in 0..EVENTS_MAX {
            if self.book.violation.is_some() {
                return;
            }
            let event_at = self.queue.first_key_value().map(|((at, _), _)| *at);
            let timer = self.next_timer();
            let timer_at = timer.map(|(at, _)| at);
            let next = event_at.into_iter().chain(timer_at).min();
            let Some(next) = next.filter(|next| *next <= end) else {
                ended = true;
                break;
            };
            self.now = self.now.max(next);
            self.book.now = self.now;
            match timer {
                Some((at, host)) if at == next => self.fire_timers(host),
                Some(_) | None => {
                    if let Some((_, event)) = self.queue.pop_first() {
                        self.dispatch(event);
                    }
                }
            }
            self.pump();
            self.check_holders();
        }
        if !ended {
            self.book
                .broken(Invariant::Spins, format!("{EVENTS_MAX} events and no end"));
        }
        if self.book.violation.is_none() {
            self.check_converged();
        }
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    pub(crate) fn at(&mut self, at: Time, event: Event) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), event);
    }

    pub(crate) fn millis(&mut self, first: u64, last: u64) -> Duration {
        Duration::from_micros(self.rng.within(first * 1000, last * 1000))
    }

    pub(crate) fn paused_until(&self, host: Host) -> Time {
        match host {
            Host::Prefill(p) => self.prefill[p].paused_until,
            Host::Decode(d) => self.decode[d].paused_until,
        }
    }

    fn hosts(&self) -> impl Iterator<Item = Host> + use<> {
        let (prefill, decode) = (self.prefill.len(), self.decode.len());
        (0..prefill)
            .map(Host::Prefill)
            .chain((0..decode).map(Host::Decode))
    }

    fn next_timer(&self) -> Option<(Time, Host)> {
        self.hosts()
            .filter_map(|host| {
                let due = match host {
                    Host::Prefill(p) => self.prefill[p].timer(),
                    Host::Decode(d) => self.decode[d].timer(),
                }?;
                Some((due.max(self.paused_until(host)), host))
            })
            .min_by_key(|(at, _)| *at)
    }

    fn fire_timers(&mut self, host: Host) {
        let spins = match host {
            Host::Prefill(p) => self.prefill[p].fire(self.now),
            Host::Decode(d) => self.decode[d].fire(self.now),
        };
        if spins {
            self.book.broken(
                Invariant::Spins,
                format!("{host:?} asks for a timer that is over"),
            );
        }
    }

    fn dispatch(&mut self, event: Event) {
        if let Some(host) = event.host() {
            let until = self.paused_until(host);
            if until > self.now {
                self.at(until, event);
                return;
            }
        }
        match event {
            Event::Client(client) => self.send_prefill(client),
            Event::Prefilled(client) => self.route_decode(client),
            Event::DecodeLeg(leg) => self.deliver_leg(&leg),
            Event::PrefillStep(p, incarnation) => self.prefill_step(p, incarnation),
            Event::PrefillRank(p, incarnation, rank, orders) => {
                self.prefill_rank(p, incarnation, rank, &orders);
            }
            Event::PrefillStepEnd(p, incarnation) => self.prefill_step_end(p, incarnation),
            Event::DecodeStep(d, incarnation) => self.decode_step(d, incarnation),
            Event::DecodeRank(d, incarnation, rank, orders, made_at) => {
                self.decode_rank(d, incarnation, rank, &orders, made_at);
            }
            Event::DecodeStepEnd(d, incarnation) => self.decode_step_end(d, incarnation),
            Event::Arrive(link, way) => self.arrive(link, way),
            Event::Dialed {
                decode,
                incarnation,
                peer,
                generation,
                address,
            } => self.dialed(decode, incarnation, peer, generation, &address),
            Event::BreakLink(link, arrives) => self.break_link(link, arrives),
            Event::OpHalf(op) => self.op_half(op),
            Event::OpDone(op) => self.op_done(op),
            Event::DataBreaks(op) => self.data_breaks(op),
            Event::ReaderDeadline(d, incarnation, rank, request) => {
                self.reader_deadline(d, incarnation, rank, &request);
            }
            Event::Quiesced(d, incarnation, rank, request) => {
                self.quiesced(d, incarnation, rank, &request);
            }
            Event::Trouble => self.trouble(),
            Event::Heal => self.heal(),
            Event::KillPrefill(p, incarnation) => {
                if self.prefill[p].is(incarnation) {
                    self.kill(Host::Prefill(p), true);
                }
            }
            Event::Start(host) => self.start(host),
        }
    }
}
