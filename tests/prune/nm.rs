//! The compressed layout of N:M sparsity.

use burn::module::Param;
use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean::prune::{NMTensor, PruneError, SparseRecord};
use proptest::prelude::*;

use crate::support::{each_device, numbers};

/// `[8, 3]` with zeros in rows 1, 2 of each group of four: 2:4 along axis 0.
fn two_of_four() -> TensorData {
    let mut weights = numbers(1, 24);
    for (at, weight) in weights.iter_mut().enumerate() {
        if matches!(at / 3 % 4, 1 | 2) {
            *weight = 0.0;
        }
    }
    TensorData::new(weights, [8, 3])
}

#[test]
fn two_of_four_comes_back_bit_by_bit_in_every_dtype() {
    each_device(|target| {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !target.device.supports_dtype(dtype) {
                continue;
            }
            let data = two_of_four().convert_dtype(dtype);
            let weight = Tensor::<2>::from_data(data.clone(), (&target.device, dtype));
            let compressed = NMTensor::compress(weight, 2, 4, 0).unwrap();
            // 6 groups of 2 values and 4 bits.
            assert_eq!(compressed.bytes(), 12 * dtype.size() + 3);
            assert_eq!(compressed.dense_bytes(), 24 * dtype.size());
            assert_eq!(compressed.positions(), [0b1100_1100; 3]);
            let found = compressed
                .decompress::<2>(&target.device)
                .unwrap()
                .into_data();
            assert_eq!(found.as_bytes(), data.as_bytes());
        }
    });
}

/// JSON is the format that shows what is in it; the numbers are those of `two_of_four`.
#[test]
fn a_compressed_weight_is_written_and_read_bit_by_bit() {
    each_device(|target| {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !target.device.supports_dtype(dtype) {
                continue;
            }
            let data = two_of_four().convert_dtype(dtype);
            let weight = Tensor::<2>::from_data(data.clone(), (&target.device, dtype));
            let compressed = NMTensor::compress(weight, 2, 4, 0).unwrap();
            let json = serde_json::to_value(&compressed).unwrap();
            assert_eq!(json["shape"], serde_json::json!([8, 3]));
            assert_eq!(json["positions"], serde_json::json!([204, 204, 204]));
            let read: NMTensor = serde_json::from_value(json).unwrap();
            assert_eq!(read, compressed);
            let found = read.decompress::<2>(&target.device).unwrap().into_data();
            assert_eq!((found.dtype(), found.as_bytes()), (dtype, data.as_bytes()));
        }
    });
}

