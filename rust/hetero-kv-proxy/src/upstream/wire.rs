//! One connection to an engine, and one request on its way out.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::Written;

/// Read at once. On the stack: a connection that waits holds no buffer.
const READ_BYTES: usize = 16 << 10;
/// Pieces written at once.
const SLICES_MAX: usize = 16;

/// A connection that is driven by whoever has it: there is no task behind it.
#[derive(Debug)]
pub(super) struct Wire {
    stream: TcpStream,
    /// Read from the engine and not yet taken.
    pub(super) unread: BytesMut,
}

impl Wire {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            unread: BytesMut::new(),
        }
    }

    /// Whether an idle connection can carry a request: the engine has not closed it, and has said
    /// nothing unasked. Costs no system call while nothing came.
    pub(super) fn is_open(&self) -> bool {
        let read = self.stream.try_read(&mut [0]);
        self.unread.is_empty() && read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Reads what is there to the end of `unread`; 0 when the engine has closed.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut room = [const { MaybeUninit::uninit() }; READ_BYTES];
        let mut read = ReadBuf::uninit(&mut room);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read))?;
        self.unread.extend_from_slice(read.filled());
        Poll::Ready(Ok(read.filled().len()))
    }

    /// Writes the rest of a request.
    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        request: &mut Outgoing,
    ) -> Poll<io::Result<()>> {
        while !request.is_written() {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let count = request.fill(&mut slices);
            let stream = Pin::new(&mut self.stream);
            let taken = ready!(stream.poll_write_vectored(cx, &slices[..count]))?;
            if taken == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            request.advance(taken);
        }
        Poll::Ready(Ok(()))
    }
}

/// A request, of which the first pieces may be written.
#[derive(Debug)]
pub(super) struct Outgoing {
    pieces: Vec<Bytes>,
    /// The first piece that is not wholly written.
    at: usize,
    begun: bool,
    written: Option<Written>,
}

impl Outgoing {
    /// `pieces` are not empty, each for itself; `written` notes when the last byte was written.
    pub(super) fn new(pieces: Vec<Bytes>, written: Option<Written>) -> Self {
        Self {
            pieces,
            at: 0,
            begun: false,
            written,
        }
    }

    /// Whether any byte was written.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    pub(super) fn is_written(&self) -> bool {
        self.at == self.pieces.len()
    }

    fn fill<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let left = &self.pieces[self.at..];
        for (slice, piece) in slices.iter_mut().zip(left) {
            *slice = IoSlice::new(piece);
        }
        left.len().min(slices.len())
    }

    fn advance(&mut self, mut taken: usize) {
        self.begun = true;
        while taken > 0 {
            let piece = &mut self.pieces[self.at];
            let of_piece = taken.min(piece.len());
            piece.advance(of_piece);
            taken -= of_piece;
            if piece.is_empty() {
                // A large body is not kept for the length of its answer.
                *piece = Bytes::new();
                self.at += 1;
            }
        }
        if self.is_written()
            && let Some(written) = &self.written
        {
            written.set();
        }
    }
}
