//! A client's request, checked in the fields that the proxy touches, and its two leg bodies.

use bytes::Bytes;
use serde::de::{Deserializer as _, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::Route;
use super::splice::{Change, DuplicateField, Object, SyntaxError};

/// Why a client's body is answered 400.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Not one JSON object in UTF-8.
    #[error(transparent)]
    Syntax(#[from] SyntaxError),
    /// A field that the proxy changes is there twice.
    #[error(transparent)]
    Duplicate(#[from] DuplicateField),
    /// A field that the proxy changes has a value that no engine accepts.
    #[error("`{field}` must be {want}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What it may be.
        want: &'static str,
    },
    /// The engine hand-over field came from outside.
    #[error("`kv_transfer_params` is set by the proxy and not accepted from a client")]
    ForeignParams,
}

impl RequestError {
    /// The field at fault, for the `param` member of the answer.
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Syntax(_) => None,
            Self::Duplicate(DuplicateField(name)) => Some(name),
            Self::Field { field, .. } => Some(field),
            Self::ForeignParams => Some("kv_transfer_params"),
        }
    }
}

/// A client's body with what the legs need to know of it.
#[derive(Debug)]
pub struct Request {
    body: Bytes,
    object: Object,
    has_completion_limit: bool,
    has_n: bool,
    has_stream: bool,
    first_prompt: Option<std::ops::Range<usize>>,
}

impl Request {
    /// Checks the fields that the legs change.
    ///
    /// Faults in them are answered here because the prefill leg would hide them: it carries its own
    /// values, prefill would pin blocks, and decode would then refuse the request. Every other
    /// field is the engine's to judge.
    ///
    /// # Errors
    /// [`RequestError`], one variant for each kind of fault.
    pub fn parse(body: Bytes, route: Route) -> Result<Self, RequestError> {
        let object = Object::parse(&body)?;
        let find = |name: &'static str| -> Result<Option<&[u8]>, RequestError> {
            let range = object.find(&body, name)?;
            Ok(range.map(|range| &body[range]))
        };
        let number = |field: &'static str, low: f64, want: &'static str| {
            let value = find(field)?.filter(|raw| *raw != b"null");
            value
                .map(|raw| integer(raw).filter(|value| *value >= low))
                .map(|value| value.ok_or(RequestError::Field { field, want }))
                .transpose()
        };

        if find("kv_transfer_params")?.is_some_and(|raw| raw != b"null") {
            return Err(RequestError::ForeignParams);
        }
        let max_tokens = number("max_tokens", 0.0, "a non-negative integer")?;
        let max_completion = number("max_completion_tokens", 0.0, "a non-negative integer")?;
        let min_tokens = number("min_tokens", 0.0, "a non-negative integer")?;
        if let (Some(low), Some(high)) = (min_tokens, max_completion.or(max_tokens))
            && low > high
        {
            return Err(RequestError::Field {
                field: "min_tokens",
                want: "at most the token limit",
            });
        }
        number("n", 1.0, "a positive integer")?;
        number("best_of", 1.0, "a positive integer")?;
        let stream = match find("stream")? {
            None | Some(b"false" | b"null") => false,
            Some(b"true") => true,
            Some(_) => {
                return Err(RequestError::Field {
                    field: "stream",
                    want: "true or false",
                });
            }
        };
        match find("stream_options")? {
            None | Some(b"null") => {}
            Some(raw) if raw.starts_with(b"{") && stream => {}
            Some(_) => {
                return Err(RequestError::Field {
                    field: "stream_options",
                    want: "an object, and only with `stream` true",
                });
            }
        }

        let first_prompt = match route {
            Route::Completions => {
                let prompt = object.find(&body, "prompt")?;
                prompt.and_then(|range| {
                    let first = first_of_several(&body[range.clone()])?;
                    Some(range.start + first.start..range.start + first.end)
                })
            }
            Route::ChatCompletions => None,
        };
        Ok(Self {
            has_completion_limit: find("max_completion_tokens")?.is_some(),
            has_n: find("n")?.is_some(),
            has_stream: find("stream")?.is_some(),
            first_prompt,
            object,
            body,
        })
    }

    /// Whether `prompt` is a list of several prompts.
    pub fn is_batch(&self) -> bool {
        self.first_prompt.is_some()
    }

    /// The body of the prefill leg: one token, one sequence, no stream, and the order to keep the
    /// blocks for `transfer_id` (32 hex digits).
    ///
    /// A list of prompts is cut to its first: the answer can carry the params of one prompt only,
    /// so prefilling the others would be thrown away. Decode computes those itself.
    pub fn prefill_body(&self, transfer_id: &str) -> Bytes {
        let params = format!(
            r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{transfer_id}"}}"#
        );
        let mut changes = vec![
            Change::Set("kv_transfer_params", &params),
            Change::Set("max_tokens", "1"),
            // An end-of-sequence or stop token as the only token would end the request as stopped,
            // for which connectors may keep no blocks; vLLM masks both below `min_tokens`.
            Change::Set("min_tokens", "1"),
            Change::Remove("stream_options"),
            Change::Remove("best_of"),
        ];
        if self.has_completion_limit {
            changes.push(Change::Set("max_completion_tokens", "1"));
        }
        if self.has_n {
            changes.push(Change::Set("n", "1"));
        }
        if self.has_stream {
            changes.push(Change::Set("stream", "false"));
        }
        if let Some(range) = &self.first_prompt {
            // The whole body was validated as UTF-8, and JSON values begin and end at characters.
            if let Ok(first) = std::str::from_utf8(&self.body[range.clone()]) {
                changes.push(Change::Set("prompt", first));
            }
        }
        self.object.apply(&self.body, &changes).into()
    }

    /// The body of the decode leg: the client's bytes, and `params` (one JSON object) spliced in.
    /// Without params it is the client's body itself.
    pub fn decode_body(&self, params: Option<&str>) -> Bytes {
        match params {
            Some(params) => {
                let change = Change::Set("kv_transfer_params", params);
                self.object.apply(&self.body, &[change]).into()
            }
            None => self.body.clone(),
        }
    }
}

/// The value of a JSON number that is an integer (`5`, `5.0` and `5e0` are the same number).
fn integer(raw: &[u8]) -> Option<f64> {
    let value: f64 = std::str::from_utf8(raw).ok()?.parse().ok()?;
    (raw[0] != b'"' && value.is_finite() && value.fract() == 0.0).then_some(value)
}

/// For a list of two or more prompts, the range of the first; `None` for one prompt in any form
/// (a string, a list of token ids, a list of one).
fn first_of_several(prompt: &[u8]) -> Option<std::ops::Range<usize>> {
    let inside = prompt.strip_prefix(b"[")?.trim_ascii_start();
    // A list of numbers is one prompt of token ids: there is no need to walk it.
    if !inside.starts_with(b"\"") && !inside.starts_with(b"[") && !inside.starts_with(b"{") {
        return None;
    }
    let text = std::str::from_utf8(prompt).ok()?;
    let mut parser = serde_json::Deserializer::from_str(text);
    let (first, others) = parser.deserialize_seq(FirstAndCount).ok()?;
    if others == 0 {
        return None;
    }
    let start = first?.get().as_ptr().addr() - text.as_ptr().addr();
    Some(start..start + first?.get().len())
}

struct FirstAndCount;

impl<'de> Visitor<'de> for FirstAndCount {
    type Value = (Option<&'de RawValue>, usize);

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a JSON array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let first = items.next_element::<&'de RawValue>()?;
        let mut others = 0;
        while items.next_element::<IgnoredAny>()?.is_some() {
            others += 1;
        }
        Ok((first, others))
    }
}
