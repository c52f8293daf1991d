//! Scripted servers: a proxy with one prefill and two decode engines behind it, whose counters rise
//! as the script says.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What happens to a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    /// KV moves, the lease ends after a while.
    Moves { lease: Duration },
    /// Decode computes the whole prompt; the lease ends at once.
    Recomputes,
    /// Every other prompt is computed on decode.
    RecomputesHalf,
    /// Answers status 500.
    Fails,
    /// The first prompt moves, later ones get no answer at all.
    Hangs,
    /// The engines have no connector of ours.
    NoConnector,
    /// An engine's counters begin at 0 again after the first prompt.
    Restarts,
}

#[derive(Default)]
struct State {
    prompts: Vec<String>,
    external: [u64; 2],
    computed: [u64; 2],
    bytes: [u64; 2],
    leases: Vec<Instant>,
}

/// Addresses of the scripted servers; they end with the test's process.
pub(crate) struct Cluster {
    pub(crate) proxy: String,
    pub(crate) prefill: String,
    pub(crate) decode: [String; 2],
    state: Arc<Mutex<State>>,
}

/// Bytes a token has in the scripted cache.
pub(crate) const TOKEN_BYTES: u64 = 1000;

impl Cluster {
    pub(crate) fn start(script: Script) -> Self {
        let state = Arc::new(Mutex::new(State {
            // Traffic of before: only the rise may count.
            external: [70, 7],
            computed: [500, 5],
            bytes: [123_456, 0],
            ..State::default()
        }));
        let shared = Arc::clone(&state);
        let prefill = serve(move |request| prefill(&lock(&shared), script, request));
        let decode = [0, 1].map(|index| {
            let shared = Arc::clone(&state);
            serve(move |request| decode_metrics(&lock(&shared), script, index, request))
        });
        let workers = serde_json::json!([
            { "url": prefill, "role": "prefill", "dp": 1, "healthy": true },
            { "url": decode[0], "role": "decode", "dp": 2 },
            { "url": decode[1], "role": "decode", "dp": 1 },
        ])
        .to_string();
        let shared = Arc::clone(&state);
        let proxy = serve(move |request| match request.path.as_str() {
            "/workers" => ok(workers.clone()),
            "/v1/models" => ok(r#"{"object":"list","data":[{"id":"tiny"}]}"#.to_owned()),
            "/v1/completions" => complete(&shared, script, request),
            _ => status(404, "no such path"),
        });
        Self {
            proxy,
            prefill,
            decode,
            state,
        }
    }

    /// The prompts that arrived, in order.
    pub(crate) fn prompts(&self) -> Vec<String> {
        lock(&self.state).prompts.clone()
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().expect("no scripted server panics")
}

fn complete(state: &Mutex<State>, script: Script, request: &Request) -> Option<String> {
    let body: serde_json::Value = serde_json::from_str(&request.body).expect("a JSON body");
    assert_eq!(body["model"], "tiny");
    assert_eq!(body["max_tokens"], 8);
    let prompt = body["prompt"].as_str().expect("a prompt").to_owned();
    let tokens = prompt.split(' ').count() as u64;
    let mut state = lock(state);
    let index = state.prompts.len();
    state.prompts.push(prompt);
    let engine = index % 2;
    let (moves, lease) = match script {
        Script::Moves { lease } => (true, lease),
        Script::Recomputes => (false, Duration::ZERO),
        Script::RecomputesHalf => (index % 2 == 1, Duration::ZERO),
        Script::NoConnector => (false, Duration::ZERO),
        Script::Fails => return status(500, r#"{"error":{"message":"Internal server error"}}"#),
        Script::Hangs if index > 0 => return None,
        Script::Hangs => (true, Duration::ZERO),
        Script::Restarts => {
            state.external = [0; 2];
            (true, Duration::ZERO)
        }
    };
    state.leases.push(Instant::now() + lease);
    if moves {
        state.external[engine] += tokens - 1;
        state.computed[engine] += 1;
        state.bytes[engine] += tokens * TOKEN_BYTES;
    } else {
        state.computed[engine] += tokens;
    }
    ok(serde_json::json!({
        "choices": [{ "text": "words" }],
        "usage": { "prompt_tokens": tokens, "completion_tokens": 8 },
    })
    .to_string())
}

fn prefill(state: &State, script: Script, request: &Request) -> Option<String> {
    if request.path != "/metrics" {
        return status(404, "no such path");
    }
    let now = Instant::now();
    let alive = state.leases.iter().filter(|ends| **ends > now).count();
    let mut text =
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n".to_owned();
    if script != Script::NoConnector {
        text += &format!("hetero_kv_leases_alive{{engine=\"0\"}} {alive}.0\n");
    }
    ok(text)
}

fn decode_metrics(
    state: &State,
    script: Script,
    index: usize,
    request: &Request,
) -> Option<String> {
    if request.path != "/metrics" {
        return status(404, "no such path");
    }
    let labels = |source| format!("engine=\"0\",model_name=\"tiny\",source=\"{source}\"");
    let mut text = String::new();
    for (source, tokens) in [
        ("local_compute", state.computed[index]),
        ("local_cache_hit", 99),
        ("external_kv_transfer", state.external[index]),
    ] {
        text += &format!(
            "vllm:prompt_tokens_by_source_total{{{}}} {tokens}.0\n",
            labels(source)
        );
    }
    if script != Script::NoConnector {
        // Two thirds from rank 1, so that sources differ.
        for (tp, bytes) in [
            (0, state.bytes[index] / 3),
            (1, state.bytes[index] - state.bytes[index] / 3),
        ] {
            text += &format!(
                "hetero_kv_bytes_read_total{{source_engine=\"p\",source_tp=\"{tp}\"}} {bytes}.0\n"
            );
        }
    }
    ok(text)
}

/// A request as the script sees it.
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) body: String,
}

pub(crate) fn ok(body: String) -> Option<String> {
    status(200, &body)
}

pub(crate) fn status(status: u16, body: &str) -> Option<String> {
    Some(format!(
        "HTTP/1.1 {status} Scripted\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    ))
}

/// Serves on a free port; `answer` gives the whole response, or none to leave the client waiting.
pub(crate) fn serve(answer: impl Fn(&Request) -> Option<String> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("it is bound"));
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || serve_one(stream, answer.as_ref()));
        }
    });
    url
}

fn serve_one(stream: TcpStream, answer: &dyn Fn(&Request) -> Option<String>) {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        match reader.read_line(&mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if line.trim().is_empty() => break,
            Ok(_) => head.push(line),
        }
    }
    let length = head
        .iter()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .map_or(0, |(_, value)| value.trim().parse().expect("a length"));
    let mut body = vec![0; length];
    if reader.read_exact(&mut body).is_err() {
        return;
    }
    let path = head[0]
        .split(' ')
        .nth(1)
        .expect("a request line")
        .to_owned();
    let body = String::from_utf8(body).expect("JSON is text");
    match answer(&Request { path, body }) {
        // The client may have left; that is for its own test to notice.
        Some(response) => drop(reader.get_mut().write_all(response.as_bytes())),
        None => std::thread::sleep(Duration::from_secs(60)),
    }
}
