//! The consumer half of one rank: orders become jobs of the reader, and ended jobs become reports.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::failure::{Failure, FailureReason};
use hetero_kv_core::ids::{BlockId, EngineId, PpRank, TpRank, TransferId};
use hetero_kv_core::layout::{KvHeads, RankCache};
use hetero_kv_core::plan::{
    GroupBlocks, Owner, Pairing, RoundRobinGate, Route, SourceChooser, Striping, TokenRange,
    Transfer,
};
use hetero_kv_core::step::{LoadOrder, PeerCard, PeerId};
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::WorkerCard;
use hetero_kv_core::wire::message::{EngineIdentity, Layout};

use super::waiting::{Waiting, WaitingLoad};
use super::{LoadReport, SourceRead, WorkerPlace};
use crate::error::ReadFailureKind;
use crate::reader::{JobDone, PieceRuns, ReadFailure, ReadJob, ReadPiece, Reader, SubmitError};
use crate::transport::{Source, TransportName};

/// Peers whose cards are kept; the one read longest ago makes room. Twice as many as the scheduler
/// side keeps, so that a peer it still knows is never among those dropped here.
const PEERS_KEPT_MAX: usize = 2 * hetero_kv_core::consumer::PEERS_MAX;

pub(super) struct ConsumerRank {
    pub(super) reader: Reader,
    /// Tokens of a block.
    block_size: u32,
    striping: Striping,
    peers: BTreeMap<PeerId, KnownPeer>,
    /// Counts uses of peers, to tell the one used longest ago.
    uses: u64,
    pub(super) loads: BTreeMap<u64, Load>,
    pub(super) by_request: BTreeMap<String, u64>,
    pub(super) waiting: Waiting,
    next_job: u64,
}

pub(super) struct KnownPeer {
    layout: Layout,
    used: u64,
}

#[derive(Debug)]
pub(super) struct Load {
    pub(super) request_id: String,
    pub(super) transfer_id: TransferId,
    pub(super) engine: EngineId,
    pub(super) dest_blocks: Vec<BlockId>,
    pub(super) planned_bytes: u64,
    pub(super) ordered_at: Time,
    /// Why it was cancelled, which the reader does not know.
    pub(super) cancelled: Option<Failure>,
}

impl ConsumerRank {
    pub(super) fn new(reader: Reader, block_size: u32, striping: Striping) -> Self {
        Self {
            reader,
            block_size,
            striping,
            peers: BTreeMap::new(),
            uses: 0,
            loads: BTreeMap::new(),
            by_request: BTreeMap::new(),
            waiting: Waiting::default(),
            next_job: 0,
        }
    }

    pub(super) fn learn(&mut self, peer: PeerCard) {
        self.uses += 1;
        let known = KnownPeer {
            layout: peer.layout,
            used: self.uses,
        };
        self.peers.insert(peer.peer, known);
        if self.peers.len() > PEERS_KEPT_MAX
            && let Some(stale) = self
                .peers
                .iter()
                .min_by_key(|(_, known)| known.used)
                .map(|(peer, _)| *peer)
        {
            self.peers.remove(&stale);
        }
    }

    /// Begins a load. One that finds no session free gives its order back, to wait: a read from
    /// several sources is tried as one from a single source first, which may be read already.
    pub(super) fn begin(
        &mut self,
        place: &WorkerPlace,
        cache: &RankCache,
        waiting: WaitingLoad,
    ) -> Result<Option<WaitingLoad>, Box<(LoadOrder, Failure)>> {
        let mut striping = self.striping;
        loop {
            let (job, load) = match self.plan(place, cache, &waiting, striping) {
                Ok(planned) => planned,
                Err(failure) => return Err(Box::new((waiting.order, failure))),
            };
            let id = job.id;
            match self.reader.submit(job) {
                Ok(()) => {
                    self.by_request.insert(waiting.order.request_id, id);
                    self.loads.insert(id, load);
                    return Ok(None);
                }
                Err(SubmitError::TooManySources(_) | SubmitError::MoreSourcesThanMost { .. })
                    if striping != Striping::OFF =>
                {
                    striping = Striping::OFF;
                }
                Err(SubmitError::TooManySources(_)) => return Ok(Some(waiting)),
                Err(error) => {
                    let failure = Failure::new(FailureReason::Transport, error.to_string());
                    return Err(Box::new((waiting.order, failure)));
                }
            }
        }
    }

    /// Tries loads again that wait for a session, and hands back those that cannot begin at all.
    pub(super) fn begin_waiting(
        &mut self,
        place: &WorkerPlace,
        cache: &RankCache,
        now: Time,
    ) -> Vec<(LoadOrder, Failure)> {
        let mut failed = self.waiting.overdue(now);
        let mut left = Vec::new();
        for load in self.waiting.next() {
            // Whoever came first gets the first place, so nobody is tried before it has one.
            if !left.is_empty() {
                left.push(load);
                continue;
            }
            match self.begin(place, cache, load) {
                Ok(still) => left.extend(still),
                Err(end) => failed.push(*end),
            }
        }
        self.waiting.put_back(left);
        failed
    }

