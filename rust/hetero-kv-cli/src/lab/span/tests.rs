use std::time::Duration;

use super::{SPANS_MAX, Span, Union};

fn union(spans: &[(u64, u64)]) -> u64 {
    let mut union = Union::default();
    for (begin_ns, end_ns) in spans {
        union.add(Span {
            begin_ns: *begin_ns,
            end_ns: *end_ns,
        });
    }
    let total = union.total();
    u64::try_from(total.as_nanos()).expect("short")
}

#[test]
fn time_counts_once_however_many_reads_are_under_way() {
    assert_eq!(union(&[]), 0);
    assert_eq!(union(&[(5, 5)]), 0);
    assert_eq!(union(&[(10, 20)]), 10);
    // Apart, touching, overlapping, inside, around, the same.
    assert_eq!(union(&[(10, 20), (30, 40)]), 20);
    assert_eq!(union(&[(10, 20), (20, 40)]), 30);
    assert_eq!(union(&[(10, 20), (15, 40)]), 30);
    assert_eq!(union(&[(10, 40), (15, 20)]), 30);
    assert_eq!(union(&[(15, 20), (10, 40)]), 30);
    assert_eq!(union(&[(10, 20), (10, 20)]), 10);
    // The last one bridges three.
    assert_eq!(union(&[(30, 40), (10, 20), (50, 60), (15, 55)]), 50);
}

/// Against a clock that looks at each nanosecond.
#[test]
fn any_order_gives_the_same() {
    let mut state = 1_u64;
    let mut draw = |below: u64| {
        state = super::super::model::mix(state);
        state % below
    };
    for _ in 0..200 {
        let spans: Vec<(u64, u64)> = (0..draw(12))
            .map(|_| {
                let begin = draw(60);
                (begin, begin + draw(15))
            })
            .collect();
        let covered = |at: &u64| spans.iter().any(|(begin, end)| begin <= at && at < end);
        let expected = (0..80).filter(covered).count() as u64;
        assert_eq!(union(&spans), expected, "{spans:?}");
    }
}

#[test]
fn a_long_run_keeps_few_spans_and_every_nanosecond() {
    let mut union = Union::default();
    let count = SPANS_MAX as u64 + 1000;
    for nth in 0..count {
        union.add(Span {
            begin_ns: nth * 10,
            end_ns: nth * 10 + 4,
        });
    }
    assert_eq!(union.spans.len(), SPANS_MAX);
    assert_eq!(union.total(), Duration::from_nanos(4 * count));
    // What lies before is counted already.
    union.add(Span {
        begin_ns: 0,
        end_ns: 4,
    });
    assert_eq!(union.total(), Duration::from_nanos(4 * count));
}
