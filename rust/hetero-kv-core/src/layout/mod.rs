//! What one rank's KV cache looks like: which heads it holds, where every byte of a (layer, block,
//! head) lies, and which properties must be equal on both sides of a pair.
//!
//! Everything is parsed once: a [`RankCache`] that exists has all its addresses inside its regions,
//! whoever sent it.

mod cache;
mod cache_error;
mod compat;
mod groups;
mod heads;

pub use cache::{
    BLOCK_TOKENS_MAX, GROUPS_MAX, HEADS_MAX, LAYER_NAME_BYTES_MAX, LAYERS_MAX, LayerCache,
    NUM_BLOCKS_MAX, PARTS_MAX, Part, REGION_BYTES_MAX, REGIONS_MAX, RankCache,
};
pub use cache_error::{CacheError, StridedAxis};
pub use compat::{
    COMPAT_FIELDS_MAX, COMPAT_NAME_BYTES_MAX, COMPAT_VALUE_BYTES_MAX, CompatError, CompatFields,
    FieldDifference, field,
};
pub use groups::{GroupError, KvGroup, group_kinds};
pub(crate) use heads::one_divides_other;
pub use heads::{HeadRange, KvHeads, LayoutError, TP_SIZE_MAX, owned_heads};

#[cfg(test)]
mod tests;
