//! Keys that are shared with other processes: read from a file at start, and the nonces of their
//! proofs.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hetero_kv_core::auth::{KEY_FILE_BYTES_MAX, Keys, Nonce};

use crate::scheduler::random_bytes;

/// Reads a file of keys: one a line, blank lines and those that begin with `#` left out. Says in the
/// log where others may read it too.
///
/// # Errors
/// A sentence that names the file, and the line without what stands in it.
pub fn read(path: &Path) -> Result<Keys, String> {
    let at = path.display();
    let told = |error: io::Error| format!("{at}: {error}");
    // Before it is opened: a pipe would be waited for.
    if !std::fs::metadata(path).map_err(told)?.is_file() {
        return Err(format!("{at}: not a file"));
    }
    let file = File::open(path).map_err(told)?;
    let metadata = file.metadata().map_err(told)?;
    let mut text = Vec::new();
    file.take(KEY_FILE_BYTES_MAX + 1)
        .read_to_end(&mut text)
        .map_err(told)?;
    if text.len() as u64 > KEY_FILE_BYTES_MAX {
        let size = metadata.len();
        return Err(format!(
            "{at}: {size} bytes; at most {KEY_FILE_BYTES_MAX} of keys"
        ));
    }
    let keys = Keys::parse(&text).map_err(|fault| format!("{at}: {fault}"))?;
    if let Some(exposed) = exposure(&metadata) {
        tracing::warn!("{at}: {exposed}");
    }
    Ok(keys)
}

/// Who else may read or change a file of keys.
fn exposure(metadata: &Metadata) -> Option<String> {
    let mode = metadata.mode() & 0o7777;
    (mode & 0o006 != 0).then(|| {
        format!(
            "every user of this host may read or change these keys (mode {mode:03o}); chmod o-rw"
        )
    })
}

/// A nonce for one connection.
///
/// # Errors
/// The system has no random bytes.
pub(crate) fn nonce() -> io::Result<Nonce> {
    random_bytes().map(Nonce)
}

#[cfg(test)]
mod tests;
