//! Large reads from several holders at once.

use std::collections::BTreeSet;

use super::draw::{Case, Draw, LayerDraw, tokens};
use super::transfer::check;
use super::world::{Rank, UNTOUCHED, source};
use crate::ids::{PpRank, TpRank, TransferId};
use crate::layout::RankCache;
use crate::plan::choose::{Asker, SourceChooser};
use crate::plan::stripe::stripes;
use crate::plan::{Pairing, Striping, TokenRange, Transfer};

const STRIPED: Striping = Striping {
    threshold_bytes: 1,
    holders_max: u32::MAX,
};

/// One latent layer on `producer_tp` ranks, blocks of four tokens, 128 tokens.
fn latent(producer_tp: u32, consumer_tp: u32, weights: &[u16], striping: Striping) -> Case {
    let mut case = Draw {
        producer_tp,
        consumer_tp,
        heads: 0,
        layers: vec![LayerDraw {
            token_bytes: 8,
            opaque: false,
            group: 0,
            stages: [0, 0],
        }],
        groups: vec![(4, 1, true)],
        tokens: tokens(0, 128),
        reversed_groups: false,
        layers_in_block: false,
        region_per_layer: [false; 2],
        weights: weights.to_vec(),
        holders_max: 1,
        striped: false,
        seed: 3,
    }
    .case();
    case.striping = striping;
    case
}

/// The reads of each consumer rank, as (source rank, tokens).
fn reads(case: &Case) -> Vec<Vec<(u32, TokenRange)>> {
    check(case);
    let pairing = Pairing::new(case.producer.tp as u32, case.consumer.tp as u32, case.heads)
        .expect("divisible");
    let caches: Vec<RankCache> = (0..case.producer.tp)
        .map(|_| source(&case.producer, &case.model, 0, vec![0]).cache(false))
        .collect();
    let remote: Vec<(PpRank, TpRank, &RankCache)> = (0..)
        .zip(&caches)
        .map(|(tp, cache)| (PpRank(0), TpRank(tp), cache))
        .collect();
    let local = Rank::new(&case.consumer, &case.model, 0, vec![0], UNTOUCHED).cache(false);
    (0..case.consumer.tp as u32)
        .map(|tp| {
            let plan = Transfer {
                pairing: &pairing,
                tp_rank: TpRank(tp),
                consumer_stages: 1,
                chooser: &case.chooser,
                striping: case.striping,
                local: &local,
                remote: &remote,
                tokens: case.tokens,
                source_groups: &case.producer.lists(),
                dest_groups: &case.consumer.lists(),
            }
            .plan()
            .expect("fits");
            let read = plan.reads.iter();
            read.map(|read| (read.tp_rank.0, read.tokens)).collect()
        })
        .collect()
}

#[test]
fn a_large_read_is_spread_over_all_equal_holders_in_order() {
    let found = reads(&latent(4, 4, &[], STRIPED));
    // 32 blocks over four holders; consumer ranks begin on different ones.
    let mut begins = BTreeSet::new();
    for reads in &found {
        let shares: Vec<TokenRange> = reads.iter().map(|read| read.1).collect();
        assert_eq!(
            shares,
            [
                tokens(0, 32),
                tokens(32, 64),
                tokens(64, 96),
                tokens(96, 128)
            ]
        );
        let first = reads[0].0;
        let ranks: Vec<u32> = reads.iter().map(|read| read.0).collect();
        assert_eq!(ranks, [0, 1, 2, 3].map(|step| (first + step) % 4));
        begins.insert(first);
    }
    assert_eq!(begins.len(), 4);
}

#[test]
fn the_threshold_holders_and_weights_shape_the_stripes() {
    // 128 tokens of 8 bytes.
    let at = |threshold_bytes| Striping {
        threshold_bytes,
        holders_max: u32::MAX,
    };
    assert_eq!(reads(&latent(4, 1, &[], at(1025)))[0].len(), 1);
    assert_eq!(reads(&latent(4, 1, &[], at(1024)))[0].len(), 4);
    assert_eq!(reads(&latent(4, 1, &[], Striping::OFF))[0].len(), 1);
    let two = Striping {
        threshold_bytes: 1,
        holders_max: 2,
    };
    assert_eq!(reads(&latent(4, 1, &[], two))[0].len(), 2);
    // One that is avoided is none of the two.
    let ranks = |weights: &[u16]| -> BTreeSet<u32> {
        let found = reads(&latent(4, 1, weights, two));
        found[0].iter().map(|read| read.0).collect()
    };
    assert_eq!(ranks(&[1, 0, 0, 1]), [0, 3].into());
    assert_eq!(ranks(&[0, 1, 0, 1]), [1, 3].into());
    // No holder at all is one.
    let none = Striping {
        threshold_bytes: 1,
        holders_max: 0,
    };
    assert_eq!(reads(&latent(4, 1, &[], none))[0].len(), 1);
    assert_eq!(reads(&latent(1, 1, &[], at(1)))[0].len(), 1);
    // Shares by weight, none for weight 0; all 0 is all equal.
    let mut share = [0; 4];
    for (rank, tokens) in &reads(&latent(4, 1, &[0, 1, 2, 1], at(1)))[0] {
        share[*rank as usize] = tokens.count();
    }
    assert_eq!(share, [0, 32, 64, 32]);
    let found = reads(&latent(4, 1, &[0; 4], at(1)));
    assert!(found[0].iter().all(|read| read.1.count() == 32));
    // A share below one block is none.
    let found = reads(&latent(2, 1, &[1, u16::MAX], at(1)));
    assert_eq!(found[0], [(1, tokens(0, 128))]);
    // Behind a prefix hit the missing tokens are shared out, not all.
    let mut tail = latent(4, 1, &[], at(1));
    tail.tokens = tokens(64, 128);
    let shares: Vec<u32> = reads(&tail)[0].iter().map(|read| read.1.count()).collect();
    assert_eq!(shares, [16; 4]);
    // Fewer blocks than holders.
    let mut short = latent(16, 1, &[], at(1));
    short.tokens = tokens(0, 12);
    assert_eq!(reads(&short)[0].len(), 3);
}

/// Whoever counts sources or takes sessions by stripes counts none that reads nothing.
#[test]
fn a_stripe_has_a_unit_at_least() {
    let holders = [0, 1, 2].map(TpRank);
    let asker = Asker {
        first_head: 0,
        index: 0,
        consumers: 1,
        mapped: TpRank(0),
    };
    let weighted = |weights: &[u16], units| {
        let chooser = SourceChooser::weighted(TransferId([7; 16]), weights.to_vec());
        stripes(&chooser, &STRIPED, &holders, &asker, units, 1 << 20)
    };
    // The first of three has a share of 1 in 65,537 blocks; and two blocks are two stripes.
    for (weights, units, ranks) in [
        (&[1, u16::MAX, 1][..], 32, vec![1]),
        (&[], 2, vec![0, 1, 2]),
    ] {
        let found = weighted(weights, units);
        assert!(
            found.iter().all(|stripe| stripe.first < stripe.past_last),
            "{found:?}"
        );
        assert!(found.len() <= units as usize, "{found:?}");
        let read: Vec<u32> = found.iter().map(|stripe| stripe.tp_rank.0).collect();
        assert!(read.iter().all(|rank| ranks.contains(rank)), "{found:?}");
        let count: u32 = found
            .iter()
            .map(|stripe| stripe.past_last - stripe.first)
            .sum();
        assert_eq!(count, units);
    }
}
