//! A decode leg: with the client's body alone, or with what a prefill engine has answered.

use std::sync::Arc;

use crate::answer::is_logged;
use crate::connectors::{Leg, Slot, Transfer};
use crate::handover::DecodeHead;
use crate::instance::Instance;
use crate::lease::{SlotLease, outcome_of};
use crate::legs::{
    Attempt, Call, Failure, Refusal, Unreadable, after_failure, after_unreadable, rarely,
    read_answer, slot, tries_elsewhere,
};
use crate::openai::error::ApiError;
use crate::openai::response::{self, Ended};
use crate::openai::tokens::Tokens;
use crate::openai::usage::Cached;
use crate::prefill::{Prefilled, Transferring};
use crate::release::release;
use crate::routing::{AfterPrefill, Flow, InstanceIndex, LegFault, Role};
use crate::slots::Slots;
use crate::upstream;

/// Sends the client's body to a decode engine until there is an answer to pass on.
pub(crate) async fn decode_alone(
    call: &Call,
    mut flow: Flow,
    taken: Option<Box<SlotLease>>,
) -> Result<DecodeHead, Failure> {
    let (answer, lease) = decode_leg(call, &mut flow, taken, None, |_| None).await?;
    Ok(DecodeHead::alone(answer, lease))
}

/// Sends a decode leg until there is an answer to pass on; `prefilled` keeps blocks for it.
async fn decode_leg(
    call: &Call,
    flow: &mut Flow,
    mut taken: Option<Box<SlotLease>>,
    prefilled: Option<&Instance>,
    mut leg: impl FnMut(&SlotLease) -> Option<Leg>,
) -> Result<(Box<upstream::Answer>, Box<SlotLease>), Failure> {
    let has_handle = prefilled.is_some();
    let peer = prefilled;
    let mut refusal = Refusal::default();
    // Not a variable first: the state would have room for it twice.
    let ended = async {
        let mut next = Attempt::default();
        loop {
            let lease = match taken.take() {
                Some(lease) => lease,
                None => {
                    let tried = flow.tried(Role::Decode);
                    rarely(call.slot(Role::Decode, tried, peer)).await?
                }
            };
            match call
                .send_decode(&lease, leg(&lease).as_ref(), next.fresh)
                .await
            {
                Ok(answer) => {
                    let status = answer.head.status;
                    if !tries_elsewhere(call, flow, &lease, has_handle, status) {
                        return Ok((answer, lease));
                    }
                    lease.end(outcome_of(status));
                    refusal.set(answer);
                    next = Attempt::default();
                }
                Err(error) => next = after_failure(call, flow, lease, has_handle, error)?,
            }
        }
    }
    .await;
    match ended {
        Ok(begun) => Ok(begun),
        Err(failure) => Err(rarely(refusal.or(call, failure)).await),
    }
}

/// Why there is no head of a decode answer.
pub(crate) enum NoHandOver {
    /// This is what the client is told.
    Told(Failure),
    /// Prefill's answer cannot be read, so there is nothing to hand over.
    Unread(Box<Unread>),
}

impl<T: Into<Failure>> From<T> for NoHandOver {
    fn from(failure: T) -> Self {
        Self::Told(failure.into())
    }
}

/// A prefill answer that could not be read, and what its request has in hand.
pub(crate) struct Unread {
    fault: Unreadable,
    instance: InstanceIndex,
    flow: Flow,
    decode: Option<Box<SlotLease>>,
}

impl Unread {
    /// What another prefill leg begins with, where there is one.
    pub(crate) fn again(self, call: &Call) -> Result<(Flow, Slots), Failure> {
        let mut flow = self.flow;
        after_unreadable(call, &mut flow, self.instance, self.fault)?;
        let slots = Slots {
            prefill: None,
            decode: self.decode,
            drawn: None,
        };
        Ok((flow, slots))
    }
}

