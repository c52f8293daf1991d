//! What happened to one request, and when: a few times, kept for the last requests that ended.

pub mod cli;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock};

use http::HeaderValue;
use serde_json::{Value, json};

use crate::answer::Phase;
use crate::openai::tokens::Tokens;
use crate::sync::lock;
use crate::trace_context::TraceContext;

/// Legs of one request that are kept: more than any retry rule sends.
const LEGS_MAX: usize = 64;

/// One request. Times are microseconds of the clock of routing; 0 stands for what has not happened.
#[derive(Debug)]
pub struct Timeline {
    pub(crate) route: &'static str,
    pub(crate) started_us: u64,
    id: OnceLock<HeaderValue>,
    trace: OnceLock<TraceContext>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Each phase with its beginning.
    pub(crate) phases: Vec<(Phase, u64)>,
    /// Legs that ended, in that order.
    pub(crate) legs: Vec<LegTimes>,
    pub(crate) ended_us: u64,
    pub(crate) status: u16,
    /// What its answers told, where somebody reads it.
    pub(crate) tokens: Tokens,
}

/// One leg that ended.
#[derive(Debug, Clone)]
pub(crate) struct LegTimes {
    pub(crate) role: &'static str,
    pub(crate) instance: Arc<str>,
    pub(crate) rank: u32,
    pub(crate) outcome: &'static str,
    /// Its parent id in the request's trace.
    pub(crate) parent_id: u64,
    pub(crate) taken_us: u64,
    pub(crate) sent_us: u64,
    pub(crate) head_us: u64,
    pub(crate) first_us: u64,
    pub(crate) last_us: u64,
    pub(crate) chunks: u64,
    pub(crate) ended_us: u64,
}

impl Timeline {
    pub(crate) fn new(route: &'static str, started_us: u64) -> Self {
        Self {
            route,
            started_us,
            id: OnceLock::new(),
            trace: OnceLock::new(),
            seen: Mutex::new(Seen {
                phases: vec![(Phase::Admit, started_us)],
                ..Seen::default()
            }),
        }
    }

    /// What the request is known by. Said once.
    pub(crate) fn identify(&self, id: Option<&HeaderValue>, trace: Option<TraceContext>) {
        if let Some(id) = id {
            let _ = self.id.set(id.clone());
        }
        if let Some(trace) = trace {
            let _ = self.trace.set(trace);
        }
    }

    pub(crate) fn id(&self) -> Option<&str> {
        self.id.get()?.to_str().ok()
    }

    /// As it stands in the header.
    pub(crate) fn id_header(&self) -> Option<&HeaderValue> {
        self.id.get()
    }

    pub(crate) fn trace(&self) -> Option<&TraceContext> {
        self.trace.get()
    }

    pub(crate) fn enter(&self, phase: Phase, at_us: u64) {
        lock(&self.seen).phases.push((phase, at_us));
    }

    pub(crate) fn leg(&self, leg: LegTimes) {
        let mut seen = lock(&self.seen);
        if seen.legs.len() < LEGS_MAX {
            seen.legs.push(leg);
        }
    }

    /// An answer told these; what was told before counts less.
    pub(crate) fn tokens(&self, tokens: Tokens) {
        let mut seen = lock(&self.seen);
        seen.tokens = seen.tokens.then(tokens);
    }

    pub(crate) fn end(&self, status: u16, at_us: u64) {
        let mut seen = lock(&self.seen);
        seen.status = status;
        seen.ended_us = at_us;
    }

    /// Runs `look` on what was seen so far.
    pub(crate) fn seen<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&lock(&self.seen))
    }
}

/// The last requests that ended, oldest first.
#[derive(Debug, Default)]
pub struct Timelines(Mutex<VecDeque<Arc<Timeline>>>);

impl Timelines {
    /// Keeps one more, of at most `max`.
    pub(crate) fn keep(&self, timeline: Arc<Timeline>, max: usize) {
        if max == 0 || timeline.id().is_none() {
            return;
        }
        let mut kept = lock(&self.0);
        // Freed behind the lock.
        let oldest = (kept.len() >= max).then(|| kept.pop_front());
        kept.push_back(timeline);
        drop(kept);
        drop(oldest);
    }

    /// Those of this id: a client may use one for several.
    pub(crate) fn of(&self, id: &str) -> Vec<Arc<Timeline>> {
        let kept = lock(&self.0);
        kept.iter()
            .filter(|one| one.id() == Some(id))
            .cloned()
            .collect()
    }
}

