//! The reference model's view of the holders: every message and its answer, every release, and what
//! holds on every prefill engine after every event.

use std::collections::BTreeSet;

use hetero_kv_core::ids::{EngineId, Incarnation};
use hetero_kv_core::producer::{ConnectionId, ConsumerKey, ProducerOutput, ReleaseOrder};
use hetero_kv_core::wire::message::Message;

use crate::book::Invariant;
use crate::fault::explains_expiry;
use crate::ledger::End;
use crate::prefill::HolderRank;
use crate::world::World;

impl World {
    /// A message reaches P's control thread; the reference model hears it too, and judges the answer.
    pub(crate) fn prefill_hears(
        &mut self,
        p: usize,
        d: usize,
        decode_incarnation: u64,
        connection: ConnectionId,
        message: Message,
    ) {
        let shape = self.decode[d].shape;
        let host = &mut self.prefill[p];
        let now = host.clock.local(self.now);
        let Some(engine) = &mut host.engine else {
            return;
        };
        let who: ConsumerKey = (
            EngineId::new(&format!("decode-{d}")).expect("short and printable"),
            Incarnation(decode_incarnation),
        );
        engine
            .producer
            .handle_message(now, connection, message.clone());
        while let Some(output) = engine.producer.poll_output() {
            engine.outbox.push_back(output);
        }
        let answer = engine.outbox.iter().find_map(|output| match output {
            ProducerOutput::Send(to, answer) if *to == connection => Some(answer),
            ProducerOutput::Send(..) | ProducerOutput::Close(_) => None,
        });
        let (book, ledger) = (&mut self.book, &mut engine.ledger);
        // With keys the acceptance follows the proof.
        let accepted = matches!(answer, Some(Message::Accept(_)));
        match &message {
            Message::Hello(hello) => {
                if hello.expect_engine != engine.identity.engine
                    || hello.expect_incarnation != engine.identity.incarnation
                {
                    engine.strays.insert(connection, hello.expect_incarnation);
                }
            }
            Message::Claim(claim) => {
                let proof = Some((claim.epoch, claim.prompt_digest));
                let which = (claim.transfer_id, claim.question);
                ledger.answered(book, now, &who, which, proof, answer);
            }
            Message::Renew(renew) => {
                let which = (renew.transfer_id, renew.question);
                ledger.answered(book, now, &who, which, None, answer);
            }
            Message::Ack(ack) => {
                let which = (ack.transfer_id, ack.number.unwrap_or(0));
                ledger.acknowledged(&who, which, &ack.ranks, shape);
            }
            Message::Release(release) => {
                let which = (release.transfer_id, release.number.unwrap_or(0));
                ledger.released(&who, which);
            }
            Message::Proof(_) => book.count("handshakes with keys"),
            Message::Accept(_)
            | Message::Reject(_)
            | Message::Layout(_)
            | Message::Granted(_)
            | Message::Gone(_)
            | Message::Ping
            | Message::Pong
            | Message::Bye
            | Message::Challenge(_) => {}
        }
        if let Some(meant) = engine.strays.get(&connection)
            && accepted
        {
            book.broken(
                Invariant::PairedWithWrongStart,
                format!("prefill {p} accepts a greeting to {meant:?}"),
            );
        }
        self.collect_orders(p);
    }

    /// Releases decided by the last event, judged by the reference model; they wait for a step.
    pub(crate) fn collect_orders(&mut self, p: usize) {
        let host = &mut self.prefill[p];
        let now = host.clock.local(self.now);
        let Some(engine) = &mut host.engine else {
            return;
        };
        for order in engine.producer.take_releases() {
            let end = engine.ledger.ordered(&mut self.book, now, &order);
            self.book
                .trace(|| format!("prefill {p} orders {order:?}: {end:?}"));
            self.book.count(match &end {
                Some(End::Settled(_)) => "leases settled",
                Some(End::Expired) => "leases expired",
                Some(End::Revoked) => "leases revoked",
                None => "leases ended without a reason",
            });
            if end == Some(End::Expired) && !self.book.any_happened(&explains_expiry()) {
                self.book.broken(
                    Invariant::UnexplainedExpiry,
                    format!("prefill {p}: {order:?}"),
                );
            }
            if let Some(held) = engine.held.get_mut(&order.request_id) {
                held.end = end;
            }
            engine.orders.push(order);
        }
    }

    /// What holds on every prefill engine after every event.
    pub(crate) fn check_holders(&mut self) {
        for p in 0..self.prefill.len() {
            let slack = self.slack;
            let host = &self.prefill[p];
            let now = host.clock.local(self.now);
            let Some(engine) = &host.engine else {
                continue;
            };
            let wedged = engine.ranks.iter().any(|rank| !rank.alive);
            if host.paused_until <= self.now && !wedged {
                engine.ledger.check_due(&mut self.book, now, slack);
            }
            let leased: BTreeSet<&str> = engine
                .ledger
                .requests()
                .map(|(request, ..)| request)
                .collect();
            let pinned: BTreeSet<&str> = engine.held.keys().map(String::as_str).collect();
            let gauge = engine.producer.gauges(now).leases_alive;
            let blocks: usize = engine.held.values().map(|held| held.blocks.len()).sum();
            let most = &mut self.book.coverage.pinned_blocks_max;
            *most = (*most).max(blocks as u64);
            if leased != pinned || gauge != pinned.len() {
                self.book.broken(
                    Invariant::PinnedUnlikeLeased,
                    format!("prefill {p}: pinned {pinned:?}, leased {leased:?}, gauge {gauge}"),
                );
            }
            for (request, fence, ordered) in engine.ledger.requests() {
                let stands = |rank: &HolderRank| rank.page.epoch(fence.slot) == fence.epoch;
                if !ordered && !engine.ranks.iter().all(stands) {
                    self.book.broken(
                        Invariant::LeaseNotOnPage,
                        format!("prefill {p}: {request} under {fence:?}"),
                    );
                }
            }
        }
    }

    /// A rank of P is about to end a lease: no reader whose time is not over may be under it, unless
    /// another engine has settled it or the cache was reset.
    pub(crate) fn check_readers_of(&mut self, p: usize, incarnation: u64, order: &ReleaseOrder) {
        let end = self.prefill[p]
            .engine
            .as_ref()
            .and_then(|engine| engine.held.get(&order.request_id))
            .and_then(|held| held.end.clone());
        for host in &self.decode {
            let now = host.clock.local(self.now);
            let Some(engine) = &host.engine else {
                continue;
            };
            let ours = (engine.identity.engine.clone(), engine.identity.incarnation);
            match &end {
                Some(End::Revoked) => continue,
                Some(End::Settled(who)) if *who != ours => continue,
                Some(End::Settled(_) | End::Expired) | None => {}
            }
            for (number, rank) in engine.ranks.iter().enumerate() {
                let reader = rank.jobs.iter().find(|(_, job)| {
                    job.prefill == p
                        && job.prefill_incarnation == incarnation
                        && job.lease == order.lease
                        && job.stopped.is_none()
                        && now < job.deadline
                });
                if let Some((request, _)) = reader {
                    self.book.broken(
                        Invariant::ReleasedUnderReader,
                        format!(
                            "prefill {p} ends {:?} ({end:?}) under {request} on rank {number} of {}",
                            order.lease, engine.identity.engine
                        ),
                    );
                }
            }
        }
    }
}
