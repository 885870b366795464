//! Scale and zero point of ranges and tensors.

use burn::tensor::{DType, Device, Tensor};
use burn_lean::quant::{
    FakeQuantizeConfig, Granularity, Mapping, NumberFormat, QuantError, QuantParams, Scheme,
    fake::Range,
    fake_quantize,
    format::{ScaleFormat, ScaleRounding},
};

use crate::support::{each_device, on_tracked, tensor, values};

fn range(min: f32, max: f32, device: &Device) -> Range {
    Range {
        min: Tensor::from_floats([min], device),
        max: Tensor::from_floats([max], device),
    }
}

#[test]
fn each_mapping_has_its_formula() {
    each_device(|target| {
        let int4 = Scheme::symmetric(NumberFormat::int(4));
        for (scheme, min, max, scale, zero) in [
            (int4.clone(), -1.5, 0.75, 0.2, 0.0),
            (
                Scheme::symmetric(NumberFormat::int(4).narrow()),
                -1.4,
                0.7,
                0.2,
                0.0,
            ),
            (
                int4.clone().with_mapping(Mapping::SymmetricNoClipping),
                -1.6,
                0.7,
                0.2,
                0.0,
            ),
            (
                int4.with_mapping(Mapping::SymmetricNoClipping),
                -0.8,
                1.4,
                0.2,
                0.0,
            ),
            (
                Scheme::symmetric(NumberFormat::uint(4)),
                -1.5,
                0.75,
                0.2,
                8.0,
            ),
            (Scheme::affine(NumberFormat::uint(4)), -1.0, 2.0, 0.2, 5.0),
            (Scheme::affine(NumberFormat::int(4)), -1.0, 2.0, 0.2, -3.0),
            // Zero is always inside.
            (Scheme::affine(NumberFormat::uint(4)), 1.0, 3.0, 0.2, 0.0),
            (Scheme::affine(NumberFormat::uint(4)), -3.0, -1.0, 0.2, 15.0),
            (Scheme::symmetric(NumberFormat::E4M3), -44.8, 1.0, 0.1, 0.0),
        ] {
            let qparams = QuantParams::from_range(range(min, max, &target.device), &scheme);
            let found = values(qparams.scale)[0];
            // A difference and a quotient.
            assert!(
                (found - scale).abs() <= 2.0 * scale * f32::EPSILON,
                "{scheme}: {found}"
            );
            assert_eq!(values(qparams.zero_point), [zero], "{scheme}");
        }
    });
}

#[test]
fn a_range_of_zero_gets_the_smallest_scale() {
    on_tracked(|device| {
        for scheme in [
            Scheme::symmetric(NumberFormat::int8()),
            Scheme::affine(NumberFormat::uint8()),
            Scheme::nvfp4(ScaleRounding::Up),
            Scheme::mxfp4(ScaleRounding::Standard),
        ] {
            let x = Tensor::<2>::zeros([2, 32], &device).require_grad();
            let qparams = QuantParams::of(&x, &scheme).unwrap();
            let y = fake_quantize(x.clone(), &qparams, &scheme);
            let grads = y.clone().sum().backward();
            assert!(
                values(qparams.scale).iter().all(|scale| *scale > 0.0),
                "{scheme}"
            );
            assert_eq!(values(y), [0.0; 64], "{scheme}");
            assert_eq!(values(x.grad(&grads).unwrap()), [1.0; 64], "{scheme}");
        }
    });
    let device = Device::flex();
    let scheme = Scheme::symmetric(NumberFormat::int8());
    let smallest = QuantParams::from_range(range(0.0, 0.0, &device), &scheme);
    assert_eq!(values(smallest.scale), [QuantParams::EPSILON]);
}

