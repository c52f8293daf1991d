//! `--trace`: whom each read names, in the words of four parts of the product.
//!
//! The key of the session that read, the other end of its connection as the system tells it, the
//! route that was read, and the engine that heard the acknowledgement. Nothing of it is computed
//! here: a line is what these parts said, and whether they said the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use super::ipc::{RankName, SourceRead};

/// One line of the file: one request and one source rank. Ranks are written
/// `INSTANCE.DP.TP`, with `.ppN` behind it in a stage other than the first; what is not known is
/// null.
#[derive(Debug, Serialize)]
struct Line {
    request: u64,
    transfer_id: String,
    /// How the request ended on decode.
    outcome: &'static str,
    /// The decode rank.
    reader: String,
    bytes: u64,
    transport: String,
    session: Option<String>,
    dialled: Option<String>,
    /// The rank that announced that address or runs as that process.
    dialled_rank: Option<String>,
    read: Option<String>,
    /// The engine that heard the acknowledgement, `INSTANCE.DP`.
    acknowledged: Option<String>,
    agree: bool,
}

/// An engine's living start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EnginePlace {
    pub(super) instance: u32,
    pub(super) dp: u32,
}

/// What the trace asks of whoever started the engines.
pub(super) trait Directory {
    /// The living engine of that id and incarnation.
    fn engine(&self, name: &RankName) -> Option<EnginePlace>;
    /// The prefill rank (engine, tp, pp) with that address or process.
    fn at_address(&self, dialled: &str) -> Option<(EnginePlace, u32, u32)>;
}

#[derive(Debug, Default)]
struct Pending {
    /// Without the acknowledgement.
    lines: Vec<Line>,
    acknowledged: Option<EnginePlace>,
}

/// The file, and what waits for its acknowledgement.
#[derive(Debug)]
pub(super) struct Trace {
    path: PathBuf,
    file: BufWriter<File>,
    pending: BTreeMap<String, Pending>,
    /// Whether a value may be missing: something was broken on purpose.
    gaps_allowed: bool,
    found: Agreement,
}

/// What a trace came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Agreement {
    pub(super) reads: u64,
    pub(super) agree: u64,
    /// Reads of which two parts name different ranks, or of which one is silent although nothing
    /// was broken.
    pub(super) wrong: u64,
    pub(super) path: PathBuf,
}

impl Trace {
    /// # Errors
    /// The file cannot be made; the text names it.
    pub(super) fn create(path: &Path, gaps_allowed: bool) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("--trace {}", path.display()))?;
        Ok(Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
            pending: BTreeMap::new(),
            gaps_allowed,
            found: Agreement::default(),
        })
    }

    /// A request has ended on the decode engine at `reader`.
    pub(super) fn read(
        &mut self,
        request: u64,
        outcome: &'static str,
        reader: EnginePlace,
        reads: &[SourceRead],
        directory: &impl Directory,
    ) -> Result<()> {
        for read in reads {
            let name = |name: &RankName| {
                let engine = directory.engine(name)?;
                Some(place(engine, name.tp, name.pp))
            };
            let at = read
                .dialled
                .as_deref()
                .and_then(|d| directory.at_address(d));
            let line = Line {
                request,
                transfer_id: read.transfer_id.clone(),
                outcome,
                reader: place(reader, read.reader.0, read.reader.1),
                bytes: read.bytes,
                transport: read.transport.clone(),
                session: read.session.as_ref().and_then(name),
                dialled: read.dialled.clone(),
                dialled_rank: at.map(|(engine, tp, pp)| place(engine, tp, pp)),
                read: name(&read.source),
                acknowledged: None,
                agree: false,
            };
            let pending = self.pending.entry(read.transfer_id.clone()).or_default();
            pending.lines.push(line);
        }
        for read in reads {
            self.write_complete(&read.transfer_id)?;
        }
        Ok(())
    }

    /// The prefill engine at `engine` has heard that a transfer was read.
    pub(super) fn acknowledged(&mut self, engine: EnginePlace, transfer_id: &str) -> Result<()> {
        let pending = self.pending.entry(transfer_id.to_owned()).or_default();
        pending.acknowledged = Some(engine);
        self.write_complete(transfer_id)
    }

    fn write_complete(&mut self, transfer_id: &str) -> Result<()> {
        let complete = self
            .pending
            .get(transfer_id)
            .is_some_and(|pending| pending.acknowledged.is_some() && !pending.lines.is_empty());
        match self.pending.remove(transfer_id) {
            Some(pending) if complete => self.write(pending),
            Some(pending) => {
                self.pending.insert(transfer_id.to_owned(), pending);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn write(&mut self, pending: Pending) -> Result<()> {
        let engine = pending
            .acknowledged
            .map(|engine| format!("{}.{}", engine.instance, engine.dp));
        for mut line in pending.lines {
            line.acknowledged.clone_from(&engine);
            let parts = [&line.session, &line.dialled_rank, &line.read];
            let engine_of = |rank: &Option<String>| {
                let rank = rank.as_deref()?;
                Some(rank.splitn(3, '.').take(2).collect::<Vec<_>>().join("."))
            };
            let known: Vec<&String> = parts.iter().filter_map(|part| part.as_ref()).collect();
            let differ = known.windows(2).any(|pair| pair[0] != pair[1])
                || parts
                    .iter()
                    .any(|part| engine.is_some() && part.is_some() && engine_of(part) != engine);
            let silent = known.len() < parts.len() || engine.is_none();
            line.agree = !differ && !silent;
            self.found.reads += 1;
            self.found.agree += u64::from(line.agree);
            self.found.wrong += u64::from(differ || (silent && !self.gaps_allowed));
            serde_json::to_writer(&mut self.file, &line).context("--trace")?;
            self.file.write_all(b"\n").context("--trace")?;
        }
        Ok(())
    }

    /// Writes what was never acknowledged.
    pub(super) fn finish(mut self) -> Result<Agreement> {
        for pending in std::mem::take(&mut self.pending).into_values() {
            self.write(pending)?;
        }
        self.file.flush().context("--trace")?;
        self.found.path = self.path;
        Ok(self.found)
    }
}

fn place(engine: EnginePlace, tp: u32, pp: u32) -> String {
    let EnginePlace { instance, dp } = engine;
    match pp {
        0 => format!("{instance}.{dp}.{tp}"),
        _ => format!("{instance}.{dp}.{tp}.pp{pp}"),
    }
}

#[cfg(test)]
mod tests;
