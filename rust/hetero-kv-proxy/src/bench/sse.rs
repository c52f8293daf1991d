//! An answer as it comes, and what is counted in it. Pure.

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::failure::{Failure, FailureKind};

/// A longer event is no token.
const EVENT_BYTES_MAX: usize = 4 << 20;

/// Reads an event stream in pieces of any size.
#[derive(Debug, Default)]
pub struct EventStream {
    /// A line that is not whole yet.
    line: Vec<u8>,
    /// The data lines of an event that is not whole yet.
    data: Vec<u8>,
    is_done: bool,
    counts: Counts,
}

/// What an answer held.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Events, or choices of a plain answer, that brought text.
    pub chunks: u64,
    /// By the answer's own usage.
    pub completion_tokens: Option<u64>,
    /// By the answer's own usage.
    pub prompt_tokens: Option<u64>,
}

impl Counts {
    /// Tokens by the usage; without one, chunks stand in.
    pub fn tokens(&self) -> u64 {
        self.completion_tokens.unwrap_or(self.chunks)
    }
}

#[derive(Deserialize)]
struct Payload {
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<IgnoredAny>,
    #[serde(default)]
    object: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: Option<String>,
    #[serde(default, alias = "message")]
    delta: Option<Delta>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    role: Option<IgnoredAny>,
    #[serde(default)]
    content: Option<String>,
    #[serde(default, alias = "reasoning")]
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
}

impl Choice {
    /// Whether it brought a token. A token may have no text of its own, such as a part of a
    /// character; what only names the role, or only says that it is over, is none.
    fn is_token(&self) -> bool {
        let has = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if has(&self.text) {
            return true;
        }
        let bare = self.finish_reason.is_none();
        match &self.delta {
            None => self.text.is_some() && bare,
            Some(delta) => {
                has(&delta.content)
                    || has(&delta.reasoning_content)
                    || delta
                        .tool_calls
                        .as_ref()
                        .is_some_and(|calls| !calls.is_empty())
                    || (delta.role.is_none() && delta.content.is_some() && bare)
            }
        }
    }
}

impl EventStream {
    /// Takes the next bytes; how many tokens' chunks became whole with them.
    ///
    /// # Errors
    /// A [`Failure`] that the stream showed.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<u64, Failure> {
        let before = self.counts.chunks;
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            if self.line.is_empty() {
                self.take_line(line)?;
            } else {
                self.line.extend_from_slice(line);
                let line = std::mem::take(&mut self.line);
                self.take_line(&line)?;
            }
            bytes = rest;
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() + self.data.len() > EVENT_BYTES_MAX {
            let seen = format!("an event of more than {EVENT_BYTES_MAX} bytes");
            return Err(Failure::new(FailureKind::TooLong, seen));
        }
        Ok(self.counts.chunks - before)
    }

    /// At the end of the body.
    ///
    /// # Errors
    /// The stream did not end as OpenAI's do.
    pub fn end(self) -> Result<Counts, Failure> {
        if !self.is_done {
            let seen = format!("the stream ended after {} chunks", self.counts.chunks);
            return Err(Failure::new(FailureKind::NoDone, seen));
        }
        if !self.line.is_empty() || !self.data.is_empty() {
            let seen = String::from_utf8_lossy(&self.line).into_owned();
            return Err(Failure::new(FailureKind::DataAfterDone, seen));
        }
        Ok(self.counts)
    }

    fn take_line(&mut self, line: &[u8]) -> Result<(), Failure> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            if self.data.is_empty() {
                return Ok(());
            }
            let data = std::mem::take(&mut self.data);
            return self.take_event(&data);
        }
        // Comments keep connections open; other fields have no meaning here.
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(());
        };
        if !self.data.is_empty() {
            self.data.push(b'\n');
        }
        self.data
            .extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
        Ok(())
    }

    fn take_event(&mut self, data: &[u8]) -> Result<(), Failure> {
        let shown = || String::from_utf8_lossy(data).into_owned();
        if self.is_done {
            return Err(Failure::new(FailureKind::DataAfterDone, shown()));
        }
        if data == b"[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let payload = payload(data)?;
        let tokens = payload
            .choices
            .iter()
            .flatten()
            .filter(|choice| choice.is_token());
        self.counts.chunks += tokens.count() as u64;
        note_usage(&mut self.counts, payload.usage);
        Ok(())
    }
}

/// Counts a plain answer.
///
/// # Errors
/// A [`Failure`] that it shows.
pub fn plain(bytes: &[u8]) -> Result<Counts, Failure> {
    let payload = payload(bytes)?;
    let mut counts = Counts::default();
    let choices = payload.choices.unwrap_or_default();
    counts.chunks = choices.iter().filter(|choice| choice.is_token()).count() as u64;
    note_usage(&mut counts, payload.usage);
    Ok(counts)
}

fn payload(data: &[u8]) -> Result<Payload, Failure> {
    let shown = || String::from_utf8_lossy(data).into_owned();
    let payload: Payload = serde_json::from_slice(data)
        .map_err(|error| Failure::new(FailureKind::BadJson, format!("{error}: {}", shown())))?;
    if payload.error.is_some() || payload.object.as_deref() == Some("error") {
        return Err(Failure::new(FailureKind::ErrorIn200, shown()));
    }
    Ok(payload)
}

fn note_usage(counts: &mut Counts, usage: Option<Usage>) {
    if let Some(usage) = usage {
        counts.prompt_tokens = usage.prompt_tokens.or(counts.prompt_tokens);
        counts.completion_tokens = usage.completion_tokens.or(counts.completion_tokens);
    }
}

#[cfg(test)]
mod tests;
