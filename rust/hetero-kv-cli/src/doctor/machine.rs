//! Addresses and interfaces of this machine.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use nix::ifaddrs::getifaddrs;
use nix::sys::socket::SockaddrStorage;

/// An address of this machine.
#[derive(Clone, Debug)]
pub(super) struct LocalAddress {
    /// The address.
    pub(super) ip: IpAddr,
    /// Its interface.
    pub(super) interface: String,
}

/// Every address of this machine; empty when the system does not say.
pub(super) fn addresses() -> Vec<LocalAddress> {
    let Ok(found) = getifaddrs() else {
        return Vec::new();
    };
    found
        .filter_map(|entry| {
            Some(LocalAddress {
                ip: ip_of(entry.address.as_ref()?)?,
                interface: entry.interface_name,
            })
        })
        .collect()
}

fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(v4.ip().into());
    }
    address.as_sockaddr_in6().map(|v6| v6.ip().into())
}

/// Interface that has the address.
pub(super) fn interface_of(ip: IpAddr) -> Option<String> {
    addresses()
        .into_iter()
        .find(|local| local.ip == ip)
        .map(|local| local.interface)
}

/// MTU of an interface in bytes.
pub(super) fn mtu_bytes(interface: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("/sys/class/net/{interface}/mtu")).ok()?;
    text.trim().parse().ok()
}

/// Addresses that other hosts may dial, for advice; loopback and link-local ones are none.
pub(super) fn candidates() -> String {
    let dialled = |ip: &IpAddr| match ip {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    };
    let found: Vec<String> = addresses()
        .into_iter()
        .filter(|local| dialled(&local.ip))
        .map(|local| format!("{} ({})", local.ip, local.interface))
        .collect();
    if found.is_empty() {
        "an address of this machine (it has none but loopback)".into()
    } else {
        format!("one of {}", found.join(", "))
    }
}

/// The address that vLLM takes when none is configured: VLLM_HOST_IP, else the source address of
/// a route to the internet (`vllm.utils.network_utils.get_ip`). Nothing is sent.
pub(super) fn default_host() -> Option<String> {
    if let Ok(named) = std::env::var("VLLM_HOST_IP")
        && !named.is_empty()
    {
        return Some(named);
    }
    // vLLM asks for the routes to the same two addresses.
    let routes = [
        ("0.0.0.0:0", "8.8.8.8:80"),
        ("[::]:0", "[2001:4860:4860::8888]:80"),
    ];
    routes.iter().find_map(|(from, to)| {
        let socket = UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip().to_string())
    })
}

/// The address to dial a listener of this machine by: a wildcard's is loopback.
pub(super) fn dialled_here(bound: IpAddr) -> IpAddr {
    match bound {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        IpAddr::V4(_) | IpAddr::V6(_) => bound,
    }
}
