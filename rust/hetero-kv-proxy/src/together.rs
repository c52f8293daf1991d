//! Both legs at once, for connectors in which prefill writes into blocks that decode names.
//!
//! The client's answer begins when decode has answered well and prefill has too, or decode has
//! sent the first byte of its body: either proves the other leg. Until then the first leg to fail
//! is the answer, and the other is closed at once.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::app::App;
use crate::connectors::{Leg, Transfer};
use crate::handover::DecodeHead;
use crate::lease::{SlotLease, outcome_of};
use crate::legs::{
    Attempt, Call, Failure, Unreadable, after_failure, after_unreadable, no_engine, read_answer,
    slot, tries_elsewhere,
};
use crate::openai::error::ApiError;
use crate::openai::response;
use crate::openai::usage::Cached;
use crate::random::random_hex;
use crate::routing::{Flow, InstanceIndex, LegFault, Role};
use crate::slots::Slots;
use crate::upstream::{self, SendError};

/// How a prefill leg ended.
enum Prefill {
    /// With its count of cached tokens, where it tells one.
    Good(Option<Cached>),
    /// Any other status, and what the client is told of it.
    Refused(Box<SlotLease>, StatusCode, Failure),
    /// An answer that cannot be read.
    Unread(InstanceIndex, Unreadable),
    /// No response head.
    NotSent(Box<SlotLease>, SendError),
}

/// Sends both legs until the client's answer may begin. A prefill leg that runs is closed when
/// `leaving` is cancelled, and when the returned head is dropped unfinished.
pub(crate) async fn both_legs(
    call: Arc<Call>,
    mut flow: Flow,
    slots: Slots,
    leaving: CancellationToken,
) -> Result<DecodeHead, Failure> {
    let (mut prefill_next, mut decode_next) = (Attempt::default(), Attempt::default());
    let mut taken = Some(slots);
    // An engine's own words, which say more than that another could not be reached.
    let mut refusal: Option<Failure> = None;
    loop {
        let slots = match taken.take() {
            Some(slots) => slots,
            None => {
                let tried = |role| flow.tried(role);
                let again = call.pair_again(tried(Role::Prefill), tried(Role::Decode));
                again.await.map_err(|none| told(&mut refusal, none))?
            }
        };
        let prefill_lease = slots.prefill.ok_or_else(|| no_engine(Role::Prefill))?;
        let decode_lease = slots.decode.ok_or_else(|| no_engine(Role::Decode))?;
        // A new id for each pair: an engine of the last one may still know the old.
        let id = random_hex()?;
        let transfer = Transfer {
            id: &id,
            prefill: slot(&prefill_lease, None),
            decode: Some(slot(&decode_lease, None)),
        };
        decode_lease.reads_from(prefill_lease.instance(), None);
        let connector = call.connector;
        let prefill_leg = connector.prefill_leg(&transfer);
        let decode_leg = connector
            .decode_leg(&transfer, None)
            .ok_or_else(|| ApiError::new(500, "internal", "the decode leg needs an answer"))?;

        let running = leaving.child_token();
        let stop = running.clone();
        let source = Arc::clone(prefill_lease.instance());
        let prefill = spawn(&call, prefill_lease, prefill_leg, prefill_next.fresh, stop);
        let running = running.drop_guard();
        match pair(
            &call,
            &decode_lease,
            &decode_leg,
            decode_next.fresh,
            prefill,
        )
        .await
        {
            Ok(begun) => {
                let status = begun.answer.head.status;
                // Of this pair nothing was read, and the next has blocks of its own.
                if tries_elsewhere(&call, &mut flow, &decode_lease, false, status) {
                    decode_lease.end(outcome_of(status));
                    if let Ok(body) = read_answer(&call.app, begun.answer.body).await {
                        refusal = Some(call.passed_on(begun.answer.head, body));
                    }
                    decode_next = Attempt::default();
                    continue;
                }
                let passed_on = !status.is_success();
                return Ok(DecodeHead {
                    source: Some(source),
                    early: begun.early,
                    cached: begun.cached.filter(|_| !passed_on),
                    // A refused leg is the answer: prefill's is closed now.
                    prefill: (!passed_on).then_some(running),
                    ..DecodeHead::claiming(begun.answer, decode_lease)
                });
            }
            Err(Broken::Refused(lease, status, failure)) => {
                let again = tries_elsewhere(&call, &mut flow, &lease, false, status);
                lease.end(outcome_of(status));
                if !again {
                    return Err(*failure);
                }
                refusal = Some(*failure);
                prefill_next = Attempt::default();
            }
            Err(Broken::Unread(instance, fault)) => {
                after_unreadable(&call, &mut flow, instance, fault)
                    .map_err(|error| told(&mut refusal, error))?;
                prefill_next = Attempt::default();
            }
            Err(Broken::Prefill(lease, error)) => {
                prefill_next = after_failure(&call, &mut flow, lease, false, error)
                    .map_err(|failure| told(&mut refusal, failure))?;
            }
            Err(Broken::Decode(error)) => {
                decode_next = after_failure(&call, &mut flow, decode_lease, false, error)
                    .map_err(|failure| told(&mut refusal, failure))?;
            }
        }
    }
}

