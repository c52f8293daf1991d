//! The OpenAI API as far as a P/D proxy must understand it: a handful of top-level fields, found
//! and changed by byte range. Pure.

pub mod error;
pub mod request;
pub mod response;
pub mod splice;
pub mod sse;

#[cfg(test)]
mod tests;

/// A route that runs both legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/chat/completions`.
    ChatCompletions,
}

impl Route {
    /// The path, equal on the client's side and on the engines'.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::ChatCompletions => "/v1/chat/completions",
        }
    }
}
