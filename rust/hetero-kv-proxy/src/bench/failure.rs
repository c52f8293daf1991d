//! What can be wrong with an answer: every kind has a name, and every request that is not complete
//! has one kind.

use std::collections::BTreeMap;
use std::fmt;

/// Examples kept of each kind.
const EXAMPLES_MAX: usize = 3;
/// Characters kept of each example.
const EXAMPLE_CHARS_MAX: usize = 200;

/// Why a request counts as failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// No connection.
    Connect,
    /// No connection within the limit.
    ConnectTimeout,
    /// The connection closed before a response head.
    ClosedBeforeHead,
    /// No response head within the deadline.
    TimeoutBeforeHead,
    /// Not the whole answer within the deadline.
    TimeoutInAnswer,
    /// A status other than 200.
    Status(u16),
    /// The body broke off.
    BodyBroken,
    /// The answer is longer than the limit.
    TooLong,
    /// A stream was asked for and did not come, or the reverse.
    ContentType,
    /// An event or an answer that is no JSON object.
    BadJson,
    /// An error event, or an error object under a 200.
    ErrorIn200,
    /// A stream that ended without `data: [DONE]`.
    NoDone,
    /// Data behind `data: [DONE]`.
    DataAfterDone,
    /// Not a single token.
    NoTokens,
    /// Another number of tokens than was asked for.
    TokenCount,
    /// Not sent: as many were in flight as are allowed.
    NotSent,
    /// The run was interrupted.
    Interrupted,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Connect => "connect",
            Self::ConnectTimeout => "connect_timeout",
            Self::ClosedBeforeHead => "closed_before_head",
            Self::TimeoutBeforeHead => "timeout_before_head",
            Self::TimeoutInAnswer => "timeout_in_answer",
            Self::Status(status) => return write!(out, "status_{status}"),
            Self::BodyBroken => "body_broken",
            Self::TooLong => "too_long",
            Self::ContentType => "content_type",
            Self::BadJson => "bad_json",
            Self::ErrorIn200 => "error_in_200",
            Self::NoDone => "no_done",
            Self::DataAfterDone => "data_after_done",
            Self::NoTokens => "no_tokens",
            Self::TokenCount => "token_count",
            Self::NotSent => "not_sent",
            Self::Interrupted => "interrupted",
        };
        out.write_str(name)
    }
}

/// One failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Its kind.
    pub kind: FailureKind,
    /// What was seen, for people.
    pub seen: String,
}

impl Failure {
    /// With what was seen.
    pub fn new(kind: FailureKind, seen: impl fmt::Display) -> Self {
        Self {
            kind,
            seen: seen.to_string(),
        }
    }
}

/// Failures by kind, with examples.
#[derive(Debug, Default, Clone)]
pub struct Failures(BTreeMap<FailureKind, (u64, Vec<String>)>);

impl Failures {
    /// Adds one.
    pub fn add(&mut self, failure: &Failure) {
        let (count, examples) = self.0.entry(failure.kind).or_default();
        *count += 1;
        if examples.len() < EXAMPLES_MAX {
            // Bytes from outside may hold what a terminal would obey.
            let printable = |c: char| if c.is_control() { ' ' } else { c };
            let seen = failure.seen.chars().take(EXAMPLE_CHARS_MAX);
            let example: String = seen.map(printable).collect();
            if !examples.contains(&example) {
                examples.push(example);
            }
        }
    }

    /// All of them.
    pub fn count(&self) -> u64 {
        self.0.values().map(|(count, _)| count).sum()
    }

    /// Kind, count and examples, by kind.
    pub fn iter(&self) -> impl Iterator<Item = (FailureKind, u64, &[String])> {
        self.0
            .iter()
            .map(|(kind, (count, examples))| (*kind, *count, examples.as_slice()))
    }
}
