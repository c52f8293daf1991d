//! A client's socket, with what hyper does not watch: a client that takes nothing, and a request
//! head with two lengths.

mod heads;

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, timeout};

use self::heads::Heads;
use crate::sync::lock;

/// What a client that is slow has behind the deadline to take what it is told of it.
const LAST_WORD: Duration = Duration::from_millis(50);
/// How long, and how much, a closing connection is read so that the client sees the answer.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 256 << 20;

/// Watches request heads for both `Content-Length` and `Transfer-Encoding`.
///
/// hyper obeys the second and forgets the first; two parsers that differ here are how requests are
/// smuggled, so such a request is refused (RFC 9112, section 6.3), and one that came before it in
/// the same piece with it.
#[derive(Debug)]
pub struct HeadWatch {
    armed: AtomicBool,
    two_lengths: AtomicBool,
    leg: Arc<LegUntil>,
}

/// Until when the leg may run whose answer the client is given; none where no leg runs.
///
/// hyper asks for more of an answer only while the client takes some, so that the answer itself
/// does not notice the end of its time behind a client that takes nothing.
#[derive(Debug, Default)]
pub struct LegUntil(Mutex<Option<Instant>>);

impl LegUntil {
    /// A leg runs until then, or none runs any more.
    pub fn set(&self, until: Option<Instant>) {
        *lock(&self.0) = until;
    }

    fn get(&self) -> Option<Instant> {
        *lock(&self.0)
    }
}

impl Default for HeadWatch {
    fn default() -> Self {
        Self {
            armed: AtomicBool::new(true),
            two_lengths: AtomicBool::new(false),
            leg: Arc::default(),
        }
    }
}

impl HeadWatch {
    /// Where a leg of this connection says until when it runs.
    pub fn leg(&self) -> Arc<LegUntil> {
        Arc::clone(&self.leg)
    }

    /// The last request was read whole.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
    }

    /// Whether the last request was read whole, so that no byte of it can be left unread.
    pub fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    /// Whether a head had two lengths.
    pub fn has_two_lengths(&self) -> bool {
        self.two_lengths.load(Ordering::Relaxed)
    }
}

/// A client's socket.
#[derive(Debug)]
pub struct ClientIo {
    stream: TcpStream,
    watch: Arc<HeadWatch>,
    heads: Heads,
    write_timeout: Duration,
    stalled: Option<Stalled>,
}

/// A client that takes nothing at present.
#[derive(Debug)]
struct Stalled {
    since: Instant,
    alarm: Pin<Box<Sleep>>,
}

impl ClientIo {
    /// Wraps `stream`; a write fails when the client takes nothing for `write_timeout`, or behind
    /// the time of the leg whose answer it is.
    pub fn new(stream: TcpStream, watch: Arc<HeadWatch>, write_timeout: Duration) -> Self {
        Self {
            stream,
            watch,
            heads: Heads::default(),
            write_timeout,
            stalled: None,
        }
    }

    /// Closes in order: says that nothing more comes, then reads what the client is still sending
    /// of a request that was not read whole. Closed with unread bytes, the kernel would reset the
    /// connection and the client could lose the answer, for example a 413 to a body that it is
    /// still writing.
    pub async fn close(mut self) {
        if self.stream.shutdown().await.is_err() || self.watch.is_armed() {
            return;
        }
        let drain = async {
            let mut scrap = vec![0; 64 << 10];
            let mut total = 0;
            while total < LINGER_BYTES_MAX {
                match self.stream.read(&mut scrap).await {
                    Ok(0) | Err(_) => return,
                    Ok(count) => total += count,
                }
            }
        };
        // A client that stays is closed anyway.
        let _ended = timeout(LINGER, drain).await;
    }

    fn note_read(&mut self, fresh: &[u8]) {
        let found = self.heads.note(fresh);
        if found.head {
            self.watch.armed.store(false, Ordering::Relaxed);
        }
        if found.two_lengths {
            self.watch.two_lengths.store(true, Ordering::Relaxed);
        }
    }

    /// What a write comes to for which the socket is not ready.
    ///
    /// It is ready when a third of its buffer is free, and a client that reads little by little may
    /// take longer to that than its whole time. So the buffer is filled whole before the time
    /// begins; when it is over, room for a byte shows that the client has taken some.
    fn without_room(
        &mut self,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.stalled.is_none() {
            match fill(&self.stream, bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                filled => return Poll::Ready(filled),
            }
        }
        let leg = self.watch.leg.get();
        let last_word = leg.map(|until| until + LAST_WORD);
        let limit = self.write_timeout;
        let stalled = self.stalled.get_or_insert_with(|| {
            let since = Instant::now();
            let first = [leg, Some(since + limit)].into_iter().flatten().min();
            let alarm = Box::pin(tokio::time::sleep_until(first.unwrap_or(since)));
            Stalled { since, alarm }
        });
        loop {
            ready!(stalled.alarm.as_mut().poll(cx));
            let (now, until) = (Instant::now(), stalled.since + limit);
            match fill(&self.stream, bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                filled => {
                    self.stalled = None;
                    return Poll::Ready(filled);
                }
            }
            if now >= until || last_word.is_some_and(|last_word| now >= last_word) {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            // It was the end of the leg's time, or the leg has ended before.
            let next = [last_word, Some(until)].into_iter().flatten().min();
            stalled.alarm.as_mut().reset(next.unwrap_or(now));
        }
    }
}

/// Writes what the kernel takes, whatever tokio knows of the socket's readiness.
fn fill(stream: &TcpStream, bufs: &[io::IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let mut nothing = SendAncillaryBuffer::default();
    Ok(sendmsg(stream, bufs, &mut nothing, flags)?)
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.note_read(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        if polled.is_pending() {
            return self.without_room(cx, &[io::IoSlice::new(buf)]);
        }
        self.stalled = None;
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        if polled.is_pending() {
            return self.without_room(cx, bufs);
        }
        self.stalled = None;
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
