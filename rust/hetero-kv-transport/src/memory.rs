//! The memory of this process that transports read from and write to.
//!
//! The engine's tensors own the memory; this crate only knows where it lies. Our threads write it
//! while Python may hold views of it, so no Rust reference to it ever exists: everything goes
//! through raw addresses in system calls, whose effects on memory the compiler does not reason
//! about. Whether a piece of it may be written at a given moment is not decided here but by the
//! owner of the blocks, who hands them out for one job and takes them back only after the job is
//! reported done.
#![allow(unsafe_code)]

use hetero_kv_core::memory::MemoryRegion;

/// Most regions of one process: layers x parts of the deepest models stay far below.
pub const REGIONS_MAX: usize = 4096;

/// Regions that cannot be registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// More than [`REGIONS_MAX`].
    #[error("{0} memory regions are over the limit of {REGIONS_MAX}")]
    TooMany(usize),
    /// Empty, at address 0, or past the end of the address space.
    #[error("memory region {index} of {bytes} bytes at {base:#x} is not in the address space")]
    NotMapped {
        /// Index of the region.
        index: usize,
        /// Its first address.
        base: u64,
        /// Its length in bytes.
        bytes: u64,
    },
}

/// A piece that is not inside a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at offset {offset} are not inside region {region} ({region_bytes} bytes)")]
pub struct OutOfBounds {
    /// Index of the region.
    pub region: u32,
    /// Byte offset in the region.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Length of the region; 0 when there is none of this index.
    pub region_bytes: u64,
}

/// The registered memory of this process.
#[derive(Debug)]
pub struct LocalMemory {
    regions: Vec<MemoryRegion>,
}

impl LocalMemory {
    /// Registers memory. The order is what [`hetero_kv_core::memory::Run`] indexes.
    ///
    /// # Safety
    /// Each region must be mapped, readable and writable in this process until the value is
    /// dropped *and* every reader and server that was given it has shut down; no Rust reference to
    /// its bytes may be alive while a job reads into it or a server sends from it.
    pub unsafe fn new(regions: Vec<MemoryRegion>) -> Result<Self, MemoryError> {
        if regions.len() > REGIONS_MAX {
            return Err(MemoryError::TooMany(regions.len()));
        }
        for (index, region) in regions.iter().enumerate() {
            let end = region.base.checked_add(region.bytes);
            let fits = end.is_some_and(|end| isize::try_from(end).is_ok());
            if region.base == 0 || region.bytes == 0 || !fits {
                return Err(MemoryError::NotMapped {
                    index,
                    base: region.base,
                    bytes: region.bytes,
                });
            }
        }
        Ok(Self { regions })
    }

    /// The regions, in order.
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// Where a piece of a region lies.
    pub(crate) fn span(&self, region: u32, offset: u64, bytes: u64) -> Result<Span, OutOfBounds> {
        span_in(&self.regions, region, offset, bytes)
    }
}

/// Where a piece of one of `regions` lies, in the address space of the regions' owner.
pub(crate) fn span_in(
    regions: &[MemoryRegion],
    region: u32,
    offset: u64,
    bytes: u64,
) -> Result<Span, OutOfBounds> {
    let found = regions.get(region as usize);
    let region_bytes = found.map_or(0, |found| found.bytes);
    let error = OutOfBounds {
        region,
        offset,
        bytes,
        region_bytes,
    };
    let end = offset.checked_add(bytes).ok_or(error)?;
    if bytes == 0 || end > region_bytes {
        return Err(error);
    }
    let base = found.map_or(0, |found| found.base);
    let address = base.checked_add(offset).ok_or(error)?;
    Ok(Span {
        address: usize::try_from(address).map_err(|_| error)?,
        bytes: usize::try_from(bytes).map_err(|_| error)?,
    })
}

/// A piece of some process's memory. Only a number: nothing is read or written through it here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// First byte's address.
    pub(crate) address: usize,
    /// Length in bytes, never 0.
    pub(crate) bytes: usize,
}

impl Span {
    /// As the vectored system calls take it.
    fn iovec(self) -> libc::iovec {
        libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(self.address),
            iov_len: self.bytes,
        }
    }
}

/// Pieces in the order of their bytes, used up from the front as system calls move them.
#[derive(Debug, Default)]
pub(crate) struct SpanQueue {
    spans: Vec<Span>,
    /// First span that is not used up.
    next: usize,
    /// Bytes of that span that are used up.
    used_bytes: usize,
    left_bytes: usize,
}

impl SpanQueue {
    /// An empty queue with room for `capacity` spans.
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self {
            spans: Vec::with_capacity(capacity),
            ..Self::default()
        }
    }

    /// Adds a piece, merged with the one before where it follows on it.
    pub(crate) fn push(&mut self, span: Span) {
        self.left_bytes += span.bytes;
        if let Some(last) = self.spans.last_mut()
            && last.address + last.bytes == span.address
        {
            last.bytes += span.bytes;
            return;
        }
        self.spans.push(span);
    }

    /// Bytes that are not used up.
    pub(crate) fn left_bytes(&self) -> usize {
        self.left_bytes
    }

    /// Fills `iovecs` with the next pieces, at most `spans_max` of them and `bytes_max` bytes in
    /// all; returns the sum of their bytes.
    pub(crate) fn fill(
        &self,
        iovecs: &mut Vec<libc::iovec>,
        spans_max: usize,
        bytes_max: usize,
    ) -> usize {
        iovecs.clear();
        let mut total_bytes = 0;
        let mut used_bytes = self.used_bytes;
        for span in self.spans[self.next..].iter().take(spans_max) {
            let left = Span {
                address: span.address + used_bytes,
                bytes: (span.bytes - used_bytes).min(bytes_max - total_bytes),
            };
            used_bytes = 0;
            if left.bytes == 0 {
                break;
            }
            total_bytes += left.bytes;
            iovecs.push(left.iovec());
        }
        total_bytes
    }

    /// Marks `bytes` as used up. More than is left is a broken invariant of the caller.
    pub(crate) fn advance(&mut self, mut bytes: usize) {
        assert!(bytes <= self.left_bytes, "more bytes moved than were asked");
        self.left_bytes -= bytes;
        while bytes > 0 {
            let left = self.spans[self.next].bytes - self.used_bytes;
            if bytes < left {
                self.used_bytes += bytes;
                return;
            }
            bytes -= left;
            self.next += 1;
            self.used_bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests;
