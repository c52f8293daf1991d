//! The model that a lab serves: how its KV lies in memory, and which byte belongs where.

use std::num::NonZeroU32;

use hetero_kv_core::ids::TpRank;
use hetero_kv_core::layout::{HeadRange, KvHeads, LayerCache, LayoutError, Part, owned_heads};
use hetero_kv_core::plan::{KvShape, LayerRange, StagesError, stage_layers};
use serde::{Deserialize, Serialize};

use super::ipc::Prompt;

/// Bytes of the words that memory is filled with and compared by.
pub(super) const WORD_BYTES: u64 = 8;

/// What both sides agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Model {
    /// KV heads in all; 0 for a latent.
    pub(super) kv_heads: u32,
    pub(super) layers: u32,
    pub(super) block_size: u32,
    /// One token of one head: a key, a value or a latent.
    pub(super) row_bytes: u64,
    /// Order of tokens and heads in a block of prefill and of decode.
    pub(super) order: Order,
}

/// How a block's tokens and heads are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(super) enum Order {
    /// Heads outside tokens, on both sides
    Hnd,
    /// Tokens outside heads, on both sides
    Nhd,
    /// Prefill NHD, decode HND
    Mixed,
}

impl Model {
    /// `dtype_bytes` per element.
    pub(super) fn new(
        kv: KvShape,
        layers: u32,
        block_size: u32,
        dtype_bytes: u64,
        order: Order,
    ) -> Self {
        let (kv_heads, elements) = match kv {
            KvShape::Grouped { heads, head_dim } => (heads.get(), head_dim),
            KvShape::Latent { latent } => (0, latent),
        };
        Self {
            kv_heads,
            layers,
            block_size,
            row_bytes: u64::from(elements.get()) * dtype_bytes,
            order,
        }
    }

    pub(super) fn heads(&self) -> KvHeads {
        NonZeroU32::new(self.kv_heads).map_or(KvHeads::Latent, KvHeads::Grouped)
    }

    /// Key and value, or a latent.
    fn parts(&self) -> u32 {
        if self.kv_heads == 0 { 1 } else { 2 }
    }

    /// Blocks that a prompt's tokens need.
    pub(super) fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }
}

/// One rank's share of the model and where it lies, in words from the start of its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    layers: LayerRange,
    parts: u32,
    heads: HeadRange,
    block_size: u32,
    row_words: usize,
    num_blocks: u32,
    tokens_outside_heads: bool,
}

