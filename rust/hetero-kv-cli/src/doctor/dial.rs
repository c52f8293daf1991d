//! Names to addresses and connections, each with a deadline, and what stands in the way told apart.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt::TcpMaxSeg};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

/// Longest wait for the resolver.
pub(super) const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for a connection: three SYN packets, one second and two seconds apart, and their
/// way.
pub(super) const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum DialError {
    /// The name has no address.
    Unresolved(io::Error),
    /// The host answered that nobody listens.
    Refused,
    /// Nothing came back in time.
    Silent(Duration),
    /// A router, or this host, says that there is no way.
    NoRoute(io::Error),
    /// Anything else.
    System(io::Error),
}

impl fmt::Display for DialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unresolved(error) => write!(f, "does not resolve: {error}"),
            Self::Refused => f.write_str("connection refused: the host answers, nobody listens"),
            Self::Silent(waited) => write!(
                f,
                "no answer within {} s: packets are dropped on the way",
                waited.as_secs()
            ),
            Self::NoRoute(error) => write!(f, "no way there: {error}"),
            Self::System(error) => write!(f, "{error}"),
        }
    }
}

impl DialError {
    /// What mends it.
    pub(super) fn mend(&self, host: &str, port: u16) -> String {
        match self {
            Self::Unresolved(_) => format!("add {host} to DNS or /etc/hosts of this host"),
            Self::Refused => format!(
                "start `hetero-kv doctor listen` there and see that it listens on port {port} of \
                 this very address (`ss -ltn`)"
            ),
            Self::Silent(_) => format!(
                "open TCP port {port} for this host in the firewall or security group of {host} \
                 (`iptables -S`, `nft list ruleset`), or dial another address of it"
            ),
            Self::NoRoute(_) => {
                format!("see `ip route get {host}` here, and that {host} is up and in that network")
            }
            Self::System(_) => format!("see `ip route get {host}`"),
        }
    }
}

/// Addresses of a host, IPv6 without brackets.
pub(super) fn resolve(host: &str, port: u16, timeout: Duration) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    thread::Builder::new().spawn(move || {
        let found = (name.as_str(), port)
            .to_socket_addrs()
            .map(Iterator::collect::<Vec<_>>);
        // Nobody listens any more after the timeout.
        let _ = sender.send(found);
    })?;
    let found = receiver.recv_timeout(timeout).map_err(|_| {
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no answer of the resolver within {} s", timeout.as_secs()),
        )
    })??;
    if found.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "it has no address"));
    }
    Ok(found)
}

/// A connection to the first address of the host that answers, and that address.
pub(super) fn dial_host(host: &str, port: u16) -> Result<(TcpStream, SocketAddr), DialError> {
    let addresses = resolve(host, port, RESOLVE_TIMEOUT).map_err(DialError::Unresolved)?;
    let mut last = DialError::Refused;
    for address in addresses {
        match dial(address, DIAL_TIMEOUT, None) {
            Ok(stream) => return Ok((stream, address)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A connection, whose segments in both directions have at most `segment_bytes_max` bytes (TCP's
/// MSS option, tcp(7)).
pub(super) fn dial(
    address: SocketAddr,
    timeout: Duration,
    segment_bytes_max: Option<u32>,
) -> Result<TcpStream, DialError> {
    let system = |error: Errno| DialError::System(error.into());
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(system)?;
    if let Some(bytes) = segment_bytes_max {
        setsockopt(&socket, TcpMaxSeg, &bytes).map_err(|error| DialError::System(error.into()))?;
    }
    let begun = Instant::now();
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(error) => return Err(told_apart(error, timeout)),
    }
    loop {
        let left = timeout.saturating_sub(begun.elapsed());
        if left.is_zero() {
            return Err(DialError::Silent(timeout));
        }
        let left = Timespec::try_from(left).map_err(|_| DialError::Silent(timeout))?;
        match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&left)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => break,
            Err(error) => return Err(system(error)),
        }
    }
    match sockopt::socket_error(&socket).map_err(system)? {
        Ok(()) => {}
        Err(error) => return Err(told_apart(error, timeout)),
    }
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false).map_err(DialError::System)?;
    stream.set_nodelay(true).map_err(DialError::System)?;
    Ok(stream)
}

fn told_apart(error: Errno, timeout: Duration) -> DialError {
    match error {
        Errno::CONNREFUSED | Errno::CONNRESET => DialError::Refused,
        Errno::TIMEDOUT => DialError::Silent(timeout),
        Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::ACCESS | Errno::PERM => {
            DialError::NoRoute(error.into())
        }
        error => DialError::System(error.into()),
    }
}
