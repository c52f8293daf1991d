#![allow(unsafe_code)]

use std::sync::Arc;

use super::*;

const LIMITS: RequestLimits = RequestLimits {
    pieces_max: 4,
    bytes_max: 1 << 20,
};

fn source() -> Vec<MemoryRegion> {
    vec![
        MemoryRegion {
            base: 0x10_0000,
            bytes: 1 << 24,
        },
        MemoryRegion {
            base: 0x10_0000 + (1 << 24),
            bytes: 1 << 16,
        },
    ]
}

fn memory() -> Arc<LocalMemory> {
    let region = |base, bytes| MemoryRegion { base, bytes };
    let regions = vec![region(0x7000_0000, 1 << 24), region(0x7100_0000, 1 << 16)];
    // SAFETY: nothing in these tests reads or writes at these addresses.
    Arc::new(unsafe { LocalMemory::new(regions) }.expect("in the address space"))
}

fn run(source: (u32, u64), dest: (u32, u64), bytes: u64) -> Run {
    Run {
        source_region: source.0,
        source_offset: source.1,
        dest_region: dest.0,
        dest_offset: dest.1,
        bytes,
    }
}

/// Byte by byte: (region, address at the source) and (region, address here), in order.
fn bytes_of_list(list: &ReadList) -> Vec<((u32, u64), (u32, u64))> {
    let mut pieces = list.pieces.iter();
    let mut found = Vec::new();
    for request in &list.requests {
        let mut from = request.source_address;
        for piece in pieces.by_ref().take(request.pieces_count) {
            for at in 0..u64::from(piece.bytes) {
                found.push((
                    (request.source_region, from),
                    (piece.region, piece.address + at),
                ));
                from += 1;
            }
        }
        assert_eq!(from - request.source_address, u64::from(request.bytes));
    }
    assert_eq!(pieces.next(), None, "every piece is of a request");
    found
}

fn bytes_of_runs(runs: &[Run]) -> Vec<((u32, u64), (u32, u64))> {
    let (source, memory) = (source(), memory());
    runs.iter()
        .flat_map(|run| {
            let from = source[run.source_region as usize].base + run.source_offset;
            let to = memory.regions()[run.dest_region as usize].base + run.dest_offset;
            (0..run.bytes)
                .map(move |at| ((run.source_region, from + at), (run.dest_region, to + at)))
        })
        .collect()
}

fn list(runs: &[Run], limits: RequestLimits) -> ReadList {
    let list = read_list(runs, &source(), &memory(), limits).expect("inside");
    assert_eq!(bytes_of_list(&list), bytes_of_runs(runs));
    for request in &list.requests {
        assert!(request.pieces_count <= limits.pieces_max);
        assert!(request.bytes <= limits.bytes_max && request.bytes > 0);
    }
    list
}

#[test]
fn runs_that_follow_at_the_source_share_requests_up_to_the_limit_of_pieces() {
    // Contiguous at the source, scattered here: 10 runs, 4 pieces a request.
    let runs: Vec<Run> = (0..10)
        .map(|at| run((0, at * 100), (0, (9 - at) * 200), 100))
        .collect();
    let found = list(&runs, LIMITS);
    assert_eq!(found.requests.len(), 3, "ceil(10 / 4)");
    assert_eq!(found.pieces.len(), 10);
    // Scattered at the source: nothing to share.
    let runs: Vec<Run> = (0..10)
        .map(|at| run((0, at * 200), (0, at * 100), 100))
        .collect();
    assert_eq!(list(&runs, LIMITS).requests.len(), 10);
    // Contiguous on both sides: one piece.
    let runs: Vec<Run> = (0..10)
        .map(|at| run((0, at * 100), (0, at * 100), 100))
        .collect();
    let found = list(&runs, LIMITS);
    assert_eq!((found.requests.len(), found.pieces.len()), (1, 1));
}

/// Regions may lie side by side; their keys differ all the same.
#[test]
fn regions_are_never_joined() {
    let end = (1 << 24) - 64;
    let both = [run((0, end), (0, end), 64), run((1, 0), (1, 0), 64)];
    let found = list(&both, LIMITS);
    assert_eq!((found.requests.len(), found.pieces.len()), (2, 2));
    let here = [run((0, 0), (0, end), 64), run((0, 64), (1, 0), 64)];
    let found = list(&here, LIMITS);
    assert_eq!((found.requests.len(), found.pieces.len()), (1, 2));
    let there = [run((0, end), (0, 0), 64), run((1, 0), (0, 64), 64)];
    assert_eq!(list(&there, LIMITS).requests.len(), 2);
}

#[test]
fn no_request_is_larger_than_a_message() {
    let limits = RequestLimits {
        pieces_max: 2,
        bytes_max: 1000,
    };
    assert_eq!(list(&[run((0, 5), (0, 9), 2500)], limits).requests.len(), 3);
    let runs = [run((0, 0), (0, 5000), 700), run((0, 700), (0, 0), 700)];
    let found = list(&runs, limits);
    let bytes: Vec<u32> = found.requests.iter().map(|request| request.bytes).collect();
    assert_eq!(bytes, [1000, 400]);
}

#[test]
fn runs_outside_are_told_by_side() {
    let far = |from, to| read_list(&[run(from, to, 10)], &source(), &memory(), LIMITS);
    assert!(matches!(
        far((0, (1 << 24) - 9), (0, 0)),
        Err(Outside::Source(_))
    ));
    assert!(matches!(far((2, 0), (0, 0)), Err(Outside::Source(_))));
    assert!(matches!(
        far((0, 0), (1, (1 << 16) - 9)),
        Err(Outside::Destination(_))
    ));
    assert!(matches!(
        far((0, 0), (0, u64::MAX)),
        Err(Outside::Destination(_))
    ));
}
