//! The executable under as many clients as make others break.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::client::Client;
use crate::engine::{Blocks, Engine, Script};
use crate::process::{Started, signal};
use crate::{COMPLETIONS, PROMPT, STREAM};

const CLIENTS: usize = 2_048;

/// Descriptors that the executable may open when it starts: far too few, unless it asks for more.
const OPEN_FILES: u32 = 256;

struct Executable {
    process: Started,
    address: SocketAddr,
}

impl Executable {
    async fn start(prefill: &[&Engine], decode: &[&Engine], flags: &[&str]) -> Self {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = free.local_addr().expect("address");
        drop(free);
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(format!("ulimit -Sn {OPEN_FILES} && exec \"$0\" \"$@\""))
            .args([env!("CARGO_BIN_EXE_hetero-kv-proxy"), "serve"])
            .args(["--listen", &address.to_string(), "--log-level", "error"])
            .args(flags);
        for engine in prefill {
            command.args(["--prefill", &engine.url()]);
        }
        for engine in decode {
            command.args(["--decode", &engine.url()]);
        }
        let child = command.stdin(Stdio::null()).spawn().expect("it starts");
        let process = Started::new(child);
        let executable = Self { process, address };
        let begun = Instant::now();
        while TcpStream::connect(address).await.is_err() {
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "it does not listen"
            );
            sleep(Duration::from_millis(10)).await;
        }
        executable
    }

    fn rss_mib(&self) -> u64 {
        let id = self.process.child().id();
        let status = std::fs::read_to_string(format!("/proc/{id}/status"));
        let status = status.expect("it runs");
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = rss.and_then(|text| text.trim().strip_suffix(" kB"));
        let kib: u64 = kib.expect("VmRSS").trim().parse().expect("a number");
        kib >> 10
    }
}

async fn engines(prefill: Script, decode: Script) -> (Engine, Engine, Engine, Engine) {
    hetero_kv_proxy::run::raise_open_files();
    let blocks = Blocks::default();
    let start = async |script: &Script| Engine::start(script.clone(), &blocks).await;
    (
        start(&prefill).await,
        start(&prefill).await,
        start(&decode).await,
        start(&decode).await,
    )
}

/// Nobody accepts while the process stands still, as it may for a moment on a loaded machine.
#[tokio::test]
async fn a_burst_finds_room_while_nobody_accepts_and_with_few_descriptors_at_start() {
    let (p0, p1, d0, d1) = engines(Script::Prefill, Script::Decode).await;
    let proxy = Executable::start(&[&p0, &p1], &[&d0, &d1], &[]).await;
    let somaxconn = std::fs::read_to_string("/proc/sys/net/core/somaxconn").expect("Linux has it");
    let room = somaxconn.trim().parse::<usize>().expect("a number");
    let burst = CLIENTS.min(room);

    signal(proxy.process.child(), Signal::STOP);
    let mut clients = Vec::new();
    for at in 0..burst {
        let connected = timeout(Duration::from_millis(800), Client::connect(proxy.address)).await;
        let mut client = connected.unwrap_or_else(|_| panic!("connection {at} finds no room"));
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        clients.push(client);
    }
    signal(proxy.process.child(), Signal::CONT);
    for mut client in clients {
        assert_eq!(client.reply().await.status, 200);
    }
    assert_eq!(d0.count() + d1.count(), burst);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_2048_clients_for_ten_seconds_end_whole_within_120_mib() {
    // Ten tokens, one a second.
    let mut chunks = vec!["data: {\"choices\":[{\"text\":\"token\"}]}\n\n"; 10];
    chunks.push("data: [DONE]\n\n");
    let whole = chunks.concat();
    let stream = Script::Stream(chunks, Duration::from_secs(1));
    let (p0, p1, d0, d1) = engines(Script::Prefill, stream).await;
    // With one thread memory goes back to the system too; what several threads have freed for each
    // other is kept for the next burst.
    for (round, flags) in [(1, &["--threads", "1"][..]), (2, &[])] {
        let proxy = Executable::start(&[&p0, &p1], &[&d0, &d1], flags).await;
        let before = proxy.rss_mib();
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let address = proxy.address;
            clients.spawn(async move {
                let mut client = Client::connect(address).await;
                client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
                let reply = client.reply().await;
                (reply.status, reply.whole, reply.text())
            });
        }
        let mut peak = 0;
        let mut served = 0;
        while !clients.is_empty() {
            peak = peak.max(proxy.rss_mib());
            let ended = timeout(Duration::from_millis(200), clients.join_next()).await;
            if let Ok(Some(ended)) = ended {
                let (status, is_whole, text) = ended.expect("a client");
                assert_eq!((status, is_whole), (200, true));
                assert!(text == whole, "{text}");
                served += 1;
            }
        }
        assert_eq!(served, CLIENTS);
        assert_eq!(d0.count() + d1.count(), round * CLIENTS);
        // A slow machine may be done with the first before the last has come.
        let at_once = d0.peak() + d1.peak();
        assert!(at_once > CLIENTS / 2, "{at_once} at once");
        assert!(peak <= 120, "{peak} MiB");
        let begun = Instant::now();
        let mut after = proxy.rss_mib();
        while round == 1 && after > before + 16 {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{before} MiB before, {peak} at most, {after} after"
            );
            sleep(Duration::from_millis(250)).await;
            after = proxy.rss_mib();
        }
    }
}
