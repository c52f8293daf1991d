//! Where every byte of a rank's cache lies.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{CacheError, StridedAxis};
use crate::memory::MemoryRegion;

/// Most layers one rank announces.
pub const LAYERS_MAX: usize = 4096;
/// Most pieces one layer is stored in.
pub const PARTS_MAX: usize = 8;
/// Most regions one rank announces.
pub const REGIONS_MAX: usize = 4096;
/// Most blocks of one cache.
pub const NUM_BLOCKS_MAX: u32 = 1 << 31;
/// Most heads one rank holds.
pub const HEADS_MAX: u32 = 1 << 16;
/// Longest region, in bytes: above any address space, and small enough that a stride more than the
/// last one never overflows.
pub const REGION_BYTES_MAX: u64 = 1 << 56;
/// Most tokens of one block.
pub const BLOCK_TOKENS_MAX: u32 = 1 << 16;
/// Most KV cache groups of one rank.
pub const GROUPS_MAX: u32 = 64;
/// Longest layer name, in bytes.
pub const LAYER_NAME_BYTES_MAX: usize = 512;

/// One strided piece of a layer inside its region. The bytes of (block `b`, local head `h`) are the
/// rows `r` in `0..rows`, each of `row_bytes` bytes, at
/// `offset_bytes + b * block_stride_bytes + h * head_stride_bytes + r * row_stride_bytes`.
///
/// What a row is depends on the layout. HND with K and V joined, and every page whose inside is
/// opaque (vLLM's CPU attention): one row, the whole (block, head) page. NHD: one row per token. K
/// and V in separate tensors: two parts. A latent: one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Where block 0, head 0, row 0 begins, from the region's start.
    pub offset_bytes: u64,
    /// From a block to the next.
    pub block_stride_bytes: u64,
    /// From a head to the next.
    pub head_stride_bytes: u64,
    /// Rows per (block, head), at least 1.
    pub rows: u32,
    /// From a row to the next.
    pub row_stride_bytes: u64,
    /// Contiguous bytes of one row, at least 1.
    pub row_bytes: u64,
    /// Tokens of a block, where the bytes of each can be told apart: `rows` is then this (a row per
    /// token) or 1 (all tokens one after another in one row). 0: the page is opaque and moves only
    /// whole, between blocks of one size.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub block_tokens: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Part {
    /// Bytes of one (block, head), gaps not counted.
    pub fn head_bytes(&self) -> u64 {
        u64::from(self.rows).saturating_mul(self.row_bytes)
    }

    /// Contiguous bytes of one (token, head); `None` in an opaque page.
    pub fn token_bytes(&self) -> Option<u64> {
        match self.block_tokens {
            0 => None,
            tokens if self.rows == tokens => Some(self.row_bytes),
            tokens => Some(self.row_bytes / u64::from(tokens)),
        }
    }

    /// From a token to the next inside a block; `None` in an opaque page.
    pub fn token_stride_bytes(&self) -> Option<u64> {
        match self.block_tokens {
            0 => None,
            tokens if self.rows == tokens => Some(self.row_stride_bytes),
            tokens => Some(self.row_bytes / u64::from(tokens)),
        }
    }
}

/// One layer of a rank's cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerCache {
    /// The layer's name in the whole model (vLLM's `model.layers.7.self_attn.attn`), equal on all
    /// ranks and both sides: layers pair by it, never by position.
    pub name: String,
    /// Index of the region the layer lies in.
    pub region: u32,
    /// The pieces it is stored in, in an order that both sides share (K before V). Where blocks can
    /// be cut by token, the bytes of a token are those of its parts one after another, so that K
    /// and V may be joined on one side and split on the other.
    pub parts: Vec<Part>,
    /// Which of the engine's KV cache groups, and so which list of blocks, the layer belongs to. Last
    /// as in [`Part`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub group: u32,
}