#[test]
fn power_of_two_scales_are_exact_at_and_beside_powers_of_two() {
    each_device(|target| {
        for rounding in [ScaleRounding::Up, ScaleRounding::Standard] {
            let scheme = Scheme::symmetric(NumberFormat::E2M1)
                .with_scale_format(ScaleFormat::PowerOfTwo(rounding));
            for exponent in [-90, -20, -1, 0, 1, 3, 40, 100] {
                let power = f32::exp2(exponent as f32);
                for (max, up, standard) in [
                    (6.0 * power, power, power),
                    (6.0 * power.next_up(), 2.0 * power, power),
                    (8.0 * power, 2.0 * power, 2.0 * power),
                    ((8.0 * power).next_down(), 2.0 * power, power),
                ] {
                    let expected = match rounding {
                        ScaleRounding::Up => up,
                        ScaleRounding::Standard => standard,
                    };
                    let range = range(0.0, max, &target.device);
                    let found = values(QuantParams::from_range(range, &scheme).scale);
                    assert_eq!(found, [expected], "{max:e}, {rounding:?}");
                }
            }
        }
    });
}

#[test]
fn the_mapping_without_clipping_clips_nothing_where_scales_are_e4m3() {
    each_device(|target| {
        let scheme = Scheme::symmetric(NumberFormat::int(4))
            .with_mapping(Mapping::SymmetricNoClipping)
            .with_granularity(Granularity::PerBlock { extents: vec![16] })
            .with_scale_format(ScaleFormat::E4M3(ScaleRounding::Up));
        // The largest number of each side, which one scale has to reach.
        for largest in [7.0, -8.0] {
            let mut numbers = [0.0_f32; 16];
            numbers[0] = largest;
            let x = Tensor::<1>::from_floats(numbers, &target.device);
            let qparams = QuantParams::of(&x, &scheme).unwrap();
            let found = values(fake_quantize(x, &qparams, &scheme))[0];
            assert!((found - largest).abs() < 1e-5, "{found}");
        }
    });
}

#[test]
fn ranges_of_half_tensors_are_f32_and_have_no_gradient() {
    let device = Device::flex().autodiff();
    let x = tensor::<2>(1, [4, 8], &device)
        .cast(DType::BF16)
        .require_grad();
    let scheme = Scheme::symmetric(NumberFormat::int8())
        .with_granularity(Granularity::PerChannel { axis: 0 });
    let qparams = QuantParams::of(&x, &scheme).unwrap();
    assert_eq!(qparams.scale.dtype(), DType::F32);
    let grads = (qparams.scale.sum() + x.clone().cast(DType::F32).sum()).backward();
    assert_eq!(values(x.grad(&grads).unwrap()), [1.0; 32]);
}

/// The smallest scale is no number of F16, and the bounds need not be those of a tensor.
#[test]
fn a_range_in_another_dtype_gives_scales_in_f32() {
    let device = Device::flex();
    for (dtype, scheme) in [
        (DType::F16, Scheme::affine(NumberFormat::uint8())),
        (DType::F16, Scheme::nvfp4(ScaleRounding::Up)),
        (DType::F64, Scheme::symmetric(NumberFormat::int8())),
    ] {
        let Range { min, max } = range(-0.25, 1e-3, &device);
        let other = || Range {
            min: min.clone().cast(dtype),
            max: max.clone().cast(dtype),
        };
        let same = Range {
            min: other().min.cast(DType::F32),
            max: other().max.cast(DType::F32),
        };
        let quantizer = FakeQuantizeConfig::new(scheme.clone()).init_for(&[16], &device);
        let quantizer = quantizer.unwrap().with_range(other());
        let expected = QuantParams::from_range(same, &scheme);
        for found in [
            QuantParams::from_range(other(), &scheme),
            quantizer.qparams().unwrap(),
        ] {
            assert_eq!(found.scale.dtype(), DType::F32, "{scheme}");
            assert_eq!(values(found.scale), values(expected.scale.clone()));
            assert_eq!(
                values(found.zero_point),
                values(expected.zero_point.clone())
            );
        }
    }
}

