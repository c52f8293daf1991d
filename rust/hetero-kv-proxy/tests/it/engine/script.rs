//! What an engine does with a request, as vLLM does where it matters here.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::Blocks;
use super::http::{plain, typed};

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
    /// Another, with a permit of the test.
    Held(Arc<Semaphore>, Box<Script>),
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

/// The body of [`Script::Busy`].
pub(crate) const BUSY: &str = r#"{"error":{"message":"come again","code":1.0}}"#;

const EVENTS: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";

/// Performs a script; false when the connection is to be closed.
pub(super) async fn perform(
    script: Script,
    body: &[u8],
    blocks: &Blocks,
    writer: &mut OwnedWriteHalf,
) -> bool {
    // What is relayed may be anything.
    let request: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    let params = &request["kv_transfer_params"];
    let mut script = script;
    if let Script::Held(gate, then) = script {
        gate.acquire().await.expect("open").forget();
        script = *then;
    }
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
        Script::Held(..) | Script::After(..) | Script::Both => unreachable!("unwrapped above"),
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
