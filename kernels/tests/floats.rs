//! Floats times stored weights, against sums in 64 bits.

use burn_lean_kernels::{
    Blocks, CodeGrid, Depthwise, Epilogue, FloatMatrix, Geometry, IntegerMatrix, KernelError, Rows,
    SparseMatrix, Storage, Windows, clamp, finite_range, gelu, layer_norm, sigmoid, softmax, tanh,
    transpose,
};

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// Products are `[rows, columns]`; each is off by at most the rounding of so many additions.
fn check(
    found: &[f32],
    left: &[f32],
    right: &[f32],
    [rows, terms, columns]: [usize; 3],
    additions: usize,
) {
    for row in 0..rows {
        for column in 0..columns {
            let products = (0..terms)
                .map(|k| f64::from(left[row * terms + k]) * f64::from(right[k * columns + column]));
            let (mut sum, mut size) = (0.0, 0.0);
            for product in products {
                sum += product;
                size += product.abs();
            }
            let bound = size * f64::from(f32::EPSILON) * additions as f64 + 1e-30;
            let found = f64::from(found[row * columns + column]);
            assert!(
                (found - sum).abs() <= bound,
                "{found} {sum} {rows} {terms} {columns}"
            );
        }
    }
}

/// One after the other, in sums of 512 terms each and in the sum of these.
fn in_parts(terms: usize) -> usize {
    terms.min(512) + terms.div_ceil(512)
}

const SHAPES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [1, 33, 17],
    [2, 64, 16],
    [5, 30, 40],
    [6, 31, 15],
    [13, 128, 33],
    [40, 96, 130],
    [1, 2050, 1100],
    [7, 1030, 10],
];

#[test]
fn stored_floats_are_multiplied_as_they_are_stored() {
    for shape in SHAPES {
        let [rows, terms, columns] = shape;
        let left = numbers(1, rows * terms);
        let right = numbers(2, terms * columns);
        for (storage, bits) in [(Storage::F32, 24), (Storage::F16, 11), (Storage::BF16, 8)] {
            let matrix = FloatMatrix::new(&right, terms, columns, storage).unwrap();
            // Rounded by adding and taking away a number of which a step is the last bit that stays.
            let rounded: Vec<f32> = right
                .iter()
                .map(|x| {
                    if bits == 24 || *x == 0.0 {
                        return *x;
                    }
                    let exponent = x.abs().log2().floor() as i32;
                    let step = f32::powi(2.0, exponent + 1 - bits);
                    (x / step).round_ties_even() * step
                })
                .collect();
            let mut output = vec![f32::NAN; rows * columns];
            let left_rows = Rows::dense(&left, terms);
            matrix.multiply(&left_rows, &Epilogue::new(columns), &mut output);
            check(&output, &left, &rounded, shape, in_parts(terms));
        }
    }
}

/// Of equal terms, whose rounding errors add up, and do not make up for each other.
#[test]
fn sums_of_many_terms_are_sums_of_parts() {
    let shape = [8, 40_000, 3];
    let [rows, terms, columns] = shape;
    let left = vec![0.1_f32; rows * terms];
    let right = vec![0.1_f32; terms * columns];
    let matrix = FloatMatrix::new(&right, terms, columns, Storage::F32).unwrap();
    let mut output = vec![f32::NAN; rows * columns];
    let left_rows = Rows::dense(&left, terms);
    matrix.multiply(&left_rows, &Epilogue::new(columns), &mut output);
    check(&output, &left, &right, shape, in_parts(terms));

    let matrix = SparseMatrix::new(&right, terms, columns).unwrap();
    matrix.multiply(&left, &Epilogue::new(columns), &mut output);
    check(&output, &left, &right, shape, in_parts(terms));
}

#[test]
fn every_half_is_widened_to_its_number() {
    let all = || 0..=u16::MAX;
    let f16s: Vec<f32> = all()
        .map(|bits| half::f16::from_bits(bits).to_f32())
        .collect();
    let bf16s: Vec<f32> = all()
        .map(|bits| half::bf16::from_bits(bits).to_f32())
        .collect();
    for (storage, values) in [(Storage::F16, f16s), (Storage::BF16, bf16s)] {
        let values: Vec<f32> = values.into_iter().filter(|x| x.is_finite()).collect();
        let matrix = FloatMatrix::new(&values, 1, values.len(), storage).unwrap();
        assert_eq!(matrix.bytes(), 2 * values.len());
        for rows in [1, 7] {
            let left = vec![1.0; rows];
            let mut output = vec![f32::NAN; rows * values.len()];
            let epilogue = Epilogue::new(values.len());
            matrix.multiply(&Rows::dense(&left, 1), &epilogue, &mut output);
            assert!(output.chunks(values.len()).all(|found| found == values));
        }
    }
}

