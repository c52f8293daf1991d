//! A batch's runs as work requests: pure arithmetic, no device.
//!
//! A work request reads one contiguous piece of the source and scatters it over as many local
//! pieces as the device takes. So runs that follow on each other at the source become one request,
//! whatever they do here.

use hetero_kv_core::memory::{MemoryRegion, Run};

use crate::memory::{LocalMemory, OutOfBounds, span_in};

/// What one work request may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestLimits {
    /// Most local pieces.
    pub(super) pieces_max: usize,
    /// Most bytes.
    pub(super) bytes_max: u32,
}

/// A contiguous piece of this process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LocalPiece {
    pub(super) region: u32,
    pub(super) address: u64,
    pub(super) bytes: u32,
}

/// One read: `pieces_count` of the batch's local pieces, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadRequest {
    pub(super) source_region: u32,
    pub(super) source_address: u64,
    pub(super) bytes: u32,
    pub(super) pieces_count: usize,
}

/// A batch as it goes to a queue pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReadList {
    pub(super) requests: Vec<ReadRequest>,
    pub(super) pieces: Vec<LocalPiece>,
}

/// A run outside of the memory of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Outside {
    #[error("source: {0}")]
    Source(OutOfBounds),
    #[error("destination: {0}")]
    Destination(OutOfBounds),
}

/// Checks runs against the memory of both sides and makes requests of them.
pub(super) fn read_list(
    runs: &[Run],
    source: &[MemoryRegion],
    memory: &LocalMemory,
    limits: RequestLimits,
) -> Result<ReadList, Outside> {
    let mut list = ReadList::default();
    for run in runs {
        let from = span_in(source, run.source_region, run.source_offset, run.bytes)
            .map_err(Outside::Source)?;
        let to = memory
            .span(run.dest_region, run.dest_offset, run.bytes)
            .map_err(Outside::Destination)?;
        let (mut from, mut to) = (from.address as u64, to.address as u64);
        let mut left = run.bytes;
        while left > 0 {
            let taken = list.add(run, from, to, left, limits);
            from += u64::from(taken);
            to += u64::from(taken);
            left -= u64::from(taken);
        }
    }
    Ok(list)
}

impl ReadList {
    /// Adds the next bytes of a run, as many as one request takes; how many.
    fn add(&mut self, run: &Run, from: u64, to: u64, left: u64, limits: RequestLimits) -> u32 {
        let room = |used: u32| {
            let room = limits.bytes_max - used;
            u32::try_from(left).map_or(room, |left| left.min(room))
        };
        if let Some(last) = self.requests.last_mut()
            && last.source_region == run.source_region
            && last.source_address + u64::from(last.bytes) == from
            && last.bytes < limits.bytes_max
        {
            let taken = room(last.bytes);
            if let Some(piece) = self.pieces.last_mut()
                && piece.region == run.dest_region
                && piece.address + u64::from(piece.bytes) == to
            {
                piece.bytes += taken;
                last.bytes += taken;
                return taken;
            }
            if last.pieces_count < limits.pieces_max {
                self.pieces.push(LocalPiece {
                    region: run.dest_region,
                    address: to,
                    bytes: taken,
                });
                last.pieces_count += 1;
                last.bytes += taken;
                return taken;
            }
        }
        let taken = room(0);
        self.pieces.push(LocalPiece {
            region: run.dest_region,
            address: to,
            bytes: taken,
        });
        self.requests.push(ReadRequest {
            source_region: run.source_region,
            source_address: from,
            bytes: taken,
            pieces_count: 1,
        });
        taken
    }
}

#[cfg(test)]
mod tests;
