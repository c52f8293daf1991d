//! Results: as a table for people, as JSON for comparing.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::cpu::Reading;
use super::histogram::Histogram;
use super::load::Load;
use super::tally::{PromptTokens, Tally};

/// Of the JSON's shape.
pub const VERSION: u32 = 1;
const MIB: f64 = (1 << 20) as f64;

/// The result of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// What was measured.
    pub url: String,
    /// The path of the API.
    pub path: String,
    /// Its model; none with bodies from a file.
    pub model: Option<String>,
    /// Processors of the host that measured.
    pub processors: usize,
    /// In the order of the run.
    pub rounds: Vec<RoundReport>,
}

/// The result of one round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RoundReport {
    /// Closed loop: requests in flight.
    pub concurrency: Option<u32>,
    /// Open loop: requests a second that were due.
    pub rate: Option<f64>,
    /// Requests that were due.
    pub sent: u64,
    /// Complete answers.
    pub completed: u64,
    /// `sent` less `completed`.
    pub failed: u64,
    /// Failures by name.
    pub failures: BTreeMap<String, FailureReport>,
    /// From the first request to the end of the last.
    pub duration_s: f64,
    /// Complete answers a second.
    pub requests_per_s: f64,
    /// Prompt and generated tokens a second; none where prompts' are not known.
    pub total_tokens_per_s: Option<f64>,
    /// Generated tokens a second.
    pub generated_tokens_per_s: f64,
    /// Generated tokens of complete answers.
    pub generated_tokens: u64,
    /// Chunks with tokens of complete answers.
    pub chunks: u64,
    /// To the first byte of the body.
    pub first_byte_ms: Option<Times>,
    /// To the first token.
    pub ttft_ms: Option<Times>,
    /// For each token after the first.
    pub tpot_ms: Option<Times>,
    /// Between chunks.
    pub itl_ms: Option<Times>,
    /// To the end of the answer.
    pub e2e_ms: Option<Times>,
    /// Connections that the round made.
    pub connects: u64,
    /// Of the processes that were watched.
    pub cpu: Option<CpuReport>,
    /// The host's, at the round's end.
    pub load_average: Option<f64>,
}

/// Failures of one kind.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FailureReport {
    /// How many.
    pub count: u64,
    /// What was seen, of a few.
    pub examples: Vec<String>,
}

/// A distribution, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Times {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
}

/// What the watched processes took in a round.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct CpuReport {
    /// Processor seconds.
    pub cpu_s: f64,
    /// By requests that were sent.
    pub us_per_request: f64,
    /// By chunks; none without.
    pub us_per_chunk: Option<f64>,
    /// Resident at the round's end.
    pub rss_mib: f64,
    /// Largest resident since the process began.
    pub rss_peak_mib: f64,
}

impl Times {
    fn of(histogram: &Histogram) -> Option<Self> {
        Some(Self {
            mean: histogram.mean_ms()?,
            p50: histogram.quantile_ms(0.5)?,
            p99: histogram.quantile_ms(0.99)?,
        })
    }
}

impl CpuReport {
    /// Between two readings.
    pub fn between(before: Reading, after: Reading, tally: &Tally) -> Self {
        let cpu_s = after.cpu_s - before.cpu_s;
        Self {
            cpu_s,
            us_per_request: cpu_s * 1e6 / tally.sent.max(1) as f64,
            us_per_chunk: (tally.ttft.count() > 0).then(|| cpu_s * 1e6 / tally.chunks as f64),
            rss_mib: after.rss_bytes as f64 / MIB,
            rss_peak_mib: after.rss_peak_bytes as f64 / MIB,
        }
    }
}

impl RoundReport {
    /// Of a tally; `prompt_tokens` of each request stands in where answers do not tell.
    pub fn new(load: Load, tally: &Tally, prompt_tokens: Option<u32>) -> Self {
        let (concurrency, rate) = match load {
            Load::Closed { concurrency, .. } => (Some(concurrency), None),
            Load::Open { rate, .. } => (None, Some(rate)),
        };
        let seconds = tally.duration.as_secs_f64().max(1e-9);
        let prompts = match tally.prompt_tokens {
            PromptTokens::Known(sum) => Some(sum),
            PromptTokens::Unknown => prompt_tokens.map(|each| u64::from(each) * tally.completed),
        };
        let total = prompts.map(|sum| (sum + tally.generated_tokens) as f64 / seconds);
        let failures = tally.failures.iter().map(|(kind, count, examples)| {
            let examples = examples.to_vec();
            (kind.to_string(), FailureReport { count, examples })
        });
        Self {
            concurrency,
            rate,
            sent: tally.sent,
            completed: tally.completed,
            failed: tally.failures.count(),
            failures: failures.collect(),
            duration_s: tally.duration.as_secs_f64(),
            requests_per_s: tally.completed as f64 / seconds,
            total_tokens_per_s: total,
            generated_tokens_per_s: tally.generated_tokens as f64 / seconds,
            generated_tokens: tally.generated_tokens,
            chunks: tally.chunks,
            first_byte_ms: Times::of(&tally.first_byte),
            ttft_ms: Times::of(&tally.ttft),
            tpot_ms: Times::of(&tally.tpot),
            itl_ms: Times::of(&tally.gaps),
            e2e_ms: Times::of(&tally.whole),
            connects: 0,
            cpu: None,
            load_average: super::cpu::load_average(),
        }
    }

