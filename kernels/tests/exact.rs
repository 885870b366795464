//! Sums of codes are those of 64-bit integers, whatever the shape, the codes and the grid.

use burn_lean_kernels::{
    Blocks, CodeGrid, Depthwise, Epilogue, Geometry, IntegerMatrix, KernelError, Rows, Windows,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// Codes that are often at the ends of their range.
fn codes(low: i16, high: i16, seed: u64, count: usize) -> Vec<i16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let range = i64::from(high) - i64::from(low) + 1;
    (0..count)
        .map(|_| match next() % 4 {
            0 => low,
            1 => high,
            _ => (i64::from(low) + (next() % range as u64) as i64) as i16,
        })
        .collect()
}

fn bytes(low: i16, high: i16, seed: u64, count: usize) -> Vec<i8> {
    codes(low, high, seed, count)
        .into_iter()
        .map(|code| code as i8)
        .collect()
}

/// Sums as floats, by 64-bit integers.
fn product(left: &[i16], right: &[i8], [rows, terms, columns]: [usize; 3]) -> Vec<f32> {
    let mut sums = Vec::new();
    for row in 0..rows {
        for column in 0..columns {
            let of = |k: usize| {
                i64::from(left[row * terms + k]) * i64::from(right[k * columns + column])
            };
            sums.push((0..terms).map(of).sum::<i64>() as f32);
        }
    }
    sums
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        // The same cases in every run.
        rng_seed: RngSeed::Fixed(18),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_product_of_codes_is_exact(
        rows in 1_usize..20, terms in 1_usize..90, columns in 1_usize..50,
        zero_point in 0_i16..256, narrow: bool, seed: u64,
    ) {
        let (low, high, bits) = if narrow { (-8, 7, 4) } else { (-128, 127, 8) };
        let left = codes(-zero_point, 255 - zero_point, seed, rows * terms);
        let right = bytes(low, high, seed ^ 1, terms * columns);
        let matrix = IntegerMatrix::new(&right, terms, columns, bits).unwrap();
        let mut output = vec![f32::NAN; rows * columns];
        matrix.multiply(&Rows::dense(&left, terms), &Epilogue::new(columns), &mut output);
        prop_assert_eq!(output, product(&left, &right, [rows, terms, columns]));
    }

    #[test]
    fn packed_for_many_rows_a_product_is_the_same(
        rows in 1_usize..80, terms in 1_usize..300, columns in 1_usize..150, offset in 0_usize..3,
        zero_point in 0_i16..256, seed: u64,
    ) {
        let left = codes(-zero_point, 255 - zero_point, seed, rows * terms);
        let right = bytes(-128, 127, seed ^ 1, terms * columns);
        let Some(matrix) = IntegerMatrix::for_many_rows(&right, terms, columns).unwrap() else {
            return Ok(());
        };
        let scale: Vec<f32> = (0..columns).map(|column| 0.5 + column as f32).collect();
        let bias: Vec<i32> = (0..columns as i32).map(|column| 1000 - 77 * column).collect();
        let epilogue = Epilogue::new(columns).with_code_bias(&bias).with_scale(&scale);
        let pairs = IntegerMatrix::new(&right, terms, columns, 8).unwrap();
        let stride = columns + 2 * offset;
        let run = |matrix: &IntegerMatrix| {
            let mut output = vec![-1.0; rows * stride];
            matrix.multiply_into(
                &Rows::dense(&left, terms), &epilogue, &mut output, stride, offset,
            );
            output
        };
        prop_assert_eq!(run(&matrix), run(&pairs));
    }

    #[test]
    fn sums_of_blocks_are_multiplied_by_their_scales(
        rows in 1_usize..20, size in 1_usize..20, blocks in 1_usize..60, columns in 1_usize..50,
        narrow: bool, offset: bool, seed: u64,
    ) {
        let size = if blocks == 1 { size } else { 2 * size };
        let terms = size * blocks;
        let (low, high, bits) = if narrow { (-8, 7, 4) } else { (-128, 127, 8) };
        let left = codes(-255, 255, seed, rows * terms);
        let right = bytes(low, high, seed ^ 1, terms * columns);
        // Multiples of a quarter: all is exact.
        let scales = codes(1, 9, seed ^ 2, blocks * columns);
        let scales: Vec<f32> = scales.into_iter().map(|scale| f32::from(scale) / 4.0).collect();
        let zeros = codes(if offset { -9 } else { 0 }, if offset { 9 } else { 1 }, seed ^ 3, scales.len());
        let offsets = zeros.iter().zip(&scales).map(|(zero, scale)| f32::from(*zero) * scale);
        let offsets: Vec<f32> = offsets.collect();
        let in_blocks = match offset {
            true => Blocks::new(size, &scales).with_offsets(&offsets),
            false => Blocks::new(size, &scales),
        };
        let matrix = IntegerMatrix::in_blocks(&right, [terms, columns], bits, in_blocks).unwrap();
        let mut output = vec![f32::NAN; rows * columns];
        let of_rows = vec![0.5; rows];
        let epilogue = Epilogue::new(columns).with_row_scale(of_rows);
        matrix.multiply(&Rows::dense(&left, terms), &epilogue, &mut output);
        for row in 0..rows {
            for column in 0..columns {
                let product = |term: usize| {
                    let scale = f64::from(scales[term / size * columns + column]);
                    let zero = f64::from(zeros[term / size * columns + column]);
                    let code = f64::from(right[term * columns + column]);
                    let code = if offset { code - zero } else { code };
                    f64::from(left[row * terms + term]) * code * scale
                };
                let sum: f64 = (0..terms).map(product).sum();
                let found = f64::from(output[row * columns + column]);
                // Sums of more than 2²⁴ quarters are rounded, two of each block.
                let most = (0..terms).map(|term| {
                    let scale = f64::from(scales[term / size * columns + column]);
                    f64::from(left[row * terms + term]).abs() * 137.0 * scale
                });
                let most: f64 = 2.0 * most.sum::<f64>();
                let off = (found - 0.5 * sum).abs();
                prop_assert!(off <= most * blocks as f64 * 2f64.powi(-24), "{found} {sum}");
            }
        }
    }

    #[test]
    fn rows_may_have_a_grid_each(
        rows in 1_usize..40, terms in 1_usize..90, columns in 1_usize..150,
        zero_points in prop::collection::vec(0_i16..256, 40), seed: u64,
    ) {
        let left: Vec<i16> = (0..rows)
            .flat_map(|row| {
                let zero_point = zero_points[row];
                codes(-zero_point, 255 - zero_point, seed ^ row as u64, terms)
            })
            .collect();
        let right = bytes(-128, 127, seed ^ 91, terms * columns);
        // Powers of two, so that nothing is rounded.
        let scale: Vec<f32> = (0..rows as i32).map(|row| 2.0_f32.powi(row % 7 - 3)).collect();
        let epilogue = Epilogue::new(columns).with_row_scale(scale.clone());
        let mut expected = product(&left, &right, [rows, terms, columns]);
        for (row, scale) in expected.chunks_mut(columns).zip(&scale) {
            row.iter_mut().for_each(|sum| *sum *= scale);
        }
        let pairs = IntegerMatrix::new(&right, terms, columns, 8).unwrap();
        let many = IntegerMatrix::for_many_rows(&right, terms, columns).unwrap();
        for matrix in [Some(pairs), many].into_iter().flatten() {
            let mut output = vec![f32::NAN; rows * columns];
            matrix.multiply(&Rows::dense(&left, terms), &epilogue, &mut output);
            prop_assert_eq!(&output, &expected);
        }
    }

    #[test]
    fn a_convolution_of_codes_is_exact(
        extents in [1_usize..9, 1_usize..9], batch in 1_usize..4, groups in 1_usize..4,
        per_group in 1_usize..6, out_per_group in 1_usize..20, kernel in [1_usize..4, 1_usize..4],
        stride in [1_usize..3, 1_usize..3], dilation in [1_usize..3, 1_usize..3],
        padding in [[0_usize..3, 0_usize..3], [0_usize..3, 0_usize..3]],
        zero_point in 0_i16..256, seed: u64,
    ) {
        let geometry = Geometry { kernel, stride, padding, dilation };
        let Some(output) = geometry.output(extents) else {
            return Ok(());
        };
        let channels = groups * per_group;
        let outs = groups * out_per_group;
        let shape = [batch, extents[0], extents[1], channels];
        let images = codes(-zero_point, 255 - zero_point, seed, shape.iter().product());
        let terms = kernel[0] * kernel[1] * per_group;
        let mut found = vec![f32::NAN; batch * output[0] * output[1] * outs];
        let mut expected = found.clone();
        for group in 0..groups {
            let weight = bytes(-128, 127, seed ^ group as u64, terms * out_per_group);
            let matrix = IntegerMatrix::new(&weight, terms, out_per_group, 8).unwrap();
            let windows = Windows::new(&images, shape, geometry).unwrap();
            let windows = windows.group(group * per_group, per_group);
            let epilogue = Epilogue::new(out_per_group);
            let first = group * out_per_group;
            matrix.multiply_into(&windows, &epilogue, &mut found, outs, first);
            for pixel in 0..batch * output[0] * output[1] {
                let (image, y) = (pixel / (output[0] * output[1]), pixel / output[1] % output[0]);
                let x = pixel % output[1];
                for out in 0..out_per_group {
                    let mut sum = 0_i64;
                    for term in 0..terms {
                        let (tap, channel) = (term / per_group, term % per_group);
                        let at = [y, x];
                        let from = |axis: usize, tap: usize| {
                            (at[axis] * stride[axis] + tap * dilation[axis])
                                .checked_sub(padding[0][axis])
                                .filter(|at| *at < extents[axis])
                        };
                        let (Some(y), Some(x)) = (from(0, tap / kernel[1]), from(1, tap % kernel[1]))
                        else {
                            continue;
                        };
                        let at = ((image * extents[0] + y) * extents[1] + x) * channels;
                        let code = images[at + group * per_group + channel];
                        sum += i64::from(code) * i64::from(weight[term * out_per_group + out]);
                    }
                    expected[pixel * outs + first + out] = sum as f32;
                }
            }
        }
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn a_depthwise_convolution_is_a_grouped_one(
        extents in [1_usize..9, 1_usize..9], batch in 1_usize..3, channels in 1_usize..40,
        kernel in [1_usize..4, 1_usize..4], stride in [1_usize..3, 1_usize..3],
        padding in [[0_usize..2, 0_usize..2], [0_usize..2, 0_usize..2]], seed: u64,
    ) {
        let geometry = Geometry { kernel, stride, padding, dilation: [1, 1] };
        let Some(output) = geometry.output(extents) else {
            return Ok(());
        };
        let shape = [batch, extents[0], extents[1], channels];
        let images = codes(-255, 255, seed, shape.iter().product());
        let taps = kernel[0] * kernel[1];
        let weight = bytes(-128, 127, seed ^ 1, taps * channels);
        let windows = Windows::new(&images, shape, geometry).unwrap();
        let mut expected = vec![0.0; batch * output[0] * output[1] * channels];
        for channel in 0..channels {
            let column: Vec<i8> = (0..taps).map(|tap| weight[tap * channels + channel]).collect();
            let matrix = IntegerMatrix::new(&column, taps, 1, 8).unwrap();
            let windows = windows.group(channel, 1);
            matrix.multiply_into(&windows, &Epilogue::new(1), &mut expected, channels, channel);
        }
        let kernel = Depthwise::new(&weight, taps, channels).unwrap();
        let mut found = vec![f32::NAN; expected.len()];
        kernel.convolve(&windows, &Epilogue::new(channels), &mut found);
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn codes_are_the_nearest_ones(
        scale in 1e-6_f32..1e4, zero_point in 0_i16..256,
        values in prop::collection::vec(-300.0_f32..300.0, 1..70),
    ) {
        let grid = CodeGrid { scale, low: -zero_point, high: 255 - zero_point };
        let mut values: Vec<f32> = values.into_iter().map(|steps| steps * scale).collect();
        values.extend([f32::INFINITY, f32::NEG_INFINITY, 0.0, scale * 0.5, scale * 1.5]);
        let mut found = vec![0; values.len()];
        prop_assert!(!grid.quantize(&values, &mut found));
        let expected: Vec<i16> = values
            .iter()
            .map(|value| {
                let steps = (value * (1.0 / scale)).round_ties_even();
                steps.clamp(f32::from(grid.low), f32::from(grid.high)) as i16
            })
            .collect();
        prop_assert_eq!(found, expected);
    }
}

/// Their inverses are infinite, and subnormal.
#[test]
fn codes_of_scales_at_the_ends_of_f32_are_the_nearest_ones() {
    let codes = |scale: f32, values: &[f32]| {
        let mut found = vec![0; values.len()];
        let grid = CodeGrid {
            scale,
            low: -128,
            high: 127,
        };
        assert!(grid.quantize(values, &mut found));
        found
    };
    for scale in [f32::from_bits(1), 1e-42, 1e-40] {
        // Multiples of the least number: exact.
        let [three, seven, hundred] = [3.0, 7.0, 100.0].map(|steps| steps * scale);
        let values = [-three, 0.0, scale, seven, hundred, f32::MAX, f32::MIN];
        assert_eq!(
            codes(scale, &values),
            [-3, 0, 1, 7, 100, 127, -128],
            "{scale:e}"
        );
    }
    let large = 3e38;
    assert_eq!(
        codes(large, &[-large, 0.0, large, 1e38, 1.0]),
        [-1, 0, 1, 0, 0]
    );
}

#[test]
fn large_products_are_shared_by_threads_and_stay_exact() {
    // By rows, by columns, and one row.
    for [rows, terms, columns] in [[300, 128, 70], [7, 700, 900], [1, 2047, 1000]] {
        let left = codes(-255, 0, 1, rows * terms);
        let right = bytes(-128, 127, 2, terms * columns);
        let matrix = IntegerMatrix::new(&right, terms, columns, 8).unwrap();
        let mut output = vec![f32::NAN; rows * columns];
        let left_rows = Rows::dense(&left, terms);
        matrix.multiply(&left_rows, &Epilogue::new(columns), &mut output);
        assert_eq!(output, product(&left, &right, [rows, terms, columns]));
    }
}

#[test]
fn the_largest_sums_are_exact_and_larger_ones_are_refused() {
    let terms = 49_344;
    let codes = vec![-128; terms];
    let matrix = IntegerMatrix::new(&codes, terms, 1, 8).unwrap();
    let many = IntegerMatrix::for_many_rows(&codes, terms, 1).unwrap();
    for matrix in [Some(matrix), many].into_iter().flatten() {
        for code in [255, -255] {
            let mut output = [0.0];
            let left = vec![code; terms];
            matrix.multiply(&Rows::dense(&left, terms), &Epilogue::new(1), &mut output);
            assert_eq!(output, [-(terms as i64 * i64::from(code) * 128) as f32]);
        }
    }
    let sum = (terms as i64 + 1) * 255 * 128;
    assert_eq!(
        IntegerMatrix::new(&vec![-128; terms + 1], terms + 1, 1, 8).unwrap_err(),
        KernelError::Overflow { column: 0, sum }
    );
    let ones_beside: Vec<i8> = (0..2 * (terms + 1))
        .map(|at| if at % 2 == 0 { 1 } else { -128 })
        .collect();
    assert_eq!(
        IntegerMatrix::new(&ones_beside, terms + 1, 2, 8).unwrap_err(),
        KernelError::Overflow { column: 1, sum }
    );
}

#[test]
fn the_epilogue_is_applied_in_its_order() {
    let matrix = IntegerMatrix::new(&[1, 2, -3], 1, 3, 4).unwrap();
    let epilogue = Epilogue::new(3)
        .with_code_bias(&[1, 0, 0])
        .with_scale(&[0.5, 0.25, 1.0])
        .with_bias(&[0.0, 1.0, 0.0])
        .with_gain(&[2.0, 1.0, 1.0], &[0.0, 0.5, 0.0])
        .with_clamp(0.0, 9.0);
    let mut output = [0.0; 3];
    matrix.multiply(&Rows::dense(&[10], 1), &epilogue, &mut output);
    assert_eq!(output, [9.0, 6.5, 0.0]);
}

#[test]
fn what_does_not_fit_is_refused() {
    assert!(matches!(
        IntegerMatrix::new(&[8], 1, 1, 4),
        Err(KernelError::Code { code: 8, bits: 4 })
    ));
    assert!(matches!(
        IntegerMatrix::new(&[1], 1, 1, 5),
        Err(KernelError::Bits { bits: 5 })
    ));
    assert!(matches!(
        IntegerMatrix::new(&[1], 2, 1, 8),
        Err(KernelError::Length { .. })
    ));
    // 3 divides 6, but codes are in pairs of rows.
    let in_blocks = |block: usize| {
        let scales = vec![1.0; 6 / block * 4];
        let blocks = Blocks::new(block, &scales);
        IntegerMatrix::in_blocks(&[1; 24], [6, 4], 8, blocks).map(|_| ())
    };
    assert_eq!(in_blocks(3), Err(KernelError::OddBlock { block: 3 }));
    let rows = 6;
    assert_eq!(in_blocks(4), Err(KernelError::Block { block: 4, rows }));
    assert_eq!(in_blocks(2), Ok(()));
}

#[test]
fn threads_that_share_many_rows_find_the_same_sums() {
    let [rows, terms, columns] = [700, 300, 130];
    let left = codes(-100, 155, 1, rows * terms);
    let right = bytes(-128, 127, 2, terms * columns);
    let Some(matrix) = IntegerMatrix::for_many_rows(&right, terms, columns).unwrap() else {
        return;
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build();
    let mut output = vec![f32::NAN; rows * columns];
    let left_rows = Rows::dense(&left, terms);
    pool.unwrap()
        .install(|| matrix.multiply(&left_rows, &Epilogue::new(columns), &mut output));
    assert!(output == product(&left, &right, [rows, terms, columns]));
}
