//! The process of one engine's scheduler: plays vLLM's part in front of the product's scheduler
//! side.
//!
//! It keeps vLLM's order: waiting requests get blocks (`matched_tokens`, `allocated`), the step's
//! orders go to every rank, what the ranks report is counted per request as `KVOutputAggregator`
//! does, loaded requests are scheduled with a second `allocated`, and blocks are freed only after
//! every rank's report. An engine with requests or delayed frees keeps stepping; an idle one sleeps.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Stdout};
use std::process::{Child, ChildStdin, ChildStdout};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hetero_kv_core::consumer::PeerAddress;
use hetero_kv_core::digest::PromptHasher;
use hetero_kv_core::ids::{BlockId, EngineId, Incarnation, PromptDigest};
use hetero_kv_core::wire::card::WorkerCard;
use hetero_kv_core::wire::params::TransferParams;
use hetero_kv_transport::scheduler::{Prefilled, SchedulerSide, random_bytes};

use super::fault::Role;
use super::host;
use super::ipc::{
    self, EngineConfig, Fill, FromEngine, FromRank, Load, Outcome, Prompt, RankConfig, RankProcess,
    Reason, Received, Step, Stepped, ToEngine, ToRank,
};

mod counting;
mod requests;
mod side;

use counting::Aggregator;
use requests::{Request, State};

/// Longest wait of an empty step for a finished read or a new request.
const EMPTY_STEP_WAIT_MS: u64 = 5;
/// Prompts computed in one step, so that the first of a burst need not wait for the last.
const PREFILLS_PER_STEP: usize = 16;
/// Serves the coordinator until that is gone or says stop.
pub(crate) fn main() -> Result<()> {
    host::die_with_parent()?;
    let mut input = io::stdin();
    let config: EngineConfig = ipc::receive(&mut input).context("the engine's configuration")?;
    host::log_to_stderr(config.trace);
    let (commands, received) = mpsc::channel();
    thread::Builder::new()
        .name("lab-commands".into())
        .spawn(move || {
            while let Ok(command) = ipc::receive::<ToEngine>(&mut input) {
                if commands.send(command).is_err() {
                    return;
                }
            }
        })
        .context("a thread for commands")?;
    let mut output = io::stdout();
    match Engine::start(config) {
        Ok((mut engine, started)) => {
            ipc::send(&mut output, &started)?;
            engine.run(&received, &mut output)
        }
        Err(error) => {
            ipc::send(&mut output, &FromEngine::StartFailed(format!("{error:#}")))?;
            Ok(())
        }
    }
}

/// A rank's process as its engine holds it.
struct RankPipe {
    tp: u32,
    pp: u32,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl RankPipe {
    fn ask(&mut self, command: &ToRank) -> Result<FromRank> {
        ipc::send(&mut self.input, command).context("a rank is gone")?;
        ipc::receive(&mut self.output).context("a rank is gone")
    }
}

struct Engine {
    config: EngineConfig,
    side: SchedulerSide,
    ranks: Vec<RankPipe>,
    free: Vec<u32>,
    requests: BTreeMap<u64, Request>,
    /// Blocks of finished prefills that wait for `finished_sending`.
    delayed: BTreeMap<String, Vec<u32>>,
    counting: Aggregator,
    expected: Vec<(String, u64)>,
    fills: Vec<Fill>,
    /// Ranks whose bytes are changed after each prefill; `None` inside: all.
    corrupt: Vec<Option<u32>>,
    /// Bytes that changed while nobody may have written them, not yet told.
    untold_mismatches: u64,
    unquiesced: u64,
}

impl Engine {
    fn start(config: EngineConfig) -> Result<(Self, FromEngine)> {
        let mut ranks = Vec::new();
        for pp_rank in 0..config.pp_size {
            for tp_rank in 0..config.tp_size {
                let mut child = host::spawn("lab-rank", false).context("a rank's process")?;
                let pipes = child.stdin.take().zip(child.stdout.take());
                let (mut input, output) = pipes.context("a rank's pipes")?;
                let rank = RankConfig {
                    engine: config.clone(),
                    tp_rank,
                    pp_rank,
                };
                ipc::send(&mut input, &rank).context("a rank's process")?;
                ranks.push(RankPipe {
                    tp: tp_rank,
                    pp: pp_rank,
                    child,
                    input,
                    output: BufReader::new(output),
                });
            }
        }
        let mut workers = Vec::new();
        for rank in &mut ranks {
            match ipc::receive(&mut rank.output).context("a rank's process")? {
                FromRank::Started { card } => {
                    workers.push(rmp_serde::from_slice::<WorkerCard>(&card)?);
                }
                FromRank::StartFailed(text) => bail!(text),
                FromRank::Stepped(_) | FromRank::Swept { .. } | FromRank::Done => {
                    bail!("a rank speaks before it is asked")
                }
            }
        }
        let data_ports: Vec<Option<u16>> = workers
            .iter()
            .map(|card| card.endpoints.tcp.as_ref().map(|tcp| tcp.port))
            .collect();
        let incarnation = u64::from_le_bytes(random_bytes().context("random bytes")?);
        let side = side::start(&config, incarnation, workers)?;
        let started = FromEngine::Started {
            port: side.port(),
            incarnation,
            ranks: ranks
                .iter()
                .zip(data_ports)
                .map(|(rank, data_port)| RankProcess {
                    tp: rank.tp,
                    pp: rank.pp,
                    pid: rank.child.id(),
                    data_port,
                })
                .collect(),
        };
        let world = ranks.len();
        let engine = Self {
            free: (0..config.num_blocks).rev().collect(),
            config,
            side,
            ranks,
            requests: BTreeMap::new(),
            delayed: BTreeMap::new(),
            counting: Aggregator::new(world),
            expected: Vec::new(),
            fills: Vec::new(),
            corrupt: Vec::new(),
            untold_mismatches: 0,
            unquiesced: 0,
        };
        Ok((engine, started))
    }

