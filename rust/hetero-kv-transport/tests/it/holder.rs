//! A holder in a process of its own: this test binary, started again.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use hetero_kv_core::auth::Keys;
use hetero_kv_core::ids::{
    DpRank, EngineId, Epoch, Incarnation, LeaseRef, PpRank, Slot, TpRank, TransferId,
};
use hetero_kv_core::layout::KvHeads;
use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::plan::{Owner, Pairing, Route, SourceChooser};
use hetero_kv_core::wire::card::Endpoints;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::lease_page::LeasePage;
use hetero_kv_transport::memory::LocalMemory;
use hetero_kv_transport::net::listen::ListenAddress;
use hetero_kv_transport::process;
use hetero_kv_transport::reader::{
    JobDone, ReadJob, ReadPiece, Reader, ReaderOptions, TransportChoice,
};
use hetero_kv_transport::tcp::{DataServer, HolderPlace, ServerOptions};
use hetero_kv_transport::transport::{Source, TransportName};
use hetero_kv_transport::verbs::{Node, VerbsError, VerbsOptions};
use serde::{Deserialize, Serialize};

use super::buffer::{Buffer, pattern, register};

const CONFIG: &str = "HKV_TEST_HOLDER";
const MARK: &str = "HKV ";
/// Producer ranks of the test engines.
const TP: u32 = 8;

/// What a holder is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HolderConfig {
    pub(crate) region_bytes: Vec<usize>,
    pub(crate) seed: u64,
    pub(crate) host: String,
    pub(crate) ports: Option<(u16, u16)>,
    pub(crate) incarnation: u64,
    pub(crate) tp_rank: u32,
    /// Rank and engine are not told to the server.
    pub(crate) nameless: bool,
    pub(crate) connections_max: usize,
    pub(crate) frame_timeout_ms: u64,
    /// A file of them; empty where there are none.
    pub(crate) keys: String,
}

