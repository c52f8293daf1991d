//! A rank's memory: real bytes in a real layout, each word saying whose it is, and the lease page.

use std::num::TryFromIntError;

use hetero_kv_core::ids::{BlockId, Epoch, LeaseRef, Slot, TpRank};
use hetero_kv_core::layout::{HeadRange, LayerCache, Part, RankCache, owned_heads};
use hetero_kv_core::lease_page::{FIRST_EPOCH, page_bytes, slot_offset_bytes};
use hetero_kv_core::memory::{MemoryRegion, Run};
use hetero_kv_core::plan::stage_layers;

use crate::rng::Rng;
use crate::scenario::{BLOCK_TOKENS, Scenario, Shape};

const WORD_BYTES: u64 = 8;

/// What stands in blocks that belong to nobody.
const POISON: u64 = 0xdead_dead_dead_dead;

/// One token's KV of one prompt in one (layer, part, head).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) prompt: u32,
    pub(crate) layer: u32,
    pub(crate) part: u32,
    pub(crate) head: u32,
    pub(crate) token: u32,
}

impl Word {
    fn bits(self) -> u64 {
        u64::from(self.prompt) << 32
            | u64::from(self.layer & 0xf) << 28
            | u64::from(self.part & 0xf) << 24
            | u64::from(self.head & 0xff) << 16
            | u64::from(self.token & 0xffff)
    }

    fn describe(bits: u64) -> String {
        if bits == POISON {
            return "nobody's".into();
        }
        format!(
            "prompt {}, layer {}, part {}, head {}, token {}",
            bits >> 32,
            bits >> 28 & 0xf,
            bits >> 24 & 0xf,
            bits >> 16 & 0xff,
            bits & 0xffff
        )
    }
}

/// One rank's cache.
#[derive(Clone, Debug)]
pub(crate) struct RankMemory {
    pub(crate) cache: RankCache,
    heads: HeadRange,
    /// First layer of its stage, in the whole model.
    first_layer: u32,
    regions: Vec<Vec<u8>>,
}

impl RankMemory {
    /// A cache of this rank in a layout that `rng` picks: both sides of a pair differ in strides.
    pub(crate) fn new(
        scenario: &Scenario,
        shape: Shape,
        (tp, pp): (u32, u32),
        rng: &mut Rng,
    ) -> Self {
        let heads = owned_heads(scenario.heads, shape.tp, TpRank(tp))
            .expect("scenarios pick powers of two, which divide one another");
        let stage = stage_layers(scenario.layers, shape.pp)
            .expect("scenarios pick no more stages than layers")[pp as usize];
        let (held, blocks) = (u64::from(heads.count()), u64::from(scenario.num_blocks));
        let page = u64::from(BLOCK_TOKENS) * WORD_BYTES;
        let padding = WORD_BYTES * rng.within(0, 3);
        let order = rng.below(3);
        let mut layers = Vec::new();
        let mut regions = Vec::new();
        for layer in 0..stage.count() {
            let mut parts = Vec::new();
            let mut end = WORD_BYTES * rng.within(0, 2);
            for _ in 0..scenario.parts {
                let (block_stride, head_stride, row_stride) = match order {
                    // Block, head, token.
                    0 => (held * page + padding, page, WORD_BYTES),
                    // Head, block, token.
                    1 => (page, blocks * page, WORD_BYTES),
                    // Block, token, head; an opaque page cannot be cut so.
                    _ if scenario.opaque_pages => (held * page + padding, page, WORD_BYTES),
                    _ => (held * page + padding, WORD_BYTES, held * WORD_BYTES),
                };
                let (rows, row_bytes) = if scenario.opaque_pages {
                    (1, page)
                } else {
                    (BLOCK_TOKENS, WORD_BYTES)
                };
                parts.push(Part {
                    offset_bytes: end,
                    block_stride_bytes: block_stride,
                    head_stride_bytes: head_stride,
                    rows,
                    row_stride_bytes: row_stride,
                    row_bytes,
                    block_tokens: 0,
                });
                end += blocks * (held * page + padding);
            }
            regions.push(vec![0_u8; to_index(end)]);
            layers.push(LayerCache {
                name: format!("model.layers.{}.self_attn.attn", stage.first + layer),
                region: layer,
                parts,
                group: 0,
            });
        }
        // The layers' own order is each side's affair.
        if rng.permille(500) {
            layers.reverse();
        }
        let described = regions
            .iter()
            .zip(1_u64..)
            .map(|(bytes, place)| MemoryRegion {
                base: place << 32,
                bytes: bytes.len() as u64,
            })
            .collect();
        let cache = RankCache::new(scenario.num_blocks, heads.count(), described, layers)
            .expect("the strides are nested and the regions as long as they span");
        let mut memory = Self {
            cache,
            heads,
            first_layer: stage.first,
            regions,
        };
        for block in 0..scenario.num_blocks {
            memory.poison(BlockId(block));
        }
        memory
    }

