//! The engine's words as this crate's errors.

use super::generation::Direction;
use crate::error::{ReadFailureKind, TransportError};
use crate::memory::OutOfBounds;

/// What a transfer that the engine calls failed has run into.
pub(super) fn kind_of(text: &str) -> ReadFailureKind {
    if text.contains("remote access error") || text.contains("ERR_INVALID_ARGS") {
        // The peer's device does not know the key or the range or refuses the right, or the engine
        // knows better than the card how much memory there is.
        ReadFailureKind::OutOfBounds
    } else if text.contains("local protection error") || text.contains("local length error") {
        ReadFailureKind::Local
    } else {
        ReadFailureKind::PeerLost
    }
}

/// What was being done.
pub(super) fn call_of(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "mori read",
        Direction::Write => "mori write",
    }
}

pub(super) fn local(problem: String) -> TransportError {
    TransportError::new(ReadFailureKind::Local, "mori engine", problem)
}

pub(super) fn unreachable(call: &'static str, problem: String) -> TransportError {
    TransportError::new(ReadFailureKind::Unreachable, call, problem)
}

pub(super) fn given_up() -> TransportError {
    TransportError::new(
        ReadFailureKind::PeerLost,
        "mori engine",
        "the engine was given up for the sake of another source",
    )
}

pub(super) fn out_of_bounds(side: &str, error: OutOfBounds) -> TransportError {
    TransportError::new(
        ReadFailureKind::OutOfBounds,
        "post",
        format!("{side}: {error}"),
    )
}
