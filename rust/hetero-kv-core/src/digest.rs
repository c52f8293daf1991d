//! Prompt identity: what must be equal for one engine's KV to serve another's request.

use sha2::{Digest, Sha256};

use crate::ids::PromptDigest;

/// SHA-256 over everything of a request that shapes its KV. Not vLLM's block hashes: they depend
/// on block size and hash algorithm, which P and D may set differently.
#[derive(Clone)]
pub struct PromptHasher(Sha256);

impl PromptHasher {
    /// Starts with the prompt's token ids.
    pub fn new(token_ids: &[u32]) -> Self {
        let mut sha = Sha256::new();
        sha.update(b"hetero_kv prompt v1");
        sha.update((token_ids.len() as u64).to_le_bytes());
        for id in token_ids {
            sha.update(id.to_le_bytes());
        }
        Self(sha)
    }

    /// Adds one more ingredient by name: `lora`, `mm_hash`, `cache_salt`. Order counts; each is
    /// length-prefixed, so that no two lists of ingredients give the same bytes.
    pub fn add(&mut self, name: &str, value: &[u8]) {
        for part in [name.as_bytes(), value] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// The digest.
    pub fn finish(self) -> PromptDigest {
        PromptDigest(self.0.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(ids: &[u32], parts: &[(&str, &str)]) -> PromptDigest {
        let mut hasher = PromptHasher::new(ids);
        for (name, value) in parts {
            hasher.add(name, value.as_bytes());
        }
        hasher.finish()
    }

    #[test]
    fn every_ingredient_counts() {
        let all = [
            digest(&[1, 2, 3], &[]),
            digest(&[1, 2, 4], &[]),
            digest(&[1, 2], &[]),
            digest(&[1, 2, 3], &[("lora", "a")]),
            digest(&[1, 2, 3], &[("cache_salt", "a")]),
            digest(&[1, 2, 3], &[("mm_hash", "a"), ("mm_hash", "b")]),
            digest(&[1, 2, 3], &[("mm_hash", "b"), ("mm_hash", "a")]),
            digest(&[1, 2, 3], &[("mm_hash", "ab")]),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[i + 1..] {
                assert_ne!(a, b);
            }
        }
    }

    #[test]
    fn the_digest_is_stable_over_builds() {
        // Made with Python's hashlib from the definition above.
        assert_eq!(
            digest(&[1, 2, 3], &[("cache_salt", "x")]).to_string(),
            "627c919dd15c22dcf427f48891d6e6a30fe32b279f7f1a7c6c409dcbdd755082",
        );
    }
}
