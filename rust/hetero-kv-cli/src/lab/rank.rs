//! The process of one rank: the product's worker side over memory whose every byte is known.

use std::collections::BTreeMap;
use std::io::{self, Stdin, Stdout};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use hetero_kv_core::ids::{DpRank, EngineId, PpRank, TpRank};
use hetero_kv_core::plan::{Route, Striping};
use hetero_kv_core::step::{PeerCard, StepOrders};
use hetero_kv_core::wire::card::TcpEndpoint;
use hetero_kv_transport::reader::{PeerStats, ReaderOptions, TransportChoice};
use hetero_kv_transport::scheduler::Roles;
use hetero_kv_transport::tcp::ServerOptions;
use hetero_kv_transport::verbs::VerbsOptions;
use hetero_kv_transport::worker::{
    LoadReport, SourceRead as RouteRead, VerbsUse, WorkerOptions, WorkerPlace, WorkerSide,
};

use super::fault::Role;
use super::host;
use super::ipc::{
    self, Fill, FromRank, Load, RankConfig, RankName, Reason, Received, SourceRead, Step, Stepped,
    ToRank, Transport,
};
use super::memory::{KvMemory, Tag};
use super::model::Geometry;
use super::relay::{self, Limiter};
use super::span::Span;

/// As the connector's default.
const STRIPE_HOLDERS_MAX: u32 = 8;

/// Longest wait for reads to end when the engine stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves its engine until that is gone.
pub(crate) fn main() -> Result<()> {
    host::die_with_parent()?;
    host::log_to_stderr(false);
    let mut input = io::stdin();
    let mut output = io::stdout();
    let config: RankConfig = ipc::receive(&mut input).context("the rank's configuration")?;
    match Rank::start(&config) {
        Ok((rank, card)) => {
            ipc::send(&mut output, &FromRank::Started { card })?;
            rank.serve(&mut input, &mut output)
        }
        Err(error) => {
            let text = format!(
                "{} tp_rank {}: {error:#}",
                config.engine.engine_id, config.tp_rank
            );
            ipc::send(&mut output, &FromRank::StartFailed(text))?;
            Ok(())
        }
    }
}

fn name_of(route: &Route) -> RankName {
    RankName {
        engine: route.engine().as_str().to_owned(),
        incarnation: route.incarnation().0,
        tp: route.tp_rank().0,
        pp: route.pp_rank().0,
    }
}

/// Why the session of this read goes by the read's transport.
fn why(read: &RouteRead, sessions: &[PeerStats]) -> Option<String> {
    let session = sessions
        .iter()
        .find(|session| Some(&session.route) == read.session.as_ref())?;
    (session.transport?.as_str() == read.transport).then(|| session.why.clone())
}

struct Rank {
    /// Its tp and pp.
    place: (u32, u32),
    side: WorkerSide,
    memory: KvMemory,
    role: Role,
    /// Content of prompts whose loads have not ended, by vLLM's id.
    expected: BTreeMap<String, u64>,
    /// Blocks of loads that have not ended.
    loading: BTreeMap<String, Vec<u32>>,
    limiter: Option<Arc<Limiter>>,
}

impl Rank {
    fn start(config: &RankConfig) -> Result<(Self, Vec<u8>)> {
        let engine = &config.engine;
        let prefill = engine.role == Role::Prefill;
        let geometry = Geometry::new(
            &engine.model,
            prefill,
            (engine.tp_size, config.tp_rank),
            (engine.pp_size, config.pp_rank),
            engine.num_blocks,
        )?;
        let seed = engine.seed ^ (u64::from(config.tp_rank) << 32 | u64::from(config.pp_rank));
        let memory = KvMemory::new(geometry, seed);
        let place = WorkerPlace {
            engine: EngineId::new(&engine.engine_id)?,
            dp_rank: DpRank(engine.dp),
            tp_rank: TpRank(config.tp_rank),
            tp_size: engine.tp_size,
            pp_rank: PpRank(config.pp_rank),
            pp_size: engine.pp_size,
            heads: engine.model.heads(),
        };
        let options = WorkerOptions {
            roles: Roles {
                producer: prefill,
                consumer: !prefill,
            },
            server: ServerOptions::default(),
            reader: ReaderOptions {
                choice: match engine.transport {
                    Transport::Auto => TransportChoice::Auto,
                    Transport::Tcp => TransportChoice::Tcp,
                    Transport::Verbs => TransportChoice::Verbs,
                    Transport::Process => TransportChoice::Process,
                },
                ..ReaderOptions::default()
            },
            allow_ptracer: true,
            lease_slots: engine.lease_slots,
            offer_process: matches!(engine.transport, Transport::Auto | Transport::Process),
            offer_tcp: matches!(engine.transport, Transport::Auto | Transport::Tcp),
            verbs: match engine.transport {
                Transport::Auto => VerbsUse::IfThere(VerbsOptions::default()),
                Transport::Verbs => VerbsUse::Required(VerbsOptions::default()),
                Transport::Process | Transport::Tcp => VerbsUse::Off,
            },
            mori: None,
            block_size: engine.model.block_size,
            striping: match engine.stripe_bytes_min {
                0 => Striping::OFF,
                threshold_bytes => Striping {
                    threshold_bytes,
                    holders_max: STRIPE_HOLDERS_MAX,
                },
            },
        };
        let side = WorkerSide::start_on(memory.words(), place, memory.cache()?, options)
            .context("worker side")?;
        let limiter = engine
            .limited
            .contains(&config.tp_rank)
            .then(Arc::<Limiter>::default);
        let mut card = side.card().clone();
        if let (true, Some(limiter), Some(tcp)) = (prefill, &limiter, card.endpoints.tcp.as_mut()) {
            tcp.port = relay::limited(tcp.port, Arc::clone(limiter))?;
        }
        let card = rmp_serde::to_vec_named(&card).context("the worker card")?;
        let rank = Self {
            place: (config.tp_rank, config.pp_rank),
            side,
            memory,
            role: engine.role,
            expected: BTreeMap::new(),
            loading: BTreeMap::new(),
            limiter,
        };
        Ok((rank, card))
    }

