//! The OpenAI API as far as a P/D proxy must understand it: a handful of top-level fields, found
//! and changed by byte range. Pure.

pub mod error;
mod fields;
pub mod request;
pub mod response;
mod scan;
pub mod splice;
pub mod sse;
pub(crate) mod tokens;
pub mod usage;

#[cfg(test)]
mod tests;

/// A route that runs both legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/chat/completions`.
    ChatCompletions,
    /// `POST /v1/responses`.
    Responses,
}

impl Route {
    /// Every route.
    pub const ALL: [Self; 3] = [Self::Completions, Self::ChatCompletions, Self::Responses];

    /// The path, equal on the client's side and on the engines'.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
        }
    }
}
