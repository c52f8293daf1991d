//! Which ranks of the producer a consumer rank reads, may read and releases.

use crate::ids::TpRank;
use crate::layout::{HeadRange, KvHeads, LayoutError, TP_SIZE_MAX, one_divides_other, owned_heads};
use crate::plan::SourceChooser;

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
        let total = self.heads.total();
        // Heads per producer rank and ranks per head; one of the two is 1.
        let share = (total / self.producer_tp).max(1);
        let replicas = (self.producer_tp / total).max(1);
        // Consumer ranks that want these same heads are neighbours.
        let consumers = (self.consumer_tp / total).max(1);
        let mut sources = Vec::new();
        let mut holders = Vec::new();
        let mut first = heads.first;
        while first < heads.past_last {
            let group = first / share;
            let held = HeadRange {
                first: group * share,
                past_last: (group + 1) * share,
            };
            let of_group: Vec<TpRank> = (group * replicas..(group + 1) * replicas)
                .map(TpRank)
                .collect();
            let chosen = chooser.pick(&of_group, held.first, tp_rank.0 % consumers, consumers);
            sources.push(Source {
                tp_rank: chosen,
                heads: held.intersection(heads),
                held,
            });
            holders.extend(of_group);
            first = held.past_last;
        }
        Ok(RankPlan {
            tp_rank,
            heads,
            sources,
            release: holders.clone(),
            holders,
        })
    }
}