    /// Computes one token's KV.
    pub(crate) fn compute(&mut self, prompt: u32, blocks: &[BlockId], token: u32) {
        self.each_word(prompt, blocks, token, |bytes, word| {
            bytes.copy_from_slice(&word.bits().to_le_bytes());
            None::<()>
        });
    }

    /// What stands where one token's KV of a prompt has to be, unless it is that.
    pub(crate) fn foreign(
        &mut self,
        prompt: u32,
        blocks: &[BlockId],
        token: u32,
    ) -> Option<(Word, String)> {
        self.each_word(prompt, blocks, token, |bytes, word| {
            let bits = u64::from_le_bytes(bytes.try_into().ok()?);
            (bits != word.bits()).then(|| (word, Word::describe(bits)))
        })
    }

    /// The block belongs to nobody any more; whoever is next may write anything.
    pub(crate) fn poison(&mut self, block: BlockId) {
        for offset in 0..BLOCK_TOKENS {
            self.each_word(0, &[block], offset, |bytes, _| {
                bytes.copy_from_slice(&POISON.to_le_bytes());
                None::<()>
            });
        }
    }

    fn each_word<T>(
        &mut self,
        prompt: u32,
        blocks: &[BlockId],
        token: u32,
        mut visit: impl FnMut(&mut [u8], Word) -> Option<T>,
    ) -> Option<T> {
        let block = *blocks.get((token / BLOCK_TOKENS) as usize)?;
        let in_block = u64::from(token % BLOCK_TOKENS);
        for layer in self.cache.layers() {
            for (part, number) in layer.parts.iter().zip(0..) {
                for head in 0..self.heads.count() {
                    let in_page = if part.rows == 1 {
                        in_block * WORD_BYTES
                    } else {
                        in_block * part.row_stride_bytes
                    };
                    let at = part.offset_bytes
                        + u64::from(block.0) * part.block_stride_bytes
                        + u64::from(head) * part.head_stride_bytes
                        + in_page;
                    let word = Word {
                        prompt,
                        layer: self.first_layer + layer.region,
                        part: number,
                        head: self.heads.first + head,
                        token,
                    };
                    let bytes = self
                        .regions
                        .get_mut(layer.region as usize)?
                        .get_mut(to_index(at)..to_index(at + WORD_BYTES))?;
                    if let Some(found) = visit(bytes, word) {
                        return Some(found);
                    }
                }
            }
        }
        None
    }

    /// The source half of a copy; `None` past the end of a region.
    pub(crate) fn read(&self, run: &Run) -> Option<Vec<u8>> {
        self.regions
            .get(run.source_region as usize)?
            .get(to_index(run.source_offset)..to_index(run.source_offset + run.bytes))
            .map(<[u8]>::to_vec)
    }

    /// The destination half of a copy.
    pub(crate) fn write(&mut self, run: &Run, bytes: &[u8]) {
        let place = to_index(run.dest_offset)..to_index(run.dest_offset + run.bytes);
        if let Some(dest) = self
            .regions
            .get_mut(run.dest_region as usize)
            .and_then(|region| region.get_mut(place))
        {
            dest.copy_from_slice(bytes);
        }
    }
}

/// A holder's lease page, as bytes: what remote readers see of it is what they read of it.
#[derive(Clone, Debug)]
pub(crate) struct LeasePage {
    bytes: Vec<u8>,
}

impl LeasePage {
    pub(crate) fn new(slots: u32, nonce: u64) -> Self {
        let mut page = Self {
            bytes: vec![0; page_bytes(slots)],
        };
        page.store(0, nonce);
        for slot in 0..slots {
            page.store(slot_offset_bytes(Slot(slot)), FIRST_EPOCH.0);
        }
        page
    }

    pub(crate) fn nonce(&self) -> u64 {
        self.load(0)
    }

    pub(crate) fn epoch(&self, slot: Slot) -> Epoch {
        Epoch(self.load(slot_offset_bytes(slot)))
    }

    /// Ends a lease. A page never goes back.
    pub(crate) fn end(&mut self, lease: LeaseRef) {
        let to = self.epoch(lease.slot).max(lease.epoch.next());
        self.store(slot_offset_bytes(lease.slot), to.0);
    }

    fn load(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        if let Some(bytes) = self.bytes.get(at..at + 8) {
            word.copy_from_slice(bytes);
        }
        u64::from_ne_bytes(word)
    }

    fn store(&mut self, at: usize, value: u64) {
        if let Some(bytes) = self.bytes.get_mut(at..at + 8) {
            bytes.copy_from_slice(&value.to_ne_bytes());
        }
    }
}

fn to_index(offset: u64) -> usize {
    let index: Result<usize, TryFromIntError> = offset.try_into();
    index.expect("regions are kilobytes long")
}
