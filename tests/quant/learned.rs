//! Learned scales and zero points.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean::quant::{
    Granularity, NumberFormat, QuantParams, Scheme,
    fake::{Clip, LearnedGradient, fake_quantize_learned},
    fake_quantize,
};

use crate::support::{Target, each_device, numbers, on_tracked, tensor, values};

const SHAPE: [usize; 2] = [6, 8];

fn schemes() -> Vec<Scheme> {
    let granularities = [
        Granularity::PerTensor,
        Granularity::PerChannel { axis: 0 },
        Granularity::PerChannel { axis: 1 },
        Granularity::PerBlock {
            extents: vec![3, 4],
        },
        // The last ones have 2 rows and 3 columns.
        Granularity::PerBlock {
            extents: vec![4, 5],
        },
    ];
    let formats = [
        Scheme::affine(NumberFormat::int(4)),
        Scheme::affine(NumberFormat::uint8()),
        Scheme::symmetric(NumberFormat::E4M3),
    ];
    let schemes = granularities.iter().flat_map(|granularity| {
        formats
            .iter()
            .map(|scheme| scheme.clone().with_granularity(granularity.clone()))
    });
    schemes.collect()
}

/// Scales below and above what the values need, zero points between integers.
fn qparams(scheme: &Scheme, device: &Device) -> QuantParams {
    let count = scheme.group_count(&SHAPE).unwrap();
    let tensor = |values: Vec<f32>| {
        Tensor::<1>::from_data(TensorData::new(values, [count]), device).require_grad()
    };
    let scale = numbers(7, count).into_iter();
    let scale = scale.map(|x| (0.05 + x.abs()) * 8.0 / scheme.quant_max());
    let zero = numbers(8, count).into_iter();
    let zero = zero.map(|x| match scheme.format.is_int() {
        true => scheme.quant_min() + 4.0 + 3.0 * x,
        false => 0.0,
    });
    QuantParams {
        scale: tensor(scale.collect()),
        zero_point: tensor(zero.collect()),
    }
}

/// The gradients of the documentation, in F64, element by element.
#[test]
fn gradients_are_those_of_the_formula() {
    each_device(|target| {
        for scheme in schemes() {
            for clip in [Clip::AfterRounding, Clip::BeforeRounding] {
                formula(&scheme, LearnedGradient { clip, factor: 0.25 }, target);
            }
        }
    });
}

fn formula(scheme: &Scheme, gradient: LearnedGradient, target: &Target) {
    let device = target.device.clone().autodiff();
    let qparams = qparams(scheme, &device);
    let x = (tensor::<2>(1, SHAPE, &device) * 8.0).require_grad();
    let y = fake_quantize_learned(x.clone(), &qparams, scheme, gradient);
    let dy = tensor::<2>(2, SHAPE, &device);
    let grads = (y * dy.clone()).sum().backward();

    let (scale, zero) = (
        values(qparams.scale.clone()),
        values(qparams.zero_point.clone()),
    );
    let (min, max) = (f64::from(scheme.quant_min()), f64::from(scheme.quant_max()));
    let groups = scheme.group_shape(&SHAPE).unwrap();
    let extents = match &scheme.granularity {
        Granularity::PerBlock { extents } => extents.clone(),
        _ => vec![SHAPE[0] / groups[0], SHAPE[1] / groups[1]],
    };
    let mut expected = [vec![0.0; scale.len()], vec![0.0; scale.len()]];
    let mut magnitudes = expected.clone();
    let mut expected_dx = Vec::new();
    for (index, (x, dy)) in values(x.clone()).into_iter().zip(values(dy)).enumerate() {
        let (row, column) = (index / SHAPE[1], index % SHAPE[1]);
        let group = row / extents[0] * groups[1] + column / extents[1];
        let zero = f64::from(zero[group]).round_ties_even().clamp(min, max);
        let exact = f64::from(x) / f64::from(scale[group]);
        // Beyond the bounds the number need not be known.
        let q = match scheme.format.is_int() {
            true => exact.round_ties_even() + zero,
            false if exact.abs() >= 464.0 => 464f64.copysign(exact),
            false => f64::from(scheme.format.round(exact as f32)),
        };
        let inside = match gradient.clip {
            Clip::AfterRounding => q >= min && q <= max,
            Clip::BeforeRounding => exact + zero > min && exact + zero < max,
        };
        let dy = f64::from(dy);
        let factor = f64::from(gradient.factor);
        let number = q.clamp(min, max) - zero;
        expected_dx.push(if inside { dy as f32 } else { 0.0 });
        // Of the scale `number - exact` is summed, of the zero point `-step`.
        let (exact, step) = match inside {
            true => (exact, 0.0),
            false => (0.0, f64::from(scale[group])),
        };
        expected[0][group] += factor * dy * (number - exact);
        expected[1][group] -= factor * dy * step;
        magnitudes[0][group] += factor * dy.abs() * (number.abs() + exact.abs());
        magnitudes[1][group] += factor * dy.abs() * step;
    }
    let name = format!("{scheme}, {gradient:?} on {}", target.name);
    assert_eq!(values(x.grad(&grads).unwrap()), expected_dx, "{name}: dx");
    let parameters = [qparams.scale, qparams.zero_point];
    let wanted = expected.into_iter().zip(magnitudes);
    for (parameter, (expected, magnitudes)) in parameters.iter().zip(wanted) {
        let found = values(parameter.grad(&grads).unwrap());
        assert_eq!(found.len(), expected.len(), "{name}");
        let wanted = expected.into_iter().zip(magnitudes);
        for (found, (expected, magnitude)) in found.into_iter().zip(wanted) {
            // Up to 48 terms, rounded up to 4 times each, added up in F32.
            let tolerance = (48.0 + 4.0) * 2f64.powi(-24) * magnitude;
            assert!(
                (f64::from(found) - expected).abs() <= tolerance,
                "{name}: {found} instead of {expected}"
            );
        }
    }
}

