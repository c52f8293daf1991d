//! Where every byte of a rank's cache lies.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

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
}

impl Part {
    /// Bytes of one (block, head), gaps not counted.
    pub fn head_bytes(&self) -> u64 {
        u64::from(self.rows).saturating_mul(self.row_bytes)
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
    /// The pieces it is stored in, in an order that both sides share (K before V).
    pub parts: Vec<Part>,
}

impl LayerCache {
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

/// The axes of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StridedAxis {
    /// Over blocks.
    Block,
    /// Over the rank's heads.
    Head,
    /// Over the rows of one (block, head).
    Row,
}

impl fmt::Display for StridedAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Block => "block_stride_bytes",
            Self::Head => "head_stride_bytes",
            Self::Row => "row_stride_bytes",
        })
    }
}

/// Numbers that do not describe a cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// A count is 0 or above its limit.
    #[error("{field} is {value}, not in 1..={max}")]
    Count {
        /// The field.
        field: &'static str,
        /// What it is.
        value: u64,
        /// The largest accepted.
        max: u64,
    },
    /// A region is empty, longer than [`REGION_BYTES_MAX`] or reaches past the last address.
    #[error("region {region}: {bytes} bytes at {base:#x} are no memory")]
    Region {
        /// Its index.
        region: usize,
        /// Its address.
        base: u64,
        /// Its length.
        bytes: u64,
    },
    /// A layer's name is empty, too long, or holds control characters.
    #[error("layer {index} has no usable name")]
    LayerName {
        /// Its position.
        index: usize,
    },
    /// Two layers have one name.
    #[error("layer {layer:?} is announced twice")]
    DuplicateLayer {
        /// The name.
        layer: String,
    },
    /// A layer lies in a region that is not there.
    #[error("layer {layer:?} lies in region {region} of {regions}")]
    NoSuchRegion {
        /// The layer.
        layer: String,
        /// The region it names.
        region: u32,
        /// Regions announced.
        regions: usize,
    },
    /// A part has no rows or no bytes.
    #[error("layer {layer:?} part {part}: {field} is 0")]
    EmptyPart {
        /// The layer.
        layer: String,
        /// The part's position.
        part: usize,
        /// The field.
        field: &'static str,
    },
    /// A stride is so small that two rows share bytes.
    #[error(
        "layer {layer:?} part {part}: {axis} {stride_bytes} is below the {span_bytes} bytes it steps over"
    )]
    Overlap {
        /// The layer.
        layer: String,
        /// The part's position.
        part: usize,
        /// Which stride.
        axis: StridedAxis,
        /// Its value.
        stride_bytes: u64,
        /// Bytes spanned by what it steps over.
        span_bytes: u64,
    },
    /// The last byte lies outside the region.
    #[error("layer {layer:?} part {part} ends at byte {end_bytes} of a region of {region_bytes}")]
    OutOfBounds {
        /// The layer.
        layer: String,
        /// The part's position.
        part: usize,
        /// Where its last (block, head, row) ends; `u64::MAX` where that overflows.
        end_bytes: u64,
        /// The region's length.
        region_bytes: u64,
    },
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
