//! Single members of a request, read and checked.

use serde::de::{Deserializer as _, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::request::RequestError;
use super::splice::Object;

/// Members read by name; `null` reads as absent.
pub(super) struct Fields<'a> {
    pub(super) object: &'a Object,
    pub(super) text: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Whether the member is there, `null` or not.
    pub(super) fn is_sent(&self, field: &'static str) -> Result<bool, RequestError> {
        Ok(self.object.find(self.text, field)?.is_some())
    }

    /// The raw value of a member.
    pub(super) fn get(&self, field: &'static str) -> Result<Option<&'a [u8]>, RequestError> {
        let range = self.object.find(self.text, field)?;
        Ok(range
            .map(|range| &self.text[range])
            .filter(|raw| *raw != b"null"))
    }

    /// Whether the params are there, or within `vllm_xargs`, whose members an engine copies to
    /// where the params stand.
    pub(super) fn has_params(&self) -> Result<bool, RequestError> {
        if self.get("kv_transfer_params")?.is_some() {
            return Ok(true);
        }
        let Some(raw) = self.get("vllm_xargs")? else {
            return Ok(false);
        };
        // What is no object is the engine's to refuse.
        let Ok(inner) = Object::parse(raw) else {
            return Ok(false);
        };
        let found = inner.find(raw, "kv_transfer_params");
        Ok(found.map_or(true, |range| range.is_some()))
    }

    /// The value of a member that is an integer of at least `low`.
    pub(super) fn number(
        &self,
        field: &'static str,
        low: f64,
        want: &'static str,
    ) -> Result<Option<f64>, RequestError> {
        self.get(field)?
            .map(|raw| integer(raw).filter(|value| *value >= low))
            .map(|value| value.ok_or(RequestError::Field { field, want }))
            .transpose()
    }

    /// The value of a member that is a boolean; absent is false.
    pub(super) fn flag(&self, field: &'static str) -> Result<bool, RequestError> {
        match self.get(field)? {
            None | Some(b"false") => Ok(false),
            Some(b"true") => Ok(true),
            Some(_) => Err(RequestError::Field {
                field,
                want: "true or false",
            }),
        }
    }
}

/// Whether a list of tools has one that is not a function of the client's.
pub(super) fn has_engine_tools(tools: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Tool<'a> {
        #[serde(borrow)]
        r#type: std::borrow::Cow<'a, str>,
    }
    let tools: Result<Vec<Tool<'_>>, _> = serde_json::from_slice(tools);
    // What is not such a list is the engine's to refuse.
    tools.is_ok_and(|tools| tools.iter().any(|tool| tool.r#type != "function"))
}

/// The value of a JSON number that is an integer (`5`, `5.0` and `5e0` are the same number).
fn integer(raw: &[u8]) -> Option<f64> {
    let value: f64 = std::str::from_utf8(raw).ok()?.parse().ok()?;
    (raw[0] != b'"' && value.is_finite() && value.fract() == 0.0).then_some(value)
}

/// For a list of two or more prompts, the range of the first; `None` for one prompt in any form
/// (a string, a list of token ids, a list of one).
pub(super) fn first_of_several(prompt: &[u8]) -> Option<std::ops::Range<usize>> {
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