    fn plan(
        &mut self,
        place: &WorkerPlace,
        cache: &RankCache,
        WaitingLoad { order, received_at }: &WaitingLoad,
        striping: Striping,
    ) -> Result<(ReadJob, Load), Failure> {
        let refuse = |text: String| Failure::new(FailureReason::Plan, text);
        self.uses += 1;
        let known = self
            .peers
            .get_mut(&order.peer)
            .ok_or_else(|| refuse("the peer's card is not known".into()))?;
        known.used = self.uses;
        let layout = &known.layout;
        let dest = GroupBlocks {
            block_tokens: self.block_size,
            first_index: order.first_block,
            blocks: &order.dest_blocks,
        };
        let source = GroupBlocks {
            block_tokens: order.source_block_tokens,
            first_index: order.source_first_block,
            blocks: &order.source_blocks,
        };
        let tokens = loaded_tokens(&source, &dest, order.past_token).map_err(refuse)?;
        let pairing = Pairing::new(layout.from.tp_size, place.tp_size, place.heads)
            .map_err(|error| refuse(error.to_string()))?;
        let chooser = chooser(place, &layout.from, order);
        let workers: BTreeMap<(PpRank, TpRank), &WorkerCard> = layout
            .workers
            .iter()
            .map(|worker| ((worker.pp_rank, worker.tp_rank), worker))
            .collect();
        let remote: Vec<(PpRank, TpRank, &RankCache)> = workers
            .iter()
            .map(|((pp_rank, tp_rank), worker)| (*pp_rank, *tp_rank, &worker.cache))
            .collect();
        let outline = Transfer {
            pairing: &pairing,
            tp_rank: place.tp_rank,
            consumer_stages: place.pp_size,
            chooser: &chooser,
            striping,
            local: cache,
            remote: &remote,
            tokens,
            source_groups: &[source],
            dest_groups: &[dest],
        }
        .outline()
        .map_err(|error| refuse(error.to_string()))?;
        let owner = Owner {
            engine: layout.from.engine.clone(),
            incarnation: layout.from.incarnation,
            dp_rank: layout.from.dp_rank,
        };
        let planned_bytes = outline.bytes();
        let wanted = bytes_of(cache, self.block_size, tokens);
        if planned_bytes != wanted {
            return Err(refuse(format!(
                "the plan moves {planned_bytes} bytes, tokens {} to {} are {wanted}",
                tokens.first, tokens.past_last
            )));
        }
        let mut pieces = Vec::with_capacity(outline.reads.len());
        for (route, read) in outline.routes(&owner).into_iter().zip(outline.reads) {
            let worker = workers
                .get(&(route.pp_rank(), route.tp_rank()))
                .ok_or_else(|| {
                    refuse(format!(
                        "no card of source tp_rank {}, pp_rank {}",
                        route.tp_rank(),
                        route.pp_rank()
                    ))
                })?;
            pieces.push(ReadPiece {
                source: Arc::new(Source {
                    route,
                    endpoints: worker.endpoints.clone(),
                    regions: worker.cache.regions().to_vec(),
                }),
                runs: PieceRuns::Planned(Box::new(read)),
            });
        }
        let id = self.next_job;
        self.next_job += 1;
        let load = Load {
            request_id: order.request_id.clone(),
            transfer_id: order.transfer_id,
            engine: owner.engine,
            dest_blocks: order.dest_blocks.clone(),
            planned_bytes,
            ordered_at: *received_at,
            cancelled: None,
        };
        let job = ReadJob {
            id,
            lease: order.lease,
            deadline: *received_at + Duration::from_millis(order.deadline_ms),
            pieces,
        };
        Ok((job, load))
    }

    pub(super) fn end(&mut self, done: JobDone) -> Option<LoadReport> {
        let load = self.loads.remove(&done.id)?;
        self.by_request.remove(&load.request_id);
        let arrived: u64 = done.reads.iter().map(|read| read.bytes).sum();
        // Nobody asks for more once a job has succeeded: a gap would be decoded.
        let failed = done.outcome.err().or_else(|| {
            (arrived != load.planned_bytes).then(|| ReadFailure {
                kind: ReadFailureKind::Local,
                text: format!("{arrived} of {} planned bytes arrived", load.planned_bytes),
                at: None,
            })
        });
        let lost_source = failed.as_ref().and_then(lost_source);
        let failure = failed.map(|failure| match (failure.kind, load.cancelled) {
            (ReadFailureKind::Cancelled, Some(cancelled)) => cancelled,
            // It had failed by itself before it was cancelled.
            (kind, _) => Failure::new(reason_of(kind), failure.text),
        });
        let invalid_blocks = match failure {
            Some(_) => load.dest_blocks,
            None => Vec::new(),
        };
        Some(LoadReport {
            request_id: load.request_id,
            transfer_id: Some(load.transfer_id),
            engine: Some(load.engine),
            failure,
            ordered: false,
            invalid_blocks,
            planned_bytes: load.planned_bytes,
            reads: done
                .reads
                .into_iter()
                .map(|read| SourceRead {
                    session: read.session,
                    dialled: read.dialled,
                    bytes: read.bytes,
                    transport: read.transport.map_or("none", TransportName::as_str),
                    route: read.route,
                })
                .collect(),
            lost_source,
            ordered_at: Some(load.ordered_at),
            elapsed: done.ended_at.since(load.ordered_at),
        })
    }
}