impl Default for HolderConfig {
    fn default() -> Self {
        Self {
            region_bytes: vec![1 << 20, 300_001],
            seed: 1,
            host: "127.0.0.1".into(),
            ports: None,
            incarnation: 0x11,
            tp_rank: 0,
            nameless: false,
            connections_max: 256,
            frame_timeout_ms: 10_000,
            keys: String::new(),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Card {
    endpoints: Endpoints,
    regions: Vec<MemoryRegion>,
}

/// What the parent tells a holder.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Raise a slot's epoch.
    Bump { slot: u32, epoch: u64 },
    /// Fill all regions with another seed's pattern.
    Fill { seed: u64 },
    /// Bump slot 0 and refill with the new epoch as seed, over and over, with this pause.
    Churn { pause_us: u64 },
    /// The epoch of slot 0 whose pattern stands.
    Epoch,
    /// Stop the churn.
    Rest,
    /// Connections served.
    Connections,
}

pub(crate) fn engine() -> EngineId {
    EngineId::new("prefill_dp1").expect("a valid id")
}

fn owner(incarnation: u64) -> Owner {
    Owner {
        engine: engine(),
        incarnation: Incarnation(incarnation),
        dp_rank: DpRank(1),
    }
}

/// The route to a rank of the test engine: only a plan makes one.
pub(crate) fn route(incarnation: u64, tp_rank: u32) -> Route {
    let heads = KvHeads::Grouped(TP.try_into().expect("not zero"));
    let pairing = Pairing::new(TP, TP, heads).expect("equal shapes pair");
    let chooser = SourceChooser::new(TransferId([7; 16]));
    let plan = pairing
        .rank_plan(TpRank(tp_rank), &chooser)
        .expect("a rank of the shape");
    let mut routes = plan.routes(&owner(incarnation), PpRank(0));
    assert_eq!(routes.len(), 1);
    routes.remove(0)
}

/// The holder's side of these tests. Runs as a process of its own, started by [`Holder::start`].
#[test]
#[ignore = "a process that other tests start"]
fn holder_process() {
    let config = std::env::var(CONFIG).expect("started by a test");
    let config: HolderConfig = serde_json::from_str(&config).expect("own format");
    let buffers: Vec<Buffer> = config
        .region_bytes
        .iter()
        .map(|&bytes| Buffer::new(bytes, 0))
        .collect();
    let fill = |seed: u64| {
        for (region, buffer) in buffers.iter().enumerate() {
            buffer.fill_with(|offset| pattern(seed, region, offset));
        }
    };
    fill(config.seed);
    let page = Arc::new(LeasePage::new(64).expect("mapped"));
    let memory = register(&buffers);
    let node = rdma_node(&memory, Some(Arc::clone(&page))).ok();
    let readable = process::of_this_process(Arc::clone(&page), true).expect("this process");
    let range: Option<RangeInclusive<u16>> = config.ports.map(|(first, last)| first..=last);
    let server = DataServer::start(
        memory,
        Arc::clone(&page),
        ServerOptions {
            address: ListenAddress {
                host: config.host.clone(),
                port_range: range,
                ..ServerOptions::default().address
            },
            connections_max: config.connections_max,
            frame_timeout: Duration::from_millis(config.frame_timeout_ms),
            verbs: node.clone(),
            keys: (!config.keys.is_empty())
                .then(|| Keys::parse(config.keys.as_bytes()).expect("keys")),
            ..ServerOptions::default()
        },
    )
    .expect("listening");
    if !config.nameless {
        server.serve_as(HolderPlace {
            owner: owner(config.incarnation),
            tp_rank: TpRank(config.tp_rank),
            pp_rank: PpRank(0),
        });
    }
    say(&Card {
        endpoints: Endpoints {
            process: Some(readable.endpoint().clone()),
            verbs: node.and_then(|node| node.endpoint(server.endpoint())),
            tcp: Some(server.endpoint().clone()),
            mori: None,
        },
        regions: buffers.iter().map(Buffer::region).collect(),
    });

    let churning = AtomicBool::new(false);
    let standing = AtomicU64::new(1);
    let between = Mutex::new(());
    thread::scope(|scope| {
        for line in std::io::stdin().lines() {
            let order: Order =
                serde_json::from_str(&line.expect("the parent's words")).expect("own format");
            match order {
                Order::Bump { slot, epoch } => {
                    say(&page.bump(Slot(slot), Epoch(epoch)).expect("on the page"));
                }
                Order::Fill { seed } => {
                    fill(seed);
                    say(&seed);
                }
                Order::Churn { pause_us } => {
                    churning.store(true, Ordering::Relaxed);
                    let (churning, standing, page) = (&churning, &standing, &page);
                    let (between, fill) = (&between, &fill);
                    scope.spawn(move || {
                        while churning.load(Ordering::Relaxed) {
                            thread::sleep(Duration::from_micros(pause_us));
                            let _filling = between.lock().expect("no panic under the lock");
                            let next = standing.load(Ordering::Relaxed) + 1;
                            page.bump(Slot(0), Epoch(next)).expect("on the page");
                            fill(next);
                            standing.store(next, Ordering::Relaxed);
                        }
                    });
                    say(&pause_us);
                }
                Order::Epoch => {
                    let _not_filling = between.lock().expect("no panic under the lock");
                    say(&standing.load(Ordering::Relaxed));
                }
                Order::Rest => {
                    churning.store(false, Ordering::Relaxed);
                    say(&0);
                }
                Order::Connections => say(&server.stats().connections),
            }
        }
        churning.store(false, Ordering::Relaxed);
    });
}

fn say(value: &impl Serialize) {
    let text = serde_json::to_string(value).expect("plain data");
    // Past libtest's own capture of prints.
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{MARK}{text}").expect("the parent listens");
    out.flush().expect("the parent listens");
}

/// A holder as its parent sees it. Dropping it ends the process.
pub(crate) struct Holder {
    child: Child,
    /// Closed to make it end by itself.
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    pub(crate) config: HolderConfig,
    pub(crate) source: Arc<Source>,
}

impl Holder {
    pub(crate) fn start(config: HolderConfig) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .args([
                "holder::holder_process",
                "--exact",
                "--ignored",
                "--nocapture",
            ])
            .env(CONFIG, serde_json::to_string(&config).expect("plain data"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this binary starts again");
        let orders = child.stdin.take();
        let mut answers = BufReader::new(child.stdout.take().expect("piped")).lines();
        let card: Card = answer(&mut answers);
        let source = Arc::new(Source {
            route: route(config.incarnation, config.tp_rank),
            endpoints: card.endpoints,
            regions: card.regions,
        });
        Self {
            child,
            orders,
            answers,
            config,
            source,
        }
    }

    pub(crate) fn order(&mut self, order: Order) -> u64 {
        let text = serde_json::to_string(&order).expect("plain data");
        let orders = self.orders.as_mut().expect("piped");
        writeln!(orders, "{text}").expect("the holder lives");
        let value: serde_json::Value = answer(&mut self.answers);
        value
            .as_u64()
            .unwrap_or_else(|| u64::from(value == serde_json::Value::Bool(true)))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: i32) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let signal = rustix::process::Signal::from_named_raw(signal).expect("a named signal");
        rustix::process::kill_process(pid, signal).expect("the holder is our child");
    }

    /// Stops the process, and waits until each of its threads stands: the signal alone is only
    /// asked for.
    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let stands = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it lives");
            tasks.flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                stat.rsplit_once(") ")
                    .is_some_and(|(_, state)| state.starts_with('T'))
            })
        };
        let stopped = (0..1000).any(|_| {
            thread::sleep(Duration::from_millis(10));
            stands()
        });
        assert!(stopped, "the holder does not stop");
    }

    /// Ends the process and waits until it has ended.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("the holder is our child");
        self.child.wait().expect("the holder is our child");
    }

    /// The same rank, dialled somewhere else.
    pub(crate) fn via(&self, port: u16) -> Arc<Source> {
        let mut source = Source::clone(&self.source);
        if let Some(verbs) = &mut source.endpoints.verbs {
            verbs.host = "127.0.0.1".into();
            verbs.port = port;
        }
        let tcp = source
            .endpoints
            .tcp
            .as_mut()
            .expect("every holder serves tcp");
        tcp.host = "127.0.0.1".into();
        tcp.port = port;
        Arc::new(source)
    }

    pub(crate) fn tcp_port(&self) -> u16 {
        let tcp = self.source.endpoints.tcp.as_ref();
        tcp.expect("every holder serves tcp").port
    }
}

