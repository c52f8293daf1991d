//! Values against their exact quantiles.

use super::*;

#[test]
fn quantiles_are_within_a_percent_from_microseconds_to_hours() {
    for scale in [1_u64, 1_000, 1_000_000, 3_600_000_000] {
        let mut histogram = Histogram::default();
        for value in 1..=1_000 {
            histogram.add(Duration::from_micros(value * scale));
        }
        for part in [0.01, 0.5, 0.99, 1.0] {
            let want = part * 1_000.0 * scale as f64 / 1e3;
            let got = histogram.quantile_ms(part).expect("values");
            assert!(
                (got / want - 1.0).abs() < 0.01,
                "{scale} {part}: {got} {want}"
            );
        }
        let mean = histogram.mean_ms().expect("values");
        assert!((mean / (500.5 * scale as f64 / 1e3) - 1.0).abs() < 1e-9);
    }
}

#[test]
fn nothing_has_no_mean_and_the_longest_duration_has_a_bucket() {
    let mut histogram = Histogram::default();
    assert_eq!(histogram.mean_ms(), None);
    assert_eq!(histogram.quantile_ms(0.5), None);
    histogram.add(Duration::from_micros(u64::MAX));
    assert_eq!(histogram.count(), 1);
    assert!(histogram.quantile_ms(0.99).is_some());
}
