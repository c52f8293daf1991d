//! Numbers that do not describe a cache.

use std::fmt;

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
    /// A region is empty, longer than [`super::REGION_BYTES_MAX`] or reaches past the last address.
    #[error("region {region}: {bytes} bytes at {base:#x} are no memory")]
    Region {
        /// Its index.
        region: usize,
        /// Its address.
        base: u64,
        /// Its length.
        bytes: u64,
    },
    /// Two regions share bytes.
    #[error(
        "regions {first} and {second} overlap: one ends at {first_end:#x}, the other begins at {second_base:#x}"
    )]
    RegionsOverlap {
        /// Index of the one that begins first.
        first: usize,
        /// Index of the other.
        second: usize,
        /// Where the first ends.
        first_end: u64,
        /// Where the other begins.
        second_base: u64,
    },
    /// A layer's KV cache group is not below [`super::GROUPS_MAX`].
    #[error("layer {layer:?}: group {group} is not below 64")]
    Group {
        /// The layer.
        layer: String,
        /// The group it names.
        group: u32,
    },
    /// The rows of a part are not so many tokens.
    #[error(
        "layer {layer:?} part {part}: block_tokens {block_tokens} (at most 65536) fit neither rows {rows} nor one row of {row_bytes} bytes"
    )]
    BlockTokens {
        /// The layer.
        layer: String,
        /// The part's position.
        part: usize,
        /// Tokens of a block as announced.
        block_tokens: u32,
        /// Rows of a (block, head).
        rows: u32,
        /// Bytes of a row.
        row_bytes: u64,
    },
    /// Two parts of a layer differ in the tokens of a block.
    #[error("layer {layer:?}: block_tokens is {first} in part 0, {other} in part {part}")]
    UnlikeBlockTokens {
        /// The layer.
        layer: String,
        /// The position of the part that differs.
        part: usize,
        /// Tokens in part 0.
        first: u32,
        /// Tokens in that part.
        other: u32,
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
