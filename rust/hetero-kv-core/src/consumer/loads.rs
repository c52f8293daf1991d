//! Requests: orders to the workers once there are blocks and a lease, and their failures.

use super::claims::expired;
use super::peer::{PeerState, source_block_tokens};
use super::transfer::{Claiming, Phase, Request};
use super::{Consumer, FAILURE_FIELDS_MAX, millis_left};
use crate::failure::{Failure, FailureReason};
use crate::ids::{BlockId, TransferId};
use crate::plan::SourcePolicy;
use crate::step::{CancelOrder, FailOrder, LoadOrder, PeerCard, PeerId, SourceChoice};
use crate::time::Time;

impl Consumer {
    /// Orders the load of a request that has blocks and a lease, or its failure.
    pub(super) fn advance(&mut self, now: Time, request_id: &str) {
        let Some(request) = self.requests.get_mut(request_id) else {
            return;
        };
        let Phase::Pending {
            first_block,
            past_token,
            dest_blocks,
        } = &mut request.phase
        else {
            return;
        };
        let Some((id, transfer)) = request
            .transfer
            .and_then(|id| self.transfers.get(&id).map(|transfer| (id, transfer)))
        else {
            return;
        };
        match &transfer.claiming {
            Claiming::Waiting | Claiming::Asked { .. } => {}
            Claiming::Failed(failure) => {
                let failure = failure.clone();
                let dest_blocks = std::mem::take(dest_blocks);
                request.phase = Phase::Reporting;
                self.count_failure(request_id, &failure);
                self.order_fail(request_id, dest_blocks, failure);
            }
            Claiming::Granted {
                fence,
                block_ids,
                num_tokens,
                deadline,
                ..
            } => {
                if *deadline <= now {
                    // The sweep is late: nothing may be read any more.
                    let failure = expired(id);
                    self.fail_transfer(now, id, failure);
                    return;
                }
                let first = *first_block;
                let ours = self.options.block_size;
                // How the holder's blocks are laid out is known while it is paired. Its connection
                // may have broken since it granted; the lease stands while it is dialled again.
                let Some(PeerState::Ready(layout)) =
                    self.peers.get(&transfer.peer).map(|peer| &peer.state)
                else {
                    return;
                };
                let theirs = source_block_tokens(layout, ours);
                // Blocks of both sides count tokens of one sequence, which are below 2^32.
                let first_token = u64::from(ours) * first as u64;
                let source_first = (first_token / u64::from(theirs)) as usize;
                let source_past = past_token.div_ceil(theirs) as usize;
                let source = match block_ids.as_slice() {
                    [group] if num_tokens >= past_token => group.get(source_first..source_past),
                    _ => None,
                };
                let Some(source) = source else {
                    let failure = Failure::of_field(
                        FailureReason::BadParams,
                        "remote_num_tokens",
                        format!(
                            "the holder has {num_tokens} tokens in {} group(s), tokens up to {past_token} in blocks {source_first}..{source_past} are needed",
                            block_ids.len()
                        ),
                    );
                    let dest_blocks = std::mem::take(dest_blocks);
                    request.phase = Phase::Reporting;
                    self.count_failure(request_id, &failure);
                    self.order_fail(request_id, dest_blocks, failure);
                    return;
                };
                let until = now + self.options.load_timeout;
                let peer = transfer.peer;
                let order = LoadOrder {
                    request_id: request_id.to_owned(),
                    peer,
                    transfer_id: id,
                    lease: *fence,
                    // Set by the step that carries it.
                    deadline_ms: 0,
                    choice: SourceChoice::default(),
                    past_token: *past_token,
                    source_block_tokens: theirs,
                    source_first_block: u32::try_from(source_first).unwrap_or(u32::MAX),
                    source_blocks: source.to_vec(),
                    first_block: u32::try_from(first).unwrap_or(u32::MAX),
                    dest_blocks: std::mem::take(dest_blocks),
                };
                request.phase = Phase::Loading {
                    until,
                    cancelled: false,
                };
                self.announce(peer);
                let choice = self.choice(now, id);
                self.orders.loads.push(LoadOrder { choice, ..order });
            }
        }
    }