    fn serve(mut self, input: &mut Stdin, output: &mut Stdout) -> Result<()> {
        loop {
            let command = match ipc::receive(input) {
                Ok(command) => command,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(error).context("the engine's command"),
            };
            let answer = match command {
                ToRank::Step(step) => FromRank::Stepped(self.step(step)?),
                ToRank::Corrupt(blocks) => {
                    self.corrupt(&blocks);
                    FromRank::Done
                }
                ToRank::Slow { bytes_per_s } => {
                    if let Some(limiter) = &self.limiter {
                        limiter.set(bytes_per_s);
                    }
                    FromRank::Done
                }
                ToRank::Sweep => FromRank::Swept {
                    mismatched_bytes: self.memory.sweep(),
                },
                ToRank::Stop => {
                    self.side.shutdown(SHUTDOWN_TIMEOUT);
                    ipc::send(output, &FromRank::Done)?;
                    return Ok(());
                }
            };
            ipc::send(output, &answer)?;
        }
    }

    fn step(&mut self, step: Step) -> Result<Stepped> {
        let mut orders = StepOrders::decode(&step.orders)?;
        let mut done = Stepped::default();
        self.expected.extend(step.expected);
        for peer in &mut orders.peers {
            self.dial_through_relay(peer)?;
        }
        for load in &orders.loads {
            let blocks: Vec<u32> = load.dest_blocks.iter().map(|block| block.0).collect();
            for block in &blocks {
                // Untouched since its last use, by a read that came too late for instance.
                done.mismatched_bytes += self.memory.differences(*block);
                self.memory.tag(*block, Tag::Unknown);
            }
            self.loading.insert(load.request_id.clone(), blocks);
        }
        self.side.step(orders, Duration::ZERO);
        for Fill { content, blocks } in &step.fills {
            for (index, block) in blocks.iter().enumerate() {
                self.memory.fill(*block, *content, index);
            }
        }
        if step.wait_ms > 0 && step.fills.is_empty() {
            self.side.wait(Duration::from_millis(step.wait_ms));
        }
        let results = self.side.take_results();
        done.sent = results.sent;
        let reader = self.side.figures().reader.unwrap_or_default();
        for report in results.received {
            done.received.push(self.received(report, &reader.peers));
        }
        done.unquiesced = reader.jobs_unquiesced as u64;
        Ok(done)
    }

    /// Compares every byte of a loaded prompt. Blocks of a failed load are written anew at once:
    /// from its report on nothing else may write them.
    fn received(&mut self, report: LoadReport, sessions: &[PeerStats]) -> Received {
        let blocks = self.loading.remove(&report.request_id).unwrap_or_default();
        let content = self.expected.remove(&report.request_id);
        let mut mismatched_bytes = 0;
        match (&report.failure, content) {
            (None, Some(content)) => {
                for (index, block) in blocks.iter().enumerate() {
                    mismatched_bytes += self.memory.expect(*block, content, index);
                }
            }
            (None, None) | (Some(_), _) => {
                for block in &blocks {
                    self.memory.reset(*block);
                }
            }
        }
        let transfer_id = report
            .transfer_id
            .map_or_else(String::new, |id| id.to_string());
        let engine = report
            .engine
            .as_ref()
            .map_or("", EngineId::as_str)
            .to_owned();
        Received {
            request_id: report.request_id,
            failure: report.failure.map(|failure| Reason {
                label: failure.reason.label().to_owned(),
                field: failure.field,
                text: failure.text,
            }),
            lost_source: report.lost_source,
            load: Load {
                reads: report
                    .reads
                    .iter()
                    .filter(|read| read.bytes > 0)
                    .map(|read| SourceRead {
                        transfer_id: transfer_id.clone(),
                        reader: self.place,
                        source: name_of(&read.route),
                        session: read.session.as_ref().map(name_of),
                        dialled: read.dialled.as_deref().map(str::to_owned),
                        engine: engine.clone(),
                        tp: read.route.tp_rank().0,
                        bytes: read.bytes,
                        transport: read.transport.to_owned(),
                        why: why(read, sessions),
                    })
                    .collect(),
                planned_bytes: report.planned_bytes,
                mismatched_bytes,
                spans: report
                    .ordered_at
                    .map(|begin| Span::new(begin, begin + report.elapsed))
                    .into_iter()
                    .collect(),
            },
        }
    }

    fn corrupt(&mut self, blocks: &[u32]) {
        for block in blocks {
            self.memory.corrupt(*block);
            if self.role == Role::Prefill {
                // Decode is to find it; the sweep of this rank is not.
                self.memory.tag(*block, Tag::Unknown);
            }
        }
    }

    /// A slowed reader dials each source through a relay in its own process.
    fn dial_through_relay(&self, peer: &mut PeerCard) -> Result<()> {
        let Some(limiter) = &self.limiter else {
            return Ok(());
        };
        for worker in &mut peer.layout.workers {
            if let Some(TcpEndpoint { port, .. }) = worker.endpoints.tcp.as_mut() {
                *port = relay::limited(*port, Arc::clone(limiter)).context("a relay")?;
            }
        }
        Ok(())
    }
}