/// Reads the prefill answer and sends the decode leg until there is a response head.
pub(crate) async fn hand_over(
    call: Arc<Call>,
    prefilled: Prefilled,
) -> Result<DecodeHead, NoHandOver> {
    let app = &call.app;
    let connector = call.connector;
    let Prefilled {
        answer: prefill,
        lease: prefill_lease,
        transfer:
            Transferring {
                transfer_id,
                engine_id,
                mut decode,
                mut flow,
            },
    } = prefilled;
    let status = prefill.head.status;
    let body = match read_answer(app, prefill.body).await {
        Ok(body) => body,
        Err(fault) => {
            if fault.is_fault() {
                prefill_lease.note_failed(LegFault::Failed);
            }
            let instance = prefill_lease.picked.instance;
            prefill_lease.end(fault.outcome());
            return Err(NoHandOver::Unread(Box::new(Unread {
                fault,
                instance,
                flow,
                decode,
            })));
        }
    };
    let prefill_instance = Arc::clone(prefill_lease.instance());
    let prefill_rank = prefill_lease.picked.rank;
    let began_ms = prefill_lease.began_ms();
    // Before its leg ends: with neither, an instance that leaves is gone.
    let mut kept = app.keep_blocks(&prefill_instance);
    prefill_lease.end(outcome_of(status));
    let answered_us = app.now_us();

    let answer = response::read(&body);
    let leg_at = |decode: Option<&SlotLease>| {
        let transfer = Transfer {
            id: &transfer_id,
            prefill: Slot {
                peer: prefill_instance.peer(),
                rank: prefill_rank,
                engine_id: engine_id.as_deref(),
            },
            decode: decode.map(|lease| slot(lease, None)),
        };
        connector.decode_leg(&transfer, Some(&answer))
    };
    let mut first = leg_at(decode.as_deref());
    let has_handle = first.is_some();
    let stopped = answer.ended == Ended::Stopped;
    match flow.prefill_answered(status.as_u16(), has_handle, stopped) {
        AfterPrefill::HandOver => {
            kept.owe();
            app.note_served(&prefill_instance, began_ms);
        }
        AfterPrefill::PassOn => return Err(call.passed_on(prefill.head, body).into()),
        AfterPrefill::MissingKv => {
            app.metrics.kv_transfer_missing.inc();
            app.note_failed(&prefill_instance, LegFault::Failed, began_ms);
            return Err(ApiError::new(
                502,
                "kv_transfer_missing",
                "the prefill engine answered without a handle of kept blocks: it runs without the \
                 KV connector, or its connector kept no blocks; see --connector and --require-kv",
            )
            .into());
        }
        AfterPrefill::Recompute => {
            app.metrics.kv_transfer_missing.inc();
            app.note_failed(&prefill_instance, LegFault::Failed, began_ms);
            app.count_fallback("kv_transfer_missing");
        }
        AfterPrefill::RecomputeStopped => {
            app.note_served(&prefill_instance, began_ms);
            app.count_fallback("prefill_stopped");
        }
    }

    if is_logged()
        && let Some(tokens) = Tokens::of(&body)
    {
        // Its one token is not the answer's.
        call.timeline.tokens(Tokens {
            completion: None,
            ..tokens
        });
    }
    // Of several prompts prefill had the first only, and decode's sum is the better one.
    let usage = match has_handle && !call.request.is_batch() {
        true => answer.usage,
        false => None,
    };
    let cached = usage.and_then(|usage| Cached::of_prefill(usage, call.route));
    let taken = decode.take();
    let leg = |lease: &SlotLease| {
        if has_handle {
            lease.reads_from(&prefill_instance, Some(answered_us));
        }
        // The first is that of the slot taken before, or names none.
        first.take().or_else(|| leg_at(Some(lease)))
    };
    let with = has_handle.then_some(&*prefill_instance);
    let (answer, lease) = decode_leg(&call, &mut flow, taken, with, leg).await?;
    let is_refused = has_handle && answer.head.status.is_client_error();
    if is_refused && connector.refuses_second_read() {
        // What decode reads by is prefill's to say, whichever engine it is.
        let leg = leg_at(None);
        release(&call, Arc::clone(&prefill_instance), kept, leg);
        return Ok(DecodeHead {
            source: Some(prefill_instance),
            ..DecodeHead::alone(answer, lease)
        });
    }
    Ok(match has_handle {
        true => DecodeHead {
            kept: Some(kept),
            source: Some(Arc::clone(&prefill_instance)),
            cached,
            ..DecodeHead::claiming(answer, lease)
        },
        false => DecodeHead::alone(answer, lease),
    })
}
