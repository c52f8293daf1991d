//! What follows from a leg that failed: another try, or what the client is told.

use std::sync::Arc;

use http::StatusCode;

use super::failure::given_up;
use super::{Call, Failure, Unreadable, malformed, rarely, read_answer};
use crate::app::App;
use crate::instance::Subject;
use crate::lease::SlotLease;
use crate::metrics::RoleLabels;
use crate::openai::error::ApiError;
use crate::routing::{AfterFailure, FailedLeg, Flow, InstanceIndex, LegFailure, LegFault, Role};
use crate::upstream::{self, SendError};

/// How the next try of a leg differs from the first.
#[derive(Default, Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) fresh: bool,
}

/// What follows from a leg without a response head: another try, or the error for the client.
pub(crate) fn after_failure(
    call: &Call,
    flow: &mut Flow,
    lease: Box<SlotLease>,
    has_handle: bool,
    error: SendError,
) -> Result<Attempt, Failure> {
    let app = &call.app;
    let instance = Arc::clone(lease.instance());
    let role = instance.role;
    let url = &*instance.label;
    tracing::debug!(role = role.name(), url, %error, "leg failed");
    let mut detail = None;
    let (failure, fault, outcome, code) = match error {
        SendError::Connect(_) => {
            let fault = LegFault::Unreachable;
            (LegFailure::Connect, fault, "connect", "unreachable")
        }
        SendError::Reset { reused, .. } => {
            let fault = LegFault::Failed;
            (LegFailure::Reset { reused }, fault, "reset", "reset")
        }
        SendError::Malformed(fault) => {
            detail = Some(fault);
            let failure = LegFailure::Reset { reused: false };
            (failure, LegFault::Failed, "malformed", "malformed")
        }
        SendError::Bootstrap(reason) => {
            if let Some(unlogged) = instance.line_about(Subject::Bootstrap) {
                let bootstrap = &*instance.worker.peer.bootstrap;
                let message = "Mooncake's bootstrap server does not tell the engine id; its address \
                               is the worker's `bootstrap`";
                tracing::warn!(url, bootstrap, reason, unlogged, message);
            }
            let fault = LegFault::Failed;
            (LegFailure::Connect, fault, "bootstrap", "bootstrap")
        }
        SendError::Request(_) => {
            lease.end("unsent");
            let message = "the request cannot be passed on";
            return Err(ApiError::new(500, "internal", message).into());
        }
    };
    if failure != (LegFailure::Reset { reused: true }) {
        app.note_unreachable(&instance);
        lease.note_failed(fault);
    }
    lease.end(outcome);
    let leg = FailedLeg {
        role,
        failure,
        has_handle,
        instance: instance.index,
    };
    let step = flow.leg_failed(leg, call.instances(role));
    let next = match step {
        AfterFailure::RetryElsewhere => Attempt { fresh: false },
        AfterFailure::RetryFresh => Attempt { fresh: true },
        AfterFailure::GiveUp => {
            let error = match detail {
                Some(fault) => malformed(role, &fault),
                None => given_up(role, code),
            };
            let not_reached = role == Role::Prefill && failure == LegFailure::Connect;
            return Err(match not_reached {
                true => Failure::NoPrefill(error),
                false => Failure::Api(error),
            });
        }
    };
    count_retry(app, role);
    Ok(next)
}

fn count_retry(app: &App, role: Role) {
    let labels = RoleLabels { role: role.name() };
    app.metrics.retries.get_or_create(&labels).inc();
}

/// Whether an answered leg is sent to another engine: this one refuses it at present.
pub(crate) fn tries_elsewhere(
    call: &Call,
    flow: &mut Flow,
    lease: &SlotLease,
    has_handle: bool,
    status: StatusCode,
) -> bool {
    let app = &call.app;
    if status.is_success() {
        return false;
    }
    let role = lease.role();
    let leg = FailedLeg {
        role,
        failure: LegFailure::Refused {
            status: status.as_u16(),
        },
        has_handle,
        instance: lease.picked.instance,
    };
    match flow.leg_failed(leg, call.instances(role)) {
        AfterFailure::RetryElsewhere => {
            count_retry(app, role);
            true
        }
        AfterFailure::RetryFresh | AfterFailure::GiveUp => false,
    }
}

/// The last answer of an engine that refused a leg which was then tried elsewhere.
#[derive(Default)]
pub(crate) struct Refusal(Option<Box<upstream::Answer>>);

impl Refusal {
    /// Remembers an answer. Its body stays unread, and is small or never wanted.
    pub(crate) fn set(&mut self, answer: Box<upstream::Answer>) {
        self.0 = Some(answer);
    }

    /// What the client is told when the other tries failed too: an engine's own words, such as when
    /// to come again, say more than that another could not be reached.
    pub(crate) async fn or(self, call: &Call, failure: Failure) -> Failure {
        let Some(answer) = self.0 else {
            return failure;
        };
        match rarely(read_answer(&call.app, answer.body)).await {
            Ok(body) => call.passed_on(answer.head, body),
            Err(_) => failure,
        }
    }
}

/// What follows from a prefill answer that cannot be read: another try, or the error for the
/// client. Nothing of the answer has gone anywhere, and the next try has a new transfer id.
pub(crate) fn after_unreadable(
    call: &Call,
    flow: &mut Flow,
    instance: InstanceIndex,
    fault: Unreadable,
) -> Result<(), ApiError> {
    if !fault.is_fault() {
        return Err(fault.of_prefill());
    }
    let leg = FailedLeg {
        role: Role::Prefill,
        failure: LegFailure::Reset { reused: false },
        has_handle: false,
        instance,
    };
    match flow.leg_failed(leg, call.instances(Role::Prefill)) {
        AfterFailure::RetryElsewhere | AfterFailure::RetryFresh => {
            count_retry(&call.app, Role::Prefill);
            Ok(())
        }
        AfterFailure::GiveUp => Err(fault.of_prefill()),
    }
}
