#![allow(unsafe_code)]

use super::*;

fn regions(pairs: &[(u64, u64)]) -> Vec<MemoryRegion> {
    pairs
        .iter()
        .map(|&(base, bytes)| MemoryRegion { base, bytes })
        .collect()
}

fn register(pairs: &[(u64, u64)]) -> Result<LocalMemory, MemoryError> {
    // SAFETY: these tests only do arithmetic on the regions; nothing reads or writes them.
    unsafe { LocalMemory::new(regions(pairs)) }
}

#[test]
fn regions_outside_the_address_space_are_refused() {
    for bad in [(0, 4096), (4096, 0), (u64::MAX - 10, 20), (1 << 63, 1)] {
        let error = register(&[(4096, 4096), bad]).expect_err("not in the address space");
        assert!(
            matches!(error, MemoryError::NotMapped { index: 1, .. }),
            "{bad:?}: {error}"
        );
    }
    let many = vec![(4096, 1); REGIONS_MAX + 1];
    assert_eq!(
        register(&many).expect_err("too many"),
        MemoryError::TooMany(REGIONS_MAX + 1)
    );
}

#[test]
fn pieces_are_bounded_by_their_region() {
    let memory = register(&[(0x10000, 100), (0x20000, 50)]).expect("two regions");
    let span = memory.span(1, 49, 1).expect("the last byte");
    assert_eq!((span.address, span.bytes), (0x20000 + 49, 1));
    for (region, offset, bytes) in [
        (0, 100, 1),
        (0, 0, 101),
        (1, 40, 11),
        (2, 0, 1),
        (0, 5, 0),
        (0, u64::MAX, 2),
        (0, 2, u64::MAX),
    ] {
        let error = memory
            .span(region, offset, bytes)
            .expect_err("out of bounds");
        assert_eq!(
            (error.region, error.offset, error.bytes),
            (region, offset, bytes)
        );
    }
}

#[test]
fn a_queue_merges_splits_and_advances_by_bytes() {
    let mut queue = SpanQueue::with_capacity(4);
    for (address, bytes) in [(1000, 10), (1010, 5), (2000, 7), (3000, 1)] {
        queue.push(Span { address, bytes });
    }
    assert_eq!(queue.left_bytes(), 23);

    let pieces = |queue: &SpanQueue, spans_max, bytes_max| {
        let mut iovecs = Vec::new();
        let bytes = queue.fill(&mut iovecs, spans_max, bytes_max);
        let pieces: Vec<_> = iovecs
            .iter()
            .map(|iovec| (iovec.iov_base.addr(), iovec.iov_len))
            .collect();
        (bytes, pieces)
    };
    assert_eq!(pieces(&queue, 8, 100).1.len(), 3);
    assert_eq!(pieces(&queue, 2, 100), (22, vec![(1000, 15), (2000, 7)]));
    assert_eq!(pieces(&queue, 8, 16), (16, vec![(1000, 15), (2000, 1)]));

    queue.advance(4);
    assert_eq!(pieces(&queue, 1, 100), (11, vec![(1004, 11)]));
    queue.advance(13);
    assert_eq!(pieces(&queue, 8, 100), (6, vec![(2002, 5), (3000, 1)]));
    queue.advance(6);
    assert_eq!(pieces(&queue, 8, 100), (0, vec![]));
    assert_eq!(queue.left_bytes(), 0);
}
