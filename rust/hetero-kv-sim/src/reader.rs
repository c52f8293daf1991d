//! A model of one rank's reader: it plans with the real planner, posts reads that complete later,
//! fences after the data, quiesces before it reports. (The product's reader is threads around system
//! calls; its own tests drive it.)

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use hetero_kv_core::failure::FailureReason;
use hetero_kv_core::ids::{BlockId, DpRank, LeaseRef, PpRank, TpRank};
use hetero_kv_core::layout::{KvHeads, RankCache};
use hetero_kv_core::memory::Run;
use hetero_kv_core::plan::{
    GroupBlocks, Owner, Pairing, RoundRobinGate, SourceChooser, Striping, Transfer,
};
use hetero_kv_core::step::{LoadOrder, PeerId, StepOrders};
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::message::Layout;

use crate::book::Invariant;
use crate::fault::Fault;
use crate::memory::RankMemory;
use crate::ops::{Op, OpKind, SourceRank};
use crate::reads::ReadBook;
use crate::scenario::{BLOCK_TOKENS, Shape};
use crate::world::{Event, World};

/// Runs of one operation.
const BATCH_RUNS: usize = 4;
/// Operations in flight per source.
const IN_FLIGHT_MAX: u32 = 2;

/// One load's end on one rank.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) request: String,
    /// Why it failed, and whether that is explained by itself.
    pub(crate) failure: Option<(FailureReason, bool)>,
    /// The source whose doing it is.
    pub(crate) lost_source: Option<TpRank>,
}

/// One decode rank: its memory and its reads.
#[derive(Debug)]
pub(crate) struct ReadingRank {
    pub(crate) memory: RankMemory,
    peers: BTreeMap<PeerId, Layout>,
    pub(crate) jobs: BTreeMap<String, Job>,
    pub(crate) results: Vec<Report>,
}

impl ReadingRank {
    pub(crate) fn new(memory: RankMemory) -> Self {
        Self {
            memory,
            peers: BTreeMap::new(),
            jobs: BTreeMap::new(),
            results: Vec::new(),
        }
    }

    fn report(&mut self, request: &str, failure: Option<(FailureReason, bool)>) {
        self.results.push(Report {
            request: request.to_owned(),
            failure,
            lost_source: None,
        });
    }
}

/// One request's read on one rank.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) lease: LeaseRef,
    pub(crate) prefill: usize,
    pub(crate) prefill_incarnation: u64,
    pub(crate) began: Time,
    pub(crate) deadline: Time,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) stopped: Option<FailureReason>,
    pub(crate) lost_source: Option<TpRank>,
    pub(crate) in_flight: u32,
    /// The reference model's.
    pub(crate) book: ReadBook,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    ToCome,
    Posted,
    Stood,
}

/// What a job reads from one source.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) source: SourceRank,
    /// First word of the source's lease page, by its card.
    pub(crate) nonce: u64,
    pub(crate) batches: VecDeque<Vec<Run>>,
    /// Operations in flight and their runs, in the order they were posted.
    pub(crate) posted: Vec<(u64, Vec<Run>)>,
    pub(crate) in_flight: u32,
    /// Whether a connection was lost under it: the second time it fails.
    pub(crate) lost_once: bool,
    pub(crate) fence: Fence,
}

/// A rank in its engine, for planning.
struct Place {
    dp_rank: DpRank,
    shape: Shape,
    tp_rank: TpRank,
    heads: KvHeads,
    striping: Striping,
}

/// How equal holders are chosen among, as the product's worker does.
fn chooser(place: &Place, layout: &Layout, order: &LoadOrder) -> SourceChooser {
    let weights = order.choice.weights.clone();
    let Some(sequence) = order.choice.sequence else {
        return SourceChooser::weighted(order.transfer_id, weights);
    };
    let gate = RoundRobinGate {
        decode_world_size: place.shape.tp * place.shape.pp,
        mla: place.heads == KvHeads::Latent,
        prefill_dp: layout.from.dp_size,
        prefill_tp: layout.from.tp_size,
    };
    SourceChooser::round_robin(order.transfer_id, weights, gate, place.dp_rank, sequence)
}

