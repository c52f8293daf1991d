//! Sockets of the data plane: dialling with a deadline, options, and vectored moves between a
//! socket and raw memory.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use hetero_kv_core::time::Time;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use crate::clock::{time_left, timespec};
use crate::error::{ReadFailureKind, TransportError};
use crate::memory::SpanQueue;
use crate::net::resolve::resolve;
use crate::transport::Interrupt;
use crate::waker::Waker;

/// Socket buffer that lets one stream fill a fast link.
const BUFFER_BYTES: usize = 4 << 20;

/// Pieces in one vectored call: a socket hands over some hundred KiB at a time, and the kernel
/// reads the whole list each time.
const CALL_SPANS_MAX: usize = 256;

/// Bytes in one vectored call.
const CALL_BYTES_MAX: usize = 4 << 20;

/// A dead host is noticed after 5 s of silence and two probes, 5 s apart.
const KEEPALIVE_S: u64 = 5;

/// Connects to the first address of the host that answers.
pub(super) fn dial(
    host: &str,
    port: u16,
    deadline: Time,
    interrupt: &Interrupt<'_>,
) -> Result<OwnedFd, TransportError> {
    let addresses = resolve(host, port, time_left(deadline)).map_err(|error| {
        TransportError::system(ReadFailureKind::Unreachable, "getaddrinfo", error)
    })?;
    let mut last_error = None;
    for address in addresses {
        match dial_address(address, deadline, interrupt) {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind == ReadFailureKind::Unreachable => last_error = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last_error.unwrap_or_else(|| {
        TransportError::new(ReadFailureKind::Unreachable, "connect", "no address")
    }))
}

fn dial_address(
    address: SocketAddr,
    deadline: Time,
    interrupt: &Interrupt<'_>,
) -> Result<OwnedFd, TransportError> {
    let local = |call| {
        move |error: Errno| {
            TransportError::system(ReadFailureKind::Local, call, io::Error::from(error))
        }
    };
    let unreachable = |error: Errno| {
        TransportError::new(
            ReadFailureKind::Unreachable,
            "connect",
            format!("{address}: {}", io::Error::from(error)),
        )
    };
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let stream = socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(local("socket"))?;
    // The receive buffer decides the window scale, which is agreed when the connection is made.
    set_options(&stream).map_err(local("setsockopt"))?;
    match connect(&stream, &address) {
        Ok(()) => return Ok(stream),
        Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(error) => return Err(unreachable(error)),
    }
    wait_ready(&stream, PollFlags::OUT, deadline, interrupt).map_err(|mut error| {
        error.problem = format!("{address}: {}", error.problem);
        error
    })?;
    match sockopt::socket_error(&stream).map_err(local("getsockopt"))? {
        Ok(()) => Ok(stream),
        Err(error) => Err(unreachable(error)),
    }
}

/// Waits until the socket is ready for `flags`, for the deadline or for the interrupt.
pub(crate) fn wait_ready(
    stream: &impl AsFd,
    flags: PollFlags,
    deadline: Time,
    interrupt: &Interrupt<'_>,
) -> Result<(), TransportError> {
    loop {
        if (interrupt.should_stop)() {
            return Err(TransportError::new(
                ReadFailureKind::Cancelled,
                "connect",
                "given up by the caller",
            ));
        }
        let left = time_left(deadline);
        if left.is_zero() {
            return Err(TransportError::new(
                ReadFailureKind::Unreachable,
                "connect",
                "no answer in time",
            ));
        }
        let ready = wait_any(stream, flags, interrupt.waker, Some(left))
            .map_err(|error| TransportError::system(ReadFailureKind::Local, "poll", error))?;
        if ready.woken {
            interrupt.waker.clear();
        } else if ready.socket {
            return Ok(());
        }
    }
}

/// What a wait ended with; neither is the timeout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    /// The socket is ready, or broken: the next call on it tells.
    pub(super) socket: bool,
    /// The waker is set.
    pub(super) woken: bool,
}

/// Sleeps until the socket is ready for `flags`, the waker is set, or the timeout passes.
pub(super) fn wait_any(
    stream: &impl AsFd,
    flags: PollFlags,
    waker: &Waker,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let mut fds = [
        PollFd::new(stream, flags),
        PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN),
    ];
    let timeout = timeout.map(timespec);
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(Ready {
            socket: !fds[0].revents().is_empty(),
            woken: !fds[1].revents().is_empty(),
        }),
        Err(error) => Err(error.into()),
    }
}

/// Options of both ends of a data connection.
pub(super) fn set_options(stream: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(stream, true)?;
    set_buffers(stream)?;
    sockopt::set_socket_keepalive(stream, true)?;
    let interval = Duration::from_secs(KEEPALIVE_S);
    sockopt::set_tcp_keepidle(stream, interval)?;
    sockopt::set_tcp_keepintvl(stream, interval)?;
    sockopt::set_tcp_keepcnt(stream, 2)
}

/// Enlarges the buffers where the system allows it. A size that is set switches the kernel's own
/// tuning off, and a size above `net.core.rmem_max` is cut to it, so a limit below
/// [`BUFFER_BYTES`] leaves the tuning on instead.
fn set_buffers(stream: &OwnedFd) -> Result<(), Errno> {
    if limit_bytes("/proc/sys/net/core/rmem_max") >= BUFFER_BYTES {
        sockopt::set_socket_recv_buffer_size(stream, BUFFER_BYTES)?;
    }
    if limit_bytes("/proc/sys/net/core/wmem_max") >= BUFFER_BYTES {
        sockopt::set_socket_send_buffer_size(stream, BUFFER_BYTES)?;
    }
    Ok(())
}

fn limit_bytes(path: &str) -> usize {
    std::fs::read_to_string(path)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

/// Receives into the next pieces of `dest`, as much as is there; 0 when the peer has closed.
///
/// # Safety
/// The caller may write all of `dest` now: each of its pieces lies in mapped memory of this
/// process that no Rust reference covers.
pub(super) unsafe fn receive_into(
    stream: &OwnedFd,
    dest: &mut SpanQueue,
    iovecs: &mut Vec<libc::iovec>,
) -> io::Result<usize> {
    dest.fill(iovecs, CALL_SPANS_MAX, CALL_BYTES_MAX);
    // At most CALL_SPANS_MAX pieces.
    let count = libc::c_int::try_from(iovecs.len()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the list is valid for the call, and the kernel writes only to the pieces of `dest`,
    // which the caller vouches for.
    let received = unsafe { libc::readv(stream.as_raw_fd(), iovecs.as_ptr(), count) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    dest.advance(received);
    Ok(received)
}

/// Sends the next pieces of `source`, as much as the socket takes.
///
/// # Safety
/// All of `source` lies in mapped memory of this process. Others may write it meanwhile: the bytes
/// that leave are then worth nothing, which the caller has to find out.
pub(super) unsafe fn send_from(
    stream: &OwnedFd,
    source: &mut SpanQueue,
    iovecs: &mut Vec<libc::iovec>,
) -> io::Result<usize> {
    source.fill(iovecs, CALL_SPANS_MAX, CALL_BYTES_MAX);
    // SAFETY: `msghdr` is a C structure of integers and pointers, for which all zeros is valid.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len() as _;
    // SAFETY: `message` names a list that is valid for the call; the kernel only reads the pieces
    // of `source`, which the caller vouches for. MSG_NOSIGNAL: a closed peer is an error here, not
    // a signal to the engine.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
    source.advance(sent);
    Ok(sent)
}
