//! The body of an engine's answer as it comes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::Upstream;
use super::chunked::{Step, take_at_most};
use super::head::Framing;
use super::wire::{Outgoing, Wire};

/// A body that reads from its connection when it is polled. At its end it gives the connection
/// back; dropped before that, it closes it, which is how an engine learns that nobody waits.
#[derive(Debug)]
pub struct EngineBody {
    /// `None` once the body has ended, well or not.
    open: Option<Open>,
    ends_with_connection: bool,
}

/// What an answer whose body has not ended holds.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) wire: Wire,
    pub(super) framing: Framing,
    /// The rest of a request that is answered before it was taken whole.
    pub(super) request: Option<Outgoing>,
    /// Whether the connection may carry another exchange.
    pub(super) keeps: bool,
    pub(super) upstream: Arc<Upstream>,
}

impl Open {
    /// Takes a piece of what was read.
    fn take(&mut self) -> io::Result<Step> {
        let unread = &mut self.wire.unread;
        if matches!(self.framing, Framing::Length(0)) {
            return Ok(Step::End);
        }
        if unread.is_empty() {
            return Ok(Step::More);
        }
        match &mut self.framing {
            Framing::Chunked(chunked) => chunked
                .next(unread)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)),
            Framing::UntilClose => Ok(Step::Data(std::mem::take(unread).freeze())),
            Framing::Length(left) => Ok(Step::Data(take_at_most(left, unread))),
        }
    }

    /// Whether the last byte of the body was taken.
    fn has_ended(&mut self) -> bool {
        match &mut self.framing {
            Framing::Length(left) => *left == 0,
            Framing::Chunked(chunked) => chunked.has_ended(&mut self.wire.unread),
            Framing::UntilClose => false,
        }
    }
}

impl EngineBody {
    /// A body whose head was read.
    pub(super) fn new(mut open: Open) -> Self {
        let ended = open.has_ended();
        let mut body = Self {
            ends_with_connection: matches!(open.framing, Framing::UntilClose),
            open: Some(open),
        };
        if ended {
            body.end();
        }
        body
    }

    /// Whether the body has no end of its own: one that is cut off looks like one that is whole.
    pub fn ends_with_connection(&self) -> bool {
        self.ends_with_connection
    }

    /// Gives the connection back, where it can carry another exchange.
    fn end(&mut self) {
        if let Some(open) = self.open.take()
            && open.keeps
            && open.request.is_none()
        {
            open.upstream.keep(open.wire);
        }
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        let Some(open) = &mut self.open else {
            return Poll::Ready(Ok(None));
        };
        if let Some(request) = &mut open.request
            && let Poll::Ready(sent) = open.wire.poll_write(cx, request)
        {
            // An engine may stop reading a request that it has answered.
            open.keeps &= sent.is_ok();
            open.request = None;
        }
        loop {
            match open.take()? {
                Step::Data(data) => {
                    if open.has_ended() {
                        self.end();
                    }
                    return Poll::Ready(Ok(Some(data)));
                }
                Step::End => {
                    self.end();
                    return Poll::Ready(Ok(None));
                }
                Step::More => {}
            }
            if ready!(open.wire.poll_read(cx))? > 0 {
                continue;
            }
            return match open.framing {
                Framing::UntilClose => {
                    open.keeps = false;
                    self.end();
                    Poll::Ready(Ok(None))
                }
                Framing::Length(_) | Framing::Chunked(_) => {
                    Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()))
                }
            };
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let piece = ready!(self.poll_piece(cx));
        if piece.is_err() {
            self.open = None;
        }
        Poll::Ready(piece.transpose().map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.open.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.open.as_ref().map(|open| &open.framing) {
            None => SizeHint::with_exact(0),
            Some(Framing::Length(left)) => SizeHint::with_exact(*left),
            Some(Framing::Chunked(_) | Framing::UntilClose) => SizeHint::default(),
        }
    }
}
