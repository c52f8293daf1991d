//! The judgement and how it reads.

use std::collections::BTreeMap;

use serde::Serialize;

use super::counters::{BYTES_READ, Counters, LEASES_ALIVE, PROMPT_TOKENS, SourceRank};
use super::engines::{Engine, Role};
use super::prompts::Answers;
use crate::output::columns;

/// Failed prompts that are shown.
const FAILURES_SHOWN_MAX: usize = 3;

/// What one engine's counters say of the time between two readings.
struct Change {
    engine: Engine,
    bytes_by_source: BTreeMap<SourceRank, u64>,
    external_tokens: Option<u64>,
    computed_tokens: Option<u64>,
    leases_before: Option<u64>,
    leases_alive: Option<u64>,
    /// A counter that fell: the engine started anew in between.
    restarted: bool,
}

/// The whole finding.
pub(super) struct Report<'a> {
    answers: &'a Answers,
    changes: Vec<Change>,
    /// Why the answer is no. Empty: KV moved.
    not_moved: Vec<String>,
    leaks: Vec<String>,
}

impl<'a> Report<'a> {
    /// Judges two readings of the same engines.
    pub(super) fn new(
        engines: &[Engine],
        answers: &'a Answers,
        before: &[Counters],
        after: &[Counters],
    ) -> Self {
        let changes: Vec<Change> = engines
            .iter()
            .zip(before.iter().zip(after))
            .map(|(engine, (before, after))| change(engine, before, after))
            .collect();
        let mut report = Self {
            answers,
            changes,
            not_moved: Vec::new(),
            leaks: Vec::new(),
        };
        report.not_moved = report.reasons();
        report.leaks = report.leases();
        report
    }

    /// Whether KV moved and nothing is held.
    pub(super) fn right(&self) -> bool {
        self.not_moved.is_empty() && self.leaks.is_empty()
    }

    fn of(&self, role: Role) -> impl Iterator<Item = &Change> {
        self.changes
            .iter()
            .filter(move |change| change.engine.role == role)
    }

    fn bytes_moved(&self) -> u64 {
        self.sources().values().sum()
    }

    fn sources(&self) -> BTreeMap<SourceRank, u64> {
        let mut sources = BTreeMap::new();
        for change in self.of(Role::Decode) {
            for (source, bytes) in &change.bytes_by_source {
                *sources.entry(source.clone()).or_insert(0) += bytes;
            }
        }
        sources
    }

    /// Over the decode engines; absent when one of them does not say.
    fn decode_sum(&self, of: fn(&Change) -> Option<u64>) -> Option<u64> {
        self.of(Role::Decode).map(of).sum()
    }

    /// All tokens of a prompt can come from outside but the last, which decode computes.
    fn external_expected(&self) -> u64 {
        let computed = u64::from(self.answers.ok);
        self.answers.prompt_tokens.saturating_sub(computed)
    }

