//! The tokens that an answer tells, for the log.

use bytes::Bytes;
use serde::Deserialize;

/// Most of an answer, or of one line of it, that is kept to be read.
const HELD_BYTES_MAX: usize = 1 << 20;

/// Counts of one request, where its answers tell them.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// Of the prompt.
    pub(crate) prompt: Option<u64>,
    /// Of the prompt, those that prefill had cached.
    pub(crate) cached: Option<u64>,
    /// Generated.
    pub(crate) completion: Option<u64>,
}

#[derive(Deserialize)]
struct Answer {
    usage: Option<Usage>,
    /// Events of `/v1/responses` have it one level deeper.
    response: Option<Within>,
}

#[derive(Deserialize)]
struct Within {
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(alias = "input_tokens")]
    prompt_tokens: Option<u64>,
    #[serde(alias = "output_tokens")]
    completion_tokens: Option<u64>,
    #[serde(alias = "input_tokens_details")]
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Tokens {
    /// Those of a plain answer, or of one event; `None` where it tells none.
    pub(crate) fn of(object: &[u8]) -> Option<Self> {
        let answer: Answer = serde_json::from_slice(object).ok()?;
        let within = answer.response.and_then(|within| within.usage);
        let usage = answer.usage.or(within)?;
        let details = usage.prompt_tokens_details;
        Some(Self {
            prompt: usage.prompt_tokens,
            cached: details.and_then(|details| details.cached_tokens),
            completion: usage.completion_tokens,
        })
    }

    /// What a later answer tells counts more.
    pub(crate) fn then(self, later: Self) -> Self {
        Self {
            prompt: later.prompt.or(self.prompt),
            cached: later.cached.or(self.cached),
            completion: later.completion.or(self.completion),
        }
    }
}

/// Reads the tokens of an answer as it passes.
#[derive(Debug)]
pub(crate) struct Reader {
    is_events: bool,
    /// Of a plain answer all that came, of an event stream the line that has not ended.
    held: Vec<u8>,
    seen: Tokens,
}

impl Reader {
    /// For an event stream or a plain answer.
    pub(crate) fn new(is_events: bool) -> Self {
        Self {
            is_events,
            held: Vec::new(),
            seen: Tokens::default(),
        }
    }

    /// A part of the answer passes.
    pub(crate) fn push(&mut self, chunk: &Bytes) {
        if self.held.len() + chunk.len() > HELD_BYTES_MAX {
            // What is so large is not read.
            self.held.clear();
            return;
        }
        self.held.extend_from_slice(chunk);
        if !self.is_events {
            return;
        }
        let Some(end) = self.held.iter().rposition(|byte| *byte == b'\n') else {
            return;
        };
        for line in self.held[..end].split(|byte| *byte == b'\n') {
            // Only the last events have it, or each one does.
            let data = line.strip_prefix(b"data:").filter(|data| has_usage(data));
            if let Some(tokens) = data.and_then(Tokens::of) {
                self.seen = self.seen.then(tokens);
            }
        }
        self.held.drain(..=end);
    }

    /// What was told, when the answer has ended.
    pub(crate) fn end(&self) -> Tokens {
        match self.is_events {
            true => self.seen,
            false => Tokens::of(&self.held).unwrap_or_default(),
        }
    }
}

fn has_usage(text: &[u8]) -> bool {
    const NAME: &[u8] = b"\"usage\"";
    text.windows(NAME.len()).any(|found| found == NAME)
}

#[cfg(test)]
mod tests;
