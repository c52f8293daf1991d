//! Errors in the shape of the OpenAI API.

use bytes::Bytes;
use serde::Serialize;

/// One error that the proxy itself answers with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Machine-readable cause, stable.
    pub code: &'static str,
    /// Sentence for a person. Names no address of an engine.
    pub message: String,
    /// The request field at fault.
    pub param: Option<String>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl ApiError {
    /// An error without a field.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            param: None,
        }
    }

    /// The JSON body: `{"error":{"message","type","param","code"}}`.
    pub fn body(&self) -> Bytes {
        let kind = match self.status {
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        let envelope = Envelope {
            error: Inner {
                message: &self.message,
                r#type: kind,
                param: self.param.as_deref(),
                code: self.code,
            },
        };
        // Strings and a null cannot fail to serialise; an empty body would still carry the status.
        serde_json::to_vec(&envelope).unwrap_or_default().into()
    }
}
