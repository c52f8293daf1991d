//! What a check found, one line each.

use anyhow::Result;
use serde::Serialize;

use crate::output::{Verdict, print};

/// Width of the column of names.
const NAME_WIDTH: usize = 16;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// As it should be.
    Ok,
    /// Works, and may not be what is wanted.
    Warn,
    /// Engines would fail.
    Fail,
}

/// One check's outcome.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Finding {
    check: &'static str,
    status: Status,
    found: String,
    /// The setting, sysctl or command that mends it; empty when nothing is to be mended.
    mend: String,
}

impl Finding {
    /// All right.
    pub(crate) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self {
            check,
            status: Status::Ok,
            found: found.into(),
            mend: String::new(),
        }
    }

    /// Works, and `mend` makes it better.
    pub(crate) fn warn(
        check: &'static str,
        found: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self {
            check,
            status: Status::Warn,
            found: found.into(),
            mend: mend.into(),
        }
    }

    /// Engines would fail until `mend` is done.
    pub(crate) fn fail(
        check: &'static str,
        found: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self {
            status: Status::Fail,
            ..Self::warn(check, found, mend)
        }
    }

    /// A fault that counts only where what it concerns is required.
    pub(crate) fn fail_if(
        required: bool,
        check: &'static str,
        found: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        let finding = Self::warn(check, found, mend);
        if required {
            Self {
                status: Status::Fail,
                ..finding
            }
        } else {
            finding
        }
    }

    /// Whether engines would fail.
    pub(crate) fn failed(&self) -> bool {
        self.status == Status::Fail
    }

    /// As it is printed.
    pub(crate) fn line(&self) -> String {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        };
        // What was found may come from the system or a peer: it stays on its line.
        let found = one_line(&self.found);
        let check = self.check;
        if self.mend.is_empty() {
            format!("{status:<5} {check:<NAME_WIDTH$} {found}\n")
        } else {
            let mend = one_line(&self.mend);
            format!("{status:<5} {check:<NAME_WIDTH$} {found}. To mend: {mend}\n")
        }
    }
}

/// Text without line ends and other control characters.
pub(crate) fn one_line(text: &str) -> String {
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(shown).collect()
}

/// All findings of a run.
pub(crate) struct Report {
    json: bool,
    findings: Vec<Finding>,
}

impl Report {
    /// With `json`, nothing is printed before the end.
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            findings: Vec::new(),
        }
    }

    /// Prints one finding and keeps it.
    pub(crate) fn add(&mut self, finding: Finding) -> Result<()> {
        if !self.json {
            print(&finding.line())?;
        }
        self.findings.push(finding);
        Ok(())
    }

    /// Prints what is left to print; the verdict over all.
    pub(crate) fn end(self) -> Result<Verdict> {
        let count = |status| {
            self.findings
                .iter()
                .filter(|finding| finding.status == status)
                .count()
        };
        let (failed, warned) = (count(Status::Fail), count(Status::Warn));
        if self.json {
            #[derive(Serialize)]
            struct Whole<'a> {
                ok: bool,
                checks: &'a [Finding],
            }
            let whole = Whole {
                ok: failed == 0,
                checks: &self.findings,
            };
            print(&format!("{}\n", serde_json::to_string_pretty(&whole)?))?;
        } else {
            print(&format!(
                "{} checks, {failed} failed, {warned} to look at\n",
                self.findings.len()
            ))?;
        }
        Ok(if failed == 0 {
            Verdict::Right
        } else {
            Verdict::Wrong
        })
    }
}
