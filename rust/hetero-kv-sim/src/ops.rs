//! Operations of readers in flight: they take their time, copy what stands at the source when they
//! get there, and write until they end or their connection is closed.

use std::time::Duration;

use hetero_kv_core::failure::FailureReason;
use hetero_kv_core::ids::{BlockId, LeaseRef, TpRank};
use hetero_kv_core::memory::Run;

use crate::fault::Fault;
use crate::reader::Fence;
use crate::world::{Event, Host, World};

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
    pub(crate) source: TpRank,
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
    pub(crate) fn launch_op(&mut self, mut op: Op) {
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
        let id = self.number();
        self.ops.insert(id, op);
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
        let Some(holder) = source
            .ranks
            .get(op.source.0 as usize)
            .filter(|holder| holder.alive)
        else {
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
            job.lost_source = Some(op.source);
        }
        let piece = &mut job.pieces[op.piece];
        piece.in_flight -= 1;
        match op.outcome {
            Err(reason) => self.stop_read(d, op.incarnation, op.rank, &op.request, reason),
            Ok(()) if op.kind == OpKind::LeasePage => piece.fence = Fence::Stood,
            Ok(()) => {}
        }
        self.read_on(d, op.incarnation, op.rank, &op.request);
    }
}
