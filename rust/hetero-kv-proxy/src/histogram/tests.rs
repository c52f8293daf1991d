use std::time::Duration;

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

use super::{Durations, GAPS_KEPT_MAX, Gaps};

fn text_of(histogram: &Durations) -> String {
    let mut registry = Registry::default();
    registry.register("d", "A duration", histogram.clone());
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("a string");
    text
}

#[test]
fn a_duration_counts_below_its_bound_and_in_the_sum() {
    let histogram = Durations::parts();
    for millis in [1, 5, 6, 299_000, 301_000] {
        histogram.observe(Duration::from_millis(millis));
    }
    let text = text_of(&histogram);
    for line in [
        "# TYPE d histogram",
        "d_sum 600.012",
        "d_count 5",
        // 1 ms and 5 ms: a bound belongs to its bucket.
        "d_bucket{le=\"0.005\"} 2",
        "d_bucket{le=\"0.01\"} 3",
        "d_bucket{le=\"60.0\"} 3",
        "d_bucket{le=\"300.0\"} 4",
        "d_bucket{le=\"+Inf\"} 5",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
}

#[test]
fn gaps_kept_and_counted_together_are_as_gaps_counted_one_by_one() {
    let millis = [0, 1, 2, 19, 20, 21, 300, 60_000];
    let (one_by_one, together) = (Durations::gaps(), Durations::gaps());
    let mut gaps = Gaps::default();
    for took in millis.map(Duration::from_millis) {
        one_by_one.observe(took);
        assert!(!gaps.keep(took));
    }
    assert!(text_of(&together).contains("d_count 0"));
    gaps.count_in(&together);
    assert_eq!(text_of(&together), text_of(&one_by_one));
    // What was counted is not counted again.
    gaps.count_in(&together);
    assert_eq!(text_of(&together), text_of(&one_by_one));
    let told = (1..=GAPS_KEPT_MAX).filter(|_| gaps.keep(Duration::ZERO));
    assert_eq!(told.last(), Some(GAPS_KEPT_MAX));
}