#[test]
fn codes_with_scales_are_dequantized_in_the_product() {
    for shape in SHAPES {
        let [rows, terms, columns] = shape;
        for bits in [4, 8] {
            for block in [terms, 16, 6, 1] {
                if !terms.is_multiple_of(block) {
                    continue;
                }
                let left = numbers(1, rows * terms);
                let largest = if bits == 4 { 8.0 } else { 128.0 };
                let codes: Vec<i8> = numbers(2, terms * columns)
                    .into_iter()
                    .map(|x| (x * largest).floor() as i8)
                    .collect();
                let scales: Vec<f32> = numbers(3, terms / block * columns)
                    .into_iter()
                    .map(|x| 0.01 + x * x)
                    .collect();
                // Codes of zero.
                let zeros = numbers(4, scales.len()).into_iter();
                let zeros: Vec<f32> = zeros.map(|x| (x * largest).floor()).collect();
                let offsets = zeros.iter().zip(&scales).map(|(zero, scale)| zero * scale);
                let offsets: Vec<f32> = offsets.collect();
                let plain = Blocks::new(block, &scales);
                for (blocks, offset) in [(plain, 0.0), (plain.with_offsets(&offsets), 1.0)] {
                    let values: Vec<f32> = (0..terms * columns)
                        .map(|i| {
                            let of = i / columns / block * columns + i % columns;
                            (f32::from(codes[i]) - offset * zeros[of]) * scales[of]
                        })
                        .collect();
                    let size = [terms, columns];
                    let matrix = FloatMatrix::of_codes(&codes, size, bits, blocks).unwrap();
                    let mut output = vec![f32::NAN; rows * columns];
                    let left_rows = Rows::dense(&left, terms);
                    matrix.multiply(&left_rows, &Epilogue::new(columns), &mut output);
                    // Blocks of one row are added one after the other.
                    check(&output, &left, &values, shape, terms);
                }
            }
        }
    }
    assert!(matches!(
        FloatMatrix::of_codes(&[0; 6], [6, 1], 4, Blocks::new(4, &[1.0; 2])),
        Err(KernelError::Block { block: 4, rows: 6 })
    ));
}

#[test]
fn products_do_not_depend_on_the_number_of_threads() {
    // So few rows that a thread has 6 of them, or 1; and a stripe of the columns for each.
    for shape in [[12, 2816, 64], [13, 2816, 64], [3, 1024, 1600]] {
        let [rows, terms, columns] = shape;
        let left = numbers(1, rows * terms);
        let right = numbers(2, terms * columns);
        let codes: Vec<i8> = right.iter().map(|x| (x * 8.0).floor() as i8).collect();
        let scales: Vec<f32> = numbers(3, terms / 32 * columns);
        let size = [terms, columns];
        let mut matrices = vec![
            FloatMatrix::of_codes(&codes, size, 4, Blocks::new(32, &scales)).unwrap(),
            FloatMatrix::of_codes(&codes, size, 8, Blocks::new(32, &scales)).unwrap(),
        ];
        for storage in [Storage::F32, Storage::F16, Storage::BF16] {
            matrices.push(FloatMatrix::new(&right, terms, columns, storage).unwrap());
        }
        for matrix in matrices {
            let [one, four] = [1, 4].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                pool.build().unwrap().install(|| {
                    let mut output = vec![f32::NAN; rows * columns];
                    let left = Rows::dense(&left, terms);
                    matrix.multiply(&left, &Epilogue::new(columns), &mut output);
                    output
                })
            });
            assert!(one == four, "{shape:?}");
        }
    }
}

/// A few rows are summed in another order, in which infinities of both signs meet.
#[test]
fn sums_of_few_rows_overflow_as_those_of_many_do() {
    let (terms, columns) = (13, 20);
    let large = |seed, count| -> Vec<f32> {
        let numbers = numbers(seed, count).into_iter();
        numbers.map(|x| x * 1e20).collect()
    };
    let row = large(1, terms);
    for storage in [Storage::F32, Storage::BF16] {
        let matrix = FloatMatrix::new(&large(2, terms * columns), terms, columns, storage).unwrap();
        let product = |rows: usize| {
            let left = row.repeat(rows);
            let mut output = vec![0.0; rows * columns];
            matrix.multiply(
                &Rows::dense(&left, terms),
                &Epilogue::new(columns),
                &mut output,
            );
            output
        };
        let many: Vec<u32> = product(6)[..columns].iter().map(|x| x.to_bits()).collect();
        for rows in [1, 2, 7] {
            for found in product(rows).chunks(columns) {
                let found: Vec<u32> = found.iter().map(|x| x.to_bits()).collect();
                assert_eq!(found, many, "{rows} rows in {storage:?}");
            }
        }
    }
}

