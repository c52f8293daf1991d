//! RDMA: devices, the verbs library, and the limit on locked memory.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::Use;
use super::report::Finding;
use super::subprocess;
use crate::output::{Verdict, print};

const DEVICES: &str = "/sys/class/infiniband";

/// The library's name, as `rdma-core` installs it.
const LIBRARY: &str = "libibverbs.so.1";

const LOAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Number of CAP_IPC_LOCK in capabilities(7).
const CAP_IPC_LOCK: u32 = 14;

#[derive(clap::Args)]
pub(crate) struct MappedArgs {
    library: String,
}

/// Says whether this process has the library in its memory.
pub(crate) fn say_mapped(args: &MappedArgs) -> Result<Verdict> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let stem = args.library.trim_end_matches(".1");
    let mapped = maps.lines().any(|line| line.contains(stem));
    print(if mapped { "mapped\n" } else { "not mapped\n" })?;
    Ok(Verdict::Right)
}

/// Three findings, or one when RDMA is off.
pub(super) fn check(wanted: Use) -> Vec<Finding> {
    if wanted == Use::Off {
        return vec![Finding::ok("rdma device", "not looked for (--rdma off)")];
    }
    let required = wanted == Use::Require;
    let devices = devices();
    let used = required || !devices.is_empty();
    vec![
        device(required, &devices),
        library(required, used),
        locked_memory(required, used),
    ]
}

fn devices() -> Vec<String> {
    let Ok(entries) = fs::read_dir(DEVICES) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn device(required: bool, devices: &[String]) -> Finding {
    let check = "rdma device";
    if devices.is_empty() {
        let found = format!("no RDMA: no device in {DEVICES}");
        if !required {
            return Finding::ok(check, format!("{found}; KV goes by process memory or tcp"));
        }
        return Finding::fail(
            check,
            found,
            "load the NIC's driver (`modprobe mlx5_ib`, `rdma link`), and give the container its \
             devices (`docker run --device /dev/infiniband --network host`), or --rdma off",
        );
    }
    let states: Vec<DeviceState> = devices.iter().map(|name| DeviceState::of(name)).collect();
    let shown = states
        .iter()
        .map(|state| state.text.as_str())
        .collect::<Vec<_>>()
        .join(", ");
    if !states.iter().any(|state| state.active) {
        return Finding::fail_if(
            required,
            check,
            format!("no port is active: {shown}"),
            "plug it in or bring its link up (`rdma link`, `ip link set DEV up`)",
        );
    }
    if let Some(problem) = states
        .iter()
        .filter(|state| state.active)
        .map(|state| state.refused.as_deref())
        .min()
        .flatten()
    {
        return Finding::fail_if(
            required,
            check,
            format!("{shown}: {problem}"),
            "`docker run --device /dev/infiniband`, or a udev rule that lets this user open it",
        );
    }
    Finding::ok(check, shown)
}

struct DeviceState {
    text: String,
    active: bool,
    /// Why its device file cannot be opened.
    refused: Option<String>,
}

impl DeviceState {
    fn of(name: &str) -> Self {
        let folder = Path::new(DEVICES).join(name);
        let mut ports = Vec::new();
        let mut active = false;
        for port in fs::read_dir(folder.join("ports"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let read = |file| {
                let text = fs::read_to_string(port.path().join(file)).unwrap_or_default();
                text.trim().to_owned()
            };
            let state = read("state");
            active |= state.ends_with("ACTIVE");
            ports.push(format!(
                "port {} {state} {} {}",
                port.file_name().to_string_lossy(),
                read("link_layer"),
                read("rate")
            ));
        }
        Self {
            text: format!("{name} ({})", ports.join("; ")),
            active,
            refused: unopened(&folder),
        }
    }
}

fn unopened(device: &Path) -> Option<String> {
    let uverbs = fs::read_dir(device.join("device/infiniband_verbs"))
        .ok()?
        .flatten()
        .next()?
        .file_name();
    let file = Path::new("/dev/infiniband").join(uverbs);
    match OpenOptions::new().read(true).write(true).open(&file) {
        Ok(opened) => {
            drop::<File>(opened);
            None
        }
        Err(error) => Some(format!("{} cannot be opened: {error}", file.display())),
    }
}

/// Loads the library by the system's loader into a process of its own, which then looks whether it
/// is there: nothing links it, and its own start-up code cannot end this process.
fn library(required: bool, used: bool) -> Finding {
    let check = "rdma library";
    let problem = match load() {
        Ok(None) => return Finding::ok(check, format!("{LIBRARY} can be loaded")),
        Ok(Some(problem)) => problem,
        Err(error) => format!("could not be tried: {error}"),
    };
    let found = format!("no RDMA: {LIBRARY} cannot be loaded ({problem})");
    if !used {
        return Finding::ok(check, format!("{found}; not needed without a device"));
    }
    Finding::fail_if(
        required,
        check,
        found,
        "install it (`apt install libibverbs1 ibverbs-providers`, `dnf install libibverbs`)",
    )
}

/// `None`: it was loaded; else the loader's words.
fn load() -> std::io::Result<Option<String>> {
    let ran = subprocess::run(
        Command::new(std::env::current_exe()?)
            .args(["doctor", "mapped", LIBRARY])
            .env("LD_PRELOAD", LIBRARY),
        &[],
        LOAD_TIMEOUT,
    )?;
    if ran.stdout.trim() == "mapped" {
        return Ok(None);
    }
    // "ERROR: ld.so: object 'X' from LD_PRELOAD cannot be preloaded (REASON): ignored."
    let reason = ran
        .stderr
        .split_once("cannot be preloaded (")
        .and_then(|(_, rest)| rest.split_once(')'))
        .map(|(reason, _)| reason.to_owned());
    Ok(Some(reason.unwrap_or_else(|| ran.ending(LOAD_TIMEOUT))))
}

fn locked_memory(required: bool, used: bool) -> Finding {
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
        "`ulimit -l unlimited` before the engine starts, `docker run --ulimit memlock=-1`, \
         LimitMEMLOCK=infinity of its systemd unit, or `* - memlock unlimited` in \
         /etc/security/limits.conf",
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
