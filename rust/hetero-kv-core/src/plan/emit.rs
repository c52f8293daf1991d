//! From strides and spans to runs.

use super::pieces::Piece;
use super::spans::Span;
use crate::memory::Run;

/// Runs of these pieces over spans of so many tokens each, before any merge.
pub(super) fn count(pieces: &[Piece], lengths: &[(u32, u64)]) -> u64 {
    sum(pieces, lengths, Piece::runs)
}

/// Bytes of these pieces over spans of so many tokens each.
pub(super) fn count_bytes(pieces: &[Piece], lengths: &[(u32, u64)]) -> u64 {
    sum(pieces, lengths, Piece::span_bytes)
}

fn sum(pieces: &[Piece], lengths: &[(u32, u64)], of: impl Fn(&Piece, u32) -> u64) -> u64 {
    let one_span = |tokens: u32| {
        pieces
            .iter()
            .map(|piece| of(piece, tokens))
            .fold(0, u64::saturating_add)
    };
    lengths
        .iter()
        .map(|&(tokens, spans)| one_span(tokens).saturating_mul(spans))
        .fold(0, u64::saturating_add)
}

/// `pieces` and `spans` ascend at the consumer. Pieces that lie in one and the same block of the
/// consumer (K and V of a page, or all layers where the block is the outermost axis) are walked
/// block by block, the others piece by piece, so that neighbours in memory follow one another.
pub(super) fn emit(runs: &mut Vec<Run>, pieces: &[Piece], spans: &[Span]) {
    let mut rest = pieces;
    while let Some(first) = rest.first() {
        let same_block = |piece: &&Piece| {
            piece.dest.region == first.dest.region
                && piece.dest.block_stride == first.dest.block_stride
                && piece.dest.offset - first.dest.offset < first.dest.block_stride
        };
        let together = rest.iter().take_while(same_block).count().max(1);
        let (group, after) = rest.split_at(together);
        for span in spans {
            for piece in group {
                emit_piece(runs, piece, span);
            }
        }
        rest = after;
    }
}

fn emit_piece(runs: &mut Vec<Run>, piece: &Piece, span: &Span) {
    piece.at(span, |source_offset, dest_offset, walk| {
        let mut run = Run {
            source_region: piece.source.region,
            source_offset,
            dest_region: piece.dest.region,
            dest_offset,
            bytes: walk.bytes,
        };
        match walk.axes.as_slice() {
            [] => push_merged(runs, run),
            [outer, inner @ ..] => {
                for _ in 0..outer.steps {
                    match inner {
                        [] => push_merged(runs, run),
                        [inner, ..] => {
                            let mut row = run;
                            for _ in 0..inner.steps {
                                push_merged(runs, row);
                                row.source_offset += inner.source_stride;
                                row.dest_offset += inner.dest_stride;
                            }
                        }
                    }
                    run.source_offset += outer.source_stride;
                    run.dest_offset += outer.dest_stride;
                }
            }
        }
    });
}

fn push_merged(runs: &mut Vec<Run>, run: Run) {
    if let Some(last) = runs.last_mut()
        && last.source_region == run.source_region
        && last.dest_region == run.dest_region
        && last.source_offset + last.bytes == run.source_offset
        && last.dest_offset + last.bytes == run.dest_offset
    {
        last.bytes += run.bytes;
        return;
    }
    runs.push(run);
}
