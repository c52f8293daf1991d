//! What an administrator's request may say behind `?`. What it does not know it refuses: an order
//! that was meant otherwise is not carried out.

use std::time::Duration;

use tokio::time::Instant;

use crate::openai::error::ApiError;

/// Longest wait that a request may ask for.
const WAIT_S_MAX: u64 = 3_600;
/// Of a name or a value that is shown.
const SHOWN_CHARS_MAX: usize = 64;

/// What a path takes.
#[derive(Clone, Copy)]
pub(super) enum Takes {
    Wait,
    WaitAndForce,
}

impl Takes {
    fn told(self) -> &'static str {
        match self {
            Self::Wait => "wait_s=N (seconds)",
            Self::WaitAndForce => "wait_s=N (seconds) and force=true",
        }
    }
}

/// What a request said.
pub(super) struct Query {
    /// How long to wait for legs to end.
    wait: Duration,
    /// Remove, or change the role, although legs run or blocks are kept.
    pub(super) force: bool,
}

impl Query {
    /// Reads it; `wait` is how long it waits where it does not say.
    ///
    /// # Errors
    /// Status 400, which names what is unknown or no such value, and what is taken.
    pub(super) fn parse(
        query: Option<&str>,
        wait: Duration,
        takes: Takes,
    ) -> Result<Self, ApiError> {
        let mut parsed = Self { wait, force: false };
        let mut seen: Vec<&str> = Vec::new();
        for (name, value) in pairs(query) {
            if seen.contains(&name) {
                return Err(fault(name, "is given twice".to_owned()));
            }
            match (name, takes) {
                ("wait_s", Takes::Wait | Takes::WaitAndForce) => {
                    let seconds = value.parse().ok().filter(|wait| *wait <= WAIT_S_MAX);
                    let seconds = seconds.ok_or_else(|| {
                        let value = shown(value);
                        fault(
                            name,
                            format!("must be 0 to {WAIT_S_MAX} seconds, not `{value}`"),
                        )
                    })?;
                    parsed.wait = Duration::from_secs(seconds);
                }
                ("force", Takes::WaitAndForce) => {
                    parsed.force = match value {
                        "true" | "1" => true,
                        "false" | "0" => false,
                        _ => {
                            let value = shown(value);
                            let text = format!("must be true or false (or 1 or 0), not `{value}`");
                            return Err(fault(name, text));
                        }
                    };
                }
                _ => {
                    let text =
                        format!("is nothing that this path takes: it takes {}", takes.told());
                    return Err(fault(name, text));
                }
            }
            seen.push(name);
        }
        Ok(parsed)
    }

    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.wait
    }
}

/// Refuses whatever stands behind `?` on a path that takes nothing there.
///
/// # Errors
/// Status 400 that names it.
pub(super) fn none(query: Option<&str>) -> Result<(), ApiError> {
    match pairs(query).next() {
        Some((name, _)) => Err(fault(
            name,
            "is nothing that this path takes: it takes no query".to_owned(),
        )),
        None => Ok(()),
    }
}

fn pairs(query: Option<&str>) -> impl Iterator<Item = (&str, &str)> {
    let parts = query.unwrap_or_default().split('&');
    let parts = parts.filter(|part| !part.is_empty());
    parts.map(|part| part.split_once('=').unwrap_or((part, "")))
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARS_MAX).collect()
}

fn fault(name: &str, fault: String) -> ApiError {
    let name = shown(name);
    ApiError {
        param: Some(name.clone()),
        ..ApiError::new(400, "invalid_query", format!("`{name}` {fault}"))
    }
}
