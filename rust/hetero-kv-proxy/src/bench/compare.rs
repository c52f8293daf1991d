//! Two results, side by side.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};

use super::report::{Report, RoundReport, VERSION, aligned, shown};

/// A larger file is no result.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The figures of rounds of equal load in both files, and their ratios.
///
/// # Errors
/// A file that cannot be read or is no result of this version; no load in both.
pub fn compare(a: &Path, b: &Path) -> anyhow::Result<String> {
    let (first, second) = (read(a)?, read(b)?);
    let mut text = format!(
        "a: {} ({})\nb: {} ({})\n",
        first.url,
        a.display(),
        second.url,
        b.display()
    );
    let mut alike = 0;
    let mut others = second.rounds.iter().collect::<Vec<_>>();
    for round in &first.rounds {
        let Some(at) = others
            .iter()
            .position(|other| other.label() == round.label())
        else {
            continue;
        };
        let other = others.remove(at);
        alike += 1;
        text.push('\n');
        text.push_str(&pair(round, other));
    }
    if alike == 0 {
        let loads = |report: &Report| {
            let labels: Vec<String> = report.rounds.iter().map(RoundReport::label).collect();
            labels.join(", ")
        };
        bail!(
            "no load is in both: {} has {}, {} has {}",
            a.display(),
            loads(&first),
            b.display(),
            loads(&second)
        );
    }
    Ok(text)
}

fn pair(a: &RoundReport, b: &RoundReport) -> String {
    let mut columns = vec![
        vec![a.label()],
        vec!["a".to_owned()],
        vec!["b".to_owned()],
        vec!["b/a".to_owned()],
    ];
    for ((name, first), (_, second)) in a.figures().into_iter().zip(b.figures()) {
        if first.is_none() && second.is_none() {
            continue;
        }
        let ratio = match (first, second) {
            (Some(first), Some(second)) if first > 0.0 => format!("{:.3}", second / first),
            (_, _) => "-".to_owned(),
        };
        columns[0].push(name.to_owned());
        columns[1].push(shown(first, name));
        columns[2].push(shown(second, name));
        columns[3].push(ratio);
    }
    aligned(&columns)
}

fn read(path: &Path) -> anyhow::Result<Report> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .with_context(|| path.display().to_string())?;
    if text.len() as u64 > FILE_BYTES_MAX {
        bail!("{}: more than {FILE_BYTES_MAX} bytes", path.display());
    }
    let report: Report = serde_json::from_str(&text)
        .with_context(|| format!("{}: not a result of `bench --json`", path.display()))?;
    if report.version != VERSION {
        bail!(
            "{}: version {}, not {VERSION}",
            path.display(),
            report.version
        );
    }
    Ok(report)
}
