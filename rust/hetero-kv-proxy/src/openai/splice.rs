//! Top-level members of a JSON object by byte range, and changes to them.
//!
//! The text is validated once and never written again from a parsed form: floats, big integers,
//! escapes, key order, white space and unknown members stay the bytes that the client sent.

use std::ops::Range;

use bytes::Bytes;
use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::scan;

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
pub(super) struct Member {
    /// With its quotes.
    pub(super) name: Range<usize>,
    /// Whether the name is written with escapes.
    pub(super) escaped: bool,
    pub(super) value: Range<usize>,
}

impl Member {
    /// Whether this is the member `name` of `text`.
    #[inline]
    fn is(&self, text: &[u8], name: &str) -> bool {
        if self.escaped {
            return self.decodes_to(text, name);
        }
        // Nearly all differ in length.
        self.name.len() == name.len() + 2
            && &text[self.name.start + 1..self.name.end - 1] == name.as_bytes()
    }

    #[cold]
    fn decodes_to(&self, text: &[u8], name: &str) -> bool {
        let raw = &text[self.name.clone()];
        serde_json::from_slice::<String>(raw).is_ok_and(|decoded| decoded == name)
    }
}

/// Where the top-level members of one JSON object lie in its text.
#[derive(Debug, PartialEq, Eq)]
pub struct Object {
    /// Offset just behind the opening brace.
    pub(super) open: usize,
    pub(super) members: Vec<Member>,
    /// A bit for each length that a member's name may have; most names asked for have another.
    name_lengths: u64,
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
    pub(super) fn new(open: usize, members: Vec<Member>) -> Self {
        let lengths = members.iter().map(|member| match member.escaped {
            true => u64::MAX,
            false => length_bit(member.name.len() - 2),
        });
        Self {
            open,
            name_lengths: lengths.fold(0, |all, length| all | length),
            members,
        }
    }

    /// Validates `text` as one JSON object and notes where its members lie.
    ///
    /// # Errors
    /// [`SyntaxError`] for anything but exactly one JSON object in UTF-8.
    pub fn parse(text: &[u8]) -> Result<Self, SyntaxError> {
        let text =
            std::str::from_utf8(text).map_err(|error| SyntaxError::Utf8(error.valid_up_to()))?;
        if let Some((open, members)) = scan::members(text.as_bytes()) {
            return Ok(Self::new(open, members));
        }
        Self::by_parser(text)
    }

    /// As [`Object::parse`], for what the fast look does not understand.
    pub(super) fn by_parser(text: &str) -> Result<Self, SyntaxError> {
        let mut parser = serde_json::Deserializer::from_str(text);
        let members = parser.deserialize_map(Members { text })?;
        parser.end()?;
        let open = text.find('{').map_or(0, |brace| brace + 1);
        Ok(Self::new(open, members))
    }

    /// The range of the value of `name`; `text` is what [`Object::parse`] was given.
    ///
    /// # Errors
    /// [`DuplicateField`] when the name occurs more than once: readers differ in which one counts.
    pub fn find(&self, text: &[u8], name: &str) -> Result<Option<Range<usize>>, DuplicateField> {
        if self.name_lengths & length_bit(name.len()) == 0 {
            return Ok(None);
        }
        let mut found = None;
        for member in &self.members {
            if member.is(text, name) {
                if found.is_some() {
                    return Err(DuplicateField(name.to_owned()));
                }
                found = Some(member.value.clone());
            }
        }
        Ok(found)
    }

    /// The text with `changes` made, in pieces that follow each other. Each name occurs at most once
    /// in `changes` and in the object.
    ///
    /// A run of at least `shared_min` bytes that is not changed is not copied either.
    pub fn apply(&self, text: &Bytes, changes: &[Change<'_>], shared_min: usize) -> Vec<Bytes> {
        let added: usize = changes
            .iter()
            .map(|change| match change {
                Change::Set(name, value) => name.len() + value.len() + 8,
                Change::Remove(_) => 0,
            })
            .sum();
        let mut out = Pieces {
            text,
            shared_min,
            done: Vec::new(),
            open: Vec::with_capacity(added + text.len().min(shared_min)),
        };
        let plan: Vec<Option<&Change<'_>>> = self
            .members
            .iter()
            .map(|member| {
                changes.iter().find(|change| match change {
                    Change::Set(name, _) | Change::Remove(name) => member.is(text, name),
                })
            })
            .collect();
        let removed = |at: usize| matches!(plan[at], Some(Change::Remove(_)));
        let kept = (0..plan.len()).filter(|&at| !removed(at)).count();

        out.put_run(0..self.open);
        let mut inserted = 0;
        for change in changes {
            match change {
                Change::Set(name, value) => {
                    if plan.iter().flatten().any(|planned| *planned == change) {
                        continue;
                    }
                    if inserted > 0 {
                        out.put(b",");
                    }
                    out.put(b"\"");
                    out.put(name.as_bytes());
                    out.put(b"\":");
                    out.put(value.as_bytes());
                    inserted += 1;
                }
                Change::Remove(_) => {}
            }
        }
        if inserted > 0 && kept > 0 {
            out.put(b",");
        }

        let mut copied = self.open;
        let mut at = 0;
        while at < plan.len() {
            match plan[at] {
                None => {}
                Some(Change::Set(_, value)) => {
                    let range = &self.members[at].value;
                    out.put_run(copied..range.start);
                    out.put(value.as_bytes());
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
                    out.put_run(copied..from);
                    copied = to;
                }
            }
            at += 1;
        }
        out.put_run(copied..text.len());
        out.close();
        out.done
    }
}

/// Lengths from 63 on share a bit.
fn length_bit(length: usize) -> u64 {
    1 << length.min(63)
}

/// A text that is put together from runs of another.
struct Pieces<'a> {
    text: &'a Bytes,
    shared_min: usize,
    done: Vec<Bytes>,
    /// The piece that is being written.
    open: Vec<u8>,
}

impl Pieces<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.open.extend_from_slice(bytes);
    }

    fn put_run(&mut self, range: Range<usize>) {
        if range.len() < self.shared_min || range.is_empty() {
            self.open.extend_from_slice(&self.text[range]);
        } else {
            self.close();
            self.done.push(self.text.slice(range));
        }
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.done.push(std::mem::take(&mut self.open).into());
        }
    }
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
                escaped: name.get().contains('\\'),
                value: self.range(value),
            });
        }
        Ok(members)
    }
}
