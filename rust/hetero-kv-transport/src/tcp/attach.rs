//! Dialling a rank's data listener and being taken by it: how `tcp` begins, and how `verbs` makes
//! its queue pairs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use hetero_kv_core::auth::Keys;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::data::{Attach, AttachRefusal, AttachRefused, Attached};
use hetero_kv_core::wire::{Kind, decode, encode};
use rustix::event::PollFlags;

use super::framing::{FrameReceiver, FrameSender};
use super::prove::Greeting;
use super::socket;
use crate::error::{ReadFailureKind, TransportError};
use crate::transport::{Interrupt, Source};

/// A connection that the holder has taken.
pub(crate) struct AttachedStream {
    pub(super) stream: OwnedFd,
    pub(super) receiver: FrameReceiver,
    pub(super) sender: FrameSender,
}

impl AsFd for AttachedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Dials the listener at `host:port`, says whom we expect there and waits for the answer; with keys
/// both sides prove that they hold one.
pub(crate) fn reach(
    host: &str,
    port: u16,
    source: &Source,
    deadline: Time,
    keys: Option<&Keys>,
    interrupt: &Interrupt<'_>,
) -> Result<AttachedStream, TransportError> {
    let stream = socket::dial(host, port, deadline, interrupt)?;
    let mut attached = AttachedStream {
        stream,
        receiver: FrameReceiver::default(),
        sender: FrameSender::default(),
    };
    let route = &source.route;
    let mut greeting = Greeting::begin(keys)?;
    let attach = Attach {
        engine: route.engine().clone(),
        incarnation: route.incarnation(),
        dp_rank: route.dp_rank(),
        tp_rank: route.tp_rank(),
        pp_rank: route.pp_rank(),
        nonce: greeting.as_ref().map(Greeting::nonce),
    };
    let frame = encode(Kind::Attach, &attach).map_err(|error| {
        TransportError::new(ReadFailureKind::Local, "Attach", error.to_string())
    })?;
    let (mut kind, mut payload) = attached.exchange(frame, "Attach", deadline, interrupt)?;
    if kind == Kind::AttachChallenge
        && let Some(greeting) = &mut greeting
    {
        (kind, payload) = greeting.prove(&attach, &payload, &mut attached, deadline, interrupt)?;
    }
    if kind == Kind::AttachRefused {
        return Err(match decode::<AttachRefused>(kind, &payload) {
            Ok(refused) => refusal(refused),
            Err(error) => unreachable("Attach", error),
        });
    }
    if kind != Kind::Attached {
        return Err(unreachable(
            "Attach",
            format!("{kind:?} came as the answer"),
        ));
    }
    let answer: Attached = decode(kind, &payload).map_err(|error| unreachable("Attach", error))?;
    if let Some(greeting) = &greeting {
        greeting.check(&attach, &answer)?;
    }
    let announced: Vec<u64> = source.regions.iter().map(|region| region.bytes).collect();
    if answer.region_bytes != announced {
        return Err(TransportError::new(
            ReadFailureKind::Refused,
            "Attach",
            "the holder's regions are not of the lengths that its engine announced",
        ));
    }
    Ok(attached)
}

impl AttachedStream {
    /// Sends one frame and waits for the next one to come.
    pub(crate) fn exchange(
        &mut self,
        frame: Vec<u8>,
        call: &'static str,
        deadline: Time,
        interrupt: &Interrupt<'_>,
    ) -> Result<(Kind, Vec<u8>), TransportError> {
        self.sender.push(frame);
        while !self.sender.is_empty() {
            socket::wait_ready(&self.stream, PollFlags::OUT, deadline, interrupt)?;
            self.sender
                .flush(&self.stream)
                .map_err(|error| unreachable(call, error))?;
        }
        loop {
            socket::wait_ready(&self.stream, PollFlags::IN, deadline, interrupt)?;
            match self.receiver.receive(&self.stream) {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(error) => return Err(unreachable(call, error)),
            }
        }
    }

    /// Looks at a connection on which nothing is to come any more: an error when it has ended, or
    /// when something came.
    pub(crate) fn expect_silence(&mut self) -> Result<(), String> {
        match self.receiver.receive(&self.stream) {
            Ok(None) => Ok(()),
            Ok(Some((kind, _))) => Err(format!("{kind:?} came and nothing was asked")),
            Err(error) => Err(error.to_string()),
        }
    }
}

pub(super) fn unreachable(call: &'static str, problem: impl ToString) -> TransportError {
    TransportError::new(ReadFailureKind::Unreachable, call, problem.to_string())
}

fn refusal(refused: AttachRefused) -> TransportError {
    let kind = match refused.code {
        AttachRefusal::Incarnation => ReadFailureKind::Incarnation,
        AttachRefusal::Engine
        | AttachRefusal::Rank
        | AttachRefusal::NotReady
        | AttachRefusal::Busy
        | AttachRefusal::Unauthenticated
        | AttachRefusal::Unknown => ReadFailureKind::Refused,
    };
    // The peer's words, bounded: they go to our log.
    let text: String = refused.text.chars().take(500).collect();
    TransportError::new(kind, "Attach", text)
}