impl LayerCache {
    /// Tokens of a block of this layer, where it can be cut by token.
    pub fn block_tokens(&self) -> Option<u32> {
        self.parts
            .first()
            .map(|part| part.block_tokens)
            .filter(|tokens| *tokens != 0)
    }

    /// Bytes of one (block, head) over all parts.
    pub fn head_bytes(&self) -> u64 {
        self.parts
            .iter()
            .map(Part::head_bytes)
            .fold(0, u64::saturating_add)
    }
}

/// One rank's cache. Every (layer, part, block, head, row) is proven to lie inside its region, and
/// no two of one part to overlap, so that offsets computed from it need no further check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawRankCache")]
pub struct RankCache {
    num_blocks: u32,
    heads_held: u32,
    regions: Vec<MemoryRegion>,
    layers: Vec<LayerCache>,
}

#[derive(Deserialize)]
struct RawRankCache {
    num_blocks: u32,
    heads_held: u32,
    regions: Vec<MemoryRegion>,
    layers: Vec<LayerCache>,
}

impl TryFrom<RawRankCache> for RankCache {
    type Error = CacheError;

    fn try_from(raw: RawRankCache) -> Result<Self, CacheError> {
        Self::new(raw.num_blocks, raw.heads_held, raw.regions, raw.layers)
    }
}

impl RankCache {
    /// Proves the numbers and keeps them.
    ///
    /// # Errors
    /// [`CacheError`] for whatever does not describe a cache; the numbers may come from a peer.
    pub fn new(
        num_blocks: u32,
        heads_held: u32,
        regions: Vec<MemoryRegion>,
        layers: Vec<LayerCache>,
    ) -> Result<Self, CacheError> {
        count("num_blocks", num_blocks.into(), NUM_BLOCKS_MAX.into())?;
        count("heads_held", heads_held.into(), HEADS_MAX.into())?;
        count("regions", regions.len() as u64, REGIONS_MAX as u64)?;
        count("layers", layers.len() as u64, LAYERS_MAX as u64)?;
        for (region, memory) in regions.iter().enumerate() {
            if !(1..=REGION_BYTES_MAX).contains(&memory.bytes)
                || memory.base.checked_add(memory.bytes).is_none()
            {
                return Err(CacheError::Region {
                    region,
                    base: memory.base,
                    bytes: memory.bytes,
                });
            }
        }
        check_apart(&regions)?;
        let mut names = BTreeSet::new();
        for (index, layer) in layers.iter().enumerate() {
            let name = layer.name.as_str();
            if name.is_empty()
                || name.len() > LAYER_NAME_BYTES_MAX
                || name.chars().any(char::is_control)
            {
                return Err(CacheError::LayerName { index });
            }
            if !names.insert(name) {
                return Err(CacheError::DuplicateLayer {
                    layer: name.to_owned(),
                });
            }
            let Some(region) = regions.get(layer.region as usize) else {
                return Err(CacheError::NoSuchRegion {
                    layer: name.to_owned(),
                    region: layer.region,
                    regions: regions.len(),
                });
            };
            count("parts", layer.parts.len() as u64, PARTS_MAX as u64)?;
            if layer.group >= GROUPS_MAX {
                return Err(CacheError::Group {
                    layer: name.to_owned(),
                    group: layer.group,
                });
            }
            check_tokens(layer)?;
            for (part, strides) in layer.parts.iter().enumerate() {
                check_part(num_blocks, heads_held, region.bytes, name, part, strides)?;
            }
        }
        Ok(Self {
            num_blocks,
            heads_held,
            regions,
            layers,
        })
    }

    /// Blocks of the cache; ids are below it.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Heads this rank holds.
    pub fn heads_held(&self) -> u32 {
        self.heads_held
    }

    /// The memory the layers lie in.
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// The layers, in the rank's own order.
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// Bytes of one (block, head) over all layers, gaps not counted.
    pub fn block_head_bytes(&self) -> u64 {
        self.layers
            .iter()
            .map(LayerCache::head_bytes)
            .fold(0, u64::saturating_add)
    }

