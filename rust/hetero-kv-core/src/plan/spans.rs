//! Tokens of a sequence as stretches that lie in one block on either side.

use std::collections::BTreeMap;

use super::TokenRange;
use super::error::PlanError;
use super::pieces::BlockSizes;
use crate::ids::BlockId;
use crate::layout::BLOCK_TOKENS_MAX;

/// One side's blocks of one KV cache group, for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupBlocks<'a> {
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Index in the sequence of the first block listed: after a prefix hit a list may begin later.
    pub first_index: u32,
    /// Block ids, equal on every rank of the side.
    pub blocks: &'a [BlockId],
}

impl GroupBlocks<'_> {
    /// The tokens that the listed blocks hold. Ends at `u32::MAX` where they would hold more.
    pub fn tokens(&self) -> TokenRange {
        let at = |index: u64| {
            u32::try_from(index.saturating_mul(self.block_tokens.into())).unwrap_or(u32::MAX)
        };
        let first = u64::from(self.first_index);
        TokenRange {
            first: at(first),
            past_last: at(first.saturating_add(self.blocks.len() as u64)),
        }
    }
}

/// [`Span::tokens`] of a whole block, however many tokens that is.
pub(super) const WHOLE: u32 = 0;

/// Consecutive tokens that lie in one block of the source and in one of the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Position in the sequence of the first token.
    pub(super) first_token: u32,
    pub(super) tokens: u32,
    pub(super) source: BlockId,
    /// Where the first token lies in the source's block.
    pub(super) source_token: u32,
    pub(super) dest: BlockId,
    /// Where the first token lies in the consumer's block.
    pub(super) dest_token: u32,
}

/// Spans that ascend at the consumer.
pub(super) struct Spans {
    pub(super) spans: Vec<Span>,
    /// How many spans have how many tokens.
    pub(super) lengths: Vec<(u32, u64)>,
}

impl Spans {
    pub(super) fn new(spans: Vec<Span>) -> Self {
        let mut lengths = BTreeMap::new();
        for span in &spans {
            *lengths.entry(span.tokens).or_insert(0) += 1;
        }
        Self {
            spans,
            lengths: lengths.into_iter().collect(),
        }
    }

    /// Those that begin in `tokens`.
    pub(super) fn beginning_in(&self, tokens: TokenRange) -> Self {
        Self::new(
            self.spans
                .iter()
                .filter(|span| (tokens.first..tokens.past_last).contains(&span.first_token))
                .copied()
                .collect(),
        )
    }

    pub(super) fn last_source(&self) -> Option<BlockId> {
        self.spans.iter().map(|span| span.source).max()
    }

    pub(super) fn last_dest(&self) -> Option<BlockId> {
        self.spans.last().map(|span| span.dest)
    }
}

/// Cuts `tokens` wherever a block ends on either side. `groups`: the group on each side.
pub(super) fn cut(
    tokens: TokenRange,
    source: &GroupBlocks<'_>,
    dest: &GroupBlocks<'_>,
    groups: (u32, u32),
) -> Result<(Spans, BlockSizes), PlanError> {
    check_group("source", groups.0, source, tokens)?;
    check_group("consumer", groups.1, dest, tokens)?;
    let sizes = BlockSizes {
        source: source.block_tokens,
        dest: dest.block_tokens,
    };
    if !crate::layout::one_divides_other(sizes.source, sizes.dest) {
        return Err(PlanError::BlockSizes {
            source_tokens: sizes.source,
            consumer_tokens: sizes.dest,
            problem: "one must divide the other",
        });
    }
    let smaller = sizes.source.min(sizes.dest);
    let mut spans = Vec::with_capacity((tokens.count() / smaller) as usize + 2);
    let mut token = tokens.first;
    while token < tokens.past_last {
        // The smaller block ends wherever the larger one does.
        let to_end = smaller - token % smaller;
        let count = to_end.min(tokens.past_last - token);
        let block = |side: &GroupBlocks<'_>| {
            side.blocks[(token / side.block_tokens - side.first_index) as usize]
        };
        spans.push(Span {
            first_token: token,
            tokens: count,
            source: block(source),
            source_token: token % sizes.source,
            dest: block(dest),
            dest_token: token % sizes.dest,
        });
        token += count;
    }
    // Free lists hand out block ids in descending runs as often as ascending ones: sorted, both
    // merge.
    spans.sort_unstable_by_key(|span| (span.dest, span.dest_token));
    Ok((Spans::new(spans), sizes))
}

fn check_group(
    side: &'static str,
    group: u32,
    blocks: &GroupBlocks<'_>,
    wanted: TokenRange,
) -> Result<(), PlanError> {
    if !(1..=BLOCK_TOKENS_MAX).contains(&blocks.block_tokens) {
        return Err(PlanError::BlockTokens {
            side,
            group,
            block_tokens: blocks.block_tokens,
        });
    }
    let held = blocks.tokens();
    if !wanted.is_empty() && held.intersection(wanted) != wanted {
        return Err(PlanError::BlocksShort {
            side,
            group,
            blocks: blocks.blocks.len(),
            held,
            wanted,
        });
    }
    let mut sorted = blocks.blocks.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|two| two[0] == two[1]) {
        None => Ok(()),
        Some(twice) => Err(PlanError::BlockTwice {
            side,
            group,
            block: twice[0],
        }),
    }
}
