//! Memory of the bench as an engine's KV cache is: one mapping, touched before anything is timed.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_transport::memory::LocalMemory;

/// An anonymous mapping that lasts as long as the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pool {
    start: *mut u8,
    bytes: usize,
}

impl Pool {
    /// Maps it, and touches every page.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let (read_write, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
        );
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, read_write, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            start: start.cast(),
            bytes,
        })
    }

    pub(crate) fn base(self) -> u64 {
        self.start.expose_provenance() as u64
    }

    pub(crate) fn region(self) -> MemoryRegion {
        MemoryRegion {
            base: self.base(),
            bytes: self.bytes as u64,
        }
    }

    /// Writes the word of each position.
    pub(crate) fn fill(self, word: impl Fn(u64) -> u64) {
        for at in 0..self.bytes / 8 {
            // SAFETY: inside the mapping, aligned, and nothing borrows it.
            unsafe {
                self.start
                    .cast::<u64>()
                    .add(at)
                    .write_volatile(word(at as u64))
            };
        }
    }

    /// The word at a byte offset that is a multiple of 8.
    pub(crate) fn word(self, offset: u64) -> u64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes as u64);
        // SAFETY: inside the mapping and aligned.
        unsafe {
            self.start
                .add(offset as usize)
                .cast::<u64>()
                .read_volatile()
        }
    }

    /// Where a piece starts.
    pub(crate) fn at(self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(offset + bytes <= self.bytes as u64, "inside the pool");
        // SAFETY: inside the mapping.
        unsafe { self.start.add(offset as usize) }
    }

    /// As transports take it.
    pub(crate) fn register(self) -> Arc<LocalMemory> {
        // SAFETY: mapped until the process ends, and only touched through raw pointers.
        let memory = unsafe { LocalMemory::new(vec![self.region()]) };
        Arc::new(memory.expect("a mapping of one piece"))
    }
}

/// What the holder has at each word: differs between words, so that a byte from elsewhere shows.
pub(crate) fn pattern(at: u64) -> u64 {
    (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995
}
