//! What goes wrong with RDMA: at start, in words that say the way out; in flight, by completion
//! status.

use std::fmt;
use std::io;

use super::sys;
use crate::error::{ReadFailureKind, TransportError};

/// Ways out, each the end of an error's text and a hint of `hetero-kv doctor`.
const INSTALL: &str =
    "install it (`apt install libibverbs1 ibverbs-providers`, `dnf install libibverbs`)";
const DRIVER: &str = "load the NIC's driver (`rdma link` lists devices), and give a container its \
                      own (`docker run --device /dev/infiniband --network host`)";
const LINK_UP: &str = "plug it in, or bring its link up (`rdma link`, `ip link set DEV up`)";
const ADDRESS: &str = "give its network device an address (`ip addr add`), or set verbs_gid_index";

/// What raises the limit on locked memory.
pub const RAISE_LOCKED_MEMORY: &str = "raise it: `ulimit -l unlimited` before the engine starts, \
                                       `docker run --ulimit memlock=-1`, LimitMEMLOCK=infinity in \
                                       a systemd unit, or `* - memlock unlimited` in \
                                       /etc/security/limits.conf";

/// Why there is no RDMA, or why a call of the library failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// The library is not there, or not whole.
    #[error("no RDMA: libibverbs cannot be loaded ({0}); {INSTALL}")]
    NoLibrary(String),
    /// The library finds no device.
    #[error("no RDMA: libibverbs finds no device ({0}); {DRIVER}")]
    NoDevice(String),
    /// A device is named that does not exist.
    #[error("verbs_device {wanted} does not exist; set one of: {}", .have.join(", "))]
    NoSuchDevice {
        /// As set.
        wanted: String,
        /// Those that exist.
        have: Vec<String>,
    },
    /// No device can be used; the name of each, and why not.
    #[error("no RDMA: no device can be used: {}", each(.0, Self::to_string))]
    NoneUsable(Vec<(String, VerbsError)>),
    /// A port is named that the device does not have.
    #[error("verbs_port {wanted} does not exist; {device} has ports 1 to {ports}")]
    NoSuchPort {
        /// Name of the device.
        device: String,
        /// As set.
        wanted: u8,
        /// How many it has.
        ports: u8,
    },
    /// The port carries nothing.
    #[error("port {port} of {device} is {state}, not ACTIVE; {LINK_UP}")]
    PortDown {
        /// Name of the device.
        device: String,
        /// Its port.
        port: u8,
        /// As the device says.
        state: &'static str,
    },
    /// The port has no address that RDMA between hosts could use.
    #[error("port {port} of {device} has no {wanted}: {found}; {ADDRESS}")]
    NoGid {
        /// Name of the device.
        device: String,
        /// Its port.
        port: u8,
        /// What was looked for.
        wanted: String,
        /// What is there.
        found: String,
    },
    /// The kernel does not let this process pin so much.
    #[error(
        "cannot register {bytes} bytes of KV memory for RDMA: this process may lock {limit_bytes} \
         bytes (`ulimit -l`); {RAISE_LOCKED_MEMORY}"
    )]
    LockedMemory {
        /// Asked for.
        bytes: u64,
        /// Limit of this process.
        limit_bytes: u64,
    },
    /// What one side says does not fit the other.
    #[error("{0}")]
    Mismatch(String),
    /// A call failed.
    #[error("{verb}: {problem}")]
    Call {
        /// Name of the call.
        verb: &'static str,
        /// The system's words.
        problem: String,
    },
}

/// Devices with what is wrong with each.
fn each(devices: &[(String, VerbsError)], text: impl Fn(&VerbsError) -> String) -> String {
    let shown: Vec<String> = devices
        .iter()
        .map(|(name, error)| format!("{name}: {}", text(error)))
        .collect();
    shown.join("; ")
}

