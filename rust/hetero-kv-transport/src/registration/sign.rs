//! Signatures that a proxy with `--admin-key-file` asks for (docs/proxy.md, Keys).

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Shortest key that a proxy takes.
pub const KEY_BYTES_MIN: usize = 16;
const KEY_BYTES_MAX: usize = 512;
/// A larger file holds no keys.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// What one request is signed over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Signed<'a> {
    pub(super) method: &'a str,
    /// Path and query as in the request line.
    pub(super) target: &'a str,
    pub(super) timestamp_s: u64,
    pub(super) nonce: [u8; 16],
    pub(super) body: &'a [u8],
}

impl Signed<'_> {
    /// The nonce as its header has it.
    pub(super) fn nonce_hex(&self) -> String {
        hex(&self.nonce)
    }

    /// HMAC-SHA256 in hex.
    pub(super) fn sign(&self, key: &Key) -> String {
        let text = format!(
            "hetero-kv-1\n{}\n{}\n{}\n{}\n{}",
            self.method,
            self.target,
            self.timestamp_s,
            self.nonce_hex(),
            hex(&Sha256::digest(self.body))
        );
        match Hmac::<Sha256>::new_from_slice(&key.0) {
            Ok(mut mac) => {
                mac.update(text.as_bytes());
                hex(&mac.finalize().into_bytes())
            }
            // A key of any length is a good one.
            Err(_) => String::new(),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The key to sign with; never shown.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// The first key of a file as the proxy has it: one a line, blank lines and those that begin
    /// with `#` left out.
    ///
    /// # Errors
    /// A sentence that names the file and what is wrong, without what stands in it.
    pub fn read(path: &str) -> Result<Self, String> {
        let told = |error: std::io::Error| format!("{path}: {error}");
        let size = std::fs::metadata(path).map_err(told)?.len();
        if size > FILE_BYTES_MAX {
            return Err(format!("{path}: {size} bytes; at most {FILE_BYTES_MAX}"));
        }
        let text = std::fs::read(path).map_err(told)?;
        Self::parse(&text).map_err(|fault| format!("{path}: {fault}"))
    }

    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
        let key = lines
            .find(|line| !line.is_empty() && !line.starts_with(b"#"))
            .ok_or("no key in it; one a line")?;
        if !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&key.len()) {
            return Err(format!(
                "a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX} characters, not {}",
                key.len()
            ));
        }
        if !key.iter().all(u8::is_ascii_graphic) {
            return Err("a key is visible ASCII without blanks".to_owned());
        }
        Ok(Self(key.to_vec()))
    }
}
