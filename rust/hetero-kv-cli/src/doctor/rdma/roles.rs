//! Children of the RDMA checks, which load the library: one looks, one holds bytes, one reads them.

use std::io::{self, Read};
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::wire::card::VerbsEndpoint;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::net::listen::ListenAddress;
use hetero_kv_transport::verbs::trial::{TrialError, TrialHolder, TrialSite, try_read};
use hetero_kv_transport::verbs::{VerbsError, VerbsOptions, probe, survey};
use serde::{Deserialize, Serialize};

use super::ChoiceFlags;
use crate::doctor::ports::{PortRange, parse_range};
use crate::output::{Verdict, print};

/// For a trial's connection and its bytes: RDMA itself gives up after two seconds.
pub(super) const TRIAL_TIMEOUT: Duration = Duration::from_secs(15);

/// Longest order to the reader.
const ORDER_BYTES_MAX: u64 = 4096;

/// Characters of a text that goes to another host in one line.
const TEXT_CHARS_MAX: usize = 800;

/// What kind of thing is missing, for findings that depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::doctor) enum Trouble {
    NoLibrary,
    NoDevice,
    Other,
}

/// Why there is no RDMA, and the way out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::doctor) struct Lack {
    pub(super) trouble: Trouble,
    pub(in crate::doctor) found: String,
    /// Empty where `found` says it all.
    pub(in crate::doctor) mend: String,
}

impl Lack {
    fn of(error: &VerbsError) -> Self {
        let (found, mend) = error.parts();
        let cut = |text: String| text.chars().take(TEXT_CHARS_MAX).collect();
        Self {
            trouble: match error {
                VerbsError::NoLibrary(_) => Trouble::NoLibrary,
                VerbsError::NoDevice(_) => Trouble::NoDevice,
                VerbsError::NoSuchDevice { .. }
                | VerbsError::NoneUsable(_)
                | VerbsError::NoSuchPort { .. }
                | VerbsError::PortDown { .. }
                | VerbsError::NoGid { .. }
                | VerbsError::LockedMemory { .. }
                | VerbsError::Mismatch(_)
                | VerbsError::Call { .. } => Trouble::Other,
            },
            found: cut(found),
            mend: cut(mend),
        }
    }

    /// The way out, `other` where the transport knows none.
    pub(super) fn mend_or(&self, other: &str) -> String {
        if self.mend.is_empty() {
            other.to_owned()
        } else {
            self.mend.clone()
        }
    }
}

/// What one host has.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Looked {
    /// The library's file.
    pub(super) library: String,
    /// Every device with its ports, in words.
    pub(super) seen: Vec<String>,
    /// Device, port and GID that an engine takes.
    pub(super) taken: Result<String, Lack>,
    /// What brings a device.
    pub(super) no_device_mend: String,
}

#[derive(clap::Args)]
pub(crate) struct LookArgs {
    #[command(flatten)]
    choice: ChoiceFlags,
    #[arg(long)]
    host: Option<String>,
}

/// Says what the library finds.
pub(crate) fn look(args: &LookArgs) -> Result<Verdict> {
    let taken = probe(&args.choice.choice(), address(args.host.as_deref()));
    let seen = survey().unwrap_or_default();
    let looked = Looked {
        library: mapped_library(),
        seen: seen.iter().map(ToString::to_string).collect(),
        taken: taken.map_err(|error| Lack::of(&error)),
        no_device_mend: VerbsError::NoDevice(String::new()).parts().1,
    };
    print(&format!("{}\n", serde_json::to_string(&looked)?))?;
    Ok(Verdict::Right)
}

/// A name is not resolved: the GID is that of an address.
fn address(host: Option<&str>) -> Option<IpAddr> {
    host?.parse().ok()
}

/// File of the library that this process has mapped.
fn mapped_library() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let file = maps
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().nth(5))
        .find(|file| {
            file.rsplit('/')
                .next()
                .is_some_and(|name| name.contains("ibverbs"))
        });
    file.unwrap_or("libibverbs").to_owned()
}

/// What a checker is told of the holder.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::doctor) enum Site {
    /// Started with `--rdma off`.
    Off,
    /// It has no RDMA.
    Lacks(Lack),
    /// It holds bytes.
    Here(Held),
}

/// Bytes that a trial reads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::doctor) struct Held {
    endpoint: VerbsEndpoint,
    region: MemoryRegion,
    pub(super) mtu_bytes: u32,
    pub(in crate::doctor) device: String,
}

