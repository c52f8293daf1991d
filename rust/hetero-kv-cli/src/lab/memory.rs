//! One rank's KV memory: words that the transport's threads and system calls write behind our
//! back, and what every block of it must hold.

use std::sync::atomic::{AtomicU64, Ordering};

use hetero_kv_core::layout::{CacheError, RankCache};
use hetero_kv_core::memory::MemoryRegion;

use super::model::{Geometry, WORD_BYTES, mix, word};

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// A read is under way, or bytes were changed on purpose.
    Unknown,
    /// The tokens from `first_token` on of a prompt, or the bytes that stand for none.
    Holds { content: u64, first_token: u64 },
}

/// See the module's text. Atomics, because the kernel writes the same bytes for reads into them.
pub(super) struct KvMemory {
    /// A rank has one memory, which lasts as long as its process: threads that read into it need no
    /// other promise.
    words: &'static [AtomicU64],
    geometry: Geometry,
    tags: Vec<Tag>,
    /// Of the bytes in blocks that hold no prompt.
    background: u64,
}

impl KvMemory {
    /// Memory whose every byte is known.
    pub(super) fn new(geometry: Geometry, seed: u64) -> Self {
        let mut memory = Self {
            words: Box::leak((0..geometry.words()).map(|_| AtomicU64::new(0)).collect()),
            geometry,
            tags: vec![Tag::Unknown; geometry.num_blocks() as usize],
            background: mix(seed) & !1,
        };
        for block in 0..geometry.num_blocks() {
            memory.reset(block);
        }
        memory
    }

    /// All of it.
    pub(super) fn words(&self) -> &'static [AtomicU64] {
        self.words
    }

    /// As a worker announces it.
    pub(super) fn cache(&self) -> Result<RankCache, CacheError> {
        let region = MemoryRegion {
            base: self.words.as_ptr().expose_provenance() as u64,
            bytes: self.words.len() as u64 * WORD_BYTES,
        };
        RankCache::new(
            self.geometry.num_blocks(),
            self.geometry.heads_held(),
            vec![region],
            self.geometry.layers(),
        )
    }

    /// Writes what a forward pass would: the sequence's block `index` into `block`.
    pub(super) fn fill(&mut self, block: u32, content: u64, index: usize) {
        let first_token = index as u64 * u64::from(self.geometry.block_size());
        let row_words = self.geometry.row_words();
        for (at, key) in self.geometry.rows(block, content, first_token) {
            for (nth, target) in self.words[at..at + row_words].iter().enumerate() {
                target.store(word(key, nth), Ordering::Relaxed);
            }
        }
        self.tag(
            block,
            Tag::Holds {
                content,
                first_token,
            },
        );
    }

    /// Forgets what a block held, in favour of bytes that no prompt has: whoever writes it later
    /// is found out.
    pub(super) fn reset(&mut self, block: u32) {
        self.fill(block, self.background, block as usize);
    }

    /// From here on the block holds the sequence's block `index`, or does not: how many of its
    /// bytes are wrong.
    pub(super) fn expect(&mut self, block: u32, content: u64, index: usize) -> u64 {
        let first_token = index as u64 * u64::from(self.geometry.block_size());
        self.tag(
            block,
            Tag::Holds {
                content,
                first_token,
            },
        );
        self.differences(block)
    }

    /// Bytes of a block that are not what it must hold.
    pub(super) fn differences(&self, block: u32) -> u64 {
        let Tag::Holds {
            content,
            first_token,
        } = self.tags[block as usize]
        else {
            return 0;
        };
        let row_words = self.geometry.row_words();
        let mut bytes = 0;
        for (at, key) in self.geometry.rows(block, content, first_token) {
            for (nth, found) in self.words[at..at + row_words].iter().enumerate() {
                let unlike = found.load(Ordering::Relaxed) ^ word(key, nth);
                if unlike != 0 {
                    bytes += unlike
                        .to_le_bytes()
                        .iter()
                        .filter(|byte| **byte != 0)
                        .count() as u64;
                }
            }
        }
        bytes
    }

    /// The same, of all blocks.
    pub(super) fn sweep(&self) -> u64 {
        (0..self.geometry.num_blocks())
            .map(|block| self.differences(block))
            .sum()
    }

    /// Changes one byte of each row; what the block must hold stays as it is.
    pub(super) fn corrupt(&self, block: u32) {
        for (at, _) in self.geometry.rows(block, 0, 0) {
            self.words[at].fetch_xor(1, Ordering::Relaxed);
        }
    }

    pub(super) fn tag(&mut self, block: u32, tag: Tag) {
        self.tags[block as usize] = tag;
    }
}

#[cfg(test)]
mod tests;
