//! Operations of readers in flight: they take their time, copy what stands at the source when they
//! get there, and write until they end or their connection is closed.

use std::time::Duration;

use hetero_kv_core::failure::FailureReason;
use hetero_kv_core::ids::{BlockId, LeaseRef, TpRank};
use hetero_kv_core::memory::Run;

use crate::fault::Fault;
use crate::reader::Fence;
use crate::world::{Event, Host, World};

/// One rank of a prefill engine, as a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SourceRank {
    pub(crate) tp: u32,
    pub(crate) pp: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    Data,
    LeasePage,
}

/// One operation in flight: whatever becomes of its job, it writes until it ends or its connection
/// has been closed.
#[derive(Clone, Debug)]
pub(crate) struct Op {
    pub(crate) decode: usize,
    pub(crate) incarnation: u64,
    pub(crate) rank: usize,
    pub(crate) request: String,
    pub(crate) piece: usize,
    pub(crate) kind: OpKind,
    pub(crate) prefill: usize,
    pub(crate) prefill_incarnation: u64,
    pub(crate) source: SourceRank,
    pub(crate) runs: Vec<Run>,
    /// Runs copied so far.
    pub(crate) copied: usize,
    pub(crate) dest_blocks: Vec<BlockId>,
    pub(crate) outcome: Result<(), FailureReason>,
    pub(crate) lease: LeaseRef,
    pub(crate) nonce: u64,
}

impl Op {
    pub(crate) fn writes(&self) -> bool {
        self.kind == OpKind::Data
    }
}

impl World {
    /// Puts an operation in flight under a number that was taken for it.
    pub(crate) fn launch_op(&mut self, id: u64, mut op: Op) {
        let mut takes = self.millis(0, 3);
        if self.book.may(Fault::ReadFails) && self.rng.permille(40) {
            self.book.happened(Fault::ReadFails);
            op.outcome = Err(FailureReason::Transport);
        }
        if self.book.may(Fault::ReadStalls) && self.rng.permille(15) {
            self.book.happened(Fault::ReadStalls);
            takes += self.millis(5000, 14_000);
        } else if self.book.may(Fault::ReadSlow) && self.rng.permille(300) {
            self.book.happened(Fault::ReadSlow);
            takes += self.millis(50, 900);
        }
        self.ops.insert(id, op);
        if self.book.may(Fault::DataBreaks) && self.rng.permille(60) {
            let at = takes.mul_f64(self.rng.below(1000) as f64 / 1000.0);
            self.after(at, Event::DataBreaks(id));
        }
        self.after(takes / 2, Event::OpHalf(id));
        self.after(takes, Event::OpDone(id));
    }

    pub(crate) fn op_half(&mut self, id: u64) {
        if let Some(op) = self.ops.get(&id) {
            let half = op.runs.len().div_ceil(2);
            self.copy(id, half);
        }
    }

    /// Copies an operation's runs up to one of them, from whoever lives at the source's address.
    pub(crate) fn copy(&mut self, id: u64, past: usize) {
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        if op.outcome.is_err() {
            return;
        }
        let place = self.prefill[op.prefill]
            .shape
            .index(op.source.tp, op.source.pp);
        let Some(source) = self.prefill[op.prefill].engine.as_ref() else {
            op.outcome = Err(FailureReason::PeerLost);
            return;
        };
        let meant = source.identity.incarnation.0 == op.prefill_incarnation;
        if !meant && self.book.may(Fault::ReadStrays) {
            self.book.happened(Fault::ReadStrays);
        } else if !meant {
            op.outcome = Err(FailureReason::PeerLost);
            return;
        }
        let Some(holder) = source.ranks.get(place).filter(|holder| holder.alive) else {
            op.outcome = Err(FailureReason::PeerLost);
            return;
        };
        let Some(reader) = self.decode[op.decode].engine.as_mut() else {
            return;
        };
        for run in op.runs.get(op.copied..past).unwrap_or_default() {
            if let Some(bytes) = holder.memory.read(run) {
                reader.ranks[op.rank].memory.write(run, &bytes);
            }
        }
        op.copied = past;
        if op.kind == OpKind::LeasePage {
            let stands = holder.page.nonce() == op.nonce
                && holder.page.epoch(op.lease.slot) == op.lease.epoch;
            if !stands {
                self.book.count("reads fenced");
                op.outcome = Err(FailureReason::Fenced);
            }
        }
    }