/// Requests as the JSON object of Chrome's trace event format: one process for each, a row for its
/// phases, one for each leg, and one for the transfer. `epoch_us` is the clock's zero since 1970.
pub(crate) fn chrome(timelines: &[Arc<Timeline>], epoch_us: u64) -> Value {
    let mut events = Vec::new();
    for (pid, timeline) in (1..).zip(timelines) {
        timeline.seen(|seen| {
            request(
                &mut Rows {
                    events: &mut events,
                    pid,
                    epoch_us,
                },
                timeline,
                seen,
            )
        });
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

struct Rows<'a> {
    events: &'a mut Vec<Value>,
    pid: u32,
    epoch_us: u64,
}

impl Rows<'_> {
    fn name(&mut self, what: &str, tid: usize, name: &str) {
        self.events.push(json!({
            "ph": "M", "pid": self.pid, "tid": tid, "name": what, "args": {"name": name},
        }));
    }

    /// A span, where both of its ends have come.
    fn span(&mut self, tid: usize, name: &str, from_us: u64, to_us: u64, args: Value) {
        if from_us == 0 || to_us < from_us {
            return;
        }
        self.events.push(json!({
            "ph": "X", "pid": self.pid, "tid": tid, "cat": "request", "name": name,
            "ts": self.epoch_us + from_us, "dur": to_us - from_us, "args": args,
        }));
    }
}

/// Rows of a request: its phases, the transfer, and its legs from here on.
const CLIENT: usize = 1;
const TRANSFER: usize = 2;
const LEGS: usize = 3;

fn request(rows: &mut Rows<'_>, timeline: &Timeline, seen: &Seen) {
    let trace_id = timeline.trace().map(TraceContext::trace_id);
    rows.name("process_name", 0, timeline.id().unwrap_or_default());
    rows.name("thread_name", CLIENT, "client");
    let args = json!({"route": timeline.route, "status": seen.status, "trace_id": trace_id});
    rows.span(CLIENT, "request", timeline.started_us, seen.ended_us, args);
    let ends = seen.phases.iter().skip(1).map(|(_, at_us)| *at_us);
    for ((phase, from_us), to_us) in seen.phases.iter().zip(ends.chain([seen.ended_us])) {
        rows.span(CLIENT, phase.name(), *from_us, to_us, json!({}));
    }
    for (tid, leg) in (LEGS..).zip(&seen.legs) {
        rows.name(
            "thread_name",
            tid,
            &format!("{} {} rank {}", leg.role, leg.instance, leg.rank),
        );
        let args = json!({
            "instance": &*leg.instance, "rank": leg.rank, "outcome": leg.outcome,
            "chunks": leg.chunks, "parent_id": format!("{:016x}", leg.parent_id),
        });
        rows.span(
            tid,
            &format!("{} leg", leg.role),
            leg.taken_us,
            leg.ended_us,
            args,
        );
        let sent_us = leg.sent_us.max(leg.taken_us);
        rows.span(tid, "slot held", leg.taken_us, sent_us, json!({}));
        if leg.head_us > 0 {
            rows.span(tid, "to the head", sent_us, leg.head_us, json!({}));
            rows.span(
                tid,
                "to the first chunk",
                leg.head_us,
                leg.first_us,
                json!({}),
            );
        }
        rows.span(
            tid,
            "chunks",
            leg.first_us,
            leg.last_us,
            json!({"chunks": leg.chunks}),
        );
    }
    let last = |role| {
        seen.legs
            .iter()
            .rfind(|leg| leg.role == role && leg.outcome == "ok")
    };
    let (Some(prefill), Some(decode)) = (last("prefill"), last("decode")) else {
        return;
    };
    rows.name("thread_name", TRANSFER, "KV transfer, at most");
    let args = json!({"from": &*prefill.instance, "to": &*decode.instance});
    let taken_us = if decode.first_us > 0 {
        decode.first_us
    } else {
        decode.head_us
    };
    // Where both legs run at once, what came before decode was sent is not of the transfer.
    let from_us = match prefill.ended_us <= taken_us {
        true => prefill.ended_us,
        false => decode.sent_us.max(prefill.sent_us),
    };
    rows.span(
        TRANSFER,
        "transfer, and decode's first step",
        from_us,
        taken_us,
        args,
    );
}
