//! Tokens inside blocks, groups, and memory that two regions would share.

use super::{cache, part};
use crate::layout::{
    BLOCK_TOKENS_MAX, CacheError, GROUPS_MAX, GroupError, KvGroup, LayerCache, Part, RankCache,
    group_kinds,
};
use crate::memory::MemoryRegion;

/// 16 tokens of 24 bytes in 2 heads, token before head.
fn rows() -> Part {
    Part {
        offset_bytes: 0,
        block_stride_bytes: 1024,
        head_stride_bytes: 24,
        rows: 16,
        row_stride_bytes: 64,
        row_bytes: 24,
        block_tokens: 16,
    }
}

/// The same tokens one after another.
fn joined() -> Part {
    Part {
        head_stride_bytes: 400,
        rows: 1,
        row_stride_bytes: 400,
        row_bytes: 16 * 24,
        ..rows()
    }
}

#[test]
fn a_row_per_token_and_all_in_one_row_are_the_same_tokens() {
    for (part, stride) in [(rows(), 64), (joined(), 24)] {
        cache(part, 4096).expect("fits");
        assert_eq!(part.token_bytes(), Some(24));
        assert_eq!(part.token_stride_bytes(), Some(stride));
        assert_eq!(part.head_bytes(), 384);
    }
    let opaque = Part {
        block_tokens: 0,
        ..rows()
    };
    assert_eq!(
        (opaque.token_bytes(), opaque.token_stride_bytes()),
        (None, None)
    );
    // One token in one row is both.
    let single = Part {
        rows: 1,
        block_tokens: 1,
        ..rows()
    };
    cache(single, 4096).expect("fits");
    assert_eq!(single.token_bytes(), Some(24));
}

#[test]
fn rows_that_are_not_tokens_are_refused() {
    for (wrong, text) in [
        (
            Part {
                block_tokens: 8,
                ..rows()
            },
            "block_tokens 8 (at most 65536) fit neither rows 16 nor one row of 24 bytes",
        ),
        (
            Part {
                block_tokens: 7,
                ..joined()
            },
            "block_tokens 7 (at most 65536) fit neither rows 1 nor one row of 384 bytes",
        ),
        (
            Part {
                block_tokens: BLOCK_TOKENS_MAX + 1,
                row_bytes: u64::from(BLOCK_TOKENS_MAX) + 1,
                ..joined()
            },
            "block_tokens 65537 (at most 65536) fit neither rows 1 nor one row of 65537 bytes",
        ),
    ] {
        let error = cache(wrong, 1 << 20).expect_err("not tokens").to_string();
        assert_eq!(
            error,
            format!("layer \"model.layers.0.self_attn.attn\" part 0: {text}")
        );
    }
    let most = Part {
        block_stride_bytes: 1 << 20,
        head_stride_bytes: 1 << 17,
        row_bytes: u64::from(BLOCK_TOKENS_MAX),
        block_tokens: BLOCK_TOKENS_MAX,
        ..joined()
    };
    cache(most, 1 << 23).expect("at the limit");
}

fn of_parts(parts: Vec<Part>, group: u32) -> Result<RankCache, CacheError> {
    RankCache::new(
        2,
        2,
        vec![MemoryRegion {
            base: 0x1000,
            bytes: 1 << 16,
        }],
        vec![LayerCache {
            name: "a".into(),
            region: 0,
            parts,
            group,
        }],
    )
}

#[test]
fn the_parts_of_a_layer_have_the_same_tokens() {
    let behind = |part: Part| Part {
        offset_bytes: 8192,
        ..part
    };
    let both = of_parts(vec![rows(), behind(joined())], 0).expect("16 tokens both");
    assert_eq!(both.layers()[0].block_tokens(), Some(16));
    for (tokens, first) in [(0, 16), (16, 0)] {
        let one = Part {
            block_tokens: first,
            ..rows()
        };
        let other = behind(Part {
            block_tokens: tokens,
            ..rows()
        });
        assert_eq!(
            of_parts(vec![one, other], 0),
            Err(CacheError::UnlikeBlockTokens {
                layer: "a".into(),
                part: 1,
                first,
                other: tokens,
            })
        );
    }
    let opaque = of_parts(vec![part()], 0);
    assert!(matches!(opaque, Err(CacheError::OutOfBounds { .. })));
}

