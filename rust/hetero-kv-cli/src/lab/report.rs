//! What a lab prints: progress, a table for people, JSON for machines, the verdict.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use super::config::{Plan, gib};
use super::fault::Role;
use super::ipc::Outcome;
use super::span::Union;
use super::trace::Agreement;
use super::transports::Transports;
use crate::output::{self, Verdict, columns};

/// Loads whose times are kept for the percentiles.
const LOADS_KEPT_MAX: usize = 1 << 20;
/// Breaches that are shown.
const SHOWN_MAX: usize = 10;
/// Between lines of progress.
const PROGRESS: Duration = Duration::from_secs(2);
/// A process that has grown by more is not flat.
const FLAT_BYTES: u64 = 2 << 20;

/// A source rank: instance, data parallel rank, tensor parallel rank.
type SourceKey = (u32, u32, u32);

/// Everything found out in a run.
#[derive(Debug, Default)]
pub(super) struct Found {
    ok: u64,
    failed: u64,
    recomputed: u64,
    cancelled: u64,
    pub(super) never_ended: u64,
    /// Failed while nothing was broken.
    pub(super) unexplained: u64,
    /// By reason: how many, and the text of the first.
    reasons: BTreeMap<String, (u64, String)>,
    pub(super) bytes_moved: u64,
    pub(super) bytes_mismatched: u64,
    /// Of loads that succeeded: by the plan, and moved.
    pub(super) bytes_planned: u64,
    pub(super) bytes_loaded: u64,
    /// Of loads that succeeded, from order to end on their slowest rank.
    load_us: Vec<u64>,
    /// When at least one read was under way.
    pub(super) reading: Union,
    /// Reads and bytes.
    pub(super) reads_by_source: BTreeMap<SourceKey, (u64, u64)>,
    pub(super) transports: Transports,
    pub(super) blocks_held: u32,
    pub(super) leases_held: u64,
    /// Requests and transfers that decode still knows.
    pub(super) open: (usize, usize),
    pub(super) leases: BTreeMap<String, u64>,
    /// Found while requests ran.
    pub(super) violations: Vec<String>,
    /// Of the last look at the engines.
    pub(super) breaches: Vec<String>,
    pub(super) not_due: Vec<String>,
    /// Of `--trace`.
    pub(super) agreement: Option<Agreement>,
    pub(super) elapsed: Duration,
    pub(super) cpu_s: f64,
    /// Resident bytes by process, after the first quarter of the requests (or the process's
    /// start, if that was later) and after the last.
    pub(super) resident_before: BTreeMap<(u32, String), u64>,
    pub(super) resident_after: BTreeMap<(u32, String), u64>,
}

/// Milliseconds within which a share of the loads ended.
#[derive(Clone, Copy, Debug, Serialize)]
struct LoadTimes {
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

impl Found {
    pub(super) fn count(&mut self, outcome: &Outcome) {
        let reason = match outcome {
            Outcome::Ok => {
                self.ok += 1;
                None
            }
            Outcome::Cancelled => {
                self.cancelled += 1;
                None
            }
            Outcome::Recomputed(reason) => {
                self.recomputed += 1;
                reason.as_ref()
            }
            Outcome::Failed(reason) => {
                self.failed += 1;
                Some(reason)
            }
        };
        if let Some(reason) = reason {
            self.note(&reason.label, &reason.text);
        }
    }

    /// Prefill holds no blocks for a request, and decode computes it.
    pub(super) fn note_refused(&mut self, text: &str) {
        self.note("not_held", text);
    }

    fn note(&mut self, label: &str, text: &str) {
        let entry = self.reasons.entry(label.to_owned());
        entry.or_insert_with(|| (0, text.to_owned())).0 += 1;
    }

    pub(super) fn note_load(&mut self, elapsed: Duration) {
        if self.load_us.len() < LOADS_KEPT_MAX {
            let us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
            self.load_us.push(us);
        }
    }

    /// Bytes of all reads over this time.
    fn gb_per_s(&self, time: Duration) -> f64 {
        let seconds = time.as_secs_f64();
        if seconds > 0.0 {
            self.bytes_moved as f64 / 1e9 / seconds
        } else {
            0.0
        }
    }

    /// `None` without a load that succeeded.
    fn load_times(&self) -> Option<LoadTimes> {
        let mut sorted = self.load_us.clone();
        sorted.sort_unstable();
        let ms = |us: u64| us as f64 / 1e3;
        let share = |percent: usize| sorted.get(sorted.len() * percent / 100).copied().map(ms);
        Some(LoadTimes {
            p50: share(50)?,
            p90: share(90)?,
            p99: share(99)?,
            max: sorted.last().copied().map(ms)?,
        })
    }

