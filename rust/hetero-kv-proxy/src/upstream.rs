//! Connections to one engine: a pool of kept connections and one exchange over one of them.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::config::BaseUrl;
use crate::sync::lock;

/// A body is handed to the connection in pieces of this size, so that its end is handed over only
/// when the engine has taken nearly all of it.
const WRITE_PIECE_BYTES: usize = 128 << 10;

/// Limits of a pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolLimits {
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Idle connections kept.
    pub idle_max: usize,
    /// Age at which an idle connection is closed.
    pub idle_timeout: Duration,
}

/// One engine and the connections kept to it.
#[derive(Debug)]
pub struct Upstream {
    base: BaseUrl,
    authority: HeaderValue,
    limits: PoolLimits,
    idle: Mutex<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    sender: SendRequest<LegBody>,
    since: Instant,
}

/// Why there is no response head.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// No connection: name, refusal, or `connect_timeout`. The engine has not seen the request.
    #[error("no connection: {0}")]
    Connect(#[source] std::io::Error),
    /// The connection broke before the response head.
    #[error("the connection broke before a response: {source}")]
    Reset {
        /// It had served an earlier exchange.
        reused: bool,
        /// As hyper saw it.
        #[source]
        source: hyper::Error,
    },
    /// Before the leg: the engine's bootstrap server does not say what the leg must name.
    #[error("bootstrap server: {0}")]
    Bootstrap(String),
    /// The path or a header cannot be sent.
    #[error("the request cannot be sent: {0}")]
    Request(#[from] http::Error),
}

/// An answer whose body is still coming.
#[derive(Debug)]
pub struct Answer {
    /// Status and headers.
    pub head: http::response::Parts,
    /// The body as it comes.
    pub body: Incoming,
    /// Gives the connection back once the body has ended; dropped before that, it closes it, which
    /// is how an engine learns that nobody waits.
    pub connection: Connection,
}

/// The connection under an [`Answer`].
#[derive(Debug)]
pub struct Connection {
    upstream: Arc<Upstream>,
    sender: SendRequest<LegBody>,
}

impl Upstream {
    /// An engine at `base`, with no connection yet.
    ///
    /// # Errors
    /// An authority that is no header value: a parsed URL never has one.
    pub fn new(base: BaseUrl, limits: PoolLimits) -> Result<Arc<Self>, http::Error> {
        let authority = HeaderValue::from_str(&base.authority)?;
        Ok(Arc::new(Self {
            base,
            authority,
            limits,
            idle: Mutex::default(),
        }))
    }

    /// Sends one request and waits for the response head, without a deadline of its own but for the
    /// connect. Dropping the future closes the connection. With `fresh` no kept connection is used.
    ///
    /// A kept connection that turns out closed before anything was written is replaced unseen.
    ///
    /// # Errors
    /// [`SendError`], which says whether the engine can have seen the request.
    pub async fn send(
        self: &Arc<Self>,
        method: Method,
        path: &str,
        mut headers: HeaderMap,
        body: LegBody,
        fresh: bool,
    ) -> Result<Answer, SendError> {
        headers.insert(header::HOST, self.authority.clone());
        let mut builder = Request::builder().method(method).uri(self.uri(path)?);
        if let Some(slot) = builder.headers_mut() {
            *slot = headers;
        }
        let mut request = builder.body(body)?;
        let mut kept = if fresh { None } else { self.take_idle() };
        loop {
            let mut reused = None;
            if let Some(mut sender) = kept.take()
                // Its driver may have a turn to take after the last body; that is no wait for the
                // engine.
                && sender.ready().await.is_ok()
            {
                reused = Some(sender);
            }
            let (mut sender, reused) = match reused {
                Some(sender) => (sender, true),
                None => (self.connect().await.map_err(SendError::Connect)?, false),
            };
            match sender.try_send_request(request).await {
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    let connection = Connection {
                        upstream: Arc::clone(self),
                        sender,
                    };
                    return Ok(Answer {
                        head,
                        body,
                        connection,
                    });
                }
                Err(mut failure) => match failure.take_message() {
                    Some(unsent) if reused => request = unsent,
                    Some(_) | None => {
                        let source = failure.into_error();
                        return Err(SendError::Reset { reused, source });
                    }
                },
            }
        }
    }

    /// Closes connections that have been idle too long.
    pub fn close_stale(&self) {
        let now = Instant::now();
        lock(&self.idle)
            .retain(|idle| !idle.sender.is_closed() && now - idle.since < self.limits.idle_timeout);
    }

    fn uri(&self, path: &str) -> Result<Uri, http::Error> {
        if self.base.path.is_empty() {
            return Ok(path.parse::<Uri>()?);
        }
        Ok(format!("{}{path}", self.base.path).parse::<Uri>()?)
    }

    /// The connection used last, if one is left that is open and young.
    fn take_idle(&self) -> Option<SendRequest<LegBody>> {
        let now = Instant::now();
        let mut idle = lock(&self.idle);
        while let Some(last) = idle.pop() {
            if now - last.since >= self.limits.idle_timeout {
                // Those below are older still.
                idle.clear();
                return None;
            }
            if !last.sender.is_closed() {
                return Some(last.sender);
            }
        }
        None
    }

    async fn connect(&self) -> std::io::Result<SendRequest<LegBody>> {
        let dial = async {
            let address = (self.base.host.as_str(), self.base.port);
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let (mut sender, connection) = Builder::new()
                .handshake(TokioIo::new(stream))
                .await
                .map_err(std::io::Error::other)?;
            // The driver ends with the connection; its error reaches the exchange that it breaks.
            tokio::spawn(connection);
            sender.ready().await.map_err(std::io::Error::other)?;
            Ok(sender)
        };
        timeout(self.limits.connect_timeout, dial)
            .await
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
    }
}

