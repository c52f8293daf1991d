//! A prefill leg on its own: tried until there is an answer to go on with, also when its client
//! leaves while the answer is on the way.
//!
//! Closing the leg is how an engine learns that nobody waits: it aborts, and pins nothing. But once
//! it has prefilled, its blocks are pinned and only the answer says where, however short the way of
//! that answer still is: through the engine's HTTP server, the network, or this host's socket
//! buffer. So a leg that the engine has got is listened to for a moment more before it is closed,
//! and an answer that comes is handed over as if it had come before.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::connectors::{Leg, Transfer};
use crate::decode::hand_over;
use crate::handover::HandOver;
use crate::lease::{SlotLease, outcome_of};
use crate::legs::{
    Attempt, Call, Failure, Refusal, after_failure, ended_twice, rarely, slot, tries_elsewhere,
};
use crate::random::random_hex;
use crate::routing::{Flow, Role};
use crate::slots::Slots;
use crate::upstream::{Answer, SendError, Written};

/// Least time for which a leg without a client is listened to: what an answer takes from an engine's
/// scheduler to here. Between processes that wait for a core it is a hundred times what it is on a
/// host at rest.
const LATE_ANSWER_MIN: Duration = Duration::from_millis(250);
/// Longest such time: that for which a decode leg is kept by default so that a busy engine reads it.
const LATE_ANSWER_MAX: Duration = Duration::from_secs(1);
/// Most legs that are listened to at once; further ones are closed right away, and what they pinned
/// ends with its lease. Each holds a connection and its request's body.
const LATE_ANSWERS_MAX: usize = 1024;

/// How long a leg is listened to that had run for `ran` when its client left: as long again. So an
/// engine computes at most twice what it had when nobody waited any more, and one that is slow has
/// more time to say what it keeps; what it keeps and cannot say stays pinned for a whole lease.
fn late_answer(ran: Duration) -> Duration {
    ran.clamp(LATE_ANSWER_MIN, LATE_ANSWER_MAX)
}

/// Parts of that time. One that this process slept through, waiting for a core, counts as one part:
/// the engine may have slept as well, and has the others.
const LOOKS: u32 = 5;

/// What comes within so long; `None` where nothing does.
async fn listen<T>(
    mut coming: Pin<Box<dyn Future<Output = T> + Send>>,
    within: Duration,
) -> Option<T> {
    for _ in 0..LOOKS {
        if let Ok(come) = timeout(within / LOOKS, &mut coming).await {
            return Some(come);
        }
    }
    None
}

/// Room for legs whose clients have left.
#[derive(Debug)]
pub(crate) struct LateAnswers(Arc<Semaphore>);

impl Default for LateAnswers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(LATE_ANSWERS_MAX)))
    }
}

/// What a transfer is known by, and what its request has in hand.
pub(crate) struct Transferring {
    pub(crate) transfer_id: String,
    pub(crate) engine_id: Option<Arc<str>>,
    /// The decode slot, where it was taken before: the leg may have named it.
    pub(crate) decode: Option<Box<SlotLease>>,
    pub(crate) flow: Flow,
}

/// A prefill leg that has a response head.
pub(crate) struct Prefilled {
    pub(crate) answer: Box<Answer>,
    pub(crate) lease: Box<SlotLease>,
    pub(crate) transfer: Transferring,
}

/// Sends the prefill leg until there is an answer to go on with. Dropped, it closes the connection,
/// on which the engine aborts the request and pins nothing; an answer that is on its way by then is
/// taken, and handed over.
pub(crate) async fn prefill_leg(
    call: &Arc<Call>,
    flow: Flow,
    slots: Slots,
) -> Result<Prefilled, Failure> {
    let mut refusal = Refusal::default();
    let prefilled = prefill_tries(call, flow, slots, &mut refusal).await;
    match prefilled {
        Ok(prefilled) => Ok(prefilled),
        Err(failure) => Err(rarely(refusal.or(call, failure)).await),
    }
}