#[test]
fn parts_that_are_no_compressed_weight_are_refused() {
    // Two groups of 2:4 along the only axis, positions 0 and 3 of both.
    let build = |shape: &[usize], dtype, values: usize, positions: &[u8]| {
        NMTensor::from_parts(2, 4, 0, shape, dtype, vec![1; values], positions.to_vec())
    };
    let whole = build(&[8], DType::F16, 8, &[0b1100_1100]).unwrap();
    assert_eq!((whole.n(), whole.m(), whole.axis()), (2, 4, 0));
    assert_eq!((whole.shape(), whole.dtype()), (&[8][..], DType::F16));
    let mismatch = |expected, found, what| PruneError::Mismatch {
        what,
        expected,
        found,
    };
    assert_eq!(
        build(&[8], DType::F16, 7, &[0b1100_1100]).unwrap_err(),
        mismatch(8, 7, "bytes of N:M values")
    );
    assert_eq!(
        build(&[8], DType::F16, 8, &[0b1100_1100, 0]).unwrap_err(),
        mismatch(1, 2, "bytes of N:M positions")
    );
    let positions = |group, positions: &[usize]| PruneError::NMPositions {
        pattern: "2:4".into(),
        group,
        positions: positions.to_vec(),
    };
    // Twice the same, and the larger one first.
    for (byte, found) in [(0b0101_1100, [1, 1]), (0b0011_1100, [3, 0])] {
        let error = build(&[8], DType::F16, 8, &[byte]).unwrap_err();
        assert_eq!(error, positions(1, &found));
    }
    // One group leaves four bits.
    let error = build(&[4], DType::F16, 4, &[0b0010_1100]).unwrap_err();
    assert_eq!(error, positions(1, &[2]));
    // 3 needs two bits, of which M = 3 has no use.
    let one = |positions| NMTensor::from_parts(1, 3, 0, [3], DType::F32, vec![0; 4], positions);
    assert!(one(vec![2]).is_ok());
    let beyond = PruneError::NMPositions {
        pattern: "1:3".into(),
        group: 0,
        positions: vec![3],
    };
    assert_eq!(one(vec![3]).unwrap_err(), beyond);
    let field = |result: Result<NMTensor, PruneError>| match result {
        Err(PruneError::InvalidConfig { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(build(&[8], DType::I32, 16, &[0; 1])), "dtype");
    assert_eq!(field(build(&[4, usize::MAX], DType::F16, 8, &[0])), "shape");
    assert_eq!(field(build(&[], DType::F16, 8, &[0])), "axis");
    let error = build(&[6], DType::F16, 8, &[0]).unwrap_err();
    assert!(
        matches!(error, PruneError::PatternDoesNotDivide { .. }),
        "{error}"
    );
    // The same through serde.
    let mut json = serde_json::to_value(&whole).unwrap();
    json["positions"] = serde_json::json!([0]);
    let error = serde_json::from_value::<NMTensor>(json).unwrap_err();
    assert!(error.to_string().contains("[0, 0] of group 0"), "{error}");
}

/// Two positions of two bits are as many as four flags.
#[test]
fn a_record_of_two_of_four_takes_as_few_bytes() {
    let device = Device::flex();
    let mut linear = LinearConfig::new(8, 3).with_bias(false).init(&device);
    linear.weight = Param::from_data(two_of_four(), &device);
    let compressed = NMTensor::compress(linear.weight.val(), 2, 4, 0).unwrap();
    let sizes = SparseRecord::from_module(&linear).unwrap().sizes().unwrap();
    assert_eq!(sizes.tensors[0].sparse_bytes, compressed.bytes());
}

#[test]
fn groups_run_along_the_chosen_axis() {
    let device = Device::flex();
    let weight = Tensor::<2>::from_data(two_of_four(), &device).transpose();
    assert!(NMTensor::compress(weight.clone(), 2, 4, 1).is_ok());
    let kernel = weight.reshape([1, 3, 8, 1]);
    assert!(NMTensor::compress(kernel, 2, 4, 2).is_ok());
}

#[test]
fn a_weight_without_the_pattern_is_refused_with_its_place() {
    let device = Device::flex();
    let mut weights: Vec<f32> = two_of_four().iter().collect();
    // Third column, second group: rows 4 to 7. A -0.0 is a weight, too.
    weights[5 * 3 + 2] = -0.0;
    let weight = Tensor::<2>::from_data(TensorData::new(weights, [8, 3]), &device);
    let error = NMTensor::compress(weight.clone(), 2, 4, 0).unwrap_err();
    let expected = PruneError::PatternViolated {
        pattern: "2:4".into(),
        group: 5,
        first: 4 * 3 + 2,
        nonzeros: 3,
    };
    assert_eq!(error, expected);
    let error = NMTensor::compress(weight.clone(), 2, 4, 1).unwrap_err();
    assert!(
        matches!(error, PruneError::PatternDoesNotDivide { axis: 1, .. }),
        "{error}"
    );
    for (n, m, axis) in [(0, 4, 0), (4, 4, 0), (2, 512, 0), (2, 4, 2)] {
        let error = NMTensor::compress(weight.clone(), n, m, axis).unwrap_err();
        assert!(matches!(error, PruneError::InvalidConfig { .. }), "{error}");
    }
    let compressed = NMTensor::compress(weight, 3, 4, 0).unwrap();
    let error = compressed.decompress::<3>(&device).unwrap_err();
    assert!(
        matches!(
            error,
            PruneError::Mismatch {
                expected: 2,
                found: 3,
                ..
            }
        ),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_pattern_comes_back(
        (n, m) in (2usize..12).prop_flat_map(|m| (1..m, Just(m))),
        lines in 1usize..4,
        groups in 1usize..4,
        inner in 1usize..4,
        seed in any::<u64>(),
    ) {
        let shape = [lines, groups * m, inner];
        let mut weights = numbers(seed, lines * groups * m * inner);
        // Keeps n places of each group, others for each group.
        for (at, weight) in weights.iter_mut().enumerate() {
            let (line, place, column) = (at / (groups * m * inner), at / inner % (groups * m), at % inner);
            let turn = seed as usize % m + line + column + place / m;
            if (place % m + turn) % m >= n {
                *weight = 0.0;
            }
        }
        let data = TensorData::new(weights, shape);
        let device = Device::flex();
        let weight = Tensor::<3>::from_data(data.clone(), &device);
        let compressed = NMTensor::compress(weight, n, m, 1).unwrap();
        let bits = usize::BITS - (m - 1).leading_zeros();
        let values = lines * groups * inner * n;
        prop_assert_eq!(compressed.bytes(), values * 4 + (values * bits as usize).div_ceil(8));
        let found = compressed.decompress::<3>(&device).unwrap().into_data();
        prop_assert_eq!(found.as_bytes(), data.as_bytes());
    }
}
