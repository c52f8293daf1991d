//! The limit on locked memory: whatever a device may reach is pinned.

use std::fs;

use hetero_kv_transport::verbs::RAISE_LOCKED_MEMORY;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::doctor::report::Finding;

/// Number of CAP_IPC_LOCK in capabilities(7).
const CAP_IPC_LOCK: u32 = 14;

/// `used`: there is a device, or one is required.
pub(super) fn check(required: bool, used: bool) -> Finding {
    let check = "locked memory";
    let (soft, hard) = match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok(limits) => limits,
        Err(error) => {
            return Finding::fail(check, format!("getrlimit: {error}"), "see `ulimit -l`");
        }
    };
    let text = |limit: u64| {
        if limit == RLIM_INFINITY {
            "unlimited".to_owned()
        } else {
            format!("{} KiB", limit >> 10)
        }
    };
    let found = format!("{} (hard limit {})", text(soft), text(hard));
    // What is registered is the KV cache, which may be nearly all memory.
    if soft == RLIM_INFINITY || memory_bytes().is_some_and(|bytes| soft >= bytes) {
        return Finding::ok(check, found);
    }
    if has_capability(CAP_IPC_LOCK) {
        return Finding::ok(check, format!("{found}, not applied to CAP_IPC_LOCK"));
    }
    if !used {
        return Finding::ok(check, format!("{found}; only RDMA needs more"));
    }
    Finding::fail_if(
        required,
        check,
        format!("{found}: the KV cache cannot be registered for RDMA"),
        RAISE_LOCKED_MEMORY,
    )
}

fn memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

/// Whether this process has the capability now.
fn has_capability(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    effective.is_some_and(|bits| bits & (1 << number) != 0)
}
