//! What the client is told where its legs give no answer.

use crate::admission::Refused;
use crate::answer::Answer;
use crate::openai::error::ApiError;
use crate::routing::Role;

/// What the client is told instead of a decode answer.
pub(crate) enum Failure {
    /// The proxy's own error.
    Api(ApiError),
    /// An engine's answer, read whole.
    Engine(Box<Answer>),
    /// The proxy's own error: no prefill engine could be reached, and nothing was prefilled.
    NoPrefill(ApiError),
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::NoEngine(Role::Prefill) => Self::NoPrefill(no_engine(Role::Prefill)),
            Refused::NoEngine(Role::Decode) => Self::Api(no_engine(Role::Decode)),
            Refused::Told(error) => Self::Api(error),
        }
    }
}

/// The error where no instance of a role takes legs.
pub(crate) fn no_engine(role: Role) -> ApiError {
    let message = format!(
        "no {} engine is there that answers its probe and is not drained; GET /workers, here or on \
         the listener of --admin-listen, shows each engine and its state",
        role.name()
    );
    ApiError::new(503, "no_engine", message)
}

/// The error where no other engine is tried: `code` says how the last leg failed.
pub(super) fn given_up(role: Role, code: &str) -> ApiError {
    let (code, message) = match (role, code) {
        (Role::Prefill, "unreachable") => (
            "prefill_unreachable",
            "the prefill engine cannot be reached",
        ),
        (Role::Prefill, "bootstrap") => (
            "prefill_bootstrap",
            "the prefill engine's bootstrap server does not name the engine of the chosen rank",
        ),
        (Role::Prefill, _) => (
            "prefill_reset",
            "the prefill engine closed the connection without an answer",
        ),
        (Role::Decode, "unreachable") => {
            ("decode_unreachable", "the decode engine cannot be reached")
        }
        (Role::Decode, _) => (
            "decode_reset",
            "the decode engine closed the connection without an answer",
        ),
    };
    ApiError::new(502, code, message)
}

/// The error where an engine answers what is no HTTP/1.
pub(crate) fn malformed(role: Role, fault: &str) -> ApiError {
    let code = match role {
        Role::Prefill => "prefill_malformed",
        Role::Decode => "decode_malformed",
    };
    let role = role.name();
    let message = format!("the {role} engine's answer is not well-formed: {fault}");
    ApiError::new(502, code, message)
}

/// The error where a future that is waited for once has nothing to give.
pub(crate) fn ended_twice() -> ApiError {
    ApiError::new(500, "internal", "the hand-over ended twice")
}

/// The error where the time of a request is over.
pub(crate) fn deadline_exceeded() -> ApiError {
    ApiError::new(
        504,
        "deadline_exceeded",
        "the engines did not answer before the deadline of the request",
    )
}
