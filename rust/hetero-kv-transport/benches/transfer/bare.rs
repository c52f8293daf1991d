//! What the transports are held against: the bare calls, with lists made before the clock starts.
#![allow(unsafe_code)]

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;

use hetero_kv_core::memory::{MemoryRegion, Run};

use super::memory::Pool;

/// Pieces of one call: from 32 on more gains nothing, and the kernel takes 1024.
const CALL_PIECES: usize = 512;

/// The lists of one case.
pub(crate) struct Lists {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    bytes: u64,
}

impl Lists {
    pub(crate) fn new(runs: &[Run], dest: Pool, source: MemoryRegion) -> Self {
        let piece = |address: usize, bytes: u64| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(address),
            iov_len: bytes as usize,
        };
        Self {
            local: runs
                .iter()
                .map(|run| {
                    piece(
                        dest.at(run.dest_offset, run.bytes).expose_provenance(),
                        run.bytes,
                    )
                })
                .collect(),
            remote: runs
                .iter()
                .map(|run| piece((source.base + run.source_offset) as usize, run.bytes))
                .collect(),
            bytes: runs.iter().map(|run| run.bytes).sum(),
        }
    }

    /// Copies by `process_vm_readv`.
    pub(crate) fn process_vm_readv(&self, pid: u32) -> io::Result<()> {
        let calls = self
            .local
            .chunks(CALL_PIECES)
            .zip(self.remote.chunks(CALL_PIECES));
        for (local, remote) in calls {
            let wanted: usize = local.iter().map(|piece| piece.iov_len).sum();
            // SAFETY: the local pieces lie in a pool of this process that nothing borrows.
            let copied = unsafe {
                libc::process_vm_readv(
                    pid as libc::pid_t,
                    local.as_ptr(),
                    local.len() as libc::c_ulong,
                    remote.as_ptr(),
                    remote.len() as libc::c_ulong,
                    0,
                )
            };
            match usize::try_from(copied) {
                Ok(copied) if copied == wanted => {}
                Ok(copied) => return Err(io::Error::other(format!("{copied} of {wanted} bytes"))),
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }

    /// Copies within this process, from a pool that has what the holder has.
    pub(crate) fn memcpy(&self, source: MemoryRegion, copy: Pool) {
        for (local, remote) in self.local.iter().zip(&self.remote) {
            let offset = remote.iov_base.addr() as u64 - source.base;
            let from = copy.at(offset, remote.iov_len as u64);
            // SAFETY: pieces of two pools that nothing borrows.
            unsafe {
                std::ptr::copy_nonoverlapping(from, local.iov_base.cast::<u8>(), local.iov_len);
            }
        }
    }

    /// Receives what a bare sender streams: the runs one after another.
    pub(crate) fn socket(&self, stream: &mut TcpStream, source: MemoryRegion) -> io::Result<()> {
        let piece_bytes = self.remote.first().map_or(0, |piece| piece.iov_len);
        let mut ask = Vec::with_capacity(16 + 8 * self.remote.len());
        ask.extend((self.remote.len() as u64).to_ne_bytes());
        ask.extend((piece_bytes as u64).to_ne_bytes());
        for piece in &self.remote {
            ask.extend((piece.iov_base.addr() as u64 - source.base).to_ne_bytes());
        }
        stream.write_all(&ask)?;
        transfer(&self.local, self.bytes, |pieces, count| {
            // SAFETY: the pieces lie in a pool of this process that nothing borrows.
            unsafe { libc::readv(stream.as_raw_fd(), pieces, count) }
        })
    }
}

// SAFETY: the pieces are addresses in pools that last as long as the process, and of lists of
// different runs no two overlap; nothing is borrowed from them.
unsafe impl Sync for Lists {}

/// Copies each list by a thread of its own.
pub(crate) fn by_threads(lists: &[Lists], pid: u32) -> io::Result<()> {
    thread::scope(|scope| {
        let copies: Vec<_> = lists
            .iter()
            .map(|list| scope.spawn(|| list.process_vm_readv(pid)))
            .collect();
        for copy in copies {
            copy.join()
                .map_err(|_| io::Error::other("a thread panicked"))??;
        }
        Ok(())
    })
}

/// Calls until all pieces are moved, some pieces at a time, a part of a piece too.
fn transfer(
    pieces: &[libc::iovec],
    bytes: u64,
    mut call: impl FnMut(*const libc::iovec, libc::c_int) -> libc::ssize_t,
) -> io::Result<()> {
    let (mut next, mut used, mut left) = (0, 0, bytes);
    let mut window: Vec<libc::iovec> = Vec::with_capacity(CALL_PIECES);
    while left > 0 {
        window.clear();
        window.extend(pieces[next..].iter().take(CALL_PIECES));
        window[0].iov_base = window[0].iov_base.wrapping_byte_add(used);
        window[0].iov_len -= used;
        let moved = call(window.as_ptr(), window.len() as libc::c_int);
        let mut moved = match usize::try_from(moved) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => moved,
            Err(_) => return Err(io::Error::last_os_error()),
        };
        left -= moved as u64;
        while moved > 0 {
            let rest = pieces[next].iov_len - used;
            if moved < rest {
                used += moved;
                break;
            }
            moved -= rest;
            next += 1;
            used = 0;
        }
    }
    Ok(())
}

/// The sending end of the bare socket: offsets come, the bytes go.
pub(crate) fn serve(listener: &TcpListener, region: MemoryRegion) {
    for stream in listener.incoming().flatten() {
        // The reader has gone when it fails, which ends the connection.
        let _ = serve_one(stream, region);
    }
}

fn serve_one(mut stream: TcpStream, region: MemoryRegion) -> Result<(), Box<dyn Error>> {
    stream.set_nodelay(true)?;
    loop {
        let mut word = [0; 8];
        stream.read_exact(&mut word)?;
        let count = u64::from_ne_bytes(word) as usize;
        stream.read_exact(&mut word)?;
        let bytes = u64::from_ne_bytes(word);
        let mut offsets = vec![0; 8 * count];
        stream.read_exact(&mut offsets)?;
        let pieces: Vec<libc::iovec> = offsets
            .chunks_exact(8)
            .map(|word| {
                let offset = u64::from_ne_bytes(word.try_into().expect("8 bytes"));
                assert!(offset + bytes <= region.bytes, "inside the region");
                libc::iovec {
                    iov_base: std::ptr::with_exposed_provenance_mut(
                        (region.base + offset) as usize,
                    ),
                    iov_len: bytes as usize,
                }
            })
            .collect();
        transfer(&pieces, bytes * count as u64, |pieces, count| {
            // SAFETY: the pieces lie in a pool of this process that nothing writes.
            unsafe { libc::writev(stream.as_raw_fd(), pieces, count) }
        })?;
    }
}
