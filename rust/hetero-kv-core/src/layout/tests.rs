use std::num::NonZeroU32;

use super::*;
use crate::ids::TpRank;
use crate::memory::MemoryRegion;

mod tokens;

fn grouped(total: u32) -> KvHeads {
    KvHeads::Grouped(NonZeroU32::new(total).expect("test tables hold no 0"))
}

#[test]
fn heads_are_shared_out_or_replicated_from_the_total() {
    type Ranges = &'static [(u32, u32)];
    // (heads in all, tp): the ranges of ranks 0, 1, ...
    let table: &[(u32, u32, Ranges)] = &[
        (4, 1, &[(0, 4)]),
        (4, 2, &[(0, 2), (2, 4)]),
        (4, 4, &[(0, 1), (1, 2), (2, 3), (3, 4)]),
        // 2 heads on 4 ranks: counting per rank would find 4 heads.
        (2, 4, &[(0, 1), (0, 1), (1, 2), (1, 2)]),
        (3, 6, &[(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]),
        (6, 3, &[(0, 2), (2, 4), (4, 6)]),
        (1, 3, &[(0, 1), (0, 1), (0, 1)]),
    ];
    for &(heads, tp_size, ranges) in table {
        for (tp_rank, &(first, past_last)) in (0..).map(TpRank).zip(ranges) {
            assert_eq!(
                owned_heads(grouped(heads), tp_size, tp_rank),
                Ok(HeadRange { first, past_last }),
                "heads {heads}, tp {tp_size}, rank {tp_rank}"
            );
        }
        assert_eq!(
            owned_heads(grouped(heads), tp_size, TpRank(tp_size)),
            Err(LayoutError::TpRank {
                tp_rank: TpRank(tp_size),
                tp_size
            })
        );
    }
    for tp_rank in (0..8).map(TpRank) {
        let latent = HeadRange {
            first: 0,
            past_last: 1,
        };
        assert_eq!(owned_heads(KvHeads::Latent, 8, tp_rank), Ok(latent));
    }
}

#[test]
fn an_indivisible_cut_names_both_numbers() {
    let refused = owned_heads(grouped(6), 4, TpRank(0)).expect_err("4 ranks, 6 heads");
    assert_eq!(
        refused.to_string(),
        "tp_size 4 and kv_heads 6: one must divide the other"
    );
    assert_eq!(
        owned_heads(grouped(6), 0, TpRank(0)),
        Err(LayoutError::TpSize(0))
    );
    assert_eq!(
        owned_heads(grouped(2048), 2048, TpRank(0)),
        Err(LayoutError::TpSize(2048))
    );
}

/// vLLM 0.32's CPU cache of a 2-head Llama rank: `(blocks, heads, 128, 2 * 64)` in float32.
fn part() -> Part {
    Part {
        offset_bytes: 64,
        block_stride_bytes: 131_072,
        head_stride_bytes: 65_536,
        rows: 1,
        row_stride_bytes: 65_536,
        row_bytes: 65_536,
        block_tokens: 0,
    }
}

fn cache(part: Part, region_bytes: u64) -> Result<RankCache, CacheError> {
    cache_at(0x7000_0000, part, region_bytes)
}

fn cache_at(base: u64, part: Part, region_bytes: u64) -> Result<RankCache, CacheError> {
    RankCache::new(
        4,
        2,
        vec![MemoryRegion {
            base,
            bytes: region_bytes,
        }],
        vec![LayerCache {
            name: "model.layers.0.self_attn.attn".into(),
            region: 0,
            parts: vec![part],
            group: 0,
        }],
    )
}

#[test]
fn the_last_byte_must_be_inside_and_no_further() {
    let end = 64 + 3 * 131_072 + 65_536 + 65_536;
    let whole = cache(part(), end).expect("exactly fits");
    assert_eq!(whole.block_bytes(), 2 * 65_536);
    let refused = cache(part(), end - 1).expect_err("one byte short");
    assert_eq!(
        refused.to_string(),
        format!(
            "layer \"model.layers.0.self_attn.attn\" part 0 ends at byte {end} of a region of {}",
            end - 1
        )
    );
}

#[test]
fn any_order_of_axes_is_a_layout_and_overlap_is_not() {
    let nhd = Part {
        offset_bytes: 3,
        block_stride_bytes: 1000,
        head_stride_bytes: 16,
        rows: 4,
        row_stride_bytes: 40,
        row_bytes: 16,
        block_tokens: 0,
    };
    cache(nhd, 4096).expect("rows outside heads");
    let head_outermost = Part {
        head_stride_bytes: 100_000,
        ..nhd
    };
    cache(head_outermost, 1 << 20).expect("heads outside blocks");
    for (axis, overlapping) in [
        (
            StridedAxis::Head,
            Part {
                head_stride_bytes: 15,
                ..nhd
            },
        ),
        (
            StridedAxis::Row,
            Part {
                row_stride_bytes: 31,
                ..nhd
            },
        ),
        (
            StridedAxis::Block,
            Part {
                block_stride_bytes: 151,
                ..nhd
            },
        ),
    ] {
        match cache(overlapping, 1 << 20) {
            Err(CacheError::Overlap { axis: found, .. }) => assert_eq!(found, axis),
            other => panic!("{axis}: {other:?}"),
        }
    }
}

#[test]
fn hostile_numbers_are_refused_without_arithmetic_faults() {
    let huge = u64::MAX;
    let out_of_bounds = |part| {
        assert!(
            matches!(cache(part, 1 << 30), Err(CacheError::OutOfBounds { .. })),
            "{part:?}"
        );
    };
    out_of_bounds(Part {
        offset_bytes: huge,
        ..part()
    });
    out_of_bounds(Part {
        block_stride_bytes: huge,
        ..part()
    });
    out_of_bounds(Part {
        head_stride_bytes: huge,
        block_stride_bytes: 70_000,
        ..part()
    });
    let wide = Part {
        row_bytes: huge,
        ..part()
    };
    assert!(matches!(
        cache(wide, 1 << 30),
        Err(CacheError::Overlap { .. })
    ));
    for (field, empty) in [
        ("rows", Part { rows: 0, ..part() }),
        (
            "row_bytes",
            Part {
                row_bytes: 0,
                ..part()
            },
        ),
    ] {
        match cache(empty, 1 << 30) {
            Err(CacheError::EmptyPart { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
    }
    for (base, bytes) in [(0x1000, 0), (0x1000, huge), (huge, 1 << 30)] {
        assert!(
            matches!(
                cache_at(base, part(), bytes),
                Err(CacheError::Region { .. })
            ),
            "{bytes} bytes at {base}"
        );
    }
}

fn layer(name: &str) -> LayerCache {
    LayerCache {
        name: name.into(),
        region: 0,
        parts: vec![part()],
        group: 0,
    }
}

#[test]
fn counts_names_and_regions_are_bounded() {
    let memory = MemoryRegion {
        base: 0x1000,
        bytes: 1 << 30,
    };
    let build = |blocks, heads, regions: usize, layers| {
        RankCache::new(blocks, heads, vec![memory; regions], layers)
    };
    let one = || vec![layer("a")];
    build(4, 2, 1, one()).expect("the valid one");
    for (field, refused) in [
        ("num_blocks", build(0, 2, 1, one())),
        ("num_blocks", build(NUM_BLOCKS_MAX + 1, 2, 1, one())),
        ("heads_held", build(4, 0, 1, one())),
        ("heads_held", build(4, HEADS_MAX + 1, 1, one())),
        ("regions", build(4, 2, 0, one())),
        ("regions", build(4, 2, REGIONS_MAX + 1, one())),
        ("layers", build(4, 2, 1, vec![])),
        (
            "layers",
            build(
                4,
                2,
                1,
                (0..=LAYERS_MAX).map(|i| layer(&i.to_string())).collect(),
            ),
        ),
        (
            "parts",
            build(
                4,
                2,
                1,
                vec![LayerCache {
                    parts: vec![part(); PARTS_MAX + 1],
                    ..layer("a")
                }],
            ),
        ),
    ] {
        match refused {
            Err(CacheError::Count { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
    }
    for name in ["", "a\nb", &"x".repeat(LAYER_NAME_BYTES_MAX + 1)] {
        assert_eq!(
            build(4, 2, 1, vec![layer("a"), layer(name)]),
            Err(CacheError::LayerName { index: 1 })
        );
    }
    assert_eq!(
        build(4, 2, 1, vec![layer("a"), layer("a")]),
        Err(CacheError::DuplicateLayer { layer: "a".into() })
    );
    let elsewhere = LayerCache {
        region: 1,
        ..layer("a")
    };
    assert_eq!(
        build(4, 2, 1, vec![elsewhere]),
        Err(CacheError::NoSuchRegion {
            layer: "a".into(),
            region: 1,
            regions: 1
        })
    );
}

#[test]
fn a_peer_cannot_send_an_invalid_cache() {
    let valid = cache(part(), 1 << 20).expect("fits");
    let bytes = rmp_serde::to_vec_named(&valid).expect("plain numbers");
    assert_eq!(
        rmp_serde::from_slice::<RankCache>(&bytes).expect("what we sent"),
        valid
    );
    let mut tampered: serde_json::Value = serde_json::to_value(&valid).expect("plain numbers");
    tampered["num_blocks"] = 1_000_000.into();
    let refused = serde_json::from_value::<RankCache>(tampered).expect_err("beyond its region");
    assert!(
        refused.to_string().contains("ends at byte"),
        "unexpected: {refused}"
    );
}

fn fields(pairs: &[(&str, &str)]) -> CompatFields {
    let mut fields = CompatFields::new();
    for (name, value) in pairs {
        fields.insert(name, value).expect("in bounds");
    }
    fields
}

#[test]
fn digests_are_equal_exactly_when_no_field_differs() {
    let ours = fields(&[("model", "m"), ("kv_heads", "4"), ("mla", "false")]);
    let same = fields(&[("mla", "false"), ("kv_heads", "4"), ("model", "m")]);
    assert_eq!(ours.digest(), same.digest());
    assert_eq!(ours.difference(&same), []);

    let theirs = fields(&[("model", "m"), ("kv_heads", "8"), ("revision", "r")]);
    assert_ne!(ours.digest(), theirs.digest());
    let shown: Vec<String> = ours
        .difference(&theirs)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        shown,
        [
            "kv_heads: ours 4, theirs 8",
            "mla: ours false, theirs (not stated)",
            "revision: ours (not stated), theirs r",
        ]
    );
}

#[test]
fn the_digest_is_a_wire_constant_and_texts_cannot_shift() {
    // The same bytes in other fields: only the lengths tell them apart.
    assert_ne!(
        fields(&[("a", "bc")]).digest(),
        fields(&[("ab", "c")]).digest()
    );
    assert_ne!(
        fields(&[("a", "")]).digest(),
        fields(&[("a", ""), ("b", "")]).digest()
    );
    // Taken from another SHA-256 over the three texts with their lengths.
    assert_eq!(
        hex::encode(fields(&[("model", "m")]).digest()),
        "2406f57756e5f90201d9d78e112855fcc3f0e71534371c7093e45c2004f3f5dd"
    );
}

#[test]
fn compat_fields_are_bounded() {
    let mut some = CompatFields::new();
    for name in ["", "Model", "a b", &"a".repeat(COMPAT_NAME_BYTES_MAX + 1)] {
        assert_eq!(some.insert(name, "x"), Err(CompatError::Name));
    }
    let long = "x".repeat(COMPAT_VALUE_BYTES_MAX + 1);
    assert_eq!(
        some.insert("model", &long),
        Err(CompatError::Value {
            field: "model".into(),
            bytes: long.len()
        })
    );
    some.insert("model", "x").expect("in bounds");
    assert_eq!(
        some.insert("model", "y"),
        Err(CompatError::Duplicate {
            field: "model".into()
        })
    );
    for index in 1..COMPAT_FIELDS_MAX {
        some.insert(&format!("f{index}"), index).expect("in bounds");
    }
    assert_eq!(some.insert("one_more", "x"), Err(CompatError::TooMany));

    let json = serde_json::to_string(&some).expect("plain texts");
    assert_eq!(
        serde_json::from_str::<CompatFields>(&json).expect("what we wrote"),
        some
    );
    let hostile = serde_json::json!({ "model": long }).to_string();
    assert!(serde_json::from_str::<CompatFields>(&hostile).is_err());
}
