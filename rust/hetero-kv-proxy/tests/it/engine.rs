//! A scripted engine.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

/// What the engine does with one request.
#[derive(Debug, Clone)]
pub(crate) enum Script {
    /// Prefill: checks limits as vLLM does, pins blocks, answers with params.
    Prefill,
    /// As `Prefill`, but its answer leaves the engine this much after the blocks were pinned, also
    /// when nobody waits any more.
    PinThen(Duration),
    /// `Prefill` for a leg that asks it to keep blocks, else `Decode`.
    Both,
    /// Decode: frees the blocks of the request's params, answers with one JSON object.
    Decode,
    /// Decode: frees, then these chunks with a pause before each, then the end.
    Stream(Vec<&'static str>, Duration),
    /// As `Stream`, but each chunk waits for a permit of the test.
    Gated(Vec<&'static str>, Arc<Semaphore>),
    /// As `Stream`, but the connection closes without the end.
    StreamThenClose(Vec<&'static str>),
    /// As `StreamThenClose`, but the close is the end: the body has no framing of its own.
    StreamUntilClose(Vec<&'static str>),
    /// As `Stream`, but nothing more comes and the connection stays.
    StreamThenSilence(Vec<&'static str>),
    /// A plain answer of which only this part comes before the connection closes: with a length
    /// that is not reached, or in chunks without the last.
    Truncated(&'static str, Framing),
    /// These bytes, whatever they are; then nothing, until the proxy closes.
    Raw(&'static str),
    /// An event stream whose next chunk, this one, is there as soon as the last was taken.
    Firehose(&'static str),
    /// Status, content type, body.
    Answer(u16, &'static str, &'static str),
    /// As `Decode`, but 500 for transfers that were pinned here: no KV gets over from there.
    DecodeBut(Blocks),
    /// This status, with `Retry-After: 7`.
    Busy(u16),
    /// Nothing, until the proxy closes.
    Silence,
    /// Closes without an answer.
    Close,
    /// Resets without an answer.
    Reset,
    /// Waits first.
    After(Duration, Box<Script>),
}

/// How the length of a body is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    Length,
    Chunks,
}

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
                connections.spawn(serve(stream, Arc::clone(&shared), number));
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

async fn serve(stream: TcpStream, state: Arc<Mutex<State>>, connection: usize) {
    stream.set_nodelay(true).expect("no delay");
    let (mut reader, mut writer) = stream.into_split();
    let mut buffer = Vec::new();
    while let Some((line, headers, body)) = read_request(&mut reader, &mut buffer).await {
        let host = headers.get("host").cloned().unwrap_or_default();
        let misdirected = {
            let mut state = state.lock().expect("state");
            state.asked.push((line.clone(), host.clone()));
            let demanded = state.host.as_ref();
            demanded.is_some_and(|demanded| *demanded != host || !line.ends_with(" HTTP/1.1"))
        };
        if misdirected {
            if writer.write_all(plain(421, "").as_bytes()).await.is_err() {
                return;
            }
            continue;
        }
        // What an engine answers by itself, also behind a base path.
        let path = line.replacen(" /base/", " /", 1);
        if path.starts_with("GET /metrics ") {
            let answer = {
                let state = state.lock().expect("state");
                let running = state.running.0.to_string();
                state.metrics.clone().map_or_else(
                    || plain(404, ""),
                    |text| typed(200, "text/plain", &text.replace("RUNNING", &running)),
                )
            };
            if writer.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
            continue;
        }
        let own = ["GET /health ", "GET /query ", "GET /v1/models "];
        if own.iter().any(|own| path.starts_with(own)) {
            let (healthy, bootstrap, models) = {
                let state = state.lock().expect("state");
                (state.healthy, state.bootstrap.clone(), state.models.clone())
            };
            let answer = if path.starts_with("GET /query ") {
                plain(200, &bootstrap)
            } else if let (true, Some((status, body))) =
                (path.starts_with("GET /v1/models "), &models)
            {
                plain(*status, body)
            } else if path.starts_with("GET /v1/models ") {
                let auth = headers.get("authorization").cloned().unwrap_or_default();
                plain(200, &json!({"object": "list", "auth": auth}).to_string())
            } else {
                plain(if healthy { 200 } else { 503 }, "")
            };
            if writer.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
            continue;
        }
        let (at, script, blocks) = {
            let mut state = state.lock().expect("state");
            let script = state.next.pop_front();
            let script = script.unwrap_or_else(|| state.default.clone());
            state.seen.push(Seen {
                at: Instant::now(),
                line,
                headers,
                body: body.clone(),
                ended: None,
                connection,
            });
            state.running.0 += 1;
            state.running.1 = state.running.1.max(state.running.0);
            (state.seen.len() - 1, script, Arc::clone(&state.blocks))
        };
        let end = |ended| {
            let mut state = state.lock().expect("state");
            state.seen[at].ended = Some(ended);
        };
        // Nothing but the end of the connection comes while a request runs.
        let mut scrap = [0; 64];
        let performed = tokio::select! {
            keep = perform(script, &body, &blocks, &mut writer) => Some(keep),
            _ = reader.read(&mut scrap) => None,
        };
        state.lock().expect("state").running.0 -= 1;
        match performed {
            Some(keep) => {
                end(Ended::Whole);
                if !keep {
                    return;
                }
            }
            None => {
                end(Ended::ProxyClosed);
                return;
            }
        }
    }
}

type Incoming = (String, BTreeMap<String, String>, Vec<u8>);

async fn read_request(reader: &mut OwnedReadHalf, buffer: &mut Vec<u8>) -> Option<Incoming> {
    let head_end = loop {
        if let Some(at) = buffer.windows(4).position(|part| part == b"\r\n\r\n") {
            break at + 4;
        }
        if reader.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head: Vec<u8> = buffer.drain(..head_end).collect();
    let head = String::from_utf8(head).expect("ASCII");
    let mut lines = head.split("\r\n");
    let line = lines.next()?.to_owned();
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    assert!(
        !headers.contains_key("transfer-encoding"),
        "legs have a length"
    );
    let length = headers
        .get("content-length")
        .map_or(0, |length| length.parse().expect("a length"));
    while buffer.len() < length {
        if reader.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    Some((line, headers, buffer.drain(..length).collect()))
}

/// The body of [`Script::Busy`].
pub(crate) const BUSY: &str = r#"{"error":{"message":"come again","code":1.0}}"#;

fn plain(status: u16, body: &str) -> String {
    typed(status, "application/json", body)
}

fn typed(status: u16, kind: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status} Scripted\r\nContent-Type: {kind}\r\nX-Engine: scripted\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

const EVENTS: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";

/// Performs a script; false when the connection is to be closed.
async fn perform(
    script: Script,
    body: &[u8],
    blocks: &Blocks,
    writer: &mut OwnedWriteHalf,
) -> bool {
    // What is relayed may be anything.
    let request: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    let params = &request["kv_transfer_params"];
    let mut script = script;
    while let Script::After(pause, then) = script {
        sleep(pause).await;
        script = *then;
    }
    if matches!(script, Script::Both) {
        script = match params["do_remote_decode"] == json!(true) {
            true => Script::Prefill,
            false => Script::Decode,
        };
    }
    let free = || {
        if let Some(id) = params["transfer_id"].as_str() {
            blocks.lock().expect("blocks").remove(id);
        }
    };
    let answer = match script {
        Script::Prefill => match prefill(&request, blocks) {
            Ok(answer) => plain(200, &answer),
            Err(message) => plain(400, &json!({"error": {"message": message}}).to_string()),
        },
        Script::PinThen(way) => match prefill(&request, blocks) {
            Ok(answer) => {
                sleep(way).await;
                plain(200, &answer)
            }
            Err(message) => plain(400, &json!({"error": {"message": message}}).to_string()),
        },
        Script::Decode => {
            free();
            plain(
                200,
                r#"{"choices":[{"text":"ok"}],"usage":{"completion_tokens":8}}"#,
            )
        }
        Script::DecodeBut(elsewhere) => {
            let id = params["transfer_id"].as_str().unwrap_or_default();
            if elsewhere.lock().expect("blocks").remove(id) {
                plain(
                    500,
                    r#"{"error":{"message":"Internal server error","code":500}}"#,
                )
            } else {
                free();
                plain(200, r#"{"choices":[{"text":"ok"}]}"#)
            }
        }
        Script::Answer(status, kind, body) => typed(status, kind, body),
        Script::Busy(status) => {
            let answer = typed(status, "application/json", BUSY);
            answer.replacen("\r\n", "\r\nRetry-After: 7\r\n", 1)
        }
        Script::Stream(chunks, pause) => {
            free();
            if !stream(chunks, pause, writer).await {
                return false;
            }
            return writer.write_all(b"0\r\n\r\n").await.is_ok();
        }
        Script::Gated(chunks, gate) => {
            free();
            if !stream(vec![], Duration::ZERO, writer).await {
                return false;
            }
            for chunk in chunks {
                gate.acquire().await.expect("the gate is open").forget();
                if !write_chunk(chunk, writer).await {
                    return false;
                }
            }
            return writer.write_all(b"0\r\n\r\n").await.is_ok();
        }
        Script::StreamThenClose(chunks) => {
            free();
            stream(chunks, Duration::ZERO, writer).await;
            return false;
        }
        Script::StreamUntilClose(chunks) => {
            free();
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n";
            let sent = head.to_owned() + &chunks.concat();
            assert!(writer.write_all(sent.as_bytes()).await.is_ok());
            return false;
        }
        Script::StreamThenSilence(chunks) => {
            free();
            stream(chunks, Duration::ZERO, writer).await;
            std::future::pending().await
        }
        Script::Truncated(part, framing) => {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n";
            let sent = match framing {
                Framing::Length => format!("{head}Content-Length: 9999\r\n\r\n{part}"),
                Framing::Chunks => {
                    let size = part.len();
                    format!("{head}Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n{part}\r\n")
                }
            };
            let sent = writer.write_all(sent.as_bytes()).await;
            // The part must be read before the end is seen.
            sleep(Duration::from_millis(30)).await;
            assert!(sent.is_ok());
            return false;
        }
        Script::Raw(bytes) => {
            free();
            assert!(writer.write_all(bytes.as_bytes()).await.is_ok());
            std::future::pending().await
        }
        Script::Firehose(chunk) => {
            free();
            // Many at once, so that the engine is never what is waited for.
            let lump = format!("{:x}\r\n{chunk}\r\n", chunk.len()).repeat(4_096);
            if writer.write_all(EVENTS.as_bytes()).await.is_err() {
                return false;
            }
            while writer.write_all(lump.as_bytes()).await.is_ok() {}
            return false;
        }
        Script::Silence => std::future::pending().await,
        Script::Close => return false,
        Script::Reset => {
            let stream: &TcpStream = writer.as_ref();
            stream.set_zero_linger().expect("linger");
            return false;
        }
        Script::After(..) | Script::Both => unreachable!("unwrapped above"),
    };
    writer.write_all(answer.as_bytes()).await.is_ok()
}

async fn stream(chunks: Vec<&str>, pause: Duration, writer: &mut OwnedWriteHalf) -> bool {
    if writer.write_all(EVENTS.as_bytes()).await.is_err() {
        return false;
    }
    for chunk in chunks {
        sleep(pause).await;
        if !write_chunk(chunk, writer).await {
            return false;
        }
    }
    // What was written must be read before an end is seen.
    sleep(Duration::from_millis(30)).await;
    true
}

async fn write_chunk(chunk: &str, writer: &mut OwnedWriteHalf) -> bool {
    let framed = format!("{:x}\r\n{chunk}\r\n", chunk.len());
    writer.write_all(framed.as_bytes()).await.is_ok()
}

/// vLLM's checks of a prefill leg, and its answer.
fn prefill(request: &Value, blocks: &Blocks) -> Result<String, String> {
    let number = |name: &str| request.get(name).filter(|value| !value.is_null());
    if number("max_tokens") != Some(&json!(1)) {
        return Err("a prefill leg asks for one token".to_owned());
    }
    if number("min_tokens").is_some_and(|low| low.as_u64() > Some(1)) {
        return Err("min_tokens must be less than or equal to max_tokens".to_owned());
    }
    if request["stream"] == json!(true) {
        return Err("a prefill leg does not stream".to_owned());
    }
    if number("stream_options").is_some() {
        return Err("Stream options can only be defined when stream=True".to_owned());
    }
    let params = &request["kv_transfer_params"];
    if params["do_remote_decode"] != json!(true) || params["do_remote_prefill"] != json!(false) {
        return Err("no order to keep the blocks".to_owned());
    }
    let id = params["transfer_id"].as_str().ok_or("no transfer id")?;
    if id.len() != 32 || !id.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(format!("transfer id {id}"));
    }
    if !blocks.lock().expect("blocks").insert(id.to_owned()) {
        return Err("the transfer id was used before".to_owned());
    }
    // Spelled so that a re-serialising proxy would change it.
    Ok(format!(
        r#"{{"id":"x","choices":[{{"text":"t"}}], "kv_transfer_params": {} }}"#,
        handle(id)
    ))
}

/// The params that prefill answers with for a transfer.
pub(crate) fn handle(id: &str) -> String {
    format!(
        r#"{{"do_remote_prefill":true, "do_remote_decode":false,"transfer_id":"{id}","remote_block_ids":[[1,2],[3]],"odd":1.50e1,"deep":{{"a":[null]}}}}"#
    )
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
