//! One control connection: bytes in, frames out, never blocking.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use hetero_kv_core::time::Time;
use hetero_kv_core::wire::FrameDecoder;
use hetero_kv_core::wire::message::{Message, MessageError};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// A peer that has not been accepted sends a hello and nothing long.
pub(super) const STRANGER_FRAME_BYTES_MAX: usize = 64 << 10;

/// A connection whose peer takes nothing is closed when this much waits for it: four of the
/// largest frames.
const OUT_BYTES_MAX: usize = 64 << 20;

/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// A frame that has begun has to be whole by then, and a stranger has to say who it is.
pub(super) const PARTIAL_TIMEOUT: Duration = Duration::from_secs(10);

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
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: OwnedFd,
    decoder: FrameDecoder,
    out: Vec<u8>,
    sent: usize,
    /// Close as soon as everything is sent.
    pub(super) closing: bool,
    /// Since when the peer owes bytes: the rest of a frame, or its first one.
    pub(super) owed_since: Option<Time>,
}

impl Connection {
    pub(super) fn new(stream: OwnedFd, owed_since: Option<Time>) -> Self {
        Self {
            stream,
            decoder: FrameDecoder::new(),
            out: Vec::new(),
            sent: 0,
            closing: false,
            owed_since,
        }
    }

    pub(super) fn set_frame_limit(&mut self, bytes_max: usize) {
        self.decoder.set_limit(bytes_max);
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
        loop {
            let (count, _) = match recv(&self.stream, &mut buffer, RecvFlags::empty()) {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(io::Error::from(error).into()),
            };
            if count == 0 {
                return Err(Broken::Closed);
            }
            self.decoder.push(&buffer[..count]);
            while let Some((kind, payload)) =
                self.decoder.next_frame().map_err(MessageError::from)?
            {
                messages.push(Message::from_frame(kind, &payload)?);
                self.owed_since = None;
            }
        }
        if self.decoder.buffered_bytes() > 0 {
            self.owed_since.get_or_insert(now);
        }
        Ok(())
    }
}
