//! Proof of a shared key between a reader and a holder, before the holder takes the connection. What
//! is proven is in [`hetero_kv_core::auth`].

use hetero_kv_core::auth::{AttachTranscript, Keys, Nonce, PROOF_BYTES, Prover, SETTING};
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::data::{Attach, AttachRefusal, AttachRefused, Attached};
use hetero_kv_core::wire::message::{Challenge, Proof};
use hetero_kv_core::wire::{Kind, decode, encode};

use super::attach::{AttachedStream, unreachable};
use crate::error::{ReadFailureKind, TransportError};
use crate::keys;
use crate::transport::Interrupt;

/// What a holder makes of a reader's first frame.
pub(super) enum Asked<'a> {
    /// Neither side has keys.
    Nothing,
    /// The reader is to prove its key.
    Proof(&'a Keys, Nonce),
}

/// Whether a holder asks this reader for a proof.
///
/// # Errors
/// Why the reader is refused.
pub(super) fn asked<'a>(
    keys: Option<&'a Keys>,
    attach: &Attach,
) -> Result<Asked<'a>, AttachRefused> {
    match (keys, &attach.nonce) {
        (None, None) => Ok(Asked::Nothing),
        (Some(keys), Some(nonce)) => match Nonce::parse(nonce) {
            Ok(nonce) => Ok(Asked::Proof(keys, nonce)),
            Err(text) => Err(unproven(text)),
        },
        (Some(_), None) => Err(unproven(format!(
            "{SETTING}: this prefill worker has it set and the reader shows no key: give decode's \
             workers the same file (a version that knows no such setting has to be updated)"
        ))),
        (None, Some(_)) => Err(unproven(format!(
            "{SETTING}: the reader has it set and this prefill worker has not: give prefill's \
             workers the same file"
        ))),
    }
}

/// A reader whose key is proven.
pub(super) struct Proven<'a> {
    transcript: AttachTranscript<'a>,
    key: &'a [u8],
}

impl<'a> Proven<'a> {
    /// Looks at a reader's proof.
    ///
    /// # Errors
    /// Why the reader is refused.
    pub(super) fn by(
        keys: &'a Keys,
        transcript: AttachTranscript<'a>,
        proof: &[u8],
    ) -> Result<Self, AttachRefused> {
        if proof.len() != PROOF_BYTES {
            return Err(unproven(format!(
                "{SETTING}: the reader's proof has {} bytes, {PROOF_BYTES} are needed",
                proof.len()
            )));
        }
        let Some(key) = keys.that_made(&transcript, proof) else {
            return Err(unproven(format!(
                "{SETTING}: the reader's proof is by no key of this prefill worker's file: the first \
                 key of decode's file has to be in prefill's"
            )));
        };
        Ok(Self { transcript, key })
    }

    /// The holder's own proof, of what it answers.
    pub(super) fn answer(&self, region_bytes: &[u64]) -> Vec<u8> {
        let answer = AttachTranscript {
            accepted: Some(region_bytes),
            ..self.transcript
        };
        answer.prove(self.key)
    }
}

fn unproven(text: String) -> AttachRefused {
    let code = AttachRefusal::Unauthenticated;
    AttachRefused { code, text }
}

/// A reader's side of one greeting.
pub(super) struct Greeting<'a> {
    keys: &'a Keys,
    ours: Nonce,
    theirs: Option<Nonce>,
}

impl<'a> Greeting<'a> {
    /// For a reader with keys.
    pub(super) fn begin(keys: Option<&'a Keys>) -> Result<Option<Self>, TransportError> {
        let Some(keys) = keys else {
            return Ok(None);
        };
        let ours = keys::nonce()
            .map_err(|error| TransportError::system(ReadFailureKind::Local, "Attach", error))?;
        let theirs = None;
        Ok(Some(Self { keys, ours, theirs }))
    }

    /// What the first frame says of it.
    pub(super) fn nonce(&self) -> Vec<u8> {
        self.ours.0.to_vec()
    }

    /// Answers a challenge; the frame that comes next.
    pub(super) fn prove(
        &mut self,
        attach: &Attach,
        challenge: &[u8],
        stream: &mut AttachedStream,
        deadline: Time,
        interrupt: &Interrupt<'_>,
    ) -> Result<(Kind, Vec<u8>), TransportError> {
        let challenge: Challenge = decode(Kind::AttachChallenge, challenge)
            .map_err(|error| unreachable("Attach", error))?;
        let theirs = Nonce::parse(&challenge.nonce).map_err(refused)?;
        self.theirs = Some(theirs);
        let proof = self.transcript(attach, theirs).prove(self.keys.first());
        let frame = encode(Kind::AttachProof, &Proof { proof }).map_err(|error| {
            TransportError::new(ReadFailureKind::Local, "Attach", error.to_string())
        })?;
        stream.exchange(frame, "Attach", deadline, interrupt)
    }

    /// Whether the holder has proven that it holds a key.
    pub(super) fn check(&self, attach: &Attach, answer: &Attached) -> Result<(), TransportError> {
        let (Some(theirs), Some(proof)) = (self.theirs, &answer.proof) else {
            return Err(refused(format!(
                "{SETTING}: this decode worker has it set, and the holder took the connection without \
                 proving that it has a key: give prefill's workers the same file (a version that \
                 knows no such setting has to be updated)"
            )));
        };
        let transcript = AttachTranscript {
            accepted: Some(&answer.region_bytes),
            ..self.transcript(attach, theirs)
        };
        match self.keys.that_made(&transcript, proof) {
            Some(_) => Ok(()),
            None => Err(refused(format!(
                "{SETTING}: the holder's proof is by no key of this decode worker's file"
            ))),
        }
    }

    fn transcript<'b>(&self, attach: &'b Attach, theirs: Nonce) -> AttachTranscript<'b> {
        AttachTranscript {
            attach,
            dialer: self.ours,
            listener: theirs,
            accepted: None,
        }
    }
}

fn refused(text: String) -> TransportError {
    TransportError::new(ReadFailureKind::Refused, "Attach", text)
}
