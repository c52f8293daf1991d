//! The chunked coding of a body (RFC 9112, section 7.1). Pure: bytes in, pieces out.

use bytes::{Buf, Bytes, BytesMut};

use super::malformed::Excerpt;

/// Longest chunk-size line, extensions included; longest trailer section too. Real ones have a few
/// bytes, and none at all.
const LINE_BYTES_MAX: usize = 16 << 10;
/// Digits of a 64-bit size.
const SIZE_DIGITS_MAX: usize = 16;

/// What the bytes so far hold.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Data of a chunk, or of the part of it that is there.
    Data(Bytes),
    /// Nothing more without more bytes.
    More,
    /// The body has ended.
    End,
}

/// Where in the coding the next byte stands.
#[derive(Debug, Default)]
pub(crate) enum Chunked {
    /// At a chunk-size line.
    #[default]
    Size,
    /// In data, of which so many bytes are left.
    Data(u64),
    /// At the line end behind data.
    DataEnd,
    /// At a trailer line; so many bytes of the section were read.
    Trailers(usize),
    /// Behind the last byte.
    Ended,
}

/// The bytes are no chunked coding.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault}: {seen}")]
pub(crate) struct Malformed {
    fault: &'static str,
    seen: Excerpt,
}

impl Malformed {
    fn at(line: &[u8], fault: &'static str) -> Self {
        Self {
            fault,
            seen: Excerpt::of(line),
        }
    }
}

impl Chunked {
    /// Takes the next piece from the front of `unread`. A piece never spans two chunks.
    ///
    /// # Errors
    /// [`Malformed`]; `unread` is then at the fault, and so is every later call.
    pub(crate) fn next(&mut self, unread: &mut BytesMut) -> Result<Step, Malformed> {
        loop {
            match self {
                Self::Data(left) => {
                    if unread.is_empty() {
                        return Ok(Step::More);
                    }
                    let piece = take_at_most(left, unread);
                    if *left == 0 {
                        *self = Self::DataEnd;
                    }
                    return Ok(Step::Data(piece));
                }
                Self::Ended => return Ok(Step::End),
                Self::Size | Self::DataEnd | Self::Trailers(_) => {
                    if !self.advance(unread)? {
                        return Ok(Step::More);
                    }
                }
            }
        }
    }

    /// Whether the last byte was read; reads framing that is there already.
    pub(super) fn has_ended(&mut self, unread: &mut BytesMut) -> bool {
        // A fault is found again by the next piece.
        while let Self::Size | Self::DataEnd | Self::Trailers(_) = self
            && let Ok(true) = self.advance(unread)
        {}
        matches!(self, Self::Ended)
    }

    /// Reads one line of framing; false when it is not all there.
    fn advance(&mut self, unread: &mut BytesMut) -> Result<bool, Malformed> {
        let Some(end) = unread.iter().position(|byte| *byte == b'\n') else {
            if unread.len() > LINE_BYTES_MAX {
                return Err(Malformed::at(unread, "a line of its framing is too long"));
            }
            return Ok(false);
        };
        let Some(line) = unread[..end].strip_suffix(b"\r") else {
            let fault = "a line of its framing does not end in CR LF";
            return Err(Malformed::at(&unread[..end], fault));
        };
        if line.len() > LINE_BYTES_MAX {
            return Err(Malformed::at(line, "a line of its framing is too long"));
        }
        let next = match self {
            Self::Size => match size(line)? {
                0 => Self::Trailers(0),
                size => Self::Data(size),
            },
            Self::DataEnd if line.is_empty() => Self::Size,
            Self::DataEnd => return Err(Malformed::at(line, "a chunk is longer than it says")),
            Self::Trailers(_) if line.is_empty() => Self::Ended,
            Self::Trailers(read) => {
                let read = *read + line.len();
                if read > LINE_BYTES_MAX {
                    return Err(Malformed::at(line, "the trailers are too long"));
                }
                Self::Trailers(read)
            }
            Self::Data(_) | Self::Ended => return Ok(false),
        };
        unread.advance(end + 1);
        *self = next;
        Ok(true)
    }
}

/// Takes what is there of the next `left` bytes, and leaves in `left` how many are still to come.
// Inline, since no link-time optimisation looks across modules: a streamed answer asks for each piece.
#[inline]
pub(super) fn take_at_most(left: &mut u64, unread: &mut BytesMut) -> Bytes {
    let there = unread.len() as u64;
    let piece = if there <= *left {
        *left -= there;
        // With the spare room behind it: nothing stays allocated here.
        std::mem::take(unread)
    } else {
        let piece = unread.split_to(*left as usize);
        *left = 0;
        piece
    };
    piece.freeze()
}

/// The size that a chunk-size line says.
fn size(line: &[u8]) -> Result<u64, Malformed> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit());
    let digits = digits.count();
    if digits == 0 || digits > SIZE_DIGITS_MAX {
        return Err(Malformed::at(line, "a chunk has no size"));
    }
    let behind = line[digits..].trim_ascii_start();
    // A stray CR could end the line for another reader.
    if !(behind.is_empty() || behind.starts_with(b";")) || behind.contains(&b'\r') {
        return Err(Malformed::at(line, "a chunk's size is no number"));
    }
    let text = std::str::from_utf8(&line[..digits]).ok();
    text.and_then(|text| u64::from_str_radix(text, 16).ok())
        .ok_or_else(|| Malformed::at(line, "a chunk has no size"))
}
