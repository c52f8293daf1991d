//! What can be wrong with caches, blocks and tokens that a plan is to be carried out on.

use std::fmt;

use super::TokenRange;
use crate::ids::{BlockId, PpRank, TpRank};
use crate::layout::LayoutError;

/// One side of a pair, in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The source rank of this place in the producer's group.
    Source(TpRank),
    /// The reading rank of this place in the consumer's group.
    Consumer(TpRank),
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(tp_rank) => write!(f, "source tp_rank {tp_rank}"),
            Self::Consumer(tp_rank) => write!(f, "consumer tp_rank {tp_rank}"),
        }
    }
}

/// Caches and blocks that do not fit a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No cache was given for a rank that the plan reads.
    #[error("no cache given for source tp_rank {0}")]
    NoCache(TpRank),
    /// A cache holds another number of heads than its place says.
    #[error("heads_held: {side} announces {announced}, its place in the group gives {planned}")]
    HeadsHeld {
        /// Whose cache.
        side: Side,
        /// Heads in its cache.
        announced: u32,
        /// Heads by the plan.
        planned: u32,
    },
    /// One side has a layer that the other lacks.
    #[error("layer {layer:?} is missing on {side}")]
    LayerMissing {
        /// The layer.
        layer: String,
        /// Who lacks it.
        side: Side,
    },
    /// A layer is stored in pieces that do not correspond.
    #[error(
        "layer {layer:?}: {field} is {source_value} on source tp_rank {tp_rank}, {consumer_value} on the consumer"
    )]
    LayerShape {
        /// The layer.
        layer: String,
        /// `parts`, `rows`, `row_bytes` or `token_bytes`.
        field: &'static str,
        /// The source.
        tp_rank: TpRank,
        /// Its value.
        source_value: u64,
        /// The consumer's value.
        consumer_value: u64,
    },
    /// A block id past the end of a cache.
    #[error("block {block} on {side} is not below its num_blocks {num_blocks}")]
    NoSuchBlock {
        /// Whose cache.
        side: Side,
        /// The id.
        block: BlockId,
        /// Blocks of that cache.
        num_blocks: u32,
    },
    /// Two pairs write one block of the consumer.
    #[error("block {0} of the consumer is written by two pairs")]
    DuplicateDest(BlockId),
    /// Two caches were given for one rank of the producer.
    #[error("two caches given for source pp_rank {pp_rank} tp_rank {tp_rank}")]
    CacheTwice {
        /// Its stage.
        pp_rank: PpRank,
        /// Its place in the stage.
        tp_rank: TpRank,
    },
    /// The ranks of a place in the group hold a layer in two stages.
    #[error("layer {layer:?} is in stage {first} and in stage {second} of {side}")]
    LayerTwice {
        /// The layer.
        layer: String,
        /// Whose stages.
        side: Side,
        /// One stage.
        first: PpRank,
        /// The other.
        second: PpRank,
    },
    /// The rank is not in its group.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A range of tokens that ends before it begins.
    #[error("tokens: {first}..{past_last} ends before it begins")]
    Tokens {
        /// Its begin.
        first: u32,
        /// Its end.
        past_last: u32,
    },
    /// A layer belongs to a group of which no blocks were given.
    #[error(
        "layer {layer:?} is in group {group}, blocks of {groups} groups are given for the {side}"
    )]
    NoSuchGroup {
        /// The layer.
        layer: String,
        /// `source` or `consumer`.
        side: &'static str,
        /// Its group.
        group: u32,
        /// Groups given.
        groups: usize,
    },
    /// Blocks of no tokens, or of too many.
    #[error("block_size: {block_tokens} tokens in group {group} of the {side}, not in 1..=65536")]
    BlockTokens {
        /// `source` or `consumer`.
        side: &'static str,
        /// The group.
        group: u32,
        /// What was given.
        block_tokens: u32,
    },
    /// Block sizes that cannot be cut into one another.
    #[error(
        "block_size: {source_tokens} tokens on the source, {consumer_tokens} on the consumer; {problem}"
    )]
    BlockSizes {
        /// Tokens of a block of the source.
        source_tokens: u32,
        /// Tokens of a block of the consumer.
        consumer_tokens: u32,
        /// Why they do not go together here.
        problem: &'static str,
    },
    /// A layer's blocks are of another size than its group's.
    #[error(
        "block_size: layer {layer:?} on {side} has blocks of {announced} tokens, its group of {planned}"
    )]
    LayerBlockSize {
        /// The layer.
        layer: String,
        /// Whose cache.
        side: Side,
        /// Tokens of a block by the cache.
        announced: u32,
        /// Tokens of a block by its list of blocks.
        planned: u32,
    },
    /// A layer whose pages are opaque would have to be cut.
    #[error(
        "page_format: layer {layer:?} stores opaque pages on {side}, which cannot be cut by token; block_size: {source_tokens} on the source, {consumer_tokens} on the consumer"
    )]
    OpaquePage {
        /// The layer.
        layer: String,
        /// Whose pages.
        side: Side,
        /// Tokens of a block of the source.
        source_tokens: u32,
        /// Tokens of a block of the consumer.
        consumer_tokens: u32,
    },
    /// The first token lies inside an opaque page.
    #[error(
        "page_format: layer {layer:?} stores opaque pages on {side}, which cannot be cut at token {first_token} in blocks of {block_tokens}"
    )]
    OpaqueCut {
        /// The layer.
        layer: String,
        /// Whose pages.
        side: Side,
        /// The first token to move.
        first_token: u32,
        /// Tokens of a block.
        block_tokens: u32,
    },
    /// The blocks of one side do not hold all tokens that are to move.
    #[error(
        "the {blocks} blocks of group {group} of the {side} hold tokens {held}, wanted are {wanted}"
    )]
    BlocksShort {
        /// `source` or `consumer`.
        side: &'static str,
        /// The group.
        group: u32,
        /// Blocks given.
        blocks: usize,
        /// The tokens they hold.
        held: TokenRange,
        /// The tokens to move.
        wanted: TokenRange,
    },
    /// A block list names a block twice.
    #[error("block {block} is twice among the blocks of group {group} of the {side}")]
    BlockTwice {
        /// `source` or `consumer`.
        side: &'static str,
        /// The group.
        group: u32,
        /// The block.
        block: BlockId,
    },
    /// More blocks are to be written than there are to read.
    #[error("{dest} blocks of the consumer and {sources} of the source")]
    BlockCounts {
        /// Blocks of the source.
        sources: usize,
        /// Blocks of the consumer.
        dest: usize,
    },
    /// More than [`super::RUNS_MAX`].
    #[error("{0} runs in one piece, above 16777216; expand fewer blocks at a time")]
    TooManyRuns(u64),
}
