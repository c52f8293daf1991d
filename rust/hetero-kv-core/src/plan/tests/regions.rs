//! Boxes of KV.

use super::{grouped, plan_of, transfer};
use crate::layout::{HeadRange, KvHeads};
use crate::plan::{
    LayerRange, Pairing, REGIONS_COMPARED_MAX, Region, RegionAxis, RegionError, SourceChooser,
    TokenRange,
};

fn region(tokens: (u32, u32), heads: (u32, u32), layers: (u32, u32)) -> Region {
    Region {
        tokens: TokenRange {
            first: tokens.0,
            past_last: tokens.1,
        },
        heads: HeadRange {
            first: heads.0,
            past_last: heads.1,
        },
        layers: LayerRange {
            first: layers.0,
            past_last: layers.1,
        },
    }
}

#[test]
fn regions_intersect_on_every_axis() {
    let whole = region((0, 100), (0, 8), (0, 61));
    let part = region((50, 200), (6, 10), (60, 70));
    let both = region((50, 100), (6, 8), (60, 61));
    assert_eq!(whole.intersection(&part), both);
    assert_eq!(part.intersection(&whole), both);
    assert_eq!(both.volume(), 100);
    for apart in [
        region((100, 200), (0, 8), (0, 61)),
        region((0, 100), (8, 9), (0, 61)),
        region((0, 100), (0, 8), (61, 62)),
    ] {
        assert!(whole.intersection(&apart).is_empty());
        assert!(apart.intersection(&whole).is_empty());
    }
    // Nothing wraps, also where a region from outside is no region.
    let huge = region((0, u32::MAX), (0, u32::MAX), (0, u32::MAX));
    assert_eq!(huge.volume(), u128::from(u32::MAX).pow(3));
    assert!(region((5, 3), (0, 1), (0, 1)).is_empty());
}

#[test]
fn a_region_is_shown_and_travels() {
    let some = region((16, 48), (2, 3), (0, 61));
    assert_eq!(some.to_string(), "tokens 16..48, head 2, layers 0..61");
    assert_eq!(
        region((5, 3), (0, 1), (4, 5)).to_string(),
        "tokens 5..3, head 0, layer 4"
    );
    let json = serde_json::to_string(&some).expect("plain numbers");
    assert_eq!(
        json,
        "{\"tokens\":{\"first\":16,\"past_last\":48},\"heads\":{\"first\":2,\"past_last\":3},\
         \"layers\":{\"first\":0,\"past_last\":61}}"
    );
    assert_eq!(serde_json::from_str::<Region>(&json).expect("valid"), some);
}

#[test]
fn what_is_no_region_or_does_not_fit_is_named() {
    let whole = region((0, 100), (0, 8), (4, 8));
    assert_eq!(whole.check(), Ok(()));
    for (axis, empty) in [
        (RegionAxis::Tokens, region((3, 3), (0, 1), (0, 1))),
        (RegionAxis::Heads, region((0, 1), (3, 3), (0, 1))),
        (RegionAxis::Layers, region((0, 1), (0, 1), (3, 3))),
    ] {
        assert_eq!(
            empty.check(),
            Err(RegionError::Empty {
                axis,
                first: 3,
                past_last: 3
            })
        );
    }
    let text = |part: Region| {
        part.check_inside(&whole)
            .expect_err("does not fit")
            .to_string()
    };
    assert_eq!(
        text(region((7, 3), (0, 1), (4, 5))),
        "tokens: 7..3 holds nothing"
    );
    assert_eq!(
        text(region((0, 101), (0, 1), (4, 5))),
        "tokens: 0..101 is not inside 0..100"
    );
    assert_eq!(
        text(region((0, 1), (7, 9), (4, 5))),
        "heads: 7..9 is not inside 0..8"
    );
    assert_eq!(
        text(region((0, 1), (0, 1), (3, 5))),
        "layers: 3..5 is not inside 4..8"
    );
    assert_eq!(whole.check_inside(&whole), Ok(()));
}

#[test]
fn a_cover_has_no_gap_and_no_overlap() {
    let whole = region((0, 100), (0, 8), (0, 2));
    let left = region((0, 40), (0, 8), (0, 2));
    let upper = region((40, 100), (0, 4), (0, 2));
    let lower = region((40, 100), (4, 8), (0, 2));
    assert_eq!(whole.check_covered_once(&[lower, left, upper]), Ok(()));
    assert_eq!(
        whole
            .check_covered_once(&[left, upper])
            .expect_err("a gap")
            .to_string(),
        "1120 of 1600 (token, head, layer) of tokens 0..100, heads 0..8, layers 0..2 are covered"
    );
    let twice = region((39, 100), (4, 8), (0, 2));
    assert_eq!(
        whole.check_covered_once(&[left, upper, twice]),
        Err(RegionError::Overlap {
            first: left,
            second: twice
        })
    );
    let outside = region((40, 101), (4, 8), (0, 2));
    assert!(matches!(
        whole.check_covered_once(&[left, upper, outside]),
        Err(RegionError::Outside { .. })
    ));
    assert_eq!(
        whole.check_covered_once(&vec![left; REGIONS_COMPARED_MAX + 1]),
        Err(RegionError::TooMany(REGIONS_COMPARED_MAX + 1))
    );
}

#[test]
fn a_rank_plan_covers_its_heads_once() {
    for (producer, consumer, heads) in [
        (8, 4, grouped(8)),
        (4, 8, grouped(2)),
        (8, 8, KvHeads::Latent),
    ] {
        let pairing = Pairing::new(producer, consumer, heads).expect("divisible");
        for tp_rank in 0..consumer {
            let plan = plan_of(&pairing, tp_rank, &SourceChooser::new(transfer(1)));
            let (tokens, layers) = ((0, 32), (0, 4));
            let whole = region(tokens, (plan.heads.first, plan.heads.past_last), layers);
            let parts = plan.regions(whole.tokens, whole.layers);
            assert_eq!(parts.len(), plan.sources.len());
            assert_eq!(whole.check_covered_once(&parts), Ok(()));
        }
    }
}
