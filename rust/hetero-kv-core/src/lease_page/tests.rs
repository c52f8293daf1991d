use super::*;

/// Other processes, of other builds too, read a page by these offsets.
#[test]
fn a_page_is_its_nonce_and_a_word_for_each_slot() {
    assert_eq!(slot_offset_bytes(Slot(0)), 8);
    assert_eq!(slot_offset_bytes(Slot(1)), 16);
    assert_eq!(slot_offset_bytes(Slot(5)), 48);
    assert_eq!(page_bytes(0), 8);
    assert_eq!(page_bytes(3), 32);
    assert_eq!(page_bytes(LEASE_SLOTS), 8 + (128 << 10));
}
