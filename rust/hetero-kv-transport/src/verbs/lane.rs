//! One queue pair of a reading connection: what waits for room in its send queue, what is in it,
//! and how it ends.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use hetero_kv_core::ids::LeaseRef;
use hetero_kv_core::lease_page::slot_offset_bytes;
use hetero_kv_core::wire::card::VerbsEndpoint;

use super::error::{Verb, VerbsError};
use super::memory::Words;
use super::node::Node;
use super::queue_pair::{Failed, QueuePair, ReadyToSend, Request};
use super::sys;
use super::work::ReadList;

/// Requests that read the lease page after a batch's data: its nonce, and the lease's epoch.
const PAGE_REQUESTS: usize = 2;

/// A batch on its way into the send queue.
pub(super) struct Batch {
    pub(super) ticket: u64,
    pub(super) lease: LeaseRef,
    pub(super) list: ReadList,
    /// First of two words that its copy of the lease page goes to.
    pub(super) word: usize,
    next_request: usize,
    next_piece: usize,
}

impl Batch {
    pub(super) fn new(ticket: u64, lease: LeaseRef, list: ReadList, word: usize) -> Self {
        Self {
            ticket,
            lease,
            list,
            word,
            next_request: 0,
            next_piece: 0,
        }
    }
}

/// A batch whose last request has completed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    pub(super) ticket: u64,
    pub(super) lease: LeaseRef,
    pub(super) word: usize,
}

/// Requests that were posted together; the last one tells their end.
struct Chunk {
    id: u64,
    places: usize,
    finished: Option<Finished>,
}

enum End {
    Ready(QueuePair<ReadyToSend>),
    Failed {
        queue_pair: QueuePair<Failed>,
        drained: bool,
    },
}

/// See the module's text.
pub(super) struct Lane {
    /// `None` once it is destroyed.
    end: Option<End>,
    /// Number of this lane, in the upper half of its requests' ids.
    number: u32,
    next_id: u32,
    /// Places of the send queue; one more is kept for the request that drains it.
    places: usize,
    used: usize,
    waiting: VecDeque<Batch>,
    posted: VecDeque<Chunk>,
}

/// Lower half of the id of the request that drains a lane.
const LAST_ID: u32 = u32::MAX;

impl Lane {
    pub(super) fn new(number: u32, queue_pair: QueuePair<ReadyToSend>, places: usize) -> Self {
        Self {
            end: Some(End::Ready(queue_pair)),
            number,
            next_id: 0,
            places,
            used: 0,
            waiting: VecDeque::new(),
            posted: VecDeque::new(),
        }
    }

    /// The lane that a request of this id was posted on.
    pub(super) fn of(id: u64) -> usize {
        (id >> 32) as usize
    }

    fn id(&self, low: u32) -> u64 {
        u64::from(self.number) << 32 | u64::from(low)
    }

    fn fresh_id(&mut self) -> u64 {
        let id = self.id(self.next_id);
        self.next_id = (self.next_id + 1) % LAST_ID;
        id
    }

    /// Whether something of it is in the device.
    pub(super) fn busy(&self) -> bool {
        self.used > 0
    }

    pub(super) fn push(&mut self, batch: Batch) {
        self.waiting.push_back(batch);
    }

