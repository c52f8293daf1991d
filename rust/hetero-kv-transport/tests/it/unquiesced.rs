//! A read that cannot be stopped: its copy into our memory hangs in the kernel, on a page that
//! userfaultfd(2) withholds. The job has to stay undone until the kernel lets go.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::memory::LocalMemory;
use hetero_kv_transport::reader::{Reader, ReaderOptions, TransportChoice};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::holder::{Holder, HolderConfig, failure_kind, job, wait_one};

const PAGE_BYTES: usize = 4096;

// From linux/userfaultfd.h: _IOWR(0xAA, number, structure).
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;

/// One page of memory that nobody can touch until it is released.
struct WithheldPage {
    fault: OwnedFd,
    address: u64,
}

impl WithheldPage {
    fn new() -> std::io::Result<Self> {
        // SAFETY: the call takes flags only; its result is a new descriptor or an error.
        let fault =
            unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let fault = i32::try_from(fault).map_err(std::io::Error::other)?;
        if fault < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the descriptor is fresh and nobody else's.
        let fault = unsafe { OwnedFd::from_raw_fd(fault) };
        // SAFETY: a fresh anonymous mapping overlaps nothing; it lives until the process ends.
        let page = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                PAGE_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        let address = page.expose_provenance() as u64;
        let this = Self { fault, address };
        this.control(UFFDIO_API, &mut [0xaa, 0, 0])?;
        // Mode 1: missing pages.
        this.control(UFFDIO_REGISTER, &mut [address, PAGE_BYTES as u64, 1, 0])?;
        Ok(this)
    }

    /// Waits until somebody hangs on the page.
    fn wait_touched(&self) {
        let mut fds = [PollFd::new(&self.fault, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: 30,
            tv_nsec: 0,
        };
        let touched = poll(&mut fds, Some(&timeout)).expect("a descriptor");
        assert_eq!(touched, 1, "nobody touched the page");
    }

    fn release(&self) -> std::io::Result<()> {
        self.control(
            UFFDIO_ZEROPAGE,
            &mut [self.address, PAGE_BYTES as u64, 0, 0],
        )
    }

    fn control(&self, request: libc::c_ulong, words: &mut [u64]) -> std::io::Result<()> {
        // SAFETY: each request is called with as many 8-byte words as its structure has.
        let result =
            unsafe { libc::ioctl(self.fault.as_raw_fd(), request as _, words.as_mut_ptr()) };
        if result < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    }
}

/// A holder, a withheld page and a reader into it; `None` where the kernel does not offer it.
fn setting() -> Option<(Holder, WithheldPage, Reader)> {
    let page = match WithheldPage::new() {
        Ok(page) => page,
        Err(error) => {
            eprintln!("skipped: userfaultfd is not available here: {error}");
            return None;
        }
    };
    let region = MemoryRegion {
        base: page.address,
        bytes: PAGE_BYTES as u64,
    };
    // SAFETY: the page stays mapped until the process ends and no reference covers it.
    let memory = Arc::new(unsafe { LocalMemory::new(vec![region]) }.expect("mapped"));
    let reader = Reader::start(
        memory,
        ReaderOptions {
            choice: TransportChoice::Process,
            quiesce_timeout: Duration::from_millis(100),
            ..ReaderOptions::default()
        },
    );
    Some((Holder::start(HolderConfig::default()), page, reader))
}

const RUN: Run = Run {
    source_region: 0,
    source_offset: 0,
    dest_region: 0,
    dest_offset: 0,
    bytes: PAGE_BYTES as u64,
};

#[test]
fn a_read_that_hangs_in_the_kernel_is_not_reported_before_it_ends() {
    let Some((holder, page, reader)) = setting() else {
        return;
    };
    reader
        .submit(job(1, &holder.source, &[RUN]))
        .expect("taken");
    page.wait_touched();
    assert_eq!(reader.stats().jobs_unquiesced, 0);
    assert!(reader.cancel(1));
    assert!(
        !reader.wait(Duration::from_millis(400)),
        "reported while the kernel may still write"
    );
    let stats = reader.stats();
    assert_eq!((stats.jobs_in_flight, stats.jobs_unquiesced), (1, 1));
    let error = reader.shutdown(now() + Duration::from_millis(50));
    assert_eq!(error.expect_err("a thread hangs").sessions, 1);

    page.release().expect("the kernel goes on");
    assert_eq!(failure_kind(&wait_one(&reader)), ReadFailureKind::Cancelled);
    reader
        .shutdown(now() + Duration::from_secs(5))
        .expect("quiescent");
    assert_eq!(reader.stats().jobs_unquiesced, 0);
}

#[test]
fn a_read_that_arrives_after_its_deadline_is_no_success() {
    let Some((holder, page, reader)) = setting() else {
        return;
    };
    reader
        .submit(job(1, &holder.source, &[RUN]))
        .expect("taken");
    page.wait_touched();
    assert!(reader.extend(1, now() + Duration::from_millis(100)));
    assert!(!reader.wait(Duration::from_millis(200)), "it hangs");
    page.release().expect("the kernel goes on");
    let done = wait_one(&reader);
    assert_eq!(failure_kind(&done), ReadFailureKind::Deadline);
    assert_eq!(done.reads[0].bytes, PAGE_BYTES as u64, "all had arrived");
}
