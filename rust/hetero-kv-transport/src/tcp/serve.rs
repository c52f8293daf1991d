//! One reader's connection on the holding end.
#![allow(unsafe_code)]

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hetero_kv_core::auth::AttachTranscript;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::data::{
    Attach, AttachRefusal, AttachRefused, Attached, FETCH_BYTES_MAX, FETCH_RUNS_MAX, Fetch,
    FetchData, FetchEnd, FetchStatus, QueuePairEnds, VerbsRefused,
};
use hetero_kv_core::wire::message::{Challenge, Proof};
use hetero_kv_core::wire::{FrameError, Kind, decode, encode};
use rustix::event::PollFlags;

use super::framing::{FrameReceiver, FrameSender, ReceiveError};
use super::places::{Place, Terms};
use super::prove::{self, Asked, Proven};
use super::server::{HolderPlace, Shared};
use super::socket;
use crate::clock::{now, time_left};
use crate::keys;
use crate::lines::Cause;
use crate::memory::{Span, SpanQueue};
use crate::verbs::{self, holder::HolderEnds};

/// Why a connection is over.
#[derive(Debug, thiserror::Error)]
enum End {
    /// The reader closed it between frames, or this server stops.
    #[error("closed")]
    Closed,
    /// The reader was refused.
    #[error("refused: {0}")]
    Refused(String),
    /// The reader went away inside a fetch, or the network broke.
    #[error("{0}")]
    Lost(io::Error),
    /// The reader sent something else than the protocol, or too slowly.
    #[error("{0}")]
    Broken(String),
}

impl From<FrameError> for End {
    fn from(error: FrameError) -> Self {
        Self::Broken(error.to_string())
    }
}

/// Serves one reader until it leaves. Nothing that it sends ends more than this connection.
pub(super) fn serve(stream: &OwnedFd, peer: SocketAddr, place: Place, shared: &Shared) {
    let mut connection = Serving {
        stream,
        shared,
        place,
        receiver: FrameReceiver::default(),
        iovecs: Vec::new(),
    };
    let Err(end) = connection.run();
    let end = match connection.place.is_lost() {
        true => End::Broken("others wait for the place of a reader that says nothing".into()),
        false => end,
    };
    let counters = &shared.counters;
    let line_due = || shared.line_due(Cause::Peer(Some(peer.ip())));
    match &end {
        End::Closed => tracing::debug!(%peer, "reader left"),
        End::Lost(error) => tracing::info!(%peer, %error, "reader lost"),
        End::Refused(reason) => {
            counters.refused.fetch_add(1, Ordering::Relaxed);
            if let Some(unlogged) = line_due() {
                tracing::warn!(%peer, reason, unlogged, "reader refused");
            }
        }
        End::Broken(reason) => {
            counters.broken.fetch_add(1, Ordering::Relaxed);
            if let Some(unlogged) = line_due() {
                tracing::warn!(%peer, reason, unlogged, "connection closed: not a reader of ours");
            }
        }
    }
}

/// What never ends well: a connection always ends by an [`End`].
enum Never {}

struct Serving<'a> {
    stream: &'a OwnedFd,
    shared: &'a Shared,
    place: Place,
    receiver: FrameReceiver,
    iovecs: Vec<libc::iovec>,
}

impl<'a> Serving<'a> {
    fn run(&mut self) -> Result<Never, End> {
        let timeout = self.shared.options.frame_timeout;
        let until = now() + timeout;
        let (kind, payload) = self.receive(Some(timeout))?;
        if kind != Kind::Attach {
            return Err(End::Broken(format!("{kind:?} came first")));
        }
        let attach: Attach = decode(kind, &payload)?;
        if let Some(refused) = busy(self.place.terms()) {
            return self.refuse(&refused);
        }
        let proven = self.authenticate(&attach, until)?;
        // Only now: who is here is no business of one without the key.
        if let Some(refused) = self.misplaced(&attach) {
            return self.refuse(&refused);
        }
        if !self.place.is_of_reader() {
            return Err(End::Closed);
        }
        let regions = self.shared.memory.regions();
        let region_bytes: Vec<u64> = regions.iter().map(|region| region.bytes).collect();
        let proof = proven.map(|reader| reader.answer(&region_bytes));
        let attached = Attached {
            region_bytes,
            proof,
        };
        self.send_frame(encode(Kind::Attached, &attached)?)?;
        // Queue pairs of this reader; they end when this function does.
        let mut ends: Option<HolderEnds> = None;
        loop {
            let (kind, payload) = self.receive(None)?;
            if kind == Kind::Fetch {
                self.answer(&decode(kind, &payload)?)?;
            } else if kind == Kind::VerbsConnect && ends.is_none() {
                ends = Some(self.connect_queue_pairs(&decode(kind, &payload)?)?);
            } else {
                return Err(End::Broken(format!("{kind:?} came out of turn")));
            }
        }
    }

