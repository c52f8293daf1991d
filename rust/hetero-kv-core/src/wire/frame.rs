//! Length-prefixed frames, decoded incrementally and bounded before anything is allocated.
//!
//! A frame is an 8-byte header and a msgpack map:
//!
//! ```text
//! offset  bytes  field
//! 0       2      magic "hK"
//! 2       1      wire version (see [`WIRE_VERSION`])
//! 3       1      kind (see [`Kind`])
//! 4       4      payload length, little endian, at most [`FRAME_BYTES_MAX`]
//! ```

use super::Kind;

/// First bytes of every frame.
pub const MAGIC: [u8; 2] = *b"hK";

/// Wire version this build speaks. History: 1 = first.
pub const WIRE_VERSION: u8 = 1;

/// Bytes in front of each payload.
pub const HEADER_BYTES: usize = 8;

/// Largest payload accepted. A layout answer of 512 ranks x 128 layers stays below it; a fetch of
/// a million runs is cut into several.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

/// Buffer that a decoder with nothing in it keeps.
const IDLE_BYTES_MAX: usize = 1 << 20;

/// Bytes that are no frame of ours. The connection they came on is closed; nothing else is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not our protocol at all (an HTTP client, a scanner).
    #[error("not a hetero_kv frame: bad magic {0:02x?}")]
    BadMagic([u8; 2]),
    /// A version this build does not speak.
    #[error("peer speaks wire version {theirs}, this build speaks {ours}")]
    Version {
        /// In the peer's header.
        theirs: u8,
        /// [`WIRE_VERSION`].
        ours: u8,
    },
    /// A kind that wire version 1 does not have.
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    /// A length above [`FRAME_BYTES_MAX`].
    #[error("frame of {0} bytes is over the limit of {FRAME_BYTES_MAX}")]
    TooLarge(usize),
    /// A payload that is not the map its kind says.
    #[error("cannot decode {kind:?}: {problem}")]
    Payload {
        /// The frame's kind.
        kind: Kind,
        /// What the decoder met.
        problem: String,
    },
}

/// Parsed header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the payload is.
    pub kind: Kind,
    /// Length of the payload in bytes.
    pub payload_bytes: usize,
}

impl Header {
    /// Parses and bounds a header.
    pub fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [m0, m1, version, kind, l0, l1, l2, l3] = bytes;
        if [m0, m1] != MAGIC {
            return Err(FrameError::BadMagic([m0, m1]));
        }
        if version != WIRE_VERSION {
            return Err(FrameError::Version {
                theirs: version,
                ours: WIRE_VERSION,
            });
        }
        let kind = Kind::from_byte(kind).ok_or(FrameError::UnknownKind(kind))?;
        let payload_bytes = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if payload_bytes > FRAME_BYTES_MAX {
            return Err(FrameError::TooLarge(payload_bytes));
        }
        Ok(Self {
            kind,
            payload_bytes,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let length = u32::try_from(self.payload_bytes)
            .unwrap_or(u32::MAX)
            .to_le_bytes();
        [
            MAGIC[0],
            MAGIC[1],
            WIRE_VERSION,
            self.kind.to_byte(),
            length[0],
            length[1],
            length[2],
            length[3],
        ]
    }
}

/// Collects bytes as they come and hands out whole frames.
#[derive(Debug)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    consumed: usize,
    payload_bytes_max: usize,
}

impl Default for FrameDecoder {
    fn default() -> Self {
        Self {
            buffer: Vec::new(),
            consumed: 0,
            payload_bytes_max: FRAME_BYTES_MAX,
        }
    }
}

impl FrameDecoder {
    /// An empty decoder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Refuses payloads above `payload_bytes_max` from here on: a peer that has not said who it is
    /// gets less memory than one that has.
    pub fn set_limit(&mut self, payload_bytes_max: usize) {
        self.payload_bytes_max = payload_bytes_max.min(FRAME_BYTES_MAX);
    }

    /// Takes bytes as the socket gave them.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.consumed > 0 && self.consumed == self.buffer.len() {
            // A connection that carried one large frame must not keep its size for good.
            if self.buffer.capacity() > IDLE_BYTES_MAX {
                self.buffer = Vec::new();
            }
            self.buffer.clear();
            self.consumed = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Bytes held and not yet handed out.
    pub fn buffered_bytes(&self) -> usize {
        self.buffer.len() - self.consumed
    }

    /// Memory set aside.
    #[cfg(test)]
    pub(super) fn capacity_bytes(&self) -> usize {
        self.buffer.capacity()
    }

    /// The next whole frame, `None` when more bytes are needed. After an error the stream has no
    /// frame boundary left, so the connection has to be closed.
    pub fn next_frame(&mut self) -> Result<Option<(Kind, Vec<u8>)>, FrameError> {
        let rest = &self.buffer[self.consumed..];
        let Some(header) = rest.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::parse(*header)?;
        if header.payload_bytes > self.payload_bytes_max {
            return Err(FrameError::TooLarge(header.payload_bytes));
        }
        let Some(payload) = rest[HEADER_BYTES..].get(..header.payload_bytes) else {
            return Ok(None);
        };
        let payload = payload.to_vec();
        self.consumed += HEADER_BYTES + header.payload_bytes;
        if self.consumed > FRAME_BYTES_MAX {
            self.buffer.drain(..self.consumed);
            self.consumed = 0;
        }
        Ok(Some((header.kind, payload)))
    }
}
