//! The processes of a lab: started, addressed, signalled, ended.

use std::io::BufReader;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hetero_kv_core::plan::{EngineShape, SourcePolicy};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, set_child_subreaper, wait,
};

use super::config::Plan;
use super::fault::{Fault, Kind, Role};
use super::host;
use super::ipc::{self, EngineConfig, FromEngine, RankName, RankProcess, ToEngine};
use super::model::mix;
use super::relay::ControlRelay;
use super::trace::{Directory, EnginePlace};
use super::{PATIENCE, Policy};

/// Slots of a lease page at least; more where more requests are under way.
const LEASE_SLOTS_MIN: u32 = 1024;
/// Slowest rate at which a host is expected to touch its memory for the first time.
const FIRST_TOUCH_BYTES_PER_S: u64 = 200_000_000;

/// Whether an engine can be given requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Starting,
    Alive,
    Dead,
}

/// What an engine's reader thread has for the router.
#[derive(Debug)]
pub(super) enum Event {
    Message(FromEngine),
    /// Its end of the pipe is closed.
    Gone,
}

/// One engine as the router sees it.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) role: Role,
    pub(super) instance: u32,
    pub(super) dp: u32,
    pub(super) shape: EngineShape,
    pub(super) state: State,
    /// Counts starts; events of an earlier one are dropped.
    pub(super) generation: u64,
    pub(super) in_flight: usize,
    config: EngineConfig,
    commands: Option<Sender<ToEngine>>,
    group: Option<Pid>,
    ranks: Vec<RankProcess>,
    port: Option<u16>,
    incarnation: u64,
    pub(super) relay: Option<ControlRelay>,
}

impl Engine {
    pub(super) fn id(&self) -> &str {
        &self.config.engine_id
    }

    pub(super) fn place(&self) -> EnginePlace {
        EnginePlace {
            instance: self.instance,
            dp: self.dp,
        }
    }

    /// Whether a fault is meant for this engine.
    pub(super) fn is_named_by(&self, fault: &Fault) -> bool {
        self.role == fault.role
            && self.instance == fault.instance
            && fault.dp.is_none_or(|dp| dp == self.dp)
    }

    /// Never waits: a writer thread has the pipe, which is full while the engine stands still.
    pub(super) fn tell(&self, command: ToEngine) {
        if let Some(commands) = &self.commands {
            // An engine that is gone says so by its event.
            let _ = commands.send(command);
        }
    }

    /// A signal to one rank, or to all processes of the engine.
    pub(super) fn signal(&self, tp: Option<u32>, signal: Signal) {
        if self.state == State::Dead {
            return;
        }
        match tp {
            None => {
                if let Some(group) = self.group {
                    // Fails only when it is gone.
                    let _ = kill_process_group(group, signal);
                }
            }
            Some(tp) => {
                for rank in self.ranks.iter().filter(|rank| rank.tp == tp) {
                    if let Some(pid) = i32::try_from(rank.pid).ok().and_then(Pid::from_raw) {
                        let _ = kill_process(pid, signal);
                    }
                }
            }
        }
    }

    /// Where decode dials.
    pub(super) fn control_port(&self) -> Option<u16> {
        match &self.relay {
            Some(relay) => Some(relay.port),
            None => self.port,
        }
    }

    /// Process ids of a living engine, and what each is.
    pub(super) fn processes(&self) -> Vec<(u32, String)> {
        if self.state != State::Alive {
            return Vec::new();
        }
        let scheduler = self.group.map(|group| {
            let pid = group.as_raw_nonzero().get().unsigned_abs();
            (pid, format!("{} scheduler", self.id()))
        });
        let ranks = self.ranks.iter();
        scheduler
            .into_iter()
            .chain(ranks.map(|rank| (rank.pid, format!("{} tp {}", self.id(), rank.tp))))
            .collect()
    }
}

/// All engines. Dropping it ends every process.
pub(super) struct Cluster {
    pub(super) engines: Vec<Engine>,
    events: Receiver<(usize, u64, Event)>,
    sender: Sender<(usize, u64, Event)>,
}

