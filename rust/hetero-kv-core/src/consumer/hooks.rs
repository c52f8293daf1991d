//! vLLM's scheduler-side hooks, as calls of the consumer.

use super::transfer::{Phase, Request};
use super::{Consumer, MISMATCH_LINGER};
use crate::failure::{Failure, FailureReason};
use crate::ids::{BlockId, PromptDigest, TpRank, TransferId};
use crate::step::StepOrders;
use crate::time::Time;
use crate::wire::params::{ParamsError, TransferParams};

impl Consumer {
    /// `on_new_request`: starts the claim. `digest` is of the request's own prompt.
    pub fn handle_new_request(
        &mut self,
        now: Time,
        request_id: &str,
        params: Result<TransferParams, ParamsError>,
        digest: PromptDigest,
        prompt_tokens: u32,
    ) {
        if self.requests.contains_key(request_id) {
            self.note(true, format!("request {request_id} was announced twice"));
            return;
        }
        let mut request = Request {
            transfer: None,
            prompt_tokens,
            computed_tokens: 0,
            phase: Phase::Waiting,
            finished: false,
        };
        match params {
            Ok(TransferParams::Absent | TransferParams::Prefill { .. }) => return,
            Err(error) => {
                let failure =
                    Failure::of_field(FailureReason::BadParams, error.field, error.to_string());
                request.phase = self.broken(request_id, failure);
            }
            Ok(TransferParams::Decode(params)) if params.engine == self.identity.engine => {
                let failure = Failure::of_field(
                    FailureReason::BadParams,
                    "remote_engine_id",
                    format!(
                        "kv_transfer_params.remote_engine_id names this engine, {}",
                        params.engine
                    ),
                );
                request.phase = self.broken(request_id, failure);
            }
            Ok(TransferParams::Decode(params)) => {
                let transfer_id = params.transfer_id;
                let same_prompt = params.prompt_digest == digest;
                let joined = self.join(now, *params);
                if !same_prompt {
                    self.mismatch(now, request_id, joined.is_ok().then_some(transfer_id));
                    if !self.options.require_kv {
                        return;
                    }
                    let failure = Failure::of_field(
                        FailureReason::DigestMismatch,
                        "prompt_digest",
                        "kv_transfer_params.prompt_digest is of another prompt",
                    );
                    request.phase = self.broken(request_id, failure);
                } else if let Err(failure) = joined {
                    request.phase = self.broken(request_id, failure);
                } else if let Some(transfer) = self.transfers.get_mut(&transfer_id) {
                    request.transfer = Some(transfer_id);
                    transfer.siblings.insert(request_id.to_owned());
                    transfer.linger_until = None;
                }
            }
        }
        let transfer = request.transfer;
        self.requests.insert(request_id.to_owned(), request);
        // Last, because a peer that is down fails the request at once.
        if let Some(id) = transfer {
            self.start(now, id);
        }
    }

    /// The request computes its prompt here, and the holder is told unless another request of this
    /// engine does want the transfer.
    fn mismatch(&mut self, now: Time, request_id: &str, transfer_id: Option<TransferId>) {
        self.counts.digest_mismatches += 1;
        self.note(
            true,
            format!("request {request_id}: its prompt is not the one that was prefilled"),
        );
        if let Some(id) = transfer_id {
            self.start(now, id);
            self.settle_after(now, id, self.options.sibling_linger.max(MISMATCH_LINGER));
        }
    }

    /// `get_num_new_matched_tokens`: tokens to load beyond the `computed_tokens` cached here. The
    /// last prompt token is always computed here, so a one-token prompt moves nothing.
    pub fn matched_tokens(&mut self, request_id: &str, computed_tokens: u32) -> u32 {
        let Some(request) = self.requests.get_mut(request_id) else {
            return 0;
        };
        match request.phase {
            Phase::Waiting | Phase::Broken(_) => {}
            Phase::Pending { .. } | Phase::Loading { .. } | Phase::Reporting | Phase::Settled => {
                return 0;
            }
        }
        request.computed_tokens = computed_tokens;
        let mut wanted = request.prompt_tokens.saturating_sub(1);
        if let Some(transfer) = request.transfer.and_then(|id| self.transfers.get(&id)) {
            wanted = wanted.min(transfer.params.num_tokens);
        }
        wanted.saturating_sub(computed_tokens)
    }

