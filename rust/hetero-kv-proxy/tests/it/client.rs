//! A client that speaks HTTP/1.1 by hand.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

/// No answer of the proxy takes longer in these tests.
const PATIENCE: Duration = Duration::from_secs(60);

/// One connection to the proxy.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    buffer: Vec<u8>,
}

/// A response head.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
}

/// A response read to its end.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
    /// Pieces as they were framed, with the time since the request was read out.
    pub(crate) pieces: Vec<(Duration, Vec<u8>)>,
    /// Whether the framing says that the body is whole.
    pub(crate) whole: bool,
}

impl Reply {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The code of an OpenAI-shaped error; its other members are checked on the way.
    pub(crate) fn error_code(&self) -> String {
        assert_eq!(self.headers["content-type"], "application/json");
        let body = self.json();
        let error = &body["error"];
        assert!(
            error["message"].is_string() && error["type"].is_string(),
            "{body}"
        );
        error["code"].as_str().expect("a code").to_owned()
    }
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address)
            .await
            .expect("the proxy accepts");
        stream.set_nodelay(true).expect("no delay");
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    pub(crate) async fn raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("the proxy reads");
    }

    pub(crate) async fn post(&mut self, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let json = ("Content-Type", "application/json");
        self.post_as(path, &[&[json], headers].concat(), body).await;
    }

    /// As `post`, of the type that `headers` tell, if any.
    pub(crate) async fn post_as(&mut self, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!(
            "POST {path} HTTP/1.1\r\nHost: proxy\r\nContent-Length: {}\r\n",
            body.len()
        );
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        self.raw(&[head.as_bytes(), body].concat()).await;
    }

    pub(crate) async fn get(&mut self, path: &str) {
        let head = format!("GET {path} HTTP/1.1\r\nHost: proxy\r\n\r\n");
        self.raw(head.as_bytes()).await;
    }

    pub(crate) async fn put(&mut self, path: &str, body: &[u8]) {
        let length = body.len();
        let head =
            format!("PUT {path} HTTP/1.1\r\nHost: proxy\r\nContent-Length: {length}\r\n\r\n");
        self.raw(&[head.as_bytes(), body].concat()).await;
    }

    pub(crate) async fn delete(&mut self, path: &str) {
        let head = format!("DELETE {path} HTTP/1.1\r\nHost: proxy\r\n\r\n");
        self.raw(head.as_bytes()).await;
    }

    /// Reads more; false at the end of the connection, however it ended.
    async fn fill(&mut self) -> bool {
        let read = self.stream.read_buf(&mut self.buffer);
        let read = timeout(PATIENCE, read).await.expect("the proxy answers");
        read.is_ok_and(|count| count > 0)
    }

    /// Takes bytes up to and with `mark`; `None` when the connection ended first.
    async fn take_until(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            let at = self
                .buffer
                .windows(mark.len())
                .position(|part| part == mark);
            if let Some(at) = at {
                return Some(self.buffer.drain(..at + mark.len()).collect());
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    /// Takes up to `count` bytes, and says whether all came.
    async fn take(&mut self, count: usize) -> (Vec<u8>, bool) {
        while self.buffer.len() < count {
            if !self.fill().await {
                return (std::mem::take(&mut self.buffer), false);
            }
        }
        (self.buffer.drain(..count).collect(), true)
    }

    /// The next head; `None` when the connection ended before one.
    pub(crate) async fn head(&mut self) -> Option<Head> {
        let head = self.take_until(b"\r\n\r\n").await?;
        let text = String::from_utf8(head).expect("ASCII");
        let mut lines = text.split("\r\n");
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        Some(Head { status, headers })
    }

    /// The next chunk of a chunked body; empty for the last, `None` when it was cut off.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.take_until(b"\r\n").await?;
        let size = std::str::from_utf8(&size).ok()?.trim();
        let size = usize::from_str_radix(size, 16).expect("a chunk size");
        let (mut chunk, whole) = self.take(size + 2).await;
        if !whole {
            return None;
        }
        chunk.truncate(size);
        Some(chunk)
    }

    /// The next response, read to its end.
    pub(crate) async fn reply(&mut self) -> Reply {
        let start = Instant::now();
        let head = self.head().await.expect("a response head");
        let mut reply = Reply {
            status: head.status,
            headers: head.headers,
            body: Vec::new(),
            pieces: Vec::new(),
            whole: false,
        };
        if reply.headers.contains_key("transfer-encoding") {
            while let Some(chunk) = self.chunk().await {
                if chunk.is_empty() {
                    reply.whole = true;
                    break;
                }
                reply.body.extend_from_slice(&chunk);
                reply.pieces.push((start.elapsed(), chunk));
            }
        } else {
            let length = reply.headers["content-length"].parse().expect("a length");
            (reply.body, reply.whole) = self.take(length).await;
        }
        reply
    }
}

/// Posts over a connection of its own.
pub(crate) async fn send(
    at: SocketAddr,
    target: &str,
    headers: &[(String, String)],
    body: &str,
) -> Reply {
    let headers: Vec<(&str, &str)> = headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let mut client = Client::connect(at).await;
    client.post(target, &headers, body.as_bytes()).await;
    client.reply().await
}

/// Asks over a connection of its own.
pub(crate) async fn get(at: SocketAddr, path: &str) -> Reply {
    let mut client = Client::connect(at).await;
    client.get(path).await;
    client.reply().await
}
