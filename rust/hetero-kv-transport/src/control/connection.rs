//! One control connection: bytes in, frames out, never blocking.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use hetero_kv_core::time::Time;
use hetero_kv_core::wire::message::{Message, MessageError};
use hetero_kv_core::wire::{FRAME_BYTES_MAX, FrameDecoder};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, getpeername, recv, send};

/// All that a peer may send before it is accepted: a hello, a proof, and nothing long.
const STRANGER_BYTES_MAX: usize = 64 << 10;

/// A connection whose peer takes nothing is closed when this much waits for it: four of the
/// largest frames.
const OUT_BYTES_MAX: usize = 64 << 20;

/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// Reads in a row, so that a peer that never stops sending holds up neither the others nor the
/// answers to itself.
const READS_MAX: usize = 16;

/// Why a connection has to be closed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("the connection was closed by the peer")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Bytes(#[from] MessageError),
    #[error("the peer takes no data: {0} bytes wait")]
    Stuck(usize),
    #[error("more than {STRANGER_BYTES_MAX} bytes came before the peer was accepted")]
    Talkative,
    #[error("{0}")]
    Late(&'static str),
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: OwnedFd,
    /// Who dialled us, where that can be told.
    pub(super) from: Option<IpAddr>,
    decoder: FrameDecoder,
    out: Vec<u8>,
    sent: usize,
    /// Since when it is to be closed as soon as everything is sent.
    closing_since: Option<Time>,
    /// Of a peer that dialled us and has not been accepted.
    stranger: Option<Stranger>,
    /// Since when the rest of a frame is owed.
    partial_since: Option<Time>,
}

#[derive(Clone, Copy, Debug)]
struct Stranger {
    since: Time,
    sent_bytes: usize,
}

impl Connection {
    /// To an engine that we dialled.
    pub(super) fn dialled(stream: OwnedFd) -> Self {
        Self {
            stream,
            from: None,
            decoder: FrameDecoder::new(),
            out: Vec::new(),
            sent: 0,
            closing_since: None,
            stranger: None,
            partial_since: None,
        }
    }

    /// From whoever dialled us.
    pub(super) fn from_stranger(stream: OwnedFd, now: Time) -> Self {
        let from = getpeername(&stream).ok().flatten();
        let from = from.and_then(|from| SocketAddr::try_from(from).ok());
        let mut connection = Self::dialled(stream);
        connection.from = from.map(|from| from.ip());
        connection.decoder.set_limit(STRANGER_BYTES_MAX);
        connection.stranger = Some(Stranger {
            since: now,
            sent_bytes: 0,
        });
        connection
    }

    /// The peer has said who it is and is taken.
    pub(super) fn accept_stranger(&mut self) {
        self.stranger = None;
        self.decoder.set_limit(FRAME_BYTES_MAX);
    }

    /// Since when a stranger has been one.
    pub(super) fn stranger_since(&self) -> Option<Time> {
        self.stranger.map(|stranger| stranger.since)
    }

    /// Takes nothing more from the peer, and ends once it has taken what is queued.
    pub(super) fn close_when_sent(&mut self, now: Time) {
        self.closing_since.get_or_insert(now);
    }

    /// Whether it ends once everything is sent.
    pub(super) fn is_closing(&self) -> bool {
        self.closing_since.is_some()
    }

    /// What to wait for. One that is closing is not read any more, so that bytes which wait there
    /// must not count as something to do.
    pub(super) fn interest(&self) -> PollFlags {
        match (self.is_closing(), self.wants_write()) {
            (true, _) => PollFlags::OUT,
            (false, true) => PollFlags::IN | PollFlags::OUT,
            (false, false) => PollFlags::IN,
        }
    }

    /// Since when the peer owes something: the rest of a frame, who it is, or to take the last
    /// words. Whole frames do not change the second, or a stranger could stay for good by asking
    /// whether we are there.
    pub(super) fn owed_since(&self) -> Option<Time> {
        [
            self.stranger_since(),
            self.partial_since,
            self.closing_since,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// The end of a connection whose debt is overdue.
    pub(super) fn overdue(&self) -> Broken {
        Broken::Late(match (self.closing_since, self.stranger) {
            (Some(_), _) => "the peer does not take why it is closed",
            (None, Some(_)) => "the peer has not said in time who it is",
            (None, None) => "the peer owes the rest of a frame",
        })
    }

    pub(super) fn wants_write(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Queues a message.
    pub(super) fn push(&mut self, message: &Message) -> Result<(), Broken> {
        let frame = message.to_frame().map_err(MessageError::from)?;
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        }
        let waiting = self.out.len() - self.sent;
        if waiting + frame.len() > OUT_BYTES_MAX {
            return Err(Broken::Stuck(waiting));
        }
        self.out.extend_from_slice(&frame);
        Ok(())
    }

    /// Sends what the socket takes.
    pub(super) fn flush(&mut self) -> Result<(), Broken> {
        while self.wants_write() {
            match send(&self.stream, &self.out[self.sent..], SendFlags::NOSIGNAL) {
                Ok(count) => self.sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    /// Reads what is there; whole messages go to `messages`, also those in front of the break.
    pub(super) fn receive(&mut self, now: Time, messages: &mut Vec<Message>) -> Result<(), Broken> {
        let mut buffer = [0; READ_BYTES];
        for _ in 0..READS_MAX {
            let (count, _) = match recv(&self.stream, &mut buffer, RecvFlags::empty()) {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(io::Error::from(error).into()),
            };
            if count == 0 {
                return Err(Broken::Closed);
            }
            if let Some(stranger) = &mut self.stranger {
                stranger.sent_bytes += count;
                if stranger.sent_bytes > STRANGER_BYTES_MAX {
                    return Err(Broken::Talkative);
                }
            }
            self.decoder.push(&buffer[..count]);
            while let Some((kind, payload)) =
                self.decoder.next_frame().map_err(MessageError::from)?
            {
                messages.push(Message::from_frame(kind, &payload)?);
                self.partial_since = None;
            }
        }
        if self.decoder.buffered_bytes() > 0 {
            self.partial_since.get_or_insert(now);
        }
        Ok(())
    }
}