impl Cluster {
    /// Starts every process and waits until all of them serve.
    pub(super) fn start(plan: &Plan) -> Result<Self> {
        // Ranks of a killed engine are adopted by this process, so that their time counts.
        set_child_subreaper(Some(getpid())).context("PR_SET_CHILD_SUBREAPER")?;
        let (sender, events) = mpsc::channel();
        let mut cluster = Self {
            engines: Vec::new(),
            events,
            sender,
        };
        let relayed = plan.faults.iter().any(|fault| fault.kind == Kind::DropAcks);
        for role in [Role::Prefill, Role::Decode] {
            for (instance, dp, shape) in plan.engines(role) {
                let relay = match role {
                    Role::Prefill if relayed => Some(ControlRelay::start().context("a relay")?),
                    Role::Prefill | Role::Decode => None,
                };
                cluster.engines.push(Engine {
                    role,
                    instance,
                    dp,
                    shape,
                    state: State::Dead,
                    generation: 0,
                    in_flight: 0,
                    config: engine_config(plan, role, instance, dp, shape),
                    commands: None,
                    group: None,
                    ranks: Vec::new(),
                    port: None,
                    incarnation: 0,
                    relay,
                });
            }
        }
        for index in 0..cluster.engines.len() {
            cluster.spawn(index)?;
        }
        let first_touch = Duration::from_secs(plan.memory_bytes / FIRST_TOUCH_BYTES_PER_S);
        let deadline = Instant::now() + PATIENCE + first_touch;
        while let Some(waiting) = cluster
            .engines
            .iter()
            .find(|engine| engine.state == State::Starting)
        {
            let id = waiting.id().to_owned();
            match cluster.next_event(deadline.saturating_duration_since(Instant::now())) {
                Some((index, Event::Message(message))) => cluster.started(index, message)?,
                Some((index, Event::Gone)) => {
                    bail!(
                        "engine {} ended while it started",
                        cluster.engines[index].id()
                    )
                }
                None => bail!("engine {id} has not started in time"),
            }
        }
        Ok(cluster)
    }

    /// Starts an engine's processes; [`FromEngine::Started`] follows.
    pub(super) fn spawn(&mut self, index: usize) -> Result<()> {
        let engine = &mut self.engines[index];
        engine.generation += 1;
        engine.config.port = engine.port;
        let mut child = host::spawn("lab-engine", true).context("an engine's process")?;
        engine.group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let (mut input, output) = child
            .stdin
            .take()
            .zip(child.stdout.take())
            .context("an engine's pipes")?;
        let (commands, to_write) = mpsc::channel::<ToEngine>();
        let config = engine.config.clone();
        thread::Builder::new()
            .name("lab-write".into())
            .spawn(move || {
                if ipc::send(&mut input, &config).is_err() {
                    return;
                }
                for command in to_write {
                    if ipc::send(&mut input, &command).is_err() {
                        return;
                    }
                }
            })
            .context("a thread")?;
        let (events, generation) = (self.sender.clone(), engine.generation);
        thread::Builder::new()
            .name("lab-read".into())
            .spawn(move || {
                let mut output = BufReader::new(output);
                while let Ok(message) = ipc::receive(&mut output) {
                    if events
                        .send((index, generation, Event::Message(message)))
                        .is_err()
                    {
                        return;
                    }
                }
                let _ = events.send((index, generation, Event::Gone));
            })
            .context("a thread")?;
        engine.commands = Some(commands);
        engine.state = State::Starting;
        Ok(())
    }

