//! RDMA as the doctor tells it, on the stand-in for libibverbs: what is right, and each planted
//! fault. `tools/test_rdma.py` does the same with a device of the kernel's.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::between::Listener;
use super::report::{HETERO_KV, Report, doctor, quick_line, skip, words_of};

const LIBRARY: &str = "HETERO_KV_LIBIBVERBS";
const FAULTS: &str = "HKV_VERBS_FAULTS";

/// A library of C, made under a name of its own and then put in place at once: the tests of this
/// file run as processes beside each other, and none may load what another is still writing.
fn compiled(name: &str, sources: &[PathBuf]) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let own = tempfile::Builder::new()
        .prefix(name)
        .tempfile_in(folder)
        .expect("a file")
        .into_temp_path();
    let gcc = Command::new("gcc")
        .args(["-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-o"])
        .arg(&own)
        .args(sources)
        .output()
        .ok()?;
    let said = String::from_utf8_lossy(&gcc.stderr);
    assert!(gcc.status.success(), "{said}");
    let library = folder.join(name);
    own.persist(&library).expect("put in place");
    Some(library)
}

/// The stand-in; `None`, with the reason printed, where it cannot be built.
fn double() -> Option<&'static str> {
    static BUILT: OnceLock<Option<String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        if !Path::new("/usr/include/infiniband/verbs.h").exists() {
            return None;
        }
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/doubles/verbs");
        let mut sources: Vec<PathBuf> = fs::read_dir(folder)
            .expect("in the repository")
            .map(|entry| entry.expect("readable").path())
            .filter(|path| path.extension().is_some_and(|ending| ending == "c"))
            .collect();
        sources.sort();
        let library = compiled("libibverbs-double.so", &sources)?;
        Some(library.to_str().expect("a path of text").to_owned())
    });
    if built.is_none() {
        skip("the stand-in for libibverbs needs gcc and libibverbs-dev");
    }
    built.as_deref()
}

/// The doctor of one host that has to have RDMA.
fn host(words: &str, variables: &[(&str, &str)]) -> Report {
    let words = format!("--rdma require {words}");
    Report::of(
        Command::new(HETERO_KV)
            .args(words_of(&words))
            .envs(variables.iter().copied()),
    )
}

fn assert_told(report: &Report, check: &str, found: &[&str], mend: &[&str]) {
    assert_eq!((report.code, report.status(check)), (1, "fail"), "{report}");
    for part in found {
        assert!(report.found(check).contains(part), "{part:?} in {report}");
    }
    for part in mend {
        assert!(report.mend(check).contains(part), "{part:?} in {report}");
    }
}

/// Name of the stand-in's device.
fn name(library: &str) -> String {
    let report = host("", &[(LIBRARY, library)]);
    let found = report.found("rdma device");
    found.split(' ').next().expect("a name").to_owned()
}

#[test]
fn a_device_is_told_with_its_port_mtu_and_gids() {
    let Some(library) = double() else { return };
    let report = host("", &[(LIBRARY, library)]);
    assert_eq!(report.status("rdma device"), "ok", "{report}");
    let found = report.found("rdma device");
    for part in [
        "port 1 GID ",
        "is taken of ",
        "port 1 ACTIVE, Ethernet, MTU 4096 of 4096, GIDs: 0 ",
        "IPv4)",
    ] {
        assert!(found.contains(part), "{part:?} in {report}");
    }
    assert_eq!(report.status("rdma library"), "ok", "{report}");
    assert!(report.found("rdma library").contains(library), "{report}");
}

#[test]
fn each_setting_that_names_nothing_is_told_with_what_there_is() {
    let Some(library) = double() else { return };
    let name = name(library);
    let told = |words: &str, found: &[&str], mend: &[&str]| {
        let report = host(words, &[(LIBRARY, library)]);
        assert_told(&report, "rdma device", found, mend);
    };
    told(
        "--verbs-device mlx5_77",
        &["verbs_device mlx5_77 does not exist"],
        &["set one of: ", &name],
    );
    told(
        "--verbs-port 9",
        &[
            "verbs_port 9 does not exist",
            &format!("no device can be used: {name}: "),
        ],
        &["has ports 1 to 1"],
    );
    told(
        "--verbs-gid-index 77",
        &["has no GID of index 77: its GIDs: 0 "],
        &["set verbs_gid_index"],
    );
}

