//! Whether large packets arrive: a path that drops them without a word (an MTU black hole) lets
//! handshakes through and stops KV.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt::TcpMaxSeg};

use super::dial::dial;
use super::machine;
use super::peer::{Direction, Transfer, transfer};
use super::report::Finding;

const CHECK: &str = "large packets";

/// More than any buffer on the way takes by one packet, quickly sent on any link.
const BYTES: u64 = 256 << 10;

/// Three retransmissions of a lost packet fit (RFC 6298: 0.2 s, doubled each time).
const LIMIT: Duration = Duration::from_secs(5);

/// One step of the search for the largest packet that passes.
const STEP_BYTES: u64 = 32 << 10;
const STEP_LIMIT: Duration = Duration::from_millis(1500);

/// Smallest segment tried: what every IPv4 path carries (RFC 9293, 3.7.1).
const SEGMENT_BYTES_MIN: u32 = 536;

/// Largest that the kernel takes (tcp(7), TCP_MAXSEG).
const SEGMENT_BYTES_MAX: u32 = 32_767;

/// An interface that does not say its MTU counts as Ethernet.
const MTU_BYTES: u32 = 1500;

/// IP and TCP headers without options.
fn header_bytes(address: SocketAddr) -> u32 {
    match address {
        SocketAddr::V4(_) => 40,
        SocketAddr::V6(_) => 60,
    }
}

/// Both ways.
pub(super) fn check(address: SocketAddr) -> Finding {
    let mut segment_bytes = None;
    for direction in [Direction::Up, Direction::Down] {
        match attempt(address, direction, None, BYTES, LIMIT) {
            Ok(segment) => segment_bytes = segment.or(segment_bytes),
            Err(error) => return stuck(address, direction, &error),
        }
    }
    let segments = match segment_bytes {
        Some(bytes) => format!(", segments of {bytes} bytes"),
        None => String::new(),
    };
    Finding::ok(CHECK, format!("{} KiB each way{segments}", BYTES >> 10))
}

/// The segment size in use at the end, where the kernel tells.
fn attempt(
    address: SocketAddr,
    direction: Direction,
    segment_bytes_max: Option<u32>,
    bytes: u64,
    limit: Duration,
) -> io::Result<Option<u32>> {
    let stream = dial(address, limit, segment_bytes_max)
        .map_err(|error| io::Error::new(io::ErrorKind::TimedOut, error.to_string()))?;
    let wanted = Transfer {
        direction,
        bytes_max: bytes,
        time_max: limit,
        limit,
    };
    transfer(&stream, &wanted)?;
    Ok(getsockopt(&stream, TcpMaxSeg).ok())
}

/// Looks for the size at which packets begin to vanish.
fn stuck(address: SocketAddr, direction: Direction, error: &io::Error) -> Finding {
    let way = match direction {
        Direction::Up => "from here to the listener",
        Direction::Down => "from the listener to here",
    };
    let passes = |segment_bytes: u32| {
        attempt(
            address,
            direction,
            Some(segment_bytes),
            STEP_BYTES,
            STEP_LIMIT,
        )
        .is_ok()
    };
    let interface = local_interface(address);
    let mtu = interface
        .as_deref()
        .and_then(machine::mtu_bytes)
        .unwrap_or(MTU_BYTES);
    let header = header_bytes(address);
    if !passes(SEGMENT_BYTES_MIN) {
        return Finding::fail(
            CHECK,
            format!(
                "a hello passes, {} KiB {way} do not within {} s ({error}), nor do small packets",
                BYTES >> 10,
                LIMIT.as_secs()
            ),
            "not the MTU: the link loses or shapes traffic; see `ip -s link` and `nstat -az \
             TcpRetransSegs` on both hosts, and what inspects traffic between them",
        );
    }
    let (mut passing, mut stuck) = (
        SEGMENT_BYTES_MIN,
        mtu.saturating_sub(header)
            .clamp(SEGMENT_BYTES_MIN + 1, SEGMENT_BYTES_MAX),
    );
    while stuck - passing > 1 {
        let middle = passing.midpoint(stuck);
        if passes(middle) {
            passing = middle;
        } else {
            stuck = middle;
        }
    }
    let packet = passing + header;
    let interface = interface.unwrap_or_else(|| "DEV".into());
    Finding::fail(
        CHECK,
        format!(
            "MTU black hole {way}: packets of up to {packet} bytes pass, larger ones vanish \
             without a word ({interface} here has MTU {mtu})"
        ),
        format!(
            "`ip link set dev {interface} mtu {packet}` on both hosts (or on the container \
             network), or let ICMP \"fragmentation needed\" (IPv6: \"packet too big\") through the \
             firewall; `sysctl -w net.ipv4.tcp_mtu_probing=1` works around it"
        ),
    )
}

fn local_interface(address: SocketAddr) -> Option<String> {
    let stream = dial(address, STEP_LIMIT, None).ok()?;
    machine::interface_of(stream.local_addr().ok()?.ip())
}