/// What this rank reads from whom, by the planner that ships. A plan that does not move every byte
/// of the blocks is none, as in the product's worker.
fn plan(
    place: &Place,
    local: &RankCache,
    layout: &Layout,
    order: &LoadOrder,
) -> Option<Vec<Piece>> {
    let pairing = Pairing::new(layout.from.tp_size, place.shape.tp, place.heads).ok()?;
    let chooser = chooser(place, layout, order);
    let remote: Vec<(PpRank, TpRank, &RankCache)> = layout
        .workers
        .iter()
        .map(|worker| (worker.pp_rank, worker.tp_rank, &worker.cache))
        .collect();
    let group = |blocks| GroupBlocks {
        block_tokens: BLOCK_TOKENS,
        first_index: order.first_block,
        blocks,
    };
    let dest = group(&order.dest_blocks);
    let plan = Transfer {
        pairing: &pairing,
        tp_rank: place.tp_rank,
        consumer_stages: place.shape.pp,
        chooser: &chooser,
        striping: place.striping,
        local,
        remote: &remote,
        tokens: dest.tokens(),
        source_groups: &[group(&order.source_blocks)],
        dest_groups: &[dest],
    }
    .plan()
    .ok()?;
    let wanted = local.block_bytes() * order.dest_blocks.len() as u64;
    if plan.bytes() != wanted {
        return None;
    }
    let owner = Owner {
        engine: layout.from.engine.clone(),
        incarnation: layout.from.incarnation,
        dp_rank: layout.from.dp_rank,
    };
    plan.routes(&owner)
        .into_iter()
        .zip(plan.reads)
        .map(|(route, read)| {
            let card = layout.workers.iter().find(|worker| {
                (worker.tp_rank, worker.pp_rank) == (route.tp_rank(), route.pp_rank())
            })?;
            Some(Piece {
                source: SourceRank {
                    tp: route.tp_rank().0,
                    pp: route.pp_rank().0,
                },
                nonce: card.endpoints.process.as_ref()?.lease_page_nonce,
                batches: read.runs.chunks(BATCH_RUNS).map(<[Run]>::to_vec).collect(),
                posted: Vec::new(),
                in_flight: 0,
                lost_once: false,
                fence: Fence::ToCome,
            })
        })
        .collect()
}

/// What each source has to bring, for the reference model.
fn shares(pieces: &[Piece]) -> impl Iterator<Item = (SourceRank, u64)> + '_ {
    pieces.iter().map(|piece| {
        let bytes = piece.batches.iter().flatten().map(|run| run.bytes).sum();
        (piece.source, bytes)
    })
}

impl World {
    /// One rank of D carries out a step's orders, in the order the product does.
    pub(crate) fn decode_rank(
        &mut self,
        d: usize,
        incarnation: u64,
        rank: usize,
        orders: &[u8],
        made_at: Time,
    ) {
        if !self.decode[d].is(incarnation) {
            return;
        }
        let Ok(orders) = StepOrders::decode(orders) else {
            self.book
                .broken(Invariant::Spins, "orders do not decode".into());
            return;
        };
        let (shape, clock) = (self.decode[d].shape, self.decode[d].clock);
        let (heads, striping) = (self.scenario.heads, self.scenario.striping);
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let reading = &mut engine.ranks[rank];
        for fail in orders.fails {
            reading.report(&fail.request_id, Some((fail.failure.reason, false)));
        }
        for card in orders.peers {
            reading.peers.insert(card.peer, card.layout);
        }
        let mut begun = Vec::new();
        for load in orders.loads {
            let place = Place {
                dp_rank: engine.identity.dp_rank,
                shape,
                tp_rank: TpRank(u32::try_from(rank).unwrap_or(0) % shape.tp),
                heads,
                striping,
            };
            let layout = reading.peers.get(&load.peer);
            let planned = layout.and_then(|layout| {
                let pieces = plan(&place, &reading.memory.cache, layout, &load)?;
                Some((layout.from.dp_rank.0, layout.from.incarnation.0, pieces))
            });
            let Some((prefill, prefill_incarnation, pieces)) = planned else {
                reading.report(&load.request_id, Some((FailureReason::Plan, false)));
                continue;
            };
            let deadline = made_at + Duration::from_millis(load.deadline_ms);
            begun.push((load.request_id.clone(), deadline));
            let read_book = ReadBook::new(shares(&pieces));
            if read_book.sources() > 1 {
                self.book.count("reads of several sources");
            }
            let job = Job {
                lease: load.lease,
                prefill: prefill as usize,
                prefill_incarnation,
                began: made_at,
                deadline,
                pieces,
                blocks: load.dest_blocks,
                stopped: None,
                lost_source: None,
                in_flight: 0,
                book: read_book,
            };
            reading.jobs.insert(load.request_id, job);
        }
        for extension in orders.extensions {
            if let Some(job) = reading.jobs.get_mut(&extension.request_id) {
                job.deadline = made_at + Duration::from_millis(extension.deadline_ms);
                begun.push((extension.request_id, job.deadline));
            }
        }
        for (request, deadline) in begun {
            let at = clock.global(deadline).max(self.now);
            self.at(
                at,
                Event::ReaderDeadline(d, incarnation, rank, request.clone()),
            );
            self.read_on(d, incarnation, rank, &request);
        }
        for cancel in orders.cancels {
            self.stop_read(
                d,
                incarnation,
                rank,
                &cancel.request_id,
                cancel.failure.reason,
            );
        }
    }

