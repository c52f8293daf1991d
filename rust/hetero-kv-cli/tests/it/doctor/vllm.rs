//! The check of the environment's vLLM, on the real one where it is installed.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use super::report::{quick, skip};

/// One import of vLLM at a time: each takes all cores of a small machine.
static IMPORT: Mutex<()> = Mutex::new(());

/// The interpreter of the pinned vLLM environment, where one is made.
fn vllm_python() -> Option<PathBuf> {
    let python = match std::env::var_os("HETERO_KV_VLLM_PYTHON") {
        Some(named) => PathBuf::from(named),
        None => {
            let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/vllm_env.py");
            let output = Command::new("python3")
                .arg(tool)
                .arg("--print-python")
                .output()
                .ok()?;
            PathBuf::from(String::from_utf8(output.stdout).ok()?.trim())
        }
    };
    python.exists().then_some(python)
}

/// Where an interpreter has its packages.
fn site_packages(python: &Path) -> PathBuf {
    let output = Command::new(python)
        .args([
            "-c",
            "import sysconfig; print(sysconfig.get_paths()['purelib'])",
        ])
        .output()
        .expect("Python starts");
    PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
}

/// An interpreter in `folder` that sees the packages of `site` alone.
fn interpreter(folder: &Path, python: &Path, site: &Path) -> PathBuf {
    let script = folder.join("python3");
    let text = format!(
        "#!/bin/sh\nPYTHONPATH={} exec {} -S \"$@\"\n",
        site.display(),
        python.display()
    );
    fs::write(&script, text).expect("written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("owner");
    script
}

#[test]
fn a_vllm_that_loads_the_connector_is_right() {
    let _alone = IMPORT.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(python) = vllm_python() else {
        return skip("no vLLM environment (`make env`)");
    };
    if !site_packages(&python).join("hetero_kv").exists() {
        return skip("the vLLM environment has no hetero_kv (`make install-env`)");
    }
    let report = quick(&format!("--python {}", python.display()));
    assert_eq!((report.code, report.failed()), (0, vec![]), "{report}");
    assert!(
        report
            .found("connector")
            .contains("HeteroKVConnector of hetero_kv.connector")
    );
}

#[test]
fn a_vllm_that_does_not_load_the_connector_is_named() {
    let _alone = IMPORT.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(python) = vllm_python() else {
        return skip("no vLLM environment (`make env`)");
    };
    // The real vLLM with all its packages, and without this one.
    let folder = tempfile::tempdir().expect("a folder");
    let site = folder.path().join("site");
    fs::create_dir(&site).expect("made");
    for entry in fs::read_dir(site_packages(&python))
        .expect("a folder")
        .flatten()
    {
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with("hetero_kv") {
            symlink(entry.path(), site.join(name)).expect("linked");
        }
    }
    let without = interpreter(folder.path(), &python, &site);
    quick(&format!("--python {}", without.display())).assert_only(
        "connector",
        &["does not load HeteroKVConnector", "is not registered"],
        &["pip install hetero_kv"],
    );
}

#[test]
fn an_environment_without_vllm_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let empty = folder.path().join("site");
    fs::create_dir(&empty).expect("made");
    if Command::new("python3").arg("--version").output().is_err() {
        return skip("no python3");
    }
    let python = interpreter(folder.path(), Path::new("python3"), &empty);
    quick(&format!("--python {}", python.display())).assert_only(
        "vllm",
        &["has no vLLM"],
        &["install vLLM >=0.32,<0.33"],
    );
}
