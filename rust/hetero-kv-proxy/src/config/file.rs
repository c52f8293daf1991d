//! The TOML file of settings.

use std::path::Path;

use crate::cli::Settings;

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
    toml::from_str(&text).map_err(|error| format!("--config {at}: {}", error.to_string().trim()))
}
