//! The executable, as an operator runs it.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::client::Client;

pub(crate) struct Proxy {
    pub(crate) client: SocketAddr,
    pub(crate) admin: SocketAddr,
    child: Child,
}

/// What the process holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) rss_kib: u64,
    pub(crate) fds: u64,
}

/// One request to an administrators' listener: status and body.
pub(crate) async fn admin(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> (u16, String) {
    let mut client = Client::connect(address).await;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: admin\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    client.raw(format!("{head}{body}").as_bytes()).await;
    let reply = client.reply().await;
    (reply.status, reply.text())
}

fn free() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    listener.local_addr().expect("address")
}

impl Proxy {
    pub(crate) fn start() -> Self {
        let (client, admin) = (free(), free());
        let child = Command::new(env!("CARGO_BIN_EXE_hetero-kv-proxy"))
            .args(["serve", "--listen", &client.to_string()])
            .args(["--admin-listen", &admin.to_string()])
            .args(["--health-interval-ms", "300", "--drain-timeout-s", "10"])
            // Each change of a worker is a line at `info`.
            .args(["--log-level", "error"])
            .stdin(Stdio::null())
            .spawn()
            .expect("the executable starts");
        let listens = |address: SocketAddr| TcpStream::connect(address).is_ok();
        let end = Instant::now() + Duration::from_secs(10);
        while !(listens(client) && listens(admin)) {
            assert!(Instant::now() < end, "it does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self {
            client,
            admin,
            child,
        }
    }

    /// Waits until it has an engine of each role.
    pub(crate) async fn ready(&self) {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let mut client = Client::connect(self.client).await;
            client.get("/ready").await;
            let reply = client.reply().await;
            if reply.status == 200 {
                return;
            }
            assert!(Instant::now() < end, "not ready: {}", reply.text());
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Legs in flight, of all workers.
    pub(crate) async fn in_flight(&self) -> u64 {
        let mut client = Client::connect(self.client).await;
        client.get("/metrics").await;
        let text = client.reply().await.text();
        let legs = text
            .lines()
            .filter(|line| line.starts_with("hetero_kv_proxy_in_flight{"));
        legs.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }

    pub(crate) fn size(&self) -> Size {
        let process = format!("/proc/{}", self.child.id());
        let status = fs::read_to_string(format!("{process}/status")).expect("it runs");
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let rss = rss.and_then(|text| text.trim().strip_suffix(" kB"));
        Size {
            rss_kib: rss.expect("VmRSS").trim().parse().expect("a number"),
            fds: fs::read_dir(format!("{process}/fd"))
                .expect("it runs")
                .count() as u64,
        }
    }

    /// SIGTERM; whether it ends with 0.
    pub(crate) async fn stop(mut self) -> bool {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
        let end = Instant::now() + Duration::from_secs(20);
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                return status.success();
            }
            sleep(Duration::from_millis(20)).await;
        }
        false
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
