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

/// What the proxy reads in a prefill answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillAnswer<'a> {
    /// The raw `kv_transfer_params` object, byte for byte as the engine wrote it. `None` when there
    /// is none that a decode engine could use: not JSON, the field absent, twice, null or anything
    /// but an object.
    pub params: Option<&'a str>,
    /// Why it ended after its one token: by the first choice, or by the status of a response.
    pub ended: Ended,
    /// The raw `usage` object. `None` where there is none, or two.
    pub usage: Option<&'a str>,
}

/// Reads a prefill answer, in one pass over it.
pub fn read(body: &[u8]) -> PrefillAnswer<'_> {
    let Ok(object) = Object::parse(body) else {
        return PrefillAnswer {
            params: None,
            ended: Ended::Unknown,
            usage: None,
        };
    };
    let member = |name| {
        let range = object.find(body, name).ok()?;
        range.map_or(Some(""), |range| std::str::from_utf8(&body[range]).ok())
    };
    PrefillAnswer {
        params: member("kv_transfer_params").filter(|raw| raw.starts_with('{')),
        ended: ended(member("choices"), member("status")).unwrap_or(Ended::Unknown),
        usage: member("usage").filter(|raw| raw.starts_with('{')),
    }
}

/// By the raw members, which are empty where they are absent.
fn ended(choices: Option<&str>, status: Option<&str>) -> Option<Ended> {
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow, default)]
        finish_reason: Option<&'a str>,
    }
    let choices: Vec<Choice<'_>> = match choices? {
        "" => Vec::new(),
        raw => serde_json::from_str(raw).ok()?,
    };
    let status: Option<&str> = match status? {
        "" => None,
        raw => serde_json::from_str(raw).ok()?,
    };
    let reason = choices.first().and_then(|choice| choice.finish_reason);
    Some(match reason.or(status) {
        Some("length" | "incomplete") => Ended::Length,
        Some("stop" | "tool_calls" | "completed") => Ended::Stopped,
        Some(_) | None => Ended::Unknown,
    })
}
