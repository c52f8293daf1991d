//! Who may do what: administrators and workers by signed requests, clients by a key of theirs.
//!
//! [`signature`], [`keys`] and the memory of nonces are pure.

pub mod cli;
pub mod keys;
mod nonces;
pub mod signature;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderValue, header, request};

use self::keys::Keys;
use self::nonces::{Nonces, Refused};
use self::signature::{CLOCK_SKEW_S_MAX, Claim, Signed};
use crate::openai::error::ApiError;
use crate::sync::lock;

/// Shortest key that signs: what it signs can be guessed against at leisure.
pub const ADMIN_KEY_BYTES_MIN: usize = 16;
/// Shortest key of a client, who has to ask for each guess.
pub const API_KEY_BYTES_MIN: usize = 8;
/// From the first moment at which a timestamp is good to the last, and one for the fraction.
const NONCES_KEPT_S: u64 = 2 * CLOCK_SKEW_S_MAX + 1;

/// The keys in use, and the nonces that were.
#[derive(Debug)]
pub(crate) struct Gate {
    admin: Mutex<Option<Arc<Keys>>>,
    clients: Mutex<Option<Arc<Keys>>>,
    /// Whether an engine gets the client's `Authorization`.
    forwards: AtomicBool,
    nonces: Mutex<Nonces>,
    begun_s: u64,
}

/// Seconds since 1970, as both sides of a signature have them.
pub(crate) fn now_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Whether a path needs no key: what probes and scrapers ask for says nothing of requests.
pub(crate) fn is_open(path: &str) -> bool {
    matches!(path, "/health" | "/ready" | "/metrics")
}

impl Gate {
    pub(crate) fn new(admin: Option<Keys>, clients: Option<Keys>, forwards: bool) -> Self {
        Self {
            admin: Mutex::new(admin.map(Arc::new)),
            clients: Mutex::new(clients.map(Arc::new)),
            forwards: AtomicBool::new(forwards),
            nonces: Mutex::new(Nonces::new(NONCES_KEPT_S)),
            begun_s: now_s(),
        }
    }

    /// Takes other keys; what was admitted goes on.
    pub(crate) fn set(&self, admin: Option<Keys>, clients: Option<Keys>, forwards: bool) {
        self.forwards.store(forwards, Ordering::Relaxed);
        *lock(&self.admin) = admin.map(Arc::new);
        *lock(&self.clients) = clients.map(Arc::new);
    }

    /// What a request says of its signature, before its body is read; `None` where none is needed.
    pub(crate) fn claim(&self, head: &request::Parts) -> Result<Option<Claim>, ApiError> {
        if lock(&self.admin).is_none() {
            return Ok(None);
        }
        Claim::read(&head.headers).map(Some).map_err(|name| {
            let message = format!(
                "this needs a signature, and `{name}` is missing or malformed; `hetero-kv-proxy sign` \
                 makes the three headers of one (docs/proxy.md)"
            );
            refused("signature_missing", message)
        })
    }

    /// Whether the claim holds of the whole request. A nonce counts as used from here on.
    pub(crate) fn prove(
        &self,
        claim: &Claim,
        head: &request::Parts,
        body: &[u8],
        now_s: u64,
    ) -> Result<(), ApiError> {
        let Some(keys) = lock(&self.admin).clone() else {
            return Ok(());
        };
        let told = claim.timestamp_s;
        if told.abs_diff(now_s) > CLOCK_SKEW_S_MAX {
            let message = format!(
                "the timestamp {told} is more than {CLOCK_SKEW_S_MAX} s from this proxy's clock \
                 ({now_s}); set the clocks, or sign anew"
            );
            return Err(refused("stale_timestamp", message));
        }
        let target = head.uri.path_and_query().map_or("/", |path| path.as_str());
        let signed = Signed {
            method: head.method.as_str(),
            target,
            timestamp_s: told,
            nonce: claim.nonce,
            body,
        };
        if !signed.is_signed_by(&keys, &claim.signature) {
            let message = "the signature is not that of this method, path, query, timestamp, nonce and \
                           body by a key of --admin-key-file";
            return Err(refused("bad_signature", message.to_owned()));
        }
        // What was used before this start is not known here.
        if told < self.begun_s {
            let message = format!(
                "the timestamp {told} is from before this proxy's start ({}); sign anew",
                self.begun_s
            );
            return Err(refused("stale_timestamp", message));
        }
        // Last, so that only who has a key can fill the memory.
        let taken = lock(&self.nonces).take(claim.nonce, now_s);
        taken.map_err(|why| match why {
            Refused::Replayed => refused(
                "replayed_nonce",
                "this nonce was used before; take a new one for each request".to_owned(),
            ),
            Refused::Full => ApiError::new(
                429,
                "too_many_nonces",
                "more signed requests within a minute than can be remembered",
            ),
        })
    }

    /// Whether a client may ask for something, which may be open to all; takes from its headers
    /// what engines do not get.
    pub(crate) fn admit(&self, open: bool, headers: &mut HeaderMap) -> Result<(), ApiError> {
        let keys = lock(&self.clients).clone().filter(|_| !open);
        if let Some(keys) = keys {
            let mut told = headers.get_all(header::AUTHORIZATION).iter();
            let one = told.next().filter(|_| told.next().is_none());
            let key = one.and_then(bearer).ok_or_else(|| {
                let message = "no API key; send it as `Authorization: Bearer KEY`";
                refused("missing_api_key", message.to_owned())
            })?;
            if !keys.holds(key) {
                let message = "incorrect API key".to_owned();
                return Err(refused("invalid_api_key", message));
            }
        }
        if !self.forwards.load(Ordering::Relaxed) {
            headers.remove(header::AUTHORIZATION);
        }
        Ok(())
    }
}

fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, key) = value.as_bytes().split_at_checked("bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| key.trim_ascii())
}

fn refused(code: &'static str, message: String) -> ApiError {
    ApiError::new(401, code, message)
}

#[cfg(test)]
mod tests;
