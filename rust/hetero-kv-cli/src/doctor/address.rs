//! The advertised address: resolves, can be dialled, and is this machine's.

use std::io::ErrorKind;
use std::net::IpAddr;

use hetero_kv_transport::net::listen::{ListenAddress, ListenError, listen_on};

use super::dial::{RESOLVE_TIMEOUT, resolve};
use super::machine;
use super::report::Finding;

const CHECK: &str = "address";

/// What is to be set where no address does.
fn set_host() -> String {
    format!("set host (or VLLM_HOST_IP) to {}", machine::candidates())
}

/// The finding, and the address that the listeners would bind where there is one.
pub(super) fn check(host: Option<&str>, bind_host: Option<&str>) -> (Finding, Option<IpAddr>) {
    let Some(host) = host.map(str::to_owned).or_else(machine::default_host) else {
        let found = "no network address was found to advertise";
        return (Finding::fail(CHECK, found, set_host()), None);
    };
    let addresses = match resolve(&host, 0, RESOLVE_TIMEOUT) {
        Ok(addresses) => addresses,
        Err(error) => {
            let found = format!("{host} does not resolve: {error}");
            let mend = format!(
                "add it to DNS or /etc/hosts on all hosts, or {}",
                set_host()
            );
            return (Finding::fail(CHECK, found, mend), None);
        }
    };
    let listener = listen_on(&ListenAddress {
        host: host.clone(),
        bind_host: bind_host.map(str::to_owned),
        port_range: None,
        ports_needed: 1,
    });
    let bound = match listener {
        Ok(listener) => listener.local_addr().map(|address| address.ip()),
        Err(error) => return (not_bound(&error), None),
    };
    let Ok(bound) = bound else {
        let found = format!("the listener on {host} has no address");
        return (Finding::fail(CHECK, found, set_host()), None);
    };
    let ips: Vec<IpAddr> = addresses.iter().map(|address| address.ip()).collect();
    (bound_well(&host, bind_host, &ips, bound), Some(bound))
}

fn not_bound(error: &ListenError) -> Finding {
    match error {
        ListenError::Unspecified { host } => Finding::fail(
            CHECK,
            format!("{host} stands for all interfaces: no peer can dial it"),
            format!(
                "{}; to listen on all interfaces nevertheless, set bind_host={host} beside it",
                set_host()
            ),
        ),
        ListenError::Address { host, error } if error.kind() == ErrorKind::AddrNotAvailable => {
            Finding::fail(
                CHECK,
                format!("{host} is not an address of this machine"),
                format!(
                    "{}; where peers dial a translated address, keep it and set bind_host to that",
                    set_host()
                ),
            )
        }
        ListenError::Address { .. } | ListenError::PortRangeExhausted { .. } => {
            Finding::fail(CHECK, error.to_string(), set_host())
        }
    }
}

fn bound_well(host: &str, bind_host: Option<&str>, ips: &[IpAddr], bound: IpAddr) -> Finding {
    let shown = if ips.iter().any(|ip| ip.to_string() == host) {
        host.to_owned()
    } else {
        let ips: Vec<String> = ips.iter().map(ToString::to_string).collect();
        format!("{host} ({})", ips.join(", "))
    };
    if let Some(loopback) = ips.iter().find(|ip| ip.is_loopback()) {
        return Finding::warn(
            CHECK,
            format!("{shown} is loopback ({loopback}): only engines of this host reach it"),
            format!("for engines of other hosts, {}", set_host()),
        );
    }
    if bound.is_unspecified() {
        return Finding::warn(
            CHECK,
            format!("{shown} is advertised, and bind_host listens on all interfaces"),
            format!("set bind_host to {}", machine::candidates()),
        );
    }
    let interface = machine::interface_of(bound);
    let on = match interface.as_deref() {
        Some(interface) => match machine::mtu_bytes(interface) {
            Some(mtu) => format!(" on {interface}, MTU {mtu}"),
            None => format!(" on {interface}"),
        },
        None => String::new(),
    };
    match bind_host {
        Some(bind_host) => Finding::ok(
            CHECK,
            format!("{shown} is advertised, {bind_host}{on} is bound"),
        ),
        None => Finding::ok(CHECK, format!("{shown}{on}")),
    }
}
