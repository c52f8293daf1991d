//! What is wrong with an answer that is no HTTP/1, shown with the part that is wrong.

use std::fmt;
use std::io;

/// Bytes of an answer that are shown.
const SHOWN_BYTES_MAX: usize = 40;

/// The beginning of a part of an answer, for people: escaped, and short.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Excerpt(String);

impl Excerpt {
    pub(super) fn of(part: &[u8]) -> Self {
        let shown = &part[..part.len().min(SHOWN_BYTES_MAX)];
        let more = if shown.len() < part.len() { "..." } else { "" };
        Self(format!("`{}{more}`", shown.escape_ascii()))
    }

    /// Of the first line.
    pub(super) fn of_line(text: &[u8]) -> Self {
        let line = text.split(|byte| *byte == b'\n').next().unwrap_or(text);
        Self::of(line.strip_suffix(b"\r").unwrap_or(line))
    }
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What is wrong with an answer, where `error` says that it is not well-formed; `None` for a
/// connection that broke.
pub fn malformed(error: &io::Error) -> Option<String> {
    // No system call on a socket gives this kind.
    (error.kind() == io::ErrorKind::InvalidData).then(|| error.to_string())
}
