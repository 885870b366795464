//! The ranges that histograms give.

use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    NumberFormat, QuantParams, RangeMethod, Scheme, fake::Range, fake_quantize, range::Histogram,
};

use crate::support::{numbers, values};

/// Sums of four numbers: nearly a bell curve.
fn bell(seed: u64) -> Vec<f32> {
    let all = numbers(seed, 8000);
    all.chunks(4).map(|four| four.iter().sum()).collect()
}

/// Of their magnitudes, from 0 on.
fn histogram(x: &[f32]) -> Histogram {
    let magnitudes: Vec<f32> = x.iter().map(|x| x.abs()).chain([0.0]).collect();
    let mut histogram = Histogram::new(512);
    histogram.observe(&magnitudes);
    histogram
}

/// The squared error of numbers that are quantized with this range.
fn error(numbers: &[f32], (lowest, highest): (f32, f32), scheme: &Scheme) -> f64 {
    let device = Device::flex();
    let range = Range {
        min: Tensor::from_floats([lowest], &device),
        max: Tensor::from_floats([highest], &device),
    };
    let x = Tensor::<1>::from_floats(numbers, &device);
    let y = fake_quantize(x, &QuantParams::from_range(range, scheme), scheme);
    let pairs = numbers.iter().zip(values(y));
    pairs.map(|(x, y)| f64::from(x - y).powi(2)).sum()
}

/// Against the best of 57 magnitudes, for the numbers themselves.
#[test]
fn an_affine_range_of_the_least_squared_error_has_the_codes_of_both_sides() {
    let bell = bell(7);
    let silu = |x: &f32| {
        let x = 2.0 * x;
        x / (1.0 + (-1.7 * x).exp())
    };
    let mut relu: Vec<f32> = bell.iter().map(|x| x.max(0.0)).collect();
    relu[0] = -1e-6;
    let data: [Vec<f32>; 5] = [
        bell.iter().map(silu).collect(),
        relu,
        bell.iter().map(|x| -x.abs()).collect(),
        bell.iter().map(|x| x + 1.0).collect(),
        bell,
    ];
    let narrow = NumberFormat::int(4).narrow();
    for x in &data {
        let histogram = histogram(x);
        let lowest = x.iter().copied().fold(f32::INFINITY, f32::min);
        let highest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for format in [NumberFormat::uint(2), NumberFormat::uint(4), narrow] {
            let scheme = Scheme::affine(format);
            let errors = (4..=60).map(|step| {
                let magnitude = histogram.max() * step as f32 / 60.0;
                let range = (lowest.max(-magnitude), highest.min(magnitude));
                error(x, range, &scheme)
            });
            let least = errors.fold(f64::INFINITY, f64::min);
            let range = histogram.range(RangeMethod::Mse, &scheme, lowest, highest);
            let found = error(x, range, &scheme);
            assert!(
                found <= 1.05 * least,
                "{format}, {range:?}: {found}, not {least}"
            );
        }
    }
}

#[test]
fn a_number_next_to_zero_on_the_other_side_of_it_leaves_the_range_where_it_is() {
    let histogram = histogram(&bell(8));
    for format in [NumberFormat::uint(2), NumberFormat::uint8()] {
        let scheme = Scheme::affine(format);
        for method in [RangeMethod::Mse, RangeMethod::Entropy] {
            let end = |lowest| histogram.range(method, &scheme, lowest, histogram.max()).1;
            assert_eq!(end(-1e-8), end(0.0), "{format}, {method}");
            let lowest = -histogram.max();
            let start = |highest| histogram.range(method, &scheme, lowest, highest).0;
            assert_eq!(start(1e-8), -end(0.0), "{format}, {method}");
        }
    }
}

/// Only the few edges beyond the end of the smaller side have another number of levels.
#[test]
fn data_that_are_nearly_symmetric_have_the_range_of_symmetric_ones() {
    let histogram = histogram(&bell(8));
    let max = histogram.max();
    for bits in [2, 3, 4] {
        let scheme = Scheme::affine(NumberFormat::uint(bits));
        let end = |lowest| {
            histogram
                .range(RangeMethod::Entropy, &scheme, lowest, max)
                .1
        };
        assert!(end(-max) < max, "{bits} bits");
        for share in [0.999, 0.99] {
            assert_eq!(end(-share * max), end(-max), "{bits} bits, {share}");
        }
    }
}

#[test]
fn one_of_few_bins_is_no_range() {
    let (int, uint) = (NumberFormat::int, NumberFormat::uint);
    for bins in [16_i32, 24, 31] {
        let x = |bin: i32| 3.0 * (f64::from(bin) + 0.5) / f64::from(bins);
        let counts = (0..bins).map(|bin| 1e6 * (-x(bin).powi(2) / 2.0).exp());
        let histogram = Histogram::from_counts(0.0, 1.0, counts.collect());
        for scheme in [
            Scheme::symmetric(int(2)),
            Scheme::symmetric(int(4)),
            Scheme::affine(uint(4)),
        ] {
            let (_, end) = histogram.range(RangeMethod::Entropy, &scheme, 0.0, 1.0);
            assert!(end > 0.6, "{bins} bins, {scheme}: {end}");
        }
    }
}

/// The bell curve ends at 6; one of some 10⁹ values is 1000.
#[test]
fn more_bins_have_smaller_ranges() {
    for (bins, most) in [(4096_i32, 40.0), (16384, 10.0)] {
        let x = |bin: i32| 1000.0 * (f64::from(bin) + 0.5) / f64::from(bins);
        let count = |bin: i32| (1e8 * (-x(bin).powi(2) / 2.0).exp()).floor();
        let mut counts: Vec<f64> = (0..bins).map(count).collect();
        *counts.last_mut().unwrap() = 1.0;
        let histogram = Histogram::from_counts(0.0, 1000.0, counts);
        let scheme = Scheme::symmetric(NumberFormat::int8());
        let (_, end) = histogram.range(RangeMethod::Mse, &scheme, 0.0, 1000.0);
        assert!(end < most, "{bins} bins: {end}");
    }
}

#[test]
fn a_range_may_be_a_small_part_of_a_histogram_of_few_bins() {
    let scheme = Scheme::affine(NumberFormat::uint(2));
    for bins in [64_i32, 256, 512] {
        let count = |bin: i32| 1.0 + 1e6 * (-16.0 * f64::from(bin) / f64::from(bins)).exp();
        let counts = (0..bins).map(count).collect();
        let histogram = Histogram::from_counts(0.0, 1.0, counts);
        for (method, least, most) in [
            (RangeMethod::Mse, 0.2_f32, 0.23_f32),
            (RangeMethod::Entropy, 0.24, 0.3),
        ] {
            let (_, end) = histogram.range(method, &scheme, 0.0, 1.0);
            assert!((least..most).contains(&end), "{bins} bins, {method}: {end}");
        }
    }
}
