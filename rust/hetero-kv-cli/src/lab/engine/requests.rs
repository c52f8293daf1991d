//! The requests of one engine, from queue to end.

use std::io::Stdout;

use anyhow::Result;
use hetero_kv_core::ids::TransferId;

use super::{
    BlockId, Engine, Fill, FromEngine, Load, Outcome, PREFILLS_PER_STEP, Prefilled, Prompt, Reason,
    Received, digest, ipc,
};

/// Where a request stands.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// Wants blocks.
    Waiting,
    /// In the step under way; its KV is computed here when it does not come from elsewhere.
    Running { recomputed: Option<Option<Reason>> },
    /// Reported by no rank, or not by all.
    Loading { aborted: bool },
    /// To run in the next step.
    Loaded,
    /// To be computed here in the next step, after a failed load.
    Lost(Reason),
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) id: u64,
    /// vLLM's internal id.
    pub(super) name: String,
    prompt: Prompt,
    transfer_id: Option<TransferId>,
    pub(super) state: State,
    blocks: Vec<u32>,
    load: Load,
}

/// The number in an internal id of a request of decode.
pub(super) fn id_of(name: &str) -> Option<u64> {
    name.strip_prefix("d-")?.parse().ok()
}

impl Request {
    pub(super) fn prefill(id: u64, prompt: Prompt, transfer_id: TransferId) -> Self {
        Self::new(id, format!("p-{id}"), prompt, Some(transfer_id))
    }

    pub(super) fn decode(id: u64, prompt: Prompt) -> Self {
        Self::new(id, format!("d-{id}"), prompt, None)
    }

    fn new(id: u64, name: String, prompt: Prompt, transfer_id: Option<TransferId>) -> Self {
        Self {
            id,
            name,
            prompt,
            transfer_id,
            state: State::Waiting,
            blocks: Vec::new(),
            load: Load::default(),
        }
    }

    fn block_ids(&self) -> Vec<BlockId> {
        self.blocks.iter().map(|block| BlockId(*block)).collect()
    }
}

impl Engine {
    /// Those computed in this step.
    pub(super) fn schedule_prefills(&mut self) -> Vec<u64> {
        let mut scheduled = Vec::new();
        for request in self.requests.values_mut() {
            let need = self.config.model.blocks_for(request.prompt.tokens) as usize;
            // First come, first served: a long prompt is not overtaken for ever.
            if scheduled.len() == PREFILLS_PER_STEP || need > self.free.len() {
                break;
            }
            request.blocks = self.free.split_off(self.free.len() - need);
            request.state = State::Running { recomputed: None };
            self.fills.push(Fill {
                content: request.prompt.content(),
                blocks: request.blocks.clone(),
            });
            scheduled.push(request.id);
        }
        scheduled
    }

    /// Those that run in this step.
    pub(super) fn schedule_decodes(&mut self) -> Vec<u64> {
        let mut running = Vec::new();
        let mut full = false;
        for request in self.requests.values_mut() {
            match std::mem::replace(&mut request.state, State::Waiting) {
                State::Waiting if full => {}
                State::Waiting => {
                    let need = self.config.model.blocks_for(request.prompt.tokens) as usize;
                    if need > self.free.len() {
                        full = true;
                        continue;
                    }
                    let external = self.side.matched_tokens(&request.name, 0);
                    request.blocks = self.free.split_off(self.free.len() - need);
                    self.side
                        .allocated(&request.name, &request.block_ids(), external);
                    if external > 0 {
                        let content = request.prompt.content();
                        self.expected.push((request.name.clone(), content));
                        request.state = State::Loading { aborted: false };
                        continue;
                    }
                    let lost = (request.prompt.tokens > 1).then_some(None);
                    request.state = State::Running { recomputed: lost };
                    self.fills.push(Fill {
                        content: request.prompt.content(),
                        blocks: request.blocks.clone(),
                    });
                    running.push(request.id);
                }
                State::Loaded => {
                    self.side.allocated(&request.name, &request.block_ids(), 0);
                    request.state = State::Running { recomputed: None };
                    running.push(request.id);
                }
                State::Lost(reason) => {
                    self.side.allocated(&request.name, &request.block_ids(), 0);
                    request.state = State::Running {
                        recomputed: Some(Some(reason)),
                    };
                    self.fills.push(Fill {
                        content: request.prompt.content(),
                        blocks: request.blocks.clone(),
                    });
                    running.push(request.id);
                }
                state @ (State::Loading { .. } | State::Running { .. }) => request.state = state,
            }
        }
        running
    }