    fn run(&mut self, commands: &Receiver<ToEngine>, output: &mut Stdout) -> Result<()> {
        let mut empty = true;
        loop {
            loop {
                let idle = self.requests.is_empty() && self.delayed.is_empty();
                let command = if idle {
                    commands.recv().map_err(|_| TryRecvError::Disconnected)
                } else if empty && self.config.role == Role::Prefill {
                    let wait = Duration::from_millis(EMPTY_STEP_WAIT_MS);
                    commands.recv_timeout(wait).map_err(|error| match error {
                        RecvTimeoutError::Timeout => TryRecvError::Empty,
                        RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                    })
                } else {
                    commands.try_recv()
                };
                // Only the first command of a step is waited for.
                empty = false;
                match command {
                    Ok(ToEngine::Stop) => return self.stop(),
                    Ok(command) => self.handle(command, output)?,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            }
            empty = self.step(output)?;
        }
    }

    fn handle(&mut self, command: ToEngine, output: &mut Stdout) -> Result<()> {
        match command {
            ToEngine::Prefill {
                request,
                prompt,
                transfer_id,
            } => {
                let made = Request::prefill(request, prompt, transfer_id);
                self.requests.insert(request, made);
            }
            ToEngine::Decode {
                request,
                prompt,
                params,
            } => {
                let made = Request::decode(request, prompt);
                let params = TransferParams::parse(&params);
                self.side
                    .new_request(&made.name, params, digest(prompt), prompt.tokens);
                self.requests.insert(request, made);
            }
            ToEngine::Abort { request } => self.abort(request, output)?,
            ToEngine::Connect {
                port,
                engine_id,
                incarnation,
            } => self.side.connect(PeerAddress {
                host: host::LOCALHOST.to_owned(),
                port,
                engine: EngineId::new(&engine_id)?,
                incarnation: Incarnation(incarnation),
            }),
            ToEngine::Corrupt { tp } => match self.config.role {
                Role::Prefill => self.corrupt.push(tp),
                Role::Decode => {
                    let idle: Vec<u32> = self.free.iter().take(4).copied().collect();
                    self.corrupt_blocks(tp, &idle)?;
                }
            },
            ToEngine::Slow { tp, bytes_per_s } => {
                for rank in named(&mut self.ranks, tp) {
                    rank.ask(&ToRank::Slow { bytes_per_s })?;
                }
            }
            ToEngine::Figures => {
                self.tell_acknowledged(output)?;
                let figures = FromEngine::Figures(self.figures());
                ipc::send(output, &figures)?;
            }
            ToEngine::Sweep => {
                let mut mismatched_bytes = std::mem::take(&mut self.untold_mismatches);
                for rank in &mut self.ranks {
                    if let FromRank::Swept {
                        mismatched_bytes: found,
                    } = rank.ask(&ToRank::Sweep)?
                    {
                        mismatched_bytes += found;
                    }
                }
                ipc::send(output, &FromEngine::Swept { mismatched_bytes })?;
            }
            ToEngine::Stop => {}
        }
        Ok(())
    }

    fn corrupt_blocks(&mut self, tp: Option<u32>, blocks: &[u32]) -> Result<()> {
        for rank in named(&mut self.ranks, tp) {
            rank.ask(&ToRank::Corrupt(blocks.to_vec()))?;
        }
        Ok(())
    }

    /// True when nothing was computed, loaded or freed.
    fn step(&mut self, output: &mut Stdout) -> Result<bool> {
        let (prefilled, running) = match self.config.role {
            Role::Prefill => (self.schedule_prefills(), Vec::new()),
            Role::Decode => (Vec::new(), self.schedule_decodes()),
        };
        let orders = self.side.take_orders().encode()?;
        let empty = prefilled.is_empty() && running.is_empty();
        let step = Step {
            orders,
            fills: std::mem::take(&mut self.fills),
            expected: std::mem::take(&mut self.expected),
            // An empty step of prefill is followed by a wait for commands instead.
            wait_ms: match self.config.role {
                Role::Decode if empty => EMPTY_STEP_WAIT_MS,
                Role::Decode | Role::Prefill => 0,
            },
        };
        let step = ToRank::Step(step);
        for rank in &mut self.ranks {
            ipc::send(&mut rank.input, &step).context("a rank is gone")?;
        }
        let mut stepped = Vec::new();
        for rank in &mut self.ranks {
            match ipc::receive(&mut rank.output).context("a rank is gone")? {
                FromRank::Stepped(found) => stepped.push(found),
                FromRank::Started { .. }
                | FromRank::StartFailed(_)
                | FromRank::Swept { .. }
                | FromRank::Done => bail!("a rank answers something else than a step"),
            }
        }
        for request in prefilled {
            self.finish_prefill(request, output)?;
        }
        for request in running {
            self.finish_decode(request, output)?;
        }
        let reported = stepped
            .iter()
            .any(|rank| !rank.sent.is_empty() || !rank.received.is_empty());
        self.unquiesced = stepped.iter().map(|rank| rank.unquiesced).sum();
        for rank in stepped {
            self.untold_mismatches += rank.mismatched_bytes;
            self.count(rank);
        }
        self.deliver(output)?;
        self.tell_acknowledged(output)?;
        Ok(empty && !reported)
    }

    /// In a step, since an engine with blocks to free keeps stepping, and before figures, so that
    /// whoever sees nothing held has heard of every acknowledgement.
    fn tell_acknowledged(&self, output: &mut Stdout) -> Result<()> {
        let transfers = host::take_acknowledged();
        if transfers.is_empty() {
            return Ok(());
        }
        Ok(ipc::send(output, &FromEngine::Acknowledged(transfers))?)
    }

    fn count(&mut self, stepped: Stepped) {
        for request_id in stepped.sent {
            let known = self.delayed.contains_key(&request_id);
            self.counting.sent(request_id, known);
        }
        for report in stepped.received {
            let loads = requests::id_of(&report.request_id)
                .and_then(|id| self.requests.get(&id))
                .is_some_and(|request| matches!(request.state, State::Loading { .. }));
            self.counting.received(report, loads);
        }
    }

    fn figures(&self) -> ipc::Figures {
        let figures = self.side.figures();
        let mut leases = BTreeMap::new();
        let mut leases_alive = 0;
        if let Some((counts, gauges)) = figures.producer {
            leases_alive = gauges.leases_alive as u64;
            for (name, value) in [
                ("granted", counts.granted),
                ("read out", counts.read_out),
                ("released unread", counts.released),
                ("expired", counts.expired),
                ("claims refused", counts.gone),
            ] {
                leases.insert(name.to_owned(), value);
            }
        }
        ipc::Figures {
            blocks_held: self.config.num_blocks
                - u32::try_from(self.free.len()).unwrap_or(self.config.num_blocks),
            leases_alive,
            leases,
            open: figures.consumer_open,
            violations: self.counting.violations().to_vec(),
            unquiesced: self.unquiesced,
        }
    }

    fn stop(&mut self) -> Result<()> {
        self.side.revoke_leases();
        self.side.shutdown();
        for rank in &mut self.ranks {
            rank.ask(&ToRank::Stop)?;
        }
        for rank in &mut self.ranks {
            rank.child.wait()?;
        }
        Ok(())
    }
}

fn named(ranks: &mut [RankPipe], tp: Option<u32>) -> impl Iterator<Item = &mut RankPipe> {
    ranks
        .iter_mut()
        .filter(move |rank| tp.is_none_or(|tp| tp == rank.tp))
}

fn digest(prompt: Prompt) -> PromptDigest {
    PromptHasher::new(&prompt.token_ids()).finish()
}
