//! Faults of the settings, gathered so that all are told at once, and the checks that most settings
//! share. A check fills in the default of a setting that is not given.

use std::fmt::Display;
use std::time::Duration;

use http::HeaderName;

use super::ConfigError;
use super::numbers::Number;

/// What is wrong with the settings, a line each, in the order in which they are checked.
#[derive(Default)]
pub(super) struct Faults(Vec<String>);

impl Faults {
    pub(super) fn add(&mut self, fault: String) {
        self.0.push(fault);
    }

    /// The faults so far.
    pub(super) fn told(&self) -> &[String] {
        &self.0
    }

    /// What was made of the settings, where there is no fault in them.
    pub(super) fn unless_any<T>(self, made: T) -> Result<T, ConfigError> {
        match self.0.is_empty() {
            true => Ok(made),
            false => Err(ConfigError(self.0)),
        }
    }

    pub(super) fn number<T: Copy + PartialOrd + Display>(
        &mut self,
        number: Number<T>,
        slot: &mut Option<T>,
    ) -> T {
        let Number {
            flag,
            default,
            low,
            high,
        } = number;
        let value = *slot.get_or_insert(default);
        // Also what is no number.
        if !(low..=high).contains(&value) {
            self.add(format!("{flag} {value}: must be {low} to {high}"));
        }
        value
    }

    pub(super) fn ms(&mut self, number: Number<u64>, slot: &mut Option<u64>) -> Duration {
        Duration::from_millis(self.number(number, slot))
    }

    pub(super) fn seconds(&mut self, number: Number<u64>, slot: &mut Option<u64>) -> Duration {
        Duration::from_secs(self.number(number, slot))
    }

    /// One of two words, the first of which is the default.
    pub(super) fn choice<T: Copy>(
        &mut self,
        flag: &str,
        slot: &mut Option<String>,
        words: [(&str, T); 2],
    ) -> T {
        let [(first, default), (second, _)] = words;
        let given = fill(slot, first);
        let known = words.into_iter().find(|(word, _)| *word == given);
        known.map_or_else(
            || {
                self.add(format!("{flag} {given}: must be {first} or {second}"));
                default
            },
            |(_, value)| value,
        )
    }

    /// The name of a header of the client's; `None` for an empty one.
    pub(super) fn header(
        &mut self,
        flag: &str,
        slot: &mut Option<String>,
        default: &str,
    ) -> Option<HeaderName> {
        let name = fill(slot, default);
        if name.is_empty() {
            return None;
        }
        let header = name.parse().ok();
        if header.is_none() {
            self.add(format!(
                "{flag} {name}: must be the name of a header, or empty"
            ));
        }
        header
    }

    /// What is logged; `warning` is taken as `warn`.
    pub(super) fn log_filter(&mut self, slot: &mut Option<String>) -> String {
        let given = fill(slot, "info");
        let is_warning = |part: &&str| part.trim().eq_ignore_ascii_case("warning");
        let parts = given.split(',');
        let parts: Vec<&str> = parts
            .map(|part| if is_warning(&part) { "warn" } else { part })
            .collect();
        let filter = parts.join(",");
        if let Some(word) = parts.iter().find(|part| is_bare_target(part)) {
            let shown = match parts.len() {
                1 => String::new(),
                _ => format!("`{}` is no level; ", word.trim()),
            };
            self.add(format!(
                "--log-level {given}: {shown}one of {LEVELS}, or a filter such as \
                 hetero_kv_proxy=debug"
            ));
        } else if let Err(error) = filter.parse::<tracing_subscriber::EnvFilter>() {
            self.add(format!("--log-level {given}: {error}"));
        }
        *slot = Some(filter.clone());
        filter
    }
}

const LEVELS: &str = "error, warn, info, debug, trace, off";

/// Whether a part of a filter is a word that is no level. To the filter it is the name of a target,
/// of which all is logged, and nothing else is: a level that is misspelt would end the log.
fn is_bare_target(part: &str) -> bool {
    let part = part.trim();
    let is_word = !part.is_empty() && !part.contains(['=', '[']);
    is_word
        && part
            .parse::<tracing_subscriber::filter::LevelFilter>()
            .is_err()
}

/// What is given, or the default from here on.
pub(super) fn fill(slot: &mut Option<String>, default: &str) -> String {
    slot.get_or_insert_with(|| default.to_owned()).clone()
}