async fn prefill_tries(
    call: &Arc<Call>,
    mut flow: Flow,
    slots: Slots,
    refusal: &mut Refusal,
) -> Result<Prefilled, Failure> {
    let connector = call.connector;
    let Slots {
        prefill: mut taken,
        mut decode,
        drawn: _,
    } = slots;
    let mut next = Attempt::default();
    loop {
        let lease = match taken.take() {
            Some(lease) => lease,
            None => {
                let tried = flow.tried(Role::Prefill);
                let peer = decode.as_ref().map(|lease| &**lease.instance());
                rarely(call.slot(Role::Prefill, tried, peer)).await?
            }
        };
        // A new id each time: the engine that failed may still hold blocks under the old one.
        let transfer_id = random_hex()?;
        let engine_id = match call.engine_id(&lease).await {
            Ok(engine_id) => engine_id,
            Err(error) => {
                next = after_failure(call, &mut flow, lease, false, error)?;
                continue;
            }
        };
        let leg = connector.prefill_leg(&Transfer {
            id: &transfer_id,
            prefill: slot(&lease, engine_id.as_deref()),
            decode: decode.as_ref().map(|lease| slot(lease, None)),
        });
        let transfer = Transferring {
            transfer_id,
            engine_id,
            decode,
            flow,
        };
        let (lease, transfer, answer) = send(call, lease, leg, next.fresh, transfer)
            .await
            .ok_or_else(ended_twice)?;
        (decode, flow) = (transfer.decode, transfer.flow);
        match answer {
            Ok(answer) => {
                let status = answer.head.status;
                if tries_elsewhere(call, &mut flow, &lease, false, status) {
                    lease.end(outcome_of(status));
                    refusal.set(answer);
                    next = Attempt::default();
                    continue;
                }
                return Ok(Prefilled {
                    answer,
                    lease,
                    transfer: Transferring {
                        transfer_id: transfer.transfer_id,
                        engine_id: transfer.engine_id,
                        decode,
                        flow,
                    },
                });
            }
            Err(error) => next = after_failure(call, &mut flow, lease, false, error)?,
        }
    }
}

type Exchange =
    Pin<Box<dyn Future<Output = (Box<SlotLease>, Result<Box<Answer>, SendError>)> + Send>>;

/// A leg on its way. Dropped, it is closed, but not before an answer on its way had time to come.
struct InFlight {
    call: Arc<Call>,
    /// When the engine had the whole of it.
    written: Written,
    rest: Option<(Exchange, Transferring)>,
}

/// Sends a prefill leg and waits for the response head; `None` never comes.
async fn send(
    call: &Arc<Call>,
    lease: Box<SlotLease>,
    leg: Leg,
    fresh: bool,
    transfer: Transferring,
) -> Option<(Box<SlotLease>, Transferring, Result<Box<Answer>, SendError>)> {
    let written = Written::default();
    let (own, noted) = (Arc::clone(call), written.clone());
    let exchange: Exchange = Box::pin(async move {
        let answer = own.send_prefill(&lease, &leg, fresh, Some(noted)).await;
        (lease, answer)
    });
    let mut leg = InFlight {
        call: Arc::clone(call),
        written,
        rest: Some((exchange, transfer)),
    };
    // Until the exchange has ended the guard has it.
    let (exchange, _) = leg.rest.as_mut()?;
    let (lease, answer) = exchange.await;
    let (_, transfer) = leg.rest.take()?;
    Some((lease, transfer, answer))
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Some((exchange, transfer)) = self.rest.take() else {
            return;
        };
        // What the engine has not got, it cannot have prefilled.
        let Some(written) = self.written.at() else {
            return;
        };
        let within = late_answer(written.elapsed());
        let app = &self.call.app;
        let Ok(room) = Arc::clone(&app.late_answers.0).try_acquire_owned() else {
            return;
        };
        let call = Arc::clone(&self.call);
        let late = async move {
            let _room = room;
            let Some((lease, Ok(answer))) = listen(exchange, within).await else {
                return;
            };
            if !answer.head.status.is_success() {
                return;
            }
            let (app, written) = (Arc::clone(&call.app), call.written.clone());
            let prefilled = Prefilled {
                answer,
                lease,
                transfer,
            };
            // Dropped, a hand-over goes on in the background.
            drop(HandOver::new(app, written, hand_over(call, prefilled)));
        };
        // Without a runtime the process is ending, and every connection with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            app.tasks.spawn_on(late, &runtime);
        }
    }
}

#[cfg(test)]
mod tests;
