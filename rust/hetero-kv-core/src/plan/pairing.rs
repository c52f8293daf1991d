//! Which ranks of the producer a consumer rank reads, may read and releases.

use super::choose::Asker;
use crate::ids::TpRank;
use crate::layout::{HeadRange, KvHeads, LayoutError, TP_SIZE_MAX, one_divides_other, owned_heads};
use crate::plan::{LayerRange, Region, SourceChooser, TokenRange};

/// Two tensor parallel groups that can exchange a cache of these heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pairing {
    producer_tp: u32,
    consumer_tp: u32,
    heads: KvHeads,
}

/// A pair that is refused: the fields and both values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PairError {
    /// Neither tensor parallel size divides the other.
    #[error("tp_size: producer {producer_tp}, consumer {consumer_tp}; one must divide the other")]
    TpSizes {
        /// Ranks of the producer.
        producer_tp: u32,
        /// Ranks of the consumer.
        consumer_tp: u32,
    },
    /// The sides say they cut unlike heads.
    #[error("kv_heads: producer has {producer}, consumer has {consumer}")]
    UnlikeHeads {
        /// Of the producer.
        producer: KvHeads,
        /// Of the consumer.
        consumer: KvHeads,
    },
    /// A side's ranks cannot share the heads.
    #[error(
        "kv_heads: {side} tp_size {tp_size} and {kv_heads} KV heads; one must divide the other"
    )]
    Heads {
        /// `producer` or `consumer`.
        side: &'static str,
        /// Ranks of that side.
        tp_size: u32,
        /// KV heads in all.
        kv_heads: u32,
    },
    /// A size out of bounds.
    #[error("tp_size: {side} {tp_size} is not in 1..=1024")]
    TpSize {
        /// `producer` or `consumer`.
        side: &'static str,
        /// Ranks of that side.
        tp_size: u32,
    },
}

/// One rank that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Source {
    /// Its place in the producer's group.
    pub tp_rank: TpRank,
    /// The heads read from it.
    pub heads: HeadRange,
    /// The heads it holds: where in its cache the read ones lie.
    pub held: HeadRange,
}

/// What one consumer rank does for one transfer. Only a [`Pairing`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankPlan {
    /// The consumer rank.
    pub tp_rank: TpRank,
    /// The heads it holds, all of them wanted.
    pub heads: HeadRange,
    /// The ranks to read; together they cover each head of `heads` once, in ascending order.
    pub sources: Vec<Source>,
    /// The ranks that hold any of `heads`, ascending.
    pub holders: Vec<TpRank>,
    /// The ranks whose blocks end when this consumer rank is done, read or not, ascending. Over the
    /// ranks of the consumer these cover the producer's group.
    pub release: Vec<TpRank>,
}

impl Pairing {
    /// Takes the pair or names what refuses it.
    ///
    /// # Errors
    /// [`PairError`]: one of the two tp sizes must divide the other, and on each side one of tp size
    /// and heads must divide the other.
    pub fn new(producer_tp: u32, consumer_tp: u32, heads: KvHeads) -> Result<Self, PairError> {
        for (side, tp_size) in [("producer", producer_tp), ("consumer", consumer_tp)] {
            if tp_size == 0 || tp_size > TP_SIZE_MAX {
                return Err(PairError::TpSize { side, tp_size });
            }
        }
        if !one_divides_other(producer_tp, consumer_tp) {
            return Err(PairError::TpSizes {
                producer_tp,
                consumer_tp,
            });
        }
        for (side, tp_size) in [("producer", producer_tp), ("consumer", consumer_tp)] {
            let kv_heads = heads.total();
            if !one_divides_other(kv_heads, tp_size) {
                return Err(PairError::Heads {
                    side,
                    tp_size,
                    kv_heads,
                });
            }
        }
        Ok(Self {
            producer_tp,
            consumer_tp,
            heads,
        })
    }

    /// Takes two sides that each say what they cut.
    ///
    /// # Errors
    /// [`PairError::UnlikeHeads`] where they do not cut the same heads; else as [`Pairing::new`].
    pub fn between(
        (producer_tp, producer_heads): (u32, KvHeads),
        (consumer_tp, consumer_heads): (u32, KvHeads),
    ) -> Result<Self, PairError> {
        if producer_heads != consumer_heads {
            return Err(PairError::UnlikeHeads {
                producer: producer_heads,
                consumer: consumer_heads,
            });
        }
        Self::new(producer_tp, consumer_tp, producer_heads)
    }

