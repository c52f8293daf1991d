//! A scripted engine.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

mod http;
mod script;

pub(crate) use script::{BUSY, Framing, Script, handle};

/// How an exchange ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Whole,
    ProxyClosed,
}

/// One request that the engine received.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    /// Method, path and version as they came.
    pub(crate) line: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
    pub(crate) ended: Option<Ended>,
    /// Connections accepted up to this request.
    pub(crate) connection: usize,
}

impl Seen {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub(crate) fn rank(&self) -> Option<&str> {
        self.headers.get("x-data-parallel-rank").map(String::as_str)
    }
}

/// Blocks pinned on all prefill engines of one test, by transfer id.
pub(crate) type Blocks = Arc<Mutex<BTreeSet<String>>>;

#[derive(Debug)]
struct State {
    default: Script,
    next: VecDeque<Script>,
    seen: Vec<Seen>,
    connections: usize,
    /// First line and `Host` of everything that was asked, probes too.
    asked: Vec<(String, String)>,
    /// Requests that are being performed, and the most there ever were.
    running: (usize, usize),
    healthy: bool,
    /// `Host` without which everything is answered 421, as by a gateway that routes by it.
    host: Option<String>,
    blocks: Blocks,
    /// Answer to `GET /query`, as Mooncake's bootstrap server gives it.
    bootstrap: String,
    /// Status and body of the answer to `GET /v1/models`; without, one that shows the key.
    models: Option<(u16, String)>,
    /// Answer to `GET /metrics`, in which `RUNNING` is as many requests as are being performed; 404
    /// without.
    metrics: Option<String>,
}

/// One scripted engine on its own port.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
    server: JoinHandle<()>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Engine {
    pub(crate) async fn prefill(blocks: &Blocks) -> Self {
        Self::start(Script::Prefill, blocks).await
    }

    pub(crate) async fn decode(blocks: &Blocks) -> Self {
        Self::start(Script::Decode, blocks).await
    }

    pub(crate) async fn start(default: Script, blocks: &Blocks) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        Self::on(listener, default, blocks)
    }

    fn on(listener: TcpListener, default: Script, blocks: &Blocks) -> Self {
        let address = listener.local_addr().expect("address");
        let state = Arc::new(Mutex::new(State {
            default,
            next: VecDeque::new(),
            seen: Vec::new(),
            connections: 0,
            asked: Vec::new(),
            running: (0, 0),
            healthy: true,
            host: None,
            blocks: Arc::clone(blocks),
            bootstrap: "{}".to_owned(),
            models: None,
            metrics: None,
        }));
        let shared = Arc::clone(&state);
        let server = tokio::spawn(async move {
            // Dropped with this task, the set closes every connection: the engine is killed.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let number = {
                    let mut state = shared.lock().expect("state");
                    state.connections += 1;
                    state.connections
                };
                connections.spawn(http::serve(stream, Arc::clone(&shared), number));
            }
        });
        Self {
            address,
            state,
            server,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What the next request without a script of its own meets.
    pub(crate) fn always(&self, script: Script) {
        self.state.lock().expect("state").default = script;
    }

    /// What the next request meets, once.
    pub(crate) fn once(&self, script: Script) {
        self.state.lock().expect("state").next.push_back(script);
    }

    pub(crate) fn set_healthy(&self, healthy: bool) {
        self.state.lock().expect("state").healthy = healthy;
    }

    /// Answers 421 to every request that names another `Host`, or is no HTTP/1.1.
    pub(crate) fn demand_host(&self, host: &str) {
        self.state.lock().expect("state").host = Some(host.to_owned());
    }

    /// The engine ids that this engine tells as a bootstrap server, DP rank 0 first.
    pub(crate) fn set_engine_ids(&self, ids: &[&str]) {
        let entries: serde_json::Map<String, Value> = (0..)
            .zip(ids)
            .map(|(rank, id): (u32, _)| {
                let entry = json!({"engine_id": id, "worker_addr": {"0": {"0": "tcp://h:1"}}});
                (rank.to_string(), entry)
            })
            .collect();
        self.state.lock().expect("state").bootstrap = Value::from(entries).to_string();
    }

    pub(crate) fn set_models(&self, status: u16, body: &str) {
        self.state.lock().expect("state").models = Some((status, body.to_owned()));
    }

    pub(crate) fn set_metrics(&self, text: Option<&str>) {
        self.state.lock().expect("state").metrics = text.map(str::to_owned);
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.lock().expect("state").seen.clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.state.lock().expect("state").seen.len()
    }

    /// First line and `Host` of everything that was asked, probes too.
    pub(crate) fn asked(&self) -> Vec<(String, String)> {
        self.state.lock().expect("state").asked.clone()
    }

    /// The most requests that it ever performed at once.
    pub(crate) fn peak(&self) -> usize {
        self.state.lock().expect("state").running.1
    }

    /// How the `at`-th request ended, if it has.
    pub(crate) fn ended(&self, at: usize) -> Option<Ended> {
        self.state.lock().expect("state").seen.get(at)?.ended
    }

    /// Stops listening and closes all connections.
    pub(crate) async fn kill(&self) {
        self.server.abort();
        while !self.server.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
        // The port refuses once the listener is gone.
        while TcpStream::connect(self.address).await.is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// Another engine on the same port, after [`Engine::kill`].
    pub(crate) async fn restart(&self, default: Script) -> Self {
        let blocks = Arc::clone(&self.state.lock().expect("state").blocks);
        let listener = TcpListener::bind(self.address)
            .await
            .expect("the port is free");
        Self::on(listener, default, &blocks)
    }
}

/// A prefill and a decode engine.
pub(crate) async fn pair() -> (Engine, Engine) {
    pair_on(&Blocks::default()).await
}

/// As [`pair`], for a test that looks at the blocks.
pub(crate) async fn pair_on(blocks: &Blocks) -> (Engine, Engine) {
    (Engine::prefill(blocks).await, Engine::decode(blocks).await)
}

/// As many prefill and decode engines as the caller names.
pub(crate) async fn engines<const P: usize, const D: usize>(
    blocks: &Blocks,
) -> ([Engine; P], [Engine; D]) {
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for _ in 0..P {
        prefill.push(Engine::prefill(blocks).await);
    }
    for _ in 0..D {
        decode.push(Engine::decode(blocks).await);
    }
    let prefill = prefill.try_into().expect("P of them");
    (prefill, decode.try_into().expect("D of them"))
}

/// Waits until every transfer that prefill pinned was freed.
pub(crate) async fn freed(blocks: &Blocks) -> Duration {
    let start = Instant::now();
    crate::until("all blocks freed", || {
        blocks.lock().expect("blocks").is_empty()
    })
    .await;
    start.elapsed()
}
