//! RDMA between two hosts: the listener's child holds bytes, the checker's child reads them.

use std::io::{self, BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use hetero_kv_transport::verbs::trial::TRIAL_BYTES;

use super::roles::{Held, Lack, Outcome, Site, TRIAL_TIMEOUT, Trouble};
use super::{ChoiceFlags, Flags, look};
use crate::doctor::Use;
use crate::doctor::ports::PortRange;
use crate::doctor::report::Finding;
use crate::doctor::subprocess::{self, Group};

const CHECK: &str = "rdma";

/// For the holder's line: opening a device and registering a few MiB.
const HOLDER_TIMEOUT: Duration = Duration::from_secs(20);

/// For the reader: its trial, and the end of what it began.
const READER_TIMEOUT: Duration = Duration::from_secs(30);
const _: () = assert!(TRIAL_TIMEOUT.as_secs() + 10 <= READER_TIMEOUT.as_secs());

/// Longest line of the holder.
const LINE_BYTES_MAX: u64 = 4096;

/// What a listener has for RDMA, as long as this value lives.
pub(in crate::doctor) struct Holder {
    pub(in crate::doctor) site: Site,
    _child: Option<Group>,
}

impl Holder {
    /// Starts the child that holds bytes; without RDMA the site says why.
    pub(in crate::doctor) fn start(
        flags: &Flags,
        host: &str,
        bind_host: Option<&str>,
        port_range: Option<&PortRange>,
    ) -> Self {
        if flags.rdma == Use::Off {
            return Self {
                site: Site::Off,
                _child: None,
            };
        }
        match start(&flags.choice, host, bind_host, port_range) {
            Ok((site, child)) => Self {
                site,
                _child: Some(child),
            },
            Err(error) => Self {
                site: Site::Lacks(Lack {
                    trouble: Trouble::Other,
                    found: format!("RDMA could not be looked at: {error}"),
                    mend: "`ibv_devinfo -v` asks the library in the same way".into(),
                }),
                _child: None,
            },
        }
    }
}

fn start(
    choice: &ChoiceFlags,
    host: &str,
    bind_host: Option<&str>,
    port_range: Option<&PortRange>,
) -> io::Result<(Site, Group)> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["doctor", "rdma-holder"])
        .args(choice.words())
        .arg(format!("--host={host}"))
        .args(bind_host.map(|host| format!("--bind-host={host}")))
        .args(port_range.map(|ports| format!("--port-range={}-{}", ports.start(), ports.end())));
    let mut child = Group::start(
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null()),
    )?;
    let stdout = child.0.stdout.take();
    let stdout = stdout.ok_or_else(|| io::Error::other("the child has no output"))?;
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout.take(LINE_BYTES_MAX)).read_line(&mut line);
        let _ = sender.send(read.map(|_| line));
    });
    let line = receiver.recv_timeout(HOLDER_TIMEOUT).map_err(|_| {
        let waited = HOLDER_TIMEOUT.as_secs();
        io::Error::other(format!(
            "the child that loads the library says nothing in {waited} s"
        ))
    })??;
    let site = serde_json::from_str(&line).map_err(|_| {
        let how = child.0.wait();
        let how = how.map_or_else(|error| error.to_string(), |status| status.to_string());
        io::Error::other(format!("the child that loads the library ended ({how})"))
    })?;
    Ok((site, child))
}

/// The listener's word on it, at its start.
pub(in crate::doctor) fn at_listener(site: &Site, required: bool) -> Finding {
    match site {
        Site::Off => Finding::ok(CHECK, "off (--rdma off)"),
        Site::Lacks(lack) => lacking(lack, required, lack.found.clone()),
        Site::Here(held) => Finding::ok(CHECK, format!("{} is offered", held.device)),
    }
}

