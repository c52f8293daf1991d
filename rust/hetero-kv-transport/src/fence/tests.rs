use hetero_kv_core::ids::{Epoch, Slot};

use super::*;

const PAGE: AnnouncedPage = AnnouncedPage {
    nonce: 0xfeed,
    slots: 4,
};

fn lease(slot: u32, epoch: u64) -> LeaseRef {
    LeaseRef {
        slot: Slot(slot),
        epoch: Epoch(epoch),
    }
}

fn kind(outcome: Result<(), TransportError>) -> Option<ReadFailureKind> {
    outcome.err().map(|error| error.kind)
}

#[test]
fn only_the_announced_page_at_the_leases_epoch_lets_bytes_count() {
    assert_eq!(kind(PAGE.check_lease(lease(3, 7), 0xfeed, 7)), None);
    let gone = Some(ReadFailureKind::LeaseGone);
    for epoch in [0, 6, 8, u64::MAX] {
        assert_eq!(kind(PAGE.check_lease(lease(3, 7), 0xfeed, epoch)), gone);
    }
    let other = Some(ReadFailureKind::Incarnation);
    for nonce in [0, 0xfeee, u64::MAX] {
        assert_eq!(kind(PAGE.check_lease(lease(3, 7), nonce, 7)), other);
        assert_eq!(kind(PAGE.check_nonce(nonce)), other);
    }
    assert_eq!(kind(PAGE.check_nonce(0xfeed)), None);
}

#[test]
fn a_slot_that_the_page_does_not_have_is_never_read() {
    let last = PAGE.offset_bytes(lease(3, 1)).expect("on the page");
    assert_eq!(last, slot_offset_bytes(Slot(3)));
    for slot in [4, u32::MAX] {
        let error = PAGE.offset_bytes(lease(slot, 1)).expect_err("not on it");
        assert_eq!(error.kind, ReadFailureKind::LeaseGone);
        assert!(error.problem.contains(&format!("slot {slot}")), "{error}");
        assert!(error.problem.contains("4 slots"), "{error}");
    }
}
