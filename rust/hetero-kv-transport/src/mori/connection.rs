//! Batches with one peer, read from it or written to it. The data first; when all of it has arrived,
//! the peer's lease page; then the batch is complete.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::MoriEndpoint;
use rustix::event::{PollFd, PollFlags, poll};

use super::binding::{MoriError, MoriPart, MoriPeer, MoriTransfer, TransferState};
use super::endpoint::memory_of;
use super::failure::{call_of, given_up, kind_of, local, out_of_bounds, unreachable};
use super::generation::{Direction, Generation, SCRATCH_WORDS, ScratchSlot};
use crate::clock::{now, time_left, timespec};
use crate::error::{ReadFailureKind, TransportError};
use crate::fence::AnnouncedPage;
use crate::memory::{LocalMemory, span_in};
use crate::transport::{Completion, Connection, ReadBatch, Source, TransportName};
use crate::waker::Waker;

/// Longest wait for a transfer between two looks at the waker: the engine has no descriptor that
/// both could be waited for at once. A cancel is seen so much later at worst.
const SLICE: Duration = Duration::from_millis(2);

/// Longest wait for transfers to end by themselves when a connection is to be quiet. Giving up the
/// engine instead disturbs the reads from other sources.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes of a word of the lease page.
const WORD_BYTES: u64 = 8;

/// Where in a batch's life it is.
enum Stage {
    /// Not given to the engine.
    Queued(Vec<MoriPart>),
    /// Its bytes are on their way.
    Data(Box<dyn MoriTransfer>),
    /// Its bytes are here.
    Arrived,
    /// The lease page is on its way.
    Fence(Box<dyn MoriTransfer>),
}

struct Posted {
    ticket: u64,
    lease: LeaseRef,
    direction: Direction,
    stage: Stage,
}

/// How a region of either side lies in registered memory: whose number, at which offset.
type Placed = (usize, u64);

pub(super) struct MoriConnection {
    // Dropped first: it belongs to the generation's engine.
    peer: Box<dyn MoriPeer>,
    scratch: ScratchSlot,
    posted: VecDeque<Posted>,
    /// Transfers whose batch has failed or was refused half-way: they may still arrive.
    unproven: bool,
    peer_regions: Vec<MemoryRegion>,
    peer_places: Vec<Placed>,
    own_places: Vec<Placed>,
    lease_page: usize,
    page: AnnouncedPage,
    memory: Arc<LocalMemory>,
    generation: Arc<Generation>,
}

impl MoriConnection {
    /// Learns of the peer, and proves by its lease page's nonce that it is the one announced.
    pub(super) fn open(
        generation: Arc<Generation>,
        endpoint: &MoriEndpoint,
        source: &Source,
        memory: Arc<LocalMemory>,
        deadline: Time,
    ) -> Result<Self, TransportError> {
        let Some(scratch) = generation.take_slot() else {
            // Each failed handshake may have used one up.
            let all_used = "all of its scratch memory was used";
            let retired = generation.retire(all_used);
            return Err(local(
                retired.err().map_or(all_used.into(), |error| error.0),
            ));
        };
        let place = |found: Option<Placed>| {
            found.ok_or_else(|| local("a region is in no registered memory".into()))
        };
        let mut own_places = Vec::new();
        for region in memory.regions() {
            own_places.push(place(generation.locate(region))?);
        }
        let mut peer_places = Vec::new();
        for region in &source.regions {
            let found = memory_of(endpoint, region);
            peer_places.push(place(
                found.map(|index| (index, region.base - endpoint.memories[index].base)),
            )?);
        }
        let mut descriptors: Vec<&[u8]> = endpoint
            .memories
            .iter()
            .map(|memory| memory.descriptor.as_slice())
            .collect();
        descriptors.push(&endpoint.lease_page);
        let peer = generation
            .engine()
            .and_then(|engine| engine.learn(&endpoint.engine, &descriptors))
            .map_err(|error| unreachable("mori descriptors", error.0))?;
        let mut connection = Self {
            peer,
            scratch,
            posted: VecDeque::new(),
            unproven: false,
            peer_regions: source.regions.clone(),
            peer_places,
            own_places,
            lease_page: descriptors.len() - 1,
            page: AnnouncedPage {
                nonce: endpoint.lease_page_nonce,
                slots: endpoint.lease_slots,
            },
            memory,
            generation,
        };
        connection.greet(deadline)?;
        Ok(connection)
    }

    /// Reads the nonce, and a byte of each memory of the source: the engine asks the source for the
    /// key of a memory when it is first read, which is not to happen while a batch waits. Until
    /// here nothing but scratch memory was written to.
    fn greet(&mut self, deadline: Time) -> Result<(), TransportError> {
        let (local, offset) = (self.scratch.memory_id(), self.scratch.offset());
        let generation = Arc::clone(&self.generation);
        let word = |remote, bytes| MoriPart {
            uid: generation.next_uid(),
            local,
            remote,
            local_offsets: vec![offset],
            remote_offsets: vec![0],
            bytes: vec![bytes],
        };
        let keys = (0..self.lease_page).map(|memory| word(memory, 1)).collect();
        self.greet_by(keys, deadline)?;
        self.greet_by(vec![word(self.lease_page, WORD_BYTES)], deadline)?;
        let [nonce, _] = self.scratch.words();
        self.page.check_nonce(nonce)
    }