#[test]
fn a_port_that_is_down_is_told_with_the_way_up() {
    let Some(library) = double() else { return };
    let variables = [(LIBRARY, library), ("HKV_VERBS_PORT", "down")];
    let report = host("", &variables);
    assert_told(
        &report,
        "rdma device",
        &["is DOWN, not ACTIVE", "port 1 DOWN, Ethernet"],
        &["ip link set DEV up"],
    );
    // The same where only the transport asks for it; a warning where nothing does.
    let run = |words: &str| {
        let words = words_of(words);
        Report::of(Command::new(HETERO_KV).args(words).envs(variables))
    };
    let report = run("--transport verbs --rdma auto");
    assert_told(&report, "rdma device", &["is DOWN"], &["ip link"]);
    assert_eq!(report.status("process memory"), "", "{report}");
    let report = run("--rdma auto");
    assert_eq!(report.status("rdma device"), "warn", "{report}");
}

#[test]
fn a_missing_broken_or_deadly_library_is_told_and_ends_nothing() {
    let missing = host("", &[(LIBRARY, "/nonexistent/libibverbs.so")]);
    assert_told(
        &missing,
        "rdma library",
        &[
            "libibverbs cannot be loaded (HETERO_KV_LIBIBVERBS names it: ",
            "/nonexistent/libibverbs.so",
        ],
        &["apt install libibverbs1"],
    );
    let folder = tempfile::tempdir().expect("a folder");
    let text = folder.path().join("libibverbs-text.so");
    fs::write(&text, "not a library").expect("written");
    let broken = host("", &[(LIBRARY, text.to_str().expect("text"))]);
    assert_told(&broken, "rdma library", &["cannot be loaded"], &["apt"]);
    // Not the system's library instead of a name that is no text, and no wait for a pipe's writer.
    let odd = folder.path().join(OsStr::from_bytes(b"\xff.so"));
    fs::write(&odd, "not a library").expect("written");
    let pipe = folder.path().join("pipe.so");
    let made = Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    for (named, why) in [(odd, "file too short"), (pipe, "not a file")] {
        let mut command = Command::new(HETERO_KV);
        let command = command.args(words_of("--rdma require"));
        let report = Report::of(command.env(LIBRARY, &named));
        assert_told(&report, "rdma library", &["names it: ", why], &["apt"]);
    }
    let source = folder.path().join("deadly.c");
    let deadly =
        "#include <stdlib.h>\n__attribute__((constructor)) static void end(void) { abort(); }\n";
    fs::write(&source, deadly).expect("written");
    let Some(library) = compiled("libibverbs-deadly.so", &[source]) else {
        return skip("no gcc");
    };
    let report = host("", &[(LIBRARY, library.to_str().expect("text"))]);
    assert_told(
        &report,
        "rdma device",
        &["could not be looked at", "signal: 6"],
        &["ibv_devinfo"],
    );
}

#[test]
fn a_low_memory_lock_limit_is_told_where_a_device_is_taken() {
    let Some(library) = double() else { return };
    if !rustix::process::geteuid().is_root() {
        return skip("only root may lack a capability for a while");
    }
    let line = quick_line("--rdma auto");
    let mut limited = Command::new("setpriv");
    limited
        .args([
            "--bounding-set=-ipc_lock",
            "--inh-caps=-ipc_lock",
            "sh",
            "-c",
        ])
        .arg(format!("ulimit -l 64 && {line}"))
        .env(LIBRARY, library);
    let report = Report::of(&mut limited);
    assert_eq!(report.status("locked memory"), "warn", "{report}");
    assert!(report.found("locked memory").contains("64 KiB"), "{report}");
    assert!(
        report
            .mend("locked memory")
            .contains("raise it: `ulimit -l unlimited`"),
        "{report}"
    );
}

