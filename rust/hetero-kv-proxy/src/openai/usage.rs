//! What prefill found in its prefix cache, told in decode's usage.
//!
//! Decode has all tokens of the prompt from elsewhere, and counts them as cached; only prefill knows
//! which were. That one count is replaced, by byte range; nothing else of the answer changes, and
//! nothing at all where prefill does not tell it.

use bytes::{Bytes, BytesMut};

use super::Route;
use super::splice::{Change, Object};

/// A plain answer, or one line of an event stream, that is larger passes as it is.
const HELD_BYTES_MAX: usize = 4 << 20;

const CACHED: &str = "cached_tokens";

/// Prefill's count of cached tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// As it is written.
    count: String,
    /// The member of `usage` that has it.
    details: &'static str,
    /// The member of an event that may have the usage, where the event itself does not.
    within: Option<&'static str>,
}

impl Cached {
    /// The count in the `usage` of a prefill answer; `None` where it tells none.
    pub fn of_prefill(usage: &str, route: Route) -> Option<Self> {
        let (details, within) = match route {
            Route::Completions | Route::ChatCompletions => ("prompt_tokens_details", None),
            Route::Responses => ("input_tokens_details", Some("response")),
        };
        let count = member(member(usage.as_bytes(), details)?, CACHED)?;
        let count = std::str::from_utf8(count).ok()?;
        count.parse::<u64>().ok()?;
        Some(Self {
            count: count.to_owned(),
            details,
            within,
        })
    }

    /// An answer or event with this count; `None` where it has no usage.
    fn told_in(&self, object: &[u8]) -> Option<Vec<u8>> {
        let Some(usage) = member(object, "usage") else {
            let inner = member(object, self.within?)?;
            let usage = self.in_usage(member(inner, "usage")?)?;
            let inner = set(inner, "usage", &usage)?;
            return set(object, self.within?, &inner);
        };
        set(object, "usage", &self.in_usage(usage)?)
    }

    fn in_usage(&self, usage: &[u8]) -> Option<Vec<u8>> {
        // `null` where the engine tells no details.
        let details = match member(usage, self.details).filter(|raw| raw.starts_with(b"{")) {
            Some(details) => set(details, CACHED, self.count.as_bytes())?,
            None => format!(r#"{{"{CACHED}":{}}}"#, self.count).into_bytes(),
        };
        set(usage, self.details, &details)
    }
}

/// The raw value of a member of an object; `None` where there is none, or two.
fn member<'a>(object: &'a [u8], name: &str) -> Option<&'a [u8]> {
    if !object.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    let range = Object::parse(object).ok()?.find(object, name).ok()??;
    Some(&object[range])
}

/// The object with one member set; `None` where it has two of that name.
fn set(object: &[u8], name: &str, value: &[u8]) -> Option<Vec<u8>> {
    let parsed = Object::parse(object).ok()?;
    parsed.find(object, name).ok()?;
    let value = std::str::from_utf8(value).ok()?;
    let object = Bytes::copy_from_slice(object);
    let pieces = parsed.apply(&object, &[Change::Set(name, value)], usize::MAX);
    Some(pieces.concat())
}

/// Tells the count in an answer as it passes.
#[derive(Debug)]
pub struct Teller {
    cached: Cached,
    is_events: bool,
    /// Of a plain answer all that came, of an event stream the line that has not ended.
    held: BytesMut,
    /// It was too large, and passes.
    passive: bool,
}

impl Teller {
    /// For an event stream or a plain JSON answer.
    pub fn new(cached: Cached, is_events: bool) -> Self {
        Self {
            cached,
            is_events,
            held: BytesMut::new(),
            passive: false,
        }
    }

    /// What of the answer can be passed on with this chunk.
    pub fn push(&mut self, chunk: Bytes) -> Bytes {
        if self.passive {
            return chunk;
        }
        let whole_lines = self.is_events && self.held.is_empty() && chunk.ends_with(b"\n");
        if whole_lines && !has_usage(&chunk) {
            return chunk;
        }
        self.held.extend_from_slice(&chunk);
        let mut ready = Bytes::new();
        if self.is_events
            && let Some(end) = self.held.iter().rposition(|byte| *byte == b'\n')
        {
            let lines = self.held.split_to(end + 1).freeze();
            ready = self.lines(lines);
        }
        if self.held.len() > HELD_BYTES_MAX {
            self.passive = true;
            let rest = self.held.split().freeze();
            return [ready, rest].concat().into();
        }
        ready
    }

    /// What is left when the answer has ended.
    pub fn end(&mut self) -> Bytes {
        let rest = self.held.split().freeze();
        if self.is_events || self.passive || rest.is_empty() {
            return rest;
        }
        self.cached.told_in(&rest).map_or(rest, Bytes::from)
    }

    fn lines(&self, lines: Bytes) -> Bytes {
        if !has_usage(&lines) {
            return lines;
        }
        let mut told = Vec::with_capacity(lines.len() + 32);
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            let event = line
                .strip_prefix(b"data:")
                .filter(|data| has_usage(data))
                .and_then(|data| self.cached.told_in(data));
            match event {
                Some(event) => {
                    told.extend_from_slice(b"data:");
                    told.extend_from_slice(&event);
                }
                None => told.extend_from_slice(line),
            }
        }
        told.into()
    }
}

/// Whether `"usage"` occurs with an object: worth parsing. Within a text its quotes are escaped.
fn has_usage(text: &[u8]) -> bool {
    const NAME: &[u8] = b"\"usage\"";
    let mut names = text.windows(NAME.len()).enumerate();
    names.any(|(at, found)| {
        let rest = || {
            text[at + NAME.len()..]
                .trim_ascii_start()
                .strip_prefix(b":")
        };
        found == NAME && rest().is_some_and(|value| value.trim_ascii_start().starts_with(b"{"))
    })
}

#[cfg(test)]
mod tests;
