//! The answer of a command on stdout, and words beside it on stderr.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

use anyhow::Context;

/// Writes a line to stderr. A closed or full one (`2>&1 | head`) is no reason to end: the exit code
/// tells as well.
pub fn line(text: Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Writes to stdout. A reader that has gone (`| head`) is not an error.
///
/// # Errors
/// Stdout is closed, or its disk is full.
pub fn answer(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("writing to stdout"),
    }
}