    /// `update_state_after_alloc`, first call: the request's blocks (first KV cache group), of
    /// which those from `computed_tokens` on are to be filled. The second call, after the load,
    /// changes nothing.
    pub fn handle_allocated(
        &mut self,
        now: Time,
        request_id: &str,
        blocks: &[BlockId],
        external_tokens: u32,
    ) {
        let Some(request) = self.requests.get_mut(request_id) else {
            return;
        };
        let first_block = (request.computed_tokens / self.options.block_size) as usize;
        let past_token = request.computed_tokens.saturating_add(external_tokens);
        let past_block = past_token.div_ceil(self.options.block_size) as usize;
        let dest_blocks =
            |past_block: usize| blocks.get(first_block..past_block).map(<[BlockId]>::to_vec);
        match &request.phase {
            Phase::Waiting if external_tokens == 0 => {
                request.phase = Phase::Settled;
                self.leave(now, request_id, false);
            }
            Phase::Waiting => {
                let Some(dest_blocks) = dest_blocks(past_block) else {
                    // Reading into the blocks that are there would leave the rest unwritten.
                    let failure = Failure::new(
                        FailureReason::Plan,
                        format!(
                            "{} blocks were allocated, tokens up to {past_token} need {past_block}",
                            blocks.len()
                        ),
                    );
                    let there = dest_blocks(blocks.len()).unwrap_or_default();
                    request.phase = Phase::Reporting;
                    self.count_failure(request_id, &failure);
                    self.order_fail(request_id, there, failure);
                    return;
                };
                request.phase = Phase::Pending {
                    first_block,
                    past_token,
                    dest_blocks,
                };
                self.advance(now, request_id);
            }
            Phase::Broken(failure) => {
                if external_tokens == 0 {
                    // Nothing was promised from outside, so computing everything here is exact.
                    request.phase = Phase::Settled;
                    self.leave(now, request_id, false);
                    return;
                }
                let failure = failure.clone();
                let dest_blocks = dest_blocks(past_block.min(blocks.len())).unwrap_or_default();
                request.phase = Phase::Reporting;
                self.order_fail(request_id, dest_blocks, failure);
            }
            Phase::Pending { .. } | Phase::Loading { .. } | Phase::Reporting | Phase::Settled => {}
        }
    }

    /// `request_finished`: the client left, or the request is done. True when the workers still
    /// have to report it, which vLLM waits for by itself.
    pub fn handle_finished(&mut self, now: Time, request_id: &str) {
        let Some(request) = self.requests.get_mut(request_id) else {
            return;
        };
        match &mut request.phase {
            Phase::Waiting | Phase::Broken(_) | Phase::Settled => {
                self.leave(now, request_id, false);
                self.requests.remove(request_id);
            }
            Phase::Pending { dest_blocks, .. } => {
                request.finished = true;
                let dest_blocks = std::mem::take(dest_blocks);
                request.phase = Phase::Reporting;
                let failure = Failure::new(FailureReason::Cancelled, "the request was aborted");
                self.order_fail(request_id, dest_blocks, failure);
            }
            Phase::Loading { .. } => {
                request.finished = true;
                let failure = Failure::new(FailureReason::Cancelled, "the request was aborted");
                self.order_cancel(request_id, failure);
            }
            Phase::Reporting => request.finished = true,
        }
    }

    /// vLLM's `request_finished` for a request that was rejected before it reached the scheduler,
    /// under an id that was never announced: the holder is told that nobody will read.
    pub fn handle_rejected(&mut self, now: Time, params: Result<TransferParams, ParamsError>) {
        let Ok(TransferParams::Decode(params)) = params else {
            return;
        };
        if params.engine == self.identity.engine {
            return;
        }
        let transfer_id = params.transfer_id;
        if self.join(now, *params).is_ok() {
            self.start(now, transfer_id);
            self.settle_when_unused(now, transfer_id);
        }
    }

    /// A worker could not read from source rank `tp_rank` for this request, because the rank is
    /// gone or out of reach. Comes before the request's [`Consumer::handle_received`].
    pub fn handle_source_lost(&mut self, now: Time, request_id: &str, tp_rank: TpRank) {
        let Some(peer) = self
            .requests
            .get(request_id)
            .and_then(|request| self.transfers.get(&request.transfer?))
            .filter(|transfer| tp_rank.0 < transfer.params.tp_size)
            .and_then(|transfer| self.peers.get_mut(&transfer.peer))
        else {
            return;
        };
        if peer.health.failed(now, tp_rank) {
            self.counts.quarantines += 1;
            let text = format!(
                "source tp_rank {tp_rank} of prefill engine {} is avoided for a while",
                peer.address.engine
            );
            self.note(true, text);
        }
    }

    /// All workers have reported `finished_recving`; `failed` when any of them failed.
    pub fn handle_received(&mut self, now: Time, request_id: &str, failed: bool) {
        let Some(request) = self.requests.get_mut(request_id) else {
            return;
        };
        match request.phase {
            Phase::Loading { .. } | Phase::Reporting => {}
            // No worker was told to report it.
            Phase::Waiting | Phase::Broken(_) | Phase::Pending { .. } | Phase::Settled => return,
        }
        request.phase = Phase::Settled;
        let finished = request.finished;
        self.leave(now, request_id, !failed);
        if finished {
            self.requests.remove(request_id);
        }
    }

    /// Orders for the next step's metadata.
    pub fn take_orders(&mut self, now: Time) -> StepOrders {
        let ready: Vec<String> = self
            .requests
            .iter()
            .filter(|(_, request)| matches!(request.phase, Phase::Pending { .. }))
            .map(|(id, _)| id.clone())
            .collect();
        for request_id in ready {
            self.advance(now, &request_id);
        }
        self.refresh_deadlines(now);
        let mut orders = std::mem::take(&mut self.orders);
        self.counts.loads += orders.loads.len() as u64;
        orders.pending = u32::try_from(
            self.requests
                .values()
                .filter(|request| match request.phase {
                    Phase::Pending { .. } | Phase::Loading { .. } | Phase::Reporting => true,
                    Phase::Waiting | Phase::Broken(_) | Phase::Settled => false,
                })
                .count(),
        )
        .unwrap_or(u32::MAX);
        orders
    }
}
