//! A block pool that hands freed blocks out again as soon as it can.

use std::collections::{BTreeSet, VecDeque};

use hetero_kv_core::ids::BlockId;

#[derive(Clone, Debug)]
pub(crate) struct Pool {
    free: VecDeque<BlockId>,
    taken: BTreeSet<BlockId>,
}

impl Pool {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            free: (0..num_blocks).map(BlockId).collect(),
            taken: BTreeSet::new(),
        }
    }

    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if self.free.len() < count {
            return None;
        }
        let blocks: Vec<BlockId> = self.free.drain(..count).collect();
        self.taken.extend(blocks.iter().copied());
        Some(blocks)
    }

    /// Freed blocks go to the front: the next one to ask gets them. False when one was free.
    pub(crate) fn give_back(&mut self, blocks: &[BlockId]) -> bool {
        let mut whole = true;
        for block in blocks {
            whole &= self.taken.remove(block);
            self.free.push_front(*block);
        }
        whole
    }

    pub(crate) fn taken(&self) -> usize {
        self.taken.len()
    }
}
