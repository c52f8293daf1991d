//! Frames of the data plane on a non-blocking socket, received without taking a byte too many:
//! what follows a frame may be raw bytes that belong straight into KV memory.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use hetero_kv_core::wire::data::DATA_FRAME_BYTES_MAX;
use hetero_kv_core::wire::{FrameError, HEADER_BYTES, Header, Kind};
use rustix::io::{Errno, read};
use rustix::net::{SendFlags, send};

/// Why no frame came.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReceiveError {
    /// The peer closed; `mid_frame` says whether inside a frame.
    #[error("the peer closed the connection{}", if *.mid_frame { " inside a frame" } else { "" })]
    Closed {
        /// Whether some bytes of a frame had come.
        mid_frame: bool,
    },
    /// The socket broke.
    #[error("{0}")]
    Socket(io::Error),
    /// The bytes are no frame that belongs here.
    #[error("{0}")]
    Frame(#[from] FrameError),
}

/// Collects one frame at a time.
#[derive(Debug, Default)]
pub(super) struct FrameReceiver {
    buffer: Vec<u8>,
    header: Option<Header>,
}

impl FrameReceiver {
    /// Whether a frame has begun and is not complete.
    pub(super) fn mid_frame(&self) -> bool {
        !self.buffer.is_empty() || self.header.is_some()
    }

    /// The next frame; `None` when the socket has no more bytes for now.
    pub(super) fn receive(
        &mut self,
        stream: &OwnedFd,
    ) -> Result<Option<(Kind, Vec<u8>)>, ReceiveError> {
        let header = match self.header {
            Some(header) => header,
            None => {
                if !self.fill(stream, HEADER_BYTES)? {
                    return Ok(None);
                }
                let header = parse(&self.buffer)?;
                self.buffer.clear();
                self.header = Some(header);
                header
            }
        };
        if !self.fill(stream, header.payload_bytes)? {
            return Ok(None);
        }
        self.header = None;
        Ok(Some((header.kind, std::mem::take(&mut self.buffer))))
    }

    /// Reads until the buffer has `bytes`; whether it has.
    fn fill(&mut self, stream: &OwnedFd, bytes: usize) -> Result<bool, ReceiveError> {
        while self.buffer.len() < bytes {
            let have = self.buffer.len();
            self.buffer.resize(bytes, 0);
            let result = read(stream, &mut self.buffer[have..]);
            self.buffer.truncate(have + result.unwrap_or(0));
            match result {
                Ok(0) => {
                    return Err(ReceiveError::Closed {
                        mid_frame: self.mid_frame(),
                    });
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(ReceiveError::Socket(error.into())),
            }
        }
        Ok(true)
    }
}

/// Parses a header and applies the data plane's own, smaller limit.
fn parse(bytes: &[u8]) -> Result<Header, FrameError> {
    let bytes = bytes
        .first_chunk::<HEADER_BYTES>()
        .copied()
        .unwrap_or_default();
    let header = Header::parse(bytes)?;
    if header.payload_bytes > DATA_FRAME_BYTES_MAX {
        return Err(FrameError::TooLarge(header.payload_bytes));
    }
    Ok(header)
}

/// Frames waiting for room in the socket.
#[derive(Debug, Default)]
pub(super) struct FrameSender {
    queue: VecDeque<Vec<u8>>,
    sent_bytes: usize,
}

impl FrameSender {
    /// Adds an encoded frame.
    pub(super) fn push(&mut self, frame: Vec<u8>) {
        self.queue.push_back(frame);
    }

    /// Whether everything was handed to the kernel.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Hands over as much as the socket takes.
    pub(super) fn flush(&mut self, stream: &OwnedFd) -> io::Result<()> {
        while let Some(frame) = self.queue.front() {
            match send(stream, &frame[self.sent_bytes..], SendFlags::NOSIGNAL) {
                Ok(sent) => self.sent_bytes += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            if self.sent_bytes == frame.len() {
                self.queue.pop_front();
                self.sent_bytes = 0;
            }
        }
        Ok(())
    }
}
