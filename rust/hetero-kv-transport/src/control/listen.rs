//! Listening sockets: the advertised address only, the first free port of a range.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

use crate::tcp::resolve::resolve;

/// Bursts of decode engines dial at once when a pool starts.
const BACKLOG: i32 = 1024;

/// Time for the advertised name to resolve.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Binds `host` on the first free port of `ports`, or on one that the system assigns.
///
/// Returns the socket, not blocking, and the address it got.
///
/// # Errors
/// Names the host and the range. `needed` is how many listeners one engine wants of the range, for
/// the error that says that it is exhausted.
pub fn listen_on(
    host: &str,
    ports: Option<RangeInclusive<u16>>,
    needed: u32,
) -> io::Result<(OwnedFd, SocketAddr)> {
    let about = |error: io::Error, what: &str| {
        io::Error::new(error.kind(), format!("cannot listen on {host}: {what}: {error}"))
    };
    let addresses = resolve(host, 0, RESOLVE_TIMEOUT).map_err(|error| about(error, "resolve"))?;
    let Some(address) = addresses.first().copied() else {
        return Err(io::Error::new(
            io::ErrorKind::AddrNotAvailable,
            format!("cannot listen on {host}: it has no address"),
        ));
    };
    let candidates = ports.clone().unwrap_or(0..=0);
    for port in candidates {
        let mut address = address;
        address.set_port(port);
        match bound(address) {
            Ok(found) => return Ok(found),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && ports.is_some() => {}
            Err(error) => return Err(about(error, &format!("port {port}"))),
        }
    }
    let range = ports.unwrap_or(0..=0);
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!(
            "cannot listen on {host}: every port of port_range {}-{} is taken; one engine needs {needed} ports there",
            range.start(),
            range.end()
        ),
    ))
}

fn bound(address: SocketAddr) -> io::Result<(OwnedFd, SocketAddr)> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    // A restarted engine takes its port back while old connections linger in TIME_WAIT.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    let listener = TcpListener::from(socket);
    let address = listener.local_addr()?;
    Ok((listener.into(), address))
}
