//! Memory of any layout as names of what lies in it, and the naive copy that a transfer must equal.
//!
//! A byte of KV is known by its layer, token, head and place in the token; of an opaque page the
//! rows stand where tokens would. Each layer is an array over blocks, parts, heads and tokens in any
//! order, with padding after each.

use crate::ids::BlockId;
use crate::layout::{LayerCache, Part, RankCache};
use crate::memory::MemoryRegion;
use crate::plan::{GroupBlocks, TokenRange};

pub(super) const UNTOUCHED: u32 = u32::MAX;
const GAP: u32 = u32::MAX - 1;
const TOKENS_MAX: usize = 1 << 10;
const HEADS_MAX: usize = 1 << 7;
pub(super) const TOKEN_BYTES_MAX: usize = 1 << 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    Block,
    Part,
    Head,
    Token,
}

/// How one side stores one layer.
#[derive(Clone, Debug)]
pub(super) struct Format {
    /// Outermost first.
    pub(super) order: [Axis; 4],
    /// Unused bytes after each step of the axis at the same position.
    pub(super) pads: [usize; 4],
    /// Bytes of a token in each part.
    pub(super) parts: Vec<usize>,
    /// Say "one row" where a block's tokens are contiguous.
    pub(super) one_row: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) block_tokens: u32,
    pub(super) first_index: u32,
    pub(super) blocks: Vec<BlockId>,
}

/// One engine.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    pub(super) tp: usize,
    /// Layers of each stage.
    pub(super) stages: Vec<Vec<usize>>,
    pub(super) groups: Vec<Group>,
    pub(super) group_of: Vec<usize>,
    pub(super) formats: Vec<Format>,
    pub(super) num_blocks: usize,
    /// All layers of a block side by side, where each layer has the block outermost.
    pub(super) layers_in_block: bool,
    pub(super) region_per_layer: bool,
}

/// What both sides agree on.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    /// Rows of a page that is opaque.
    pub(super) opaque_rows: Option<usize>,
}

impl Engine {
    pub(super) fn lists(&self) -> Vec<GroupBlocks<'_>> {
        self.groups
            .iter()
            .map(|group| GroupBlocks {
                block_tokens: group.block_tokens,
                first_index: group.first_index,
                blocks: &group.blocks,
            })
            .collect()
    }
}

/// The heads that design section 4 gives rank `rank`, found by asking for each head.
pub(super) fn heads_of(total: usize, tp: usize, rank: usize) -> Vec<usize> {
    (0..total)
        .filter(|head| {
            if tp <= total {
                head * tp / total == rank
            } else {
                rank * total / tp == *head
            }
        })
        .collect()
}

/// One rank's memory.
pub(super) struct Rank<'a> {
    engine: &'a Engine,
    model: &'a [Layer],
    layers: &'a [usize],
    heads: Vec<usize>,
    pub(super) memory: Vec<Vec<u32>>,
}

impl<'a> Rank<'a> {
    pub(super) fn new(
        engine: &'a Engine,
        model: &'a [Layer],
        stage: usize,
        heads: Vec<usize>,
        fill: u32,
    ) -> Self {
        let mut rank = Self {
            engine,
            model,
            layers: &engine.stages[stage],
            heads,
            memory: Vec::new(),
        };
        rank.memory = if engine.region_per_layer {
            rank.layers
                .iter()
                .map(|layer| vec![fill; 3 + rank.array_bytes(*layer)])
                .collect()
        } else {
            let bytes: usize = rank
                .layers
                .iter()
                .map(|layer| rank.array_bytes(*layer))
                .sum();
            vec![vec![fill; 3 + bytes]]
        };
        rank
    }

    /// Tokens of a block, or rows of an opaque page.
    fn rows(&self, layer: usize) -> usize {
        let group = &self.engine.groups[self.engine.group_of[layer]];
        self.model[layer]
            .opaque_rows
            .unwrap_or(group.block_tokens as usize)
    }

    fn steps(&self, layer: usize, axis: Axis) -> usize {
        match axis {
            Axis::Block => self.engine.num_blocks,
            Axis::Part => self.engine.formats[layer].parts.len(),
            Axis::Head => self.heads.len(),
            Axis::Token => self.rows(layer),
        }
    }

    fn slot_bytes(&self, layer: usize) -> usize {
        let parts = &self.engine.formats[layer].parts;
        parts.iter().copied().max().expect("a layer has parts")
    }

    /// In the layer's own array.
    fn own_stride(&self, layer: usize, axis: Axis) -> usize {
        let format = &self.engine.formats[layer];
        let mut stride = self.slot_bytes(layer);
        for (inner, pad) in format.order.iter().zip(format.pads).rev() {
            stride += pad;
            if *inner == axis {
                return stride;
            }
            stride *= self.steps(layer, *inner);
        }
        unreachable!("every axis is in the order")
    }

    fn array_bytes(&self, layer: usize) -> usize {
        let outermost = self.engine.formats[layer].order[0];
        self.own_stride(layer, outermost) * self.steps(layer, outermost)
    }

    fn is_shared(&self) -> bool {
        self.engine.layers_in_block && !self.engine.region_per_layer
    }

    fn stride(&self, layer: usize, axis: Axis) -> usize {
        if axis == Axis::Block && self.is_shared() {
            let of_layer = |layer: &usize| self.own_stride(*layer, Axis::Block);
            return self.layers.iter().map(of_layer).sum();
        }
        self.own_stride(layer, axis)
    }

