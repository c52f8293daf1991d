//! The steps of a prefill engine: what vLLM's scheduler and workers do, and ours in them.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use hetero_kv_core::producer::{FinishedPrefill, ReleaseOrder};
use hetero_kv_core::wire::params::RemotePrefill;

use crate::book::Invariant;
use crate::fault::Fault;
use crate::network::CONTROL_PORT;
use crate::prefill::{Held, PrefillMail, Running};
use crate::router::digest;
use crate::scenario::BLOCK_TOKENS;
use crate::world::{Event, World};

impl World {
    /// One step of the scheduler: admits, makes the orders, starts the forward pass.
    pub(crate) fn prefill_step(&mut self, p: usize, incarnation: u64) {
        if !self.prefill[p].is(incarnation) {
            return;
        }
        let long = self.step_time();
        let Some(engine) = &mut self.prefill[p].engine else {
            return;
        };
        for mail in std::mem::take(&mut engine.mail) {
            match mail {
                PrefillMail::Add(client) => engine.waiting.push_back(client),
                PrefillMail::Abort(client) => {
                    engine.waiting.retain(|waiting| *waiting != client);
                    let (gone, stay) = std::mem::take(&mut engine.running)
                        .into_iter()
                        .partition(|running| running.client == client);
                    engine.running = stay;
                    for running in gone {
                        engine.pool.give_back(&running.blocks);
                    }
                }
            }
        }
        while let Some(client) = engine.waiting.front().copied() {
            let blocks = self.clients[client].tokens.div_ceil(BLOCK_TOKENS);
            let Some(blocks) = engine.pool.take(blocks as usize) else {
                break;
            };
            engine.waiting.pop_front();
            engine.running.push(Running {
                client,
                blocks,
                tokens_done: 0,
            });
        }
        let orders = Rc::new(std::mem::take(&mut engine.orders));
        let idle = engine.running.is_empty();
        let ranks = engine.ranks.len();
        let long = if idle {
            Duration::from_millis(20)
        } else {
            long
        };
        if !orders.is_empty() {
            for rank in 0..ranks {
                let within = long.mul_f64(0.9).min(self.millis(0, 20));
                self.after(
                    within,
                    Event::PrefillRank(p, incarnation, rank, Rc::clone(&orders)),
                );
            }
        }
        self.after(long, Event::PrefillStepEnd(p, incarnation));
    }

    /// One rank of P carries out a step's orders: the lease page first, the report after it.
    pub(crate) fn prefill_rank(
        &mut self,
        p: usize,
        incarnation: u64,
        rank: usize,
        orders: &[ReleaseOrder],
    ) {
        if !self.prefill[p].is(incarnation) {
            return;
        }
        for order in orders {
            self.check_readers_of(p, incarnation, order);
        }
        let Some(engine) = &mut self.prefill[p].engine else {
            return;
        };
        let holder = &mut engine.ranks[rank];
        if !holder.alive {
            return;
        }
        for order in orders {
            holder.page.end(order.lease);
            holder.sent.push(order.request_id.clone());
        }
    }

    pub(crate) fn prefill_step_end(&mut self, p: usize, incarnation: u64) {
        if !self.prefill[p].is(incarnation) {
            return;
        }
        self.compute_prefills(p);
        self.collect_sent(p);
        let Some(engine) = &mut self.prefill[p].engine else {
            return;
        };
        engine.stepping = false;
        let work = !engine.mail.is_empty()
            || !engine.waiting.is_empty()
            || !engine.running.is_empty()
            || !engine.held.is_empty();
        let wedged = engine.ranks.iter().any(|rank| !rank.alive);
        if work && !wedged {
            self.wake_prefill(p);
        }
    }

