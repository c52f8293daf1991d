//! What a lab takes from the host: processes, memory, descriptors, figures of `/proc`.

use std::fmt::Debug;
use std::fs;
use std::io;
use std::mem;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use hetero_kv_transport::control::ACKNOWLEDGED;
use nix::sys::resource::{UsageWho, getrusage};
use rustix::process::{Resource, Signal, getrlimit, set_parent_process_death_signal};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{EnvFilter, filter_fn};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Every listener of a lab is here.
pub(super) const LOCALHOST: &str = "127.0.0.1";

/// Starts this executable again as one of a lab's processes. It speaks over its stdin and stdout.
pub(super) fn spawn(subcommand: &str, own_group: bool) -> io::Result<Child> {
    // The running file, also when a build has replaced the one of that name.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("hetero-kv")
        .arg(subcommand)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    if own_group {
        command.process_group(0);
    }
    command.spawn()
}

/// The kernel ends this process with the one that started it, however that ends.
pub(super) fn die_with_parent() -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("PR_SET_PDEATHSIG")?;
    // A parent that ended before the call has closed our stdin, so the first read ends us.
    Ok(())
}

/// The transport's log, filtered by `HETERO_KV_LOG`; without it none. With `acknowledgements`,
/// [`take_acknowledged`] has those that this process hears.
pub(super) fn log_to_stderr(acknowledgements: bool) {
    let filter = EnvFilter::try_from_env("HETERO_KV_LOG").unwrap_or_else(|_| EnvFilter::new("off"));
    let log = fmt::layer().with_writer(io::stderr).with_filter(filter);
    let heard = acknowledgements
        .then(|| Heard.with_filter(filter_fn(|event| event.target() == ACKNOWLEDGED)));
    // Fails only where a subscriber is set already, which is as good.
    let _ = tracing_subscriber::registry()
        .with(log)
        .with(heard)
        .try_init();
}

static ACKNOWLEDGED_TRANSFERS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Transfers whose acknowledgement came since the last call, in hexadecimal.
pub(super) fn take_acknowledged() -> Vec<String> {
    let mut transfers = ACKNOWLEDGED_TRANSFERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    mem::take(&mut *transfers)
}

/// Notes the transport's event for each acknowledgement.
struct Heard;

impl<S: Subscriber> Layer<S> for Heard {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        event.record(&mut TransferIdOf);
    }
}

struct TransferIdOf;

impl Visit for TransferIdOf {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "transfer_id" {
            ACKNOWLEDGED_TRANSFERS
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(format!("{value:?}"));
        }
    }
}

/// Bytes that can be used without swapping.
pub(super) fn memory_available_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    field_kib(&text, "MemAvailable:")
        .map(|kib| kib.saturating_mul(1024))
        .context("/proc/meminfo has no MemAvailable")
}

/// Descriptors that this process may have.
pub(super) fn descriptors_max() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Resident bytes; `None` when the process is gone.
pub(super) fn resident_bytes(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    field_kib(&text, "VmRSS:").map(|kib| kib.saturating_mul(1024))
}

/// Processor seconds of this process and of all its children that have been waited for.
pub(super) fn cpu_seconds() -> f64 {
    [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN]
        .into_iter()
        // Fails for no valid argument.
        .filter_map(|who| getrusage(who).ok())
        .flat_map(|usage| [usage.user_time(), usage.system_time()])
        .map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6)
        .sum()
}

fn field_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}
