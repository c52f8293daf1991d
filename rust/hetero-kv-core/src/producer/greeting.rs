//! Whether a consumer may say more than hello: where keys are set, both sides prove theirs first.

use super::{ConnectionId, Peer, Producer};
use crate::auth::{ControlTranscript, Nonce, PROOF_BYTES, Prover, SETTING};
use crate::wire::WIRE_VERSION;
use crate::wire::message::{Accept, Challenge, Hello, Message, Proof, RejectCode};

impl Producer {
    pub(super) fn handle_hello(
        &mut self,
        connection: ConnectionId,
        nonce: Nonce,
        hello: Box<Hello>,
    ) {
        if !(hello.versions.0..=hello.versions.1).contains(&WIRE_VERSION) {
            let reason = format!(
                "wire version: this engine speaks {WIRE_VERSION}, the peer speaks {} to {}",
                hello.versions.0, hello.versions.1
            );
            self.refuse(connection, RejectCode::Version, reason);
            return;
        }
        match (&self.keys, &hello.nonce) {
            (None, None) => self.admit(connection, &hello, None),
            (Some(_), Some(theirs)) => match Nonce::parse(theirs) {
                Ok(_) => {
                    let challenge = Challenge {
                        nonce: nonce.0.to_vec(),
                    };
                    let peer = Peer::Challenged { hello, nonce };
                    self.peers.insert(connection, peer);
                    self.send(connection, Message::Challenge(challenge));
                }
                Err(reason) => self.refuse(connection, RejectCode::Unauthenticated, reason),
            },
            (Some(_), None) => {
                let reason = format!(
                    "{SETTING}: this prefill engine has it set and decode shows no key: give decode \
                     the same file (a version that knows no such setting has to be updated), or \
                     unset it on every engine"
                );
                self.refuse(connection, RejectCode::Unauthenticated, reason);
            }
            (None, Some(_)) => {
                let reason = format!(
                    "{SETTING}: decode has it set and this prefill engine has not: give prefill the \
                     same file, or unset it on every engine"
                );
                self.refuse(connection, RejectCode::Unauthenticated, reason);
            }
        }
    }

    pub(super) fn handle_proof(
        &mut self,
        connection: ConnectionId,
        hello: &Hello,
        nonce: Nonce,
        proof: &Proof,
    ) {
        let theirs = hello.nonce.as_deref().map(Nonce::parse);
        let (Some(keys), Some(Ok(dialer))) = (&self.keys, theirs) else {
            return;
        };
        let transcript = ControlTranscript {
            hello,
            dialer,
            listener: nonce,
            accepted: None,
        };
        let size = proof.proof.len();
        if size != PROOF_BYTES {
            let reason =
                format!("{SETTING}: decode's proof has {size} bytes, {PROOF_BYTES} are needed");
            self.refuse(connection, RejectCode::Unauthenticated, reason);
            return;
        }
        let Some(key) = keys.that_made(&transcript, &proof.proof) else {
            let reason = format!(
                "{SETTING}: decode's proof is by no key of this prefill engine's file: the first key \
                 of decode's file has to be in prefill's"
            );
            self.refuse(connection, RejectCode::Unauthenticated, reason);
            return;
        };
        // By the key that decode has shown to hold: the first of each file may differ while keys are
        // changed.
        let accepted = Some((WIRE_VERSION, &self.identity));
        let answer = ControlTranscript {
            accepted,
            ..transcript
        };
        let ours = answer.prove(key);
        self.admit(connection, hello, Some(ours));
    }

    /// Takes a consumer whose key, if one is asked for, is proven; or refuses it by what differs.
    fn admit(&mut self, connection: ConnectionId, hello: &Hello, proof: Option<Vec<u8>>) {
        if !self.is_welcome(connection, hello) {
            return;
        }
        let key = (hello.from.engine.clone(), hello.from.incarnation);
        let ranks = (hello.from.tp_size, hello.from.pp_size);
        self.peers.insert(connection, Peer::Known { key, ranks });
        let accept = Accept {
            version: WIRE_VERSION,
            from: self.identity.clone(),
            proof,
        };
        self.send(connection, Message::Accept(accept));
    }
}