    /// Posts as much of what waits as there is room for. Requests of a batch go in together, so
    /// that its end is told once; a batch larger than half the send queue goes in parts.
    ///
    /// # Safety
    /// The batches' local pieces may be written until they have finished or the lane has ended, and
    /// lie in `node`'s memory; `words` outlives the lane.
    pub(super) unsafe fn pump(
        &mut self,
        node: &Node,
        peer: &VerbsEndpoint,
        words: &Words,
        requests_max: usize,
    ) -> Result<(), VerbsError> {
        while let Some(batch) = self.waiting.front() {
            let left = batch.list.requests.len() - batch.next_request;
            let taken = left.min(requests_max);
            let whole = taken == left;
            let places = taken + if whole { PAGE_REQUESTS } else { 0 };
            if self.used + places > self.places {
                return Ok(());
            }
            let id = self.fresh_id();
            let Some(batch) = self.waiting.front_mut() else {
                return Ok(());
            };
            let Some(End::Ready(queue_pair)) = &mut self.end else {
                return Err(VerbsError::Mismatch("the queue pair has ended".into()));
            };
            // SAFETY: as the caller promises.
            unsafe { post_part(queue_pair, batch, taken, id, node, peer, words) }?;
            batch.next_request += taken;
            self.used += places;
            let finished = whole.then_some(Finished {
                ticket: batch.ticket,
                lease: batch.lease,
                word: batch.word,
            });
            self.posted.push_back(Chunk {
                id,
                places,
                finished,
            });
            if whole {
                self.waiting.pop_front();
            }
        }
        Ok(())
    }

    /// Posts a read of one word of the lease page by itself, to find out whether the way is open.
    ///
    /// # Safety
    /// `words` outlives the lane.
    pub(super) unsafe fn probe(
        &mut self,
        peer: &VerbsEndpoint,
        words: &Words,
        word: usize,
    ) -> Result<(), VerbsError> {
        let id = self.fresh_id();
        let Some(End::Ready(queue_pair)) = &mut self.end else {
            return Err(VerbsError::Mismatch("the queue pair has ended".into()));
        };
        words.clear(word);
        let piece = [word_piece(words, word)];
        let request = page_request(peer, 0, &piece, id, true);
        // SAFETY: the word belongs to `words`, which the caller keeps, and is borrowed by nobody.
        unsafe { queue_pair.post(&[request]) }?;
        self.used += 1;
        self.posted.push_back(Chunk {
            id,
            places: 1,
            finished: None,
        });
        Ok(())
    }

    /// Takes back the places of requests that completed well; the batch that ended with them.
    pub(super) fn completed(&mut self, id: u64) -> Result<Option<Finished>, VerbsError> {
        match self.posted.pop_front() {
            Some(chunk) if chunk.id == id => {
                self.used -= chunk.places;
                Ok(chunk.finished)
            }
            Some(_) | None => Err(VerbsError::Mismatch(format!(
                "request {id:#x} completed out of turn"
            ))),
        }
    }

    /// Begins its end: after this nothing new of it is carried out. On an error it stays as it is.
    pub(super) fn fail(&mut self) -> Result<(), VerbsError> {
        self.waiting.clear();
        let Some(End::Ready(queue_pair)) = self.end.take() else {
            return Ok(());
        };
        match queue_pair.fail() {
            Ok(mut queue_pair) => {
                // With nothing posted there is nothing to wait for.
                let sent = if self.used == 0 {
                    Ok(())
                } else {
                    queue_pair.post_last(self.id(LAST_ID))
                };
                self.end = Some(End::Failed {
                    queue_pair,
                    drained: self.used == 0,
                });
                sent
            }
            Err((queue_pair, error)) => {
                self.end = Some(End::Ready(queue_pair));
                Err(error)
            }
        }
    }

    /// Notes that a request of this id has ended, and with it all before it.
    pub(super) fn note_last(&mut self, id: u64) {
        if id == self.id(LAST_ID)
            && let Some(End::Failed { drained, .. }) = &mut self.end
        {
            *drained = true;
        }
    }

    /// Whether nothing of it can be carried out any more.
    pub(super) fn drained(&self) -> bool {
        match &self.end {
            None => true,
            Some(End::Failed { drained, .. }) => *drained,
            Some(End::Ready(_)) => false,
        }
    }

