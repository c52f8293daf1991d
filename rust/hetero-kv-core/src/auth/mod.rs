//! Proof that a peer holds a shared key, for the control plane's handshake and the data listener.
//!
//! ```text
//! dialer                              listener
//! first frame with a nonce        ->
//!                                 <-  challenge with a nonce
//! proof of the dialer             ->
//!                                 <-  acceptance with a proof of the listener
//! ```
//!
//! A proof is `HMAC-SHA-256(key, text)`. The text has a label of the plane, the prover's role, all
//! that the first frame says and both nonces, so that a proof is good for this connection, this plane
//! and this side only; the listener's has what it accepts with as well. The dialer proves first: a
//! listener shows something made with the key only to one who has it.
//!
//! Nonces come from the caller; a nonce is good for one connection.

mod keys;
mod proof;

pub use keys::{KEY_BYTES_MAX, KEY_BYTES_MIN, KEY_FILE_BYTES_MAX, Keys};
pub use proof::{AttachTranscript, ControlTranscript, PROOF_BYTES, ProofText, Prover};

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;

/// The setting that gives both sides their keys.
pub const SETTING: &str = "control_key_file";

/// Random bytes that no earlier connection had. Not a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonce(pub [u8; NONCE_BYTES]);

impl Nonce {
    /// A peer's nonce.
    ///
    /// # Errors
    /// A sentence with the setting and both lengths.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        bytes.try_into().map(Self).map_err(|_| {
            format!(
                "{SETTING}: the peer's nonce has {} bytes, {NONCE_BYTES} are needed",
                bytes.len()
            )
        })
    }
}

#[cfg(test)]
mod tests;
