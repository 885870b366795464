//! The compressed layout of N:M sparsity.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean::prune::{NMTensor, PruneError};
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