    pub(crate) fn compute_prefills(&mut self, p: usize) {
        let host = &mut self.prefill[p];
        let now = host.clock.local(self.now);
        let Some(engine) = &mut host.engine else {
            return;
        };
        let mut finished = Vec::new();
        let mut answered = Vec::new();
        for running in &mut engine.running {
            let client = &self.clients[running.client];
            let past = client
                .tokens
                .min(running.tokens_done + self.rng.count(6, 20));
            for token in running.tokens_done..past {
                for rank in &mut engine.ranks {
                    rank.memory.compute(client.prompt, &running.blocks, token);
                }
            }
            running.tokens_done = past;
            if past == client.tokens {
                finished.push(running.client);
            }
        }
        for number in finished {
            let Some(at) = engine.running.iter().position(|run| run.client == number) else {
                continue;
            };
            let running = engine.running.remove(at);
            let client = &self.clients[number];
            let request_id = format!("prefill-request-{number}");
            let prefill = FinishedPrefill {
                request_id: request_id.clone(),
                transfer_id: client.transfer,
                digest: digest(client.prompt, client.tokens),
                block_ids: vec![running.blocks.clone()],
                num_tokens: client.tokens,
            };
            let params = match engine.producer.finish(now, prefill.clone()) {
                Ok(lease) => {
                    engine.ledger.granted(&mut self.book, now, &prefill, lease);
                    engine.held.insert(
                        request_id.clone(),
                        Held {
                            blocks: running.blocks,
                            lease,
                            end: None,
                            reported: BTreeSet::new(),
                        },
                    );
                    Some(RemotePrefill {
                        transfer_id: client.transfer,
                        engine: engine.identity.engine.clone(),
                        incarnation: engine.identity.incarnation,
                        host: format!("prefill-{p}"),
                        port: CONTROL_PORT + u16::try_from(p).unwrap_or(0),
                        dp_rank: engine.identity.dp_rank,
                        request_id,
                        tp_size: engine.identity.tp_size,
                        pp_size: engine.identity.pp_size,
                        block_ids: prefill.block_ids,
                        num_tokens: client.tokens,
                        lease_epoch: lease.epoch.0,
                        prompt_digest: prefill.digest,
                    })
                }
                Err(error) => {
                    self.book.trace(|| format!("{request_id}: {error}"));
                    self.book.count("prefills without a lease");
                    engine.pool.give_back(&running.blocks);
                    None
                }
            };
            self.clients[number].params = params;
            answered.push(number);
        }
        for number in answered {
            let way = self.millis(0, 5);
            self.after(way, Event::Prefilled(number));
        }
    }

    /// vLLM's aggregator and scheduler: an id passes when every rank has reported it.
    pub(crate) fn collect_sent(&mut self, p: usize) {
        let Some(engine) = &mut self.prefill[p].engine else {
            return;
        };
        let mut reports = Vec::new();
        for (rank, holder) in engine.ranks.iter_mut().enumerate() {
            reports.extend(holder.sent.drain(..).map(|request| (rank, request)));
        }
        for (rank, request) in reports {
            let whole = engine.ranks.len();
            let known = engine.held.get_mut(&request);
            let fresh = known.map(|held| (held.reported.insert(rank), held.reported.len()));
            match fresh {
                Some((true, count)) if count == whole => {}
                Some((true, _)) => continue,
                Some((false, _)) | None => {
                    self.book.broken(
                        Invariant::StrayReport,
                        format!("prefill {p} rank {rank}: {request} is not waited for"),
                    );
                    continue;
                }
            }
            let Some(held) = engine.held.remove(&request) else {
                continue;
            };
            engine.producer.handle_sent(&request);
            engine.ledger.freed(&request);
            for rank in &engine.ranks {
                let epoch = rank.page.epoch(held.lease.slot);
                if rank.alive && epoch <= held.lease.epoch {
                    self.book.broken(
                        Invariant::FreedBeforeBump,
                        format!("prefill {p}: {request} under {:?}", held.lease),
                    );
                }
            }
            if !engine.pool.give_back(&held.blocks) {
                self.book
                    .broken(Invariant::StrayReport, format!("{request} freed twice"));
            }
            for rank in &mut engine.ranks {
                for block in &held.blocks {
                    rank.memory.poison(*block);
                }
            }
            self.book.trace(|| format!("prefill {p} frees {request}"));
        }
    }

    /// Forward passes differ; some take seconds.
    pub(crate) fn step_time(&mut self) -> Duration {
        if self.book.may(Fault::StepLong) && self.rng.permille(12) {
            self.book.happened(Fault::StepLong);
            return self.millis(400, 3500);
        }
        self.millis(4, 25)
    }
}
