//! Our transports, by the reader that the connector uses and by a connection on this thread.

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::ids::{Epoch, LeaseRef, PpRank, Slot, TpRank, TransferId};
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::memory::Run;
use hetero_kv_core::plan::{Pairing, SourceChooser};
use hetero_kv_transport::clock::now;
use hetero_kv_transport::process::ProcessTransport;
use hetero_kv_transport::reader::{ReadJob, ReadPiece, Reader, ReaderOptions, TransportChoice};
use hetero_kv_transport::tcp::TcpTransport;
use hetero_kv_transport::transport::{Connection, Interrupt, ReadBatch, Source, Transport};
use hetero_kv_transport::waker::Waker;

use super::hold::{Card, owner};
use super::memory::Pool;

const DEADLINE: Duration = Duration::from_secs(120);

/// Transports that need nothing but this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ours {
    Process,
    Tcp,
}

fn lease() -> LeaseRef {
    LeaseRef {
        slot: Slot(0),
        epoch: Epoch(1),
    }
}

/// The holder's memory as that of so many source ranks: a reader has a thread for each.
pub(crate) fn sources(card: &Card, ranks: u32) -> Result<Vec<Arc<Source>>, Box<dyn Error>> {
    let heads = KvHeads::Grouped(ranks.try_into()?);
    let pairing = Pairing::new(ranks, ranks, heads)?;
    (0..ranks)
        .map(|rank| {
            let chooser = SourceChooser::new(TransferId([1; 16]));
            let plan = pairing.rank_plan(TpRank(rank), &chooser)?;
            Ok(Arc::new(Source {
                route: plan.routes(&owner(), PpRank(0)).remove(0),
                endpoints: card.endpoints.clone(),
                regions: vec![card.region],
            }))
        })
        .collect()
}

/// The reader as a worker uses it.
pub(crate) struct ByReader {
    reader: Reader,
    sources: Vec<Arc<Source>>,
    jobs: u64,
}

impl ByReader {
    pub(crate) fn new(name: Ours, sources: Vec<Arc<Source>>, dest: Pool) -> Self {
        let options = ReaderOptions {
            choice: match name {
                Ours::Process => TransportChoice::Process,
                Ours::Tcp => TransportChoice::Tcp,
            },
            ..ReaderOptions::default()
        };
        Self {
            reader: Reader::start(dest.register(), options),
            sources,
            jobs: 0,
        }
    }

    /// Reads a part of the runs from each source, and returns the time that the caller's thread
    /// spent in handing the job over.
    pub(crate) fn read(&mut self, runs: &[Run]) -> Result<Duration, Box<dyn Error>> {
        self.jobs += 1;
        let parts = runs.chunks(runs.len().div_ceil(self.sources.len()));
        let pieces = parts
            .zip(&self.sources)
            .map(|(runs, source)| ReadPiece {
                source: Arc::clone(source),
                runs: runs.to_vec().into(),
            })
            .collect();
        let begun = now();
        self.reader.submit(ReadJob {
            id: self.jobs,
            lease: lease(),
            deadline: begun + DEADLINE,
            pieces,
        })?;
        let posted = now().since(begun);
        loop {
            self.reader.wait(DEADLINE);
            if let Some(done) = self.reader.drain().pop() {
                done.outcome.map_err(|failure| format!("{failure:?}"))?;
                return Ok(posted);
            }
            if now().since(begun) > DEADLINE {
                return Err("no end of the job in time".into());
            }
        }
    }
}

/// A list of runs as one transport takes it.
pub(crate) struct Batches {
    runs: Arc<[Run]>,
    ranges: Vec<Range<usize>>,
}

/// A connection that this thread drives itself.
pub(crate) struct ByHand {
    connection: Box<dyn Connection>,
    batch_runs_max: usize,
    batch_bytes_max: u64,
    in_flight_max: usize,
    waker: Waker,
}

impl ByHand {
    pub(crate) fn new(name: Ours, source: &Source, dest: Pool) -> Result<Self, Box<dyn Error>> {
        let tcp = TcpTransport::default();
        let transport: &dyn Transport = match name {
            Ours::Process => &ProcessTransport,
            Ours::Tcp => &tcp,
        };
        let waker = Waker::new()?;
        let interrupt = Interrupt {
            waker: &waker,
            should_stop: &|| false,
        };
        let connection =
            transport.connect(source, dest.register(), now() + DEADLINE, &interrupt)?;
        let can = transport.capabilities();
        Ok(Self {
            connection,
            batch_runs_max: can.batch_runs_max,
            batch_bytes_max: can.batch_bytes_max,
            in_flight_max: can.in_flight_max,
            waker,
        })
    }

    /// Cuts a list of runs into batches.
    pub(crate) fn batches(&self, runs: &[Run]) -> Batches {
        let (runs, ranges) = split(runs, self.batch_runs_max, self.batch_bytes_max);
        Batches {
            runs: runs.into(),
            ranges,
        }
    }

    /// Time spent in posting, all batches together.
    pub(crate) fn read(&mut self, batches: &Batches) -> Result<Duration, Box<dyn Error>> {
        let runs = &batches.runs;
        let mut batches = batches.ranges.iter().cloned();
        let mut waiting = 0;
        let mut posting = Duration::ZERO;
        let mut completions = Vec::new();
        loop {
            while waiting < self.in_flight_max
                && let Some(range) = batches.next()
            {
                let begun = now();
                self.connection.post(ReadBatch {
                    ticket: range.start as u64,
                    lease: lease(),
                    runs: Arc::clone(runs),
                    range,
                })?;
                posting += now().since(begun);
                waiting += 1;
            }
            if waiting == 0 {
                return Ok(posting);
            }
            self.connection
                .poll(DEADLINE, &self.waker, &mut completions)?;
            for completion in completions.drain(..) {
                completion.outcome?;
                waiting -= 1;
            }
        }
    }
}

/// The runs, none longer than a batch, in ranges of at most so many runs and bytes.
fn split(runs: &[Run], runs_max: usize, bytes_max: u64) -> (Vec<Run>, Vec<Range<usize>>) {
    let (mut pieces, mut ranges) = (Vec::with_capacity(runs.len()), Vec::new());
    let (mut start, mut bytes) = (0, 0);
    for run in runs {
        for from in (0..run.bytes).step_by(bytes_max as usize) {
            let piece = Run {
                source_offset: run.source_offset + from,
                dest_offset: run.dest_offset + from,
                bytes: bytes_max.min(run.bytes - from),
                ..*run
            };
            if pieces.len() - start == runs_max || bytes + piece.bytes > bytes_max {
                ranges.push(start..pieces.len());
                (start, bytes) = (pieces.len(), 0);
            }
            bytes += piece.bytes;
            pieces.push(piece);
        }
    }
    ranges.push(start..pieces.len());
    (pieces, ranges)
}

/// One connection made and proven, from nothing.
pub(crate) fn connect(name: Ours, source: &Source, dest: Pool) -> Result<(), Box<dyn Error>> {
    ByHand::new(name, source, dest).map(drop)
}
