//! Keys in files: one a line, blank lines and those that begin with `#` left out. A second key lets
//! both sides change one after the other.

use std::fmt;
use std::path::Path;

use sha2::{Digest, Sha256};

/// A larger file holds no keys.
const FILE_BYTES_MAX: u64 = 256 << 10;
const KEY_BYTES_MAX: usize = 512;

/// Keys of one file; never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    keys: Vec<Box<[u8]>>,
    /// Of each, so that a comparison takes as long whatever is compared.
    digests: Vec<[u8; 32]>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.keys.len())
    }
}

impl Keys {
    /// Reads a file of keys of at least `key_bytes_min` bytes.
    ///
    /// # Errors
    /// A sentence that names the file, and the line without what stands in it.
    pub fn read(path: &Path, key_bytes_min: usize) -> Result<Self, String> {
        let at = path.display();
        let told = |error: std::io::Error| format!("{at}: {error}");
        let size = std::fs::metadata(path).map_err(told)?.len();
        if size > FILE_BYTES_MAX {
            return Err(format!("{at}: {size} bytes; at most {FILE_BYTES_MAX}"));
        }
        let text = std::fs::read(path).map_err(told)?;
        Self::parse(&text, key_bytes_min).map_err(|fault| format!("{at}: {fault}"))
    }

    /// Takes a file's text apart.
    ///
    /// # Errors
    /// As [`Keys::read`].
    pub fn parse(text: &[u8], key_bytes_min: usize) -> Result<Self, String> {
        let mut keys: Vec<Box<[u8]>> = Vec::new();
        for (line, number) in text.split(|byte| *byte == b'\n').zip(1..) {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            if !(key_bytes_min..=KEY_BYTES_MAX).contains(&line.len()) {
                return Err(format!(
                    "line {number}: a key has {key_bytes_min} to {KEY_BYTES_MAX} characters, not {}",
                    line.len()
                ));
            }
            if !line.iter().all(u8::is_ascii_graphic) {
                return Err(format!(
                    "line {number}: a key is visible ASCII without blanks"
                ));
            }
            keys.push(line.into());
        }
        if keys.is_empty() {
            return Err("no key in it; one a line".to_owned());
        }
        let digests = keys.iter().map(|key| Sha256::digest(key).into()).collect();
        Ok(Self { keys, digests })
    }

    /// The first key: the one to sign with.
    pub fn first(&self) -> &[u8] {
        // There is at least one.
        self.keys.first().map_or(&[], |key| key)
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.keys.iter().map(|key| &**key)
    }

    /// Whether this is one of the keys. Takes as long whichever it is, and however much of it is
    /// right.
    pub fn holds(&self, told: &[u8]) -> bool {
        let told: [u8; 32] = Sha256::digest(told).into();
        let mut found = false;
        for known in &self.digests {
            let unlike = known
                .iter()
                .zip(&told)
                .fold(0, |unlike, (a, b)| unlike | (a ^ b));
            found |= std::hint::black_box(unlike) == 0;
        }
        found
    }
}

#[cfg(test)]
mod tests;