    /// Bytes of one block over all layers and the rank's heads, gaps not counted.
    pub fn block_bytes(&self) -> u64 {
        self.block_head_bytes()
            .saturating_mul(self.heads_held.into())
    }
}

fn count(field: &'static str, value: u64, max: u64) -> Result<(), CacheError> {
    if (1..=max).contains(&value) {
        Ok(())
    } else {
        Err(CacheError::Count { field, value, max })
    }
}

/// No byte belongs to two regions: whoever writes one would write the other.
fn check_apart(regions: &[MemoryRegion]) -> Result<(), CacheError> {
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_unstable_by_key(|&index| regions[index].base);
    match order
        .windows(2)
        .find(|two| regions[two[0]].base + regions[two[0]].bytes > regions[two[1]].base)
    {
        None => Ok(()),
        Some(two) => Err(CacheError::RegionsOverlap {
            first: two[0],
            second: two[1],
            first_end: regions[two[0]].base + regions[two[0]].bytes,
            second_base: regions[two[1]].base,
        }),
    }
}

fn check_tokens(layer: &LayerCache) -> Result<(), CacheError> {
    let tokens = layer.block_tokens().unwrap_or(0);
    for (index, part) in layer.parts.iter().enumerate() {
        if part.block_tokens != tokens {
            return Err(CacheError::UnlikeBlockTokens {
                layer: layer.name.clone(),
                part: index,
                first: tokens,
                other: part.block_tokens,
            });
        }
        let row_per_token = part.rows == tokens;
        let in_one_row = part.rows == 1 && part.row_bytes.checked_rem(tokens.into()) == Some(0);
        if tokens > BLOCK_TOKENS_MAX || tokens != 0 && !row_per_token && !in_one_row {
            return Err(CacheError::BlockTokens {
                layer: layer.name.clone(),
                part: index,
                block_tokens: tokens,
                rows: part.rows,
                row_bytes: part.row_bytes,
            });
        }
    }
    Ok(())
}

fn check_part(
    num_blocks: u32,
    heads_held: u32,
    region_bytes: u64,
    layer: &str,
    part: usize,
    strides: &Part,
) -> Result<(), CacheError> {
    let empty = |field| CacheError::EmptyPart {
        layer: layer.to_owned(),
        part,
        field,
    };
    if strides.rows == 0 {
        return Err(empty("rows"));
    }
    if strides.row_bytes == 0 {
        return Err(empty("row_bytes"));
    }
    let mut axes = [
        (StridedAxis::Row, strides.row_stride_bytes, strides.rows),
        (StridedAxis::Head, strides.head_stride_bytes, heads_held),
        (StridedAxis::Block, strides.block_stride_bytes, num_blocks),
    ];
    // From the innermost axis outwards each stride must step over all that lies inside it. That is
    // how every tensor with positive strides is stored, in whatever order of its axes.
    axes.sort_by_key(|&(_, stride_bytes, _)| stride_bytes);
    // Widest sum: three products of u64 and u32 and two more u64, far below u128's range.
    let mut span_bytes = u128::from(strides.row_bytes);
    for (axis, stride_bytes, steps) in axes {
        if steps == 1 {
            continue;
        }
        if u128::from(stride_bytes) < span_bytes {
            return Err(CacheError::Overlap {
                layer: layer.to_owned(),
                part,
                axis,
                stride_bytes,
                span_bytes: u64::try_from(span_bytes).unwrap_or(u64::MAX),
            });
        }
        span_bytes += u128::from(stride_bytes) * u128::from(steps - 1);
    }
    let end_bytes = u128::from(strides.offset_bytes) + span_bytes;
    if end_bytes > u128::from(region_bytes) {
        return Err(CacheError::OutOfBounds {
            layer: layer.to_owned(),
            part,
            end_bytes: u64::try_from(end_bytes).unwrap_or(u64::MAX),
            region_bytes,
        });
    }
    Ok(())
}
