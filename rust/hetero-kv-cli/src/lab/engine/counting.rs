//! Reports of ranks become reports of the engine, as vLLM's `KVOutputAggregator` counts them.

use std::collections::BTreeMap;

use super::Received;

/// Breaches of the contract that are kept.
const VIOLATIONS_MAX: usize = 100;

/// Counts reports per request; when as many have come as there are ranks, the engine has it.
#[derive(Debug)]
pub(super) struct Aggregator {
    world: usize,
    sending: BTreeMap<String, usize>,
    receiving: BTreeMap<String, Vec<Received>>,
    violations: Vec<String>,
}

impl Aggregator {
    pub(super) fn new(world: usize) -> Self {
        Self {
            world,
            sending: BTreeMap::new(),
            receiving: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    /// A rank's `finished_sending`. `known`: blocks wait for it.
    pub(super) fn sent(&mut self, request_id: String, known: bool) {
        if !known {
            self.violate(format!("{request_id}: sent, but no blocks wait for that"));
        }
        *self.sending.entry(request_id).or_default() += 1;
    }

    /// A rank's `finished_recving`. `loads`: the request waits for it.
    pub(super) fn received(&mut self, report: Received, loads: bool) {
        if !loads {
            self.violate(format!(
                "{}: received, but loads nothing",
                report.request_id
            ));
        }
        let reports = self.receiving.entry(report.request_id.clone()).or_default();
        reports.push(report);
    }

    /// Sent by every rank.
    pub(super) fn take_sent(&mut self) -> Vec<String> {
        let whole = take_where(&mut self.sending, |count| *count >= self.world);
        whole
            .into_iter()
            .map(|(request_id, _)| request_id)
            .collect()
    }

    /// Received by every rank.
    pub(super) fn take_received(&mut self) -> Vec<(String, Vec<Received>)> {
        take_where(&mut self.receiving, |reports| reports.len() >= self.world)
    }

    pub(super) fn violations(&self) -> &[String] {
        &self.violations
    }

    fn violate(&mut self, text: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(text);
        }
    }
}

fn take_where<V>(map: &mut BTreeMap<String, V>, whole: impl Fn(&V) -> bool) -> Vec<(String, V)> {
    let (taken, kept) = std::mem::take(map)
        .into_iter()
        .partition(|(_, value)| whole(value));
    *map = kept;
    BTreeMap::into_iter(taken).collect()
}