    /// What makes the run wrong, in words.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut unless_zero = |count: u64, what: &str| {
            if count > 0 {
                faults.push(format!("{count} {what}"));
            }
        };
        unless_zero(
            self.bytes_mismatched,
            "bytes differ from what belongs there",
        );
        unless_zero(
            self.bytes_planned.abs_diff(self.bytes_loaded),
            "bytes more or less were moved than the plans of loads that succeeded say",
        );
        unless_zero(self.blocks_held.into(), "blocks are still held");
        unless_zero(self.leases_held, "leases are still alive");
        unless_zero(self.open.0 as u64, "requests are still open on decode");
        unless_zero(self.open.1 as u64, "transfers are still open on decode");
        unless_zero(
            self.agreement.as_ref().map_or(0, |found| found.wrong),
            "reads of which session, connection, read and acknowledgement do not name one rank",
        );
        unless_zero(self.never_ended, "requests never ended");
        unless_zero(self.unexplained, "requests failed while nothing was broken");
        faults.extend(self.violations.iter().chain(&self.breaches).cloned());
        // A control that was not planted shows nothing, least of all that bytes are compared.
        let controls = self.not_due.iter().filter(|it| it.starts_with("corrupt"));
        faults.extend(controls.map(|it| {
            format!(
                "the negative control {it} was not planted; give its time as a share, as in @0.5"
            )
        }));
        faults
    }

    /// The process that has grown most between the first quarter and the end: by how much, its
    /// size, its name.
    fn growth(&self) -> Option<(u64, u64, &str)> {
        self.resident_after
            .iter()
            .filter_map(|(process, after)| {
                let before = self.resident_before.get(process)?;
                Some((after.saturating_sub(*before), *after, process.1.as_str()))
            })
            .max()
    }
}

/// 0 or 1, as the exit code says.
pub(super) fn verdict(found: &Found) -> Verdict {
    if found.faults().is_empty() {
        Verdict::Right
    } else {
        Verdict::Wrong
    }
}

/// The keys of `docs/lab.md`, and no others.
pub(super) fn json(plan: &Plan, found: &Found) -> Result<String> {
    for fault in found.faults().iter().take(SHOWN_MAX) {
        output::tell(&format!("WRONG: {fault}\n"));
    }
    let reads: BTreeMap<String, u64> = found
        .reads_by_source
        .iter()
        .map(|((instance, dp, tp), (reads, _))| (format!("{instance}.{dp}.{tp}"), *reads))
        .collect();
    let json = json!({
        "requests": {
            "ok": found.ok,
            "failed": found.failed,
            "recomputed": found.recomputed,
            "cancelled": found.cancelled,
        },
        "bytes_moved": found.bytes_moved,
        "bytes_mismatched": found.bytes_mismatched,
        "reads_by_source": reads,
        "transport": plan.transport.name(),
        "transports": found.transports.json(),
        "blocks_held": found.blocks_held,
        "gb_per_s": found.gb_per_s(found.elapsed),
        "read_s": found.reading.total().as_secs_f64(),
        "read_gb_per_s": found.gb_per_s(found.reading.total()),
        "load_ms": found.load_times(),
        "cpu_s": found.cpu_s,
    });
    let mut text = serde_json::to_string(&json).context("writing the result as JSON")?;
    text.push('\n');
    Ok(text)
}

/// What is about to run.
pub(super) fn head(plan: &Plan) -> String {
    let shapes = |role| {
        let shapes: Vec<String> = match role {
            Role::Prefill => &plan.prefill,
            Role::Decode => &plan.decode,
        }
        .iter()
        .map(|shape| format!("({shape})"))
        .collect();
        shapes.join(" + ")
    };
    format!(
        "lab: {} -> {}, {}, {} layers, block size {}, {} ranks in {} processes, {} blocks a \
         prefill rank and {} a decode rank ({:.2} GiB)\n",
        shapes(Role::Prefill),
        shapes(Role::Decode),
        plan.kv,
        plan.model.layers,
        plan.model.block_size,
        plan.ranks(),
        plan.ranks() as usize
            + plan.engines(Role::Prefill).len()
            + plan.engines(Role::Decode).len(),
        plan.blocks.0,
        plan.blocks.1,
        gib(plan.memory_bytes),
    )
}

