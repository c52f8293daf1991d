//! What the client gets of what a decode engine sends.

use bytes::Bytes;

use crate::answer::is_logged;
use crate::openai::error::ApiError;
use crate::openai::sse::Tail;
use crate::openai::tokens::{Reader, Tokens};
use crate::openai::usage::{Cached, Teller};

/// An answer that passes, and what is read of it on its way.
#[derive(Debug)]
pub(super) struct Passing {
    /// For an event stream: its end, to close it properly when it breaks.
    events: Option<Tail>,
    /// Tells prefill's count of cached tokens, where it is known.
    teller: Option<Teller>,
    /// Reads the tokens that it tells, where they are logged.
    tokens: Option<Reader>,
}

impl Passing {
    /// An answer in which `cached` is told.
    pub(super) fn new(is_events: bool, cached: Option<Cached>) -> Self {
        Self {
            events: is_events.then(Tail::default),
            teller: cached.map(|cached| Teller::new(cached, is_events)),
            tokens: is_logged().then(|| Reader::new(is_events)),
        }
    }

    pub(super) fn is_events(&self) -> bool {
        self.events.is_some()
    }

    /// Whether as many bytes come out as went in.
    pub(super) fn keeps_length(&self) -> bool {
        self.teller.is_none()
    }

    /// What the client gets with a chunk of the engine's, the last where it has `ended`; empty where
    /// that is nothing yet.
    #[inline]
    pub(super) fn push(&mut self, chunk: Bytes, ended: bool) -> Bytes {
        let passed = match &mut self.teller {
            None => chunk,
            Some(teller) => {
                let ready = teller.push(chunk);
                match ended.then(|| teller.end()).filter(|rest| !rest.is_empty()) {
                    Some(rest) if ready.is_empty() => rest,
                    Some(rest) => [ready, rest].concat().into(),
                    None => ready,
                }
            }
        };
        self.read(&passed);
        passed
    }

    /// What the client gets behind the last chunk, where that was not known for the last.
    pub(super) fn end(&mut self) -> Bytes {
        let rest = self.teller.as_mut().map_or(Bytes::new(), Teller::end);
        self.read(&rest);
        rest
    }

    fn read(&mut self, passed: &Bytes) {
        if let Some(events) = &mut self.events {
            events.push(passed);
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.push(passed);
        }
    }

    /// Whether it is an event stream whose last event has passed.
    pub(super) fn is_done(&self) -> bool {
        self.events.as_ref().is_some_and(Tail::is_done)
    }

    /// The tokens that it has told, where they are logged.
    pub(super) fn tokens(&self) -> Option<Tokens> {
        self.tokens.as_ref().map(Reader::end)
    }

    /// An error behind what has passed, of an event stream.
    pub(super) fn error_event(&self, error: &ApiError) -> Option<Bytes> {
        let events = self.events.as_ref()?;
        Some(events.error_event(error))
    }
}