#[test]
fn groups_are_bounded_and_kinds_that_cannot_be_moved_are_named() {
    of_parts(vec![rows()], GROUPS_MAX - 1).expect("the last group");
    assert_eq!(
        of_parts(vec![rows()], GROUPS_MAX),
        Err(CacheError::Group {
            layer: "a".into(),
            group: GROUPS_MAX
        })
    );
    let group = |name, kind| KvGroup { name, kind };
    assert_eq!(
        group_kinds(&[
            group("model.layers.0", "full_attention"),
            group("model.layers.1", "mla_attention")
        ]),
        Ok("full_attention,mla_attention".to_owned())
    );
    assert_eq!(
        group_kinds(&[
            group("model.layers.0", "full_attention"),
            group("model.layers.1", "sliding_window")
        ])
        .expect_err("a window")
        .to_string(),
        "group_kinds: group 1 (\"model.layers.1\") is \"sliding_window\"; only full_attention and \
         mla_attention can be moved"
    );
    assert_eq!(group_kinds(&[]), Err(GroupError::Count(0)));
    let many = vec![group("a", "full_attention"); GROUPS_MAX as usize + 1];
    assert_eq!(group_kinds(&many), Err(GroupError::Count(65)));
    assert!(group_kinds(&many[1..]).is_ok());
    let long = "x".repeat(100_000);
    let text = group_kinds(&[group(&long, &long)])
        .expect_err("no kind")
        .to_string();
    assert!(text.len() < 600, "{} bytes", text.len());
}

#[test]
fn regions_that_share_a_byte_are_refused() {
    let build = |regions: Vec<MemoryRegion>| {
        let layers = vec![LayerCache {
            name: "a".into(),
            region: 0,
            parts: vec![rows()],
            group: 0,
        }];
        RankCache::new(1, 1, regions, layers)
    };
    let region = |base, bytes| MemoryRegion { base, bytes };
    let last = u64::MAX - 0x1000;
    build(vec![
        region(0x9000, 0x1000),
        region(0x8000, 0x1000),
        region(last, 0x1000),
    ])
    .expect("side by side");
    assert_eq!(
        build(vec![region(0x9000, 0x1000), region(0x8000, 0x1001)]).map_err(|e| e.to_string()),
        Err("regions 1 and 0 overlap: one ends at 0x9001, the other begins at 0x9000".to_owned())
    );
    assert!(matches!(
        build(vec![region(0x9000, 0x1000); 2]),
        Err(CacheError::RegionsOverlap { .. })
    ));
}

#[test]
fn tokens_and_groups_travel_and_their_absence_is_what_it_was() {
    let with = of_parts(
        vec![
            rows(),
            Part {
                offset_bytes: 8192,
                ..joined()
            },
        ],
        3,
    )
    .expect("fits");
    let without = of_parts(
        vec![Part {
            block_tokens: 0,
            ..rows()
        }],
        0,
    )
    .expect("fits");
    for cache in [&with, &without] {
        // As between the processes of an engine, by position, and as between engines, by name.
        let by_place = rmp_serde::to_vec(cache).expect("plain numbers");
        assert_eq!(
            &rmp_serde::from_slice::<RankCache>(&by_place).expect("valid"),
            cache
        );
        let by_name = rmp_serde::to_vec_named(cache).expect("plain numbers");
        assert_eq!(
            &rmp_serde::from_slice::<RankCache>(&by_name).expect("valid"),
            cache
        );
    }
    let json = serde_json::to_string(&without).expect("plain numbers");
    assert!(
        !json.contains("block_tokens") && !json.contains("group"),
        "{json}"
    );
    let json = serde_json::to_string(&with).expect("plain numbers");
    assert!(
        json.contains("\"block_tokens\":16") && json.contains("\"group\":3"),
        "{json}"
    );
}