#[derive(clap::Args)]
pub(crate) struct HolderArgs {
    #[command(flatten)]
    choice: ChoiceFlags,
    #[arg(long)]
    host: String,
    #[arg(long)]
    bind_host: Option<String>,
    #[arg(long, value_parser = parse_range)]
    port_range: Option<PortRange>,
}

/// Holds bytes until its input ends, and says where they are.
pub(crate) fn hold(args: &HolderArgs) -> Result<Verdict> {
    let address = ListenAddress {
        host: args.host.clone(),
        bind_host: args.bind_host.clone(),
        port_range: args.port_range.clone(),
        ports_needed: 1,
    };
    let holder = TrialHolder::start(options(&args.choice), address);
    let site = match &holder {
        Ok(holder) => {
            let TrialSite {
                endpoint,
                region,
                mtu_bytes,
                device,
            } = holder.site().clone();
            Site::Here(Held {
                endpoint,
                region,
                mtu_bytes,
                device,
            })
        }
        Err(error) => Site::Lacks(lack(error)),
    };
    print(&format!("{}\n", serde_json::to_string(&site)?))?;
    io::copy(&mut io::stdin().lock(), &mut io::sink()).context("standard input")?;
    drop(holder);
    Ok(Verdict::Right)
}

fn options(choice: &ChoiceFlags) -> VerbsOptions {
    VerbsOptions {
        choice: choice.choice(),
        ..VerbsOptions::default()
    }
}

/// What became of a trial.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// All bytes were read, and were right.
    Read {
        device: String,
        mtu_bytes: u32,
        connect_ms: f64,
        read_ms: f64,
    },
    /// This side has no RDMA.
    Lacks(Lack),
    /// Both sides have RDMA, and it does not go from one to the other.
    Fails(Lack),
}

#[derive(clap::Args)]
pub(crate) struct ReaderArgs {
    #[command(flatten)]
    choice: ChoiceFlags,
    #[arg(long)]
    host: Option<String>,
}

/// Reads what it is told of on standard input, and says what became of it.
pub(crate) fn read(args: &ReaderArgs) -> Result<Verdict> {
    let mut order = String::new();
    io::stdin()
        .lock()
        .take(ORDER_BYTES_MAX)
        .read_to_string(&mut order)?;
    let held: Held = serde_json::from_str(&order).context("order on standard input")?;
    let site = TrialSite {
        endpoint: held.endpoint,
        region: held.region,
        mtu_bytes: held.mtu_bytes,
        device: held.device,
    };
    let here = address(args.host.as_deref());
    let outcome = match try_read(options(&args.choice), here, &site, TRIAL_TIMEOUT) {
        Ok(tried) => Outcome::Read {
            device: tried.device,
            mtu_bytes: tried.mtu_bytes,
            connect_ms: tried.connected.as_secs_f64() * 1e3,
            read_ms: tried.read.as_secs_f64() * 1e3,
        },
        Err(error @ (TrialError::Device(_) | TrialError::Prepare(_))) => {
            Outcome::Lacks(lack(&error))
        }
        Err(error) => Outcome::Fails(lack(&error)),
    };
    print(&format!("{}\n", serde_json::to_string(&outcome)?))?;
    Ok(Verdict::Right)
}

fn lack(error: &TrialError) -> Lack {
    let mend = match error {
        TrialError::Device(error) => return Lack::of(error),
        TrialError::Serve(_) => "give --port-range one more port, for RDMA's own listener",
        TrialError::Prepare(_) => "run doctor with the limits of the engines (`ulimit -a`)",
        TrialError::Connect(_) => {
            "see that both GIDs are of one network and reach each other (`rdma link`, `ip addr`), \
             and let UDP port 4791 (RoCE v2) through the firewall in both directions"
        }
        TrialError::Read { error, .. } => match error.kind {
            ReadFailureKind::PeerLost | ReadFailureKind::Deadline => {
                "packets of that size vanish on the way: set one MTU on both hosts' network \
                 devices and on every switch between them (`ip link set DEV mtu N`), with room \
                 for RoCE's headers"
            }
            ReadFailureKind::LeaseGone
            | ReadFailureKind::Cancelled
            | ReadFailureKind::Unreachable
            | ReadFailureKind::Refused
            | ReadFailureKind::OutOfBounds
            | ReadFailureKind::Incarnation
            | ReadFailureKind::NotQuiesced
            | ReadFailureKind::Local => {
                "`dmesg` on both hosts, and the NIC's counters (`rdma statistic`)"
            }
        },
        TrialError::Differs(_) => "report it, and set transport to tcp: this RDMA is broken",
    };
    Lack {
        trouble: Trouble::Other,
        found: error.to_string().chars().take(TEXT_CHARS_MAX).collect(),
        mend: mend.into(),
    }
}
