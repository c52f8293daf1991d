//! Listening sockets: the advertised address only, the first free port of a range.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

use super::resolve::resolve;

/// Bursts of decode engines dial at once when a pool starts.
const BACKLOG: i32 = 1024;

/// Longest wait for the resolver.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    /// Address or name that others dial, IPv6 without brackets; announced as it is.
    pub host: String,
    /// Address to bind instead of `host`, for networks where peers dial a translated address. Only
    /// here an unspecified address (all interfaces) is taken.
    pub bind_host: Option<String>,
    /// Ports to try, in order; `None`: the system assigns one.
    pub port_range: Option<RangeInclusive<u16>>,
    /// How many ports of the range the whole engine needs; for the error that says so.
    pub ports_needed: u32,
}

/// Why a listener cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// All interfaces were asked for by the advertised name, which no peer could dial.
    #[error(
        "{host} stands for all interfaces and cannot be dialled: advertise one address (host), and \
         set the bind address apart (bind_host) if all are to be listened on"
    )]
    Unspecified {
        /// The advertised host.
        host: String,
    },
    /// The name or address is not one to listen on.
    #[error("cannot listen on {host}: {error}")]
    Address {
        /// Address tried.
        host: String,
        /// The system's answer.
        error: io::Error,
    },
    /// Every port of the range is taken.
    #[error(
        "every port of {first}-{last} on {host} is taken (port_range): one engine needs {needed} of \
         them, one for its control listener and one for each rank"
    )]
    PortRangeExhausted {
        /// Address tried.
        host: String,
        /// First port of the range.
        first: u16,
        /// Last port of the range.
        last: u16,
        /// Ports that the whole engine needs.
        needed: u32,
    },
}

/// Listens on the first free port of the range. The listener does not block.
///
/// # Errors
/// [`ListenError`] names the host, and the range where that is the matter.
pub fn listen_on(options: &ListenAddress) -> Result<TcpListener, ListenError> {
    let host = options.bind_host.as_ref().unwrap_or(&options.host);
    let address_error = |error| ListenError::Address {
        host: host.clone(),
        error,
    };
    let addresses = resolve(host, 0, RESOLVE_TIMEOUT).map_err(address_error)?;
    if options.bind_host.is_none()
        && addresses
            .iter()
            .any(|address| address.ip().is_unspecified())
    {
        return Err(ListenError::Unspecified { host: host.clone() });
    }
    let mut last_error = None;
    for address in addresses {
        match first_free(address, options.port_range.clone().unwrap_or(0..=0)) {
            Ok(Some(listener)) => return Ok(listener),
            Ok(None) => {}
            Err(error) => last_error = Some(error),
        }
    }
    Err(match (last_error, &options.port_range) {
        (Some(error), _) => address_error(error),
        (None, Some(range)) => ListenError::PortRangeExhausted {
            host: host.clone(),
            first: *range.start(),
            last: *range.end(),
            needed: options.ports_needed,
        },
        (None, None) => address_error(io::ErrorKind::AddrInUse.into()),
    })
}

/// `None` when every port is taken.
fn first_free(
    mut address: SocketAddr,
    ports: RangeInclusive<u16>,
) -> io::Result<Option<TcpListener>> {
    for port in ports {
        address.set_port(port);
        match bound(address) {
            Ok(listener) => return Ok(Some(listener)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn bound(address: SocketAddr) -> io::Result<TcpListener> {
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
    Ok(socket.into())
}
