//! The steps of a decode engine: what vLLM's scheduler asks of the connector, and what it does with
//! the workers' reports.

use std::rc::Rc;
use std::time::Duration;

use hetero_kv_core::step::StepOrders;
use hetero_kv_core::wire::params::TransferParams;

use crate::book::{Invariant, Outcome};
use crate::decode::{DecodeMail, DecodeRequest, Stage};
use crate::fault::Fault;
use crate::router::{Params, digest};
use crate::scenario::BLOCK_TOKENS;
use crate::world::{Event, Host, World};

impl World {
    /// One step of the scheduler: mail, admissions, orders, the forward pass.
    pub(crate) fn decode_step(&mut self, d: usize, incarnation: u64) {
        if !self.decode[d].is(incarnation) {
            return;
        }
        self.read_mail(d);
        self.admit(d);
        self.preempt(d);
        let host = &mut self.decode[d];
        let now = host.clock.local(self.now);
        let Some(engine) = &mut host.engine else {
            return;
        };
        let orders = engine.consumer.take_orders(now);
        for note in engine.consumer.take_notes() {
            self.book.trace(|| format!("decode {d}: {}", note.text));
        }
        let waits_only = engine
            .requests
            .values()
            .all(|request| matches!(request.stage, Stage::Loading { .. } | Stage::Queued));
        let ranks = engine.ranks.len();
        self.check_orders(d, &orders);
        let length = if waits_only {
            self.millis(10, 20)
        } else {
            self.step_time()
        };
        if orders != StepOrders::default() {
            let Ok(encoded) = orders.encode() else {
                self.book
                    .broken(Invariant::Spins, "orders do not encode".into());
                return;
            };
            let encoded = Rc::new(encoded);
            for rank in 0..ranks {
                // `start_load_kv` follows the forward pass; time counts from before it.
                let within = length.mul_f64(0.5) + self.millis(0, 1).min(length.mul_f64(0.4));
                self.after(
                    within,
                    Event::DecodeRank(d, incarnation, rank, Rc::clone(&encoded), now),
                );
            }
        }
        self.after(length, Event::DecodeStepEnd(d, incarnation));
    }

    pub(crate) fn read_mail(&mut self, d: usize) {
        let now = self.decode[d].clock.local(self.now);
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        for mail in std::mem::take(&mut engine.mail) {
            let Some(engine) = &mut self.decode[d].engine else {
                return;
            };
            match mail {
                DecodeMail::Add(id) => {
                    let Some(leg) = self.legs.get(&id) else {
                        continue;
                    };
                    engine.consumer.handle_new_request(
                        now,
                        &id,
                        TransferParams::parse(&leg.params_text),
                        digest(leg.prompt, leg.tokens),
                        leg.tokens,
                    );
                    let request = DecodeRequest {
                        stage: Stage::Queued,
                        blocks: Vec::new(),
                        computed: 0,
                        external: 0,
                        asked: false,
                        aborted: false,
                        failed: None,
                        reported: Default::default(),
                        load_failed: None,
                        peer: None,
                    };
                    engine.requests.insert(id.clone(), request);
                    engine.waiting.push_back(id);
                }
                DecodeMail::Rejected(id) => {
                    if let Some(leg) = self.legs.get(&id) {
                        engine
                            .consumer
                            .handle_rejected(now, TransferParams::parse(&leg.params_text));
                    }
                    self.end_leg(&id, Outcome::Rejected);
                }
                DecodeMail::Abort(id) => self.abort(d, &id),
            }
        }
    }

    pub(crate) fn abort(&mut self, d: usize, id: &str) {
        let now = self.decode[d].clock.local(self.now);
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let Some(request) = engine.requests.get_mut(id).filter(|r| !r.aborted) else {
            return;
        };
        engine.consumer.handle_finished(now, id);
        self.book.happened(match request.stage {
            Stage::Queued => Fault::AbortQueued,
            Stage::Loading { .. } => Fault::AbortLoading,
            Stage::Loaded | Stage::Running { .. } => Fault::AbortRunning,
        });
        self.book
            .trace(|| format!("decode {d}: {id} aborted in {:?}", request.stage));
        request.aborted = true;
        match request.stage {
            // vLLM keeps the blocks until `finished_recving`.
            Stage::Loading { .. } => {}
            Stage::Queued | Stage::Loaded | Stage::Running { .. } => self.drop_request(d, id),
        }
        self.end_leg(id, Outcome::Aborted);
    }

