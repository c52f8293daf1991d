//! Memory that transports read from and write to, as a tensor would own it.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::ptr;
use std::sync::Arc;

use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_transport::memory::LocalMemory;

/// A block of memory that nothing borrows.
pub(crate) struct Buffer {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the block is only touched through raw pointers, byte by byte, and a torn or stale read
// is what the tests look for; it is freed by the last owner.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

const ALIGN_BYTES: usize = 4096;

impl Buffer {
    pub(crate) fn new(bytes: usize, filler: u8) -> Self {
        let buffer = Self {
            // SAFETY: the length is not zero in any test.
            start: unsafe { alloc(Self::layout(bytes)) },
            bytes,
        };
        assert!(!buffer.start.is_null(), "{bytes} bytes of memory");
        buffer.fill_with(|_| filler);
        buffer
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, ALIGN_BYTES).expect("a small block")
    }

    pub(crate) fn region(&self) -> MemoryRegion {
        MemoryRegion {
            base: self.start.expose_provenance() as u64,
            bytes: self.bytes as u64,
        }
    }

    pub(crate) fn fill_with(&self, byte: impl Fn(usize) -> u8) {
        let filled: Vec<u8> = (0..self.bytes).map(byte).collect();
        // SAFETY: both blocks have `bytes` bytes and are distinct.
        unsafe { ptr::copy_nonoverlapping(filled.as_ptr(), self.start, self.bytes) };
    }

    pub(crate) fn copied(&self) -> Vec<u8> {
        let mut copy = vec![0; self.bytes];
        // SAFETY: both blocks have `bytes` bytes and are distinct.
        unsafe { ptr::copy_nonoverlapping(self.start, copy.as_mut_ptr(), self.bytes) };
        copy
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: made by `new` with the same layout.
        unsafe { dealloc(self.start, Self::layout(self.bytes)) };
    }
}

/// Buffers as a reader or a server takes them. The caller keeps them until it has shut down.
pub(crate) fn register(buffers: &[Buffer]) -> Arc<LocalMemory> {
    let regions = buffers.iter().map(Buffer::region).collect();
    // SAFETY: the tests declare the buffers before the reader or server that uses them, so they
    // are dropped after it, and touch them only through raw pointers.
    Arc::new(unsafe { LocalMemory::new(regions) }.expect("buffers are mapped"))
}

/// Byte of a source region: differs between neighbours, regions and seeds.
pub(crate) fn pattern(seed: u64, region: usize, offset: usize) -> u8 {
    let word = (offset as u64 / 8)
        .wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(region as u64 * 0x1234_5677)
        .wrapping_mul(0xff51_afd7_ed55_8ccd);
    (word >> (8 * (offset % 8))) as u8
}

/// Checks that a buffer has the bytes of the runs, and `filler` everywhere else.
pub(crate) fn check_exact(buffers: &[Buffer], runs: &[Run], seed: u64, filler: u8) {
    for (index, buffer) in buffers.iter().enumerate() {
        let mut expected = vec![filler; buffer.bytes];
        for run in runs.iter().filter(|run| run.dest_region as usize == index) {
            for at in 0..run.bytes as usize {
                expected[run.dest_offset as usize + at] = pattern(
                    seed,
                    run.source_region as usize,
                    run.source_offset as usize + at,
                );
            }
        }
        let found = buffer.copied();
        let wrong = (0..found.len()).find(|&at| found[at] != expected[at]);
        if let Some(at) = wrong {
            panic!(
                "region {index} byte {at}: {:#04x} instead of {:#04x}",
                found[at], expected[at]
            );
        }
    }
}