    /// Ranks of the producer.
    pub fn producer_tp(&self) -> u32 {
        self.producer_tp
    }

    /// Ranks of the consumer.
    pub fn consumer_tp(&self) -> u32 {
        self.consumer_tp
    }

    /// The heads.
    pub fn heads(&self) -> KvHeads {
        self.heads
    }

    /// The heads a producer rank holds.
    ///
    /// # Errors
    /// [`LayoutError::TpRank`] when there is no such rank.
    pub fn producer_heads(&self, tp_rank: TpRank) -> Result<HeadRange, LayoutError> {
        owned_heads(self.heads, self.producer_tp, tp_rank)
    }

    /// The heads a consumer rank holds.
    ///
    /// # Errors
    /// [`LayoutError::TpRank`] when there is no such rank.
    pub fn consumer_heads(&self, tp_rank: TpRank) -> Result<HeadRange, LayoutError> {
        owned_heads(self.heads, self.consumer_tp, tp_rank)
    }

    /// What consumer rank `tp_rank` reads for the chooser's transfer.
    ///
    /// # Errors
    /// [`LayoutError::TpRank`] when there is no such rank.
    pub fn rank_plan(
        &self,
        tp_rank: TpRank,
        chooser: &SourceChooser,
    ) -> Result<RankPlan, LayoutError> {
        let heads = self.consumer_heads(tp_rank)?;
        let mut sources = Vec::new();
        let mut holders = Vec::new();
        for group in self.head_groups(tp_rank)? {
            sources.push(Source {
                tp_rank: group.holders[chooser.pick(&group.holders, &group.asker)],
                heads: group.heads,
                held: group.held,
            });
            holders.extend(group.holders);
        }
        Ok(RankPlan {
            tp_rank,
            heads,
            sources,
            release: holders.clone(),
            holders,
        })
    }

    /// The wanted heads of consumer rank `tp_rank` by who has them, ascending. At most as many
    /// groups as the producer has ranks.
    pub(super) fn head_groups(&self, tp_rank: TpRank) -> Result<Vec<HeadGroup>, LayoutError> {
        let heads = self.consumer_heads(tp_rank)?;
        let total = self.heads.total();
        // Heads per producer rank and ranks per head; one of the two is 1.
        let share = (total / self.producer_tp).max(1);
        let replicas = (self.producer_tp / total).max(1);
        // Consumer ranks that want these same heads are neighbours.
        let consumers = (self.consumer_tp / total).max(1);
        let mut groups = Vec::new();
        let mut first = heads.first;
        while first < heads.past_last {
            let place = first / share;
            let held = HeadRange {
                first: place * share,
                past_last: (place + 1) * share,
            };
            groups.push(HeadGroup {
                heads: held.intersection(heads),
                held,
                holders: (place * replicas..(place + 1) * replicas)
                    .map(TpRank)
                    .collect(),
                asker: Asker {
                    first_head: held.first,
                    index: tp_rank.0 % consumers,
                    consumers,
                    mapped: self.mapped(tp_rank),
                },
            });
            first = held.past_last;
        }
        Ok(groups)
    }

    /// RFC #46107's fixed mapping of ranks: the first of a consumer's share, or the one that several
    /// consumers share.
    fn mapped(&self, tp_rank: TpRank) -> TpRank {
        if self.producer_tp >= self.consumer_tp {
            TpRank(tp_rank.0 * (self.producer_tp / self.consumer_tp))
        } else {
            TpRank(tp_rank.0 / (self.consumer_tp / self.producer_tp))
        }
    }
}

/// Heads that one consumer rank wants and that the same producer ranks hold.
pub(super) struct HeadGroup {
    /// The wanted ones.
    pub(super) heads: HeadRange,
    /// All that each holder has.
    pub(super) held: HeadRange,
    /// The ranks that hold them, never none.
    pub(super) holders: Vec<TpRank>,
    pub(super) asker: Asker,
}

impl RankPlan {
    /// What each source gives of these tokens and layers, in the order of [`RankPlan::sources`].
    /// Together they cover the consumer's heads in them exactly once.
    pub fn regions(&self, tokens: TokenRange, layers: LayerRange) -> Vec<Region> {
        self.sources
            .iter()
            .map(|source| Region {
                tokens,
                heads: source.heads,
                layers,
            })
            .collect()
    }
}
