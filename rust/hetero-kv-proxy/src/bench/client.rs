//! One request over one connection, and what was wrong with it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::failure::{Failure, FailureKind};
use super::sse::{self, Counts, EventStream};
use crate::config::BaseUrl;
use crate::sync::lock;

/// Bytes of an error answer that are shown.
const ERROR_BYTES_MAX: usize = 64 << 10;

type Sender = SendRequest<Full<Bytes>>;

/// Where requests go, and the connections kept to there.
#[derive(Debug)]
pub struct Client {
    base: BaseUrl,
    headers: HeaderMap,
    connect_timeout: Duration,
    keep_alive: bool,
    idle: Mutex<Vec<Sender>>,
    /// Connections made.
    pub connects: AtomicU64,
}

/// What is expected of an answer.
#[derive(Debug, Clone, Copy)]
pub struct Expect {
    /// An event stream.
    pub stream: bool,
    /// This number of tokens.
    pub tokens: Option<u64>,
    /// At most so many bytes.
    pub bytes_max: u64,
}

/// One complete answer.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// First byte of the body.
    pub first_byte: Instant,
    /// First token; of streams only.
    pub first_token: Option<Instant>,
    /// Last token; of streams only.
    pub last_token: Option<Instant>,
    /// End of the body.
    pub ended: Instant,
    /// What it held.
    pub counts: Counts,
}

impl Client {
    /// With no connection yet.
    ///
    /// # Errors
    /// A URL whose host cannot be a header.
    pub fn new(
        base: BaseUrl,
        extra: &[(http::HeaderName, HeaderValue)],
        connect_timeout: Duration,
        keep_alive: bool,
    ) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(&base.authority)?);
        let json = HeaderValue::from_static("application/json");
        headers.insert(header::CONTENT_TYPE, json);
        if !keep_alive {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        for (name, value) in extra {
            headers.insert(name.clone(), value.clone());
        }
        Ok(Self {
            base,
            headers,
            connect_timeout,
            keep_alive,
            idle: Mutex::default(),
            connects: AtomicU64::new(0),
        })
    }

    /// The URI of a path of the API.
    ///
    /// # Errors
    /// The base URL's path cannot be one.
    pub fn uri(&self, path: &str) -> anyhow::Result<Uri> {
        Ok(format!("{}{path}", self.base.path).parse()?)
    }

    /// Sends one body and reads the answer to its end. `gap` is told each time between chunks with
    /// tokens.
    ///
    /// # Errors
    /// The one [`Failure`] that the request counts as.
    pub async fn post(
        &self,
        uri: &Uri,
        body: Bytes,
        expect: Expect,
        deadline: Instant,
        gap: impl FnMut(Duration),
    ) -> Result<Sample, Failure> {
        let sent = timeout_at(deadline, self.send(Method::POST, uri, body));
        let (response, sender) = sent
            .await
            .map_err(|_| Failure::new(FailureKind::TimeoutBeforeHead, "no response head"))??;
        let reading = timeout_at(deadline, read(response, expect, gap));
        let sample = reading
            .await
            .map_err(|_| Failure::new(FailureKind::TimeoutInAnswer, "the answer did not end"))??;
        self.keep(sender);
        Ok(sample)
    }

    /// The body of a small answer.
    ///
    /// # Errors
    /// As [`Self::post`].
    pub async fn get(&self, path: &Uri, deadline: Instant) -> Result<Bytes, Failure> {
        let exchange = async {
            let (response, _) = self.send(Method::GET, path, Bytes::new()).await?;
            let status = response.status();
            if status != 200 {
                return Err(status_failure(response).await);
            }
            let body = Limited::new(response.into_body(), ERROR_BYTES_MAX).collect();
            let body = body
                .await
                .map_err(|error| Failure::new(FailureKind::BodyBroken, error))?;
            Ok(body.to_bytes())
        };
        timeout_at(deadline, exchange)
            .await
            .map_err(|_| Failure::new(FailureKind::TimeoutBeforeHead, "no answer"))?
    }

    async fn send(
        &self,
        method: Method,
        uri: &Uri,
        body: Bytes,
    ) -> Result<(http::Response<Incoming>, Sender), Failure> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri.clone();
        *request.headers_mut() = self.headers.clone();
        loop {
            let (mut sender, reused) = match self.take_idle().await {
                Some(sender) => (sender, true),
                None => (self.connect().await?, false),
            };
            match sender.try_send_request(request).await {
                Ok(response) => return Ok((response, sender)),
                // Nothing of it was written: the server had closed the connection for idleness.
                Err(mut failure) => match failure.take_message() {
                    Some(unsent) if reused => request = unsent,
                    Some(_) | None => {
                        let error = failure.into_error();
                        return Err(Failure::new(FailureKind::ClosedBeforeHead, error));
                    }
                },
            }
        }
    }

    async fn take_idle(&self) -> Option<Sender> {
        loop {
            let mut sender = lock(&self.idle).pop()?;
            // Its driver may have a turn to take after the last body.
            if sender.ready().await.is_ok() {
                return Some(sender);
            }
        }
    }

    fn keep(&self, sender: Sender) {
        if self.keep_alive && !sender.is_closed() {
            lock(&self.idle).push(sender);
        }
    }

    async fn connect(&self) -> Result<Sender, Failure> {
        let refused = |error: std::io::Error| Failure::new(FailureKind::Connect, error);
        let dial = async {
            let address = (self.base.host.as_str(), self.base.port);
            let stream = TcpStream::connect(address).await.map_err(refused)?;
            stream.set_nodelay(true).map_err(refused)?;
            let (sender, connection) = Builder::new()
                .handshake(TokioIo::new(stream))
                .await
                .map_err(|error| Failure::new(FailureKind::Connect, error))?;
            // The driver ends with the connection; its error reaches the exchange that it breaks.
            tokio::spawn(connection);
            Ok(sender)
        };
        let sender = timeout(self.connect_timeout, dial).await.map_err(|_| {
            let limit = format!("none within {} ms", self.connect_timeout.as_millis());
            Failure::new(FailureKind::ConnectTimeout, limit)
        })??;
        self.connects.fetch_add(1, Ordering::Relaxed);
        Ok(sender)
    }
}

