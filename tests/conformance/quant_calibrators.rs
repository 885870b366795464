//! Ranges from histograms of magnitudes against NVIDIA's calibrators.

use burn_lean::quant::{
    NumberFormat,
    range::{Histogram, entropy, mse, percentile},
};
use serde_json::Value;

use crate::{cases, cases_of, files, float, floats, near};

/// Edges and centres of bins: a multiplication and an addition of F32.
fn assert_close(name: &str, field: &str, found: f32, expected: f32) {
    assert!(
        near(found, expected, 2.0 * f32::EPSILON),
        "{name}, {field}: {found:e}, not {expected:e}"
    );
}

/// The fields of a case that start with `prefix`, and the rest of their names.
fn fields<'a>(case: &'a Value, prefix: &'a str) -> impl Iterator<Item = (&'a str, f32)> {
    let fields = case.as_object().expect("a case").iter();
    fields.filter_map(move |(field, value)| Some((field.strip_prefix(prefix)?, float(value))))
}

fn start(case: &Value, method: &str, format: &str) -> usize {
    let bins = &case["start_bins"][format!("{method}{format}")];
    bins.as_u64().expect("a number of bins") as usize
}

#[test]
fn percentile_mse_and_entropy_choose_the_bins_of_the_reference() {
    for (index, file) in files("quant_calibrators.json").iter().enumerate() {
        let mut checked = 0;
        for case in cases_of(file) {
            if let Some(counts) = case.get("histogram") {
                checked += calibrates(case, &floats(counts));
            }
        }
        assert!(checked > 0 || index > 0);
    }
}

fn calibrates(case: &Value, counts: &[f32]) -> usize {
    let name = case["name"].as_str().unwrap();
    let counts: Vec<f64> = counts.iter().map(|count| f64::from(*count)).collect();
    let bins = counts.len();
    let histogram = Histogram::from_counts(0.0, float(&case["amax_max"]), counts);
    let mut checked = 0;
    for (percent, expected) in fields(case, "percentile_") {
        let number: f64 = percent.replace('_', ".").parse().unwrap();
        let found = percentile(&histogram, number);
        // Whether their sum of all shares reaches 1, and so the last bin, or stays an ulp below,
        // and so passes it, is a matter of rounding. For us 100 percent are all values.
        let last = number == 100.0 && near(expected, histogram.edge(bins - 1), f32::EPSILON);
        match last {
            true => assert_eq!(found, histogram.max()),
            false => assert_close(name, percent, found, expected),
        }
        checked += 1;
    }
    for (format, expected) in fields(case, "mse_int") {
        let int = NumberFormat::int(format.parse().unwrap());
        let largest = int.quant_max();
        let found = mse(&histogram, int, largest, start(case, "mse_int", format));
        assert_close(name, "mse", found, expected);
        checked += 1;
    }
    for (format, expected) in fields(case, "entropy_int") {
        let levels = 1 << (format.parse::<u32>().unwrap() - 1);
        let found = entropy(&histogram, levels, start(case, "entropy_int", format));
        assert_close(name, "entropy", found, expected);
        checked += 1;
    }
    checked
}

/// Against the best of 100 ranges for the values themselves.
///
/// A value, and a range to try, are at most half a bin from the centre of one, and the error of a value
/// is its distance from the nearest number of the grid, which changes by no more than either of them:
/// the root of the mean squared error may be three halves of a bin above the best. Two are allowed.
#[test]
fn the_least_squared_error_in_a_histogram_is_that_of_a_grid_for_the_reference() {
    const BINS: usize = 4096;
    let mut checked = 0;
    for case in cases("quant_calibrators.json") {
        let name = case["name"].as_str().unwrap();
        if !name.starts_with("mse_grid_100") {
            continue;
        }
        let x = floats(&case["x"]);
        let largest = float(&case["amax_max"]);
        let mut histogram = Histogram::new(BINS);
        // With a zero, at which bins of magnitudes begin.
        let magnitudes: Vec<f32> = x.iter().map(|x| x.abs()).chain([0.0]).collect();
        histogram.observe(&magnitudes);
        assert_eq!((histogram.min(), histogram.max()), (0.0, largest), "{name}");
        let bin = f64::from(largest) / BINS as f64;
        for (field, bits) in [("best_mse_and_amax", 4), ("best_mse_and_amax_int8", 8)] {
            let int = NumberFormat::int(bits);
            let format = int.narrow();
            let error = |amax: f32| {
                let scale = format.quant_max() / amax;
                let error =
                    |x: &f32| (f64::from(format.round(x * scale) / scale) - f64::from(*x)).powi(2);
                x.iter().map(error).sum::<f64>() / x.len() as f64
            };
            let expected = floats(&case[field]);
            let least = error(expected[1]);
            // Theirs are means of F32.
            assert!(
                (least - f64::from(expected[0])).abs() < 1e-6 * least,
                "{name}, {field}: {least}"
            );
            let found = mse(&histogram, int, int.quant_max(), BINS / 100);
            let (found_error, least) = (error(found).sqrt(), least.sqrt());
            assert!(
                found_error <= least + 2.0 * bin,
                "{name}, {field}: {found} gives {found_error}, {} gives {least}",
                expected[1]
            );
            checked += 1;
        }
    }
    assert!(checked > 0);
}
