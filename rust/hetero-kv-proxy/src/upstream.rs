//! Connections to one engine: a pool of kept connections and one exchange over one of them.
//!
//! A connection is driven by the request that uses it and has no task of its own: an exchange costs
//! no hand-over between tasks, and a connection that waits holds no buffer.

mod body;
mod chunked;
mod head;
mod malformed;
#[cfg(test)]
mod tests;
mod wire;

use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use self::body::Open;
use self::head::{AnswerHead, RequestHead};
use self::wire::{Outgoing, Wire};
use crate::config::BaseUrl;
use crate::sync::lock;

pub use self::body::EngineBody;
pub(crate) use self::chunked::{Chunked, Step};
pub use self::malformed::malformed;

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
    wire: Wire,
    since: Instant,
}

/// Why there is no response head.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// No connection: name, refusal, or `connect_timeout`. The engine has not seen the request.
    #[error("no connection: {0}")]
    Connect(#[source] io::Error),
    /// The connection broke before the response head.
    #[error("the connection broke before a response: {source}")]
    Reset {
        /// It had served an earlier exchange.
        reused: bool,
        /// What was seen.
        #[source]
        source: io::Error,
    },
    /// What came is no answer of HTTP/1. The engine has seen the request.
    #[error("the answer is not well-formed: {0}")]
    Malformed(String),
    /// Before the leg: the engine's bootstrap server does not say what the leg must name.
    #[error("bootstrap server: {0}")]
    Bootstrap(String),
    /// The path or a header cannot be sent.
    #[error("the request cannot be sent: {0}")]
    Request(#[from] http::Error),
}

/// An answer whose body is still coming. Too large to go from hand to hand, but for a box.
#[derive(Debug)]
pub struct Answer {
    /// Status and headers.
    pub head: http::response::Parts,
    /// The body as it comes, and the connection under it.
    pub body: EngineBody,
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
    /// Headers of `extra` stand in place of those of `headers`.
    ///
    /// A kept connection that turns out closed before anything was written is replaced unseen.
    ///
    /// # Errors
    /// [`SendError`], which says whether the engine can have seen the request.
    pub async fn send(
        self: &Arc<Self>,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        extra: &[(HeaderName, HeaderValue)],
        body: LegBody,
        fresh: bool,
    ) -> Result<Box<Answer>, SendError> {
        let path = PathAndQuery::try_from(path).map_err(http::Error::from)?;
        let head = RequestHead {
            method,
            target: &[&self.base.path, path.as_str()],
            host: &self.authority,
            headers,
            extra,
            length: body.length(),
        };
        let mut pieces = Vec::with_capacity(1 + body.pieces.len());
        pieces.push(Bytes::from(head.encode()));
        pieces.extend(body.pieces);
        let mut request = Outgoing::new(pieces, body.written);
        let mut kept = if fresh { None } else { self.take_idle() };
        loop {
            let reused = kept.is_some();
            let mut wire = match kept.take() {
                Some(wire) => wire,
                // On the heap: most exchanges have a kept connection, and no room for this.
                None => Wire::new(Box::pin(self.connect()).await.map_err(SendError::Connect)?),
            };
            match exchange(&mut wire, &mut request, method).await {
                Ok(AnswerHead {
                    parts,
                    framing,
                    keeps,
                }) => {
                    return Ok(Box::new(Answer {
                        head: parts,
                        body: EngineBody::new(Open {
                            wire,
                            framing,
                            request: (!request.is_written()).then_some(request),
                            keeps,
                            upstream: Arc::clone(self),
                        }),
                    }));
                }
                // Not a byte of it left.
                Err(_) if reused && !request.has_begun() => {}
                Err(source) => {
                    return Err(match malformed(&source) {
                        Some(fault) => SendError::Malformed(fault),
                        None => SendError::Reset { reused, source },
                    });
                }
            }
        }
    }

    /// Closes connections that have been idle too long, or that the engine has closed.
    pub fn close_stale(&self) {
        let now = Instant::now();
        lock(&self.idle)
            .retain(|idle| now - idle.since < self.limits.idle_timeout && idle.wire.is_open());
    }

    /// The connection used last, if one is left that is open and young.
    fn take_idle(&self) -> Option<Wire> {
        let now = Instant::now();
        let mut idle = lock(&self.idle);
        while let Some(last) = idle.pop() {
            if now - last.since >= self.limits.idle_timeout {
                // Those below are older still.
                idle.clear();
                return None;
            }
            if last.wire.is_open() {
                return Some(last.wire);
            }
        }
        None
    }

    /// Keeps a connection for the next exchange.
    fn keep(&self, wire: Wire) {
        if self.limits.idle_timeout.is_zero() || !wire.is_open() {
            return;
        }
        let mut idle = lock(&self.idle);
        if idle.len() < self.limits.idle_max {
            idle.push(Idle {
                wire,
                since: Instant::now(),
            });
        }
    }

    async fn connect(&self) -> io::Result<TcpStream> {
        let dial = async {
            let address = (self.base.host.as_str(), self.base.port);
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        timeout(self.limits.connect_timeout, dial)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Writes `request` and reads until there is a response head, which may come before all is written.
async fn exchange(
    wire: &mut Wire,
    request: &mut Outgoing,
    method: &Method,
) -> io::Result<AnswerHead> {
    let mut unsent = None;
    poll_fn(|cx| {
        if unsent.is_none()
            && let Poll::Ready(Err(error)) = wire.poll_write(cx, request)
        {
            // It may have answered before it closed.
            unsent = Some(error);
        }
        loop {
            let head = match wire.unread.is_empty() {
                true => Ok(None),
                false => head::parse(&mut wire.unread, method),
            };
            let head = head.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
            if let Some(head) = head? {
                return Poll::Ready(Ok(head));
            }
            let read = match (wire.poll_read(cx), &mut unsent) {
                (Poll::Ready(read), _) => read?,
                (Poll::Pending, None) => return Poll::Pending,
                (Poll::Pending, Some(_)) => 0,
            };
            if read == 0 {
                let closed = || io::ErrorKind::UnexpectedEof.into();
                return Poll::Ready(Err(unsent.take().unwrap_or_else(closed)));
            }
        }
    })
    .await
}

/// When the last byte of a leg was written to its connection.
#[derive(Debug, Clone, Default)]
pub struct Written(Arc<Note>);

#[derive(Debug, Default)]
struct Note {
    at: Mutex<Option<Instant>>,
    set: Notify,
}

impl Written {
    /// Waits until the leg was written, and says when that was.
    pub async fn wait(&self) -> Instant {
        loop {
            let set = self.0.set.notified();
            // Whatever is noted from here on ends the wait.
            if let Some(at) = self.at() {
                return at;
            }
            set.await;
        }
    }

    /// When the leg was written, if it was.
    pub fn at(&self) -> Option<Instant> {
        *lock(&self.0.at)
    }

    fn set(&self) {
        *lock(&self.0.at) = Some(Instant::now());
        self.0.set.notify_waiters();
    }

    fn clear(&self) {
        *lock(&self.0.at) = None;
    }
}

/// The body of one leg: bytes that are all there.
#[derive(Debug, Default)]
pub struct LegBody {
    /// None of them is empty.
    pieces: Vec<Bytes>,
    written: Option<Written>,
}

impl LegBody {
    /// A body that notes in `written` when the leg was written.
    pub fn new(pieces: impl IntoIterator<Item = Bytes>, written: Option<Written>) -> Self {
        if let Some(written) = &written {
            written.clear();
        }
        let pieces = pieces.into_iter().filter(|piece| !piece.is_empty());
        Self {
            pieces: pieces.collect(),
            written,
        }
    }

    fn length(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }
}
