//! Addresses and descriptors: what MoRI-IO takes, and what of a peer's is taken.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::ops::RangeInclusive;
use std::time::Duration;

use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::wire::card::MoriEndpoint;

use super::binding::{MoriEngine, MoriError, MoriLibrary, Notifications};
use crate::error::{ReadFailureKind, TransportError};
use crate::memory::REGIONS_MAX;
use crate::net::listen::ListenAddress;
use crate::net::resolve::resolve;

/// Versions of `amd-mori` whose interface this transport is written for: from the first one, below
/// the second.
pub const MORI_VERSIONS: (&str, &str) = ("1.2.4", "1.3");

/// Longest wait for the resolver.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Most bytes of one packed descriptor: they are 65 and 164 in 1.2.4.
const DESCRIPTOR_BYTES_MAX: usize = 4096;

/// Why an engine cannot listen where it should.
#[derive(Debug, thiserror::Error)]
pub enum MoriHostError {
    /// MoRI-IO's control plane speaks IPv4 only.
    #[error(
        "transport mori: MoRI-IO listens on IPv4 addresses only, and host {0} has none: set host \
         to an IPv4 address of this machine, or another transport"
    )]
    NoIpv4(String),
    /// MoRI-IO announces the address that it binds.
    #[error(
        "transport mori: MoRI-IO announces the address that it binds, so bind_host {bind_host} \
         cannot differ from host {host}: leave bind_host empty, or set another transport"
    )]
    BindHost {
        /// The setting.
        bind_host: String,
        /// The address to announce.
        host: String,
    },
}

/// The address of this process's engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoriHost {
    address: Ipv4Addr,
    ports: Option<RangeInclusive<u16>>,
}

impl MoriHost {
    /// Takes the listeners' settings.
    pub fn new(listen: &ListenAddress) -> Result<Self, MoriHostError> {
        let host = listen.host.as_str();
        if let Some(bind_host) = listen.bind_host.as_ref().filter(|other| *other != host) {
            return Err(MoriHostError::BindHost {
                bind_host: bind_host.clone(),
                host: host.to_owned(),
            });
        }
        let address = resolve(host, 0, RESOLVE_TIMEOUT)
            .unwrap_or_default()
            .into_iter()
            .find_map(|found| match found.ip() {
                IpAddr::V4(address) => Some(address),
                IpAddr::V6(_) => None,
            })
            .ok_or_else(|| MoriHostError::NoIpv4(host.to_owned()))?;
        Ok(Self {
            address,
            ports: listen.port_range.clone(),
        })
    }

    /// Starts an engine at the first free port.
    pub(super) fn start_engine(
        &self,
        library: &dyn MoriLibrary,
        notifications: Notifications,
    ) -> Result<Box<dyn MoriEngine>, MoriError> {
        let host = self.address.to_string();
        let Some(ports) = &self.ports else {
            return library.start(&host, 0, notifications);
        };
        let mut last = None;
        for port in ports.clone() {
            // The engine does not survive a port that is taken, so it is tried before. Another
            // process may still be quicker: then the engine's own error is the answer.
            let free = TcpListener::bind((self.address, port)).is_ok();
            if !free {
                continue;
            }
            match library.start(&host, port, notifications) {
                Ok(engine) => return Ok(engine),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| {
            MoriError(format!(
                "no port of {}-{} is free on {host} for MoRI-IO's listener: widen port_range",
                ports.start(),
                ports.end()
            ))
        }))
    }
}

/// Whether a peer's announcement can be used.
pub(super) fn check(
    endpoint: &MoriEndpoint,
    regions: &[MemoryRegion],
    notifications: Notifications,
) -> Result<(), TransportError> {
    let refused =
        |problem: String| TransportError::new(ReadFailureKind::Refused, "mori endpoint", problem);
    if endpoint.memories.is_empty() || endpoint.memories.len() > REGIONS_MAX {
        return Err(refused(format!(
            "the source announces {} registered memories, not 1 to {REGIONS_MAX}",
            endpoint.memories.len()
        )));
    }
    let blobs = endpoint.memories.iter().map(|memory| &memory.descriptor);
    if let Some(large) = blobs
        .chain([&endpoint.engine, &endpoint.lease_page])
        .find(|blob| blob.is_empty() || blob.len() > DESCRIPTOR_BYTES_MAX)
    {
        return Err(refused(format!(
            "a descriptor of {} bytes is not one of 1 to {DESCRIPTOR_BYTES_MAX}",
            large.len()
        )));
    }
    if notifications == Notifications::On && !endpoint.notifications {
        return Err(refused(
            "the peer's engine takes no notifications, and the first one would stop the connection"
                .into(),
        ));
    }
    // Offsets in registered memory are addresses minus its base: each region has to lie in one.
    for (index, region) in regions.iter().enumerate() {
        if memory_of(endpoint, region).is_none() {
            return Err(refused(format!(
                "region {index} of {} bytes at {:#x} is in none of the registered memories",
                region.bytes, region.base
            )));
        }
    }
    Ok(())
}

/// Index of the registered memory that a region of the source lies in.
pub(super) fn memory_of(endpoint: &MoriEndpoint, region: &MemoryRegion) -> Option<usize> {
    endpoint
        .memories
        .iter()
        .position(|memory| contains(memory.base, memory.bytes, region))
}

/// Whether a region lies in `bytes` bytes at `base`.
pub(super) fn contains(base: u64, bytes: u64, region: &MemoryRegion) -> bool {
    region
        .base
        .checked_sub(base)
        .and_then(|before| bytes.checked_sub(before))
        .is_some_and(|left| region.bytes <= left)
}

/// Storages to register for some regions: the engine keeps one registration for each first byte,
/// so regions that begin at the same one share the longest.
pub(super) fn storages(regions: &[MemoryRegion]) -> Vec<MemoryRegion> {
    let mut longest: Vec<MemoryRegion> = Vec::new();
    for region in regions {
        match longest.iter_mut().find(|found| found.base == region.base) {
            Some(found) => found.bytes = found.bytes.max(region.bytes),
            None => longest.push(*region),
        }
    }
    longest
}
