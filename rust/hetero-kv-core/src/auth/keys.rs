//! Keys of a file: one a line, blank lines and those that begin with `#` left out.
//!
//! The rules are those of the proxy's key files. The first key signs and each is taken, so that all
//! engines can change to another key one after the other.

use std::fmt;

use super::proof::Prover;

/// A larger file holds no keys.
pub const KEY_FILE_BYTES_MAX: u64 = 256 << 10;
/// Shortest key: what is signed with it can be guessed against at leisure.
pub const KEY_BYTES_MIN: usize = 16;
/// Longest key.
pub const KEY_BYTES_MAX: usize = 512;

/// At least one key; never shown.
#[derive(Clone)]
pub struct Keys {
    first: Box<[u8]>,
    others: Vec<Box<[u8]>>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", 1 + self.others.len())
    }
}

impl Keys {
    /// Takes a file's text apart.
    ///
    /// # Errors
    /// A sentence that names the line, without what stands in it.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let mut keys: Vec<Box<[u8]>> = Vec::new();
        for (line, number) in text.split(|byte| *byte == b'\n').zip(1..) {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            if !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&line.len()) {
                return Err(format!(
                    "line {number}: a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX} characters, not {}",
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
        let first = keys.remove(0);
        Ok(Self {
            first,
            others: keys,
        })
    }

    /// The key to sign with.
    pub fn first(&self) -> &[u8] {
        &self.first
    }

    /// The key by which `prover` made this proof, if it is one of these. Takes as long whichever it
    /// is, and however much of the proof is right.
    pub fn that_made(&self, prover: &impl Prover, proof: &[u8]) -> Option<&[u8]> {
        let mut found = None;
        for key in std::iter::once(&self.first).chain(&self.others) {
            if prover.is_proven(key, proof) {
                found = Some(&**key);
            }
        }
        found
    }
}
