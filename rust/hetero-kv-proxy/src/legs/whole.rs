//! An engine's answer, read whole.

use std::io;

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;

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
    fn of(error: &io::Error) -> Self {
        match upstream::malformed(error) {
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

/// An answer read whole. Its pieces are put together as they come: of many small ones each would hold
/// far more memory than its bytes.
pub(crate) async fn read_answer(app: &App, mut body: EngineBody) -> Result<Bytes, Unreadable> {
    let max = app.config().prefill_answer_bytes_max;
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Unreadable::of(&error))?;
        let Ok(piece) = frame.into_data() else {
            continue;
        };
        if whole.len() as u64 + piece.len() as u64 > max {
            return Err(Unreadable::TooLarge(max));
        }
        // One that came at once is not copied.
        if whole.is_empty() && body.is_end_stream() {
            return Ok(piece);
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}
