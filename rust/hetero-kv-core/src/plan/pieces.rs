//! One layer on two sides, as strides to walk.

use smallvec::SmallVec;

use super::error::{PlanError, Side};
use super::spans::{Span, WHOLE};
use crate::ids::TpRank;
use crate::layout::{LayerCache, Part};

/// Blocks of both sides, in tokens.
#[derive(Clone, Copy)]
pub(super) struct BlockSizes {
    pub(super) source: u32,
    pub(super) dest: u32,
}

/// The same head on both sides, and how many from there on. Each side counts its own heads.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) count: u32,
    pub(super) source_first: u32,
    pub(super) dest_first: u32,
}

/// Bytes of one layer that lie alike on both sides, in block 0 and token 0, cut down to the heads of
/// one source.
pub(super) struct Piece {
    pub(super) source: Place,
    pub(super) dest: Place,
    heads: Axis,
    /// Over tokens, or over the rows of an opaque page.
    inner: Axis,
    by_token: bool,
    /// Contiguous on both sides in one step of `inner`.
    bytes: u64,
    /// The walk over a page, or over as many tokens as most spans have.
    whole: Walk,
}

#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) region: u32,
    pub(super) offset: u64,
    pub(super) block_stride: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Axis {
    pub(super) steps: u32,
    pub(super) source_stride: u64,
    pub(super) dest_stride: u64,
}

/// What is left to walk where neighbours in memory are taken in one.
pub(super) struct Walk {
    /// Outermost first: at most heads and tokens.
    pub(super) axes: SmallVec<[Axis; 2]>,
    /// Contiguous on both sides.
    pub(super) bytes: u64,
}

impl Walk {
    fn new(heads: Axis, inner: Axis, mut bytes: u64) -> Self {
        let mut axes: SmallVec<[Axis; 2]> = SmallVec::new();
        axes.extend([heads, inner].into_iter().filter(|axis| axis.steps > 1));
        axes.sort_by_key(|axis| std::cmp::Reverse(axis.dest_stride));
        while let Some(inner) = axes.last() {
            if inner.source_stride != bytes || inner.dest_stride != bytes {
                break;
            }
            bytes *= u64::from(inner.steps);
            axes.pop();
        }
        Self { axes, bytes }
    }

    fn runs(&self) -> u64 {
        self.axes.iter().map(|axis| u64::from(axis.steps)).product()
    }
}

impl Piece {
    /// `tokens` steps of `inner` where that is tokens.
    fn walk(&self, tokens: u32) -> Walk {
        let inner = Axis {
            steps: tokens,
            ..self.inner
        };
        Walk::new(self.heads, inner, self.bytes)
    }

    fn is_whole(&self, tokens: u32) -> bool {
        !self.by_token || tokens == WHOLE || tokens == self.inner.steps
    }

    /// Runs of one span of so many tokens, before any merge with another's.
    pub(super) fn runs(&self, tokens: u32) -> u64 {
        if self.is_whole(tokens) {
            self.whole.runs()
        } else {
            self.walk(tokens).runs()
        }
    }

    /// Bytes of one span of so many tokens.
    pub(super) fn span_bytes(&self, tokens: u32) -> u64 {
        let steps = if self.is_whole(tokens) {
            self.inner.steps
        } else {
            tokens
        };
        self.bytes
            .saturating_mul(steps.into())
            .saturating_mul(self.heads.steps.into())
    }

    /// Calls `emit` with where the walk over a span begins on both sides, and the walk.
    pub(super) fn at(&self, span: &Span, emit: impl FnOnce(u64, u64, &Walk)) {
        let mut source = self.source.offset + u64::from(span.source.0) * self.source.block_stride;
        let mut dest = self.dest.offset + u64::from(span.dest.0) * self.dest.block_stride;
        if self.by_token {
            source += u64::from(span.source_token) * self.inner.source_stride;
            dest += u64::from(span.dest_token) * self.inner.dest_stride;
        }
        if self.is_whole(span.tokens) {
            emit(source, dest, &self.whole);
        } else {
            emit(source, dest, &self.walk(span.tokens));
        }
    }
}

/// Adds the pieces of one layer. `sizes`: block sizes where tokens are counted, absent where blocks
/// are paired whole.
pub(super) fn layer_pieces(
    pieces: &mut Vec<Piece>,
    from: &LayerCache,
    dest: &LayerCache,
    heads: Heads,
    (tp_rank, consumer): (TpRank, TpRank),
    sizes: Option<BlockSizes>,
) -> Result<(), PlanError> {
    match (from.block_tokens(), dest.block_tokens()) {
        (Some(source_tokens), Some(dest_tokens)) => {
            let found = BlockSizes {
                source: source_tokens,
                dest: dest_tokens,
            };
            check_sizes(found, sizes, dest, (tp_rank, consumer))?;
            token_pieces(pieces, from, dest, heads, tp_rank, found)
        }
        (source_tokens, _) => {
            if let Some(sizes) = sizes.filter(|sizes| sizes.source != sizes.dest) {
                return Err(PlanError::OpaquePage {
                    layer: dest.name.clone(),
                    side: if source_tokens.is_none() {
                        Side::Source(tp_rank)
                    } else {
                        Side::Consumer(consumer)
                    },
                    source_tokens: sizes.source,
                    consumer_tokens: sizes.dest,
                });
            }
            page_pieces(pieces, from, dest, heads, tp_rank)
        }
    }
}

