//! `KIND-ROLE[:INSTANCE[.DP[.TP]]]@WHEN[=ARG]`: what a lab breaks, where and when.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Prefill or decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Role {
    Prefill,
    Decode,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// SIGKILL; an engine that loses a rank ends, as vLLM's does.
    Kill,
    /// SIGSTOP for so long.
    Stop(Duration),
    /// SIGKILL, then a new start of the engine at the same address.
    Restart,
    /// At most so many bytes per second of each rank's data.
    Slow(u64),
    /// Bytes changed where nobody may.
    Corrupt,
    /// Acknowledgements are lost on the way.
    DropAcks,
    /// Clients leave.
    Abort,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop(_) => "stop",
            Self::Restart => "restart",
            Self::Slow(_) => "slow",
            Self::Corrupt => "corrupt",
            Self::DropAcks => "drop-acks",
            Self::Abort => "abort",
        }
    }

    /// Whether requests may fail by it.
    pub(super) fn may_fail_requests(self) -> bool {
        match self {
            Self::Kill | Self::Stop(_) | Self::Restart | Self::Slow(_) | Self::DropAcks => true,
            Self::Corrupt | Self::Abort => false,
        }
    }

    /// Whether one rank can be named; the others concern whole engines.
    fn takes_tp(self) -> bool {
        match self {
            Self::Kill | Self::Stop(_) | Self::Slow(_) | Self::Corrupt => true,
            Self::Restart | Self::DropAcks | Self::Abort => false,
        }
    }
}

/// When it happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum When {
    /// Share of the requests started.
    Share(f64),
    /// Since the first request.
    After(Duration),
}

/// One planned fault.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fault {
    pub(super) kind: Kind,
    pub(super) role: Role,
    pub(super) instance: u32,
    /// `None`: every engine of the instance.
    pub(super) dp: Option<u32>,
    /// `None`: the whole engine, its scheduler with it.
    pub(super) tp: Option<u32>,
    pub(super) when: When,
}

/// A text outside the grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; expected {GRAMMAR}")]
pub(super) struct FaultError {
    problem: String,
}

const GRAMMAR: &str = "KIND-ROLE[:INSTANCE[.DP[.TP]]]@WHEN[=ARG] with KIND kill, stop, restart, \
     slow, corrupt, drop-acks or abort, ROLE prefill or decode, WHEN a share of the requests \
     started (0.4) or a time (2s), ARG the MB/s of slow or the seconds of stop, such as \
     stop-prefill:0.0.1@0.4=5";

/// Longest text looked at; every valid one is shorter.
const TEXT_BYTES_MAX: usize = 128;
/// Longest time to a fault, and of a stop.
const SECONDS_MAX: f64 = 3600.0;
/// Fastest rate that counts as slow.
const MB_PER_S_MAX: f64 = 1e6;

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        parse(text).map_err(|problem| FaultError { problem })
    }
}

fn parse(text: &str) -> Result<Fault, String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("{} bytes are too many", text.len()));
    }
    let (what, rest) = text
        .split_once('@')
        .ok_or_else(|| format!("{text:?} has no @WHEN"))?;
    let (when, arg) = match rest.split_once('=') {
        Some((when, arg)) => (when, Some(arg)),
        None => (rest, None),
    };
    let (name, place) = match what.split_once(':') {
        Some((name, place)) => (name, Some(place)),
        None => (what, None),
    };
    let (kind, role) = name
        .rsplit_once('-')
        .ok_or_else(|| format!("{name:?} is not KIND-ROLE"))?;
    let role = match role {
        "prefill" => Role::Prefill,
        "decode" => Role::Decode,
        _ => return Err(format!("role {role:?} is neither prefill nor decode")),
    };
    let needed = |unit: &str| format!("{kind} needs an argument: {kind}-{role}@{when}={unit}");
    let kind = match (kind, arg) {
        ("stop", None) => return Err(needed("SECONDS")),
        ("slow", None) => return Err(needed("MB_PER_S")),
        ("stop", Some(arg)) => Kind::Stop(Duration::from_secs_f64(number(
            "the seconds of stop",
            arg,
            SECONDS_MAX,
        )?)),
        ("slow", Some(arg)) => {
            let mb_per_s = number("the MB/s of slow", arg, MB_PER_S_MAX)?;
            // At most 10^12.
            Kind::Slow(((mb_per_s * 1e6) as u64).max(1))
        }
        ("kill", None) => Kind::Kill,
        ("restart", None) => Kind::Restart,
        ("corrupt", None) => Kind::Corrupt,
        ("drop-acks", None) => Kind::DropAcks,
        ("abort", None) => Kind::Abort,
        ("kill" | "restart" | "corrupt" | "drop-acks" | "abort", Some(arg)) => {
            return Err(format!("{kind} takes no argument, found ={arg}"));
        }
        _ => return Err(format!("unknown kind {kind:?}")),
    };
    let when = match when.strip_suffix('s') {
        Some(seconds) => When::After(Duration::from_secs_f64(finite(
            "WHEN",
            seconds,
            SECONDS_MAX,
        )?)),
        None => When::Share(finite("WHEN", when, 1.0)?),
    };
    let mut numbers = place.into_iter().flat_map(|place| place.split('.'));
    let mut next = |name: &str| numbers.next().map(|text| index(name, text)).transpose();
    let (instance, dp, tp) = (next("INSTANCE")?, next("DP")?, next("TP")?);
    if numbers.next().is_some() {
        return Err(format!("{what:?} names more than INSTANCE.DP.TP"));
    }
    if tp.is_some() && !kind.takes_tp() {
        return Err(format!(
            "{} concerns whole engines and takes no TP",
            kind.name()
        ));
    }
    Ok(Fault {
        kind,
        role,
        instance: instance.unwrap_or(0),
        dp,
        tp,
        when,
    })
}

fn index(name: &str, text: &str) -> Result<u32, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse()
        .ok()
        .filter(|_| digits)
        .ok_or_else(|| format!("{name} {text:?} is not a number"))
}

/// 0 is taken.
fn finite(name: &str, text: &str, max: f64) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|value| (0.0..=max).contains(value))
        .ok_or_else(|| format!("{name} {text:?} is not a number from 0 to {max}"))
}

/// 0 is not taken.
fn number(name: &str, text: &str, max: f64) -> Result<f64, String> {
    finite(name, text, max)?;
    text.parse()
        .ok()
        .filter(|value| *value > 0.0)
        .ok_or_else(|| format!("{name} {text:?} is not above 0"))
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}:{}", self.kind.name(), self.role, self.instance)?;
        if let Some(dp) = self.dp {
            write!(f, ".{dp}")?;
        }
        if let Some(tp) = self.tp {
            write!(f, ".{tp}")?;
        }
        match self.when {
            When::Share(share) => write!(f, "@{share:.4}")?,
            When::After(time) => write!(f, "@{}s", time.as_secs_f64())?,
        }
        match self.kind {
            Kind::Stop(time) => write!(f, "={}", time.as_secs_f64()),
            Kind::Slow(bytes_per_s) => write!(f, "={}", bytes_per_s as f64 / 1e6),
            Kind::Kill | Kind::Restart | Kind::Corrupt | Kind::DropAcks | Kind::Abort => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
