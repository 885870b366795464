//! Ranges from histograms of magnitudes against NVIDIA's calibrators.

use burn_lean::quant::{Histogram, NumberFormat, entropy, mse, percentile};
use serde_json::Value;

use crate::quant_fake_quantize::ulps;
use crate::{cases, float, floats};

fn histogram(case: &Value) -> Option<Histogram> {
    let counts = floats(case.get("histogram")?);
    let counts = counts.into_iter().map(f64::from).collect();
    Some(Histogram::from_counts(
        0.0,
        float(&case["amax_max"]),
        counts,
    ))
}

/// Edges and centres of bins: a multiplication and an addition of F32.
fn assert_close(name: &str, found: f32, expected: &Value) {
    let expected = float(expected);
    assert!(
        ulps(found, expected) <= 2,
        "{name}: {found:e}, not {expected:e}"
    );
}

fn start(case: &Value, method: &str) -> usize {
    case["start_bins"][method].as_u64().unwrap() as usize
}

#[test]
fn percentile_mse_and_entropy_choose_the_bins_of_the_reference() {
    let mut checked = 0;
    for case in cases("quant_calibrators.json") {
        let Some(histogram) = histogram(&case) else {
            continue;
        };
        let percents = [
            ("percentile_99", 99.0),
            ("percentile_99_9", 99.9),
            ("percentile_99_99", 99.99),
            ("percentile_100", 100.0),
        ];
        for (field, percent) in percents {
            assert_close(field, percentile(&histogram, percent), &case[field]);
        }
        let formats = [("mse_int8", 8, 127.0), ("mse_int4", 4, 7.0)];
        for (field, bits, largest) in formats {
            let format = NumberFormat::int(bits);
            let found = mse(&histogram, format, largest, start(&case, field));
            assert_close(field, found, &case[field]);
        }
        for (field, levels) in [("entropy_int8", 128), ("entropy_int4", 8)] {
            let found = entropy(&histogram, levels, start(&case, field));
            assert_close(field, found, &case[field]);
        }
        checked += 1;
    }
    assert_eq!(checked, 2);
}

/// The best of 100 ranges for the values themselves: a histogram with a bin for each value.
#[test]
fn the_least_squared_error_over_a_grid_is_that_of_the_reference() {
    let case = cases("quant_calibrators.json")
        .into_iter()
        .find(|case| case["name"] == "mse_grid_100_int4")
        .unwrap();
    let x = floats(&case["x"]);
    let largest = float(&case["amax_max"]);
    for (field, bits) in [("best_mse_and_amax", 4), ("best_mse_and_amax_int8", 8)] {
        let format = NumberFormat::int(bits).narrow();
        let error = |amax: f32| {
            let scale = format.quant_max() / amax;
            let error =
                |x: &f32| (f64::from(format.round(x * scale) / scale) - f64::from(*x)).powi(2);
            x.iter().map(error).sum::<f64>() / x.len() as f64
        };
        let grid = (1..=100).map(|step| largest * step as f32 / 100.0);
        let best = grid.map(|amax| (error(amax), amax));
        let best = best.reduce(|best, next| if next.0 < best.0 { next } else { best });
        let (least, amax) = best.unwrap();
        let expected = floats(&case[field]);
        assert!(
            (least - f64::from(expected[0])).abs() < 1e-6 * least,
            "{field}: {least}"
        );
        assert!(ulps(amax, expected[1]) <= 1, "{field}: {amax}");
    }
}