impl VerbsError {
    /// The text in two parts: what is wrong, and the way out; the second is empty where the first
    /// says it all.
    pub fn parts(&self) -> (String, String) {
        let way_out = match self {
            Self::NoLibrary(_) => INSTALL.to_owned(),
            Self::NoDevice(_) => DRIVER.to_owned(),
            Self::NoSuchDevice { have, .. } => format!("set one of: {}", have.join(", ")),
            Self::NoneUsable(devices) => {
                let found = each(devices, |error| error.parts().0);
                let mut ways: Vec<String> = Vec::new();
                for (_, error) in devices {
                    let way = error.parts().1;
                    if !way.is_empty() && !ways.contains(&way) {
                        ways.push(way);
                    }
                }
                return (
                    format!("no RDMA: no device can be used: {found}"),
                    ways.join("; "),
                );
            }
            Self::NoSuchPort { device, ports, .. } => format!("{device} has ports 1 to {ports}"),
            Self::PortDown { .. } => LINK_UP.to_owned(),
            Self::NoGid { .. } => ADDRESS.to_owned(),
            Self::LockedMemory { .. } => RAISE_LOCKED_MEMORY.to_owned(),
            Self::Mismatch(_) | Self::Call { .. } => String::new(),
        };
        let whole = self.to_string();
        let problem = whole.strip_suffix(&way_out).unwrap_or(&whole);
        (problem.trim_end_matches("; ").to_owned(), way_out)
    }

    /// A call that gave this error number.
    pub(super) fn call(verb: &'static str, error: &io::Error) -> Self {
        Self::Call {
            verb,
            problem: error.to_string(),
        }
    }

    /// A call that failed and set `errno`.
    pub(super) fn last(verb: &'static str) -> Self {
        Self::call(verb, &io::Error::last_os_error())
    }
}

/// Verbs of work requests, for errors that name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// One-sided read.
    Read,
    /// One-sided write.
    Write,
    /// One-sided write that consumes a receive request and carries 32 bits.
    WriteWithImmediate,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "RDMA READ",
            Self::Write => "RDMA WRITE",
            Self::WriteWithImmediate => "RDMA WRITE WITH IMMEDIATE",
        })
    }
}

/// How a work request ended badly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkFailure {
    /// Its queue pair had failed before it was carried out.
    Flushed,
    /// The peer's end acknowledged nothing, however often it was sent.
    RetriesExceeded,
    /// The peer's end had no receive request ready, however often it was asked.
    ReceiverNotReady,
    /// The peer's memory key does not allow it: unknown, revoked, too short or of other rights.
    RemoteAccess,
    /// The peer's end refuses or cannot carry out the request.
    RemoteOperation,
    /// This side's memory key does not allow it.
    LocalAccess,
    /// Anything else, with the library's number of it.
    Other(u32),
}

impl WorkFailure {
    /// The failure that a completion's status stands for; `None` for success.
    pub(super) fn of(status: sys::ibv_wc_status) -> Option<Self> {
        Some(match status {
            sys::IBV_WC_SUCCESS => return None,
            sys::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            sys::IBV_WC_RETRY_EXC_ERR | sys::IBV_WC_RESP_TIMEOUT_ERR => Self::RetriesExceeded,
            sys::IBV_WC_RNR_RETRY_EXC_ERR => Self::ReceiverNotReady,
            sys::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            sys::IBV_WC_REM_INV_REQ_ERR | sys::IBV_WC_REM_OP_ERR | sys::IBV_WC_REM_ABORT_ERR => {
                Self::RemoteOperation
            }
            sys::IBV_WC_LOC_PROT_ERR | sys::IBV_WC_LOC_LEN_ERR | sys::IBV_WC_LOC_ACCESS_ERR => {
                Self::LocalAccess
            }
            other => Self::Other(other),
        })
    }

    /// What it means for a read of ours.
    pub fn kind(self) -> ReadFailureKind {
        match self {
            Self::Flushed
            | Self::RetriesExceeded
            | Self::ReceiverNotReady
            | Self::RemoteOperation
            | Self::Other(_) => ReadFailureKind::PeerLost,
            Self::RemoteAccess => ReadFailureKind::OutOfBounds,
            Self::LocalAccess => ReadFailureKind::Local,
        }
    }

    /// As an error of a transport, naming the verb.
    pub fn error(self, verb: Verb) -> TransportError {
        TransportError::new(self.kind(), "ibv_poll_cq", format!("{verb}: {self}"))
    }
}

impl fmt::Display for WorkFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flushed => f.write_str("flushed: the queue pair had failed before"),
            Self::RetriesExceeded => {
                f.write_str("retries exceeded: the peer's end answers nothing")
            }
            Self::ReceiverNotReady => f.write_str(
                "receiver-not-ready retries exceeded: the peer posted no receive request",
            ),
            Self::RemoteAccess => {
                f.write_str("remote access error: the peer's memory key does not cover it")
            }
            Self::RemoteOperation => f.write_str("the peer's end refuses the request"),
            Self::LocalAccess => {
                f.write_str("local access error: this side's memory key does not cover it")
            }
            Self::Other(status) => write!(f, "completion status {status}"),
        }
    }
}