/// Tokens to move into the blocks of `dest`, which are wanted up to `past_token`: all that they have
/// room for, as far as the source's blocks hold any. Blocks of one size move whole: what lies behind
/// the prompt's last token is nobody's.
fn loaded_tokens(
    source: &GroupBlocks<'_>,
    dest: &GroupBlocks<'_>,
    past_token: u32,
) -> Result<TokenRange, String> {
    let (held, room) = (source.tokens(), dest.tokens());
    let past_last = held.past_last.min(room.past_last);
    // A block to fill without a wanted token would be handed back as it is.
    let last_begins = (u64::from(dest.first_index) + dest.blocks.len() as u64)
        .saturating_sub(1)
        .saturating_mul(dest.block_tokens.into());
    if held.first > room.first || past_last < past_token || last_begins >= past_token.into() {
        return Err(format!(
            "tokens {} to {past_token} are wanted; the source's blocks hold {} to {}, {} blocks to fill {} to {}",
            room.first,
            held.first,
            held.past_last,
            dest.blocks.len(),
            room.first,
            room.past_last
        ));
    }
    Ok(TokenRange {
        first: room.first,
        past_last,
    })
}

/// Bytes of so many tokens over all layers and heads of a rank: whole blocks, or a part of one that
/// can be cut by token.
fn bytes_of(cache: &RankCache, block_tokens: u32, tokens: TokenRange) -> u64 {
    let (count, block) = (u64::from(tokens.count()), u64::from(block_tokens.max(1)));
    let rest = (cache.block_bytes() / block).saturating_mul(count % block);
    cache
        .block_bytes()
        .saturating_mul(count / block)
        .saturating_add(rest)
}

/// How equal holders are chosen among, as the scheduler side ordered it.
fn chooser(place: &WorkerPlace, owner: &EngineIdentity, order: &LoadOrder) -> SourceChooser {
    let weights = order.choice.weights.clone();
    let Some(sequence) = order.choice.sequence else {
        return SourceChooser::weighted(order.transfer_id, weights);
    };
    let gate = RoundRobinGate {
        decode_world_size: place.tp_size.saturating_mul(place.pp_size),
        mla: place.heads == KvHeads::Latent,
        prefill_dp: owner.dp_size,
        prefill_tp: owner.tp_size,
    };
    SourceChooser::round_robin(order.transfer_id, weights, gate, place.dp_rank, sequence)
}

/// The source to be avoided for a while, whose own doing the failure is: another holder of its heads
/// may do better.
///
/// | kind | avoided | because |
/// |---|---|---|
/// | peer lost, unreachable | yes | its process, host or the way to it is gone; another's need not be |
/// | deadline | no | the lease or the load's time was over: a slow source looks like a late order |
/// | refused | no | it lives and answers: it serves as many as it may, or does not know its engine yet |
/// | incarnation | no | the engine was started anew, and its other ranks with it |
/// | lease gone | no | the engine has freed the blocks, on all its ranks |
/// | cancelled | no | our scheduler side wanted it so |
/// | out of bounds, local, not quiesced | no | this side's plan, memory or threads |
fn lost_source(failure: &ReadFailure) -> Option<TpRank> {
    match failure.kind {
        ReadFailureKind::PeerLost | ReadFailureKind::Unreachable => {
            failure.at.as_ref().map(Route::tp_rank)
        }
        ReadFailureKind::LeaseGone
        | ReadFailureKind::Deadline
        | ReadFailureKind::Cancelled
        | ReadFailureKind::Refused
        | ReadFailureKind::Incarnation
        | ReadFailureKind::OutOfBounds
        | ReadFailureKind::NotQuiesced
        | ReadFailureKind::Local => None,
    }
}

fn reason_of(kind: ReadFailureKind) -> FailureReason {
    match kind {
        ReadFailureKind::LeaseGone => FailureReason::Fenced,
        ReadFailureKind::Deadline => FailureReason::LeaseExpired,
        ReadFailureKind::Cancelled => FailureReason::Cancelled,
        ReadFailureKind::PeerLost => FailureReason::PeerLost,
        ReadFailureKind::Unreachable => FailureReason::Unreachable,
        ReadFailureKind::Refused | ReadFailureKind::Incarnation => FailureReason::PairRefused,
        ReadFailureKind::OutOfBounds => FailureReason::Plan,
        ReadFailureKind::NotQuiesced | ReadFailureKind::Local => FailureReason::Transport,
    }
}

#[cfg(test)]
mod tests;
