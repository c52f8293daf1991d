//! Whether one engine of this host may read another's memory, which `process` transport does.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::errno::Errno;

use super::process_roles::{Held, Order, Outcome};
use super::report::Finding;
use super::subprocess::{self, Group};

const CHECK: &str = "process memory";

/// The holder fills 64 MiB before it says so.
const HOLDER_TIMEOUT: Duration = Duration::from_secs(20);

/// Beyond the measurement itself.
const READER_TIMEOUT: Duration = Duration::from_secs(20);

/// Longest line of the holder.
const LINE_BYTES_MAX: u64 = 4096;

/// What the operator wants of it.
pub(super) struct Wanted {
    /// Without it engines fail, instead of going by TCP.
    pub(super) required: bool,
    /// The connector's setting.
    pub(super) allow_ptracer: bool,
    /// Length of the measurement.
    pub(super) seconds: u32,
}

/// One finding on the permission, and one on throughput where it is given.
pub(super) fn check(wanted: &Wanted) -> Vec<Finding> {
    match attempt(wanted.allow_ptracer, wanted.seconds) {
        Err(error) => vec![Finding::fail(
            CHECK,
            format!("could not be tried: {error:#}"),
            "run doctor as the user and in the container of the engines",
        )],
        Ok((
            _,
            Outcome::Read {
                bytes,
                wall_s,
                cpu_s,
            },
        )) => {
            let mut findings = vec![Finding::ok(
                CHECK,
                "one process reads another's (nonce read)",
            )];
            if wanted.seconds > 0 {
                let rate = bytes as f64 / 1e6 / wall_s.max(1e-9);
                findings.push(Finding::ok(
                    "process copy",
                    format!(
                        "{rate:.0} MB/s, {cpu_s:.2} CPU seconds of the reader for {:.1} GB",
                        bytes as f64 / 1e9
                    ),
                ));
            }
            findings
        }
        Ok((_, Outcome::Differs(what))) => vec![Finding::fail(
            CHECK,
            format!("{what} was read wrong"),
            "report it: this kernel's process_vm_readv is broken; set transport to tcp",
        )],
        Ok((dumpable, Outcome::Errno(errno))) => {
            vec![refused(Errno::from_raw(errno), dumpable, wanted)]
        }
    }
}

/// Starts both processes; whether the holder is dumpable, and what the reader says.
fn attempt(allow_ptracer: bool, seconds: u32) -> Result<(bool, Outcome)> {
    let this = std::env::current_exe().context("own executable")?;
    let mut command = Command::new(&this);
    command.args(["doctor", "holder"]);
    if allow_ptracer {
        command.arg("--allow-ptracer");
    }
    let mut holder = Group::start(
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null()),
    )
    .context("start of the holder")?;
    let stdout = holder.0.stdout.take().context("holder's output")?;
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout.take(LINE_BYTES_MAX)).read_line(&mut line);
        let _ = sender.send(read.map(|_| line));
    });
    let line = receiver
        .recv_timeout(HOLDER_TIMEOUT)
        .map_err(|_| anyhow!("the holder did not start in {} s", HOLDER_TIMEOUT.as_secs()))??;
    let held: Held = serde_json::from_str(&line).context("the holder did not start")?;
    let dumpable = held.dumpable;
    let order = serde_json::to_vec(&Order { held, seconds })?;
    let limit = READER_TIMEOUT + Duration::from_secs(seconds.into());
    let ran = subprocess::run(
        Command::new(&this).args(["doctor", "reader"]),
        &order,
        limit,
    )
    .context("start of the reader")?;
    let outcome = serde_json::from_str(&ran.stdout)
        .map_err(|_| anyhow!("the reader did not answer, {}", ran.ending(limit)))?;
    Ok((dumpable, outcome))
}

/// Names the rule that stands in the way, most telling first.
fn refused(errno: Errno, dumpable: bool, wanted: &Wanted) -> Finding {
    let yama = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let (why, mend): (String, String) = if errno == Errno::ENOSYS {
        (
            "this kernel or a seccomp filter does not have the call".into(),
            "`docker run --cap-add SYS_PTRACE`, or a kernel with CONFIG_CROSS_MEMORY_ATTACH".into(),
        )
    } else if !dumpable {
        (
            "processes of this user are not dumpable (the executable's file is not readable by \
             this user, or it has file capabilities)"
                .into(),
            "make the interpreter's and this executable's file readable (`chmod a+r`), without \
             file capabilities (`setcap -r`)"
                .into(),
        )
    } else {
        match yama.trim() {
            "1" if !wanted.allow_ptracer => {
                let tried = match attempt(true, 0) {
                    Ok((_, Outcome::Read { .. })) => " (tried here: it works)",
                    Ok((_, Outcome::Errno(_) | Outcome::Differs(_))) | Err(_) => "",
                };
                (
                    "kernel.yama.ptrace_scope is 1".into(),
                    format!(
                        "set \"allow_ptracer\": true on the prefill side{tried}, or `sysctl -w \
                         kernel.yama.ptrace_scope=0`"
                    ),
                )
            }
            "2" | "3" => (
                format!("kernel.yama.ptrace_scope is {}", yama.trim()),
                "`sysctl -w kernel.yama.ptrace_scope=0` (3 stays until the next boot), or 1 with \
                 \"allow_ptracer\": true"
                    .into(),
            ),
            scope => not_yama(scope),
        }
    };
    Finding::fail_if(
        wanted.required,
        CHECK,
        format!("process_vm_readv between two processes of this user: {errno}: {why}"),
        if wanted.required {
            format!("{mend}; or set transport to auto, and engines of this host go by tcp")
        } else {
            format!("{mend}; until then engines of this host go by tcp")
        },
    )
}

fn not_yama(scope: &str) -> (String, String) {
    let scope = if scope.is_empty() { "none" } else { scope };
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let filtered = status
        .lines()
        .any(|line| line.split_ascii_whitespace().eq(["Seccomp:", "2"]));
    if filtered {
        (
            format!("a seccomp filter is active, which forbids it (ptrace_scope {scope})"),
            "`docker run --cap-add SYS_PTRACE` (its default profile then allows the call), or a \
             profile of your own (`--security-opt seccomp=FILE`)"
                .into(),
        )
    } else {
        (
            format!("a security module forbids it (ptrace_scope {scope}, no seccomp filter)"),
            "`docker run --cap-add SYS_PTRACE`; SELinux: `setsebool deny_ptrace off`; AppArmor: \
             allow ptrace in the profile"
                .into(),
        )
    }
}
