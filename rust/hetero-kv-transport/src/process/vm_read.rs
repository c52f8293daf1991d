//! `process_vm_readv(2)`, the one system call this transport lives from.
#![allow(unsafe_code)]

use std::io;

use crate::memory::{Span, SpanQueue};

/// Pieces on each side of one call. Between 32 and 512 the call's own cost is amortised and more
/// gains nothing (the kernel's limit is 1024).
const CALL_SPANS_MAX: usize = 256;

/// Room for the two piece lists of a call, kept between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
}

// SAFETY: the pointers in it are addresses for system calls; only `read_some` passes them on, and
// it fills them anew each time.
unsafe impl Send for Scratch {}

/// Copies the next bytes of `source`, in process `pid`, to the next bytes of `dest`, in this
/// process, at most `bytes_max`; marks them as used on both sides and returns their number.
///
/// # Safety
/// The caller may write all of `dest` now: each of its pieces lies in mapped memory of this
/// process that no Rust reference covers.
pub(super) unsafe fn read_some(
    pid: libc::pid_t,
    source: &mut SpanQueue,
    dest: &mut SpanQueue,
    bytes_max: usize,
    scratch: &mut Scratch,
) -> io::Result<usize> {
    let Scratch { local, remote } = scratch;
    let local_bytes = dest.fill(local, CALL_SPANS_MAX, bytes_max);
    // The kernel pins what the remote list names, also past the end of the local one.
    source.fill(remote, CALL_SPANS_MAX, local_bytes);
    let (local_count, remote_count) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
    let copied = loop {
        // SAFETY: both lists are valid for the call; the kernel checks the other process's
        // addresses, and writes only to the pieces of `dest`, which the caller vouches for.
        let copied = unsafe {
            libc::process_vm_readv(
                pid,
                local.as_ptr(),
                local_count,
                remote.as_ptr(),
                remote_count,
                0,
            )
        };
        match usize::try_from(copied) {
            Ok(copied) => break copied,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    };
    if copied == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    source.advance(copied);
    dest.advance(copied);
    Ok(copied)
}

/// Copies `N` bytes per piece from process `pid`, for probes and fences.
pub(super) fn read_words<const PIECES: usize, const N: usize>(
    pid: libc::pid_t,
    addresses: [u64; PIECES],
    scratch: &mut Scratch,
) -> io::Result<[[u8; N]; PIECES]> {
    let invalid = || io::Error::from_raw_os_error(libc::EFAULT);
    let mut source = SpanQueue::with_capacity(PIECES);
    for address in addresses {
        let address = usize::try_from(address).map_err(|_| invalid())?;
        if address == 0 || address.checked_add(N).is_none() {
            return Err(invalid());
        }
        source.push(Span { address, bytes: N });
    }
    let mut words = [[0_u8; N]; PIECES];
    let mut dest = SpanQueue::with_capacity(1);
    dest.push(Span {
        address: words.as_mut_ptr().expose_provenance(),
        bytes: N * PIECES,
    });
    while dest.left_bytes() > 0 {
        // SAFETY: `dest` is `words`, borrowed by nothing else until the loop ends.
        unsafe { read_some(pid, &mut source, &mut dest, usize::MAX, scratch)? };
    }
    Ok(words)
}