    /// Sets the time left of the loads and extensions ordered since the last step. A forward pass may
    /// lie between the order and the step that carries it, and that time has been used up.
    pub(super) fn refresh_deadlines(&mut self, now: Time) {
        let left = |request_id: &str| {
            let request = self.requests.get(request_id)?;
            let Phase::Loading {
                until,
                cancelled: false,
            } = request.phase
            else {
                return None;
            };
            match &self.transfers.get(&request.transfer?)?.claiming {
                Claiming::Granted { deadline, .. } => {
                    Some(millis_left(now, (*deadline).min(until)))
                }
                Claiming::Waiting | Claiming::Asked { .. } | Claiming::Failed(_) => None,
            }
        };
        for load in &mut self.orders.loads {
            load.deadline_ms = left(&load.request_id).unwrap_or(0);
        }
        for extension in &mut self.orders.extensions {
            extension.deadline_ms = left(&extension.request_id).unwrap_or(0);
        }
        // Cancelled or reported since: more time is of no use to it.
        self.orders
            .extensions
            .retain(|extension| extension.deadline_ms > 0);
    }

    /// Every rank of this engine uses the same one, for every sibling.
    fn choice(&mut self, now: Time, id: TransferId) -> SourceChoice {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return SourceChoice::default();
        };
        if let Some(choice) = &transfer.choice {
            return choice.clone();
        }
        let Some(peer) = self.peers.get_mut(&transfer.peer) else {
            return SourceChoice::default();
        };
        let choice = SourceChoice {
            weights: peer.health.weights(now, transfer.params.tp_size),
            sequence: match self.options.source_policy {
                SourcePolicy::Hash => None,
                SourcePolicy::RoundRobin => Some(peer.transfers),
            },
        };
        peer.transfers += 1;
        transfer.choice.insert(choice).clone()
    }

    pub(super) fn announce(&mut self, peer_id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&peer_id)
            && !peer.announced
            && let PeerState::Ready(layout) = &peer.state
        {
            peer.announced = true;
            self.orders.peers.push(PeerCard {
                peer: peer_id,
                layout: (**layout).clone(),
            });
        }
    }

    pub(super) fn order_fail(
        &mut self,
        request_id: &str,
        dest_blocks: Vec<BlockId>,
        failure: Failure,
    ) {
        self.orders.fails.push(FailOrder {
            request_id: request_id.to_owned(),
            dest_blocks,
            failure,
        });
    }

    /// Stops a load. One that no worker has heard of yet becomes a failure instead: as a load whose
    /// time is over and a cancel in one step it would be reported as run out, not as what it is.
    pub(super) fn order_cancel(&mut self, request_id: &str, failure: Failure) {
        let Some(Request {
            phase: phase @ Phase::Loading {
                cancelled: false, ..
            },
            ..
        }) = self.requests.get_mut(request_id)
        else {
            return;
        };
        let unheard = self
            .orders
            .loads
            .iter()
            .position(|load| load.request_id == request_id);
        if let Some(at) = unheard {
            *phase = Phase::Reporting;
            let load = self.orders.loads.remove(at);
            if failure.reason != FailureReason::Cancelled {
                self.count_failure(request_id, &failure);
            }
            self.order_fail(request_id, load.dest_blocks, failure);
            return;
        }
        if let Phase::Loading { cancelled, .. } = phase {
            *cancelled = true;
        }
        self.orders.cancels.push(CancelOrder {
            request_id: request_id.to_owned(),
            failure,
        });
    }

    pub(super) fn broken(&mut self, request_id: &str, failure: Failure) -> Phase {
        self.count_failure(request_id, &failure);
        Phase::Broken(failure)
    }

    pub(super) fn count_failure(&mut self, request_id: &str, failure: &Failure) {
        let failures = &mut self.counts.failures;
        let mut key = (failure.reason, failure.field.clone());
        if failures.len() >= FAILURE_FIELDS_MAX && !failures.contains_key(&key) {
            key.1.clear();
        }
        *failures.entry(key).or_default() += 1;
        self.note(
            true,
            format!("request {request_id}: load failed: {failure}"),
        );
    }
}
