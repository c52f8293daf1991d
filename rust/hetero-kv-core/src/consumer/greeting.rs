//! One greeting of a prefill engine by a consumer that has keys: what was said, and what has to be
//! proven before anything else of that connection counts.

use super::Consumer;
use crate::auth::{ControlTranscript, Keys, Nonce, PROOF_BYTES, Prover, SETTING};
use crate::failure::{Failure, FailureReason};
use crate::step::PeerId;
use crate::time::Time;
use crate::wire::message::{Accept, Challenge, Hello, Message, Proof};

#[derive(Clone, Debug)]
pub(super) struct Greeting {
    /// As it was sent, whoever takes the peer over since.
    hello: Box<Hello>,
    ours: Nonce,
    /// The listener's, once it has asked for a proof.
    theirs: Option<Nonce>,
}

impl Greeting {
    pub(super) fn new(hello: Hello, ours: Nonce) -> Self {
        Self {
            hello: Box::new(hello),
            ours,
            theirs: None,
        }
    }

    fn transcript<'a>(&'a self, theirs: Nonce, accept: Option<&'a Accept>) -> impl Prover + 'a {
        ControlTranscript {
            hello: &self.hello,
            dialer: self.ours,
            listener: theirs,
            accepted: accept.map(|accept| (accept.version, &accept.from)),
        }
    }

    /// Whether the listener holds one of these keys; if not, the text for the failure.
    fn check(&self, keys: &Keys, accept: &Accept) -> Result<(), String> {
        let (Some(theirs), Some(proof)) = (self.theirs, &accept.proof) else {
            return Err(format!(
                "{SETTING}: this decode engine has it set, and prefill took the connection without \
                 proving that it has a key: give prefill the same file (a version that knows no \
                 such setting has to be updated), or unset it on every engine"
            ));
        };
        if proof.len() != PROOF_BYTES {
            return Err(format!(
                "{SETTING}: prefill's proof has {} bytes, {PROOF_BYTES} are needed",
                proof.len()
            ));
        }
        let transcript = self.transcript(theirs, Some(accept));
        keys.that_made(&transcript, proof).map(|_| ()).ok_or_else(|| {
            format!(
                "{SETTING}: prefill's proof is by no key of this decode engine's file: give both the \
                 same file; where they have it, something else answers at that address"
            )
        })
    }
}

impl Consumer {
    /// While a peer is greeted: whether the message ends here, as a challenge that is answered or an
    /// acceptance of a peer that does not prove its key. Nothing that such a one says is used.
    pub(super) fn is_about_keys(&mut self, now: Time, peer_id: PeerId, message: &Message) -> bool {
        match message {
            Message::Challenge(challenge) => self.handle_challenge(now, peer_id, challenge),
            Message::Accept(accept) => !self.is_authentic(now, peer_id, accept),
            Message::Hello(_)
            | Message::Reject(_)
            | Message::Layout(_)
            | Message::Claim(_)
            | Message::Granted(_)
            | Message::Gone(_)
            | Message::Renew(_)
            | Message::Ack(_)
            | Message::Release(_)
            | Message::Ping
            | Message::Pong
            | Message::Bye
            | Message::Proof(_) => false,
        }
    }

    /// The listener asks for a proof. False where it has no business to.
    fn handle_challenge(&mut self, now: Time, peer_id: PeerId, challenge: &Challenge) -> bool {
        let (Some(keys), Some(peer)) = (&self.keys, self.peers.get_mut(&peer_id)) else {
            return false;
        };
        let place = peer.place();
        let Some(greeting) = peer.greeting.as_mut().filter(|it| it.theirs.is_none()) else {
            return false;
        };
        match Nonce::parse(&challenge.nonce) {
            Ok(theirs) => {
                greeting.theirs = Some(theirs);
                let proof = greeting.transcript(theirs, None).prove(keys.first());
                self.send(peer_id, Message::Proof(Proof { proof }));
            }
            Err(text) => self.hang_up(now, peer_id, unproven(&place, &text)),
        }
        true
    }

    /// Whether the listener may accept: it has proven its key, or none is asked for. Else the
    /// connection is closed.
    fn is_authentic(&mut self, now: Time, peer_id: PeerId, accept: &Accept) -> bool {
        let Some(keys) = &self.keys else {
            return true;
        };
        let Some(peer) = self.peers.get(&peer_id) else {
            return false;
        };
        let checked = match &peer.greeting {
            Some(greeting) => greeting.check(keys, accept),
            None => Err(format!("{SETTING}: no greeting is under way")),
        };
        let Err(text) = checked else {
            return true;
        };
        let failure = unproven(&peer.place(), &text);
        self.hang_up(now, peer_id, failure);
        false
    }
}

fn unproven(place: &str, text: &str) -> Failure {
    Failure::of_field(
        FailureReason::PairRefused,
        SETTING,
        format!("{place}: {text}"),
    )
}
