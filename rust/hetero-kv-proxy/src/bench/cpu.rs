//! Processor time and memory of other processes, from `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// A process that is read, and what it has begotten.
#[derive(Debug, Clone)]
pub struct Watched(Vec<u32>);

/// One reading.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reading {
    /// User and system seconds since each process began, its ended threads and awaited children
    /// included.
    pub cpu_s: f64,
    /// Resident bytes.
    pub rss_bytes: u64,
    /// Largest resident bytes so far.
    pub rss_peak_bytes: u64,
}

/// Why there is no reading.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// There is no such process.
    #[error("--pid {0}: no such process")]
    NoProcess(u32),
    /// `/proc` is not there or not readable.
    #[error("--pid needs /proc: {0}")]
    NoProc(#[from] std::io::Error),
}

struct Stat {
    parent: u32,
    ticks: u64,
}

impl Watched {
    /// Watches these processes with all their descendants.
    ///
    /// # Errors
    /// One of them is not there.
    pub fn new(pids: &[u32]) -> Result<Self, CpuError> {
        for pid in pids {
            if stat(*pid).is_none() {
                return Err(CpuError::NoProcess(*pid));
            }
        }
        Ok(Self(pids.to_vec()))
    }

    /// Whether any is watched.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads them all. A process that ended is counted as long as its parent, if that is watched,
    /// awaits it.
    ///
    /// # Errors
    /// A process that was named is gone.
    pub fn read(&self) -> Result<Reading, CpuError> {
        let all = all()?;
        let mut tree: BTreeSet<u32> = self.0.iter().copied().collect();
        loop {
            let before = tree.len();
            for (pid, stat) in &all {
                if tree.contains(&stat.parent) {
                    tree.insert(*pid);
                }
            }
            if tree.len() == before {
                break;
            }
        }
        let mut reading = Reading::default();
        for pid in &tree {
            let Some(stat) = all.get(pid) else {
                return Err(CpuError::NoProcess(*pid));
            };
            reading.cpu_s += stat.ticks as f64 / ticks_per_second();
            reading.rss_bytes += memory(*pid, "VmRSS:");
            reading.rss_peak_bytes += memory(*pid, "VmHWM:");
        }
        Ok(reading)
    }
}

fn all() -> Result<BTreeMap<u32, Stat>, CpuError> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        if let Some(pid) = name.to_str().and_then(|name| name.parse().ok())
            && let Some(stat) = stat(pid)
        {
            all.insert(pid, stat);
        }
    }
    Ok(all)
}

/// `proc(5)`: the name in parentheses may hold anything, so fields are counted from its end.
fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(Stat {
        parent: u32::try_from(number(1)?).ok()?,
        // Own and awaited children's, user and system: fields 14 to 17.
        ticks: (11..15).map(number).sum::<Option<u64>>()?,
    })
}

fn memory(pid: u32, field: &str) -> u64 {
    let kibibytes = fs::read_to_string(format!("/proc/{pid}/status"))
        .ok()
        .and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix(field))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        });
    kibibytes.unwrap_or(0) * 1024
}

fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// The host's load average over one minute.
pub fn load_average() -> Option<f64> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests;
