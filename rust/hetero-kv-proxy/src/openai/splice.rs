//! Top-level members of a JSON object by byte range, and changes to them.
//!
//! The text is validated once and never written again from a parsed form: floats, big integers,
//! escapes, key order, white space and unknown members stay the bytes that the client sent.

use std::ops::Range;

use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Why a body is not a JSON object.
#[derive(Debug, thiserror::Error)]
pub enum SyntaxError {
    /// The bytes are not UTF-8.
    #[error("the body is not valid UTF-8 (first bad byte at offset {0})")]
    Utf8(usize),
    /// Not JSON, or JSON of another type.
    #[error("the body is not a JSON object: {0}")]
    Json(#[from] serde_json::Error),
}

/// A name occurs more than once among the top-level members.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("duplicate field `{0}`")]
pub struct DuplicateField(pub String);

/// Byte ranges of one member.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Member {
    /// With its quotes.
    name: Range<usize>,
    value: Range<usize>,
}

/// Where the top-level members of one JSON object lie in its text.
#[derive(Debug)]
pub struct Object {
    /// Offset just behind the opening brace.
    open: usize,
    members: Vec<Member>,
}

/// One change to a top-level member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<'a> {
    /// Replaces the value, or adds the member in front of the others.
    Set(&'a str, &'a str),
    /// Removes the member if it is there.
    Remove(&'a str),
}

impl Object {
    /// Validates `text` as one JSON object and notes where its members lie.
    ///
    /// # Errors
    /// [`SyntaxError`] for anything but exactly one JSON object in UTF-8.
    pub fn parse(text: &[u8]) -> Result<Self, SyntaxError> {
        let text =
            std::str::from_utf8(text).map_err(|error| SyntaxError::Utf8(error.valid_up_to()))?;
        let mut parser = serde_json::Deserializer::from_str(text);
        let members = parser.deserialize_map(Members { text })?;
        parser.end()?;
        let open = text.find('{').map_or(0, |brace| brace + 1);
        Ok(Self { open, members })
    }

    /// The range of the value of `name`; `text` is what [`Object::parse`] was given.
    ///
    /// # Errors
    /// [`DuplicateField`] when the name occurs more than once: readers differ in which one counts.
    pub fn find(&self, text: &[u8], name: &str) -> Result<Option<Range<usize>>, DuplicateField> {
        let mut found = None;
        for member in &self.members {
            if named(&text[member.name.clone()], name) {
                if found.is_some() {
                    return Err(DuplicateField(name.to_owned()));
                }
                found = Some(member.value.clone());
            }
        }
        Ok(found)
    }

    /// The text with `changes` made. Each name occurs at most once in `changes` and in the object.
    pub fn apply(&self, text: &[u8], changes: &[Change<'_>]) -> Vec<u8> {
        let added: usize = changes
            .iter()
            .map(|change| match change {
                Change::Set(name, value) => name.len() + value.len() + 8,
                Change::Remove(_) => 0,
            })
            .sum();
        let mut out = Vec::with_capacity(text.len() + added);
        let plan: Vec<Option<&Change<'_>>> = self
            .members
            .iter()
            .map(|member| {
                changes.iter().find(|change| match change {
                    Change::Set(name, _) | Change::Remove(name) => {
                        named(&text[member.name.clone()], name)
                    }
                })
            })
            .collect();
        let removed = |at: usize| matches!(plan[at], Some(Change::Remove(_)));
        let kept = (0..plan.len()).filter(|&at| !removed(at)).count();

        out.extend_from_slice(&text[..self.open]);
        let mut inserted = 0;
        for change in changes {
            match change {
                Change::Set(name, value) => {
                    if plan.iter().flatten().any(|planned| *planned == change) {
                        continue;
                    }
                    if inserted > 0 {
                        out.push(b',');
                    }
                    out.push(b'"');
                    out.extend_from_slice(name.as_bytes());
                    out.extend_from_slice(b"\":");
                    out.extend_from_slice(value.as_bytes());
                    inserted += 1;
                }
                Change::Remove(_) => {}
            }
        }
        if inserted > 0 && kept > 0 {
            out.push(b',');
        }

        let mut copied = self.open;
        let mut at = 0;
        while at < plan.len() {
            match plan[at] {
                None => {}
                Some(Change::Set(_, value)) => {
                    let range = &self.members[at].value;
                    out.extend_from_slice(&text[copied..range.start]);
                    out.extend_from_slice(value.as_bytes());
                    copied = range.end;
                }
                Some(Change::Remove(_)) => {
                    let first = at;
                    while at + 1 < plan.len() && removed(at + 1) {
                        at += 1;
                    }
                    // One comma goes with each removed member: the one behind it, or, when nothing
                    // follows, the one in front of the run.
                    let (from, to) = if at + 1 < plan.len() {
                        (
                            self.members[first].name.start,
                            self.members[at + 1].name.start,
                        )
                    } else if first > 0 {
                        (
                            self.members[first - 1].value.end,
                            self.members[at].value.end,
                        )
                    } else {
                        (self.members[first].name.start, self.members[at].value.end)
                    };
                    out.extend_from_slice(&text[copied..from]);
                    copied = to;
                }
            }
            at += 1;
        }
        out.extend_from_slice(&text[copied..]);
        out
    }
}

/// Whether a raw member name, with its quotes, spells `name`.
fn named(raw: &[u8], name: &str) -> bool {
    let inner = &raw[1..raw.len() - 1];
    if inner.contains(&b'\\') {
        return serde_json::from_slice::<String>(raw).is_ok_and(|decoded| decoded == name);
    }
    inner == name.as_bytes()
}

struct Members<'a> {
    text: &'a str,
}

impl Members<'_> {
    fn range(&self, part: &RawValue) -> Range<usize> {
        // A borrowed raw value is a slice of the text that is being read.
        let start = part.get().as_ptr().addr() - self.text.as_ptr().addr();
        start..start + part.get().len()
    }
}

impl<'de> Visitor<'de> for Members<'de> {
    type Value = Vec<Member>;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(name) = map.next_key::<&'de RawValue>()? {
            let value = map.next_value::<&'de RawValue>()?;
            members.push(Member {
                name: self.range(name),
                value: self.range(value),
            });
        }
        Ok(members)
    }
}
