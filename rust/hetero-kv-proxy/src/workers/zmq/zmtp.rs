//! The receiving end of ZMTP 3.0 (ZeroMQ RFC 23), mechanism NULL: what a ROUTER needs that never
//! answers.
//!
//! Written here because what arrives must have limits: the frame length that a stranger names is
//! never set aside unseen, and neither a handshake nor a message may take longer than told.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::time::timeout;

const GREETING_BYTES: usize = 64;
const MECHANISM: std::ops::Range<usize> = 12..32;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// A PING may carry so much for its PONG.
const PING_CONTEXT_BYTES_MAX: usize = 16;

/// How much, and how slowly, a peer may send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Of one frame, commands too.
    pub(super) frame_bytes_max: usize,
    /// Frames of one message.
    pub(super) frames_max: usize,
    /// From the connection to the end of the handshake, and from a frame's first byte to the last
    /// of its message.
    pub(super) within: Duration,
    /// Silence between messages.
    pub(super) idle: Duration,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// The peer closed it between two messages.
    #[error("closed")]
    Closed,
    /// No message for [`Limits::idle`].
    #[error("silent for {} ms", .0.as_millis())]
    Idle(Duration),
    /// What began did not end within [`Limits::within`].
    #[error("not complete within {} ms", .0.as_millis())]
    Slow(Duration),
    /// It is not ZMTP, or not for us.
    #[error("{0}")]
    Protocol(String),
    /// A frame over [`Limits::frame_bytes_max`], or a message of too many.
    #[error("{0}")]
    TooLarge(String),
    /// The connection broke, or ended within a message.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A frame as it stands on the wire.
struct Frame {
    flags: u8,
    body: Vec<u8>,
}

