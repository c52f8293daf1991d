//! An engine's answer, read whole.

use std::io;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError};

use super::malformed;
use crate::app::App;
use crate::openai::error::ApiError;
use crate::routing::Role;
use crate::upstream::{self, EngineBody};

/// Why an answer cannot be read whole.
#[derive(Debug)]
pub(crate) enum Unreadable {
    /// The connection broke.
    Broken,
    /// What is wrong with its framing.
    Malformed(String),
    /// It is longer than this.
    TooLarge(u64),
}

impl Unreadable {
    fn of(error: &(dyn std::error::Error + 'static), max: u64) -> Self {
        if error.is::<LengthLimitError>() {
            return Self::TooLarge(max);
        }
        let error = error.downcast_ref::<io::Error>();
        match error.and_then(upstream::malformed) {
            Some(fault) => Self::Malformed(fault),
            None => Self::Broken,
        }
    }

    /// How a leg ended whose answer it was.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Broken | Self::TooLarge(_) => "broken",
            Self::Malformed(_) => "malformed",
        }
    }

    /// Whether it is the engine's fault. What is too large may be so by what the client asks for,
    /// and another engine's would be as large.
    pub(crate) fn is_fault(&self) -> bool {
        match self {
            Self::Broken | Self::Malformed(_) => true,
            Self::TooLarge(_) => false,
        }
    }

    /// What the client is told of a prefill answer.
    pub(crate) fn of_prefill(self) -> ApiError {
        match self {
            Self::Malformed(fault) => malformed(Role::Prefill, &fault),
            Self::Broken => ApiError::new(
                502,
                "prefill_answer_broken",
                "the prefill engine's answer broke off",
            ),
            Self::TooLarge(max) => ApiError::new(
                502,
                "prefill_answer_too_large",
                format!(
                    "the prefill engine's answer is larger than the {max} bytes of \
                     --prefill-answer-bytes-max"
                ),
            ),
        }
    }
}

/// An answer read whole.
pub(crate) async fn read_answer(app: &App, body: EngineBody) -> Result<Bytes, Unreadable> {
    let max = app.config().prefill_answer_bytes_max;
    let bytes_max = usize::try_from(max).unwrap_or(usize::MAX);
    let whole = http_body_util::Limited::new(body, bytes_max)
        .collect()
        .await;
    match whole {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) => Err(Unreadable::of(&*error, max)),
    }
}
