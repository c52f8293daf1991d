//! What a policy may know of a request.

use super::hash::{Hasher, hash};

/// The shortest beginning of a prompt that is worth a look: some 30 tokens.
pub const PREFIX_BYTES_MIN: usize = 128;
/// Beginnings that are told apart, each twice as long as the one before.
pub const PREFIX_LEVELS: usize = 8;
/// The longest beginning that is told apart; what is behind it is not read.
pub const PREFIX_BYTES_MAX: usize = PREFIX_BYTES_MIN << (PREFIX_LEVELS - 1);

/// The parts of a request from which its keys are made.
#[derive(Debug, Clone, Copy, Default)]
pub struct KeyParts<'a> {
    /// The model's name; the prompts of different models share nothing.
    pub model: &'a [u8],
    /// The prompt, in any form in which equal beginnings mean equal tokens: its raw JSON.
    pub prompt: &'a [u8],
    /// What the client says its requests belong to, such as a session.
    pub session: Option<&'a [u8]>,
    /// How much of the prompt stands in for a session where there is none, in bytes.
    pub prompt_bytes: usize,
}

/// The keys of one request, of fixed size whatever the request's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestKey {
    group: Option<u64>,
    prefixes: [u64; PREFIX_LEVELS],
    levels: usize,
    prompt_bytes: usize,
}

impl RequestKey {
    /// The keys of a request; at most [`PREFIX_BYTES_MAX`] bytes of the prompt, or
    /// [`KeyParts::prompt_bytes`], are read.
    pub fn new(parts: &KeyParts<'_>) -> Self {
        let seed = hash(0, parts.model);
        let prompt = parts.prompt;
        let start = &prompt[..prompt.len().min(parts.prompt_bytes)];
        let group = match parts.session {
            // Sessions are the client's: they mean the same whatever the model.
            Some(session) => Some(hash(0, session)),
            None if start.is_empty() => None,
            None => Some(hash(seed, start)),
        };
        let mut prefixes = [0; PREFIX_LEVELS];
        let mut levels = 0;
        let mut hasher = Hasher::new(seed);
        let mut read = 0;
        for prefix in &mut prefixes {
            let end = PREFIX_BYTES_MIN << levels;
            let Some(fresh) = prompt.get(read..end) else {
                break;
            };
            hasher.update(fresh);
            *prefix = hasher.digest();
            read = end;
            levels += 1;
        }
        Self {
            group,
            prefixes,
            levels,
            prompt_bytes: prompt.len(),
        }
    }

    /// What requests that belong together have in common; `None` where nothing says so.
    pub fn group(&self) -> Option<u64> {
        self.group
    }

    /// Hashes of the beginnings of the prompt, the shortest first.
    pub fn prefixes(&self) -> &[u64] {
        &self.prefixes[..self.levels]
    }

    /// Length of the prompt.
    #[cfg(test)]
    pub(in super::super) fn prompt_bytes(&self) -> usize {
        self.prompt_bytes
    }

    /// Those beginnings that are at least a quarter of the prompt (or of [`PREFIX_BYTES_MAX`]),
    /// the longest first. Lengths double, so that requests with half of the prompt in common have
    /// one of these in common. Each with its length in bytes.
    pub(super) fn long_prefixes(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let whole = self.prompt_bytes.min(PREFIX_BYTES_MAX);
        self.prefixes()
            .iter()
            .enumerate()
            .rev()
            .map(|(level, prefix)| (PREFIX_BYTES_MIN << level, *prefix))
            .take_while(move |(bytes, _)| 4 * bytes >= whole)
    }
}