    fn reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        let Answers { sent, ok, .. } = self.answers;
        if ok < sent {
            reasons.push(format!("{} of {sent} prompts failed", sent - ok));
        }
        for change in &self.changes {
            if change.restarted {
                reasons.push(format!("{} started anew meanwhile", change.engine));
            }
        }
        match self.decode_sum(|change| change.external_tokens) {
            None => reasons.push(format!(
                "a decode engine exposes no {PROMPT_TOKENS}: not vLLM, or a version without it"
            )),
            Some(external) if *ok > 0 && external < self.external_expected().max(1) => {
                reasons.push(format!(
                    "decode took {external} of {} prompt tokens from outside and computed the rest",
                    self.external_expected()
                ));
            }
            Some(_) => {}
        }
        if *ok > 0 && self.bytes_moved() == 0 {
            reasons.push(format!(
                "no decode engine's {BYTES_READ} rose: is HeteroKVConnector loaded there?"
            ));
        }
        reasons
    }

    fn leases(&self) -> Vec<String> {
        self.of(Role::Prefill)
            .filter_map(|change| match (change.leases_before, change.leases_alive) {
                (_, None) => Some(format!(
                    "{} exposes no {LEASES_ALIVE}: is HeteroKVConnector loaded there?",
                    change.engine
                )),
                // Other clients of a busy cluster hold leases too.
                (before, Some(alive)) if alive > before.unwrap_or(0) => Some(format!(
                    "{} holds {alive} leases, {} before",
                    change.engine,
                    before.unwrap_or(0)
                )),
                (_, Some(_)) => None,
            })
            .collect()
    }

    /// For people; the last line is the answer.
    pub(super) fn text(&self) -> String {
        let number = |value: Option<u64>| value.map_or("?".to_owned(), |value| value.to_string());
        let Answers {
            sent,
            ok,
            prompt_tokens,
            failures,
        } = self.answers;
        let rows: Vec<Vec<String>> = self
            .changes
            .iter()
            .map(|change| {
                let bytes: u64 = change.bytes_by_source.values().sum();
                vec![
                    change.engine.role.to_string(),
                    change.engine.url.to_string(),
                    bytes.to_string(),
                    number(change.external_tokens),
                    number(change.computed_tokens),
                    // Of all clients of a cluster that serves.
                    format!(
                        "{} -> {}",
                        number(change.leases_before),
                        number(change.leases_alive)
                    ),
                ]
            })
            .collect();
        let mut text = columns(
            &[
                "ROLE",
                "ENGINE",
                "BYTES READ",
                "EXTERNAL TOKENS",
                "COMPUTED TOKENS",
                "LEASES BEFORE, AFTER",
            ],
            &rows,
        );
        text.push_str(&format!(
            "\nprompts answered: {ok} of {sent}, {prompt_tokens} tokens\n"
        ));
        for failure in failures.iter().take(FAILURES_SHOWN_MAX) {
            text.push_str(&format!("failed: {failure}\n"));
        }
        for (source, bytes) in self.sources() {
            text.push_str(&format!(
                "read from {} tp {}: {bytes} bytes\n",
                source.engine, source.tp
            ));
        }
        let computed = self.decode_sum(|change| change.computed_tokens);
        let external = self.decode_sum(|change| change.external_tokens);
        text.push_str(&format!(
            "decode: {} bytes, {} tokens from outside, {} computed\n",
            self.bytes_moved(),
            number(external),
            number(computed)
        ));
        for leak in &self.leaks {
            text.push_str(&format!("leases: {leak}\n"));
        }
        text.push_str(&if self.not_moved.is_empty() {
            "KV moved: yes\n".to_owned()
        } else {
            format!("KV moved: no ({})\n", self.not_moved.join("; "))
        });
        text
    }

    /// For programs.
    pub(super) fn json(&self) -> impl Serialize {
        Json {
            kv_moved: self.not_moved.is_empty(),
            reasons: self.not_moved.clone(),
            leases: Leases {
                alive: self
                    .of(Role::Prefill)
                    .map(|change| change.leases_alive)
                    .sum(),
                problems: self.leaks.clone(),
            },
            prompts: Prompts {
                sent: self.answers.sent,
                ok: self.answers.ok,
                tokens: self.answers.prompt_tokens,
                failures: self.answers.failures.clone(),
            },
            bytes_moved: self.bytes_moved(),
            external_tokens: self.decode_sum(|change| change.external_tokens),
            computed_tokens: self.decode_sum(|change| change.computed_tokens),
            sources: self
                .sources()
                .into_iter()
                .map(|(source, bytes)| Source {
                    engine: source.engine,
                    tp: source.tp,
                    bytes,
                })
                .collect(),
        }
    }
}

#[derive(Serialize)]
struct Json {
    kv_moved: bool,
    reasons: Vec<String>,
    prompts: Prompts,
    bytes_moved: u64,
    external_tokens: Option<u64>,
    computed_tokens: Option<u64>,
    sources: Vec<Source>,
    leases: Leases,
}

#[derive(Serialize)]
struct Prompts {
    sent: u32,
    ok: u32,
    tokens: u64,
    failures: Vec<String>,
}

#[derive(Serialize)]
struct Source {
    engine: String,
    tp: String,
    bytes: u64,
}

#[derive(Serialize)]
struct Leases {
    alive: Option<u64>,
    problems: Vec<String>,
}

fn change(engine: &Engine, before: &Counters, after: &Counters) -> Change {
    let mut restarted = false;
    let mut rise = |before: u64, after: u64| {
        restarted |= after < before;
        after.saturating_sub(before)
    };
    let mut bytes_by_source = BTreeMap::new();
    for (source, bytes) in &after.bytes_by_source {
        let risen = rise(
            before.bytes_by_source.get(source).copied().unwrap_or(0),
            *bytes,
        );
        if risen > 0 {
            bytes_by_source.insert(source.clone(), risen);
        }
    }
    let mut tokens = |before: Option<u64>, after: Option<u64>| {
        after.map(|after| rise(before.unwrap_or(0), after))
    };
    Change {
        engine: engine.clone(),
        bytes_by_source,
        external_tokens: tokens(before.external_tokens, after.external_tokens),
        computed_tokens: tokens(before.computed_tokens, after.computed_tokens),
        leases_before: before.leases_alive,
        leases_alive: after.leases_alive,
        restarted,
    }
}