/// Codes are multiplied before they have their size: what is finite stays so.
#[test]
fn large_numbers_times_codes_stay_finite() {
    for (rows, terms, block) in [(1, 24, 8), (1, 13, 13), (3, 24, 24), (6, 16, 8), (7, 16, 8)] {
        let left = vec![1e35; rows * terms];
        let columns = 19;
        for bits in [4, 8] {
            let codes = vec![-7; terms * columns];
            let scales = vec![0.5; terms / block * columns];
            let size = [terms, columns];
            let matrix =
                FloatMatrix::of_codes(&codes, size, bits, Blocks::new(block, &scales)).unwrap();
            let mut output = vec![0.0; rows * columns];
            let epilogue = Epilogue::new(columns);
            matrix.multiply(&Rows::dense(&left, terms), &epilogue, &mut output);
            let expected = -3.5 * terms as f32 * 1e35;
            let near = |x: &f32| (x / expected - 1.0).abs() < 1e-5;
            assert!(output.iter().all(near), "{output:?} for {expected}");
        }
    }
}

#[test]
fn memory_is_what_the_form_takes() {
    let matrix = |storage| FloatMatrix::new(&[1.0; 64 * 32], 64, 32, storage).unwrap();
    assert_eq!(matrix(Storage::F32).bytes(), 4 * 64 * 32);
    assert_eq!(matrix(Storage::BF16).bytes(), 2 * 64 * 32);
    let codes =
        FloatMatrix::of_codes(&[1; 64 * 32], [64, 32], 4, Blocks::new(64, &[1.0; 32])).unwrap();
    assert_eq!(codes.bytes(), 64 * 32 / 2 + 4 * 32);
    // Of columns that no 16 fill as much as there are.
    for columns in [1, 10, 15, 17, 42] {
        let values = vec![1.0; 64 * columns];
        let matrix = |storage| FloatMatrix::new(&values, 64, columns, storage).unwrap();
        assert_eq!(matrix(Storage::F32).bytes(), 4 * 64 * columns);
        assert_eq!(matrix(Storage::F16).bytes(), 2 * 64 * columns);
        let (codes, scales) = (vec![1; 64 * columns], vec![1.0; 2 * columns]);
        for bits in [4, 8] {
            let bytes = 64 * columns * usize::from(bits) / 8;
            let matrix =
                FloatMatrix::of_codes(&codes, [64, columns], bits, Blocks::new(32, &scales))
                    .unwrap();
            assert_eq!(matrix.bytes(), bytes + 4 * 2 * columns);
            let matrix = IntegerMatrix::new(&codes, 64, columns, bits).unwrap();
            assert_eq!(matrix.bytes(), bytes);
        }
        let ends = Epilogue::new(columns).with_bias(&scales[..columns]);
        assert_eq!(ends.bytes(), 4 * columns);
    }
}

#[test]
fn zeros_are_left_out() {
    for shape in SHAPES {
        let [rows, terms, columns] = shape;
        let left = numbers(1, rows * terms);
        let keep = numbers(3, terms * columns);
        let right: Vec<f32> = numbers(2, terms * columns)
            .into_iter()
            .zip(keep)
            .map(|(x, keep)| if keep > 0.6 { x } else { 0.0 })
            .collect();
        let matrix = SparseMatrix::new(&right, terms, columns).unwrap();
        assert_eq!(matrix.kept(), right.iter().filter(|x| **x != 0.0).count());
        let mut output = vec![f32::NAN; rows * columns];
        matrix.multiply(&left, &Epilogue::new(columns), &mut output);
        check(&output, &left, &right, shape, in_parts(terms));
    }
}