/// What the client is told in the end: the last refusal of an engine, if there was one.
fn told(refusal: &mut Option<Failure>, failure: impl Into<Failure>) -> Failure {
    refusal.take().unwrap_or_else(|| failure.into())
}

/// Why a pair of legs gives no answer.
enum Broken {
    /// Prefill's answer, and what the client is told of it.
    Refused(Box<SlotLease>, StatusCode, Box<Failure>),
    Unread(InstanceIndex, Unreadable),
    Prefill(Box<SlotLease>, SendError),
    Decode(SendError),
}

/// A decode answer that the client's may begin with.
struct Begun {
    answer: Box<upstream::Answer>,
    /// Data of its body that was read already.
    early: Option<Bytes>,
    /// Prefill's count of cached tokens, where it has told one by then.
    cached: Option<Cached>,
}

/// Waits for one pair of legs; the decode leg is closed when this returns an error.
async fn pair(
    call: &Call,
    lease: &SlotLease,
    leg: &Leg,
    fresh: bool,
    mut prefill: oneshot::Receiver<Prefill>,
) -> Result<Begun, Broken> {
    // Once prefill has ended well.
    let mut prefilled = None;
    let mut sending = Box::pin(call.send_decode(lease, Some(leg), fresh));
    let mut answer = loop {
        tokio::select! {
            ended = &mut prefill, if prefilled.is_none() => prefilled = Some(well(ended)?),
            head = &mut sending => break head.map_err(Broken::Decode)?,
        }
    };
    let begun = |answer, early, cached| Begun {
        answer,
        early,
        cached,
    };
    if !answer.head.status.is_success() || prefilled.is_some() {
        return Ok(begun(answer, None, prefilled.flatten()));
    }
    loop {
        tokio::select! {
            ended = &mut prefill => {
                let cached = well(ended)?;
                return Ok(begun(answer, None, cached));
            }
            frame = answer.body.frame() => match frame {
                Some(Ok(frame)) => if let Ok(data) = frame.into_data() {
                    return Ok(begun(answer, Some(data), None));
                },
                // The stream tells the client.
                Some(Err(_)) | None => return Ok(begun(answer, None, None)),
            },
        }
    }
}

/// What a prefill leg that ended well tells of cached tokens. A leg that was closed since the client
/// left counts as one: the decode leg is then waited for on its own.
fn well(ended: Result<Prefill, oneshot::error::RecvError>) -> Result<Option<Cached>, Broken> {
    match ended {
        Ok(Prefill::Good(cached)) => Ok(cached),
        Err(_) => Ok(None),
        Ok(Prefill::Refused(lease, status, failure)) => {
            Err(Broken::Refused(lease, status, Box::new(failure)))
        }
        Ok(Prefill::Unread(instance, fault)) => Err(Broken::Unread(instance, fault)),
        Ok(Prefill::NotSent(lease, error)) => Err(Broken::Prefill(lease, error)),
    }
}

/// Runs the prefill leg until it ends or `stop` is cancelled, which closes it.
fn spawn(
    call: &Arc<Call>,
    lease: Box<SlotLease>,
    leg: Leg,
    fresh: bool,
    stop: CancellationToken,
) -> oneshot::Receiver<Prefill> {
    let (ended, receiver) = oneshot::channel();
    let call = Arc::clone(call);
    tokio::spawn(async move {
        tokio::select! {
            end = prefill(&call, lease, &leg, fresh) => {
                // Nobody waits where the answer has begun.
                let _unread = ended.send(end);
                // Says that it has ended.
                stop.cancel();
            }
            () = stop.cancelled() => {}
        }
    });
    receiver
}

/// Closes a prefill leg that still runs when decode has answered whole, but not before its own
/// answer had time to come: decode may be the faster by a hair.
pub(crate) fn close_later(app: &Arc<App>, running: DropGuard) {
    let running = running.disarm();
    if running.is_cancelled() {
        return;
    }
    let grace = app.config().handover_grace;
    app.tasks.spawn(async move {
        // Either the leg has ended, or its time is over.
        let _ended = timeout(grace, running.cancelled()).await;
        running.cancel();
    });
}

async fn prefill(call: &Call, lease: Box<SlotLease>, leg: &Leg, fresh: bool) -> Prefill {
    let app = &call.app;
    let answer = match call.send_prefill(&lease, leg, fresh, None).await {
        Ok(answer) => answer,
        Err(error) => return Prefill::NotSent(lease, error),
    };
    let status = answer.head.status;
    let body = match read_answer(app, answer.body).await {
        Ok(body) => body,
        Err(fault) => {
            if fault.is_fault() {
                lease.note_failed(LegFault::Failed);
            }
            let instance = lease.picked.instance;
            lease.end(fault.outcome());
            return Prefill::Unread(instance, fault);
        }
    };
    if !status.is_success() {
        let failure = call.passed_on(answer.head, body);
        return Prefill::Refused(lease, status, failure);
    }
    lease.note_served();
    lease.end(outcome_of(status));
    let usage = response::read(&body).usage;
    Prefill::Good(usage.and_then(|usage| Cached::of_prefill(usage, call.route)))
}
