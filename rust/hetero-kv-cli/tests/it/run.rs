//! Running `hetero-kv`.

use std::process::{Command, Output};

/// What one run left behind.
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `hetero-kv` with these words, split at blanks.
pub(crate) fn hetero_kv(words: &str) -> Run {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(env!("CARGO_BIN_EXE_hetero-kv"))
        .args(words.split_whitespace())
        .output()
        .expect("the executable under test starts");
    Run {
        code: status.code().expect("no signal ends it"),
        stdout: String::from_utf8(stdout).expect("output is text"),
        stderr: String::from_utf8(stderr).expect("output is text"),
    }
}
