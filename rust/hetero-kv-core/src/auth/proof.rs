//! What is proven, field by field.
//!
//! Each field goes in with its length in front, so that no two sets of fields have one text. A field
//! that a later version adds to the frames is not covered until the label changes.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::Nonce;
use crate::wire::data::Attach;
use crate::wire::message::{EngineIdentity, Hello};

/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;

const CONTROL: &str = "hetero_kv control 1";
const DATA: &str = "hetero_kv data 1";

type Text = Hmac<Sha256>;

/// One side of one connection, as it is proven.
pub trait Prover {
    /// Feeds every field of the text.
    fn write(&self, text: &mut ProofText);

    /// The proof by this key.
    fn prove(&self, key: &[u8]) -> Vec<u8> {
        // A key of any length is a good one.
        let Ok(mac) = Text::new_from_slice(key) else {
            return Vec::new();
        };
        let mut text = ProofText(mac);
        self.write(&mut text);
        text.0.finalize().into_bytes().to_vec()
    }

    /// Whether this proof is by this key; takes as long wherever it differs.
    fn is_proven(&self, key: &[u8], proof: &[u8]) -> bool {
        let Ok(mac) = Text::new_from_slice(key) else {
            return false;
        };
        let mut text = ProofText(mac);
        self.write(&mut text);
        text.0.verify_slice(proof).is_ok()
    }
}

/// The text of a proof under way.
#[derive(Clone)]
pub struct ProofText(Text);

impl ProofText {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    fn number(&mut self, number: impl Into<u64>) -> &mut Self {
        self.bytes(&number.into().to_le_bytes())
    }

    fn engine(&mut self, identity: &EngineIdentity) -> &mut Self {
        self.bytes(identity.engine.as_str().as_bytes())
            .number(identity.incarnation.0)
            .number(identity.dp_rank.0)
            .number(identity.tp_size)
            .number(identity.pp_size)
            .number(identity.dp_size)
    }
}

/// The control plane's handshake.
#[derive(Clone, Copy, Debug)]
pub struct ControlTranscript<'a> {
    /// As the dialer sent it.
    pub hello: &'a Hello,
    /// The dialer's.
    pub dialer: Nonce,
    /// The listener's.
    pub listener: Nonce,
    /// What the listener accepts with, in its own proof: wire version and who it is.
    pub accepted: Option<(u8, &'a EngineIdentity)>,
}

impl Prover for ControlTranscript<'_> {
    fn write(&self, text: &mut ProofText) {
        let hello = self.hello;
        text.bytes(CONTROL.as_bytes())
            .bytes(role(self.accepted.is_some()))
            .number(hello.versions.0)
            .number(hello.versions.1)
            .engine(&hello.from)
            .bytes(hello.expect_engine.as_str().as_bytes())
            .number(hello.expect_incarnation.0)
            .number(hello.any_engine)
            .bytes(&hello.compat_digest)
            .bytes(&self.dialer.0)
            .bytes(&self.listener.0);
        if let Some((version, identity)) = self.accepted {
            text.number(version).engine(identity);
        }
    }
}

/// The data listener's greeting.
#[derive(Clone, Copy, Debug)]
pub struct AttachTranscript<'a> {
    /// As the reader sent it.
    pub attach: &'a Attach,
    /// The reader's.
    pub dialer: Nonce,
    /// The holder's.
    pub listener: Nonce,
    /// What the holder answers with, in its own proof: the lengths of its regions.
    pub accepted: Option<&'a [u64]>,
}

impl Prover for AttachTranscript<'_> {
    fn write(&self, text: &mut ProofText) {
        let attach = self.attach;
        text.bytes(DATA.as_bytes())
            .bytes(role(self.accepted.is_some()))
            .bytes(attach.engine.as_str().as_bytes())
            .number(attach.incarnation.0)
            .number(attach.dp_rank.0)
            .number(attach.tp_rank.0)
            .number(attach.pp_rank.0)
            .bytes(&self.dialer.0)
            .bytes(&self.listener.0);
        for bytes in self.accepted.unwrap_or_default() {
            text.number(*bytes);
        }
    }
}

fn role(listener: bool) -> &'static [u8] {
    if listener { b"listener" } else { b"dialer" }
}