    /// Posts what may be posted, or ends the job.
    pub(crate) fn read_on(&mut self, d: usize, incarnation: u64, rank: usize, request: &str) {
        let now = self.decode[d].clock.local(self.now);
        loop {
            let Some(engine) = &mut self.decode[d].engine else {
                return;
            };
            let reading = &mut engine.ranks[rank];
            let Some(job) = reading.jobs.get_mut(request) else {
                return;
            };
            if job.stopped.is_none() && now >= job.deadline {
                self.stop_read(d, incarnation, rank, request, FailureReason::LeaseExpired);
                return;
            }
            if job.stopped.is_some() {
                if job.in_flight == 0 {
                    self.end_read(d, rank, request);
                }
                return;
            }
            let ready = job.pieces.iter().position(|piece| {
                let more = !piece.batches.is_empty() && piece.in_flight < IN_FLIGHT_MAX;
                let fence = piece.batches.is_empty()
                    && piece.in_flight == 0
                    && piece.fence == Fence::ToCome;
                more || fence
            });
            let Some(index) = ready else {
                if job.pieces.iter().all(|piece| piece.fence == Fence::Stood) {
                    self.end_read(d, rank, request);
                }
                return;
            };
            let piece = &mut job.pieces[index];
            let batch = piece.batches.pop_front();
            if batch.is_none() {
                piece.fence = Fence::Posted;
            }
            self.numbers += 1;
            let id = self.numbers;
            piece.posted.push((id, batch.clone().unwrap_or_default()));
            piece.in_flight += 1;
            job.in_flight += 1;
            let op = Op {
                decode: d,
                incarnation,
                rank,
                request: request.to_owned(),
                piece: index,
                kind: if batch.is_some() {
                    OpKind::Data
                } else {
                    OpKind::LeasePage
                },
                prefill: job.prefill,
                prefill_incarnation: job.prefill_incarnation,
                source: piece.source,
                runs: batch.unwrap_or_default(),
                copied: 0,
                dest_blocks: job.blocks.clone(),
                outcome: Ok(()),
                lease: job.lease,
                nonce: piece.nonce,
            };
            self.launch_op(id, op);
        }
    }

    pub(crate) fn reader_deadline(&mut self, d: usize, incarnation: u64, rank: usize, id: &str) {
        if self.decode[d].is(incarnation) {
            self.read_on(d, incarnation, rank, id);
        }
    }

    /// Posts nothing more; the report waits until nothing in flight can write.
    pub(crate) fn stop_read(
        &mut self,
        d: usize,
        incarnation: u64,
        rank: usize,
        request: &str,
        reason: FailureReason,
    ) {
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let Some(job) = engine.ranks[rank].jobs.get_mut(request) else {
            return;
        };
        if job.stopped.is_some() {
            return;
        }
        job.stopped = Some(reason);
        if job.in_flight == 0 {
            self.end_read(d, rank, request);
            return;
        }
        let mut takes = self.millis(0, 60);
        if self.book.may(Fault::QuiesceSlow) && self.rng.permille(500) {
            self.book.happened(Fault::QuiesceSlow);
            takes += self.millis(1000, 5000);
        }
        self.after(
            takes,
            Event::Quiesced(d, incarnation, rank, request.to_owned()),
        );
    }

    /// The connection is closed: what was in flight on it writes nothing more.
    pub(crate) fn quiesced(&mut self, d: usize, incarnation: u64, rank: usize, request: &str) {
        if !self.decode[d].is(incarnation) {
            return;
        }
        self.ops
            .retain(|_, op| (op.decode, op.rank, op.request.as_str()) != (d, rank, request));
        if let Some(engine) = &mut self.decode[d].engine
            && let Some(job) = engine.ranks[rank].jobs.get_mut(request)
        {
            job.in_flight = 0;
            for piece in &mut job.pieces {
                piece.posted.clear();
            }
        }
        self.read_on(d, incarnation, rank, request);
    }

    pub(crate) fn end_read(&mut self, d: usize, rank: usize, request: &str) {
        let now = self.decode[d].clock.local(self.now);
        let load_timeout = self.scenario.options.load_timeout;
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let reading = &mut engine.ranks[rank];
        let Some(job) = reading.jobs.remove(request) else {
            return;
        };
        let late = now >= job.deadline;
        let failure = job.stopped.or(late.then_some(FailureReason::LeaseExpired));
        // The end of the load time reaches the reader as the end of its deadline. A step's orders
        // are up to a step old when they are made.
        let whole_time = now.since(job.began) + Duration::from_millis(100) >= load_timeout;
        let timed_out = failure == Some(FailureReason::LeaseExpired) && whole_time;
        self.book
            .trace(|| format!("decode {d} rank {rank}: {request} read, {failure:?}"));
        if failure.is_none()
            && let Some(problem) = job.book.unproven()
        {
            self.book.broken(
                Invariant::ReadUnproven,
                format!("decode {d} rank {rank} reports {request} as read: {problem}"),
            );
        }
        reading.results.push(Report {
            request: request.to_owned(),
            failure: failure.map(|reason| (reason, timed_out)),
            lost_source: job.lost_source,
        });
    }
}
