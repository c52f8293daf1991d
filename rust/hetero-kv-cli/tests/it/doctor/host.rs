//! Faults of one host.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::report::{HETERO_KV, Report, doctor, quick, quick_line, skip, words_of};
use crate::run::without_process_memory;

#[test]
fn a_taken_port_is_named_with_its_holder() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port();
    let report = quick(&format!("--port-range {port}-{port}"));
    assert_eq!(report.code, 1);
    assert_eq!(report.status("ports"), "fail", "{report}");
    let found = report.found("ports");
    assert!(
        found.contains(&format!("0 of {port}-{port} on 127.0.0.1 are free")),
        "{found}"
    );
    assert!(found.contains("2 needed (1 control and 1 data"), "{found}");
    let holder = format!("taken: {port} by ");
    assert!(found.contains(&holder), "{found}");
    assert!(
        found.contains(&format!("(pid {})", std::process::id())),
        "{found}"
    );
    let mend = report.mend("ports");
    assert!(
        mend.contains("widen port_range by 2") || mend.contains("move port_range"),
        "{mend}"
    );
}

#[test]
fn a_range_with_room_beside_a_taken_port_is_right() {
    // Below the ports that the system assigns, where nothing comes between.
    let taken = (20_000..30_000)
        .find_map(|port| TcpListener::bind(("127.0.0.1", port)).ok())
        .expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let report = quick(&format!("--port-range {port}-{} --tp 4 --dp 2", port + 100));
    assert_eq!(report.status("ports"), "ok", "{report}");
    assert!(report.found("ports").contains("10 needed"), "{report}");
    assert!(
        report.found("ports").contains(&format!("taken: {port} by")),
        "{report}"
    );
}

#[test]
fn all_interfaces_are_no_address_to_advertise() {
    for host in ["0.0.0.0", "::"] {
        let report = quick(&format!("--host {host}"));
        assert_eq!(
            (report.code, report.status("address")),
            (1, "fail"),
            "{report}"
        );
        assert!(
            report
                .found("address")
                .contains("stands for all interfaces"),
            "{report}"
        );
        assert!(report.mend("address").contains("set host"), "{report}");
        // Nothing is bound, so ports are not looked at.
        assert_eq!(report.status("ports"), "");
    }
    let report = Report::of(&mut doctor("listen --json --listen 0.0.0.0:0"));
    report.assert_only("listen", &["stands for all interfaces"], &["--advertise"]);
}

#[test]
fn addresses_that_engines_cannot_use_are_told_apart() {
    // TEST-NET-3 (RFC 5737) is no machine's.
    let report = quick("--host 203.0.113.7");
    assert_eq!(report.status("address"), "fail", "{report}");
    assert!(
        report
            .found("address")
            .contains("is not an address of this machine")
    );
    let report = quick("--host no-such-host.invalid");
    assert_eq!(report.status("address"), "fail", "{report}");
    assert!(report.found("address").contains("does not resolve"));
    let report = quick("");
    assert_eq!(report.status("address"), "warn", "{report}");
    assert!(
        report
            .found("address")
            .contains("only engines of this host")
    );
    let report = quick("--host 203.0.113.7 --bind-host 0.0.0.0");
    assert_eq!(report.status("address"), "warn", "{report}");
    assert!(
        report
            .found("address")
            .contains("listens on all interfaces")
    );
}

#[test]
fn a_low_memory_lock_limit_fails_where_rdma_is_required() {
    let (mut limited, plan) = without_ipc_lock();
    limited.arg(format!("ulimit -l 64 && {}", quick_line("--rdma require")));
    let report = Report::of(&mut limited);
    assert_eq!(
        (report.code, report.status("locked memory")),
        (1, "fail"),
        "{plan}: {report}"
    );
    assert!(report.found("locked memory").contains("64 KiB"), "{report}");
    assert!(
        report.mend("locked memory").contains("ulimit -l unlimited"),
        "{report}"
    );
    assert!(
        report.mend("locked memory").contains("--ulimit memlock=-1"),
        "{report}"
    );
}

