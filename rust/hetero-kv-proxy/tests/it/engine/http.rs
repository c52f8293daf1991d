//! The engine's side of HTTP/1.1: what it answers by itself, and requests that scripts perform.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::time::Instant;

use super::script::perform;
use super::{Ended, Seen, State};

/// Serves one connection until either side closes it.
pub(super) async fn serve(stream: TcpStream, state: Arc<Mutex<State>>, connection: usize) {
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

pub(super) fn plain(status: u16, body: &str) -> String {
    typed(status, "application/json", body)
}

pub(super) fn typed(status: u16, kind: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status} Scripted\r\nContent-Type: {kind}\r\nX-Engine: scripted\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}
