//! Errors in the shape of the OpenAI API.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

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

/// Whether an engine's error, plain or as an event, names the KV of the request by its code or type.
pub fn names_kv(first_bytes: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Told {
        error: Named,
    }
    #[derive(Deserialize)]
    struct Named {
        #[serde(default)]
        code: serde_json::Value,
        #[serde(default)]
        r#type: serde_json::Value,
    }
    let text = first_bytes.trim_ascii();
    let json = match text.strip_prefix(b"data:") {
        Some(event) => event
            .split(|byte| *byte == b'\n')
            .next()
            .unwrap_or_default(),
        None => text,
    };
    let told: Result<Told, _> = serde_json::from_slice(json);
    told.is_ok_and(|told| {
        [told.error.code, told.error.r#type]
            .iter()
            .filter_map(serde_json::Value::as_str)
            .any(|name| name.starts_with("kv_") || name.starts_with("lease_"))
    })
}