    /// What tells rounds of one run apart.
    pub fn label(&self) -> String {
        match (self.concurrency, self.rate) {
            (Some(concurrency), _) => format!("{concurrency} at once"),
            (None, Some(rate)) => format!("{rate}/s"),
            (None, None) => "?".to_owned(),
        }
    }

    /// Numbers that can be compared, by name.
    pub fn figures(&self) -> Vec<(&'static str, Option<f64>)> {
        let mean = |times: &Option<Times>| times.map(|times| times.mean);
        let p99 = |times: &Option<Times>| times.map(|times| times.p99);
        vec![
            ("completed", Some(self.completed as f64)),
            ("failed", Some(self.failed as f64)),
            ("duration s", Some(self.duration_s)),
            ("requests/s", Some(self.requests_per_s)),
            ("total tok/s", self.total_tokens_per_s),
            ("gen tok/s", Some(self.generated_tokens_per_s)),
            ("TTFT mean ms", mean(&self.ttft_ms)),
            ("TTFT P99 ms", p99(&self.ttft_ms)),
            ("TPOT mean ms", mean(&self.tpot_ms)),
            ("TPOT P99 ms", p99(&self.tpot_ms)),
            ("ITL P99 ms", p99(&self.itl_ms)),
            ("TTFB P99 ms", p99(&self.first_byte_ms)),
            ("E2E mean ms", mean(&self.e2e_ms)),
            ("E2E P99 ms", p99(&self.e2e_ms)),
            ("CPU us/request", self.cpu.map(|cpu| cpu.us_per_request)),
            ("CPU us/chunk", self.cpu.and_then(|cpu| cpu.us_per_chunk)),
            ("RSS MiB", self.cpu.map(|cpu| cpu.rss_mib)),
            ("RSS peak MiB", self.cpu.map(|cpu| cpu.rss_peak_mib)),
        ]
    }
}

/// The columns of the table, each with the figure under it.
const COLUMNS: [(&str, &str); 15] = [
    ("completed", "completed"),
    ("failed", "failed"),
    ("duration s", "duration s"),
    ("requests/s", "req/s"),
    ("total tok/s", "total tok/s"),
    ("gen tok/s", "gen tok/s"),
    ("TTFT mean ms", "TTFT ms"),
    ("TTFT P99 ms", "P99"),
    ("TPOT mean ms", "TPOT ms"),
    ("TPOT P99 ms", "P99"),
    ("E2E mean ms", "E2E ms"),
    ("E2E P99 ms", "P99"),
    ("CPU us/request", "CPU us/req"),
    ("CPU us/chunk", "us/chunk"),
    ("RSS MiB", "RSS MiB"),
];

impl Report {
    /// Whether every request was completed, and there was one.
    pub fn is_complete(&self) -> bool {
        !self.rounds.is_empty()
            && self
                .rounds
                .iter()
                .all(|round| round.sent > 0 && round.completed == round.sent)
    }

    /// For people; columns that no round has a figure for are left out.
    pub fn table(&self) -> String {
        let figures: Vec<BTreeMap<_, _>> = self
            .rounds
            .iter()
            .map(|round| round.figures().into_iter().collect())
            .collect();
        let mut columns = vec![vec!["load".to_owned()], vec!["sent".to_owned()]];
        for round in &self.rounds {
            columns[0].push(round.label());
            columns[1].push(round.sent.to_string());
        }
        for (name, title) in COLUMNS {
            let values: Vec<Option<f64>> = figures
                .iter()
                .map(|round| round.get(name).copied().flatten())
                .collect();
            if values.iter().any(Option::is_some) {
                let cells = values.into_iter().map(|value| shown(value, name));
                columns.push(std::iter::once(title.to_owned()).chain(cells).collect());
            }
        }
        let mut text = aligned(&columns);
        for round in &self.rounds {
            for (kind, failure) in &round.failures {
                let _ok = writeln!(text, "{}: {} x {kind}", round.label(), failure.count);
                for example in failure
                    .examples
                    .iter()
                    .filter(|example| !example.is_empty())
                {
                    let _ok = writeln!(text, "    {example}");
                }
            }
            if round.completed + round.failed != round.sent {
                let _ok = writeln!(
                    text,
                    "{}: completed + failed is not sent: a fault of this program",
                    round.label()
                );
            }
        }
        if let Some(load) = self.rounds.last().and_then(|round| round.load_average) {
            let _ok = writeln!(
                text,
                "load average {load:.1} on {} processors",
                self.processors
            );
        }
        text
    }
}

/// A number, whole where it is a count.
pub fn shown(value: Option<f64>, name: &str) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if matches!(name, "completed" | "failed") => format!("{value:.0}"),
        Some(value) if value >= 1_000.0 => format!("{value:.0}"),
        Some(value) if value >= 10.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.2}"),
    }
}

/// Columns, each with its title first: names to the left, numbers to the right.
pub fn aligned(columns: &[Vec<String>]) -> String {
    let rows = columns.iter().map(Vec::len).max().unwrap_or(0);
    let mut text = String::new();
    for row in 0..rows {
        let mut line = String::new();
        for (at, column) in columns.iter().enumerate() {
            let width = column
                .iter()
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0);
            let cell = column.get(row).map_or("", String::as_str);
            let _ok = if at == 0 {
                write!(line, "{cell:<width$}")
            } else {
                write!(line, "  {cell:>width$}")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
