//! What goes over a socket: frames, messages, and the `kv_transfer_params` that travel through
//! routers.
//!
//! Payloads are msgpack maps: unknown fields are tolerated, unknown kinds are refused. Versions N
//! and N-1 interoperate; version 1 is the first.

pub mod card;
pub mod data;
pub mod frame;
pub mod message;
pub mod params;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use frame::{FRAME_BYTES_MAX, FrameDecoder, FrameError, HEADER_BYTES, Header, WIRE_VERSION};

/// Deepest nesting of maps and lists in a payload. Ours need 8; a bomb of nested lists in a field
/// that is skipped must not use up the decoding thread's stack.
pub const PAYLOAD_DEPTH_MAX: usize = 32;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $byte:literal,)*) => {
        /// What a frame's payload is. Bytes 1 to 31 are the control plane, 32 to 63 the data
        /// plane, 64 and up are reserved for push mode and refused by name until it is built.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($(#[$doc])* $name,)*
        }

        impl Kind {
            /// Every kind, in order of its byte.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The byte in the header.
            pub fn to_byte(self) -> u8 {
                match self {
                    $(Self::$name => $byte,)*
                }
            }

            /// The kind a header's byte names.
            pub fn from_byte(byte: u8) -> Option<Self> {
                match byte {
                    $($byte => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// Dialer's version, identity and compatibility digest.
    Hello = 1,
    /// The listener takes the pair; its identity.
    Accept = 2,
    /// The pair is refused: the fields that differ, or the reason.
    Reject = 3,
    /// An engine's ranks: caches, endpoints. Both sides send theirs.
    Layout = 4,
    /// Decode asks whether a lease is alive before it reads.
    Claim = 5,
    /// The lease is alive for so many milliseconds.
    Granted = 6,
    /// The lease is not alive.
    Gone = 7,
    /// Decode asks for more time.
    Renew = 8,
    /// These consumer ranks have read what they need.
    Ack = 9,
    /// Decode will not read.
    Release = 10,
    /// Heartbeat.
    Ping = 11,
    /// Answer to a heartbeat.
    Pong = 12,
    /// The sender closes this connection on purpose.
    Bye = 13,
    /// The listener asks the dialer to prove that it holds a key.
    Challenge = 14,
    /// The dialer's proof.
    Proof = 15,
    /// A consumer rank opens a data connection to one source rank.
    Attach = 32,
    /// The source rank takes it.
    Attached = 33,
    /// Runs to read under a lease.
    Fetch = 34,
    /// Raw bytes follow.
    FetchData = 35,
    /// A fetch's outcome, after its bytes.
    FetchEnd = 36,
    /// The source rank refuses the connection.
    AttachRefused = 37,
    /// A consumer rank brings its ends of queue pairs.
    VerbsConnect = 38,
    /// The source rank's ends of them.
    VerbsConnected = 39,
    /// The source rank makes no queue pairs.
    VerbsRefused = 40,
    /// The source rank asks the reader to prove that it holds a key.
    AttachChallenge = 41,
    /// The reader's proof.
    AttachProof = 42,
    /// Push mode: decode announces allocated blocks.
    Offer = 64,
    /// Push mode: where to write.
    Destinations = 65,
    /// Push mode: one (writer, layer) piece has arrived.
    Piece = 66,
    /// Push mode: a piece cannot be written.
    PieceFailed = 67,
    /// Push mode: nothing of this transfer can be written any more.
    Quiesced = 68,
}

/// Encodes one message as a whole frame.
pub fn encode<M: Serialize>(kind: Kind, message: &M) -> Result<Vec<u8>, FrameError> {
    let fail = |problem: String| FrameError::Payload { kind, problem };
    let payload = rmp_serde::to_vec_named(message).map_err(|error| fail(error.to_string()))?;
    if payload.len() > FRAME_BYTES_MAX {
        return Err(FrameError::TooLarge(payload.len()));
    }
    let header = Header {
        kind,
        payload_bytes: payload.len(),
    };
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    bytes.extend_from_slice(&header.to_bytes());
    bytes.extend_from_slice(&payload);
    Ok(bytes)
}

/// Decodes a frame's payload as the message its kind says. Fields this build does not know are
/// skipped; bytes behind the message, or nesting beyond [`PAYLOAD_DEPTH_MAX`], are refused.
pub fn decode<M: DeserializeOwned>(kind: Kind, payload: &[u8]) -> Result<M, FrameError> {
    let fail = |problem| FrameError::Payload { kind, problem };
    let mut rest = payload;
    let mut deserializer = rmp_serde::Deserializer::new(&mut rest);
    deserializer.set_max_depth(PAYLOAD_DEPTH_MAX);
    let message = M::deserialize(&mut deserializer).map_err(|error| fail(error.to_string()))?;
    if rest.is_empty() {
        Ok(message)
    } else {
        Err(fail(format!("{} bytes too many", rest.len())))
    }
}

#[cfg(test)]
mod tests;