    /// The next event of a present start, or none in time.
    pub(super) fn next_event(&self, timeout: Duration) -> Option<(usize, Event)> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let (index, generation, event) = self.events.recv_timeout(left).ok()?;
            let engine = &self.engines[index];
            if engine.generation == generation && engine.state != State::Dead {
                return Some((index, event));
            }
        }
    }

    /// An engine's first message. It is paired with every engine of the other side at once.
    pub(super) fn started(&mut self, index: usize, message: FromEngine) -> Result<()> {
        let engine = &mut self.engines[index];
        match message {
            FromEngine::Started {
                port,
                incarnation,
                ranks,
            } => {
                engine.port = port;
                engine.incarnation = incarnation;
                engine.ranks = ranks;
                engine.state = State::Alive;
                if let (Some(relay), Some(port)) = (&engine.relay, port) {
                    relay.lead_to(port);
                }
            }
            FromEngine::StartFailed(text) => bail!("engine {} cannot start: {text}", engine.id()),
            FromEngine::Prefilled { .. }
            | FromEngine::PrefillAborted { .. }
            | FromEngine::Decoded { .. }
            | FromEngine::Figures(_)
            | FromEngine::Acknowledged(_)
            | FromEngine::Swept { .. } => bail!("engine {} speaks too early", engine.id()),
        }
        let started = &self.engines[index];
        for other in self
            .engines
            .iter()
            .filter(|other| other.state == State::Alive)
        {
            let (prefill, decode) = match (started.role, other.role) {
                (Role::Prefill, Role::Decode) => (started, other),
                (Role::Decode, Role::Prefill) => (other, started),
                (Role::Prefill, Role::Prefill) | (Role::Decode, Role::Decode) => continue,
            };
            if let Some(port) = prefill.control_port() {
                decode.tell(ToEngine::Connect {
                    port,
                    engine_id: prefill.id().to_owned(),
                    incarnation: prefill.incarnation,
                });
            }
        }
        Ok(())
    }

    /// Ends an engine's processes and forgets what they still have to say.
    pub(super) fn kill(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        engine.signal(None, Signal::KILL);
        engine.state = State::Dead;
        engine.commands = None;
    }

    /// Lets every living engine end by itself.
    pub(super) fn stop(&mut self) {
        for engine in &self.engines {
            engine.tell(ToEngine::Stop);
        }
        let deadline = Instant::now() + PATIENCE;
        while self
            .engines
            .iter()
            .any(|engine| engine.state != State::Dead)
        {
            match self.next_event(deadline.saturating_duration_since(Instant::now())) {
                Some((index, Event::Gone)) => self.engines[index].state = State::Dead,
                Some((_, Event::Message(_))) => {}
                None => break,
            }
        }
    }
}

impl Directory for Cluster {
    fn engine(&self, name: &RankName) -> Option<EnginePlace> {
        self.engines
            .iter()
            .find(|engine| engine.id() == name.engine && engine.incarnation == name.incarnation)
            .map(Engine::place)
    }

    fn at_address(&self, dialled: &str) -> Option<(EnginePlace, u32, u32)> {
        let prefill = self
            .engines
            .iter()
            .filter(|engine| engine.role == Role::Prefill);
        let is_there = |rank: &RankProcess| match dialled.strip_prefix("pid ") {
            Some(pid) => pid.parse() == Ok(rank.pid),
            None => rank
                .data_port
                .is_some_and(|port| dialled == format!("{}:{port}", host::LOCALHOST)),
        };
        prefill
            .flat_map(|engine| engine.ranks.iter().map(move |rank| (engine, rank)))
            .find(|(_, rank)| is_there(rank))
            .map(|(engine, rank)| (engine.place(), rank.tp, rank.pp))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for index in 0..self.engines.len() {
            self.kill(index);
        }
        let deadline = Instant::now() + PATIENCE;
        // Until there are no children, adopted ones included.
        while let Ok(ended) = wait(WaitOptions::NOHANG) {
            if ended.is_none() {
                if Instant::now() > deadline {
                    break;
                }
                thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

fn engine_config(
    plan: &Plan,
    role: Role,
    instance: u32,
    dp: u32,
    shape: EngineShape,
) -> EngineConfig {
    let letter = match role {
        Role::Prefill => 'p',
        Role::Decode => 'd',
    };
    let (prefill, decode) = plan.blocks;
    let mut limited = Vec::new();
    for fault in &plan.faults {
        let here = fault.role == role
            && fault.instance == instance
            && fault.dp.is_none_or(|named| named == dp);
        if let (Kind::Slow(_), true) = (fault.kind, here) {
            match fault.tp {
                Some(tp) => limited.push(tp),
                None => limited.extend(0..shape.tp),
            }
        }
    }
    EngineConfig {
        engine_id: format!("lab-{letter}{instance}_dp{dp}"),
        role,
        dp,
        dp_size: shape.dp,
        tp_size: shape.tp,
        pp_size: shape.pp,
        model: plan.model,
        num_blocks: match role {
            Role::Prefill => prefill,
            Role::Decode => decode,
        },
        transport: plan.transport,
        lease_ms: plan.lease_ms,
        lease_slots: LEASE_SLOTS_MIN.max(u32::try_from(plan.concurrency * 2).unwrap_or(u32::MAX)),
        port: None,
        source_policy: match plan.policy {
            Policy::RoundRobin => SourcePolicy::RoundRobin,
            Policy::Hash | Policy::Fixed => SourcePolicy::Hash,
        },
        stripe_bytes_min: plan.stripe_bytes_min,
        recompute: plan.recompute,
        trace: plan.trace.is_some() && role == Role::Prefill,
        limited,
        seed: mix(plan.seed ^ (letter as u64) << 48 ^ u64::from(instance) << 24 ^ u64::from(dp)),
    }
}
