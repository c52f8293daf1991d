//! Memory as numbers: where a cache lies and which bytes go where. Nothing here touches memory.

use serde::{Deserialize, Serialize};

/// One backing storage of a rank's KV cache, in the address space of the process that owns it.
/// All layers of a CPU cache are views into one such storage, so it is registered once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRegion {
    /// First byte's address in the owner's process.
    pub base: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// One contiguous piece to copy from a source rank's region into a region of the reading rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Run {
    /// Index into the source rank's regions.
    pub source_region: u32,
    /// Byte offset from that region's start.
    pub source_offset: u64,
    /// Index into the reading rank's regions.
    pub dest_region: u32,
    /// Byte offset from that region's start.
    pub dest_offset: u64,
    /// Length in bytes, never 0.
    pub bytes: u64,
}
