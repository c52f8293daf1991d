//! What P makes of each message of a consumer.

use super::ConnectionId;
use super::{ConsumerKey, Peer, Producer, State};
use crate::ids::TransferId;
use crate::layout::TP_SIZE_MAX;
use crate::time::Time;
use crate::wire::message::{
    Ack, Claim, GoneReason, Granted, Hello, Message, RejectCode, Release, Renew,
};

impl Producer {
    /// Whether who greets us is an engine to pair with; refuses it by what is not right.
    pub(super) fn is_welcome(&mut self, connection: ConnectionId, hello: &Hello) -> bool {
        let refusal = if !(1..=TP_SIZE_MAX).contains(&hello.from.tp_size)
            || !(1..=TP_SIZE_MAX).contains(&hello.from.pp_size)
        {
            // Acknowledgements are counted up to the product of the two.
            Some((
                RejectCode::Protocol,
                format!(
                    "tp_size and pp_size: the peer says {} and {}, each has to be in 1..={TP_SIZE_MAX}",
                    hello.from.tp_size, hello.from.pp_size
                ),
            ))
        } else if hello.any_engine && self.is_connected_to(hello) {
            Some((
                RejectCode::AlreadyConnected,
                format!(
                    "engine {} ({}) is connected already",
                    hello.from.engine, hello.from.incarnation
                ),
            ))
        } else if !hello.any_engine && hello.expect_engine != self.identity.engine {
            Some((
                RejectCode::WrongEngine,
                format!(
                    "engine_id: {} lives here, the peer looks for {}",
                    self.identity.engine, hello.expect_engine
                ),
            ))
        } else if !hello.any_engine && hello.expect_incarnation != self.identity.incarnation {
            Some((
                RejectCode::WrongIncarnation,
                format!(
                    "incarnation: {} lives here, the peer looks for {}; the engine was restarted",
                    self.identity.incarnation, hello.expect_incarnation
                ),
            ))
        } else if hello.compat_digest != self.fields.digest() {
            let reason = "the caches of the two engines are not alike".to_owned();
            self.counts.rejected_peers += 1;
            let fields = self.fields.clone();
            self.reject(connection, RejectCode::Incompatible, reason, Some(fields));
            return false;
        } else {
            None
        };
        if let Some((code, reason)) = refusal {
            self.refuse(connection, code, reason);
            return false;
        }
        true
    }

    pub(super) fn refuse(&mut self, connection: ConnectionId, code: RejectCode, reason: String) {
        if code != RejectCode::AlreadyConnected {
            self.counts.rejected_peers += 1;
        }
        self.reject(connection, code, reason, None);
    }

    fn is_connected_to(&self, hello: &Hello) -> bool {
        self.peers.values().any(|peer| match peer {
            Peer::Known { key, .. } => {
                (&key.0, key.1) == (&hello.from.engine, hello.from.incarnation)
            }
            Peer::Anonymous(_) | Peer::Challenged { .. } => false,
        })
    }

    pub(super) fn handle_claim(
        &mut self,
        now: Time,
        consumer: &ConsumerKey,
        claim: &Claim,
    ) -> Option<Message> {
        let id = claim.transfer_id;
        if self.is_late(consumer, id, Some(claim.question)) {
            return None;
        }
        if let Some(lease) = self.leases.get(&id)
            && (lease.fence.epoch.0 != claim.epoch || lease.digest != claim.prompt_digest)
        {
            return Some(self.gone(id, GoneReason::Foreign, claim.question));
        }
        Some(self.grant(now, consumer, id, claim.question))
    }

    pub(super) fn handle_renew(
        &mut self,
        now: Time,
        consumer: &ConsumerKey,
        renew: &Renew,
    ) -> Option<Message> {
        let id = renew.transfer_id;
        if self.is_late(consumer, id, Some(renew.question)) {
            return None;
        }
        // Only a claim proves which prompt and which epoch are meant.
        if let Some(lease) = self.leases.get(&id)
            && !lease.is_read_by(consumer)
        {
            return Some(self.gone(id, GoneReason::Foreign, renew.question));
        }
        Some(self.grant(now, consumer, id, renew.question))
    }

    /// Whether a message is older than one of the same consumer engine about the same lease, which
    /// nobody waits for an answer to. Counts it.
    fn is_late(&mut self, consumer: &ConsumerKey, id: TransferId, number: Option<u64>) -> bool {
        let late = self
            .leases
            .get(&id)
            .is_some_and(|lease| lease.is_late(consumer, number));
        self.counts.late += u64::from(late);
        late
    }

    fn grant(
        &mut self,
        now: Time,
        consumer: &ConsumerKey,
        id: TransferId,
        question: u64,
    ) -> Message {
        let Some(lease) = self.leases.get_mut(&id) else {
            let reason = self.ended.get(&id).copied();
            return self.gone(id, reason.unwrap_or(GoneReason::Unknown), question);
        };
        let State::Held { expires } = &mut lease.state else {
            let reason = lease.ended.unwrap_or(GoneReason::Released);
            return self.gone(id, reason, question);
        };
        // A sweep that is late by a scheduling delay must not hand out time that is over.
        if *expires <= now {
            return self.gone(id, GoneReason::Expired, question);
        }
        // Never shortens: the first lease may be the longer one.
        *expires = (*expires).max(now + self.times.renewal);
        let expires = *expires;
        lease.granted_to(consumer, question);
        Message::Granted(Box::new(Granted {
            transfer_id: id,
            granted_ms: u64::try_from(expires.since(now).as_millis()).unwrap_or(u64::MAX),
            lease: lease.fence,
            block_ids: lease.block_ids.clone(),
            num_tokens: lease.num_tokens,
            question,
        }))
    }

    pub(super) fn handle_ack(&mut self, consumer: &ConsumerKey, ranks: (u32, u32), ack: Ack) {
        if self.is_late(consumer, ack.transfer_id, ack.number) {
            return;
        }
        let Some(lease) = self.leases.get_mut(&ack.transfer_id) else {
            self.counts.late += 1;
            return;
        };
        if lease.state == State::Ordered || !lease.is_read_by(consumer) {
            self.counts.late += 1;
            return;
        }
        if lease.acknowledge(consumer, ack.number, ack.ranks, ranks) {
            self.counts.read_out += 1;
            self.end(ack.transfer_id, GoneReason::Released);
        }
    }

    pub(super) fn handle_release(&mut self, consumer: &ConsumerKey, release: &Release) {
        let id = release.transfer_id;
        if self.is_late(consumer, id, release.number) {
            return;
        }
        let Some(lease) = self.leases.get_mut(&id) else {
            self.counts.late += 1;
            return;
        };
        if lease.state == State::Ordered {
            self.counts.late += 1;
            return;
        }
        // Another engine that has claimed the same transfer (a retried decode) keeps it alive.
        let last = lease.give_back(consumer, release.number);
        if last {
            self.counts.released += 1;
            self.end(id, GoneReason::Released);
        }
    }
}
