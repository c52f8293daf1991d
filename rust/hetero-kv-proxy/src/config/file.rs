//! The TOML file of settings.

use std::path::Path;

use super::limits;
use crate::cli::Settings;
use crate::cli::near::nearest;

/// A larger file is no configuration.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The settings that a file gives, or its fault.
pub(super) fn read(path: &Path) -> Result<Settings, String> {
    let at = path.display();
    let size = std::fs::metadata(path)
        .map_err(|error| format!("--config {at}: {error}"))?
        .len();
    if size > FILE_BYTES_MAX {
        return Err(format!(
            "--config {at}: {size} bytes; at most {FILE_BYTES_MAX}"
        ));
    }
    let text = std::fs::read_to_string(path).map_err(|error| format!("--config {at}: {error}"))?;
    toml::from_str(&text).map_err(|error| format!("--config {at}, {}", fault(&text, &error)))
}

/// Of a line that is shown.
const SHOWN_CHARS_MAX: usize = 120;

/// Where a file is wrong, what its line says, and the way out where that is known.
fn fault(text: &str, error: &toml::de::Error) -> String {
    let begin = error.span().map_or(0, |span| span.start.min(text.len()));
    let before = text.get(..begin).unwrap_or_default();
    let number = before.matches('\n').count() + 1;
    let line = text.lines().nth(number - 1).unwrap_or_default().trim();
    let shown: String = line.chars().take(SHOWN_CHARS_MAX).collect();
    let why = error.message().lines().next().unwrap_or_default();
    let key = line.split('=').next().unwrap_or_default().trim();
    let way_out = way_out(line, key, why);
    format!("line {number}: `{shown}`: {way_out}")
}

fn way_out(line: &str, key: &str, why: &str) -> String {
    if line.starts_with('[') {
        return "settings stand in no table: leave this line out".to_owned();
    }
    let flag = format!("--{}", key.replace('_', "-"));
    if why.starts_with("unknown field") {
        let is_spelled_as_flag = key.contains('-');
        let meant = match nearest(key, Settings::NAMES.iter().copied()) {
            Some(meant) if is_spelled_as_flag => {
                format!("write it with `_` for `-`: `{meant}`")
            }
            Some(meant) => format!("did you mean `{meant}`?"),
            None => "`hetero-kv-proxy serve --help` lists them, here with `_` for `-`".to_owned(),
        };
        return format!("no setting is named `{key}`; {meant}");
    }
    if let Some(limits) = limits(&flag) {
        return format!("{why}; `{key}` is a number without quotes, {limits}");
    }
    match Settings::NAMES.contains(&key) {
        true => format!("{why}; texts stand in quotes: {key} = \"...\""),
        false => why.to_owned(),
    }
}

#[cfg(test)]
mod tests;
