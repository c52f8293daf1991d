//! How much work an engine has, by its own metrics: other proxies' requests are among it.

use std::collections::BTreeMap;

/// Engines behind one URL; a line of another is passed over.
const ENGINES_MAX: usize = 1_024;

/// What one DP rank says of itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Requests that it computes or that wait in it.
    pub requests: u32,
    /// Share of its KV cache that is in use, in thousandths.
    pub cache_used: u16,
}

/// The gauges of vLLM that say it.
#[derive(Clone, Copy)]
enum Gauge {
    Requests,
    CacheUsed,
}

const GAUGES: [(&str, Gauge); 3] = [
    ("vllm:num_requests_running", Gauge::Requests),
    ("vllm:num_requests_waiting", Gauge::Requests),
    ("vllm:kv_cache_usage_perc", Gauge::CacheUsed),
];

impl EngineLoad {
    /// Reads a scrape of a URL with `dp` ranks behind it, rank 0 first; `None` where it does not say
    /// how many requests each of them has.
    ///
    /// The label `engine` is a rank, of the URL or of a larger engine: only their order counts. With
    /// one rank, all engines that report are taken together.
    pub fn of_scrape(text: &str, dp: u32) -> Option<Vec<Self>> {
        let mut engines: BTreeMap<u32, (f64, f64, bool)> = BTreeMap::new();
        for line in text.lines() {
            let Some((gauge, engine, value)) = sample(line) else {
                continue;
            };
            if engines.len() >= ENGINES_MAX && !engines.contains_key(&engine) {
                continue;
            }
            let known = engines.entry(engine).or_default();
            match gauge {
                Gauge::Requests => {
                    known.0 += value;
                    known.2 = true;
                }
                Gauge::CacheUsed => known.1 = known.1.max(value),
            }
        }
        // Without a number of requests it says nothing.
        let mut loads: Vec<(f64, f64)> = engines
            .into_values()
            .filter(|(_, _, told)| *told)
            .map(|(requests, used, _)| (requests, used))
            .collect();
        if dp == 1 && !loads.is_empty() {
            let requests = loads.iter().map(|(requests, _)| requests).sum();
            let used = loads.iter().map(|(_, used)| used).sum::<f64>() / loads.len() as f64;
            loads = vec![(requests, used)];
        }
        let whole = loads.len() == dp as usize;
        let load = |(requests, used): (f64, f64)| Self {
            // Saturating: what is too large or negative is the nearest that can be told.
            requests: requests.round() as u32,
            cache_used: (used.clamp(0.0, 1.0) * 1_000.0) as u16,
        };
        whole.then(|| loads.into_iter().map(load).collect())
    }
}

/// One line of the text format, where it is of one of the gauges: its engine and value.
fn sample(line: &str) -> Option<(Gauge, u32, f64)> {
    let (rest, gauge) = GAUGES
        .iter()
        .find_map(|(name, gauge)| Some((line.strip_prefix(name)?, *gauge)))?;
    let (engine, rest) = match rest.strip_prefix('{') {
        Some(labels) => engine_of(labels)?,
        None => (0, rest),
    };
    // Behind a longer name there is no blank.
    let mut words = rest.strip_prefix(' ')?.split_ascii_whitespace();
    let value: f64 = words.next()?.parse().ok()?;
    value.is_finite().then_some((gauge, engine, value))
}

/// The label `engine`, 0 where there is none, and what follows the labels.
fn engine_of(mut labels: &str) -> Option<(u32, &str)> {
    let mut engine = 0;
    loop {
        labels = labels.trim_start_matches([',', ' ']);
        if let Some(rest) = labels.strip_prefix('}') {
            return Some((engine, rest));
        }
        let (name, rest) = labels.split_once("=\"")?;
        let mut escaped = false;
        let end = rest.bytes().position(|byte| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        })?;
        if name == "engine" {
            engine = rest[..end].parse().ok()?;
        }
        labels = &rest[end + 1..];
    }
}

#[cfg(test)]
mod tests;
