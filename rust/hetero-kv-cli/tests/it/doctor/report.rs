//! Runs the doctor and reads what it reports.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// What one run found.
pub(super) struct Report {
    pub(super) code: i32,
    checks: Vec<Value>,
}

impl Report {
    /// Of `hetero-kv doctor ... --json`, or a command that ends in it.
    pub(super) fn of(command: &mut Command) -> Self {
        let output = command.stdin(Stdio::null()).output().expect("it starts");
        Self::parsed(&output)
    }

    fn parsed(output: &Output) -> Self {
        let text = || {
            format!(
                "{}\n{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            )
        };
        let whole: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", text()));
        let checks = whole["checks"].as_array().expect("a list").clone();
        let failed = checks.iter().any(|check| check["status"] == "fail");
        assert_eq!(whole["ok"], !failed, "{whole}");
        Self {
            code: output.status.code().expect("no signal ends it"),
            checks,
        }
    }

    /// Names of the checks that failed.
    pub(super) fn failed(&self) -> Vec<&str> {
        self.checks
            .iter()
            .filter(|check| check["status"] == "fail")
            .filter_map(|check| check["check"].as_str())
            .collect()
    }

    /// Status of a check; "" where it was not made.
    pub(super) fn status(&self, check: &str) -> &str {
        self.of_check(check, "status")
    }

    /// What a check found.
    pub(super) fn found(&self, check: &str) -> &str {
        self.of_check(check, "found")
    }

    /// How to mend it.
    pub(super) fn mend(&self, check: &str) -> &str {
        self.of_check(check, "mend")
    }

    fn of_check(&self, name: &str, key: &str) -> &str {
        self.checks
            .iter()
            .find(|check| check["check"] == name)
            .and_then(|check| check[key].as_str())
            .unwrap_or_default()
    }

    /// Exactly this check failed, and both texts contain what is given.
    pub(super) fn assert_only(&self, check: &str, found: &[&str], mend: &[&str]) {
        assert_eq!((self.code, self.failed()), (1, vec![check]), "{self}");
        for part in found {
            assert!(self.found(check).contains(part), "{part:?} in {self}");
        }
        for part in mend {
            assert!(self.mend(check).contains(part), "{part:?} in {self}");
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "exit {}", self.code)?;
        self.checks
            .iter()
            .try_for_each(|check| writeln!(f, "{check}"))
    }
}

/// The executable under test.
pub(super) const HETERO_KV: &str = env!("CARGO_BIN_EXE_hetero-kv");

/// `hetero-kv doctor` with these words.
pub(super) fn doctor(words: &str) -> Command {
    let mut command = Command::new(HETERO_KV);
    command.arg("doctor").args(words.split_whitespace());
    command
}

/// Flags by which only what is quick and sound everywhere is checked; each test replaces the ones
/// that it is about.
const QUICK: [(&str, &str); 5] = [
    ("--host", "127.0.0.1"),
    ("--seconds", "0"),
    ("--transport", "tcp"),
    ("--rdma", "off"),
    // No Python at all, so the check of vLLM fails.
    ("--python", "true"),
];

/// `doctor` with these words, and the flags above that are not among them.
pub(super) fn words_of(words: &str) -> Vec<&str> {
    let mut all = vec!["doctor", "--json"];
    all.extend(words.split_whitespace());
    for (flag, value) in QUICK {
        if !all.contains(&flag) {
            all.extend([flag, value]);
        }
    }
    all
}

/// A run of the quick checks with these words.
pub(super) fn quick(words: &str) -> Report {
    Report::of(Command::new(HETERO_KV).args(words_of(words)))
}

/// The same as text for a shell.
pub(super) fn quick_line(words: &str) -> String {
    format!("exec {HETERO_KV} {}", words_of(words).join(" "))
}

/// Says why a test does nothing here.
pub(super) fn skip(reason: impl std::fmt::Display) {
    eprintln!("skipped: {reason}");
}