/// A peer that has shaken hands.
#[derive(Debug)]
pub(super) struct Peer<S> {
    stream: BufReader<S>,
    limits: Limits,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Peer<S> {
    /// Shakes hands with whoever dialled.
    ///
    /// # Errors
    /// Another protocol, version or mechanism, a socket type that does not talk to a ROUTER, or too
    /// slow.
    pub(super) async fn accept(stream: S, limits: Limits) -> Result<Self, Fault> {
        let mut peer = Self {
            stream: BufReader::new(stream),
            limits,
        };
        match timeout(limits.within, peer.handshake()).await {
            Ok(done) => done.map(|()| peer),
            Err(_) => Err(Fault::Slow(limits.within)),
        }
    }

    async fn handshake(&mut self) -> Result<(), Fault> {
        let mut greeting = [0; GREETING_BYTES];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[MECHANISM][..4].copy_from_slice(b"NULL");
        self.stream.get_mut().write_all(&greeting).await?;
        let mut told = [0; GREETING_BYTES];
        self.stream.read_exact(&mut told).await?;
        if told[0] != 0xff || told[9] != 0x7f {
            return Err(protocol("does not speak ZMTP"));
        }
        if told[10] < 3 {
            return Err(protocol(format!(
                "speaks ZMTP {}; 3 is needed (ZeroMQ 4.0 or newer)",
                told[10]
            )));
        }
        let mechanism = told[MECHANISM].split(|byte| *byte == 0).next();
        if mechanism != Some(b"NULL") {
            let name = String::from_utf8_lossy(mechanism.unwrap_or_default()).into_owned();
            return Err(protocol(format!(
                "wants the mechanism {name:?}; only NULL is served"
            )));
        }
        let ready = b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0";
        self.send_command(ready).await?;
        let frame = self.frame().await?.ok_or_else(cut)?;
        let properties = (frame.flags & COMMAND != 0)
            .then(|| frame.body.strip_prefix(b"\x05READY"))
            .flatten()
            .ok_or_else(|| protocol("did not send READY"))?;
        let kind = property(properties, "socket-type")?
            .ok_or_else(|| protocol("does not say its Socket-Type"))?;
        if !matches!(kind, b"DEALER" | b"REQ" | b"ROUTER") {
            let kind = String::from_utf8_lossy(kind).into_owned();
            return Err(protocol(format!(
                "is a {kind:?} socket; a DEALER registers"
            )));
        }
        Ok(())
    }

    /// The frames of the next message.
    ///
    /// # Errors
    /// The end of the connection and why.
    pub(super) async fn message(&mut self) -> Result<Vec<Vec<u8>>, Fault> {
        let begun = timeout(self.limits.idle, self.begun()).await;
        if !begun.map_err(|_| Fault::Idle(self.limits.idle))?? {
            return Err(Fault::Closed);
        }
        match timeout(self.limits.within, self.frames()).await {
            Ok(frames) => frames,
            Err(_) => Err(Fault::Slow(self.limits.within)),
        }
    }

    /// Waits for a message's first frame, and answers the pings before it. False at the end.
    async fn begun(&mut self) -> Result<bool, Fault> {
        loop {
            let Some(flags) = self.peek().await? else {
                return Ok(false);
            };
            if flags & COMMAND == 0 {
                return Ok(true);
            }
            let frame = timeout(self.limits.within, self.frame())
                .await
                .map_err(|_| Fault::Slow(self.limits.within))??;
            self.follow(&frame.ok_or_else(cut)?).await?;
        }
    }

    async fn frames(&mut self) -> Result<Vec<Vec<u8>>, Fault> {
        let mut frames = Vec::new();
        loop {
            let frame = self.frame().await?.ok_or_else(cut)?;
            if frame.flags & COMMAND != 0 {
                self.follow(&frame).await?;
                continue;
            }
            if frames.len() == self.limits.frames_max {
                return Err(Fault::TooLarge(format!(
                    "a message of more than {} frames",
                    self.limits.frames_max
                )));
            }
            frames.push(frame.body);
            if frame.flags & MORE == 0 {
                return Ok(frames);
            }
        }
    }

    /// Answers a PING; other commands mean nothing to a ROUTER.
    async fn follow(&mut self, frame: &Frame) -> Result<(), Fault> {
        // Two bytes of time to live stand before the context.
        let Some(context) = frame
            .body
            .strip_prefix(b"\x04PING")
            .and_then(|rest| rest.get(2..))
        else {
            return Ok(());
        };
        if context.len() > PING_CONTEXT_BYTES_MAX {
            return Err(protocol("a PING with too long a context"));
        }
        let pong = [b"\x04PONG", context].concat();
        // A peer that does not read must not hold this connection for ever.
        timeout(self.limits.within, self.send_command(&pong))
            .await
            .map_err(|_| Fault::Slow(self.limits.within))?
    }

    async fn send_command(&mut self, body: &[u8]) -> Result<(), Fault> {
        // Commands of ours are shorter than a long frame.
        let frame = [&[COMMAND, body.len() as u8], body].concat();
        self.stream.get_mut().write_all(&frame).await?;
        Ok(())
    }

    /// The first byte to come, left where it is; `None` at the end.
    async fn peek(&mut self) -> Result<Option<u8>, Fault> {
        use tokio::io::AsyncBufReadExt;
        Ok(self.stream.fill_buf().await?.first().copied())
    }

    /// The next frame; `None` at the end of the connection.
    async fn frame(&mut self) -> Result<Option<Frame>, Fault> {
        let Some(flags) = self.peek().await? else {
            return Ok(None);
        };
        self.stream.read_u8().await?;
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(protocol(format!("a frame with the flags {flags:#04x}")));
        }
        let length = match flags & LONG {
            0 => u64::from(self.stream.read_u8().await?),
            _ => self.stream.read_u64().await?,
        };
        let max = self.limits.frame_bytes_max;
        let length = usize::try_from(length).ok().filter(|length| *length <= max);
        let length =
            length.ok_or_else(|| Fault::TooLarge(format!("a frame of more than {max} bytes")))?;
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).await?;
        Ok(Some(Frame { flags, body }))
    }
}

/// One property of a READY command; names are compared without regard to case.
fn property<'a>(mut properties: &'a [u8], wanted: &str) -> Result<Option<&'a [u8]>, Fault> {
    let short = || protocol("a READY that is cut short");
    while let Some((length, rest)) = properties.split_first() {
        let (name, rest) = rest
            .split_at_checked(usize::from(*length))
            .ok_or_else(short)?;
        let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(short)?;
        let length = u32::from_be_bytes(*length) as usize;
        let (value, rest) = rest.split_at_checked(length).ok_or_else(short)?;
        if name.eq_ignore_ascii_case(wanted.as_bytes()) {
            return Ok(Some(value));
        }
        properties = rest;
    }
    Ok(None)
}

fn protocol(text: impl Into<String>) -> Fault {
    Fault::Protocol(text.into())
}

fn cut() -> Fault {
    Fault::Io(io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests;
