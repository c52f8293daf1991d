//! Where the heads of requests lie in what a client sends, and whether one has two lengths. Pure.
//!
//! It follows the framing of each request, as the parser behind it does, so that no head escapes
//! which comes in one piece with a request before it.

use bytes::BytesMut;

use crate::upstream::{Chunked, Step};

/// A longer head is refused by hyper.
const HEAD_BYTES_MAX: usize = 512 << 10;

/// Follows the requests of one connection.
#[derive(Debug, Default)]
pub(super) struct Heads {
    at: At,
}

/// Where the next byte stands.
#[derive(Debug)]
enum At {
    /// In a head, of which so much has come.
    Head(Vec<u8>),
    /// In a body, of which so many bytes are left.
    Body(u64),
    /// In a chunked body, of which so much is not read yet.
    Chunked(Chunked, BytesMut),
    /// The framing cannot be followed, and where a request begins is not known.
    Lost,
}

impl Default for At {
    fn default() -> Self {
        Self::Head(Vec::new())
    }
}

/// What a piece of what a client sends holds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// A head has ended.
    pub(super) head: bool,
    /// A head has both `Content-Length` and `Transfer-Encoding`, or may have, since it cannot be
    /// told from a body.
    pub(super) two_lengths: bool,
}

impl Heads {
    /// Looks through the next bytes.
    pub(super) fn note(&mut self, mut fresh: &[u8]) -> Found {
        let mut found = Found::default();
        while !fresh.is_empty() {
            match &mut self.at {
                At::Head(head) => {
                    let Some((lengths, end)) = head_ending(head, fresh) else {
                        if head.len() > HEAD_BYTES_MAX {
                            self.at = At::Lost;
                        }
                        return found;
                    };
                    fresh = &fresh[end..];
                    found.head = true;
                    found.two_lengths |= lengths.is_chunked && lengths.length.is_some();
                    self.at = match lengths {
                        Lengths {
                            is_chunked: true, ..
                        } => At::Chunked(Chunked::default(), BytesMut::new()),
                        Lengths {
                            length: Some(0) | None,
                            ..
                        } => At::default(),
                        Lengths {
                            length: Some(length),
                            ..
                        } => At::Body(length),
                    };
                }
                At::Body(left) => {
                    let passed = (fresh.len() as u64).min(*left);
                    *left -= passed;
                    fresh = &fresh[passed as usize..];
                    if *left == 0 {
                        self.at = At::default();
                    }
                }
                At::Chunked(chunked, unread) => {
                    unread.extend_from_slice(fresh);
                    fresh = &[];
                    loop {
                        match chunked.next(unread) {
                            Ok(Step::Data(_)) => {}
                            Ok(Step::More) => return found,
                            Ok(Step::End) => break,
                            Err(_) => {
                                self.at = At::Lost;
                                return found;
                            }
                        }
                    }
                    let behind = std::mem::take(unread);
                    self.at = At::default();
                    let behind = self.note(&behind);
                    found.head |= behind.head;
                    found.two_lengths |= behind.two_lengths;
                }
                At::Lost => {
                    found.two_lengths = true;
                    return found;
                }
            }
        }
        found
    }
}

/// What a head says of the length of its body.
#[derive(Debug, Default)]
struct Lengths {
    length: Option<u64>,
    is_chunked: bool,
}

/// The lengths of the head that ends in `fresh`, and where; without an end all of `fresh` is kept.
fn head_ending(head: &mut Vec<u8>, fresh: &[u8]) -> Option<(Lengths, usize)> {
    // Nearly every head comes in one read, maybe with a long body behind it.
    if head.is_empty()
        && let Some(found) = lengths(fresh)
    {
        return Some(found);
    }
    // The blank line may lie across two reads.
    let before = head.len();
    let from = before.saturating_sub(3);
    head.extend_from_slice(fresh);
    head_end(&head[from..])?;
    let (lengths, end) = lengths(head)?;
    Some((lengths, end - before))
}

/// Where the first blank line ends.
fn head_end(bytes: &[u8]) -> Option<usize> {
    let after = |at: usize| match bytes.get(at + 1..) {
        Some([b'\n', ..]) => Some(at + 2),
        Some([b'\r', b'\n', ..]) => Some(at + 3),
        Some(_) | None => None,
    };
    bytes
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'\n')
        .find_map(|(at, _)| after(at))
}

/// What the first head of `bytes` says, and where it ends; `None` where it is not whole.
fn lengths(bytes: &[u8]) -> Option<(Lengths, usize)> {
    let mut lengths = Lengths::default();
    let mut end = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let is_first = end == 0;
        end += line.len();
        if !is_first && matches!(line, b"\n" | b"\r\n") {
            return Some((lengths, end));
        }
        // Few lines begin like one of the two names.
        let first = line.trim_ascii_start().first();
        if !matches!(first, Some(b'c' | b'C' | b't' | b'T')) {
            continue;
        }
        let colon = line.iter().position(|byte| *byte == b':').unwrap_or(0);
        let name = line[..colon].trim_ascii();
        if name.eq_ignore_ascii_case(b"content-length") {
            let value = std::str::from_utf8(line[colon + 1..].trim_ascii());
            // What is no number is refused behind this, and its connection closed.
            lengths.length = Some(value.ok().and_then(|value| value.parse().ok()).unwrap_or(0));
        }
        lengths.is_chunked |= name.eq_ignore_ascii_case(b"transfer-encoding");
    }
    None
}

#[cfg(test)]
mod tests;
