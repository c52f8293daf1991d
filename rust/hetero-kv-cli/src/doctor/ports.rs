//! Whether the port range has room for the listeners of the engines of this host.

use std::fs;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use hetero_kv_transport::net::listen::{ListenAddress, ListenError, listen_on};

use super::port_owner;
use super::report::Finding;

const CHECK: &str = "ports";

/// Taken ports that are named one by one.
const NAMED_MAX: usize = 4;

/// `FIRST-LAST`.
pub(super) type PortRange = RangeInclusive<u16>;

/// As the connector's `port_range` takes it.
pub(super) fn parse_range(text: &str) -> Result<PortRange, String> {
    let wanted = || format!("{text:?} is not FIRST-LAST with 1 <= FIRST <= LAST <= 65535");
    let (first, last) = text.split_once('-').ok_or_else(wanted)?;
    let port = |text: &str| text.trim().parse::<u16>().map_err(|_| wanted());
    let (first, last) = (port(first)?, port(last)?);
    if first == 0 || last < first {
        return Err(wanted());
    }
    Ok(first..=last)
}

/// One port.
enum Port {
    Free,
    Taken,
    Refused(String),
}

fn probe(address: IpAddr, port: u16) -> Port {
    let listener = listen_on(&ListenAddress {
        host: address.to_string(),
        bind_host: Some(address.to_string()),
        port_range: Some(port..=port),
        ports_needed: 1,
    });
    match listener {
        Ok(_) => Port::Free,
        Err(ListenError::PortRangeExhausted { .. }) => Port::Taken,
        Err(ListenError::Address { error, .. }) if error.kind() == ErrorKind::PermissionDenied => {
            Port::Refused(format!(
                "port {port} may not be bound by this user: {error}"
            ))
        }
        Err(error @ (ListenError::Address { .. } | ListenError::Unspecified { .. })) => {
            Port::Refused(error.to_string())
        }
    }
}

/// `engines` of `workers` each listen on `address`.
pub(super) fn check(
    address: IpAddr,
    range: Option<&PortRange>,
    engines: u32,
    workers: u32,
) -> Finding {
    let needed = u64::from(engines) * (1 + u64::from(workers));
    let what = format!(
        "{needed} needed (1 control and {workers} data for each of {engines} engine{})",
        if engines == 1 { "" } else { "s" }
    );
    let Some(range) = range else {
        let assigned = match assigned_ports() {
            Some(ports) => format!("{}-{}", ports.start(), ports.end()),
            None => "any".into(),
        };
        return Finding::ok(
            CHECK,
            format!(
                "{what}, assigned by the system ({assigned}); a firewall has to let all of them in"
            ),
        );
    };
    let shown = format!("{}-{} on {address}", range.start(), range.end());
    let mut free = 0_u64;
    let mut taken = Vec::new();
    for port in range.clone() {
        match probe(address, port) {
            Port::Free => free += 1,
            Port::Taken => taken.push(port),
            Port::Refused(why) => {
                let mend = "choose a port_range from 1024 up, or `sysctl -w \
                     net.ipv4.ip_unprivileged_port_start`";
                return Finding::fail(CHECK, why, mend);
            }
        }
        if free == needed {
            break;
        }
    }
    if free < needed {
        let missing = needed - free;
        let wider = u64::from(*range.end()) + missing;
        let widen = if wider <= u64::from(u16::MAX) {
            format!("widen port_range by {missing} ({}-{wider})", range.start())
        } else {
            format!("move port_range, it needs {missing} more ports")
        };
        let end = if taken.is_empty() {
            ""
        } else {
            ", or end the processes named"
        };
        return Finding::fail(
            CHECK,
            format!("{free} of {shown} are free, {what}{}", named(&taken)),
            format!("{widen}{end}"),
        );
    }
    if let Some(assigned) = assigned_ports()
        && assigned.start() <= range.end()
        && range.start() <= assigned.end()
    {
        return Finding::warn(
            CHECK,
            format!(
                "{shown}: {what}, {free} free now{}; outgoing connections may take them, the \
                 system assigns {}-{}",
                named(&taken),
                assigned.start(),
                assigned.end()
            ),
            format!(
                "`sysctl -w net.ipv4.ip_local_reserved_ports={}-{}`, or a port_range below {}",
                range.start(),
                range.end(),
                assigned.start()
            ),
        );
    }
    Finding::ok(
        CHECK,
        format!("{shown}: {what}, enough are free{}", named(&taken)),
    )
}

/// `; taken: 7000 by python3 (pid 12), ...`
fn named(taken: &[u16]) -> String {
    if taken.is_empty() {
        return String::new();
    }
    let mut names: Vec<String> = taken
        .iter()
        .take(NAMED_MAX)
        .map(|port| match port_owner::of(*port) {
            Some(owner) => format!("{port} by {owner}"),
            None => port.to_string(),
        })
        .collect();
    if taken.len() > NAMED_MAX {
        names.push(format!("{} more", taken.len() - NAMED_MAX));
    }
    format!("; taken: {}", names.join(", "))
}

/// Ports that the system assigns, less those reserved (ip-sysctl: `ip_local_port_range`); `None`
/// also when some are reserved, as the operator has then thought of it.
fn assigned_ports() -> Option<PortRange> {
    let read = |name: &str| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok();
    if !read("ip_local_reserved_ports")?.trim().is_empty() {
        return None;
    }
    let text = read("ip_local_port_range")?;
    let mut ports = text.split_ascii_whitespace().map(str::parse);
    Some(ports.next()?.ok()?..=ports.next()?.ok()?)
}