/// 0 · ∞ is NaN, whether or not the zero is stored.
#[test]
fn zeros_that_are_left_out_meet_what_is_not_finite() {
    let right = [2.0, 0.0, 0.5, 3.0, 1.0, 0.0];
    let matrix = SparseMatrix::new(&right, 2, 3).unwrap();
    for rows in [1, 3] {
        let mut left = vec![1.0; 2 * rows];
        left[2 * rows - 2] = f32::INFINITY;
        let mut output = vec![0.0; 3 * rows];
        matrix.multiply(&left, &Epilogue::new(3), &mut output);
        let [first, second, third] = output[3 * rows - 3..] else {
            unreachable!("three columns")
        };
        assert_eq!([first, third], [f32::INFINITY; 2]);
        assert!(second.is_nan());
        assert!(output[..3 * rows - 3].iter().all(|x| x.is_finite()));
    }
}

#[test]
fn a_depthwise_convolution_is_the_sum_over_its_window() {
    let geometry = Geometry {
        kernel: [3, 3],
        stride: [1, 1],
        padding: [[1, 1], [1, 1]],
        dilation: [1, 1],
    };
    let images = numbers(1, 2 * 5 * 4 * 20);
    let weight = numbers(2, 9 * 20);
    let windows = Windows::new(&images, [2, 5, 4, 20], geometry).unwrap();
    let kernel = Depthwise::new(&weight, 9, 20).unwrap();
    let mut found = vec![f32::NAN; images.len()];
    let epilogue = Epilogue::new(20).with_bias(&[1.0; 20]);
    kernel.convolve(&windows, &epilogue, &mut found);
    let at = |y: usize, x: usize, c: usize| f64::from(images[((5 + y) * 4 + x) * 20 + c]);
    // The corner of the second image: four taps are inside.
    let w = |tap: usize, c: usize| f64::from(weight[tap * 20 + c]);
    for c in 0..20 {
        let sum = at(0, 0, c) * w(4, c) + at(0, 1, c) * w(5, c) + at(1, 0, c) * w(7, c);
        let expected = 1.0 + sum + at(1, 1, c) * w(8, c);
        let found = f64::from(found[5 * 4 * 20 + c]);
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
}

/// A depthwise convolution of two images of 3 × 3 and 5 channels.
fn depthwise(columns: usize, size: usize) {
    let kernel = Depthwise::new(&[1.0_f32; 9 * 5], 9, 5).unwrap();
    let geometry = Geometry {
        kernel: [3, 3],
        stride: [1, 1],
        padding: [[0, 0], [0, 0]],
        dilation: [1, 1],
    };
    let images = [1.0; 2 * 3 * 3 * 5];
    let windows = Windows::new(&images, [2, 3, 3, 5], geometry).unwrap();
    let epilogue = Epilogue::new(columns).with_bias(&vec![0.5; columns]);
    let mut output = vec![0.0; size];
    kernel.convolve(&windows, &epilogue, &mut output);
    assert!(output.iter().all(|sum| *sum == 9.5));
}

#[test]
fn a_depthwise_convolution_fills_its_output() {
    depthwise(5, 10);
}

#[test]
#[should_panic(expected = "the output has another size")]
fn a_depthwise_convolution_into_a_smaller_output_is_refused() {
    depthwise(5, 5);
}

#[test]
#[should_panic(expected = "the epilogue is of other columns")]
fn a_depthwise_convolution_with_fewer_biases_is_refused() {
    depthwise(4, 10);
}

#[test]
fn values_without_a_code_are_told_and_leave_the_grid_of_the_others() {
    let values: Vec<f32> = (0..40).map(|i| i as f32 / 39.0).collect();
    let grid = CodeGrid {
        scale: 1.0 / 255.0,
        low: 0,
        high: 255,
    };
    let mut codes = vec![0; values.len()];
    assert!(grid.quantize(&values, &mut codes));
    for broken in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 15, 16, 39] {
            let mut values = values.clone();
            values[at] = broken;
            values[(at + 1) % 40] = 1.0;
            assert_eq!(finite_range(&values), [0.0, 1.0]);
            assert!(!grid.quantize(&values, &mut codes), "{broken} at {at}");
            assert_eq!(codes[(at + 1) % 40], 255);
        }
    }
    let extremes = [f32::MAX, f32::MIN, f32::MIN_POSITIVE, -1e-45, 0.0, -0.0];
    assert!(grid.quantize(&extremes, &mut codes[..6]));
}

