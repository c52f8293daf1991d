//! Faults: which, and in whose turn.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::cli::DELAY_MS_MAX;
use super::leg::LegKind;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// This status, with an error body.
    Status(u16),
    /// The connection closes without an answer.
    Close,
    /// No answer.
    Silence,
    /// The answer begins later.
    SlowHead(Duration),
    /// The connection closes after so many chunks.
    Cut(u64),
    /// Nothing more after so many chunks.
    Hang(u64),
    /// An error event after so many chunks, and the end.
    ErrorEvent(u64),
    /// A stream without its last event.
    NoDone,
    /// A prefill answer without params.
    NoParams,
}

/// A fault and the requests that meet it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What goes wrong.
    pub kind: FaultKind,
    /// Each so-manieth of the requests that it looks at.
    pub every: u64,
    /// At most so many times.
    pub times: u64,
    /// Only such requests.
    pub leg: Option<LegKind>,
}

impl Fault {
    /// Parses `KIND[=VALUE][,every=N][,times=N][,leg=LEG]`.
    ///
    /// # Errors
    /// A sentence that names the part and what it may be.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let kind = FaultKind::parse(parts.next().unwrap_or_default())?;
        let mut fault = Self {
            kind,
            every: 1,
            times: u64::MAX,
            leg: None,
        };
        for part in parts {
            match part.split_once('=') {
                Some(("every", value)) => fault.every = number("every", value, 1, u64::MAX)?,
                Some(("times", value)) => fault.times = number("times", value, 1, u64::MAX)?,
                Some(("leg", "prefill")) => fault.leg = Some(LegKind::Prefill),
                Some(("leg", "decode")) => fault.leg = Some(LegKind::Decode),
                Some(("leg", "plain")) => fault.leg = Some(LegKind::Plain),
                Some(("leg", leg)) => {
                    return Err(format!("leg is prefill, decode or plain, not `{leg}`"));
                }
                Some(_) | None => {
                    return Err(format!(
                        "unknown part `{part}`; they are every=, times= and leg="
                    ));
                }
            }
        }
        Ok(fault)
    }
}

impl FaultKind {
    fn parse(text: &str) -> Result<Self, String> {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        let wanted = |low, high| match value {
            Some(value) => number(name, value, low, high),
            None => Err(format!("{name} needs a value: {name}=N")),
        };
        let kind = match name {
            "status" => Self::Status(wanted(400, 599)? as u16),
            "slow-head" => Self::SlowHead(Duration::from_millis(wanted(0, DELAY_MS_MAX)?)),
            "cut" => Self::Cut(wanted(0, u64::MAX)?),
            "hang" => Self::Hang(wanted(0, u64::MAX)?),
            "error-event" => Self::ErrorEvent(wanted(0, u64::MAX)?),
            "close" => Self::Close,
            "silence" => Self::Silence,
            "no-done" => Self::NoDone,
            "no-params" => Self::NoParams,
            _ => {
                return Err(format!(
                    "unknown fault `{name}`; one of status, close, silence, slow-head, cut, hang, \
                     error-event, no-done, no-params"
                ));
            }
        };
        match (kind, value) {
            (Self::Close | Self::Silence | Self::NoDone | Self::NoParams, Some(_)) => {
                Err(format!("{name} takes no value"))
            }
            (kind, _) => Ok(kind),
        }
    }
}

fn number(name: &str, value: &str, low: u64, high: u64) -> Result<u64, String> {
    value
        .parse()
        .ok()
        .filter(|number| (low..=high).contains(number))
        .ok_or_else(|| match high {
            u64::MAX => format!("{name} must be a number from {low}, not `{value}`"),
            _ => format!("{name} must be {low} to {high}, not `{value}`"),
        })
}

/// The faults of one worker and how often each was looked at.
#[derive(Debug)]
pub struct Faults(Vec<(Fault, AtomicU64)>);

impl Faults {
    /// None of them met yet.
    pub fn new(faults: &[Fault]) -> Self {
        Self(
            faults
                .iter()
                .map(|fault| (fault.clone(), AtomicU64::new(0)))
                .collect(),
        )
    }

    /// What this request meets.
    pub fn next(&self, leg: LegKind) -> Option<FaultKind> {
        let mut met = None;
        for (fault, seen) in &self.0 {
            if fault.leg.is_some_and(|only| only != leg) {
                continue;
            }
            let turn = seen.fetch_add(1, Ordering::Relaxed) + 1;
            let due = turn.is_multiple_of(fault.every) && turn / fault.every <= fault.times;
            if due && met.is_none() {
                met = Some(fault.kind);
            }
        }
        met
    }
}

#[cfg(test)]
mod tests;