fn answer<T: for<'de> Deserialize<'de>>(answers: &mut Lines<BufReader<ChildStdout>>) -> T {
    loop {
        let line = answers
            .next()
            .expect("the holder has not ended")
            .expect("readable");
        if let Some(text) = line.strip_prefix(MARK) {
            return serde_json::from_str(text).expect("own format");
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // SIGKILL ends a stopped process too. A test that has become another user may not send it.
        let _ = self.child.kill();
        self.orders = None;
        let _ = self.child.wait();
    }
}

pub(crate) fn lease(slot: u32, epoch: u64) -> LeaseRef {
    LeaseRef {
        slot: Slot(slot),
        epoch: Epoch(epoch),
    }
}

/// A reader that uses one transport only.
pub(crate) fn reader(buffers: &[Buffer], transport: TransportName) -> Reader {
    reader_with(buffers, transport, |_| {})
}

pub(crate) fn reader_with(
    buffers: &[Buffer],
    transport: TransportName,
    change: impl FnOnce(&mut ReaderOptions),
) -> Reader {
    let memory = register(buffers);
    let mut options = ReaderOptions {
        choice: match transport {
            TransportName::Process => TransportChoice::Process,
            TransportName::Verbs => TransportChoice::Verbs,
            TransportName::Tcp => TransportChoice::Tcp,
            TransportName::Mori => TransportChoice::Mori,
        },
        verbs: (transport == TransportName::Verbs)
            .then(|| rdma_node(&memory, None).expect("there is a device")),
        ..ReaderOptions::default()
    };
    change(&mut options);
    Reader::start(memory, options)
}

/// This host's RDMA device with the memory registered.
pub(crate) fn rdma_node(
    memory: &Arc<LocalMemory>,
    page: Option<Arc<LeasePage>>,
) -> Result<Arc<Node>, VerbsError> {
    let here = Some(IpAddr::from([127, 0, 0, 1]));
    Node::open(VerbsOptions::default(), here, Arc::clone(memory), page)
}

/// Whether verbs can be tested here; where it cannot, the reason is printed for the count of skips.
/// `HETERO_KV_REQUIRE_RDMA` makes the lack of a device a failure.
pub(crate) fn rdma_here() -> bool {
    let memory = register(&[]);
    match rdma_node(&memory, None) {
        Ok(_) => true,
        Err(error) if std::env::var_os("HETERO_KV_REQUIRE_RDMA").is_some() => {
            panic!("RDMA is required: {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    }
}

/// A job of one piece, with a minute of time, under slot 0's first epoch.
pub(crate) fn job(id: u64, source: &Arc<Source>, runs: &[Run]) -> ReadJob {
    ReadJob {
        id,
        lease: lease(0, 1),
        deadline: now() + Duration::from_secs(60),
        pieces: vec![ReadPiece {
            source: Arc::clone(source),
            runs: runs.to_vec().into(),
        }],
    }
}

/// Waits for `count` jobs, and that no more come.
pub(crate) fn wait_all(reader: &Reader, count: usize) -> Vec<JobDone> {
    let until = now() + Duration::from_secs(60);
    let mut done = Vec::new();
    while done.len() < count {
        assert!(now() < until, "{} of {count} jobs done in time", done.len());
        reader.wait(Duration::from_millis(500));
        done.extend(reader.drain());
    }
    assert_eq!(done.len(), count);
    done
}

pub(crate) fn wait_one(reader: &Reader) -> JobDone {
    wait_all(reader, 1).remove(0)
}

pub(crate) fn failure_kind(done: &JobDone) -> ReadFailureKind {
    done.outcome.as_ref().expect_err("the job fails").kind
}

/// Makes a test of each transport out of a function of one.
macro_rules! each_transport {
    ($($(#[$meta:meta])* $name:ident;)*) => {
        mod process {
            use hetero_kv_transport::transport::TransportName;
            $($(#[$meta])* #[test] fn $name() { super::$name(TransportName::Process); })*
        }
        mod verbs {
            use hetero_kv_transport::transport::TransportName;
            $($(#[$meta])* #[test] fn $name() {
                if $crate::holder::rdma_here() {
                    super::$name(TransportName::Verbs);
                }
            })*
        }
        mod tcp {
            use hetero_kv_transport::transport::TransportName;
            $($(#[$meta])* #[test] fn $name() { super::$name(TransportName::Tcp); })*
        }
    };
}
pub(crate) use each_transport;
