//! Names of things, each with its own type, so that a rank is never passed where a block belongs.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Longest engine id accepted from a peer, in bytes; vLLM's own are a UUID with a `_dpN` suffix.
pub const ENGINE_ID_BYTES_MAX: usize = 256;

/// One engine: one vLLM scheduler and its TP x PP workers. vLLM appends `_dpN` for DP rank N.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct EngineId(Arc<str>);

/// A text that cannot be an id: empty, too long, or not of the form the field needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct InvalidId {
    /// The field's name in `kv_transfer_params` or on the wire.
    pub field: &'static str,
    /// What is wrong with the value, without quoting it (it may be huge).
    pub problem: &'static str,
}

impl EngineId {
    /// Takes 1 to [`ENGINE_ID_BYTES_MAX`] bytes of text without control characters.
    pub fn new(text: &str) -> Result<Self, InvalidId> {
        let fail = |problem| {
            Err(InvalidId {
                field: "engine_id",
                problem,
            })
        };
        if text.is_empty() {
            return fail("is empty");
        }
        if text.len() > ENGINE_ID_BYTES_MAX {
            return fail("is longer than 256 bytes");
        }
        if text.chars().any(char::is_control) {
            return fail("contains control characters");
        }
        Ok(Self(text.into()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for EngineId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::new(&text).map_err(serde::de::Error::custom)
    }
}

/// One start of an engine, drawn at random by its scheduler side. A user-set engine id stays equal
/// over restarts; the incarnation does not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

macro_rules! hex_id {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $field:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; $bytes]);

        impl $name {
            /// Parses exactly the right number of hexadecimal digits.
            pub fn parse(text: &str) -> Result<Self, InvalidId> {
                let mut bytes = [0; $bytes];
                match hex::decode_to_slice(text, &mut bytes) {
                    Ok(()) => Ok(Self(bytes)),
                    Err(_) => Err(InvalidId {
                        field: $field,
                        problem: concat!("is not ", $bytes, " bytes in hexadecimal"),
                    }),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&hex::encode(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&hex::encode(self.0))
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                Self::parse(&text).map_err(serde::de::Error::custom)
            }
        }
    };
}

hex_id!(
    /// One movement of one prompt's KV: 128 random bits, minted by the proxy or by the prefill
    /// engine. It belongs to the first (engine, incarnation, prompt digest) that uses it.
    TransferId, 16, "transfer_id"
);

hex_id!(
    /// What a prompt is, independent of block size and hash algorithm: SHA-256 over its token ids,
    /// LoRA name, multimodal hashes and cache salt.
    PromptDigest, 32, "prompt_digest"
);

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

index!(
    /// vLLM's `data_parallel_index` (never `data_parallel_rank`: a dense DP rank sees 0 there).
    DpRank
);
index!(
    /// Rank inside one engine's tensor parallel group.
    TpRank
);
index!(
    /// Rank inside one engine's pipeline.
    PpRank
);
index!(
    /// Index of a block in one rank's paged cache; equal on all ranks of an engine.
    BlockId
);
index!(
    /// Index of a lease on its engine's lease pages.
    Slot
);

/// How often a lease slot has been re-used. The holder bumps it before the blocks of a lease are
/// freed, so a reader that still sees its own epoch after the data read bytes that were alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch that follows the release of this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Where a lease is fenced: a slot and the epoch that must still stand in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseRef {
    /// Index on the lease page of each of the engine's ranks.
    pub slot: Slot,
    /// Value the page holds while the lease is alive.
    pub epoch: Epoch,
}
