//! Engines of either role that know each other's transfers.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use crate::load::{DONE, answer_words, event};
use crate::proxy::{Proxy, admin};

/// Life of a transfer that nobody reads.
pub(crate) const LEASE: Duration = Duration::from_secs(10);
const HEARTBEAT: Duration = Duration::from_millis(500);
const PREFILL_TIME: Duration = Duration::from_millis(4);
const TOKEN_TIME: Duration = Duration::from_millis(6);

/// Blocks that a start of an engine keeps for a decode leg.
struct Held {
    engine: usize,
    prompt: String,
    until: Instant,
}

#[derive(Default)]
struct Shared {
    held: Mutex<HashMap<String, Held>>,
    /// Those that were read or ran out, so that a second read is told from an unknown one.
    past: Mutex<HashMap<String, &'static str>>,
    wrong: Mutex<Vec<String>>,
    prefills: AtomicU64,
    decodes: AtomicU64,
    alone: AtomicU64,
    refused: AtomicU64,
    expired: AtomicU64,
    /// Legs under way in an engine when it was killed, and blocks that went with it.
    cut: AtomicU64,
}

impl Shared {
    fn wrong(&self, what: String) {
        let mut wrong = self.wrong.lock().expect("wrong");
        if wrong.len() < 20 {
            wrong.push(what);
        }
    }

    fn expire(&self) {
        let now = Instant::now();
        let mut held = self.held.lock().expect("held");
        let mut past = self.past.lock().expect("past");
        held.retain(|id, known| {
            let keep = known.until > now;
            if !keep {
                past.insert(id.clone(), "ran out");
                self.expired.fetch_add(1, Ordering::Relaxed);
            }
            keep
        });
    }
}

/// A running start of one engine.
struct Start {
    server: JoinHandle<()>,
    legs: Arc<AtomicU64>,
}

/// One address.
struct Engine {
    address: SocketAddr,
    role: &'static str,
    start: Mutex<Option<Start>>,
    starts: AtomicU64,
    /// Whether it sends heartbeats.
    beats: Mutex<bool>,
}

pub(crate) struct Engines {
    engines: Vec<Engine>,
    shared: Arc<Shared>,
}

impl Engines {
    /// As many engines, every second one told to be decode.
    pub(crate) async fn start(count: usize) -> Self {
        let mut engines = Vec::new();
        for at in 0..count {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
            let address = listener.local_addr().expect("address");
            drop(listener);
            engines.push(Engine {
                address,
                role: ["prefill", "decode"][at % 2],
                start: Mutex::new(None),
                starts: AtomicU64::new(0),
                beats: Mutex::new(true),
            });
        }
        let engines = Self {
            engines,
            shared: Arc::default(),
        };
        for at in 0..count {
            engines.restart(at).await;
        }
        engines
    }

    pub(crate) fn count(&self) -> usize {
        self.engines.len()
    }

    pub(crate) fn url(&self, at: usize) -> String {
        format!("http://{}", self.engines[at].address)
    }

    pub(crate) fn lives(&self, at: usize) -> bool {
        self.engines[at].start.lock().expect("start").is_some()
    }

