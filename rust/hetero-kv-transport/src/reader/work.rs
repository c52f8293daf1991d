//! A job's piece on its way through one session: what is posted and what is to be posted.

use std::ops::Range;
use std::sync::Arc;

use hetero_kv_core::memory::Run;
use hetero_kv_core::plan::Route;
use hetero_kv_core::wire::data::FETCH_BYTES_MAX;

use super::job::{Job, SourceRead};
use super::{PieceRuns, ReadPiece};
use crate::error::ReadFailureKind;
use crate::memory::{LocalMemory, OutOfBounds, span_in};
use crate::transport::{Capabilities, Source, TransportName};

/// The part of a job that one session reads. It counts as quiescent when it is dropped.
pub(super) struct Piece {
    pub(super) job: Arc<Job>,
    pub(super) source: Arc<Source>,
    /// As submitted; `None` once they are checked.
    unchecked: Option<PieceRuns>,
    /// Whether `runs` is the whole of it. What ends before that has read nothing.
    prepared: bool,
    /// Inside the memory of both sides, merged, and cut so that each fits a batch of any transport.
    pub(super) runs: Arc<[Run]>,
    /// First run that is not posted. Batches complete in order, so those in flight lie right
    /// before it.
    next: usize,
    /// Batches posted and not completed.
    in_flight: usize,
    /// Whether a connection was lost under it: the second time it fails.
    pub(super) lost_once: bool,
    arrived_bytes: u64,
    pub(super) transport: Option<TransportName>,
    /// Key of the session that took it.
    pub(super) session: Option<Route>,
    pub(super) dialled: Option<Arc<str>>,
}

impl Piece {
    pub(super) fn new(job: Arc<Job>, piece: ReadPiece) -> Self {
        Self {
            job,
            source: piece.source,
            unchecked: Some(piece.runs),
            prepared: false,
            runs: Arc::default(),
            next: 0,
            in_flight: 0,
            lost_once: false,
            arrived_bytes: 0,
            transport: None,
            session: None,
            dialled: None,
        }
    }

    /// Checks the runs against the memory of both sides and prepares them for posting.
    pub(super) fn prepare(&mut self, memory: &LocalMemory) -> Result<(), String> {
        let names = |side| move |error: OutOfBounds| format!("{side}: {error}");
        let runs = self.unchecked.take().map_or_else(Vec::new, PieceRuns::list);
        for run in &runs {
            span_in(
                &self.source.regions,
                run.source_region,
                run.source_offset,
                run.bytes,
            )
            .map_err(names("source"))?;
            memory
                .span(run.dest_region, run.dest_offset, run.bytes)
                .map_err(names("destination"))?;
        }
        self.runs = cut(&merge(&runs)).into();
        self.prepared = true;
        Ok(())
    }

    /// Whether every run has arrived.
    pub(super) fn complete(&self) -> bool {
        self.prepared && self.in_flight == 0 && !self.has_more()
    }

    /// Whether there is something to post.
    pub(super) fn has_more(&self) -> bool {
        self.next < self.runs.len()
    }

    /// Whether a transport may be writing its destination.
    pub(super) fn posted(&self) -> bool {
        self.in_flight > 0
    }

    /// The next batch to post, as large as the transport takes.
    pub(super) fn next_batch(&mut self, capabilities: &Capabilities) -> Range<usize> {
        let mut left_bytes = capabilities.batch_bytes_max;
        let fits = self.runs[self.next..]
            .iter()
            .take(capabilities.batch_runs_max)
            .take_while(|run| match left_bytes.checked_sub(run.bytes) {
                Some(left) => {
                    left_bytes = left;
                    true
                }
                None => false,
            })
            .count();
        let start = self.next;
        self.next += fits;
        self.in_flight += 1;
        start..self.next
    }

    /// Takes back every batch in flight; the first of them begins at run `first`.
    pub(super) fn post_again_from(&mut self, first: usize) {
        self.next = self.next.min(first);
        self.in_flight = 0;
    }

    /// Counts a batch as completed, and its bytes when they arrived.
    pub(super) fn completed(&mut self, range: Range<usize>, arrived: bool) -> u64 {
        self.in_flight -= 1;
        if !arrived {
            return 0;
        }
        let bytes = self.runs[range].iter().map(|run| run.bytes).sum();
        self.arrived_bytes += bytes;
        bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if !self.complete() {
            // A piece that was stopped has its reason already; one that was not is dropped by a
            // thread that panics.
            self.job.stop(
                ReadFailureKind::Local,
                "the reading thread ended before the read",
            );
        }
        self.job.piece_done(SourceRead {
            route: self.source.route.clone(),
            bytes: self.arrived_bytes,
            transport: self.transport,
            session: self.session.take(),
            dialled: self.dialled.take(),
        });
    }
}

/// Joins runs that follow on each other on both sides.
fn merge(runs: &[Run]) -> Vec<Run> {
    let mut merged: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        if let Some(last) = merged.last_mut()
            && last.source_region == run.source_region
            && last.dest_region == run.dest_region
            && last.source_offset + last.bytes == run.source_offset
            && last.dest_offset + last.bytes == run.dest_offset
        {
            last.bytes += run.bytes;
            continue;
        }
        merged.push(*run);
    }
    merged
}

/// Cuts runs to at most [`FETCH_BYTES_MAX`], which fits a batch of every transport.
fn cut(runs: &[Run]) -> Vec<Run> {
    let mut pieces = Vec::with_capacity(runs.len());
    for run in runs {
        let mut done = 0;
        while done < run.bytes {
            let bytes = FETCH_BYTES_MAX.min(run.bytes - done);
            pieces.push(Run {
                source_offset: run.source_offset + done,
                dest_offset: run.dest_offset + done,
                bytes,
                ..*run
            });
            done += bytes;
        }
    }
    pieces
}

#[cfg(test)]
mod tests;