    fn greet_by(&mut self, parts: Vec<MoriPart>, deadline: Time) -> Result<(), TransportError> {
        self.scratch.clear();
        let mut transfer = self
            .generation
            .begin(Direction::Read, self.peer.as_ref(), parts)
            .map_err(|error| unreachable("mori handshake", error.0))?;
        let problem = match transfer.wait(time_left(deadline)) {
            TransferState::Done => return Ok(()),
            TransferState::Running => "the source did not answer in time".into(),
            TransferState::Failed(text) => self.explained(&text),
        };
        // The engine keeps a queue pair that has failed, and would use it for the next connection.
        let why = "a handshake left a queue pair that has failed";
        if let Err(error) = self.generation.retire(why) {
            tracing::warn!(%error, "mori: memory stays registered");
        }
        Err(unreachable("mori handshake", problem))
    }

    /// The engine's words for a failed transfer, with what it has seen of the peer.
    fn explained(&self, text: &str) -> String {
        match self.peer.failure() {
            Some(seen) => format!("{text} ({seen})"),
            None => text.to_owned(),
        }
    }

    /// Runs as parts, one for each pair of registered memories.
    fn parts(&self, direction: Direction, runs: &[Run]) -> Result<Vec<MoriPart>, TransportError> {
        let mut by_pair: BTreeMap<(usize, usize), MoriPart> = BTreeMap::new();
        for run in runs {
            let Run {
                source_region,
                source_offset,
                dest_region,
                dest_offset,
                bytes,
            } = *run;
            let source = (source_region, source_offset);
            let dest = (dest_region, dest_offset);
            let ((peer_region, peer_offset), peer_side, (own_region, own_offset), own_side) =
                match direction {
                    Direction::Read => (source, "source", dest, "destination"),
                    Direction::Write => (dest, "destination", source, "source"),
                };
            span_in(&self.peer_regions, peer_region, peer_offset, bytes)
                .map_err(|error| out_of_bounds(peer_side, error))?;
            self.memory
                .span(own_region, own_offset, bytes)
                .map_err(|error| out_of_bounds(own_side, error))?;
            let (remote, remote_base) = self.peer_places[peer_region as usize];
            let (local, local_base) = self.own_places[own_region as usize];
            let part = by_pair.entry((local, remote)).or_insert_with(|| MoriPart {
                uid: self.generation.next_uid(),
                local,
                remote,
                ..MoriPart::default()
            });
            part.local_offsets.push(local_base + own_offset);
            part.remote_offsets.push(remote_base + peer_offset);
            part.bytes.push(bytes);
        }
        Ok(by_pair.into_values().collect())
    }

    /// Takes a batch; the numbers of its transfers. A run that is outside the memory of either side
    /// refuses all of it.
    pub(super) fn queue(
        &mut self,
        direction: Direction,
        ticket: u64,
        lease: LeaseRef,
        runs: &[Run],
    ) -> Result<Vec<u64>, TransportError> {
        let parts = self.parts(direction, runs)?;
        let uids = parts.iter().map(|part| part.uid).collect();
        self.posted.push_back(Posted {
            ticket,
            lease,
            direction,
            stage: Stage::Queued(parts),
        });
        Ok(uids)
    }

    /// Packed descriptor of this side's engine.
    pub(super) fn descriptor(&self) -> Result<Vec<u8>, MoriError> {
        Ok(self.generation.engine()?.address()?.descriptor)
    }

    /// Gives the engine every batch that it does not have.
    fn start_queued(&mut self) -> Result<(), TransportError> {
        for posted in &mut self.posted {
            let Stage::Queued(parts) = &mut posted.stage else {
                continue;
            };
            let direction = posted.direction;
            let parts = std::mem::take(parts);
            match self.generation.begin(direction, self.peer.as_ref(), parts) {
                Ok(transfer) => posted.stage = Stage::Data(transfer),
                Err(MoriError(text)) => return Err(self.lost(direction, &text)),
            }
        }
        Ok(())
    }