    /// Another start at the same address.
    pub(crate) async fn restart(&self, at: usize) {
        let engine = &self.engines[at];
        let listener = loop {
            match TcpListener::bind(engine.address).await {
                Ok(listener) => break listener,
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        };
        engine.starts.fetch_add(1, Ordering::Relaxed);
        let legs = Arc::new(AtomicU64::new(0));
        let (shared, running) = (Arc::clone(&self.shared), Arc::clone(&legs));
        let server = tokio::spawn(async move {
            // Dropped with this task, the set closes every connection.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (shared, running) = (Arc::clone(&shared), Arc::clone(&running));
                connections.spawn(async move {
                    stream.set_nodelay(true).expect("no delay");
                    let serve = service_fn(|request| {
                        let (shared, running) = (Arc::clone(&shared), Arc::clone(&running));
                        async move { Ok::<_, Infallible>(answer(request, at, shared, running).await) }
                    });
                    let io = TokioIo::new(stream);
                    // A connection that the proxy closed is the proxy's affair.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(io, serve)
                        .await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        *engine.start.lock().expect("start") = Some(Start { server, legs });
    }

    /// Ends an engine with all it holds.
    pub(crate) async fn kill(&self, at: usize) {
        let start = self.engines[at].start.lock().expect("start").take();
        let Some(Start { server, legs }) = start else {
            return;
        };
        let mut cut = legs.load(Ordering::Relaxed);
        server.abort();
        let _ = server.await;
        {
            let mut held = self.shared.held.lock().expect("held");
            let mut past = self.shared.past.lock().expect("past");
            held.retain(|id, known| {
                let keep = known.engine != at;
                if !keep {
                    past.insert(id.clone(), "went with its engine");
                    cut += 1;
                }
                keep
            });
        }
        self.shared.cut.fetch_add(cut, Ordering::Relaxed);
    }

    /// Whether an engine sends heartbeats from now on.
    pub(crate) fn set_beats(&self, at: usize, beats: bool) {
        *self.engines[at].beats.lock().expect("beats") = beats;
    }

    /// Heartbeats of all engines that live, until the run ends.
    pub(crate) async fn register_all(self: &Arc<Self>, proxy: &Proxy) {
        for at in 0..self.count() {
            self.beat(at, proxy.admin).await;
        }
        let (engines, address) = (Arc::clone(self), proxy.admin);
        tokio::spawn(async move {
            loop {
                sleep(HEARTBEAT).await;
                engines.shared.expire();
                for at in 0..engines.count() {
                    let beats = *engines.engines[at].beats.lock().expect("beats");
                    if beats && engines.lives(at) {
                        engines.beat(at, address).await;
                    }
                }
            }
        });
    }

    async fn beat(&self, at: usize, address: SocketAddr) {
        let engine = &self.engines[at];
        let body = json!({
            "role": engine.role,
            "url": self.url(at),
            "engine_id": format!("{at}-{}", engine.starts.load(Ordering::Relaxed)),
            "heartbeat_interval_ms": HEARTBEAT.as_millis() as u64,
            // A busy host keeps heartbeats back; who leaves, leaves by an order or is killed.
            "ttl_ms": 10_000,
        });
        let (status, answer) = admin(address, "POST", "/v1/workers", &body.to_string()).await;
        let fine = matches!(status, 200 | 201) || answer.contains("worker_leaving");
        if !fine {
            self.shared
                .wrong(format!("registration of {at}: {status} {answer}"));
        }
    }

    pub(crate) fn held(&self) -> usize {
        self.shared.held.lock().expect("held").len()
    }

    pub(crate) fn wrong(&self) -> Vec<String> {
        self.shared.wrong.lock().expect("wrong").clone()
    }

    pub(crate) fn cut_by_kills(&self) -> u64 {
        self.shared.cut.load(Ordering::Relaxed)
    }

    pub(crate) fn expired(&self) -> u64 {
        self.shared.expired.load(Ordering::Relaxed)
    }

    pub(crate) fn told(&self) -> String {
        let shared = &self.shared;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        format!(
            "engines: {} prefill legs, {} decode legs, {} requests computed alone, {} legs refused \
             since their blocks were gone, {} transfers ran out, {} legs and transfers cut by kills",
            count(&shared.prefills),
            count(&shared.decodes),
            count(&shared.alone),
            count(&shared.refused),
            count(&shared.expired),
            count(&shared.cut)
        )
    }
}

type Body = BoxBody<Bytes, Infallible>;

/// A body whose pieces come from a task.
struct Pieces(mpsc::Receiver<Bytes>);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0
            .poll_recv(cx)
            .map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

/// Counts a leg while it runs.
struct Running(Arc<AtomicU64>);

impl Running {
    fn new(counter: Arc<AtomicU64>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn plain(status: u16, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).boxed();
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(body)
        .expect("a response")
}

async fn answer(
    request: Request<Incoming>,
    at: usize,
    shared: Arc<Shared>,
    running: Arc<AtomicU64>,
) -> Response<Body> {
    if request.method() == Method::GET {
        return plain(200, &json!({}));
    }
    let running = Running::new(running);
    let Ok(body) = request.into_body().collect().await else {
        return plain(400, &json!({}));
    };
    let request: Value = match serde_json::from_slice(&body.to_bytes()) {
        Ok(request) => request,
        Err(error) => {
            shared.wrong(format!("a leg that is no JSON: {error}"));
            return plain(400, &json!({}));
        }
    };
    let prompt = request["prompt"].as_str().unwrap_or_default().to_owned();
    let params = &request["kv_transfer_params"];
    if params["do_remote_decode"] == json!(true) {
        return prefill(&request, &prompt, at, &shared).await;
    }
    if params["do_remote_prefill"] == json!(true) {
        let id = params["transfer_id"].as_str().unwrap_or_default();
        shared.decodes.fetch_add(1, Ordering::Relaxed);
        let held = shared.held.lock().expect("held").remove(id);
        match held {
            Some(held) if held.prompt == prompt => {
                let mut past = shared.past.lock().expect("past");
                past.insert(id.to_owned(), "was read");
            }
            Some(held) => {
                shared.wrong(format!("{prompt:?} came with the KV of {:?}", held.prompt));
            }
            None => {
                let past = shared.past.lock().expect("past").get(id).copied();
                match past {
                    Some("was read") => shared.wrong(format!("{id} was read before")),
                    Some(_) => {}
                    None => shared.wrong(format!("{id} was never kept")),
                }
                shared.refused.fetch_add(1, Ordering::Relaxed);
                return plain(500, &json!({"error": {"message": "lease gone"}}));
            }
        }
    } else {
        shared.alone.fetch_add(1, Ordering::Relaxed);
    }
    decode(&request, &prompt, running)
}

async fn prefill(request: &Value, prompt: &str, at: usize, shared: &Shared) -> Response<Body> {
    let id = request["kv_transfer_params"]["transfer_id"].as_str();
    let id = id.unwrap_or_default().to_owned();
    let fine = request["max_tokens"] == json!(1) && request["stream"] != json!(true);
    if !fine || id.is_empty() {
        shared.wrong(format!("no prefill leg: {request}"));
    }
    shared.prefills.fetch_add(1, Ordering::Relaxed);
    // Dropped here when the proxy closes: nothing is kept, as vLLM does.
    sleep(PREFILL_TIME).await;
    let held = Held {
        engine: at,
        prompt: prompt.to_owned(),
        until: Instant::now() + LEASE,
    };
    let again = shared.held.lock().expect("held").insert(id.clone(), held);
    if again.is_some() || shared.past.lock().expect("past").contains_key(&id) {
        shared.wrong(format!("transfer id {id} was used twice"));
    }
    plain(
        200,
        &json!({
            "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
            "kv_transfer_params": {"do_remote_prefill": true, "transfer_id": id},
        }),
    )
}

fn decode(request: &Value, prompt: &str, running: Running) -> Response<Body> {
    let tokens = request["max_tokens"].as_u64().unwrap_or(0);
    let words = answer_words(prompt, tokens);
    if request["stream"] != json!(true) {
        let choice = json!({"index": 0, "text": words.concat(), "finish_reason": "length"});
        return plain(200, &json!({"choices": [choice]}));
    }
    let (sender, pieces) = mpsc::channel::<Bytes>(1);
    tokio::spawn(async move {
        let _running = running;
        for word in words {
            sleep(TOKEN_TIME).await;
            if sender.send(event(&word).into()).await.is_err() {
                return;
            }
        }
        // Nobody reads it where the client left.
        let _ = sender.send(DONE.into()).await;
    });
    Response::builder()
        .status(200)
        .header("content-type", "text/event-stream")
        .body(Pieces(pieces).boxed())
        .expect("a response")
}