/// Why a rank has no share.
#[derive(Debug, thiserror::Error)]
pub(super) enum GeometryError {
    #[error(transparent)]
    Heads(#[from] LayoutError),
    #[error(transparent)]
    Stages(#[from] StagesError),
    #[error("pp_rank {0} is not in the pipeline")]
    Stage(u32),
}

impl Geometry {
    pub(super) fn new(
        model: &Model,
        prefill: bool,
        (tp_size, tp_rank): (u32, u32),
        (pp_size, pp_rank): (u32, u32),
        num_blocks: u32,
    ) -> Result<Self, GeometryError> {
        let stages = stage_layers(model.layers, pp_size)?;
        Ok(Self {
            layers: *stages
                .get(pp_rank as usize)
                .ok_or(GeometryError::Stage(pp_rank))?,
            parts: model.parts(),
            heads: owned_heads(model.heads(), tp_size, TpRank(tp_rank))?,
            block_size: model.block_size,
            row_words: usize::try_from(model.row_bytes / WORD_BYTES).unwrap_or(usize::MAX),
            num_blocks,
            tokens_outside_heads: match model.order {
                Order::Hnd => false,
                Order::Nhd => true,
                Order::Mixed => prefill,
            },
        })
    }

    pub(super) fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    pub(super) fn heads_held(&self) -> u32 {
        self.heads.count()
    }

    fn block_words(&self) -> usize {
        self.block_size as usize * self.heads.count() as usize * self.row_words
    }

    /// Bytes of one block over all layers.
    pub(super) fn block_bytes(&self) -> u64 {
        self.block_words() as u64
            * u64::from(self.parts)
            * u64::from(self.layers.count())
            * WORD_BYTES
    }

    /// Words of the whole memory.
    pub(super) fn words(&self) -> usize {
        self.layers.count() as usize
            * self.parts as usize
            * self.num_blocks as usize
            * self.block_words()
    }

    /// As the core takes it, all in region 0.
    pub(super) fn layers(&self) -> Vec<LayerCache> {
        let bytes = |words: usize| words as u64 * WORD_BYTES;
        let row = bytes(self.row_words);
        let (head_stride, row_stride) = if self.tokens_outside_heads {
            (row, u64::from(self.heads.count()) * row)
        } else {
            (u64::from(self.block_size) * row, row)
        };
        let part_words = self.num_blocks as usize * self.block_words();
        (self.layers.first..self.layers.past_last)
            .enumerate()
            .map(|(nth, layer)| LayerCache {
                name: format!("model.layers.{layer}.self_attn.attn"),
                region: 0,
                parts: (0..self.parts as usize)
                    .map(|part| Part {
                        offset_bytes: bytes((nth * self.parts as usize + part) * part_words),
                        block_stride_bytes: bytes(self.block_words()),
                        head_stride_bytes: head_stride,
                        rows: self.block_size,
                        row_stride_bytes: row_stride,
                        row_bytes: row,
                        block_tokens: self.block_size,
                    })
                    .collect(),
                group: 0,
            })
            .collect()
    }

    /// Every row of a block: its first word's index, and the key of its bytes when the block holds
    /// the tokens from `first_token` on of the prompt that `content` stands for.
    pub(super) fn rows(
        &self,
        block: u32,
        content: u64,
        first_token: u64,
    ) -> impl Iterator<Item = (usize, u64)> {
        let geometry = *self;
        let part_words = self.num_blocks as usize * self.block_words();
        let block_at = block as usize * self.block_words();
        let (heads, tokens) = (self.heads.count() as usize, self.block_size as usize);
        let pieces = (self.layers.first..self.layers.past_last)
            .flat_map(move |layer| (0..geometry.parts).map(move |part| (layer, part)))
            .enumerate();
        pieces.flat_map(move |(nth, (layer, part))| {
            let start = nth * part_words + block_at;
            let piece_key = mix(content ^ mix(u64::from(layer) << 8 | u64::from(part)));
            (0..heads).flat_map(move |head| {
                let model_head = u64::from(geometry.heads.first) + head as u64;
                let head_key = mix(piece_key ^ (model_head << 32));
                (0..tokens).map(move |token| {
                    let row = if geometry.tokens_outside_heads {
                        token * heads + head
                    } else {
                        head * tokens + token
                    };
                    let key = mix(head_key ^ (first_token + token as u64));
                    (start + row * geometry.row_words, key)
                })
            })
        })
    }

    pub(super) fn row_words(&self) -> usize {
        self.row_words
    }

    pub(super) fn block_size(&self) -> u32 {
        self.block_size
    }
}

/// The word at `index` of a row. Its eight bytes depend on the row's key, which is of (prompt,
/// layer, key or value, head, token position), and on where in the row they lie.
#[inline]
pub(super) fn word(key: u64, index: usize) -> u64 {
    let mut x = key.wrapping_add((index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    x ^= x >> 31;
    x = x.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

/// Scatters a number over 64 bits, bijectively (the finaliser of SplitMix64).
pub(super) fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl Prompt {
    pub(super) fn token_ids(self) -> Vec<u32> {
        (0..self.tokens)
            .map(|at| (mix(self.salt ^ (u64::from(at) << 1)) % 50_000) as u32)
            .collect()
    }

    /// What the prompt's KV is made of.
    pub(super) fn content(self) -> u64 {
        mix(self.salt) | 1
    }
}

#[cfg(test)]
mod tests;
