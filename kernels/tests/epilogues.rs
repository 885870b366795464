//! What follows the sums: rows with scales of their own, and what is refused.

use burn_lean_kernels::{
    Blocks, Depthwise, Epilogue, FloatMatrix, Geometry, IntegerMatrix, Rows, SparseMatrix, Storage,
    Windows,
};

/// Windows of one tap.
const POINTS: Geometry = Geometry {
    kernel: [1, 1],
    stride: [1, 1],
    padding: [[0, 0], [0, 0]],
    dilation: [1, 1],
};

#[test]
fn each_pixel_and_each_row_has_a_scale_of_its_own() {
    let ends = Epilogue::new(1).with_row_scale(vec![1.0, 10.0]);
    let ends = ends.with_bias(&[0.5]);
    let expected = [3.5, 40.5];
    let shape = [1, 1, 2, 1];
    let mut found = [0.0; 2];
    let windows = Windows::new(&[3_i16, 4], shape, POINTS).unwrap();
    let kernel = Depthwise::new(&[1_i8], 1, 1).unwrap();
    kernel.convolve(&windows, &ends, &mut found);
    assert_eq!(found, expected);

    let mut found = [0.0; 2];
    let windows = Windows::new(&[3.0_f32, 4.0], shape, POINTS).unwrap();
    let kernel = Depthwise::new(&[1.0_f32], 1, 1).unwrap();
    kernel.convolve(&windows, &ends, &mut found);
    assert_eq!(found, expected);

    let mut found = [0.0; 2];
    let matrix = SparseMatrix::new(&[1.0], 1, 1).unwrap();
    matrix.multiply(&[3.0, 4.0], &ends, &mut found);
    assert_eq!(found, expected);
}

#[test]
#[should_panic(expected = "the epilogue is of other rows")]
fn a_depthwise_convolution_with_a_scale_of_fewer_pixels_is_refused() {
    let windows = Windows::new(&[3_i16, 4], [1, 1, 2, 1], POINTS).unwrap();
    let kernel = Depthwise::new(&[1_i8], 1, 1).unwrap();
    let ends = Epilogue::new(1).with_row_scale(vec![1.0]);
    kernel.convolve(&windows, &ends, &mut [0.0; 2]);
}

fn with_a_bias_of_codes() -> Epilogue {
    Epilogue::new(1).with_code_bias(&[1])
}

#[test]
#[should_panic(expected = "its bias is of codes, the sums are not")]
fn a_bias_of_codes_for_floats_is_refused() {
    let matrix = FloatMatrix::new(&[1.0], 1, 1, Storage::F32).unwrap();
    let left = Rows::dense(&[1.0], 1);
    matrix.multiply(&left, &with_a_bias_of_codes(), &mut [0.0]);
}

#[test]
#[should_panic(expected = "its bias is of codes, the sums are not")]
fn a_bias_of_codes_for_nonzero_numbers_is_refused() {
    let matrix = SparseMatrix::new(&[1.0], 1, 1).unwrap();
    matrix.multiply(&[1.0], &with_a_bias_of_codes(), &mut [0.0]);
}

#[test]
#[should_panic(expected = "its bias is of codes, the sums are not")]
fn a_bias_of_codes_for_windows_of_floats_is_refused() {
    let windows = Windows::new(&[1.0_f32], [1; 4], POINTS).unwrap();
    let kernel = Depthwise::new(&[1.0_f32], 1, 1).unwrap();
    kernel.convolve(&windows, &with_a_bias_of_codes(), &mut [0.0]);
}

#[test]
#[should_panic(expected = "its bias is of codes, the sums are not")]
fn a_bias_of_codes_for_scaled_sums_is_refused() {
    let blocks = Blocks::new(2, &[0.5]);
    let matrix = IntegerMatrix::in_blocks(&[1, 2], [2, 1], 8, blocks).unwrap();
    let left = Rows::dense(&[1_i16, 1], 2);
    matrix.multiply(&left, &with_a_bias_of_codes(), &mut [0.0]);
}

#[test]
#[should_panic(expected = "channels from 2 on, 2 of them, of 3")]
fn a_group_of_channels_that_are_not_there_is_refused() {
    let windows = Windows::new(&[0.0_f32; 6], [1, 1, 2, 3], POINTS).unwrap();
    let _ = windows.group(2, 2);
}