#[test]
fn a_nan_is_seen_in_the_range() {
    let device = Device::flex();
    for position in [0, 7, 20, 32] {
        let mut x = vec![1.0; 33];
        x[position] = f32::NAN;
        let x = Tensor::<1>::from_floats(x.as_slice(), &device);
        let scheme = Scheme::symmetric(NumberFormat::int8());
        let range = Range::of(&x, &scheme).unwrap();
        assert!(values(range.min)[0].is_nan() && values(range.max)[0].is_nan());
    }
}

/// Of weights with zero mean, LSQ+ starts from three standard deviations.
#[test]
fn learned_scales_start_for_each_group() {
    each_device(|target| {
        let x = Tensor::<2>::from_floats([[1.0, -1.0], [4.0, -4.0]], &target.device);
        let scheme = Scheme::symmetric(NumberFormat::int(4))
            .with_granularity(Granularity::PerChannel { axis: 0 });
        let plus = QuantParams::lsq_plus_weights(&x, &scheme).unwrap();
        assert_eq!(values(plus.scale), [3.0 / 8.0, 12.0 / 8.0]);
        let lsq = QuantParams::lsq(&x, &scheme).unwrap();
        for (found, expected) in values(lsq.scale).into_iter().zip([2.0, 8.0]) {
            let expected = expected / 7f32.sqrt();
            assert!((found - expected).abs() <= 2.0 * expected * f32::EPSILON);
        }
        // Activations after a relu: all codes on one side.
        let scheme = Scheme::affine(NumberFormat::uint(4));
        let lsq = QuantParams::lsq(&x.abs(), &scheme).unwrap();
        assert_eq!(values(lsq.zero_point), [0.0]);
        let expected = 5.0 / 15f32.sqrt();
        assert!((values(lsq.scale)[0] - expected).abs() <= 2.0 * expected * f32::EPSILON);
    });
}

#[test]
fn numbers_whose_squares_are_infinite_have_learned_scales() {
    each_device(|target| {
        // The mean is that of both, and the deviation half of their difference.
        let x = Tensor::<2>::from_floats([[1e20, 1.0], [3.0, -1.0]], &target.device);
        let scheme = Scheme::symmetric(NumberFormat::int(4))
            .with_granularity(Granularity::PerChannel { axis: 0 });
        let scales = values(QuantParams::lsq_plus_weights(&x, &scheme).unwrap().scale);
        let expected = [(0.5e20 + 1.5e20) / 8.0, (1.0 + 6.0) / 8.0];
        for (scale, expected) in scales.into_iter().zip(expected) {
            assert!((scale / expected - 1.0).abs() < 1e-5, "{scale}");
        }
    });
}

#[test]
fn a_tensor_that_does_not_fit_is_refused() {
    let device = Device::flex();
    let empty = Tensor::<2>::zeros([0, 3], &device);
    let scheme = Scheme::symmetric(NumberFormat::int8());
    let shape = vec![0, 3];
    assert_eq!(
        Range::of(&empty, &scheme).unwrap_err(),
        QuantError::EmptyTensor {
            shape: shape.clone()
        }
    );
    let refused = QuantError::EmptyTensor { shape };
    assert_eq!(QuantParams::of(&empty, &scheme).unwrap_err(), refused);
    assert_eq!(QuantParams::lsq(&empty, &scheme).unwrap_err(), refused);
    assert_eq!(
        QuantParams::lsq_plus_weights(&empty, &scheme).unwrap_err(),
        refused
    );
}

#[test]
fn an_affine_range_wider_than_the_largest_number_has_a_scale() {
    each_device(|target| {
        let scheme = Scheme::affine(NumberFormat::uint8());
        let range = range(-f32::MAX, f32::MAX, &target.device);
        let scale = values(QuantParams::from_range(range, &scheme).scale);
        assert_eq!(scale, [f32::MAX / 127.5]);
    });
}
