//! What one worker counts, as Prometheus text.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Worker;
use super::leg::LegKind;
use crate::sync::lock;

/// Counts of one worker.
#[derive(Debug, Default)]
pub struct Counters {
    /// Prefill legs that were taken.
    pub prefill: AtomicU64,
    /// Decode legs whose blocks were there.
    pub decode: AtomicU64,
    /// Ordinary requests.
    pub plain: AtomicU64,
    /// Decode legs whose params were another process's, checked in form only.
    pub foreign: AtomicU64,
    /// Decode legs whose prompt was not the one that was prefilled.
    pub prompt_mismatches: AtomicU64,
    /// Requests that met a fault.
    pub faults: AtomicU64,
    /// Requests whose connection was closed before the answer's end.
    pub aborted: AtomicU64,
    /// Requests that run.
    pub running: AtomicU64,
    /// Tokens sent.
    pub tokens: AtomicU64,
    refused: Mutex<BTreeMap<&'static str, u64>>,
}

impl Counters {
    /// Adds one of a kind.
    pub fn leg(&self, kind: LegKind) {
        let count = match kind {
            LegKind::Prefill => &self.prefill,
            LegKind::Decode => &self.decode,
            LegKind::Plain => &self.plain,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a refusal.
    pub fn refuse(&self, reason: &'static str) {
        *lock(&self.refused).entry(reason).or_insert(0) += 1;
    }

    /// Refusals for one reason.
    pub fn refused(&self, reason: &str) -> u64 {
        lock(&self.refused).get(reason).copied().unwrap_or(0)
    }
}

/// The text of `GET /metrics`.
pub fn metrics(worker: &Worker) -> String {
    let model = &worker.args.model;
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let counters = &worker.counters;
    let mut text = String::new();
    let mut put = |kind: &str, name: &str, help: &str, series: &[(String, u64)]| {
        // A name that ends in _total is a counter's series; its family is named so as well.
        let _ok = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in series {
            let _ok = writeln!(text, "{name}{labels} {value}");
        }
    };
    let named = format!("{{model_name=\"{}\"}}", escaped(model));
    let bare = |value| [(String::new(), value)];
    put(
        "gauge",
        "vllm:num_requests_running",
        "Requests that run",
        &[(named.clone(), of(&counters.running))],
    );
    put(
        "gauge",
        "vllm:num_requests_waiting",
        "Requests that wait; a mock lets none wait",
        &[(named, 0)],
    );
    put(
        "counter",
        "hetero_kv_mock_legs_total",
        "Requests taken, by what they were",
        &[
            ("{leg=\"prefill\"}".to_owned(), of(&counters.prefill)),
            ("{leg=\"decode\"}".to_owned(), of(&counters.decode)),
            ("{leg=\"plain\"}".to_owned(), of(&counters.plain)),
        ],
    );
    let refused: Vec<(String, u64)> = lock(&counters.refused)
        .iter()
        .map(|(reason, count)| (format!("{{reason=\"{reason}\"}}"), *count))
        .collect();
    put(
        "counter",
        "hetero_kv_mock_refused_total",
        "Requests refused, by reason",
        &refused,
    );
    for (name, help, count) in [
        (
            "foreign",
            "Decode legs with params of another process",
            &counters.foreign,
        ),
        (
            "prompt_mismatches",
            "Decode legs with another prompt than was prefilled",
            &counters.prompt_mismatches,
        ),
        ("faults", "Requests that met a fault", &counters.faults),
        (
            "aborted",
            "Requests whose connection closed before the end",
            &counters.aborted,
        ),
        ("tokens", "Tokens sent", &counters.tokens),
        (
            "transfers_freed",
            "Pinned prompts freed by a decode leg, of this process",
            &worker.transfers.freed,
        ),
        (
            "transfers_expired",
            "Pinned prompts freed by time, of this process",
            &worker.transfers.expired,
        ),
    ] {
        put(
            "counter",
            &format!("hetero_kv_mock_{name}_total"),
            help,
            &bare(of(count)),
        );
    }
    put(
        "gauge",
        "hetero_kv_mock_transfers_pinned",
        "Prompts pinned, of this process",
        &bare(worker.transfers.pinned() as u64),
    );
    text
}

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
