//! Server-sent events, as far as ending a broken stream needs them.

use bytes::Bytes;
use serde::Deserialize;

use super::error::ApiError;

/// Whether an event stream begins with an error that is not the client's: an engine whose loads
/// fail may answer 200 and then say so.
pub fn is_failure(first_chunk: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Event {
        error: Inner,
    }
    #[derive(Deserialize)]
    struct Inner {
        #[serde(default)]
        code: serde_json::Value,
    }
    let first_line = first_chunk.trim_ascii_start().split(|byte| *byte == b'\n');
    let data = first_line.into_iter().next().unwrap_or_default();
    let Some(data) = data.strip_prefix(b"data:") else {
        return false;
    };
    if !data.trim_ascii_start().starts_with(br#"{"error""#) {
        return false;
    }
    let event: Result<Event, _> = serde_json::from_slice(data);
    event.is_ok_and(|event| !matches!(event.error.code.as_u64(), Some(400..=499)))
}

const DONE: &[u8] = b"data: [DONE]";
/// Enough of the end of the stream to see `data: [DONE]` and the blank line behind it.
const TAIL_BYTES: usize = 16;

/// Follows the end of an event stream.
#[derive(Debug, Default)]
pub struct Tail {
    bytes: [u8; TAIL_BYTES],
    length: usize,
}

impl Tail {
    /// Notes a chunk that was passed on.
    pub fn push(&mut self, chunk: &[u8]) {
        let fresh = chunk.len().min(TAIL_BYTES);
        let old = self.length.min(TAIL_BYTES - fresh);
        self.bytes.copy_within(self.length - old..self.length, 0);
        self.length = old + fresh;
        self.bytes[old..self.length].copy_from_slice(&chunk[chunk.len() - fresh..]);
    }

    fn tail(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Whether the last event was the one that ends an OpenAI stream.
    pub fn is_done(&self) -> bool {
        self.tail().trim_ascii_end().ends_with(DONE)
    }

    /// The event that tells the client of a break. When the engine broke inside an event, that
    /// event is closed first so that this one stands alone.
    pub fn error_event(&self, error: &ApiError) -> Bytes {
        let closed = self.tail().is_empty()
            || self.tail().ends_with(b"\n\n")
            || self.tail().ends_with(b"\r\n\r\n");
        let mut event = Vec::new();
        if !closed {
            event.extend_from_slice(b"\n\n");
        }
        event.extend_from_slice(b"data: ");
        event.extend_from_slice(&error.body());
        event.extend_from_slice(b"\n\n");
        event.into()
    }
}
