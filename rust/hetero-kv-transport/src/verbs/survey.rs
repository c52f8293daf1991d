//! Every RDMA device of this host with its ports, for somebody who asks why one is not used.

use std::fmt;

use super::device::{self, Context};
use super::error::VerbsError;
use super::gid::{self, Found};
use super::path::mtu_bytes;

/// A device that the library finds.
#[derive(Clone, Debug)]
pub struct DeviceSeen {
    /// As `rdma link` shows it.
    pub name: String,
    /// Its ports, or why it cannot be opened.
    pub ports: Result<Vec<PortSeen>, VerbsError>,
}

/// A port of a device.
#[derive(Clone, Debug)]
pub struct PortSeen {
    /// From 1.
    pub number: u8,
    /// In words; `ACTIVE` where it carries packets.
    pub state: &'static str,
    /// RoCE, or else InfiniBand.
    pub ethernet: bool,
    /// Largest payload of a packet at the moment, in bytes.
    pub mtu_bytes: u32,
    /// Largest payload that the port could have, in bytes.
    pub mtu_bytes_max: u32,
    gids: Vec<Found>,
}

/// What the library finds on this host.
///
/// # Errors
/// [`VerbsError::NoLibrary`] and [`VerbsError::NoDevice`].
pub fn survey() -> Result<Vec<DeviceSeen>, VerbsError> {
    device::each(|name, opened| DeviceSeen {
        name: name.to_owned(),
        ports: opened.and_then(ports),
    })
}

fn ports(context: &std::sync::Arc<Context>) -> Result<Vec<PortSeen>, VerbsError> {
    (1..=context.limits()?.phys_port_cnt)
        .map(|number| {
            let port = device::query_port(context, number)?;
            Ok(PortSeen {
                number,
                state: device::port_state(port.state).unwrap_or_else(|state| state),
                ethernet: device::is_ethernet(&port),
                mtu_bytes: mtu_bytes(port.active_mtu),
                mtu_bytes_max: mtu_bytes(port.max_mtu),
                gids: gid::gids(context, number, port.gid_tbl_len),
            })
        })
        .collect()
}

impl fmt::Display for DeviceSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.ports {
            Err(error) => write!(f, "{}: {error}", self.name),
            Ok(ports) => {
                let shown: Vec<String> = ports.iter().map(PortSeen::to_string).collect();
                write!(f, "{} ({})", self.name, shown.join("; "))
            }
        }
    }
}

impl fmt::Display for PortSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let link = if self.ethernet {
            "Ethernet"
        } else {
            "InfiniBand"
        };
        write!(
            f,
            "port {} {}, {link}, MTU {} of {}, GIDs: {}",
            self.number,
            self.state,
            self.mtu_bytes,
            self.mtu_bytes_max,
            gid::listed(&self.gids, self.ethernet)
        )
    }
}
