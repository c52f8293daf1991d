//! What P makes of each message of a consumer.

use super::ConnectionId;
use super::{ConsumerKey, Peer, Producer, State};
use crate::ids::TransferId;
use crate::layout::TP_SIZE_MAX;
use crate::time::Time;
use crate::wire::WIRE_VERSION;
use crate::wire::message::{
    Accept, Ack, Claim, GoneReason, Granted, Hello, Message, RejectCode, Renew,
};

impl Producer {
    pub(super) fn handle_hello(&mut self, connection: ConnectionId, hello: &Hello) {
        let refusal = if !(hello.versions.0..=hello.versions.1).contains(&WIRE_VERSION) {
            Some((
                RejectCode::Version,
                format!(
                    "wire version: this engine speaks {WIRE_VERSION}, the peer speaks {} to {}",
                    hello.versions.0, hello.versions.1
                ),
            ))
        } else if !(1..=TP_SIZE_MAX).contains(&hello.from.tp_size)
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
        } else if hello.expect_engine != self.identity.engine {
            Some((
                RejectCode::WrongEngine,
                format!(
                    "engine_id: {} lives here, the peer looks for {}",
                    self.identity.engine, hello.expect_engine
                ),
            ))
        } else if hello.expect_incarnation != self.identity.incarnation {
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
            return;
        } else {
            None
        };
        if let Some((code, reason)) = refusal {
            self.counts.rejected_peers += 1;
            self.reject(connection, code, reason, None);
            return;
        }
        let key = (hello.from.engine.clone(), hello.from.incarnation);
        self.replace_connections_of(&key);
        self.peers.insert(
            connection,
            Peer::Known {
                key,
                ranks: (hello.from.tp_size, hello.from.pp_size),
            },
        );
        let accept = Accept {
            version: WIRE_VERSION,
            from: self.identity.clone(),
        };
        self.send(connection, Message::Accept(accept));
    }

    /// A consumer dials again when it has given its connection up. What is still under way on that
    /// one is older than what it says from here on: a release among it would end a lease that it has
    /// claimed again.
    fn replace_connections_of(&mut self, key: &ConsumerKey) {
        let given_up: Vec<ConnectionId> = self
            .peers
            .iter()
            .filter(|(_, peer)| match peer {
                Peer::Known { key: of, .. } => of == key,
                Peer::Anonymous => false,
            })
            .map(|(connection, _)| *connection)
            .collect();
        for connection in given_up {
            self.close(connection);
        }
    }

    pub(super) fn handle_claim(
        &mut self,
        now: Time,
        consumer: &ConsumerKey,
        claim: &Claim,
    ) -> Message {
        let id = claim.transfer_id;
        if let Some(lease) = self.leases.get(&id)
            && (lease.fence.epoch.0 != claim.epoch || lease.digest != claim.prompt_digest)
        {
            return self.gone(id, GoneReason::Foreign, claim.question);
        }
        self.grant(now, consumer, id, claim.question)
    }

    pub(super) fn handle_renew(
        &mut self,
        now: Time,
        consumer: &ConsumerKey,
        renew: &Renew,
    ) -> Message {
        let id = renew.transfer_id;
        // Only a claim proves which prompt and which epoch are meant.
        if let Some(lease) = self.leases.get(&id)
            && !lease.consumers.contains_key(consumer)
        {
            return self.gone(id, GoneReason::Foreign, renew.question);
        }
        self.grant(now, consumer, id, renew.question)
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
        lease.consumers.entry(consumer.clone()).or_default();
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
        let Some(lease) = self.leases.get_mut(&ack.transfer_id) else {
            self.counts.late += 1;
            return;
        };
        if lease.state == State::Ordered || !lease.consumers.contains_key(consumer) {
            self.counts.late += 1;
            return;
        }
        if lease.acknowledge(consumer, ack.ranks, ranks) {
            self.counts.read_out += 1;
            self.end(ack.transfer_id, GoneReason::Released);
        }
    }

    pub(super) fn handle_release(&mut self, consumer: &ConsumerKey, id: TransferId) {
        let Some(lease) = self.leases.get_mut(&id) else {
            self.counts.late += 1;
            return;
        };
        if lease.state == State::Ordered {
            self.counts.late += 1;
            return;
        }
        // Another engine that has claimed the same transfer (a retried decode) keeps it alive.
        lease.consumers.remove(consumer);
        if lease.consumers.is_empty() {
            self.counts.released += 1;
            self.end(id, GoneReason::Released);
        }
    }
}