#[test]
fn values_are_those_of_fake_quantize_with_a_rounded_zero_point() {
    each_device(|target| {
        for scheme in schemes() {
            let device = target.device.clone().autodiff();
            let qparams = qparams(&scheme, &device);
            let x = || tensor::<2>(1, SHAPE, &device) * 8.0;
            let gradient = LearnedGradient::lsq(&scheme, &SHAPE).unwrap();
            let learned = fake_quantize_learned(x(), &qparams, &scheme, gradient);
            let rounded = QuantParams {
                scale: qparams.scale.clone(),
                zero_point: qparams.zero_point.clone().round(),
            };
            let expected = fake_quantize(x(), &rounded, &scheme);
            assert_eq!(values(learned), values(expected), "{scheme}");
        }
    });
}

/// A step of the optimizer may push a scale below zero; the next one must be able to bring it back.
#[test]
fn a_scale_that_became_negative_still_has_a_finite_gradient() {
    on_tracked(|device| {
        let scheme = Scheme::symmetric(NumberFormat::int8());
        let scale = Tensor::<1>::from_floats([-0.1], &device).require_grad();
        let qparams = QuantParams::symmetric(scale.clone(), &scheme);
        let x = Tensor::<1>::from_floats([1.0, -1.0], &device);
        let gradient = LearnedGradient::lsq(&scheme, &[2]).unwrap();
        let y = fake_quantize_learned(x.clone(), &qparams, &scheme, gradient);
        let loss = (y.clone() - x).square().sum();
        let gradient = values(scale.grad(&loss.backward()).unwrap())[0];
        assert!(values(y).iter().all(|y| y.is_finite()));
        assert!(gradient < 0.0, "descent makes the scale larger: {gradient}");
    });
}

#[test]
fn what_is_not_learned_gets_no_gradient() {
    on_tracked(|device| {
        let scheme = Scheme::affine(NumberFormat::uint8());
        let gradient = LearnedGradient::lsq(&scheme, &[2]).unwrap();
        let scale = Tensor::<1>::from_floats([0.1], &device).require_grad();
        let zero_point = Tensor::<1>::from_floats([3.0], &device);
        let qparams = QuantParams {
            scale: scale.clone(),
            zero_point: zero_point.clone(),
        };
        let x = Tensor::<1>::from_floats([1.0, -1.0], &device);
        let y = fake_quantize_learned(x.clone(), &qparams, &scheme, gradient);
        let grads = y.sum().backward();
        assert!(scale.grad(&grads).is_some());
        assert!(zero_point.grad(&grads).is_none());
        assert!(x.grad(&grads).is_none());
    });
}

