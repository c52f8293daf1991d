//! Signatures that a proxy with `--admin-key-file` asks for (docs/proxy.md, Keys).

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

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
    pub(super) fn sign(&self, key: &[u8]) -> String {
        let text = format!(
            "hetero-kv-1\n{}\n{}\n{}\n{}\n{}",
            self.method,
            self.target,
            self.timestamp_s,
            self.nonce_hex(),
            hex(&Sha256::digest(self.body))
        );
        match Hmac::<Sha256>::new_from_slice(key) {
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