/// No device is as it should be where nothing asks for one; a device that cannot be used is not.
fn lacking(lack: &Lack, required: bool, found: String) -> Finding {
    match lack.trouble {
        Trouble::NoLibrary | Trouble::NoDevice if !required => Finding::ok(CHECK, found),
        Trouble::NoLibrary | Trouble::NoDevice | Trouble::Other => Finding::fail_if(
            required,
            CHECK,
            found,
            lack.mend_or("`ibv_devinfo -v` and `dmesg` say more"),
        ),
    }
}

/// Tries a connection to what the listener has, from the address that reaches it.
pub(in crate::doctor) fn check(site: &Site, flags: &Flags, from: Option<SocketAddr>) -> Finding {
    let required = flags.rdma == Use::Require;
    if flags.rdma == Use::Off {
        return Finding::ok(CHECK, "not tried (--rdma off)");
    }
    let host = from.map(|from| from.ip().to_string());
    match site {
        Site::Off => {
            let found = "not tried: the other side listens with --rdma off";
            if required {
                return Finding::fail(CHECK, found, "start `doctor listen` there without it");
            }
            Finding::ok(CHECK, found)
        }
        Site::Lacks(there) => one_sided(there, flags, host.as_deref(), required),
        Site::Here(held) => tried(held, flags, host.as_deref(), required),
    }
}

/// The other side has none.
fn one_sided(there: &Lack, flags: &Flags, host: Option<&str>, required: bool) -> Finding {
    let there_text = format!("there: {}", there.found);
    match look(&flags.choice, host).and_then(|looked| looked.taken) {
        // Only one of the two would use it: what the other lacks is worth a look.
        Ok(taken) => Finding::fail_if(
            required,
            CHECK,
            format!("here {taken}; {there_text}"),
            format!(
                "there: {}",
                there.mend_or("`hetero-kv doctor --rdma require`")
            ),
        ),
        Err(here) => {
            let worse = if here.trouble == Trouble::Other {
                &here
            } else {
                there
            };
            lacking(
                worse,
                required,
                format!("here: {}; {there_text}", here.found),
            )
        }
    }
}

fn tried(held: &Held, flags: &Flags, host: Option<&str>, required: bool) -> Finding {
    let not_tried = |found: String| {
        Finding::fail_if(
            required,
            CHECK,
            format!("could not be tried: {found}"),
            "`ibv_devinfo -v` asks the library in the same way",
        )
    };
    let there = &held.device;
    match run_reader(held, &flags.choice, host) {
        Err(error) => not_tried(error.to_string()),
        Ok(Outcome::Read {
            device,
            mtu_bytes,
            connect_ms,
            read_ms,
        }) => Finding::ok(
            CHECK,
            format!(
                "{device} here reads {TRIAL_BYTES} bytes of {there} there, all right: connected \
                 in {connect_ms:.1} ms, read in {read_ms:.1} ms, MTU {mtu_bytes}{}",
                if mtu_bytes < held.mtu_bytes {
                    format!(" of {} there", held.mtu_bytes)
                } else {
                    String::new()
                }
            ),
        ),
        Ok(Outcome::Lacks(here)) => Finding::fail_if(
            required,
            CHECK,
            format!("there {there}; here: {}", here.found),
            here.mend_or("`hetero-kv doctor --rdma require` here"),
        ),
        Ok(Outcome::Fails(lack)) => Finding::fail_if(
            required,
            CHECK,
            format!("from here to {there} there: {}", lack.found),
            lack.mend,
        ),
    }
}

fn run_reader(held: &Held, choice: &ChoiceFlags, host: Option<&str>) -> io::Result<Outcome> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["doctor", "rdma-reader"])
        .args(choice.words())
        .args(host.map(|host| format!("--host={host}")));
    let ran = subprocess::run(&mut command, &serde_json::to_vec(held)?, READER_TIMEOUT)?;
    serde_json::from_str(&ran.stdout).map_err(|_| {
        io::Error::other(format!(
            "the reader did not answer, {}",
            ran.ending(READER_TIMEOUT)
        ))
    })
}