    pub(super) fn finish_prefill(&mut self, id: u64, output: &mut Stdout) -> Result<()> {
        let Some(request) = self.requests.remove(&id) else {
            return Ok(());
        };
        let answer = self.side.prefilled(Prefilled {
            request_id: request.name.clone(),
            transfer_id: request.transfer_id,
            digest: digest(request.prompt),
            block_ids: vec![request.block_ids()],
            num_tokens: request.prompt.tokens,
        });
        let params = match answer {
            Ok(params) => {
                // Under the lease, and before anybody can read.
                for tp in self.corrupt.clone() {
                    self.corrupt_blocks(tp, &request.blocks)?;
                }
                self.delayed.insert(request.name, request.blocks);
                Ok(params.to_json().to_string())
            }
            Err(refused) => {
                self.free.extend(request.blocks);
                Err(refused.to_string())
            }
        };
        let message = FromEngine::Prefilled {
            request: id,
            params,
        };
        Ok(ipc::send(output, &message)?)
    }

    /// A step of decode has run: the request has its one token.
    pub(super) fn finish_decode(&mut self, id: u64, output: &mut Stdout) -> Result<()> {
        let Some(request) = self.requests.get(&id) else {
            return Ok(());
        };
        let outcome = match &request.state {
            State::Running {
                recomputed: Some(reason),
            } => Outcome::Recomputed(reason.clone()),
            State::Running { recomputed: None }
            | State::Waiting
            | State::Loading { .. }
            | State::Loaded
            | State::Lost(_) => Outcome::Ok,
        };
        self.side.finished(&request.name);
        self.end_decode(id, outcome, output)
    }

    /// vLLM's `finish_requests`: blocks of a load stay until every rank has reported it.
    pub(super) fn abort(&mut self, id: u64, output: &mut Stdout) -> Result<()> {
        let Some(request) = self.requests.get_mut(&id) else {
            return Ok(());
        };
        if request.transfer_id.is_some() {
            // A prefill is in the queue between steps, or it is over.
            self.requests.remove(&id);
            return Ok(ipc::send(
                output,
                &FromEngine::PrefillAborted { request: id },
            )?);
        }
        self.side.finished(&request.name);
        if let State::Loading { aborted } = &mut request.state {
            *aborted = true;
            return Ok(());
        }
        self.end_decode(id, Outcome::Cancelled, output)
    }

    /// What every rank has reported.
    pub(super) fn deliver(&mut self, output: &mut Stdout) -> Result<()> {
        for (name, reports) in self.counting.take_received() {
            self.loaded(&name, reports, output)?;
        }
        for name in self.counting.take_sent() {
            self.side.sent(&name);
            self.free
                .extend(self.delayed.remove(&name).unwrap_or_default());
        }
        Ok(())
    }

    fn loaded(&mut self, name: &str, reports: Vec<Received>, output: &mut Stdout) -> Result<()> {
        let mut failure = None;
        let mut load = Load::default();
        for report in reports {
            if let Some(source) = report.lost_source {
                self.side.source_lost(name, source);
            }
            failure = failure.or(report.failure);
            load.reads.extend(report.load.reads);
            load.planned_bytes += report.load.planned_bytes;
            load.mismatched_bytes += report.load.mismatched_bytes;
            load.spans.extend(report.load.spans);
        }
        self.side.received(name, failure.is_some());
        let Some(request) = id_of(name).and_then(|id| self.requests.get_mut(&id)) else {
            return Ok(());
        };
        let id = request.id;
        request.load = load;
        if matches!(request.state, State::Loading { aborted: true }) {
            return self.end_decode(id, Outcome::Cancelled, output);
        }
        match failure {
            None => request.state = State::Loaded,
            Some(reason) if self.config.recompute => request.state = State::Lost(reason),
            Some(reason) => {
                self.side.finished(name);
                return self.end_decode(id, Outcome::Failed(reason), output);
            }
        }
        Ok(())
    }

    fn end_decode(&mut self, id: u64, outcome: Outcome, output: &mut Stdout) -> Result<()> {
        let Some(request) = self.requests.remove(&id) else {
            return Ok(());
        };
        self.free.extend(request.blocks);
        let mut load = request.load;
        load.mismatched_bytes += std::mem::take(&mut self.untold_mismatches);
        let message = FromEngine::Decoded {
            request: id,
            outcome,
            load,
        };
        Ok(ipc::send(output, &message)?)
    }
}