    /// Makes this side's ends of a reader's queue pairs and tells it, or tells it why not.
    fn connect_queue_pairs(&self, asked: &QueuePairEnds) -> Result<HolderEnds, End> {
        let made = match &self.shared.options.verbs {
            Some(node) => verbs::holder::answer(node, asked).map_err(|error| error.to_string()),
            None => Err("this rank does not offer verbs".into()),
        };
        match made {
            Ok((ends, told)) => {
                let counters = &self.shared.counters;
                counters.verbs_readers.fetch_add(1, Ordering::Relaxed);
                self.send_frame(encode(Kind::VerbsConnected, &told)?)?;
                Ok(ends)
            }
            Err(text) => {
                let refused = VerbsRefused { text: text.clone() };
                self.send_frame(encode(Kind::VerbsRefused, &refused)?)?;
                Err(End::Refused(text))
            }
        }
    }

    /// Has the reader prove its key before `until`, where keys are set.
    fn authenticate<'b>(
        &mut self,
        attach: &'b Attach,
        until: Time,
    ) -> Result<Option<Proven<'b>>, End>
    where
        'a: 'b,
    {
        let shared: &'a Shared = self.shared;
        let (keys, dialer) = match prove::asked(shared.options.keys.as_ref(), attach) {
            Ok(Asked::Nothing) => return Ok(None),
            Ok(Asked::Proof(keys, dialer)) => (keys, dialer),
            Err(refused) => return self.refuse(&refused),
        };
        let listener = keys::nonce().map_err(End::Lost)?;
        let challenge = Challenge {
            nonce: listener.0.to_vec(),
        };
        self.send_frame(encode(Kind::AttachChallenge, &challenge)?)?;
        let (kind, payload) = self.receive(Some(time_left(until)))?;
        if kind != Kind::AttachProof {
            return Err(End::Broken(format!("{kind:?} came for a proof")));
        }
        let Proof { proof } = decode(kind, &payload)?;
        let transcript = AttachTranscript {
            attach,
            dialer,
            listener,
            accepted: None,
        };
        match Proven::by(keys, transcript, &proof) {
            Ok(proven) => Ok(Some(proven)),
            Err(refused) => self.refuse(&refused),
        }
    }

    /// Tells the reader why, and ends.
    fn refuse<T>(&self, refused: &AttachRefused) -> Result<T, End> {
        self.send_frame(encode(Kind::AttachRefused, refused)?)?;
        Err(End::Refused(refused.text.clone()))
    }

    fn misplaced(&self, attach: &Attach) -> Option<AttachRefused> {
        let refused = |code, text| Some(AttachRefused { code, text });
        let place = self
            .shared
            .place
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        match place {
            None => refused(
                AttachRefusal::NotReady,
                "this worker does not know its engine's incarnation yet".into(),
            ),
            Some(place) => {
                let (code, text) = mismatch(&place, attach)?;
                refused(code, text)
            }
        }
    }

    /// Answers one fetch.
    fn answer(&mut self, fetch: &Fetch) -> Result<(), End> {
        let (status, text) = match self.pieces(fetch) {
            Err(text) => (FetchStatus::OutOfBounds, text),
            Ok(_) if !self.shared.page.holds(fetch.lease()) => {
                (FetchStatus::LeaseGone, self.gone(fetch, "before"))
            }
            Ok(pieces) => {
                self.send_data(fetch, &pieces)?;
                // The kernel has copied the bytes: what the lease covered until here was sent.
                if self.shared.page.holds(fetch.lease()) {
                    (FetchStatus::Ok, String::new())
                } else {
                    (FetchStatus::LeaseGone, self.gone(fetch, "after"))
                }
            }
        };
        let counters = &self.shared.counters;
        counters.fetches.fetch_add(1, Ordering::Relaxed);
        if status == FetchStatus::LeaseGone {
            counters.leases_gone.fetch_add(1, Ordering::Relaxed);
        }
        let end = FetchEnd {
            id: fetch.id,
            status,
            text,
        };
        self.send_frame(encode(Kind::FetchEnd, &end)?)
    }

    /// Where the fetch's runs lie, or why they lie nowhere.
    fn pieces(&self, fetch: &Fetch) -> Result<Vec<Span>, String> {
        if fetch.runs.len() > FETCH_RUNS_MAX {
            return Err(format!(
                "{} runs are over the limit of {FETCH_RUNS_MAX} in a fetch",
                fetch.runs.len()
            ));
        }
        let mut total_bytes = 0_u64;
        let mut pieces = Vec::with_capacity(fetch.runs.len());
        for run in &fetch.runs {
            let piece = self
                .shared
                .memory
                .span(run.0, run.1, run.2)
                .map_err(|error| error.to_string())?;
            total_bytes = total_bytes.saturating_add(run.2);
            pieces.push(piece);
        }
        if total_bytes > FETCH_BYTES_MAX {
            return Err(format!(
                "{total_bytes} bytes are over the limit of {FETCH_BYTES_MAX} in a fetch"
            ));
        }
        Ok(pieces)
    }

    fn gone(&self, fetch: &Fetch, when: &str) -> String {
        let stands = match self.shared.page.epoch(fetch.slot) {
            Some(epoch) => format!("is at epoch {}", epoch.0),
            None => format!("is not on a page of {} slots", self.shared.page.slots()),
        };
        format!(
            "slot {} {stands}, the lease was of epoch {} (seen {when} the bytes)",
            fetch.slot, fetch.epoch.0
        )
    }

    /// Sends the frame that announces the bytes, and the bytes, in as few calls as the socket
    /// takes.
    fn send_data(&mut self, fetch: &Fetch, pieces: &[Span]) -> Result<(), End> {
        let bytes = pieces.iter().map(|piece| piece.bytes as u64).sum();
        let frame = encode(
            Kind::FetchData,
            &FetchData {
                id: fetch.id,
                bytes,
            },
        )?;
        let mut source = SpanQueue::with_capacity(pieces.len() + 1);
        source.push(Span {
            address: frame.as_ptr().expose_provenance(),
            bytes: frame.len(),
        });
        for piece in pieces {
            source.push(*piece);
        }
        while source.left_bytes() > 0 {
            // SAFETY: the first piece is `frame`, alive until the end of this function; the others
            // lie in the regions of `shared.memory` (checked by `pieces`), which stay mapped while
            // this server runs. What the owner of the memory writes meanwhile makes the bytes
            // worthless, which the lease check after them finds out.
            let sent = unsafe { socket::send_from(self.stream, &mut source, &mut self.iovecs) };
            match sent {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_room()?,
                Err(error) => return Err(End::Lost(error)),
            }
        }
        self.shared
            .counters
            .sent_bytes
            .fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn send_frame(&self, frame: Vec<u8>) -> Result<(), End> {
        let mut sender = FrameSender::default();
        sender.push(frame);
        loop {
            sender.flush(self.stream).map_err(End::Lost)?;
            if sender.is_empty() {
                return Ok(());
            }
            self.wait_for_room()?;
        }
    }

    /// Waits until the socket takes more.
    fn wait_for_room(&self) -> Result<(), End> {
        let timeout = self.shared.options.stall_timeout;
        if self.wait(PollFlags::OUT, Some(timeout))? {
            return Ok(());
        }
        Err(End::Broken(format!(
            "the reader took no byte of its fetch for {timeout:?}"
        )))
    }

    /// The next frame. It has to begin within `timeout`, when one is given, and each begun frame
    /// has to be complete within the frame timeout.
    fn receive(&mut self, timeout: Option<Duration>) -> Result<(Kind, Vec<u8>), End> {
        let mut deadline = timeout.map(|timeout| now() + timeout);
        loop {
            match self.receiver.receive(self.stream) {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(ReceiveError::Closed { mid_frame: false }) => return Err(End::Closed),
                Err(ReceiveError::Socket(error)) => return Err(End::Lost(error)),
                Err(error @ (ReceiveError::Closed { .. } | ReceiveError::Frame(_))) => {
                    return Err(End::Broken(error.to_string()));
                }
            }
            if self.receiver.mid_frame() && deadline.is_none() {
                deadline = Some(now() + self.shared.options.frame_timeout);
            }
            if !self.wait(PollFlags::IN, deadline.map(time_left))? {
                return Err(End::Broken("a frame did not come in time".into()));
            }
        }
    }

    /// Sleeps until the socket is ready; false after the timeout.
    fn wait(&self, flags: PollFlags, timeout: Option<Duration>) -> Result<bool, End> {
        let deadline = timeout.map(|timeout| now() + timeout);
        loop {
            let left = deadline.map(time_left);
            let ready =
                socket::wait_any(self.stream, flags, &self.shared.stop, left).map_err(End::Lost)?;
            if ready.woken {
                return Err(End::Closed);
            }
            if ready.socket {
                return Ok(true);
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
        }
    }
}

/// Why nobody more is served.
fn busy(terms: Terms) -> Option<AttachRefused> {
    let Terms::Refuse { most } = terms else {
        return None;
    };
    let code = AttachRefusal::Busy;
    let text = format!(
        "{most} readers are served already, which is the limit (readers_max of the prefill engine)"
    );
    Some(AttachRefused { code, text })
}

/// The first field in which the rank that is dialled differs from the one that is here.
fn mismatch(place: &HolderPlace, attach: &Attach) -> Option<(AttachRefusal, String)> {
    let differs = |field: &str, here: String, asked: String| {
        (here != asked).then(|| format!("{field} is {here} here, {asked} was dialled"))
    };
    let owner = &place.owner;
    let engine = || {
        let here = owner.engine.to_string();
        let text = differs("engine", here, attach.engine.to_string())?;
        Some((AttachRefusal::Engine, text))
    };
    let incarnation = || {
        let here = owner.incarnation.to_string();
        let text = differs("incarnation", here, attach.incarnation.to_string())?;
        Some((AttachRefusal::Incarnation, text))
    };
    let rank = |field, here: u32, asked: u32| {
        let text = differs(field, here.to_string(), asked.to_string())?;
        Some((AttachRefusal::Rank, text))
    };
    engine()
        .or_else(incarnation)
        .or_else(|| rank("dp_rank", owner.dp_rank.0, attach.dp_rank.0))
        .or_else(|| rank("tp_rank", place.tp_rank.0, attach.tp_rank.0))
        .or_else(|| rank("pp_rank", place.pp_rank.0, attach.pp_rank.0))
}