#[test]
fn activations_are_those_of_the_standard_library() {
    let mut inputs: Vec<f32> = (-1000..1000).map(|i| i as f32 * 0.0123).collect();
    inputs.extend([0.0, -0.0, 1e-6, 0.0999, 0.1001, 300.0, -300.0, f32::MAX]);
    let (mut s, mut t, mut c) = (inputs.clone(), inputs.clone(), inputs.clone());
    sigmoid(&mut s);
    tanh(&mut t);
    clamp(&mut c, 0.0, 6.0);
    for (i, x) in inputs.iter().enumerate() {
        let exact = 1.0 / (1.0 + (-f64::from(*x)).exp());
        assert!(
            (f64::from(s[i]) - exact).abs() < 3e-7,
            "sigmoid {x}: {}",
            s[i]
        );
        let exact = f64::from(*x).tanh();
        assert!((f64::from(t[i]) - exact).abs() < 3e-7, "tanh {x}: {}", t[i]);
        assert_eq!(c[i], x.clamp(0.0, 6.0));
    }
    // Down to the smallest number, and 0 at the end.
    let mut ends = [-87.5, -95.0, -100.0, -103.0];
    let exact = ends.map(|x: f32| f64::from(x).exp());
    sigmoid(&mut ends);
    for (found, exact) in ends.into_iter().zip(exact) {
        let off = (f64::from(found) - exact).abs();
        assert!(off <= exact * 2e-6 + 2e-45, "{found:e} for {exact:e}");
    }
    let mut ends = [f32::NEG_INFINITY, f32::MIN, f32::INFINITY, f32::NAN];
    sigmoid(&mut ends);
    assert_eq!(ends[..3], [0.0, 0.0, 1.0]);
    assert!(ends[3].is_nan());
    let mut nan = [f32::NAN];
    clamp(&mut nan, 0.0, 6.0);
    assert!(nan[0].is_nan());
}

#[test]
fn transposing_there_and_back_is_nothing() {
    let values = numbers(1, 2 * 19 * 35);
    let back = transpose(&values, 2, 19, 35);
    assert_eq!(back[1], values[35]);
    assert_eq!(transpose(&back, 2, 35, 19), values);
}

#[test]
fn rows_are_normalized() {
    for size in [1, 7, 16, 35] {
        let values = numbers(4, 3 * size);
        let mut found: Vec<f32> = values.iter().map(|x| x * 40.0).collect();
        softmax(&mut found, size);
        for (row, found) in values.chunks(size).zip(found.chunks(size)) {
            let powers: Vec<f64> = row.iter().map(|x| f64::from(*x * 40.0).exp()).collect();
            let sum: f64 = powers.iter().sum();
            for (power, found) in powers.iter().zip(found) {
                assert!((power / sum - f64::from(*found)).abs() < 1e-6);
            }
        }
        let mut found = values.clone();
        let (gain, shift) = (numbers(5, size), numbers(6, size));
        layer_norm(&mut found, &gain, Some(&shift), 1e-5);
        for (row, found) in values.chunks(size).zip(found.chunks(size)) {
            let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / size as f64;
            let squares = row.iter().map(|x| (f64::from(*x) - mean).powi(2));
            let factor = 1.0 / (squares.sum::<f64>() / size as f64 + 1e-5).sqrt();
            for (index, found) in found.iter().enumerate() {
                let x = (f64::from(row[index]) - mean) * factor;
                let expected = x * f64::from(gain[index]) + f64::from(shift[index]);
                assert!(
                    (expected - f64::from(*found)).abs() < 1e-5,
                    "{found} {expected}"
                );
            }
        }
    }
    let mut hidden = [f32::NEG_INFINITY, 0.0, 0.0];
    softmax(&mut hidden, 3);
    assert_eq!(hidden, [0.0, 0.5, 0.5]);
}

/// Its squares are equal: the rounding errors of their sum add up.
#[test]
fn a_long_row_is_normalized() {
    let mut found = [0.1_f32, -0.1].repeat(1 << 19);
    let gain = vec![1.0; found.len()];
    layer_norm(&mut found, &gain, None, 0.0);
    assert!(found.iter().all(|x| (x.abs() - 1.0).abs() < 2e-5));
}

#[test]
fn gelu_is_x_times_the_distribution_function() {
    // Φ(1) = 0.841344746, Φ(−2) = 0.022750132.
    let mut values = [0.0, 1.0, -2.0, 12.0, -12.0, 1e-3];
    gelu(&mut values);
    let expected = [0.0, 0.841_344_7, -0.045_500_264, 12.0, 0.0, 0.000_500_398_9];
    for (found, expected) in values.iter().zip(expected) {
        assert!((found - expected).abs() < 5e-7, "{found} {expected}");
    }
    let mut ends = [f32::INFINITY, f32::MAX, f32::NAN];
    gelu(&mut ends);
    assert_eq!(ends[..2], [f32::INFINITY, f32::MAX]);
    assert!(ends[2].is_nan());
}
