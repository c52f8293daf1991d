//! What `doctor check` and `doctor listen` say to each other.
//!
//! One question a connection, as a line of JSON, and one line that answers it; then, for an upload
//! or a download, a stream (see [`super::stream`]) and a line that says what its other end saw.
//! Unknown fields are skipped, so builds of unlike versions understand each other enough to say
//! that they are unlike.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// A host and a port; IPv6 without brackets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// `HOST:PORT`, IPv6 in brackets.
pub(super) fn parse_endpoint(text: &str) -> Result<Endpoint, String> {
    let wanted = || format!("{text:?} is not HOST:PORT (IPv6 in brackets)");
    let (host, port) = text.rsplit_once(':').ok_or_else(wanted)?;
    let port = port.parse().map_err(|_| wanted())?;
    let host = match host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
    {
        Some(v6) if v6.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6()) => v6,
        None if !host.is_empty() && !host.contains([':', '[', ']', '/']) => host,
        Some(_) | None => return Err(wanted()),
    };
    Ok(Endpoint {
        host: host.to_owned(),
        port,
    })
}

/// First line of the checker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Question {
    /// The checker's version of hetero_kv.
    pub(super) version: String,
    pub(super) ask: Ask,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    /// Nothing more.
    Hello,
    /// The checker sends a stream; it may take so long.
    Upload { ms: u64 },
    /// The listener sends a stream until one of the two is reached.
    Download { bytes: u64, ms: u64 },
    /// The listener says, in a line of its own, what it has for RDMA
    /// ([`super::rdma::roles::Site`]). Only of one that [`Answer::knows_rdma`].
    Rdma,
}

/// The listener's line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    /// Tells the protocol from any other that answers in JSON.
    pub(super) hetero_kv_doctor: bool,
    pub(super) version: String,
    /// Lowest and highest wire version.
    pub(super) wire: (u8, u8),
    /// Random; tells this listener from any other.
    pub(super) run: String,
    /// Of the running kernel.
    #[serde(default)]
    pub(super) boot_id: String,
    /// Where an engine in its place would say that it is.
    pub(super) advertise: Endpoint,
    /// Further ports of the same host, as an engine's workers would have.
    #[serde(default)]
    pub(super) data_ports: Vec<u16>,
    /// Whether [`Ask::Rdma`] is understood.
    #[serde(default)]
    pub(super) knows_rdma: bool,
}

/// The listener's end of a stream.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Seen {
    pub(super) bytes: u64,
    pub(super) cpu_s: f64,
}

/// Identity of the running kernel; empty when it does not say.
pub(super) fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests;
