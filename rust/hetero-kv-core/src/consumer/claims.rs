//! Transfers: claimed before anything is read, renewed while a sibling needs them, settled with
//! the holder when none does.

use std::time::Duration;

use super::Consumer;
use super::peer::{Peer, PeerAddress, PeerState};
use super::transfer::{Claiming, Phase, Question, Transfer};
use crate::failure::{Failure, FailureReason};
use crate::ids::{PpRank, TpRank, TransferId};
use crate::step::{Extension, PeerId};
use crate::time::Time;
use crate::wire::message::{Ack, Claim, Gone, Granted, Message, Release, Renew};
use crate::wire::params::RemotePrefill;

/// The failure of reading under a lease whose time is over.
pub(super) fn expired(id: TransferId) -> Failure {
    Failure::new(
        FailureReason::LeaseExpired,
        format!("the lease of transfer {id} ran out"),
    )
}

impl Consumer {
    /// Finds or opens the transfer that `params` name. [`Consumer::start`] follows, once it is known
    /// whether a request reads under it.
    pub(super) fn join(&mut self, now: Time, params: RemotePrefill) -> Result<(), Failure> {
        let transfer_id = params.transfer_id;
        if let Some(transfer) = self.transfers.get(&transfer_id) {
            // The id belongs to the first (engine, incarnation, digest) that came with it.
            let first = &transfer.params;
            for (field, same) in [
                ("remote_engine_id", first.engine == params.engine),
                (
                    "remote_incarnation",
                    first.incarnation == params.incarnation,
                ),
                ("prompt_digest", first.prompt_digest == params.prompt_digest),
                ("lease_epoch", first.lease_epoch == params.lease_epoch),
            ] {
                if !same {
                    return Err(Failure::of_field(
                        FailureReason::BadParams,
                        field,
                        format!(
                            "kv_transfer_params.{field} is not the one that transfer {transfer_id} came with first"
                        ),
                    ));
                }
            }
            return Ok(());
        }
        let address = PeerAddress {
            host: params.host.clone(),
            port: params.port,
            engine: params.engine.clone(),
            incarnation: params.incarnation,
        };
        let peer_id = self.peer(now, address)?;
        self.transfers
            .insert(transfer_id, Transfer::new(peer_id, params, now));
        Ok(())
    }

    /// Dials the transfer's peer where need be, and asks for the lease.
    pub(super) fn start(&mut self, now: Time, id: TransferId) {
        let Some(transfer) = self.transfers.get(&id) else {
            return;
        };
        match transfer.claiming {
            Claiming::Waiting => {}
            Claiming::Asked { .. } | Claiming::Granted { .. } | Claiming::Failed(_) => return,
        }
        let peer_id = transfer.peer;
        if self.wake_peer(now, peer_id) {
            self.ask(now, id);
        } else if let Some(PeerState::Down { why, .. }) =
            self.peers.get(&peer_id).map(|peer| &peer.state)
        {
            let why = why.clone();
            self.fail_transfer(now, id, why);
        }
    }