/// For people.
pub(super) fn table(plan: &Plan, found: &Found) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let mut line = |content: String| {
        let _ = writeln!(text, "{content}");
    };
    let seconds = found.elapsed.as_secs_f64();
    line(format!(
        "requests    {} ok, {} failed, {} recomputed, {} cancelled, of {} in {seconds:.2} s ({:.0}/s)",
        found.ok,
        found.failed,
        found.recomputed,
        found.cancelled,
        plan.requests,
        plan.requests as f64 / seconds.max(1e-9),
    ));
    for (label, (count, example)) in &found.reasons {
        line(format!("  {count:>6} {label}: {example}"));
    }
    let transports = found.transports.names();
    line(format!(
        "bytes       {} moved by {} ({:.3} GB/s over the whole run, filling and comparing \
         included), {} compared unequal",
        found.bytes_moved,
        if transports.is_empty() {
            "nobody".to_owned()
        } else {
            transports.join(" and ")
        },
        found.gb_per_s(found.elapsed),
        found.bytes_mismatched,
    ));
    for row in found.transports.rows(plan.transport.name()) {
        line(row);
    }
    if let Some(LoadTimes { p50, p90, p99, max }) = found.load_times() {
        let reading = found.reading.total();
        line(format!(
            "reads       {:.3} GB/s over the {:.2} s in which at least one was under way",
            found.gb_per_s(reading),
            reading.as_secs_f64(),
        ));
        line(format!(
            "loads       {} of {} requests, from order to end: median {p50:.2} ms, 90 % within \
             {p90:.2} ms, 99 % within {p99:.2} ms, longest {max:.2} ms",
            found.load_us.len(),
            found.ok,
        ));
    }
    if let Some(trace) = &found.agreement {
        line(format!(
            "trace       {} of {} reads: session, connection, read and acknowledgement name one \
             rank; lines in {}",
            trace.agree,
            trace.reads,
            trace.path.display(),
        ));
    }
    let leases: Vec<String> = found
        .leases
        .iter()
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    line(format!(
        "leases      {} (engines that were killed took their counts with them)",
        leases.join(", ")
    ));
    line(format!(
        "cpu         {:.2} s over all processes",
        found.cpu_s
    ));
    if let Some((grown, size, name)) = found.growth() {
        let flat = grown <= FLAT_BYTES.max(size / 100);
        line(format!(
            "memory      of {} processes {name} grew most after the first quarter: by {:.2} MiB to \
             {:.2}{}",
            found.resident_after.len(),
            mib(grown),
            mib(size),
            if flat { "" } else { " (NOT flat)" },
        ));
    }
    text.push('\n');
    text.push_str(&sources(found));
    for fault in &found.not_due {
        let _ = writeln!(text, "never came due: {fault}");
    }
    let faults = found.faults();
    if faults.is_empty() {
        let _ = writeln!(text, "all right: every byte compared, every block freed");
    }
    for fault in faults.iter().take(SHOWN_MAX) {
        let _ = writeln!(text, "WRONG: {fault}");
    }
    let _ = writeln!(text, "blocks still held: {}", found.blocks_held);
    text
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Who was read how often. Equal holders of the same heads should stand at about the same height.
fn sources(found: &Found) -> String {
    const WIDTH: u64 = 40;
    let most = found
        .reads_by_source
        .values()
        .map(|(reads, _)| *reads)
        .max()
        .unwrap_or(0)
        .max(1);
    let rows: Vec<Vec<String>> = found
        .reads_by_source
        .iter()
        .map(|((instance, dp, tp), (reads, bytes))| {
            vec![
                format!("{instance}.{dp}.{tp}"),
                reads.to_string(),
                format!("{:.1}", *bytes as f64 / 1e6),
                "#".repeat((reads * WIDTH).div_ceil(most) as usize),
            ]
        })
        .collect();
    columns(
        &["source", "reads", "MB", "(INSTANCE.DP.TP of prefill)"],
        &rows,
    )
}

/// Lines on stderr while requests run.
#[derive(Debug)]
pub(super) struct Progress {
    begun: Instant,
    shown: Instant,
    ended_then: u64,
    bytes_then: u64,
}

impl Progress {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            begun: now,
            shown: now,
            ended_then: 0,
            bytes_then: 0,
        }
    }

    /// One line every other second.
    pub(super) fn show(&mut self, plan: &Plan, found: &Found, ended: u64, in_flight: usize) {
        let since = self.shown.elapsed();
        if since < PROGRESS {
            return;
        }
        let per_s = |count: u64| count as f64 / since.as_secs_f64();
        self.say(&format!(
            "{ended} of {} ended ({:.0}/s), {in_flight} under way, {} failed so far, {:.2} GB \
             moved ({:.2} GB/s)",
            plan.requests,
            per_s(ended - self.ended_then),
            found.failed,
            found.bytes_moved as f64 / 1e9,
            per_s(found.bytes_moved - self.bytes_then) / 1e9,
        ));
        self.shown = Instant::now();
        self.ended_then = ended;
        self.bytes_then = found.bytes_moved;
    }

    /// A line with the time in front.
    pub(super) fn say(&self, text: &str) {
        let at_s = self.begun.elapsed().as_secs_f64();
        output::tell(&format!("{at_s:8.1} s  {text}\n"));
    }
}
