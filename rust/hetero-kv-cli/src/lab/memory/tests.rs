use hetero_kv_core::plan::KvShape;

use super::{KvMemory, Tag};
use crate::lab::model::{Geometry, Model, Order};

fn memory() -> KvMemory {
    let kv: KvShape = "gqa:2:8".parse().expect("a KV layout");
    let model = Model::new(kv, 2, 4, 2, Order::Nhd);
    let geometry = Geometry::new(&model, true, (1, 0), (1, 0), 5).expect("fits");
    KvMemory::new(geometry, 7)
}

/// 2 layers, key and value, 2 heads, 4 tokens.
const ROWS: u64 = 2 * 2 * 2 * 4;

#[test]
fn a_new_memory_is_known_to_the_last_byte() {
    let memory = memory();
    assert_eq!(memory.sweep(), 0);
    let cache = memory.cache().expect("a cache that the core takes");
    assert_eq!(cache.block_bytes(), ROWS * 16);
    assert_eq!(cache.regions()[0].bytes, 5 * ROWS * 16);
}

#[test]
fn one_changed_byte_of_each_row_is_counted() {
    let mut memory = memory();
    memory.fill(3, 11, 0);
    memory.corrupt(3);
    assert_eq!(memory.differences(3), ROWS);
    assert_eq!(memory.sweep(), ROWS);
    memory.tag(3, Tag::Unknown);
    assert_eq!(memory.sweep(), 0, "nothing is expected there");
}

#[test]
fn other_tokens_and_other_prompts_are_not_taken_for_right() {
    let mut memory = memory();
    memory.fill(1, 11, 2);
    assert_eq!(memory.expect(1, 11, 2), 0);
    let bytes = ROWS * 16;
    for wrong in [memory.expect(1, 11, 1), memory.expect(1, 12, 2)] {
        // One byte in 256 is equal by chance.
        assert!(wrong > bytes * 9 / 10, "{wrong} of {bytes}");
    }
}

#[test]
fn a_reset_block_holds_no_prompt() {
    let mut memory = memory();
    memory.fill(2, 11, 0);
    memory.reset(2);
    assert_eq!(memory.differences(2), 0);
    assert!(memory.expect(2, 11, 0) > 0);
}
