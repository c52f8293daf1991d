//! RDMA on this host: devices, the verbs library, and the limit on locked memory.
//!
//! What makes a device usable is the transport's to say (`hetero_kv_transport::verbs`); here it is
//! asked, in a child process, and what the system has beside it is added.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hetero_kv_transport::verbs::DeviceChoice;

use super::Use;
use super::report::Finding;
use super::subprocess;
use roles::{Lack, Looked, Trouble};

pub(super) mod between;
mod locked_memory;
pub(super) mod roles;

/// What the kernel knows of devices, whether or not the library finds them.
const DEVICES: &str = "/sys/class/infiniband";

/// A device that is being reset keeps its first caller waiting for seconds.
const LOOK_TIMEOUT: Duration = Duration::from_secs(20);

/// How engines of this host are to use RDMA.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Flags {
    /// Whether engines of this host are to use RDMA
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) rdma: Use,
    #[command(flatten)]
    pub(super) choice: ChoiceFlags,
}

/// The connector's settings of the same names.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct ChoiceFlags {
    /// RDMA device (the connector's `verbs_device`) [default: the first that can be used]
    #[arg(long, value_name = "NAME")]
    verbs_device: Option<String>,
    /// Port of it (the connector's `verbs_port`) [default: the first that is active]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u8).range(1..))]
    verbs_port: Option<u8>,
    /// Place in its table of GIDs (the connector's `verbs_gid_index`) [default: that of the host's
    /// address]
    #[arg(long, value_name = "INDEX")]
    verbs_gid_index: Option<u8>,
}

impl ChoiceFlags {
    fn choice(&self) -> DeviceChoice {
        DeviceChoice {
            device: self.verbs_device.clone(),
            port: self.verbs_port,
            gid_index: self.verbs_gid_index,
        }
    }

    /// The same flags for a child.
    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut add = |flag: &str, value: Option<String>| {
            words.extend(value.map(|value| format!("{flag}={value}")));
        };
        add("--verbs-device", self.verbs_device.clone());
        add("--verbs-port", self.verbs_port.map(|port| port.to_string()));
        add(
            "--verbs-gid-index",
            self.verbs_gid_index.map(|index| index.to_string()),
        );
        words
    }
}

/// What the library says of this host's devices, asked in a child process: the library and its
/// drivers run code of their own, and it may not be this process that ends by it.
fn look(choice: &ChoiceFlags, host: Option<&str>) -> Result<Looked, Lack> {
    let not_looked = |found: String| Lack {
        trouble: Trouble::Other,
        found: format!("RDMA could not be looked at: {found}"),
        mend: "`ibv_devinfo -v` asks the library in the same way".into(),
    };
    let this = std::env::current_exe().map_err(|error| not_looked(error.to_string()))?;
    let mut command = Command::new(this);
    command.args(["doctor", "rdma-look"]).args(choice.words());
    if let Some(host) = host {
        command.arg(format!("--host={host}"));
    }
    let ran = subprocess::run(&mut command, &[], LOOK_TIMEOUT)
        .map_err(|error| not_looked(error.to_string()))?;
    serde_json::from_str(&ran.stdout).map_err(|_| not_looked(ran.ending(LOOK_TIMEOUT)))
}

/// Three findings, or one when RDMA is off. `required`: engines that have no RDMA do not start.
pub(super) fn check(flags: &Flags, required: bool, host: Option<&str>) -> Vec<Finding> {
    if flags.rdma == Use::Off && !required {
        return vec![Finding::ok("rdma device", "not looked for (--rdma off)")];
    }
    let required = required || flags.rdma == Use::Require;
    let known = kernel_devices();
    let looked = look(&flags.choice, host);
    let seen = looked.as_ref().is_ok_and(|looked| !looked.seen.is_empty());
    let used = required || seen || !known.is_empty();
    let mut findings = match &looked {
        Ok(looked) => vec![
            device(required, looked, &known),
            library(required, used, looked),
        ],
        Err(lack) => vec![Finding::fail_if(
            required || used,
            "rdma device",
            lack.found.clone(),
            lack.mend.clone(),
        )],
    };
    findings.push(locked_memory::check(required, used));
    findings
}

fn device(required: bool, looked: &Looked, known: &[String]) -> Finding {
    let check = "rdma device";
    let shown = looked.seen.join(", ");
    let lack = match &looked.taken {
        Ok(taken) => return Finding::ok(check, format!("{taken} is taken of {shown}")),
        Err(lack) => lack,
    };
    match lack.trouble {
        Trouble::NoLibrary | Trouble::NoDevice if known.is_empty() => {
            let found = match lack.trouble {
                Trouble::NoDevice => lack.found.clone(),
                Trouble::NoLibrary | Trouble::Other => format!("no RDMA: no device in {DEVICES}"),
            };
            if !required {
                return Finding::ok(check, format!("{found}; KV goes by process memory or tcp"));
            }
            Finding::fail(
                check,
                found,
                format!("{}; or --rdma off", looked.no_device_mend),
            )
        }
        // What the library says is the next finding.
        Trouble::NoLibrary => Finding::ok(
            check,
            format!(
                "{} in {DEVICES}, not opened without the library",
                known.join(", ")
            ),
        ),
        Trouble::NoDevice => {
            let unopened: Vec<String> = known.iter().filter_map(|name| unopened(name)).collect();
            if unopened.is_empty() {
                Finding::fail_if(
                    required,
                    check,
                    format!(
                        "{}, and {DEVICES} has {}: the library has no driver for it",
                        lack.found,
                        known.join(", ")
                    ),
                    "install the library's drivers (`apt install ibverbs-providers`), of the \
                     library's own version",
                )
            } else {
                Finding::fail_if(
                    required,
                    check,
                    format!("{}: {}", lack.found, unopened.join(", ")),
                    "`docker run --device /dev/infiniband`, or a udev rule that lets this user \
                     open it",
                )
            }
        }
        Trouble::Other => {
            let beside = if shown.is_empty() {
                String::new()
            } else {
                format!("; this host has {shown}")
            };
            Finding::fail_if(
                required,
                check,
                format!("{}{beside}", lack.found),
                lack.mend_or("`ibv_devinfo -v` and `dmesg` say more"),
            )
        }
    }
}

fn library(required: bool, used: bool, looked: &Looked) -> Finding {
    let check = "rdma library";
    match &looked.taken {
        Err(lack) if lack.trouble == Trouble::NoLibrary => {
            if !used {
                let found = format!("{}; not needed without a device", lack.found);
                return Finding::ok(check, found);
            }
            Finding::fail_if(required, check, lack.found.clone(), lack.mend.clone())
        }
        Ok(_) | Err(_) => Finding::ok(check, format!("{} is loaded", looked.library)),
    }
}

fn kernel_devices() -> Vec<String> {
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

/// Why the device's file cannot be opened.
fn unopened(device: &str) -> Option<String> {
    let uverbs = fs::read_dir(
        Path::new(DEVICES)
            .join(device)
            .join("device/infiniband_verbs"),
    )
    .ok()?
    .flatten()
    .next()?
    .file_name();
    let file = Path::new("/dev/infiniband").join(uverbs);
    let opened = OpenOptions::new().read(true).write(true).open(&file);
    opened
        .err()
        .map(|error| format!("{} cannot be opened: {error}", file.display()))
}
