//! W3C trace context: whose trace a request belongs to, and what its legs say of it.
//!
//! The proxy is one hop of a trace: it keeps the trace id, and gives each leg a parent id of its
//! own, so that an engine's spans hang under the leg that caused them. It sends no spans itself.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::app::App;
use crate::metrics::ReasonLabels;

/// The trace id, the parent id and flags.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// What vendors add, passed on as it is.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Length of a header of version 00; that of a later version may go on behind a `-`.
const V00_BYTES: usize = 55;
const SAMPLED: u8 = 0x01;
/// `sampled` and `random-trace-id`; a version 00 header has the others zero.
const FLAGS: u8 = 0x03;
/// The most that the recommendation allows.
const STATES_MAX: usize = 32;
const KEY_BYTES_MAX: usize = 256;
const VALUE_BYTES_MAX: usize = 256;

/// The trace of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    trace_id: u128,
    flags: u8,
}

impl TraceContext {
    /// Reads a `traceparent`; `None` where it is malformed, or has an id of zeros.
    pub fn parse(header: &[u8]) -> Option<Self> {
        let (known, rest) = header.split_at_checked(V00_BYTES)?;
        let [version, trace_id, parent_id, flags] = fields(known)?;
        let version = hex(version)?;
        let later = version > 0 && version < 0xff;
        if !(version == 0 && rest.is_empty() || later && matches!(rest.first(), None | Some(b'-')))
        {
            return None;
        }
        let trace_id = hex(trace_id).filter(|id| *id != 0)?;
        hex(parent_id).filter(|id| *id != 0)?;
        let flags = u8::try_from(hex(flags)?).ok()? & FLAGS;
        Some(Self { trace_id, flags })
    }

    /// The trace id as it is written.
    pub fn trace_id(&self) -> String {
        format!("{:032x}", self.trace_id)
    }

    /// The `traceparent` of what is done under this parent id.
    pub fn header(&self, parent_id: u64) -> Option<HeaderValue> {
        let Self { trace_id, flags } = self;
        HeaderValue::try_from(format!("00-{trace_id:032x}-{parent_id:016x}-{flags:02x}")).ok()
    }
}

/// `2-32-16-2` characters; `None` where no dash stands between them.
fn fields(header: &[u8]) -> Option<[&[u8]; 4]> {
    let mut parts = header.splitn(4, |byte| *byte == b'-');
    let fields = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
    (fields.map(<[u8]>::len) == [2, 32, 16, 2]).then_some(fields)
}

/// Lower-case digits only, as the recommendation wants them.
fn hex(digits: &[u8]) -> Option<u128> {
    let lower = |digit: &u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    let text = std::str::from_utf8(digits).ok()?;
    digits
        .iter()
        .all(lower)
        .then(|| u128::from_str_radix(text, 16).ok())?
}

/// Whether this is a `tracestate`: at most 32 members `key=value`, no key twice.
pub fn is_state(header: &str) -> bool {
    let mut keys = Vec::new();
    let members = header
        .split(',')
        .map(|member| member.trim_matches([' ', '\t']));
    for member in members.filter(|member| !member.is_empty()) {
        let Some((key, value)) = member.split_once('=') else {
            return false;
        };
        let good = is_key(key) && is_value(value) && !keys.contains(&key);
        keys.push(key);
        if !good || keys.len() > STATES_MAX {
            return false;
        }
    }
    true
}

fn is_key(key: &str) -> bool {
    let of_key =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-*/@".contains(&byte);
    let begins = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    key.len() <= KEY_BYTES_MAX
        && key.as_bytes().first().is_some_and(begins)
        && key.bytes().all(of_key)
}

fn is_value(value: &str) -> bool {
    let of_value = |byte: u8| matches!(byte, 0x20..=0x7e) && byte != b',' && byte != b'=';
    !value.is_empty() && value.len() <= VALUE_BYTES_MAX && value.bytes().all(of_value)
}

/// Where new ids come from: one seed for each start, and a count that is mixed into it.
#[derive(Debug)]
pub struct TraceIds {
    seed: [u64; 2],
    count: AtomicU64,
}

impl Default for TraceIds {
    fn default() -> Self {
        // The system's random numbers, by what std seeds its hash maps with.
        let random = || RandomState::new().hash_one(0_u64);
        Self {
            seed: [random(), random()],
            count: AtomicU64::new(0),
        }
    }
}

impl TraceIds {
    /// A parent id; each once for 2^64 calls, and never 0.
    pub fn parent_id(&self) -> u64 {
        loop {
            let count = self.count.fetch_add(1, Ordering::Relaxed);
            let id = mix(self.seed[0].wrapping_add(count));
            if id != 0 {
                return id;
            }
        }
    }

    /// A trace of which this share is sampled.
    fn start(&self, sample: f64) -> TraceContext {
        let low = self.parent_id();
        let high = mix(self.seed[1] ^ low);
        // 53 bits make a fraction in [0, 1).
        let drawn = (low >> 11) as f64 / (1_u64 << 53) as f64;
        TraceContext {
            trace_id: u128::from(high) << 64 | u128::from(low),
            flags: if drawn < sample { SAMPLED } else { 0 },
        }
    }
}

/// One to one, and each bit of the result depends on each of the argument (the finaliser of
/// SplitMix64).
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The trace of a request. The client's headers of it that are not well-formed are taken out and
/// counted: a `traceparent` with its `tracestate`, which then starts anew as without one.
pub(crate) fn enter(app: &App, headers: &mut HeaderMap) -> Option<TraceContext> {
    let mut told = headers.get_all(TRACEPARENT).into_iter();
    let (first, second) = (told.next(), told.next());
    let count = |reason| {
        let labels = ReasonLabels { reason };
        app.metrics.trace_faults.get_or_create(&labels).inc();
    };
    let continued = match (first, second) {
        (Some(only), None) => TraceContext::parse(only.as_bytes()),
        _ => None,
    };
    if first.is_some() && continued.is_none() {
        count("traceparent");
    }
    if continued.is_some() {
        let mut states = headers.get_all(TRACESTATE).into_iter();
        let whole: Option<Vec<&str>> = states.by_ref().map(|state| state.to_str().ok()).collect();
        if whole.is_none_or(|states| !is_state(&states.join(","))) {
            count("tracestate");
            headers.remove(TRACESTATE);
        }
        return continued;
    }
    headers.remove(TRACEPARENT);
    headers.remove(TRACESTATE);
    let sample = app.config().trace_sample;
    (sample > 0.0).then(|| app.trace_ids.start(sample))
}

/// As [`enter`], for a request that is sent on under one parent id.
pub(crate) fn pass(app: &App, headers: &mut HeaderMap) -> Option<TraceContext> {
    let trace = enter(app, headers);
    if let Some((_, header)) = leg(app, trace) {
        headers.insert(TRACEPARENT, header);
    }
    trace
}

/// The parent id of one more leg, and its `traceparent`.
pub(crate) fn leg(app: &App, trace: Option<TraceContext>) -> Option<(u64, HeaderValue)> {
    let trace = trace?;
    let parent_id = app.trace_ids.parent_id();
    Some((parent_id, trace.header(parent_id)?))
}

#[cfg(test)]
mod tests;