    /// Frees a request's blocks and forgets it; the connector has been told.
    pub(crate) fn drop_request(&mut self, d: usize, id: &str) {
        self.free_blocks(d, id);
        if let Some(engine) = &mut self.decode[d].engine {
            engine.requests.remove(id);
            engine.waiting.retain(|waiting| waiting != id);
        }
    }

    pub(crate) fn free_blocks(&mut self, d: usize, id: &str) {
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let Some(request) = engine.requests.get_mut(id) else {
            return;
        };
        let blocks = std::mem::take(&mut request.blocks);
        if let Some(op) = self.ops.values().find(|op| {
            op.decode == d && op.writes() && op.dest_blocks.iter().any(|b| blocks.contains(b))
        }) {
            self.book.broken(
                Invariant::FreedUnderWriter,
                format!(
                    "decode {d} frees the blocks of {id}; rank {} of {} still reads into them",
                    op.rank, op.request
                ),
            );
        }
        if !engine.pool.give_back(&blocks) {
            self.book.broken(
                Invariant::StrayReport,
                format!("decode {d}: {id} freed twice"),
            );
        }
        for rank in &mut engine.ranks {
            for block in &blocks {
                rank.memory.poison(*block);
            }
        }
    }

    pub(crate) fn admit(&mut self, d: usize) {
        loop {
            let now = self.decode[d].clock.local(self.now);
            let require_kv = self.scenario.options.require_kv;
            let Some(engine) = &mut self.decode[d].engine else {
                return;
            };
            let Some(id) = engine.waiting.front().cloned() else {
                return;
            };
            let (Some(leg), Some(request)) = (self.legs.get(&id), engine.requests.get_mut(&id))
            else {
                engine.waiting.pop_front();
                continue;
            };
            // A prefix that happens to be cached here.
            let whole_blocks = (leg.tokens - 1) / BLOCK_TOKENS;
            let computed = if self.rng.permille(200) {
                self.rng.count(0, whole_blocks) * BLOCK_TOKENS
            } else {
                0
            };
            let external = engine.consumer.matched_tokens(&id, computed);
            let wanted = leg.tokens - 1 - computed;
            let right = if request.asked {
                external == 0
            } else {
                match leg.params {
                    Params::Right => external == wanted,
                    // Taken from outside they have to fail; what is decoded otherwise is checked.
                    Params::Foreign => external == wanted || external == 0 && !require_kv,
                    Params::Changed => external <= wanted,
                    Params::Missing => external == 0,
                }
            };
            if !right {
                self.book.broken(
                    Invariant::WrongMatch,
                    format!(
                        "decode {d}: {id} with {:?} params, asked before: {}, gets {external} of {wanted} tokens",
                        leg.params, request.asked
                    ),
                );
                return;
            }
            let Some(blocks) = engine.pool.take(leg.tokens.div_ceil(BLOCK_TOKENS) as usize) else {
                self.book.count("admissions without blocks");
                return;
            };
            engine.waiting.pop_front();
            request.asked = true;
            request.blocks.clone_from(&blocks);
            request.computed = computed;
            request.external = external;
            let past = if external > 0 { computed } else { leg.tokens };
            for token in 0..past {
                for rank in &mut engine.ranks {
                    rank.memory.compute(leg.prompt, &blocks, token);
                }
            }
            request.stage = if external > 0 {
                Stage::Loading { since: self.now }
            } else {
                Stage::Running {
                    steps: self.rng.count(1, 6),
                }
            };
            self.book.trace(|| {
                format!("decode {d} admits {id}: {computed} tokens here, {external} from outside, {blocks:?}")
            });
            engine
                .consumer
                .handle_allocated(now, &id, &blocks, external);
        }
    }

