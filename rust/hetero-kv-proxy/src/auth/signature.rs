//! What an administrator's request is signed over, and with what.
//!
//! `HMAC-SHA256(key, text)` in hex, where `text` is these six, with a line feed between them:
//! `hetero-kv-1`, the method, path and query as in the request line, the timestamp (seconds since
//! 1970), the nonce (32 hex digits), and the SHA-256 of the body in hex. Pure.

use hmac::{Hmac, KeyInit, Mac};
use http::HeaderMap;
use sha2::{Digest, Sha256};

use super::keys::Keys;

/// Seconds since 1970.
pub const TIMESTAMP: &str = "x-hetero-kv-timestamp";
/// 32 hex digits, new for each request.
pub const NONCE: &str = "x-hetero-kv-nonce";
/// 64 hex digits.
pub const SIGNATURE: &str = "x-hetero-kv-signature";
/// How far the clocks of both sides may be apart, in seconds.
pub const CLOCK_SKEW_S_MAX: u64 = 30;
const VERSION: &str = "hetero-kv-1";

/// One request as it is signed.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    /// The method, in upper case.
    pub method: &'a str,
    /// Path and query as in the request line.
    pub target: &'a str,
    /// Seconds since 1970.
    pub timestamp_s: u64,
    /// Never used before.
    pub nonce: u128,
    /// The whole body; empty where there is none.
    pub body: &'a [u8],
}

impl Signed<'_> {
    fn text(&self) -> String {
        let digest = hex::encode(Sha256::digest(self.body));
        let Self {
            method,
            target,
            timestamp_s,
            nonce,
            ..
        } = self;
        format!("{VERSION}\n{method}\n{target}\n{timestamp_s}\n{nonce:032x}\n{digest}")
    }

    fn mac(&self, key: &[u8]) -> Option<Hmac<Sha256>> {
        // A key of any length is a good one.
        let mut mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
        mac.update(self.text().as_bytes());
        Some(mac)
    }

    /// The signature in hex.
    pub fn sign(&self, key: &[u8]) -> String {
        let mac = self.mac(key).map(|mac| mac.finalize().into_bytes());
        mac.map(hex::encode).unwrap_or_default()
    }

    /// Whether one of the keys made this signature; takes as long wherever it differs.
    pub(crate) fn is_signed_by(&self, keys: &Keys, signature: &[u8]) -> bool {
        let by = |key| {
            let mac = self.mac(key);
            mac.is_some_and(|mac| mac.verify_slice(signature).is_ok())
        };
        keys.iter().fold(false, |found, key| found | by(key))
    }
}

/// What a request says of its signature.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) timestamp_s: u64,
    pub(crate) nonce: u128,
    pub(crate) signature: Vec<u8>,
}

impl Claim {
    /// Reads the three headers.
    ///
    /// # Errors
    /// The name of the first that is missing or malformed.
    pub(crate) fn read(headers: &HeaderMap) -> Result<Self, &'static str> {
        let text = |name: &'static str| {
            let mut values = headers.get_all(name).iter();
            let value = values.next().filter(|_| values.next().is_none());
            value.and_then(|value| value.to_str().ok()).ok_or(name)
        };
        let bytes = |name: &'static str, count: usize| {
            let bytes = hex::decode(text(name)?).map_err(|_| name)?;
            Some(bytes).filter(|bytes| bytes.len() == count).ok_or(name)
        };
        let digits = text(TIMESTAMP)?;
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        let timestamp_s = digits.parse().ok().filter(|_| plain).ok_or(TIMESTAMP)?;
        let nonce = bytes(NONCE, 16)?.try_into().map_err(|_| NONCE)?;
        Ok(Self {
            timestamp_s,
            nonce: u128::from_be_bytes(nonce),
            signature: bytes(SIGNATURE, 32)?,
        })
    }
}

#[cfg(test)]
mod tests;