#[test]
fn the_other_gradients_do_not_depend_on_whether_the_zero_point_is_learned() {
    on_tracked(|device| {
        for scheme in schemes() {
            let learned = |zero_point: bool| {
                let x = tensor::<2>(1, SHAPE, &device)
                    .mul_scalar(4.0)
                    .require_grad();
                let mut qparams = qparams(&scheme, &device);
                qparams.zero_point = qparams.zero_point.set_require_grad(zero_point);
                let gradient = LearnedGradient::lsq(&scheme, &SHAPE).unwrap();
                let y = fake_quantize_learned(x.clone(), &qparams, &scheme, gradient);
                let grads = (y * tensor(2, SHAPE, &device)).sum().backward();
                let of_zero = qparams.zero_point.grad(&grads);
                assert_eq!(of_zero.is_some(), zero_point);
                [
                    values(x.grad(&grads).unwrap()),
                    values(qparams.scale.grad(&grads).unwrap()),
                ]
            };
            assert_eq!(learned(false), learned(true), "{scheme}");
        }
    });
}

#[test]
fn the_factor_of_the_gradients_counts_the_elements_that_share_a_scale() {
    let scheme = Scheme::symmetric(NumberFormat::int(4));
    let per_tensor = LearnedGradient::lsq(&scheme, &[8, 14]).unwrap();
    assert_eq!(per_tensor.factor, 1.0 / (112.0f32 * 7.0).sqrt());
    let per_channel = scheme.with_granularity(Granularity::PerChannel { axis: 0 });
    let per_channel = LearnedGradient::lsq(&per_channel, &[8, 14]).unwrap();
    assert_eq!(per_channel.factor, 1.0 / (14.0f32 * 7.0).sqrt());
}

#[test]
fn half_tensors_get_half_gradients_and_f32_scales() {
    let device = Device::flex().autodiff();
    let scheme = Scheme::symmetric(NumberFormat::int(4));
    let scale = Tensor::<1>::from_floats([0.3], &device).require_grad();
    let qparams = QuantParams::symmetric(scale.clone(), &scheme);
    let x = tensor::<1>(5, [64], &device).cast(DType::F16);
    let x = x.detach().require_grad();
    let gradient = LearnedGradient::lsq(&scheme, &[64]).unwrap();
    let y = fake_quantize_learned(x.clone(), &qparams, &scheme, gradient);
    let grads = y.clone().sum().backward();
    assert_eq!(y.dtype(), DType::F16);
    assert_eq!(x.grad(&grads).unwrap().dtype(), DType::F16);
    assert_eq!(scale.grad(&grads).unwrap().dtype(), DType::F32);
}

#[test]
fn learned_scales_of_another_dtype_have_the_gradients_of_f32_in_theirs() {
    on_tracked(|device| {
        let dtypes = [DType::F16, DType::F64].into_iter();
        for dtype in dtypes.filter(|dtype| device.supports_dtype(*dtype)) {
            for scheme in schemes() {
                // The same numbers in both.
                let learned = |held: DType| {
                    let leaf = |of: Tensor<1>| of.cast(dtype).cast(held).detach().require_grad();
                    let QuantParams { scale, zero_point } = qparams(&scheme, &device);
                    let qparams = QuantParams {
                        scale: leaf(scale),
                        zero_point: leaf(zero_point),
                    };
                    let x = (tensor::<2>(1, SHAPE, &device) * 8.0).require_grad();
                    let gradient = LearnedGradient {
                        clip: Clip::AfterRounding,
                        factor: 0.25,
                    };
                    let y = fake_quantize_learned(x.clone(), &qparams, &scheme, gradient);
                    let grads = (y.clone() * tensor(2, SHAPE, &device)).sum().backward();
                    let parameters = [qparams.scale, qparams.zero_point];
                    let of_parameters = parameters.map(|parameter| {
                        let gradient = parameter.grad(&grads).unwrap();
                        assert_eq!(gradient.dtype(), held, "{scheme}");
                        values(gradient.cast(dtype))
                    });
                    ([y, x.grad(&grads).unwrap()].map(values), of_parameters)
                };
                assert_eq!(learned(dtype), learned(DType::F32), "{scheme}, {dtype:?}");
            }
        }
    });
}