    /// A running request loses its blocks and starts over.
    pub(crate) fn preempt(&mut self, d: usize) {
        if !self.book.may(Fault::Preemption) || !self.rng.permille(60) {
            return;
        }
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let running = engine
            .requests
            .iter()
            .find(|(_, request)| matches!(request.stage, Stage::Running { .. }))
            .map(|(id, _)| id.clone());
        if let Some(id) = running {
            self.book.happened(Fault::Preemption);
            self.requeue(d, &id);
        }
    }

    pub(crate) fn requeue(&mut self, d: usize, id: &str) {
        self.free_blocks(d, id);
        if let Some(engine) = &mut self.decode[d].engine
            && let Some(request) = engine.requests.get_mut(id)
        {
            request.stage = Stage::Queued;
            request.external = 0;
            engine.waiting.push_front(id.to_owned());
        }
    }

    pub(crate) fn decode_step_end(&mut self, d: usize, incarnation: u64) {
        if !self.decode[d].is(incarnation) {
            return;
        }
        self.run_requests(d);
        self.collect_received(d);
        let limit = self.load_limit();
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        for (id, request) in &engine.requests {
            if let Stage::Loading { since } = request.stage
                && self.now.since(since) > limit
            {
                self.book.broken(
                    Invariant::WaitsTooLong,
                    format!("decode {d}: {id} has waited for {limit:?}"),
                );
            }
        }
        engine.stepping = false;
        if !engine.requests.is_empty() || !engine.mail.is_empty() {
            self.wake_decode(d);
        }
    }

    /// All limits together: the claim, the load, quiescing, and pauses and long steps in between.
    pub(crate) fn load_limit(&self) -> Duration {
        let options = &self.scenario.options;
        options.claim_timeout + options.load_timeout + Duration::from_secs(10) + 3 * self.slack
    }

    /// Requests that compute: the first step decodes from all of the prompt's KV.
    pub(crate) fn run_requests(&mut self, d: usize) {
        let now = self.decode[d].clock.local(self.now);
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        let mut done = Vec::new();
        for (id, request) in &mut engine.requests {
            let Some(leg) = self.legs.get(id) else {
                continue;
            };
            if request.stage == Stage::Loaded {
                // vLLM's second call, which must change nothing.
                engine
                    .consumer
                    .handle_allocated(now, id, &request.blocks, 0);
                for token in request.computed + request.external..leg.tokens {
                    for rank in &mut engine.ranks {
                        rank.memory.compute(leg.prompt, &request.blocks, token);
                    }
                }
                request.stage = Stage::Running {
                    steps: self.rng.count(1, 6),
                };
            }
            let Stage::Running { steps } = &mut request.stage else {
                continue;
            };
            for token in 0..leg.tokens {
                for (number, rank) in engine.ranks.iter_mut().enumerate() {
                    if let Some((word, found)) =
                        rank.memory.foreign(leg.prompt, &request.blocks, token)
                    {
                        self.book.broken(
                            Invariant::ForeignByte,
                            format!("decode {d} rank {number}: {id} decodes {found} for {word:?}"),
                        );
                        return;
                    }
                }
            }
            *steps -= 1;
            if *steps == 0 {
                done.push((id.clone(), request.external > 0, request.failed.is_some()));
            }
        }
        for (id, loaded, failed) in done {
            if let Some(engine) = &mut self.decode[d].engine {
                engine.consumer.handle_finished(now, &id);
            }
            self.drop_request(d, &id);
            let outcome = match (loaded, failed) {
                (true, _) => Outcome::Answered,
                (false, true) => Outcome::Recomputed,
                (false, false) => Outcome::Computed,
            };
            self.end_leg(&id, outcome);
        }
    }

    pub(crate) fn start(&mut self, host: Host) {
        match host {
            Host::Prefill(p) => self.start_prefill(p),
            Host::Decode(d) => self.start_decode(d),
        }
    }
}
