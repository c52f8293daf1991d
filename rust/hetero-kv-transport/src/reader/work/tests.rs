use super::*;

fn run(source_offset: u64, dest_offset: u64, bytes: u64) -> Run {
    Run {
        source_region: 0,
        source_offset,
        dest_region: 0,
        dest_offset,
        bytes,
    }
}

#[test]
fn runs_that_follow_on_both_sides_are_merged_and_no_others() {
    let other_region = Run {
        dest_region: 1,
        ..run(40, 140, 5)
    };
    let runs = [
        run(0, 100, 10),
        run(10, 110, 20),
        run(30, 140, 10),
        run(50, 150, 4),
        other_region,
    ];
    assert_eq!(
        merge(&runs),
        [
            run(0, 100, 30),
            run(30, 140, 10),
            run(50, 150, 4),
            other_region
        ]
    );
}

#[test]
fn long_runs_are_cut_to_what_a_fetch_takes() {
    let long = run(7, 9, 2 * FETCH_BYTES_MAX + 3);
    assert_eq!(
        cut(&[run(0, 0, 5), long]),
        [
            run(0, 0, 5),
            run(7, 9, FETCH_BYTES_MAX),
            run(7 + FETCH_BYTES_MAX, 9 + FETCH_BYTES_MAX, FETCH_BYTES_MAX),
            run(7 + 2 * FETCH_BYTES_MAX, 9 + 2 * FETCH_BYTES_MAX, 3),
        ]
    );
}
