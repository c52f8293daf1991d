//! The producer alone: one call after the other in virtual time.

mod acks;
mod fan_in;
mod handshake;
mod leases;

use super::*;
use crate::ids::{EngineId, Incarnation};
use crate::testing::{
    NONCE, at, cards, common_fields, identity, lease_times, prompt, secs, transfer,
};
use crate::wire::WIRE_VERSION;
use crate::wire::message::{Accept, Ack, Claim, Granted, Hello, Renew};

pub(super) const D: ConnectionId = ConnectionId(1);

/// A producer of two ranks.
pub(super) fn producer() -> Producer {
    producer_with(lease_times(), 8)
}

pub(super) fn producer_with(times: LeaseTimes, slots: u32) -> Producer {
    Producer::new(
        identity("prefill", 1, 2),
        common_fields(),
        cards(2),
        times,
        slots,
    )
}

pub(super) fn hello(engine: &str, incarnation: u64, tp_size: u32) -> Hello {
    Hello {
        versions: (WIRE_VERSION, WIRE_VERSION),
        from: identity(engine, incarnation, tp_size),
        expect_engine: EngineId::new("prefill").expect("valid"),
        expect_incarnation: Incarnation(1),
        any_engine: false,
        compat_digest: common_fields().digest().to_vec(),
        nonce: None,
    }
}

/// Connects a decode engine of `tp_size` ranks and greets it.
pub(super) fn greet(p: &mut Producer, connection: ConnectionId, engine: &str, tp_size: u32) {
    p.handle_connected(connection, NONCE);
    let hello = Message::Hello(Box::new(hello(engine, 100, tp_size)));
    p.handle_message(at(secs(0)), connection, hello);
    let answers = drain(p);
    assert!(
        matches!(
            answers.as_slice(),
            [ProducerOutput::Send(_, Message::Accept(_))]
        ),
        "{answers:?}"
    );
}

pub(super) fn drain(p: &mut Producer) -> Vec<ProducerOutput> {
    std::iter::from_fn(|| p.poll_output()).collect()
}

/// Finishes the prefill of `prompt(n)` as request `rN` under transfer N.
pub(super) fn finish(p: &mut Producer, now: Time, n: u8) -> LeaseRef {
    try_finish(p, now, n, n).expect("fresh id, free slot")
}

pub(super) fn try_finish(
    p: &mut Producer,
    now: Time,
    request: u8,
    id: u8,
) -> Result<LeaseRef, OfferError> {
    p.finish(
        now,
        FinishedPrefill {
            request_id: format!("r{request}"),
            transfer_id: transfer(id),
            digest: prompt(id.into()),
            block_ids: vec![vec![BlockId(3), BlockId(4)]],
            num_tokens: 20,
        },
    )
}

pub(super) fn claim_of(n: u8, lease: LeaseRef) -> Claim {
    Claim {
        transfer_id: transfer(n),
        epoch: lease.epoch.0,
        prompt_digest: prompt(n.into()),
        question: 7,
    }
}

/// The answer to one message.
pub(super) fn ask(p: &mut Producer, now: Time, from: ConnectionId, message: Message) -> Message {
    p.handle_message(now, from, message);
    match drain(p).as_slice() {
        [ProducerOutput::Send(to, answer)] if *to == from => answer.clone(),
        other => panic!("{other:?}"),
    }
}

pub(super) fn claim(p: &mut Producer, now: Time, from: ConnectionId, claim: Claim) -> Message {
    ask(p, now, from, Message::Claim(claim))
}

pub(super) fn renew(p: &mut Producer, now: Time, from: ConnectionId, n: u8) -> Message {
    let renew = Renew {
        transfer_id: transfer(n),
        question: 8,
    };
    ask(p, now, from, Message::Renew(renew))
}

#[track_caller]
pub(super) fn assert_granted(answer: &Message, granted_ms: u64) {
    let Message::Granted(granted) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(granted.granted_ms, granted_ms);
}

#[track_caller]
pub(super) fn assert_gone(answer: &Message, reason: GoneReason) {
    let Message::Gone(gone) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(gone.reason, reason);
}

/// Request ids of the releases ordered since the last call.
pub(super) fn ordered(p: &mut Producer) -> Vec<String> {
    p.take_releases()
        .into_iter()
        .map(|r| r.request_id)
        .collect()
}
