//! Prompts that no cache has seen.

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::http::{Client, Refused, Url};

/// Tokens asked for, so that a decode engine does more than the one token of prefill.
const MAX_TOKENS: u32 = 8;
/// Prompts without any answer after which no more are sent.
const UNANSWERED_MAX: usize = 2;

/// Where prompts go.
pub(super) struct Target<'a> {
    pub(super) proxy: &'a Url,
    pub(super) api_key: Option<&'a str>,
    pub(super) model: &'a str,
}

/// What came back.
#[derive(Debug, Default)]
pub(super) struct Answers {
    pub(super) sent: u32,
    pub(super) ok: u32,
    /// Tokens of the answered prompts, by their `usage`.
    pub(super) prompt_tokens: u64,
    pub(super) failures: Vec<String>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// The first model the proxy lists.
///
/// # Errors
/// No answer, or no model in it.
pub(super) fn first_model(
    client: &Client,
    proxy: &Url,
    api_key: Option<&str>,
) -> anyhow::Result<String> {
    let models: Models = client
        .get_json(proxy, "/v1/models", api_key)
        .context("asking for the model's name; --model NAME gives it")?;
    match models.data.into_iter().next() {
        Some(model) => Ok(model.id),
        None => bail!("{proxy}/v1/models lists no model; --model NAME gives it"),
    }
}

#[derive(Serialize)]
struct Completion<'a> {
    model: &'a str,
    prompt: &'a str,
    max_tokens: u32,
    temperature: u32,
}

#[derive(Deserialize)]
struct Completed {
    usage: Usage,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
}

/// Sends `prompts` prompts one after another.
///
/// # Errors
/// Only when the system has no randomness; a prompt that fails is in the answers.
pub(super) fn send(
    client: &Client,
    target: &Target<'_>,
    prompts: u32,
    words: u32,
) -> anyhow::Result<Answers> {
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).map_err(|error| anyhow::anyhow!("no random numbers: {error}"))?;
    let mut random = Random(u64::from_le_bytes(seed));
    let mut answers = Answers::default();
    let mut unanswered = 0;
    for _ in 0..prompts {
        let prompt = random.text(words);
        let body = Completion {
            model: target.model,
            prompt: &prompt,
            max_tokens: MAX_TOKENS,
            temperature: 0,
        };
        answers.sent += 1;
        let answer = client.post_json(target.proxy, "/v1/completions", target.api_key, &body);
        match answer {
            Ok(Completed { usage }) => {
                answers.ok += 1;
                answers.prompt_tokens = answers.prompt_tokens.saturating_add(usage.prompt_tokens);
            }
            Err(error) => {
                if error.downcast_ref::<Refused>().is_none() {
                    unanswered += 1;
                }
                answers.failures.push(format!("{error:#}"));
                if unanswered == UNANSWERED_MAX {
                    break;
                }
            }
        }
    }
    Ok(answers)
}

/// SplitMix64: fast, and distinct words are all that is asked of it.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Words of four random syllables: the very first makes any cached prefix useless.
    fn text(&mut self, words: u32) -> String {
        let words: Vec<String> = (0..words).map(|_| self.word()).collect();
        words.join(" ")
    }

    fn word(&mut self) -> String {
        const CONSONANTS: &[u8; 16] = b"bcdfghjklmnprstz";
        const VOWELS: &[u8; 4] = b"aeio";
        let bits = self.next();
        (0..4)
            .flat_map(|syllable| {
                let bits = (bits >> (6 * syllable)) as usize;
                [CONSONANTS[bits & 15], VOWELS[(bits >> 4) & 3]]
            })
            .map(char::from)
            .collect()
    }
}
