//! Child processes with a deadline and bounded output.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Output kept of each stream; more is read and dropped.
const OUTPUT_BYTES_MAX: usize = 1 << 20;

/// Between two looks whether a child has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Output is complete at the child's end but for what the kernel still holds.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// A child's end.
pub(super) struct Ran {
    /// `None`: it was killed at its deadline.
    pub(super) status: Option<ExitStatus>,
    /// Standard output, its first MiB.
    pub(super) stdout: String,
    /// Standard error, its first MiB.
    pub(super) stderr: String,
}

impl Ran {
    /// How it ended, and the last line that it wrote to standard error.
    pub(super) fn ending(&self, limit: Duration) -> String {
        let how = match self.status {
            None => format!("it was stopped after {} s", limit.as_secs()),
            Some(status) => status.to_string(),
        };
        match self
            .stderr
            .lines()
            .rev()
            .find(|line| !line.trim().is_empty())
        {
            Some(line) => {
                let line: String = line.trim().chars().take(300).collect();
                format!("{how}: {line}")
            }
            None => how,
        }
    }
}

/// A child in a process group of its own, which ends with this value.
pub(super) struct Group(pub(super) Child);

impl Group {
    /// Starts it.
    pub(super) fn start(command: &mut Command) -> io::Result<Self> {
        Ok(Self(command.process_group(0).spawn()?))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // Also what the child started; gone already is as good.
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

/// Runs a command on `input`, for `limit` at most.
///
/// # Errors
/// It cannot be started.
pub(super) fn run(command: &mut Command, input: &[u8], limit: Duration) -> io::Result<Ran> {
    let begun = Instant::now();
    let mut group = Group::start(
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
    )?;
    let stdout = drain(group.0.stdout.take());
    let stderr = drain(group.0.stderr.take());
    if let Some(mut stdin) = group.0.stdin.take() {
        // Inputs are below a pipe's buffer, so this does not wait; a child that has closed its
        // input says what it has to say in its output.
        let _ = stdin.write_all(input);
    }
    let status = loop {
        if let Some(status) = group.0.try_wait()? {
            break Some(status);
        }
        if begun.elapsed() >= limit {
            break None;
        }
        thread::sleep(LOOK_EVERY);
    };
    drop(group);
    let text = |output: Receiver<Vec<u8>>| {
        let bytes = output.recv_timeout(DRAIN_TIMEOUT).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(Ran {
        status,
        stdout: text(stdout),
        stderr: text(stderr),
    })
}

/// Reads a stream to its end in a thread of its own.
fn drain(stream: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    if let Some(mut stream) = stream {
        thread::spawn(move || {
            let mut kept = Vec::new();
            let mut buffer = [0; 16 << 10];
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                let room = OUTPUT_BYTES_MAX - kept.len();
                kept.extend_from_slice(&buffer[..count.min(room)]);
            }
            let _ = sender.send(kept);
        });
    }
    receiver
}
