use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;

fn lease(slot: u32, epoch: u64) -> LeaseRef {
    LeaseRef {
        slot: Slot(slot),
        epoch: Epoch(epoch),
    }
}

#[test]
fn a_new_page_holds_every_first_epoch() {
    let page = LeasePage::new(300).expect("mapped");
    assert_ne!(page.nonce(), 0);
    for slot in 0..300 {
        assert!(page.holds(lease(slot, FIRST_EPOCH.0)));
        assert!(!page.holds(lease(slot, FIRST_EPOCH.0 + 1)));
    }
    assert_eq!(page.epoch(Slot(300)), None);
    assert!(!page.holds(lease(300, FIRST_EPOCH.0)));
    assert_eq!(
        page.bump(Slot(300), Epoch(5)),
        Err(NoSuchSlot {
            slot: Slot(300),
            slots: 300
        })
    );
}

#[test]
fn two_pages_differ_in_their_nonce() {
    let pages = [(); 2].map(|()| LeasePage::new(1).expect("mapped"));
    assert_ne!(pages[0].nonce(), pages[1].nonce());
}

#[test]
fn an_epoch_never_falls() {
    let page = LeasePage::new(2).expect("mapped");
    assert_eq!(page.bump(Slot(1), Epoch(9)), Ok(true));
    assert_eq!(page.bump(Slot(1), Epoch(4)), Ok(false));
    assert_eq!(page.bump(Slot(1), Epoch(9)), Ok(false));
    assert_eq!(page.epoch(Slot(1)), Some(Epoch(9)));
    assert_eq!(page.epoch(Slot(0)), Some(FIRST_EPOCH));
}

#[test]
fn the_words_stand_where_the_layout_says() {
    let page = LeasePage::new(4).expect("mapped");
    page.bump(Slot(2), Epoch(77)).expect("on the page");
    let word = |offset_bytes: usize| {
        let address = page.address() as usize + offset_bytes;
        // SAFETY: the layout puts a whole word at each of the offsets used below, inside the page.
        unsafe { ptr::with_exposed_provenance::<u64>(address).read() }
    };
    assert_eq!(word(0), page.nonce());
    assert_eq!(word(8), FIRST_EPOCH.0);
    assert_eq!(word(8 + 2 * 8), 77);
}

/// A holder re-uses a "block" only after the bump; a reader that copies it and then still finds
/// its epoch has copied the bytes of that epoch.
#[test]
fn what_was_copied_under_a_standing_lease_is_of_its_epoch() {
    const ROUNDS: u64 = 200_000;
    let page = LeasePage::new(1).expect("mapped");
    let block = [(); 8].map(|()| AtomicU64::new(FIRST_EPOCH.0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for epoch in FIRST_EPOCH.0 + 1..ROUNDS {
                page.bump(Slot(0), Epoch(epoch)).expect("on the page");
                for word in &block {
                    word.store(epoch, Ordering::Relaxed);
                }
            }
            done.store(true, Ordering::Release);
        });
        while !done.load(Ordering::Acquire) {
            let epoch = page.epoch(Slot(0)).expect("on the page").0;
            let copied = block.each_ref().map(|word| word.load(Ordering::Relaxed));
            if page.holds(lease(0, epoch)) {
                // The block may lag (the holder bumps first and writes later) but never lead.
                assert!(
                    copied.iter().all(|&word| word <= epoch),
                    "{copied:?} under epoch {epoch}"
                );
            }
        }
    });
}
