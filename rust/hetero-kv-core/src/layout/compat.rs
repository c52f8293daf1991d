//! The properties that must be equal before a byte moves.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Most fields of one side.
pub const COMPAT_FIELDS_MAX: usize = 64;
/// Longest field name, in bytes.
pub const COMPAT_NAME_BYTES_MAX: usize = 64;
/// Longest value, in bytes.
pub const COMPAT_VALUE_BYTES_MAX: usize = 4096;

/// Characters of a value that a message shows.
const SHOWN_CHARS_MAX: usize = 200;

/// Names of the fields that every side states. A side may state more; they must be equal too.
pub mod field {
    /// Model name or path as configured.
    pub const MODEL: &str = "model";
    /// Revision of the model.
    pub const REVISION: &str = "revision";
    /// Type of the activations.
    pub const DTYPE: &str = "dtype";
    /// Type of the cache's elements.
    pub const KV_CACHE_DTYPE: &str = "kv_cache_dtype";
    /// Where the scales of a quantised cache live.
    pub const KV_SCALES: &str = "kv_scales";
    /// KV heads in all, before any cut over ranks.
    pub const KV_HEADS: &str = "kv_heads";
    /// Elements of one head; of the latent with its rope part for MLA.
    pub const HEAD_SIZE: &str = "head_size";
    /// `true` for multi-head latent attention.
    pub const MLA: &str = "mla";
    /// Tokens of a block.
    pub const BLOCK_SIZE: &str = "block_size";
    /// What a (block, head) page looks like inside.
    pub const PAGE_FORMAT: &str = "page_format";
    /// Count and hash of the sorted layer names.
    pub const LAYERS: &str = "layers";
    /// Attention backend, where its page is its own.
    pub const ATTENTION_BACKEND: &str = "attention_backend";
    /// Kinds of the KV cache groups.
    pub const GROUP_KINDS: &str = "group_kinds";
    /// Tokens of the sliding window, per group.
    pub const SLIDING_WINDOW: &str = "sliding_window";
}

/// One side's properties, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    try_from = "BTreeMap<String, String>",
    into = "BTreeMap<String, String>"
)]
pub struct CompatFields(BTreeMap<String, String>);

/// A property that cannot be stated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompatError {
    /// A name is not 1 to 64 of `a-z`, `0-9`, `_`.
    #[error("a compatibility field's name is not 1 to 64 of a-z, 0-9 and _")]
    Name,
    /// A value is longer than [`COMPAT_VALUE_BYTES_MAX`].
    #[error("compatibility field {field} has a value of {bytes} bytes, above 4096")]
    Value {
        /// The field.
        field: String,
        /// Its value's length.
        bytes: usize,
    },
    /// A field is stated twice.
    #[error("compatibility field {field} is stated twice")]
    Duplicate {
        /// The field.
        field: String,
    },
    /// There are more than [`COMPAT_FIELDS_MAX`].
    #[error("more than 64 compatibility fields")]
    TooMany,
}

/// A field that is not equal on both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldDifference {
    /// The field.
    pub field: String,
    /// Our value; absent where we do not state the field.
    pub ours: Option<String>,
    /// The peer's value; absent where it does not state the field.
    pub theirs: Option<String>,
}

impl fmt::Display for FieldDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| match value {
            None => "(not stated)".to_owned(),
            Some(text) => {
                let mut shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
                if shown.len() < text.len() {
                    shown.push_str("...");
                }
                shown
            }
        };
        write!(
            f,
            "{}: ours {}, theirs {}",
            self.field,
            shown(&self.ours),
            shown(&self.theirs)
        )
    }
}

impl CompatFields {
    /// No fields yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// States one more field.
    ///
    /// # Errors
    /// [`CompatError`] for a name or value out of bounds, a second value, or too many fields.
    pub fn insert(&mut self, name: &str, value: impl fmt::Display) -> Result<(), CompatError> {
        let value = value.to_string();
        check_field(name, &value)?;
        if self.0.contains_key(name) {
            return Err(CompatError::Duplicate {
                field: name.to_owned(),
            });
        }
        if self.0.len() == COMPAT_FIELDS_MAX {
            return Err(CompatError::TooMany);
        }
        self.0.insert(name.to_owned(), value);
        Ok(())
    }

    /// A field's value.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// All fields, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// SHA-256 over the fields in order of their names, each text preceded by its length as four
    /// little-endian bytes: equal digests mean equal fields, and no two texts can be shifted into
    /// one another.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let mut text = |text: &str| {
            // Lengths are bounded by the constants above, far below 2^32.
            hash.update((text.len() as u32).to_le_bytes());
            hash.update(text.as_bytes());
        };
        text("hetero_kv compatibility 1");
        for (name, value) in &self.0 {
            text(name);
            text(value);
        }
        hash.finalize().into()
    }

    /// The fields that are not equal, by name. Empty exactly when the digests are equal.
    pub fn difference(&self, theirs: &Self) -> Vec<FieldDifference> {
        let names: std::collections::BTreeSet<&str> = self
            .0
            .keys()
            .chain(theirs.0.keys())
            .map(String::as_str)
            .collect();
        names
            .into_iter()
            .filter(|name| self.get(name) != theirs.get(name))
            .map(|name| FieldDifference {
                field: name.to_owned(),
                ours: self.get(name).map(str::to_owned),
                theirs: theirs.get(name).map(str::to_owned),
            })
            .collect()
    }
}

impl TryFrom<BTreeMap<String, String>> for CompatFields {
    type Error = CompatError;

    fn try_from(fields: BTreeMap<String, String>) -> Result<Self, CompatError> {
        if fields.len() > COMPAT_FIELDS_MAX {
            return Err(CompatError::TooMany);
        }
        for (name, value) in &fields {
            check_field(name, value)?;
        }
        Ok(Self(fields))
    }
}

impl From<CompatFields> for BTreeMap<String, String> {
    fn from(fields: CompatFields) -> Self {
        fields.0
    }
}

fn check_field(name: &str, value: &str) -> Result<(), CompatError> {
    let letters = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
    if name.is_empty() || name.len() > COMPAT_NAME_BYTES_MAX || !name.bytes().all(letters) {
        return Err(CompatError::Name);
    }
    if value.len() > COMPAT_VALUE_BYTES_MAX {
        return Err(CompatError::Value {
            field: name.to_owned(),
            bytes: value.len(),
        });
    }
    Ok(())
}