/// Whether the layer's pages cannot be cut between these two.
pub(super) fn is_opaque(from: &LayerCache, dest: &LayerCache) -> bool {
    from.block_tokens().is_none() || dest.block_tokens().is_none()
}

fn check_sizes(
    found: BlockSizes,
    planned: Option<BlockSizes>,
    layer: &LayerCache,
    (tp_rank, consumer): (TpRank, TpRank),
) -> Result<(), PlanError> {
    let Some(planned) = planned else {
        if found.source == found.dest {
            return Ok(());
        }
        return Err(PlanError::BlockSizes {
            source_tokens: found.source,
            consumer_tokens: found.dest,
            problem: "whole blocks pair only where they are equal",
        });
    };
    for (side, announced, planned) in [
        (Side::Source(tp_rank), found.source, planned.source),
        (Side::Consumer(consumer), found.dest, planned.dest),
    ] {
        if announced != planned {
            return Err(PlanError::LayerBlockSize {
                layer: layer.name.clone(),
                side,
                announced,
                planned,
            });
        }
    }
    Ok(())
}

fn equal(
    layer: &LayerCache,
    tp_rank: TpRank,
    field: &'static str,
    source_value: u64,
    consumer_value: u64,
) -> Result<(), PlanError> {
    if source_value == consumer_value {
        return Ok(());
    }
    Err(PlanError::LayerShape {
        layer: layer.name.clone(),
        field,
        tp_rank,
        source_value,
        consumer_value,
    })
}

/// Part by part, each page as it is.
fn page_pieces(
    pieces: &mut Vec<Piece>,
    from: &LayerCache,
    dest: &LayerCache,
    heads: Heads,
    tp_rank: TpRank,
) -> Result<(), PlanError> {
    let equal = |field, source, consumer| equal(dest, tp_rank, field, source, consumer);
    equal("parts", from.parts.len() as u64, dest.parts.len() as u64)?;
    for (source_part, dest_part) in from.parts.iter().zip(&dest.parts) {
        equal("rows", source_part.rows.into(), dest_part.rows.into())?;
        equal("row_bytes", source_part.row_bytes, dest_part.row_bytes)?;
        let inner = Axis {
            steps: dest_part.rows,
            source_stride: source_part.row_stride_bytes,
            dest_stride: dest_part.row_stride_bytes,
        };
        pieces.push(piece(
            (from, source_part, 0),
            (dest, dest_part, 0),
            heads,
            inner,
            false,
            dest_part.row_bytes,
        ));
    }
    Ok(())
}

/// A token's bytes are those of its parts one after another, however each side cuts them into parts:
/// wherever either side has a boundary, a piece ends.
fn token_pieces(
    pieces: &mut Vec<Piece>,
    from: &LayerCache,
    dest: &LayerCache,
    heads: Heads,
    tp_rank: TpRank,
    sizes: BlockSizes,
) -> Result<(), PlanError> {
    // Parts of one layer lie inside its region, so their sums are far below 2^64.
    let token_bytes =
        |layer: &LayerCache| -> u64 { layer.parts.iter().filter_map(Part::token_bytes).sum() };
    equal(
        dest,
        tp_rank,
        "token_bytes",
        token_bytes(from),
        token_bytes(dest),
    )?;
    let mut source_parts = from.parts.iter();
    let mut dest_parts = dest.parts.iter();
    let mut source = source_parts.next().map(|part| (part, 0));
    let mut target = dest_parts.next().map(|part| (part, 0));
    while let (Some((source_part, source_at)), Some((dest_part, dest_at))) = (source, target) {
        let left = |part: &Part, at: u64| part.token_bytes().unwrap_or(0) - at;
        let bytes = left(source_part, source_at).min(left(dest_part, dest_at));
        let inner = Axis {
            // As many as a span has between two blocks' ends.
            steps: sizes.source.min(sizes.dest),
            source_stride: source_part.token_stride_bytes().unwrap_or(0),
            dest_stride: dest_part.token_stride_bytes().unwrap_or(0),
        };
        pieces.push(piece(
            (from, source_part, source_at),
            (dest, dest_part, dest_at),
            heads,
            inner,
            true,
            bytes,
        ));
        source = if left(source_part, source_at) == bytes {
            source_parts.next().map(|part| (part, 0))
        } else {
            Some((source_part, source_at + bytes))
        };
        target = if left(dest_part, dest_at) == bytes {
            dest_parts.next().map(|part| (part, 0))
        } else {
            Some((dest_part, dest_at + bytes))
        };
    }
    Ok(())
}

/// `from` and `dest`: layer, part and byte of a token (or row) at which the piece begins.
fn piece(
    from: (&LayerCache, &Part, u64),
    dest: (&LayerCache, &Part, u64),
    heads: Heads,
    inner: Axis,
    by_token: bool,
    bytes: u64,
) -> Piece {
    let place = |(layer, part, at): (&LayerCache, &Part, u64), head: u32| Place {
        region: layer.region,
        offset: part.offset_bytes + u64::from(head) * part.head_stride_bytes + at,
        block_stride: part.block_stride_bytes,
    };
    let head_axis = Axis {
        steps: heads.count,
        source_stride: from.1.head_stride_bytes,
        dest_stride: dest.1.head_stride_bytes,
    };
    Piece {
        source: place(from, heads.source_first),
        dest: place(dest, heads.dest_first),
        heads: head_axis,
        inner,
        by_token,
        bytes,
        whole: Walk::new(head_axis, inner, bytes),
    }
}
