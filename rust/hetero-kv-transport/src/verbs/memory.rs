//! Protection domains, registered memory, and the few words that a device writes for us.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::device::{Context, checked};
use super::error::VerbsError;
use super::sys;

/// What may be done to registered memory besides reading it from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// This side's requests write it.
    Local,
    /// As `Local`, and the peer's requests read it.
    RemoteRead,
    /// As `RemoteRead`, and the peer's requests write it.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "what push mode stands on; the suite drives it")
    )]
    RemoteWrite,
}

impl Access {
    pub(super) fn flags(self) -> c_int {
        // No relaxed ordering: the lease page has to be read after the data, on the bus too.
        let flags = match self {
            Self::Local => sys::IBV_ACCESS_LOCAL_WRITE,
            Self::RemoteRead => sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_READ,
            Self::RemoteWrite => {
                sys::IBV_ACCESS_LOCAL_WRITE
                    | sys::IBV_ACCESS_REMOTE_READ
                    | sys::IBV_ACCESS_REMOTE_WRITE
            }
        };
        flags as c_int
    }
}

/// Whose memory and queue pairs know each other.
pub(super) struct ProtectionDomain {
    pub(super) context: Arc<Context>,
    raw: NonNull<sys::ibv_pd>,
}

// SAFETY: libibverbs is thread-safe; the pointer is freed only by `drop`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(super) fn new(context: Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library.ibv_alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_alloc_pd"))?;
        Ok(Arc::new(Self { context, raw }))
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        if !self.context.is_ours() {
            return;
        }
        // SAFETY: regions and queue pairs of it hold it by an `Arc` and have ended.
        let status = unsafe { (self.context.library.ibv_dealloc_pd)(self.raw()) };
        if let Err(error) = checked("ibv_dealloc_pd", status) {
            tracing::error!(%error, "a protection domain stays");
        }
    }
}

/// Memory that the device may reach, pinned until it is dropped.
pub(super) struct Region {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<sys::ibv_mr>,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

// SAFETY: libibverbs is thread-safe; the pointer is freed only by `drop`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Registers memory of this process.
    ///
    /// # Safety
    /// The memory stays mapped until the value is dropped, and no Rust reference covers bytes of it
    /// that the device may write meanwhile.
    pub(super) unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let whole = |value: u64| usize::try_from(value).map_err(|_| too_large(bytes));
        let start = ptr::with_exposed_provenance_mut(whole(address)?);
        let library = domain.context.library;
        // SAFETY: the domain is alive; the caller vouches for the memory.
        let raw =
            unsafe { (library.ibv_reg_mr)(domain.raw(), start, whole(bytes)?, access.flags()) };
        let raw = NonNull::new(raw).ok_or_else(|| refused(bytes, &io::Error::last_os_error()))?;
        // SAFETY: the library filled the structure, whose keys do not change.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Self {
            domain: Arc::clone(domain),
            raw,
            lkey,
            rkey,
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.domain.context.is_ours() {
            return;
        }
        // SAFETY: registered once by `register`, and deregistered once.
        let status = unsafe { (self.domain.context.library.ibv_dereg_mr)(self.raw.as_ptr()) };
        if let Err(error) = checked("ibv_dereg_mr", status) {
            tracing::error!(%error, "registered memory stays pinned");
        }
    }
}

fn too_large(bytes: u64) -> VerbsError {
    VerbsError::Call {
        verb: "ibv_reg_mr",
        problem: format!("{bytes} bytes are not in the address space"),
    }
}

/// Why a registration failed. The limit on locked memory is the cause in practice, and the kernel
/// says only that there is no memory.
fn refused(bytes: u64, error: &io::Error) -> VerbsError {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    if let (Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM), Some(limit_bytes)) =
        (error.raw_os_error(), limit)
    {
        return VerbsError::LockedMemory { bytes, limit_bytes };
    }
    VerbsError::Call {
        verb: "ibv_reg_mr",
        problem: format!("{bytes} bytes: {error}"),
    }
}

/// Words of this process that a device writes: where copies of a lease page arrive.
pub(super) struct Words {
    start: NonNull<u64>,
    count: usize,
    region: Option<Region>,
}

// SAFETY: the mapping is not tied to a thread, and the words are only touched by volatile accesses.
unsafe impl Send for Words {}

impl Words {
    pub(super) fn new(domain: &Arc<ProtectionDomain>, count: usize) -> Result<Self, VerbsError> {
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                count * 8,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::POPULATE,
            )
        };
        let start = start.map_err(|error| VerbsError::call("mmap", &error.into()))?;
        let start = NonNull::new(start.cast()).ok_or_else(|| VerbsError::last("mmap"))?;
        let mut words = Self {
            start,
            count,
            region: None,
        };
        // SAFETY: the mapping is `words`' own, which ends the region before it unmaps it; no
        // reference to it is ever made.
        words.region = Some(unsafe {
            Region::register(domain, words.address(0), count as u64 * 8, Access::Local)
        }?);
        Ok(words)
    }

    /// Address of a word.
    pub(super) fn address(&self, word: usize) -> u64 {
        self.start.as_ptr().expose_provenance() as u64 + word as u64 * 8
    }

    pub(super) fn lkey(&self) -> u32 {
        self.region.as_ref().map_or(0, |region| region.lkey)
    }

    pub(super) fn read(&self, word: usize) -> u64 {
        assert!(word < self.count);
        // SAFETY: inside the mapping (asserted) and aligned; the device has written it before its
        // completion was polled, or it holds zero.
        unsafe { self.start.as_ptr().add(word).read_volatile() }
    }

    /// Clears a word that no request is about to write.
    pub(super) fn clear(&self, word: usize) {
        assert!(word < self.count);
        // SAFETY: inside the mapping (asserted) and aligned; nothing borrows it.
        unsafe { self.start.as_ptr().add(word).write_volatile(0) };
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.region = None;
        // SAFETY: mapped by `new` with this address and length, and no device reaches it any more.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.count * 8) } {
            tracing::error!(%error, "cannot unmap words of a connection");
        }
    }
}
