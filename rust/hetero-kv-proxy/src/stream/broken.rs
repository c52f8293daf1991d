//! Why a decode answer ends before its end.

use crate::openai::error::ApiError;

/// Why an answer ends before its end. hyper closes the client's connection on it, so that a client
/// sees a body cut short and never a whole one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamBroken {
    /// The engine's connection broke.
    #[error("the decode engine's answer broke off")]
    Engine,
    /// What came is not HTTP.
    #[error("the decode engine's answer is not well-formed")]
    Malformed,
    /// No chunk came for too long.
    #[error("the decode engine sent nothing for too long")]
    Idle,
    /// The request's deadline passed.
    #[error("the deadline of the request passed")]
    Deadline,
    /// Somebody asked for its end.
    #[error("the request was aborted")]
    Aborted,
}

impl StreamBroken {
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Malformed => "malformed",
            Self::Idle => "idle",
            Self::Deadline => "deadline",
            Self::Aborted => "aborted",
        }
    }

    /// Whether the engine is to blame.
    pub(super) fn is_fault(self) -> bool {
        match self {
            Self::Engine | Self::Malformed => true,
            Self::Idle | Self::Deadline | Self::Aborted => false,
        }
    }

    pub(super) fn api_error(self, detail: Option<&str>) -> ApiError {
        let (status, code) = match self {
            Self::Engine => (502, "decode_stream_broken"),
            Self::Malformed => (502, "decode_stream_malformed"),
            Self::Idle => (504, "decode_stream_idle"),
            Self::Deadline => (504, "deadline_exceeded"),
            Self::Aborted => (409, "aborted"),
        };
        let message = match detail {
            Some(detail) => format!("{self}: {detail}"),
            None => self.to_string(),
        };
        ApiError::new(status, code, message)
    }
}