    pub(crate) fn op_done(&mut self, id: u64) {
        let Some(op) = self.ops.get(&id) else {
            return;
        };
        let (p, d) = (op.prefill, op.decode);
        if let Some(until) = self.partitions.get(&(p, d)).filter(|at| **at > self.now) {
            self.at(*until, Event::OpDone(id));
            return;
        }
        if self.prefill[p].vanished {
            // Nothing answers and nothing refuses: it is in flight until somebody gives it up, or
            // somebody lives there again.
            self.after(Duration::from_millis(100), Event::OpDone(id));
            return;
        }
        if op.copied < op.runs.len() || op.kind == OpKind::LeasePage {
            let past = op.runs.len();
            self.copy(id, past);
        }
        let paused = self.paused_until(Host::Decode(d));
        if paused > self.now {
            self.at(paused, Event::OpDone(id));
            return;
        }
        let Some(op) = self.ops.remove(&id) else {
            return;
        };
        if !self.decode[d].is(op.incarnation) {
            return;
        }
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let Some(job) = engine.ranks[op.rank].jobs.get_mut(&op.request) else {
            return;
        };
        job.in_flight -= 1;
        if op.outcome == Err(FailureReason::PeerLost) && job.stopped.is_none() {
            job.lost_source = Some(TpRank(op.source.tp));
        }
        let bytes = op.runs.iter().map(|run| run.bytes).sum();
        match (&op.outcome, op.kind) {
            (Ok(()), OpKind::Data) => job.book.landed(op.source, bytes),
            (Ok(()), OpKind::LeasePage) => job.book.fenced(op.source),
            (Err(_), _) => job.book.failed(op.source),
        }
        let piece = &mut job.pieces[op.piece];
        piece.posted.retain(|(posted, _)| *posted != id);
        piece.in_flight -= 1;
        match op.outcome {
            Err(reason) => self.stop_read(d, op.incarnation, op.rank, &op.request, reason),
            Ok(()) if op.kind == OpKind::LeasePage => piece.fence = Fence::Stood,
            Ok(()) => {}
        }
        self.read_on(d, op.incarnation, op.rank, &op.request);
    }

    /// A data connection breaks: its operations write nothing more once it is closed, and are posted
    /// again on the next one, once. A source that is lost again is lost.
    pub(crate) fn data_breaks(&mut self, id: u64) {
        let Some(op) = self.ops.get(&id) else {
            return;
        };
        let (d, incarnation, rank, index) = (op.decode, op.incarnation, op.rank, op.piece);
        let (request, source) = (op.request.clone(), op.source);
        self.book.happened(Fault::DataBreaks);
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let Some(job) = engine.ranks[rank].jobs.get_mut(&request) else {
            return;
        };
        let piece = &mut job.pieces[index];
        let broken: Vec<(u64, Vec<Run>)> = piece.posted.drain(..).collect();
        job.in_flight -= piece.in_flight;
        piece.in_flight = 0;
        let lost = std::mem::replace(&mut piece.lost_once, true);
        if piece.fence == Fence::Posted {
            piece.fence = Fence::ToCome;
        }
        for (id, runs) in broken.into_iter().rev() {
            self.ops.remove(&id);
            if !runs.is_empty() {
                piece.batches.push_front(runs);
            }
        }
        self.book.count("reads posted again");
        if lost {
            job.lost_source = job.lost_source.or(Some(TpRank(source.tp)));
            job.book.failed(source);
            self.stop_read(d, incarnation, rank, &request, FailureReason::PeerLost);
        }
        self.read_on(d, incarnation, rank, &request);
    }
}
