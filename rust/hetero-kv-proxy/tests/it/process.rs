//! The executable as a process, which does not outlive its test.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::time::{Instant, sleep};

/// The executable, without an environment.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hetero-kv-proxy"));
    command.env_clear();
    command
}

/// A process that does not outlive its test.
pub(crate) struct Started(Option<Child>);

impl Started {
    pub(crate) fn new(child: Child) -> Self {
        Self(Some(child))
    }

    pub(crate) fn child(&self) -> &Child {
        self.0.as_ref().expect("not taken yet")
    }

    pub(crate) fn child_mut(&mut self) -> &mut Child {
        self.0.as_mut().expect("not taken yet")
    }

    pub(crate) fn into_child(mut self) -> Child {
        self.0.take().expect("not taken yet")
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // One that has ended already is as good.
            let _killed = child.kill();
            let _status = child.wait();
        }
    }
}

pub(crate) fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("the process is there");
}

/// Waits for the end, at most 10 s.
pub(crate) async fn exit_code(mut child: Child) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("waiting") {
            return status.code();
        }
        assert!(start.elapsed() < Duration::from_secs(10), "still running");
        sleep(Duration::from_millis(10)).await;
    }
}

/// A serving process, and where it listens.
pub(crate) struct Serving {
    process: Started,
    pub(crate) clients: SocketAddr,
    pub(crate) admin: SocketAddr,
}

impl Serving {
    /// With these flags beside the listeners. What it logs afterwards is in `log`.
    pub(crate) fn start(flags: &[&str], log: &Path) -> Self {
        Self::start_in(&[], flags, log)
    }

    /// As `start`, in this environment.
    pub(crate) fn start_in(environment: &[(&str, &str)], flags: &[&str], log: &Path) -> Self {
        let file = std::fs::File::create(log).expect("a file");
        let child = command()
            .envs(environment.iter().copied())
            .args(["serve", "--listen", "127.0.0.1:0", "--admin-listen"])
            .args(["127.0.0.1:0", "--log-format", "json"])
            .args(["--health-interval-ms", "20"])
            .args(flags)
            .stderr(Stdio::from(file))
            .spawn()
            .expect("the executable starts");
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut serving = Self {
            process: Started::new(child),
            clients: nowhere,
            admin: nowhere,
        };
        let start = Instant::now();
        loop {
            let at = |message: &str| {
                lines(log).into_iter().find_map(|line| {
                    let fields = &line["fields"];
                    (fields["message"] == message)
                        .then(|| fields["listen"].as_str()?.parse().ok())
                        .flatten()
                })
            };
            if let (Some(clients), Some(admin)) = (at("serving"), at("serving administrators")) {
                (serving.clients, serving.admin) = (clients, admin);
                return serving;
            }
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{:?}",
                lines(log)
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Has it read its files again, and waits for the `count`th word about it.
    pub(crate) async fn reload(&self, log: &Path, count: usize) {
        signal(self.process.child(), Signal::HUP);
        let start = Instant::now();
        let told = || {
            let word = |line: &Value| {
                let message = line["fields"]["message"].as_str().unwrap_or_default();
                message.starts_with("reload")
            };
            lines(log).iter().filter(|line| word(line)).count()
        };
        while told() < count {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{:?}",
                lines(log)
            );
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The lines of a log that are whole.
pub(crate) fn lines(log: &Path) -> Vec<Value> {
    let file = std::fs::File::open(log).expect("a log");
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    lines
        .filter_map(|line| serde_json::from_str(&line).ok())
        .collect()
}