    /// Region and offset of a layer's first byte.
    fn origin(&self, layer: usize) -> (usize, usize) {
        let position = self
            .layers
            .iter()
            .position(|found| *found == layer)
            .expect("a layer of this rank");
        if self.engine.region_per_layer {
            return (position, 3);
        }
        let before = self.layers[..position].iter().map(|layer| {
            if self.is_shared() {
                self.own_stride(*layer, Axis::Block)
            } else {
                self.array_bytes(*layer)
            }
        });
        (0, 3 + before.sum::<usize>())
    }

    /// `visit(region, offset, name)` for every byte of one head in `row` (a token in its block) of
    /// `block`, where `token` is the row's number in the sequence.
    fn each_byte(
        &self,
        layer: usize,
        (block, row, token): (BlockId, usize, usize),
        head_place: usize,
        visit: &mut impl FnMut(usize, usize, u32),
    ) {
        let (region, origin) = self.origin(layer);
        let mut byte_of_token = 0;
        for (part, bytes) in self.engine.formats[layer].parts.iter().enumerate() {
            let offset = origin
                + block.0 as usize * self.stride(layer, Axis::Block)
                + part * self.stride(layer, Axis::Part)
                + head_place * self.stride(layer, Axis::Head)
                + row * self.stride(layer, Axis::Token);
            for byte in 0..*bytes {
                let head = self.heads[head_place];
                let name = ((layer * TOKENS_MAX + token) * HEADS_MAX + head) * TOKEN_BYTES_MAX
                    + byte_of_token;
                visit(
                    region,
                    offset + byte,
                    u32::try_from(name).expect("names fit"),
                );
                byte_of_token += 1;
            }
        }
    }

    /// Writes names for these tokens, wherever they lie in the blocks of this rank: what a source
    /// holds, or what a consumer must hold afterwards. An opaque page is written whole.
    pub(super) fn write(&mut self, tokens: TokenRange) -> u64 {
        let mut memory = std::mem::take(&mut self.memory);
        let mut bytes = 0;
        for layer in self.layers {
            let group = &self.engine.groups[self.engine.group_of[*layer]];
            let size = group.block_tokens;
            let block_of = |token: u32| group.blocks[(token / size - group.first_index) as usize];
            let mut rows: Vec<(BlockId, usize, usize)> = Vec::new();
            if let Some(page_rows) = self.model[*layer].opaque_rows {
                for index in tokens.first / size..tokens.past_last.div_ceil(size) {
                    let row = |row| {
                        (
                            block_of(index * size),
                            row,
                            index as usize * page_rows + row,
                        )
                    };
                    rows.extend((0..page_rows).map(row));
                }
            } else {
                let row = |token: u32| (block_of(token), (token % size) as usize, token as usize);
                rows.extend((tokens.first..tokens.past_last).map(row));
            }
            for at in rows {
                for head in 0..self.heads.len() {
                    self.each_byte(*layer, at, head, &mut |region, offset, name| {
                        memory[region][offset] = name;
                        bytes += 1;
                    });
                }
            }
        }
        self.memory = memory;
        bytes
    }

    pub(super) fn cache(&self, reversed: bool) -> RankCache {
        let regions = (0..).zip(&self.memory).map(|(index, memory)| MemoryRegion {
            base: 0x1003 + (index << 40),
            bytes: memory.len() as u64,
        });
        let mut layers: Vec<LayerCache> = self
            .layers
            .iter()
            .map(|layer| {
                let (region, origin) = self.origin(*layer);
                LayerCache {
                    name: format!("model.layers.{layer}.self_attn.attn"),
                    region: region as u32,
                    parts: self.parts(*layer, origin),
                    group: self.engine.group_of[*layer] as u32,
                }
            })
            .collect();
        if reversed {
            layers.reverse();
        }
        RankCache::new(
            self.engine.num_blocks as u32,
            self.heads.len() as u32,
            regions.collect(),
            layers,
        )
        .expect("an array is a layout")
    }

    fn parts(&self, layer: usize, origin: usize) -> Vec<Part> {
        let format = &self.engine.formats[layer];
        let rows = self.rows(layer);
        let opaque = self.model[layer].opaque_rows.is_some();
        (0..)
            .zip(&format.parts)
            .map(|(part, bytes)| {
                let stride = self.stride(layer, Axis::Token);
                let one_row = format.one_row && stride == *bytes;
                Part {
                    offset_bytes: (origin + part * self.stride(layer, Axis::Part)) as u64,
                    block_stride_bytes: self.stride(layer, Axis::Block) as u64,
                    head_stride_bytes: self.stride(layer, Axis::Head) as u64,
                    rows: if one_row && !opaque { 1 } else { rows as u32 },
                    row_stride_bytes: stride as u64,
                    row_bytes: (if one_row && !opaque {
                        rows * bytes
                    } else {
                        *bytes
                    }) as u64,
                    block_tokens: if opaque { 0 } else { rows as u32 },
                }
            })
            .collect()
    }
}

/// What a source rank holds: all tokens of its listed blocks, gaps elsewhere.
pub(super) fn source<'a>(
    engine: &'a Engine,
    model: &'a [Layer],
    stage: usize,
    heads: Vec<usize>,
) -> Rank<'a> {
    let mut rank = Rank::new(engine, model, stage, heads, GAP);
    let held: Vec<TokenRange> = engine.lists().iter().map(GroupBlocks::tokens).collect();
    let first = held.iter().map(|tokens| tokens.first).max();
    let past_last = held.iter().map(|tokens| tokens.past_last).min();
    rank.write(TokenRange {
        first: first.expect("a group"),
        past_last: past_last.expect("a group"),
    });
    rank
}