    /// Destroys the queue pair; after `Ok` the device reaches no memory by it.
    pub(super) fn destroy(&mut self) -> Result<(), VerbsError> {
        let (end, result) = match self.end.take() {
            None => (None, Ok(())),
            Some(End::Ready(queue_pair)) => match queue_pair.destroy() {
                Ok(()) => (None, Ok(())),
                Err((queue_pair, error)) => (Some(End::Ready(queue_pair)), Err(error)),
            },
            Some(End::Failed {
                queue_pair,
                drained,
            }) => match queue_pair.destroy() {
                Ok(()) => (None, Ok(())),
                Err((queue_pair, error)) => {
                    let end = End::Failed {
                        queue_pair,
                        drained,
                    };
                    (Some(end), Err(error))
                }
            },
        };
        self.end = end;
        if result.is_ok() {
            self.waiting.clear();
            self.posted.clear();
            self.used = 0;
        }
        result
    }
}

/// Posts the next `taken` requests of a batch under one id, and the reads of the lease page behind
/// the last of them.
///
/// # Safety
/// As [`Lane::pump`].
unsafe fn post_part(
    queue_pair: &mut QueuePair<ReadyToSend>,
    batch: &mut Batch,
    taken: usize,
    id: u64,
    node: &Node,
    peer: &VerbsEndpoint,
    words: &Words,
) -> Result<(), VerbsError> {
    let list = &batch.list;
    let part = &list.requests[batch.next_request..][..taken];
    let whole = batch.next_request + taken == list.requests.len();
    let piece_count: usize = part.iter().map(|request| request.pieces_count).sum();
    let mut pieces = Vec::with_capacity(piece_count);
    for piece in &list.pieces[batch.next_piece..][..piece_count] {
        let lkey = node.lkey(piece.region).ok_or_else(|| {
            VerbsError::Mismatch(format!("region {} is not registered", piece.region))
        })?;
        pieces.push(sys::ibv_sge {
            addr: piece.address,
            length: piece.bytes,
            lkey,
        });
    }
    let page_pieces = [
        [word_piece(words, batch.word)],
        [word_piece(words, batch.word + 1)],
    ];
    let mut requests = Vec::with_capacity(taken + PAGE_REQUESTS);
    let mut rest = &pieces[..];
    for (at, request) in part.iter().enumerate() {
        let (own, others) = rest.split_at(request.pieces_count);
        rest = others;
        let key = peer.region_keys.get(request.source_region as usize);
        requests.push(Request {
            verb: Verb::Read,
            id,
            remote_address: request.source_address,
            remote_key: *key.ok_or_else(|| {
                VerbsError::Mismatch(format!(
                    "the source announced no key of region {}",
                    request.source_region
                ))
            })?,
            pieces: own,
            signalled: !whole && at + 1 == taken,
            fenced: false,
            immediate: 0,
        });
    }
    if whole {
        words.clear(batch.word);
        words.clear(batch.word + 1);
        let [nonce, epoch] = &page_pieces;
        // Fenced: the page is asked for only when all of the data has arrived here, so what it
        // says was true after the last byte was read.
        requests.push(Request {
            fenced: true,
            ..page_request(peer, 0, nonce, id, false)
        });
        let offset = slot_offset_bytes(batch.lease.slot) as u64;
        requests.push(page_request(peer, offset, epoch, id, true));
    }
    // SAFETY: the pieces are the batch's, for which the caller vouches, and words that nobody
    // borrows; all requests end before the lane does.
    unsafe { queue_pair.post(&requests) }?;
    batch.next_piece += piece_count;
    Ok(())
}

fn word_piece(words: &Words, word: usize) -> sys::ibv_sge {
    sys::ibv_sge {
        addr: words.address(word),
        length: 8,
        lkey: words.lkey(),
    }
}

fn page_request<'a>(
    peer: &VerbsEndpoint,
    offset: u64,
    piece: &'a [sys::ibv_sge],
    id: u64,
    signalled: bool,
) -> Request<'a> {
    Request {
        verb: Verb::Read,
        id,
        remote_address: peer.lease_page_address.wrapping_add(offset),
        remote_key: peer.lease_page_key,
        pieces: piece,
        signalled,
        fenced: false,
        immediate: 0,
    }
}