impl Connection {
    /// Keeps the connection for the next exchange; only after the body has ended.
    pub fn keep(self) {
        if self.sender.is_closed() || self.upstream.limits.idle_timeout.is_zero() {
            return;
        }
        let mut idle = lock(&self.upstream.idle);
        if idle.len() < self.upstream.limits.idle_max {
            idle.push(Idle {
                sender: self.sender,
                since: Instant::now(),
            });
        }
    }
}

/// When the last byte of a leg's body was handed to its connection.
#[derive(Debug, Clone)]
pub struct Written(Arc<watch::Sender<Option<Instant>>>);

impl Default for Written {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Written {
    /// Waits until the body was handed over, and says when that was.
    pub async fn wait(&self) -> Instant {
        let mut receiver = self.0.subscribe();
        // The sender lives as long as `self`, so the wait ends by a value only.
        let seen = receiver.wait_for(Option::is_some).await;
        seen.ok().and_then(|at| *at).unwrap_or_else(Instant::now)
    }

    /// When the body was handed over, if it was.
    pub fn at(&self) -> Option<Instant> {
        *self.0.borrow()
    }

    fn set(&self) {
        self.0.send_replace(Some(Instant::now()));
    }
}

/// The body of one leg: bytes that are all there.
#[derive(Debug, Default)]
pub struct LegBody {
    rest: Bytes,
    written: Option<Written>,
}

impl LegBody {
    /// A body that notes in `written` when its last byte was handed over.
    pub fn new(bytes: Bytes, written: Option<Written>) -> Self {
        if let Some(written) = &written {
            written.0.send_replace(None);
        }
        Self {
            rest: bytes,
            written,
        }
    }
}

impl Body for LegBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let piece = self.rest.len().min(WRITE_PIECE_BYTES);
        let piece = self.rest.split_to(piece);
        if self.rest.is_empty()
            && let Some(written) = &self.written
        {
            written.set();
        }
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}
