//! The reference model's view of one rank's read: what of each source has landed, and when it was
//! fenced. It follows the hardware's operations and knows nothing of the reader's own books.

use std::collections::BTreeMap;

use crate::ops::SourceRank;

/// What has become of one source's part.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    planned_bytes: u64,
    landed_bytes: u64,
    /// Whether the lease was seen alive there after the last byte had landed.
    proven: bool,
    /// Whether an operation ended with an error that is not to be tried again.
    failed: bool,
}

/// One rank's read of one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadBook {
    parts: BTreeMap<SourceRank, Part>,
}

impl ReadBook {
    /// Over the bytes that each source is planned for.
    pub(crate) fn new(planned: impl IntoIterator<Item = (SourceRank, u64)>) -> Self {
        let parts = planned
            .into_iter()
            .map(|(source, planned_bytes)| {
                let part = Part {
                    planned_bytes,
                    ..Part::default()
                };
                (source, part)
            })
            .collect();
        Self { parts }
    }

    /// How many sources.
    pub(crate) fn sources(&self) -> usize {
        self.parts.len()
    }

    /// An operation on data has ended well.
    pub(crate) fn landed(&mut self, source: SourceRank, bytes: u64) {
        let part = self.parts.entry(source).or_default();
        part.landed_bytes += bytes;
        part.proven = false;
    }

    /// The lease was seen alive on a source.
    pub(crate) fn fenced(&mut self, source: SourceRank) {
        let part = self.parts.entry(source).or_default();
        part.proven = part.landed_bytes == part.planned_bytes;
    }

    /// An operation has ended with an error.
    pub(crate) fn failed(&mut self, source: SourceRank) {
        self.parts.entry(source).or_default().failed = true;
    }

    /// Why the rank may not report the load as read, if it may not.
    pub(crate) fn unproven(&self) -> Option<String> {
        self.parts.iter().find_map(|(source, part)| {
            let what = if part.failed {
                "failed"
            } else if part.landed_bytes != part.planned_bytes {
                "did not land whole and once"
            } else if !part.proven {
                "was not fenced after its last byte"
            } else {
                return None;
            };
            Some(format!(
                "source tp {} pp {} of {} {what}: {part:?}",
                source.tp,
                source.pp,
                self.parts.len()
            ))
        })
    }
}