async fn status_failure(response: http::Response<Incoming>) -> Failure {
    let status = response.status().as_u16();
    let body = Limited::new(response.into_body(), ERROR_BYTES_MAX).collect();
    let seen = match body.await {
        Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        Err(error) => error.to_string(),
    };
    Failure::new(FailureKind::Status(status), seen)
}

async fn read(
    response: http::Response<Incoming>,
    expect: Expect,
    mut gap: impl FnMut(Duration),
) -> Result<Sample, Failure> {
    if response.status() != 200 {
        return Err(status_failure(response).await);
    }
    let kind = response.headers().get(header::CONTENT_TYPE);
    let kind = kind
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or("none")
        .to_owned();
    let mut body = response.into_body();
    let mut events = EventStream::default();
    let mut whole = Vec::new();
    let mut length = 0;
    let (mut first_byte, mut first_token, mut last_token) = (None, None, None);
    if kind.starts_with("text/event-stream") != expect.stream {
        // The body says more than the type.
        let shown = Limited::new(body, ERROR_BYTES_MAX).collect().await;
        let shown = shown.map_or_else(
            |error| error.to_string(),
            |shown| String::from_utf8_lossy(&shown.to_bytes()).into_owned(),
        );
        return Err(Failure::new(
            FailureKind::ContentType,
            format!("{kind}: {shown}"),
        ));
    }
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let seen = format!("after {length} bytes: {error}");
            Failure::new(FailureKind::BodyBroken, seen)
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if data.is_empty() {
            continue;
        }
        let now = Instant::now();
        first_byte.get_or_insert(now);
        length += data.len() as u64;
        if length > expect.bytes_max {
            let seen = format!("more than {} bytes", expect.bytes_max);
            return Err(Failure::new(FailureKind::TooLong, seen));
        }
        if !expect.stream {
            whole.extend_from_slice(&data);
            continue;
        }
        let tokens = events.push(&data)?;
        for _ in 0..tokens {
            first_token.get_or_insert(now);
            if let Some(last) = last_token.replace(now) {
                gap(now - last);
            }
        }
    }
    let ended = Instant::now();
    let counts = if expect.stream {
        events.end()?
    } else {
        sse::plain(&whole)?
    };
    if counts.tokens() == 0 || (counts.chunks == 0 && expect.stream) {
        let seen = "a whole answer without a token";
        return Err(Failure::new(FailureKind::NoTokens, seen));
    }
    if let Some(want) = expect.tokens
        && counts.tokens() != want
    {
        let seen = format!("{} tokens instead of {want}", counts.tokens());
        return Err(Failure::new(FailureKind::TokenCount, seen));
    }
    Ok(Sample {
        first_byte: first_byte.unwrap_or(ended),
        first_token,
        last_token,
        ended,
        counts,
    })
}