/// A shell that has no CAP_IPC_LOCK, to which the limit does not apply.
fn without_ipc_lock() -> (Command, &'static str) {
    if rustix::process::geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args([
            "--bounding-set=-ipc_lock",
            "--inh-caps=-ipc_lock",
            "sh",
            "-c",
        ]);
        return (command, "setpriv");
    }
    let mut command = Command::new("sh");
    command.arg("-c");
    (command, "sh")
}

#[test]
fn a_missing_rdma_device_fails_where_one_is_required() {
    if fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        return skip("this machine has an RDMA device");
    }
    let report = quick("--rdma require");
    assert_eq!(
        (report.code, report.status("rdma device")),
        (1, "fail"),
        "{report}"
    );
    let found = report.found("rdma device");
    assert!(
        found.contains("libibverbs finds no device")
            || found.contains("no device in /sys/class/infiniband"),
        "{report}"
    );
    assert!(
        report
            .mend("rdma device")
            .contains("--device /dev/infiniband")
    );
    // The same machine is fine where RDMA is only taken when it is there.
    let report = quick("--rdma auto");
    assert_eq!(report.status("rdma device"), "ok", "{report}");
    assert!(
        report.found("rdma device").starts_with("no RDMA: "),
        "{report}"
    );
}

#[test]
fn forbidden_process_memory_is_named_with_its_filter() {
    let run = |transport: &str| {
        let mut command = without_process_memory();
        command.args(words_of(&format!("--transport {transport}")));
        command
    };
    match run("process").output() {
        Err(error) => return skip(format_args!("python3: {error}")),
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr);
            if error.starts_with("prctl: ") {
                return skip(format_args!("no seccomp filters here: {error}"));
            }
        }
    }
    let report = Report::of(&mut run("process"));
    assert_eq!(
        (report.code, report.status("process memory")),
        (1, "fail"),
        "{report}"
    );
    assert!(report.found("process memory").contains("EPERM"), "{report}");
    assert!(
        report
            .found("process memory")
            .contains("seccomp filter is active"),
        "{report}"
    );
    assert!(
        report
            .mend("process memory")
            .contains("--cap-add SYS_PTRACE"),
        "{report}"
    );
    // Engines go by tcp instead where that is allowed.
    assert_eq!(
        Report::of(&mut run("auto")).status("process memory"),
        "warn"
    );
    // Without the filter the same check is right.
    let report = quick("--transport process");
    assert_eq!(report.status("process memory"), "ok", "{report}");
}

#[test]
fn an_executable_that_is_not_dumpable_is_named() {
    if !rustix::process::geteuid().is_root() {
        return skip("needs root, to run as a user that may not read the executable's file");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let unreadable = folder.path().join("hetero-kv");
    fs::copy(HETERO_KV, &unreadable).expect("copied");
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("owner");
    };
    mode(folder.path(), 0o711);
    mode(&unreadable, 0o711);
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&unreadable)
        .args(words_of("--transport process"));
    let report = Report::of(&mut command);
    assert_eq!(
        (report.code, report.status("process memory")),
        (1, "fail"),
        "{report}"
    );
    assert!(
        report.found("process memory").contains("not dumpable"),
        "{report}"
    );
    assert!(
        report.mend("process memory").contains("chmod a+r"),
        "{report}"
    );
}

#[test]
fn too_few_descriptors_are_a_fault() {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("ulimit -n 600 && {}", quick_line("--peers 64")));
    let report = Report::of(&mut command);
    assert_eq!(
        (report.code, report.status("descriptors")),
        (1, "fail"),
        "{report}"
    );
    assert!(
        report.found("descriptors").contains("736 needed"),
        "{report}"
    );
    assert!(
        report.mend("descriptors").contains("ulimit -n 1024"),
        "{report}"
    );
}

#[test]
fn usage_is_exit_2() {
    for words in [
        "doctor --port-range 7",
        "doctor --port-range 9-8",
        "doctor --tp 0",
        "doctor --seconds 61",
        "doctor check",
        "doctor check host",
        "doctor check [::1]",
        "doctor listen",
        "doctor listen --listen 10.0.0.1",
        "doctor --rdma maybe",
    ] {
        let run = crate::run::hetero_kv(words);
        assert_eq!(
            (run.code, run.stdout.as_str()),
            (2, ""),
            "{words}: {}",
            run.stderr
        );
    }
}
