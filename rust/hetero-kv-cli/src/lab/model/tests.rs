use std::collections::{BTreeMap, BTreeSet};

use hetero_kv_core::plan::KvShape;

use super::{Geometry, Model, Order, WORD_BYTES, word};
use crate::lab::ipc::Prompt;

fn model(kv: &str, order: Order) -> Model {
    let kv: KvShape = kv.parse().expect("a KV layout");
    Model::new(kv, 3, 4, 2, order)
}

/// The same token of the same head has the same bytes wherever it lies, and no other has them.
#[test]
fn bytes_say_where_they_belong_and_not_where_they_lie() {
    let model = model("gqa:4:8", Order::Mixed);
    let content = Prompt { salt: 9, tokens: 8 }.content();
    let mut keys: BTreeMap<u64, usize> = BTreeMap::new();
    for (prefill, tp_size) in [(true, 1), (true, 4), (false, 2), (false, 8)] {
        let mut seen = BTreeSet::new();
        for tp in 0..tp_size {
            let geometry = Geometry::new(&model, prefill, (tp_size, tp), (1, 0), 6).expect("fits");
            let rows: Vec<(usize, u64)> = geometry.rows(5, content, 4).collect();
            let starts: BTreeSet<usize> = rows.iter().map(|(at, _)| *at).collect();
            assert_eq!(starts.len(), rows.len(), "no two rows share a place");
            assert_eq!(
                rows.len() * geometry.row_words() * WORD_BYTES as usize,
                geometry.block_bytes() as usize
            );
            seen.extend(rows.iter().map(|(_, key)| *key));
        }
        for key in seen {
            *keys.entry(key).or_default() += 1;
        }
    }
    // 3 layers, key and value, 4 heads, 4 tokens; every shape has all of them.
    assert_eq!(keys.len(), 3 * 2 * 4 * 4);
    assert!(keys.values().all(|shapes| *shapes == 4));
}

#[test]
fn other_prompts_and_positions_have_other_bytes() {
    let model = model("mla:16", Order::Hnd);
    let geometry = Geometry::new(&model, true, (2, 1), (1, 0), 2).expect("fits");
    let words = |salt, first_token| -> BTreeSet<u64> {
        let content = Prompt { salt, tokens: 8 }.content();
        geometry
            .rows(0, content, first_token)
            .flat_map(|(_, key)| (0..geometry.row_words()).map(move |nth| word(key, nth)))
            .collect()
    };
    let base = words(1, 0);
    assert_eq!(base.len(), 3 * 4 * 4, "every word is its own");
    for other in [words(2, 0), words(1, 4)] {
        assert!(base.is_disjoint(&other));
    }
}

/// Stages of a pipeline have the layers of the model between them.
#[test]
fn stages_share_out_the_layers() {
    let model = model("mla:16", Order::Hnd);
    let mut names = Vec::new();
    for stage in 0..2 {
        let geometry = Geometry::new(&model, true, (1, 0), (2, stage), 2).expect("fits");
        names.extend(geometry.layers().into_iter().map(|layer| layer.name));
    }
    let whole = Geometry::new(&model, true, (1, 0), (1, 0), 2).expect("fits");
    let all: Vec<String> = whole.layers().into_iter().map(|layer| layer.name).collect();
    assert_eq!(names, all);
    assert!(Geometry::new(&model, true, (1, 0), (2, 2), 2).is_err());
    assert!(Geometry::new(&model, true, (1, 0), (4, 0), 2).is_err());
}