    /// Brings the first batch on by what has arrived, waiting at most `timeout` for it; its end
    /// when it has one.
    fn advance(&mut self, timeout: Duration) -> Result<Option<Completion>, TransportError> {
        let Some(first) = self.posted.front_mut() else {
            return Ok(None);
        };
        let (ticket, lease, direction) = (first.ticket, first.lease, first.direction);
        let state = match &mut first.stage {
            Stage::Queued(_) => return Ok(None),
            Stage::Data(transfer) | Stage::Fence(transfer) => transfer.wait(timeout),
            Stage::Arrived => TransferState::Done,
        };
        match state {
            TransferState::Running => return Ok(None),
            TransferState::Failed(text) => return Err(self.lost(direction, &text)),
            TransferState::Done => {}
        }
        let outcome = match std::mem::replace(&mut first.stage, Stage::Arrived) {
            Stage::Queued(_) | Stage::Data(_) | Stage::Arrived => match self.read_page(lease) {
                Ok(transfer) => {
                    if let Some(first) = self.posted.front_mut() {
                        first.stage = Stage::Fence(transfer);
                    }
                    return Ok(None);
                }
                Err(PageError::Gone(error)) => Err(error),
                Err(PageError::Engine(error)) => return Err(self.lost(direction, &error.0)),
            },
            Stage::Fence(_) => self.fence(lease),
        };
        self.posted.pop_front();
        Ok(Some(Completion { ticket, outcome }))
    }

    /// Begins to read the lease page. All data of the batch has arrived, so what the page says is
    /// true of it.
    fn read_page(&mut self, lease: LeaseRef) -> Result<Box<dyn MoriTransfer>, PageError> {
        let slot = self.page.offset_bytes(lease).map_err(PageError::Gone)?;
        self.scratch.clear();
        let first = self.scratch.offset();
        let part = MoriPart {
            uid: self.generation.next_uid(),
            local: self.scratch.memory_id(),
            remote: self.lease_page,
            local_offsets: vec![first, first + WORD_BYTES],
            remote_offsets: vec![0, slot as u64],
            bytes: vec![WORD_BYTES; SCRATCH_WORDS],
        };
        self.generation
            .begin(Direction::Read, self.peer.as_ref(), vec![part])
            .map_err(PageError::Engine)
    }

    /// Whether the lease stands, by the words that have arrived.
    fn fence(&mut self, lease: LeaseRef) -> Result<(), TransportError> {
        let [nonce, epoch] = self.scratch.words();
        self.page.check_lease(lease, nonce, epoch)
    }

    /// A failure of the connection by the engine's words for it.
    fn lost(&mut self, direction: Direction, text: &str) -> TransportError {
        self.unproven = true;
        // An engine that another connection gave up fails all transfers; that is nobody's fault.
        if self.generation.retired() {
            return given_up();
        }
        TransportError::new(kind_of(text), call_of(direction), self.explained(text))
    }

    /// Whether every transfer has ended well until `deadline`.
    fn all_arrive(&mut self, deadline: Time) -> bool {
        for posted in &mut self.posted {
            match &mut posted.stage {
                Stage::Queued(_) | Stage::Arrived => {}
                Stage::Data(transfer) | Stage::Fence(transfer) => {
                    if transfer.wait(time_left(deadline)) != TransferState::Done {
                        return false;
                    }
                }
            }
        }
        true
    }
}

/// Why the lease page was not read.
enum PageError {
    Gone(TransportError),
    Engine(MoriError),
}

impl Connection for MoriConnection {
    fn transport(&self) -> TransportName {
        TransportName::Mori
    }

    fn post(&mut self, batch: ReadBatch) -> Result<(), TransportError> {
        self.queue(Direction::Read, batch.ticket, batch.lease, batch.runs())?;
        Ok(())
    }

    fn poll(
        &mut self,
        timeout: Duration,
        waker: &Waker,
        completions: &mut Vec<Completion>,
    ) -> Result<(), TransportError> {
        if self.generation.retired() {
            return Err(given_up());
        }
        if self.posted.is_empty() {
            woken(waker, timeout)?;
            return Ok(());
        }
        self.start_queued()?;
        let until = now() + timeout;
        loop {
            let slice = SLICE.min(time_left(until));
            if let Some(done) = self.advance(slice)? {
                completions.push(done);
                return Ok(());
            }
            if time_left(until).is_zero() || woken(waker, Duration::ZERO)? {
                return Ok(());
            }
            if self.generation.retired() {
                return Err(given_up());
            }
        }
    }

    fn cancel_and_quiesce(&mut self, deadline: Time) -> Result<(), TransportError> {
        self.posted
            .retain(|posted| !matches!(posted.stage, Stage::Queued(_)));
        let patience = deadline.min(now() + PATIENCE);
        if self.generation.retired() || self.unproven || !self.all_arrive(patience) {
            self.unproven = true;
            self.generation
                .retire("a transfer did not end well, and may still arrive")
                .map_err(|error| {
                    TransportError::new(
                        ReadFailureKind::NotQuiesced,
                        "mori deregister",
                        format!("the engine keeps the memory registered: {error}"),
                    )
                })?;
        }
        self.posted.clear();
        Ok(())
    }
}

/// Waits for the waker, at most `timeout`; whether it is set.
fn woken(waker: &Waker, timeout: Duration) -> Result<bool, TransportError> {
    let mut fds = [PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)];
    match poll(&mut fds, Some(&timespec(timeout))) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(TransportError::system(
            ReadFailureKind::Local,
            "poll",
            error.into(),
        )),
    }
}
