//! What one worker announces of itself: its place, its cache and the ways to read it.

use serde::{Deserialize, Serialize};

use crate::ids::{DpRank, PpRank, TpRank};
use crate::layout::RankCache;

/// One worker as its engine's control plane announces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerCard {
    /// Data parallel rank of the engine; for keys, logs and metrics.
    pub dp_rank: DpRank,
    /// Place in the tensor parallel group.
    pub tp_rank: TpRank,
    /// Place in the pipeline.
    pub pp_rank: PpRank,
    /// Where its KV lies and how it is cut.
    pub cache: RankCache,
    /// Ways to read it.
    pub endpoints: Endpoints,
}

/// Ways to read one rank's memory. Absent: not offered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoints {
    /// Same host, by `process_vm_readv`.
    #[serde(default)]
    pub process: Option<ProcessEndpoint>,
    /// Anywhere, by TCP.
    #[serde(default)]
    pub tcp: Option<TcpEndpoint>,
    /// Over an RDMA network, by one-sided reads. Left out of the bytes where it is not offered:
    /// builds that do not know it skip it where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verbs: Option<VerbsEndpoint>,
    /// By MoRI-IO. Not written where it is not offered, so that older readers see what they know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mori: Option<MoriEndpoint>,
}

/// How another process of the same host reads this one's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEndpoint {
    /// `/proc/sys/kernel/random/boot_id`: equal means the same running kernel.
    pub boot_id: String,
    /// Inode of the pid namespace: a pid means the same process only where this is equal.
    pub pid_namespace: u64,
    /// The owner's pid.
    pub pid: u32,
    /// Start time of the owner in clock ticks since boot (`/proc/PID/stat` field 22), so that a
    /// re-used pid is not taken for it.
    pub start_ticks: u64,
    /// Address of 16 random bytes in the owner, read as a probe of the permission.
    pub nonce_address: u64,
    /// What has to be read there.
    #[serde(with = "serde_bytes")]
    pub nonce: Vec<u8>,
    /// Address of the lease page: [`crate::lease_page`] says how it is laid out.
    pub lease_page_address: u64,
    /// Slots on the lease page.
    pub lease_slots: u32,
    /// First word of the lease page; drawn at random at each start.
    pub lease_page_nonce: u64,
}

/// The data listener of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpEndpoint {
    /// Host name or address as advertised; IPv6 without brackets.
    pub host: String,
    /// Port it got.
    pub port: u16,
}

/// How an RDMA device reads a worker's memory: where queue pairs are made, and the keys.
///
/// The keys open nothing by themselves. A read needs a queue pair, and those are only made with a
/// reader that has attached to the listener as [`super::data`] says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbsEndpoint {
    /// Host of the listener that queue pairs are made through, as advertised.
    pub host: String,
    /// Port of that listener.
    pub port: u16,
    /// GID of the port, 16 bytes: tells a reader which address family to take.
    #[serde(with = "serde_bytes")]
    pub gid: Vec<u8>,
    /// Remote key (`rkey`) of each region, in the order of the rank's regions.
    pub region_keys: Vec<u32>,
    /// Address of the lease page: [`crate::lease_page`] says how it is laid out.
    pub lease_page_address: u64,
    /// Remote key of the lease page.
    pub lease_page_key: u32,
    /// Slots on the lease page.
    pub lease_slots: u32,
    /// First word of the lease page; drawn at random at each start.
    pub lease_page_nonce: u64,
}

/// A MoRI-IO engine that has a worker's memory registered. Descriptors are the engine's own packed
/// bytes, which nobody but another engine reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoriEndpoint {
    /// Version of the `amd-mori` package.
    pub version: String,
    /// IPv4 address of the engine's listener.
    pub host: String,
    /// Port of the engine's listener.
    pub port: u16,
    /// Descriptor of the engine.
    #[serde(with = "serde_bytes")]
    pub engine: Vec<u8>,
    /// Registered memories; each region of the worker's cache lies in one.
    pub memories: Vec<MoriStorage>,
    /// Descriptor of the lease page's memory; [`crate::lease_page`] says how it is laid out.
    #[serde(with = "serde_bytes")]
    pub lease_page: Vec<u8>,
    /// Slots on the lease page.
    pub lease_slots: u32,
    /// First word of the lease page; drawn at random at each start.
    pub lease_page_nonce: u64,
    /// Whether the engine takes notifications of writes: an engine that sends them may use it. Not on
    /// the wire where it does not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub notifications: bool,
}

/// Memory that a MoRI-IO engine has registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoriStorage {
    /// First byte's address in the owner.
    pub base: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Descriptor of it.
    #[serde(with = "serde_bytes")]
    pub descriptor: Vec<u8>,
}
