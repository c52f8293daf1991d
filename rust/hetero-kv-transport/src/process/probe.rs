//! Finds out whether a process named by an endpoint is on this host, is the right one and may be
//! read, and says in words what stands in the way.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use hetero_kv_core::wire::card::ProcessEndpoint;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::endpoint::NONCE_BYTES;
use super::vm_read::{self, Scratch};
use crate::error::{ReadFailureKind, TransportError};

/// A process that may be read.
#[derive(Debug)]
pub(super) struct Peer {
    /// Its pid in our namespace.
    pub(super) pid: libc::pid_t,
    /// Readable once it has ended.
    pub(super) pidfd: OwnedFd,
    /// What it announced.
    pub(super) endpoint: ProcessEndpoint,
}

/// Probes the endpoint.
pub(super) fn reach(endpoint: &ProcessEndpoint) -> Result<Peer, TransportError> {
    let ours = boot_id().map_err(local("read boot_id"))?;
    if ours != endpoint.boot_id {
        return Err(unreachable(
            "boot_id",
            format!(
                "another host: boot id {} here, {} there",
                ours, endpoint.boot_id
            ),
        ));
    }
    let ours = pid_namespace().map_err(local("stat /proc/self/ns/pid"))?;
    if ours != endpoint.pid_namespace {
        return Err(unreachable(
            "pid_namespace",
            format!(
                "another pid namespace: {ours} here, {} there (give both containers the host's, \
                 or one of their own)",
                endpoint.pid_namespace
            ),
        ));
    }
    let pid = libc::pid_t::try_from(endpoint.pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| unreachable("pidfd_open", format!("pid {} is none", endpoint.pid)))?;
    // Opened before the start time is compared: from here on the descriptor is of this process, so
    // a pid that is re-used later cannot be taken for it.
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| match error {
        Errno::SRCH => peer_lost("pidfd_open", format!("process {} has ended", endpoint.pid)),
        error => TransportError::system(ReadFailureKind::Local, "pidfd_open", error.into()),
    })?;
    let started = start_ticks(endpoint.pid)
        .map_err(|error| peer_lost("read /proc/PID/stat", error.to_string()))?;
    if started != endpoint.start_ticks {
        return Err(peer_lost(
            "start_ticks",
            format!(
                "pid {} is another process: started at tick {started}, not {}",
                endpoint.pid, endpoint.start_ticks
            ),
        ));
    }
    let pid = pid.as_raw_nonzero().get();
    let [nonce] = vm_read::read_words::<1, NONCE_BYTES>(
        pid,
        [endpoint.nonce_address],
        &mut Scratch::default(),
    )
    .map_err(|error| refused_read(pid, error))?;
    if endpoint.nonce != nonce {
        return Err(unreachable(
            "nonce",
            format!("pid {pid} does not hold the nonce that the source announced"),
        ));
    }
    Ok(Peer {
        pid,
        pidfd,
        endpoint: endpoint.clone(),
    })
}

fn unreachable(call: &'static str, problem: String) -> TransportError {
    TransportError::new(ReadFailureKind::Unreachable, call, problem)
}

fn peer_lost(call: &'static str, problem: String) -> TransportError {
    TransportError::new(ReadFailureKind::PeerLost, call, problem)
}

fn local(call: &'static str) -> impl Fn(io::Error) -> TransportError {
    move |error| TransportError::system(ReadFailureKind::Local, call, error)
}

fn refused_read(pid: libc::pid_t, error: io::Error) -> TransportError {
    match error.raw_os_error() {
        Some(libc::EPERM) => unreachable("process_vm_readv", why_not_permitted(pid)),
        Some(libc::ESRCH) => peer_lost("process_vm_readv", format!("process {pid} has ended")),
        Some(libc::ENOSYS) => unreachable(
            "process_vm_readv",
            "this kernel or its seccomp filter has no such call".into(),
        ),
        Some(_) | None => unreachable("process_vm_readv", format!("pid {pid}: {error}")),
    }
}

/// Names the rule that forbids reading the process, most telling first.
fn why_not_permitted(pid: libc::pid_t) -> String {
    let ours = rustix::process::geteuid().as_raw();
    let theirs = fs::metadata(format!("/proc/{pid}")).map(|status| status.uid());
    if let Ok(theirs) = theirs
        && theirs != ours
    {
        return format!(
            "not permitted: process {pid} is of uid {theirs}, this one of uid {ours}; run both as \
             one user"
        );
    }
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "" | "0" => format!(
            "not permitted to read process {pid} of the same user: it is not dumpable, or this \
             container lacks CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE), or a security \
             module forbids it"
        ),
        "1" => format!(
            "not permitted: kernel.yama.ptrace_scope is 1 and process {pid} has not allowed it; \
             set allow_ptracer on the prefill side, or sysctl kernel.yama.ptrace_scope=0"
        ),
        scope => format!(
            "not permitted: kernel.yama.ptrace_scope is {scope}; sysctl \
             kernel.yama.ptrace_scope=0, or 1 with allow_ptracer on the prefill side"
        ),
    }
}

/// Identity of the running kernel.
pub(super) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// Inode of this process's pid namespace; 0 on a kernel without them, where all processes share
/// their pids.
pub(super) fn pid_namespace() -> io::Result<u64> {
    match fs::metadata("/proc/self/ns/pid") {
        Ok(status) => Ok(status.ino()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Start time of a process in clock ticks since boot: field 22 of `/proc/PID/stat`, see proc(5).
pub(super) fn start_ticks(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_ticks(&stat).ok_or_else(|| io::Error::other("no start time in /proc/PID/stat"))
}

/// Field 22 of a line of `/proc/PID/stat`.
pub(super) fn parse_start_ticks(stat: &str) -> Option<u64> {
    // The command's name stands in parentheses and may itself contain spaces and parentheses.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}
