//! Both legs at once, for connectors in which prefill writes into blocks that decode names.
//!
//! The client's answer begins when decode has answered well and prefill has too, or decode has
//! sent the first byte of its body: either proves the other leg. Until then the first leg to fail
//! is the answer, and the other is closed at once.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::app::App;
use crate::connectors::{Leg, Transfer};
use crate::handover::DecodeHead;
use crate::lease::SlotLease;
use crate::legs::{Attempt, Call, Failure, after_failure, no_engine, read_answer, slot};
use crate::openai::error::ApiError;
use crate::random::random_hex;
use crate::routing::{Flow, LegFault, Role};
use crate::slots::Slots;
use crate::stream::outcome_of;
use crate::upstream::{self, SendError};

/// How a prefill leg ended.
enum Prefill {
    Good,
    /// Any other status, or an answer that broke off.
    Failed(Failure),
    /// No response head.
    NotSent(SlotLease, SendError),
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
    loop {
        let slots = match taken.take() {
            Some(slots) => slots,
            None => {
                let tried = |role| flow.tried(role);
                call.pair_again(tried(Role::Prefill), tried(Role::Decode))
                    .await?
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
        let connector = call.app.config().connector;
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
            Ok((answer, early)) => {
                let passed_on = !answer.head.status.is_success();
                return Ok(DecodeHead {
                    source: Some(source),
                    early,
                    // A refused leg is the answer: prefill's is closed now.
                    prefill: (!passed_on).then_some(running),
                    ..DecodeHead::claiming(answer, decode_lease)
                });
            }
            Err(Broken::Answer(failure)) => return Err(failure),
            Err(Broken::Prefill(lease, error)) => {
                prefill_next = after_failure(&call, &mut flow, *lease, false, error)?;
            }
            Err(Broken::Decode(error)) => {
                decode_next = after_failure(&call, &mut flow, decode_lease, true, error)?;
            }
        }
    }
}

/// Why a pair of legs gives no answer.
enum Broken {
    /// This is what the client is told.
    Answer(Failure),
    Prefill(Box<SlotLease>, SendError),
    Decode(SendError),
}

type Begun = (upstream::Answer, Option<Bytes>);

/// Waits for one pair of legs; the decode leg is closed when this returns an error.
async fn pair(
    call: &Call,
    lease: &SlotLease,
    leg: &Leg,
    fresh: bool,
    mut prefill: oneshot::Receiver<Prefill>,
) -> Result<Begun, Broken> {
    let mut prefilled = false;
    let mut sending = Box::pin(call.send_decode(lease, Some(leg), fresh));
    let mut answer = loop {
        tokio::select! {
            ended = &mut prefill, if !prefilled => prefilled = well(ended)?,
            head = &mut sending => break head.map_err(Broken::Decode)?,
        }
    };
    if !answer.head.status.is_success() || prefilled {
        return Ok((answer, None));
    }
    loop {
        tokio::select! {
            ended = &mut prefill => {
                well(ended)?;
                return Ok((answer, None));
            }
            frame = answer.body.frame() => match frame {
                Some(Ok(frame)) => if let Ok(data) = frame.into_data() {
                    return Ok((answer, Some(data)));
                },
                // The stream tells the client.
                Some(Err(_)) | None => return Ok((answer, None)),
            },
        }
    }
}

/// Whether the prefill leg ended well. A leg that was closed since the client left counts as one:
/// the decode leg is then waited for on its own.
fn well(ended: Result<Prefill, oneshot::error::RecvError>) -> Result<bool, Broken> {
    match ended {
        Ok(Prefill::Good) | Err(_) => Ok(true),
        Ok(Prefill::Failed(failure)) => Err(Broken::Answer(failure)),
        Ok(Prefill::NotSent(lease, error)) => Err(Broken::Prefill(Box::new(lease), error)),
    }
}

/// Runs the prefill leg until it ends or `stop` is cancelled, which closes it.
fn spawn(
    call: &Arc<Call>,
    lease: SlotLease,
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

async fn prefill(call: &Call, lease: SlotLease, leg: &Leg, fresh: bool) -> Prefill {
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
            lease.end(fault.outcome());
            return Prefill::Failed(fault.of_prefill().into());
        }
    };
    if status.is_success() {
        lease.note_served();
    }
    lease.end(outcome_of(status));
    if !status.is_success() {
        return Prefill::Failed(call.passed_on(answer.head, body));
    }
    Prefill::Good
}
