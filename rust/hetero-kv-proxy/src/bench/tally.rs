//! What a round adds up to.

use std::time::Duration;

use tokio::time::Instant;

use super::client::Sample;
use super::failure::{Failure, Failures};
use super::histogram::Histogram;

/// Counts and times of one round.
#[derive(Debug, Default)]
pub struct Tally {
    /// From the first request to the end of the last.
    pub duration: Duration,
    /// Requests that were due.
    pub sent: u64,
    /// Those with a complete answer.
    pub completed: u64,
    /// All others.
    pub failures: Failures,
    /// Of complete answers, by their usage; none once one of them did not tell.
    pub prompt_tokens: PromptTokens,
    /// Of complete answers.
    pub generated_tokens: u64,
    /// Chunks with tokens, of complete answers.
    pub chunks: u64,
    /// To the first byte.
    pub first_byte: Histogram,
    /// To the first token.
    pub ttft: Histogram,
    /// For each token after the first.
    pub tpot: Histogram,
    /// Between chunks, also of answers that failed later.
    pub gaps: Histogram,
    /// To the end.
    pub whole: Histogram,
}

/// A sum that is known only when each part is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptTokens {
    /// All told.
    Known(u64),
    /// One did not.
    Unknown,
}

impl Default for PromptTokens {
    fn default() -> Self {
        Self::Known(0)
    }
}

impl Tally {
    /// Adds the time between two chunks.
    pub fn gap(&mut self, gap: Duration) {
        self.gaps.add(gap);
    }

    /// Adds a complete answer.
    pub fn complete(&mut self, due: Instant, sample: &Sample) {
        self.completed += 1;
        let tokens = sample.counts.tokens();
        self.generated_tokens += tokens;
        self.chunks += sample.counts.chunks;
        self.prompt_tokens = match (self.prompt_tokens, sample.counts.prompt_tokens) {
            (PromptTokens::Known(sum), Some(more)) => PromptTokens::Known(sum + more),
            (PromptTokens::Known(_) | PromptTokens::Unknown, _) => PromptTokens::Unknown,
        };
        self.first_byte.add(sample.first_byte - due);
        self.whole.add(sample.ended - due);
        if let (Some(first), Some(last)) = (sample.first_token, sample.last_token) {
            self.ttft.add(first - due);
            if tokens > 1 {
                let each = (last - first).as_secs_f64() / (tokens - 1) as f64;
                self.tpot.add(Duration::from_secs_f64(each));
            }
        }
    }

    /// Adds a failed one.
    pub fn fail(&mut self, failure: &Failure) {
        self.failures.add(failure);
    }
}