/// `check` of a listener, each with its own variables.
fn between(listen: &[(&str, &str)], words: &str, check: &[(&str, &str)]) -> Report {
    let listener = Listener::start_with("--listen 127.0.0.1:0", listen);
    let words = format!(
        "check 127.0.0.1:{} --json --seconds 0 {words}",
        listener.port
    );
    Report::of(doctor(&words).envs(check.iter().copied()))
}

#[test]
fn bytes_are_read_by_rdma_between_two_ends() {
    let Some(library) = double() else { return };
    let here = [(LIBRARY, library)];
    let report = between(&here, "--rdma require", &here);
    assert_eq!((report.code, report.status("rdma")), (0, "ok"), "{report}");
    let found = report.found("rdma");
    for part in ["reads 4194304 bytes of ", "all right", "MTU 4096"] {
        assert!(found.contains(part), "{part:?} in {report}");
    }
    let report = between(&here, "--rdma off", &here);
    assert_eq!(report.found("rdma"), "not tried (--rdma off)", "{report}");
}

#[test]
fn packets_of_full_size_that_vanish_are_told_from_a_way_that_is_not_open() {
    let Some(library) = double() else { return };
    let here = [(LIBRARY, library)];
    // Each of the two queue pairs reads 8 bytes first.
    let faults = [(LIBRARY, library), (FAULTS, "read=retry:after=2")];
    let report = between(&here, "--rdma require", &faults);
    assert_told(
        &report,
        "rdma",
        &[
            "8 bytes are read, 4194304 bytes in packets of 4096 are not",
            "retries exceeded",
        ],
        &["set one MTU"],
    );
    let faults = [(LIBRARY, library), (FAULTS, "read=retry")];
    let report = between(&here, "--rdma require", &faults);
    assert_told(
        &report,
        "rdma",
        &["no queue pair reaches the other side", "retries exceeded"],
        &["UDP port 4791"],
    );
    // Where engines would go by tcp instead it is worth a look, and no more.
    let report = between(&here, "", &faults);
    assert_eq!(
        (report.code, report.status("rdma")),
        (0, "warn"),
        "{report}"
    );
}

#[test]
fn the_side_that_lacks_rdma_is_named() {
    let Some(library) = double() else { return };
    let (with, without) = ([(LIBRARY, library)], [(LIBRARY, "/nonexistent/x.so")]);
    let report = between(&without, "", &with);
    assert_eq!(
        (report.code, report.status("rdma")),
        (0, "warn"),
        "{report}"
    );
    assert!(report.found("rdma").starts_with("here "), "{report}");
    let there = "there: no RDMA: libibverbs cannot be loaded";
    assert!(report.found("rdma").contains(there), "{report}");
    assert!(report.mend("rdma").contains("apt install"), "{report}");
    let report = between(&with, "", &without);
    assert_eq!(
        (report.code, report.status("rdma")),
        (0, "warn"),
        "{report}"
    );
    assert!(
        report
            .found("rdma")
            .contains("; here: no RDMA: libibverbs cannot be loaded"),
        "{report}"
    );
    // Nobody has any, and nobody asks for it.
    let report = between(&without, "", &without);
    assert_eq!((report.code, report.status("rdma")), (0, "ok"), "{report}");
    let report = between(&without, "--rdma require", &without);
    assert_told(
        &report,
        "rdma",
        &["here: no RDMA", "there: no RDMA"],
        &["apt"],
    );
}

#[test]
fn a_listener_that_has_to_have_rdma_and_cannot_register_does_not_listen() {
    let Some(library) = double() else { return };
    let mut listen = doctor("listen --json --listen 127.0.0.1:0 --rdma require");
    listen.envs([(LIBRARY, library), (FAULTS, "region=enomem")]);
    Report::of(&mut listen).assert_only(
        "rdma",
        &["cannot register 4194304 bytes", "this process may lock "],
        &["raise it: `ulimit -l unlimited`", "--ulimit memlock=-1"],
    );
}