    /// Sends the claim once the peer is ready, if anybody wants to read.
    pub(super) fn ask(&mut self, now: Time, id: TransferId) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let peer_id = transfer.peer;
        let Some(PeerState::Ready(layout)) = self.peers.get(&peer_id).map(|peer| &peer.state)
        else {
            return;
        };
        let them = &layout.from;
        let params = &transfer.params;
        let differing = [
            ("tp_size", params.tp_size, them.tp_size),
            ("pp_size", params.pp_size, them.pp_size),
            ("remote_dp_rank", params.dp_rank.0, them.dp_rank.0),
        ]
        .into_iter()
        .find(|(_, said, is)| said != is);
        if let Some((field, said, is)) = differing {
            let failure = Failure::of_field(
                FailureReason::BadParams,
                field,
                format!("kv_transfer_params.{field} is {said}, the engine there has {is}"),
            );
            self.fail_transfer(now, id, failure);
            return;
        }
        if !matches!(transfer.claiming, Claiming::Waiting) || transfer.siblings.is_empty() {
            return;
        }
        self.next_question += 1;
        let question = Question {
            number: self.next_question,
            sent_at: now,
        };
        transfer.claiming = Claiming::Asked { question };
        let claim = Claim {
            transfer_id: id,
            epoch: transfer.params.lease_epoch,
            prompt_digest: transfer.params.prompt_digest,
            question: question.number,
        };
        self.send(peer_id, Message::Claim(claim));
    }

    pub(super) fn handle_granted(&mut self, now: Time, peer_id: PeerId, granted: Granted) {
        let margin = self.options.margin;
        let id = granted.transfer_id;
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if transfer.peer != peer_id {
            return;
        }
        // The holder's clock started when it answered, which is after we asked: counting from the
        // question errs on the side of stopping early.
        let asked_at = match &transfer.claiming {
            Claiming::Asked { question } if question.number == granted.question => question.sent_at,
            Claiming::Granted {
                renewal: Some(question),
                fence,
                ..
            } if question.number == granted.question && *fence == granted.lease => question.sent_at,
            // An answer to a question that was given up.
            Claiming::Asked { .. }
            | Claiming::Granted { .. }
            | Claiming::Waiting
            | Claiming::Failed(_) => return,
        };
        let time = Duration::from_millis(granted.granted_ms).saturating_sub(margin);
        transfer.claiming = Claiming::Granted {
            fence: granted.lease,
            block_ids: granted.block_ids,
            num_tokens: granted.num_tokens,
            deadline: asked_at + time,
            renew_at: asked_at + time / 2,
            renewal: None,
        };
        let siblings: Vec<String> = transfer.siblings.iter().cloned().collect();
        for request_id in siblings {
            let loading = self.requests.get(&request_id).is_some_and(|request| {
                matches!(
                    request.phase,
                    Phase::Loading {
                        cancelled: false,
                        ..
                    }
                )
            });
            if loading {
                self.orders.extensions.push(Extension {
                    request_id,
                    // Set by the step that carries it.
                    deadline_ms: 0,
                });
            } else {
                self.advance(now, &request_id);
            }
        }
    }

    pub(super) fn handle_gone(&mut self, now: Time, peer_id: PeerId, gone: Gone) {
        let asked = self
            .transfers
            .get(&gone.transfer_id)
            .filter(|transfer| transfer.peer == peer_id)
            .and_then(|transfer| match &transfer.claiming {
                Claiming::Asked { question } => Some(question.number),
                Claiming::Granted { renewal, .. } => renewal.map(|question| question.number),
                Claiming::Waiting | Claiming::Failed(_) => None,
            });
        if asked != Some(gone.question) {
            return;
        }
        self.counts.claims_gone += 1;
        let failure = Failure::new(
            FailureReason::LeaseGone,
            format!(
                "the lease of transfer {} is gone: {:?}",
                gone.transfer_id, gone.reason
            ),
        );
        self.fail_transfer(now, gone.transfer_id, failure);
    }

    pub(super) fn sweep_transfer(&mut self, now: Time, id: TransferId) {
        self.settle_if_due(now, id);
        self.sweep_claim(now, id);
        // Failed just above, without siblings and without a linger to wait for.
        self.settle_if_due(now, id);
    }

    fn settle_if_due(&mut self, now: Time, id: TransferId) {
        let due = self
            .transfers
            .get(&id)
            .and_then(|transfer| transfer.linger_until);
        if due.is_some_and(|until| until <= now) {
            self.settle(id);
        }
    }

    fn sweep_claim(&mut self, now: Time, id: TransferId) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let peer_id = transfer.peer;
        let ready = self.peers.get(&peer_id).is_some_and(Peer::is_ready);
        match &mut transfer.claiming {
            Claiming::Waiting | Claiming::Asked { .. } => {
                if transfer.created_at + self.options.claim_timeout <= now {
                    let failure = Failure::new(
                        FailureReason::ClaimTimeout,
                        format!(
                            "no answer to the claim within {:?} (claim_timeout_s)",
                            self.options.claim_timeout
                        ),
                    );
                    self.fail_transfer(now, id, failure);
                }
            }
            Claiming::Granted {
                deadline,
                renew_at,
                renewal,
                ..
            } => {
                if *deadline <= now {
                    self.fail_transfer(now, id, expired(id));
                } else if *renew_at <= now && renewal.is_none() && ready {
                    self.next_question += 1;
                    let question = Question {
                        number: self.next_question,
                        sent_at: now,
                    };
                    *renewal = Some(question);
                    let renew = Renew {
                        transfer_id: id,
                        question: question.number,
                    };
                    self.send(peer_id, Message::Renew(renew));
                }
            }
            Claiming::Failed(_) => {}
        }
    }

    /// The connection to its holder broke and is dialled again. A lease that was granted stands: it
    /// ends by its time alone, and reading under it needs no control connection. Questions on their
    /// way are asked anew.
    pub(super) fn await_holder(&mut self, now: Time, peer_id: PeerId) {
        for transfer in self.transfers.values_mut() {
            if transfer.peer != peer_id {
                continue;
            }
            match &mut transfer.claiming {
                Claiming::Asked { .. } => transfer.claiming = Claiming::Waiting,
                Claiming::Granted {
                    renew_at, renewal, ..
                } => {
                    *renewal = None;
                    *renew_at = now;
                }
                Claiming::Waiting | Claiming::Failed(_) => {}
            }
        }
    }

    /// Fails a transfer and whatever of it has not been read. A lease that the holder may still
    /// hold is released once the last sibling has quiesced, or runs out.
    pub(super) fn fail_transfer(&mut self, now: Time, id: TransferId, failure: Failure) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if matches!(transfer.claiming, Claiming::Failed(_)) {
            return;
        }
        transfer.claiming = Claiming::Failed(failure.clone());
        let siblings: Vec<String> = transfer.siblings.iter().cloned().collect();
        for request_id in siblings {
            let Some(request) = self.requests.get_mut(&request_id) else {
                continue;
            };
            match &mut request.phase {
                Phase::Waiting => {
                    request.phase = Phase::Broken(failure.clone());
                    self.count_failure(&request_id, &failure);
                }
                Phase::Pending { dest_blocks, .. } => {
                    let dest_blocks = std::mem::take(dest_blocks);
                    request.phase = Phase::Reporting;
                    self.count_failure(&request_id, &failure);
                    self.order_fail(&request_id, dest_blocks, failure.clone());
                }
                Phase::Loading { .. } => self.order_cancel(&request_id, failure.clone()),
                Phase::Broken(_) | Phase::Reporting | Phase::Settled => {}
            }
        }
        self.settle_when_unused(now, id);
    }

    /// The request is done with its transfer.
    pub(super) fn leave(&mut self, now: Time, request_id: &str, read: bool) {
        let Some(id) = self
            .requests
            .get_mut(request_id)
            .and_then(|request| request.transfer.take())
        else {
            return;
        };
        if let Some(transfer) = self.transfers.get_mut(&id) {
            transfer.siblings.remove(request_id);
            transfer.read |= read;
        }
        self.settle_when_unused(now, id);
    }

    pub(super) fn settle_when_unused(&mut self, now: Time, id: TransferId) {
        self.settle_after(now, id, self.options.sibling_linger);
    }

    /// Arms the settlement of a transfer that no request wants, unless it is armed already.
    pub(super) fn settle_after(&mut self, now: Time, id: TransferId, linger: Duration) {
        if let Some(transfer) = self.transfers.get_mut(&id)
            && transfer.siblings.is_empty()
        {
            transfer.linger_until.get_or_insert(now + linger);
        }
    }

    /// Tells the holder that its blocks are free to go. Without a connection its lease runs out.
    pub(super) fn settle(&mut self, id: TransferId) {
        let Some(transfer) = self.transfers.get(&id) else {
            return;
        };
        let peer_id = transfer.peer;
        match self.peers.get(&peer_id).map(|peer| &peer.state) {
            Some(PeerState::Ready(_)) => {
                if let Claiming::Failed(failure) = &transfer.claiming
                    && failure.reason == FailureReason::LeaseGone
                {
                    // The holder has said so itself.
                    self.transfers.remove(&id);
                    return;
                }
                self.next_question += 1;
                let number = Some(self.next_question);
                let message = if transfer.read {
                    Message::Ack(Ack {
                        transfer_id: id,
                        ranks: self.all_ranks(),
                        number,
                    })
                } else {
                    Message::Release(Release {
                        transfer_id: id,
                        number,
                    })
                };
                self.transfers.remove(&id);
                self.send(peer_id, message);
            }
            Some(PeerState::Dialing | PeerState::Greeting | PeerState::Asking(_)) => {
                // Settled when the handshake is through, or forgotten when its time is up.
                if let Some(transfer) = self.transfers.get_mut(&id) {
                    transfer.linger_until = None;
                }
            }
            Some(PeerState::Idle | PeerState::Down { .. }) | None => {
                self.transfers.remove(&id);
            }
        }
    }

    pub(super) fn all_ranks(&self) -> Vec<(TpRank, PpRank)> {
        (0..self.identity.pp_size)
            .flat_map(|pp| (0..self.identity.tp_size).map(move |tp| (TpRank(tp), PpRank(pp))))
            .collect()
    }
}
