//! Limits of this user and container on descriptors and threads.

use std::fs;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::report::Finding;

/// Descriptors that vLLM itself, torch and its logs use in one process, rounded up.
const ENGINE_DESCRIPTORS: u64 = 512;

/// Descriptors of ours per process that do not depend on peers: listeners, wakers, poll.
const OWN_DESCRIPTORS: u64 = 32;

/// Descriptors for each rank of a peer: its data connection, a waker, a pidfd.
const DESCRIPTORS_PER_PEER_RANK: u64 = 3;

/// Threads that one vLLM process starts by itself on a small host, rounded up.
const ENGINE_THREADS: u64 = 64;

/// Threads of ours per process that do not depend on peers.
const OWN_THREADS: u64 = 4;

fn limit_text(limit: u64) -> String {
    if limit == RLIM_INFINITY {
        "unlimited".into()
    } else {
        limit.to_string()
    }
}

/// Whether one process may open a connection to each rank of its peers.
pub(super) fn descriptors(workers: u32, peers: u32) -> Finding {
    let check = "descriptors";
    let (soft, hard) = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok(limits) => limits,
        Err(error) => {
            return Finding::fail(check, format!("getrlimit: {error}"), "see `ulimit -n`");
        }
    };
    // The scheduler process has one connection per peer engine, at most as many as peer ranks.
    let needed = ENGINE_DESCRIPTORS
        + OWN_DESCRIPTORS
        + DESCRIPTORS_PER_PEER_RANK * u64::from(peers.max(workers));
    let found = format!(
        "{} per process (hard limit {}), {needed} needed with {peers} peer ranks",
        limit_text(soft),
        limit_text(hard)
    );
    if soft < needed {
        return Finding::fail(
            check,
            found,
            format!(
                "`ulimit -n {0}` before the engine starts, LimitNOFILE={0} of its systemd unit, or \
                 `docker run --ulimit nofile={0}`",
                needed.next_power_of_two()
            ),
        );
    }
    Finding::ok(check, found)
}

/// Whether this user and container may start the threads of all engines of this host.
pub(super) fn threads(engines: u32, workers: u32, peers: u32) -> Finding {
    let check = "threads";
    let processes = u64::from(engines) * (1 + u64::from(workers));
    let needed = processes * (ENGINE_THREADS + OWN_THREADS)
        + u64::from(engines) * u64::from(workers) * u64::from(peers);
    let mut lowest: Option<(u64, String, String)> = None;
    let mut limit = |left: u64, name: String, mend: String| {
        if lowest.as_ref().is_none_or(|(least, ..)| left < *least) {
            lowest = Some((left, name, mend));
        }
    };
    if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NPROC)
        && soft != RLIM_INFINITY
        && !rustix::process::geteuid().is_root()
    {
        limit(
            soft,
            format!("RLIMIT_NPROC {soft}"),
            format!("`ulimit -u {}`", (soft + needed).next_power_of_two()),
        );
    }
    if let Some((most, current)) = cgroup_pids() {
        limit(
            most.saturating_sub(current),
            format!("pids.max {most}, {current} in use"),
            format!(
                "`docker run --pids-limit {}`",
                (current + needed).next_power_of_two()
            ),
        );
    }
    let kernel = fs::read_to_string("/proc/sys/kernel/threads-max").ok();
    if let Some(most) = kernel.and_then(|text| text.trim().parse().ok()) {
        limit(
            most,
            format!("kernel.threads-max {most}"),
            format!(
                "`sysctl -w kernel.threads-max={}`",
                needed.next_power_of_two() * 2
            ),
        );
    }
    let wanted = format!("about {needed} needed for {processes} processes");
    match lowest {
        Some((left, name, mend)) if left < needed => {
            Finding::fail(check, format!("{name}: {left} left, {wanted}"), mend)
        }
        Some((_, name, _)) => Finding::ok(check, format!("{wanted}; least limit: {name}")),
        None => Finding::ok(check, format!("{wanted}; no limit found")),
    }
}

/// Most and present number of threads in this process's cgroup (cgroup v2, `pids` controller).
fn cgroup_pids() -> Option<(u64, u64)> {
    let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = membership
        .lines()
        .find_map(|line| line.strip_prefix("0::"))?;
    let number = |name: &str| {
        let text = fs::read_to_string(format!("/sys/fs/cgroup{path}/{name}")).ok()?;
        // "max" is no limit.
        text.trim().parse::<u64>().ok()
    };
    Some((number("pids.max")?, number("pids.current")?))
}
