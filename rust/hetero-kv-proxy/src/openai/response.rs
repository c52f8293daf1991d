//! What the proxy reads in a prefill answer.

use serde::Deserialize;

use super::splice::Object;

/// Why a prefill answer ended after its one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// For its token limit, as it should.
    Length,
    /// By itself: that token was the answer. Connectors may have kept no blocks.
    Stopped,
    /// The answer does not say.
    Unknown,
}

/// Why a prefill answer ended: by the first choice, or by the status of a response.
pub fn ended(body: &[u8]) -> Ended {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow, default)]
        choices: Vec<Choice<'a>>,
        #[serde(borrow, default)]
        status: Option<&'a str>,
    }
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow, default)]
        finish_reason: Option<&'a str>,
    }
    let Ok(answer) = serde_json::from_slice::<Answer<'_>>(body) else {
        return Ended::Unknown;
    };
    let reason = answer
        .choices
        .first()
        .and_then(|choice| choice.finish_reason);
    match reason.or(answer.status) {
        Some("length" | "incomplete") => Ended::Length,
        Some("stop" | "tool_calls" | "completed") => Ended::Stopped,
        Some(_) | None => Ended::Unknown,
    }
}

/// The raw `kv_transfer_params` object of a prefill answer, byte for byte as the engine wrote it.
///
/// `None` when the answer carries none that a decode engine could use: not JSON, the field absent,
/// twice, null or anything but an object.
pub fn kv_transfer_params(body: &[u8]) -> Option<&str> {
    let object = Object::parse(body).ok()?;
    let range = object.find(body, "kv_transfer_params").ok()??;
    let raw = std::str::from_utf8(&body[range]).ok()?;
    raw.starts_with('{').then_some(raw)
}
