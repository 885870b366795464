//! Values and gradients of fake quantization.

use burn::tensor::{DType, Tensor, TensorData};
use burn_lean::quant::{
    Granularity, Mapping, NumberFormat, QuantParams, Scheme,
    fake::{Range, from_codes, to_codes},
    fake_quantize,
    format::ScaleRounding,
};
use proptest::prelude::*;

use crate::support::cases;
use crate::support::{each_device, numbers, on_tracked, tensor, values};

/// Schemes of every format, mapping, granularity and format of scales, for shape `[8, 32]`.
fn schemes() -> Vec<Scheme> {
    let mut schemes = vec![
        Scheme::nvfp4(ScaleRounding::Up),
        Scheme::nvfp4(ScaleRounding::Standard),
        Scheme::mxfp4(ScaleRounding::Up),
        Scheme::mxfp4(ScaleRounding::Standard),
    ];
    let granularities = [
        Granularity::PerTensor,
        Granularity::PerChannel { axis: 0 },
        Granularity::PerChannel { axis: 1 },
        Granularity::PerToken,
        Granularity::PerBlock {
            extents: vec![4, 8],
        },
    ];
    let formats = [
        Scheme::symmetric(NumberFormat::int8()),
        Scheme::symmetric(NumberFormat::int(2).narrow()),
        Scheme::symmetric(NumberFormat::int(4)).with_mapping(Mapping::SymmetricNoClipping),
        Scheme::symmetric(NumberFormat::uint(4)),
        Scheme::affine(NumberFormat::uint8()),
        Scheme::affine(NumberFormat::int(3)),
        Scheme::symmetric(NumberFormat::E4M3),
        Scheme::symmetric(NumberFormat::E5M2),
        Scheme::symmetric(NumberFormat::E2M1),
    ];
    for granularity in &granularities {
        let formats = formats.iter().cloned();
        schemes.extend(formats.map(|scheme| scheme.with_granularity(granularity.clone())));
    }
    schemes
}

fn bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// `count` scales and zero points that fit the scheme, the same on every device.
fn qparams(scheme: &Scheme, shape: &[usize], device: &burn::tensor::Device) -> QuantParams {
    let count = scheme.group_count(shape).unwrap();
    let scale = numbers(3, count).into_iter().map(|x| 0.01 + x.abs() / 10.0);
    let scale = TensorData::new(scale.collect::<Vec<f32>>(), [count]);
    let mut qparams = QuantParams::symmetric(Tensor::from_data(scale, device), scheme);
    if scheme.mapping == Mapping::Affine {
        let (min, max) = (scheme.quant_min(), scheme.quant_max());
        let zero = numbers(4, count).into_iter();
        let zero = zero.map(|x| (min + (max - min) * x.abs()).round());
        let zero = TensorData::new(zero.collect::<Vec<f32>>(), [count]);
        qparams.zero_point = Tensor::from_data(zero, device);
    }
    qparams
}

#[test]
fn whether_someone_else_holds_a_tensor_changes_neither_it_nor_the_numbers() {
    each_device(|target| {
        // So large that several threads share it, and a part of it that starts in the middle.
        let whole = tensor::<2>(3, [3, 70_001], &target.device);
        let before = values(whole.clone());
        let scheme = Scheme::affine(NumberFormat::uint(4));
        let qparams = QuantParams::of(&whole, &scheme).unwrap();
        let quantize = |x: Tensor<2>| fake_quantize(x, &qparams, &scheme);
        let part = whole.clone().slice([1..2]);
        let of_part = values(quantize(part));
        let held = values(quantize(whole.clone()));
        assert_eq!(values(whole.clone()), before);
        let alone = tensor::<2>(3, [3, 70_001], &target.device);
        assert_eq!(values(quantize(alone)), held);
        assert_eq!(held[70_001..2 * 70_001], of_part);
        let alone = tensor::<2>(3, [3, 70_001], &target.device).slice([1..2]);
        assert_eq!(values(quantize(alone)), of_part);
    });
}

#[test]
fn every_part_of_a_tensor_that_threads_share_counts() {
    on_tracked(|device| {
        let mut x = numbers(3, 100_003);
        // Within the part of one thread, and at the end of what is left over.
        (x[50_000], x[100_002]) = (-2.0, 3.0);
        let scheme = Scheme::symmetric(NumberFormat::int(4));
        let tracked = Tensor::<1>::from_floats(&x[..], &device).require_grad();
        let range = Range::of(&tracked, &scheme).unwrap();
        assert_eq!(
            (values(range.min), values(range.max)),
            (vec![-2.0], vec![3.0])
        );
        let scale = Tensor::from_floats([0.125], &device);
        let qparams = QuantParams::symmetric(scale, &scheme);
        let y = fake_quantize(tracked.clone(), &qparams, &scheme);
        let grads = y.clone().sum().backward();
        let steps: Vec<f32> = x.iter().map(|x| (x * 8.0).round_ties_even()).collect();
        let expected: Vec<f32> = steps.iter().map(|q| q.clamp(-8.0, 7.0) / 8.0).collect();
        assert_eq!(values(y), expected);
        let inside = steps.iter().map(|q| f32::from((-8.0..=7.0).contains(q)));
        let dx = values(tracked.grad(&grads).unwrap());
        assert_eq!(dx, inside.collect::<Vec<f32>>());
    });
}

#[test]
fn all_devices_give_the_same_bits() {
    let both = |scheme: &Scheme, device: &burn::tensor::Device| {
        let device = device.clone().autodiff();
        let x = (tensor::<2>(1, [8, 32], &device) * 3.0).require_grad();
        let y = fake_quantize(x.clone(), &qparams(scheme, &[8, 32], &device), scheme);
        let grads = (y.clone() * tensor(2, [8, 32], &device)).sum().backward();
        (bits(values(y)), bits(values(x.grad(&grads).unwrap())))
    };
    for scheme in schemes() {
        // Also where `BURN_DEVICE` leaves one device alone.
        let expected = both(&scheme, &burn::tensor::Device::flex());
        each_device(|target| {
            let found = both(&scheme, &target.device);
            assert_eq!(found, expected, "{scheme} on {}", target.name);
        });
    }
}

/// The formula in F64, element by element.
#[test]
fn values_and_gradients_are_those_of_the_formula() {
    let device = burn::tensor::Device::flex().autodiff();
    for scheme in schemes()
        .into_iter()
        .filter(|scheme| scheme.format.is_int())
    {
        let qparams = qparams(&scheme, &[8, 32], &device);
        let x = (tensor::<2>(1, [8, 32], &device) * 3.0).require_grad();
        let y = fake_quantize(x.clone(), &qparams, &scheme);
        let grads = y.clone().sum().backward();
        let (scale, zero) = (values(qparams.scale), values(qparams.zero_point));
        let y = values(y);
        let dx = values(x.grad(&grads).unwrap());
        let groups = scheme.group_shape(&[8, 32]).unwrap();
        for (index, x) in values(x).into_iter().enumerate() {
            let (row, column) = (index / 32 * groups[0] / 8, index % 32 * groups[1] / 32);
            let group = row * groups[1] + column;
            let (scale, zero) = (scale[group], f64::from(zero[group]));
            let q = f64::from((x * (1.0 / scale)).round_ties_even()) + zero;
            let (min, max) = (f64::from(scheme.quant_min()), f64::from(scheme.quant_max()));
            let expected = ((q.clamp(min, max) - zero) * f64::from(scale)) as f32;
            assert_eq!(y[index], expected, "{scheme}: y({x})");
            let inside = (min..=max).contains(&q);
            assert_eq!(dx[index], f32::from(u8::from(inside)), "{scheme}: dx({x})");
        }
    }
}

#[test]
fn nan_stays_and_infinities_saturate_without_gradient() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        for scheme in schemes() {
            let scheme = scheme.with_granularity(Granularity::PerTensor);
            let x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0];
            let x = Tensor::<1>::from_floats(x, &device).require_grad();
            let scale = Tensor::from_floats([0.5], &device);
            let qparams = QuantParams::symmetric(scale, &scheme);
            let y = fake_quantize(x.clone(), &qparams, &scheme);
            // NaN would spoil the sum.
            let sum = y.clone().mask_fill(y.clone().is_nan(), 0.0).sum();
            let dx = values(x.grad(&sum.backward()).unwrap());
            let zero = scheme.symmetric_zero_point();
            let y = values(y);
            let name = format!("{scheme} on {}", target.name);
            assert!(y[0].is_nan(), "{name}: {y:?}");
            assert_eq!(y[1], (scheme.quant_max() - zero) * 0.5, "{name}");
            assert_eq!(y[2], (scheme.quant_min() - zero) * 0.5, "{name}");
            assert_eq!(y[3].to_bits(), 0, "{name}: zero is positive");
            assert_eq!(dx, [0.0, 0.0, 0.0, 1.0], "{name}");
        }
    });
}

/// Half inputs are computed in F32; value and gradient come back in half.
#[test]
fn half_tensors_keep_their_dtype() {
    let device = burn::tensor::Device::flex().autodiff();
    let scheme = Scheme::symmetric(NumberFormat::int(4));
    let qparams = QuantParams::symmetric(Tensor::from_floats([0.3], &device), &scheme);
    for dtype in [DType::F16, DType::BF16] {
        let x = tensor::<1>(5, [64], &device) * 4.0;
        let x = x.cast(dtype).detach().require_grad();
        let y = fake_quantize(x.clone(), &qparams, &scheme);
        let grads = y.clone().sum().backward();
        assert_eq!(y.dtype(), dtype);
        let dx = x.grad(&grads).unwrap();
        assert_eq!(dx.dtype(), dtype);

        let exact = x.cast(DType::F32).detach().require_grad();
        let expected = fake_quantize(exact.clone(), &qparams, &scheme);
        let grads = expected.clone().sum().backward();
        assert_eq!(values(y), values(expected.cast(dtype)));
        assert_eq!(values(dx), values(exact.grad(&grads).unwrap()));
    }
}

/// As on a device whose default is another dtype, or computed from a weight of another one.
#[test]
fn scales_and_zero_points_of_any_dtype_count_as_their_numbers_in_f32() {
    let per_channel = Granularity::PerChannel { axis: 1 };
    let blocks = Granularity::PerBlock {
        extents: vec![4, 8],
    };
    let schemes = [
        Scheme::symmetric(NumberFormat::int(4)),
        Scheme::affine(NumberFormat::uint8()).with_granularity(per_channel),
        Scheme::symmetric(NumberFormat::E4M3).with_granularity(blocks),
    ];
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let dtypes = [DType::F16, DType::BF16, DType::F64].into_iter();
        for dtype in dtypes.filter(|dtype| target.device.supports_dtype(*dtype)) {
            for scheme in &schemes {
                let in_dtype = |of: Tensor<1>| of.cast(dtype);
                let QuantParams { scale, zero_point } = qparams(scheme, &[8, 32], &device);
                let other = QuantParams {
                    scale: in_dtype(scale),
                    zero_point: in_dtype(zero_point),
                };
                let same = QuantParams {
                    scale: other.scale.clone().cast(DType::F32),
                    zero_point: other.zero_point.clone().cast(DType::F32),
                };
                let both = |qparams: &QuantParams| {
                    let x = (tensor::<2>(1, [8, 32], &device) * 3.0).require_grad();
                    let y = fake_quantize(x.clone(), qparams, scheme);
                    let grads = y.clone().sum().backward();
                    let dx = x.grad(&grads).unwrap();
                    let codes = to_codes(x, qparams, scheme);
                    let back = from_codes(codes.clone(), qparams, scheme);
                    assert_eq!([y.dtype(), back.dtype()], [DType::F32; 2]);
                    let codes: Vec<i32> = codes.into_data().iter().collect();
                    (codes, [y, dx, back].map(|numbers| bits(values(numbers))))
                };
                let name = format!("{scheme}, {dtype:?} on {}", target.name);
                assert_eq!(both(&other), both(&same), "{name}");
            }
        }
    });
}

/// The lowest code of a range around 0 stands for a little more than the largest number.
#[test]
fn finite_half_numbers_stay_finite() {
    each_device(|target| {
        if !target.device.supports_dtype(DType::F16) {
            return;
        }
        let device = target.device.clone().autodiff();
        let half = |x: [f32; 3]| {
            let x = Tensor::<1>::from_floats(x, &device).cast(DType::F16);
            x.detach().require_grad()
        };
        let scheme = Scheme::symmetric(NumberFormat::int8());
        let x = half([-65504.0, 1.0, -65280.0]);
        // That of the range is the quotient of its end and 127.5.
        let scale = Tensor::from_floats([512.5], &device);
        let qparams = QuantParams::symmetric(scale, &scheme);
        let y = fake_quantize(x.clone(), &qparams, &scheme);
        // In F32, where their sum is finite.
        let grads = y.clone().cast(DType::F32).sum().backward();
        assert_eq!(values(y)[..2], [-65504.0, 0.0], "{}", target.name);
        assert_eq!(values(x.grad(&grads).unwrap()), [1.0; 3]);

        let wide = QuantParams::symmetric(Tensor::from_floats([1e3], &device), &scheme);
        let x = half([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        let y = values(fake_quantize(x, &wide, &scheme));
        assert!(y[0].is_nan(), "{}: {y:?}", target.name);
        assert_eq!(y[1..], [65504.0, -65504.0], "{}", target.name);
    });
}

#[test]
fn quantization_parameters_get_no_gradient() {
    on_tracked(|device| {
        let scheme = Scheme::symmetric(NumberFormat::int8());
        let scale = Tensor::<1>::from_floats([0.5], &device).require_grad();
        let qparams = QuantParams::symmetric(scale.clone(), &scheme);
        let x = Tensor::<1>::from_floats([1.0], &device).require_grad();
        let grads = fake_quantize(x, &qparams, &scheme).sum().backward();
        assert!(scale.grad(&grads).is_none());
    });
}

#[test]
fn an_empty_tensor_is_left_as_it_is() {
    each_device(|target| {
        let scheme = Scheme::symmetric(NumberFormat::int8());
        let scale = Tensor::from_floats([0.5], &target.device);
        let qparams = QuantParams::symmetric(scale, &scheme);
        let y = fake_quantize(
            Tensor::<2>::zeros([0, 3], &target.device),
            &qparams,
            &scheme,
        );
        assert_eq!(y.dims(), [0, 3]);
    });
}

#[test]
#[should_panic(expected = "scales and zero points for shape [2, 3]")]
fn a_wrong_number_of_scales_is_refused() {
    let device = burn::tensor::Device::flex();
    let scheme = Scheme::symmetric(NumberFormat::int8())
        .with_granularity(Granularity::PerChannel { axis: 1 });
    let qparams = QuantParams::symmetric(Tensor::ones([2], &device), &scheme);
    let _ = fake_quantize(Tensor::<2>::zeros([2, 3], &device), &qparams, &scheme);
}

#[test]
#[should_panic(expected = "axis 2 of a tensor of shape [2, 3] does not exist")]
fn a_scheme_that_does_not_fit_is_refused() {
    let device = burn::tensor::Device::flex();
    let scheme = Scheme::symmetric(NumberFormat::int8())
        .with_granularity(Granularity::PerChannel { axis: 2 });
    let qparams = QuantParams::symmetric(Tensor::ones([2], &device), &scheme);
    let _ = fake_quantize(Tensor::<2>::zeros([2, 3], &device), &qparams, &scheme);
}

/// One row of 32 numbers of any size, and one of the schemes.
fn cases() -> impl Strategy<Value = (Vec<f32>, Scheme)> {
    let x = prop::collection::vec(-1e3f32..1e3, 256);
    let size = prop::sample::select(vec![1e-6f32, 1.0, 1e6]);
    (x, size, prop::sample::select(schemes()))
        .prop_map(|(x, size, scheme)| (x.into_iter().map(|x| x * size).collect(), scheme))
}

fn flex(x: &[f32]) -> Tensor<2> {
    let device = burn::tensor::Device::flex();
    Tensor::from_data(TensorData::new(x.to_vec(), [8, 32]), &device)
}

proptest! {
    #![proptest_config(cases::cases(128))]

    #[test]
    fn scales_are_positive_and_zero_points_are_codes((x, scheme) in cases()) {
        let qparams = QuantParams::of(&flex(&x), &scheme).unwrap();
        for scale in values(qparams.scale) {
            prop_assert!(scale > 0.0 && scale.is_finite(), "{}: {}", scheme, scale);
        }
        for zero in values(qparams.zero_point) {
            prop_assert_eq!(zero, zero.round());
            prop_assert!((scheme.quant_min()..=scheme.quant_max()).contains(&zero));
        }
    }

    #[test]
    fn fake_quantization_is_idempotent((x, scheme) in cases()) {
        let qparams = QuantParams::of(&flex(&x), &scheme).unwrap();
        let once = fake_quantize(flex(&x), &qparams, &scheme);
        let twice = fake_quantize(once.clone(), &qparams, &scheme);
        prop_assert_eq!(bits(values(once)), bits(values(twice)), "{}", scheme);
    }

    #[test]
    fn fake_quantization_is_monotone((mut x, scheme) in cases()) {
        x.sort_by(f32::total_cmp);
        let qparams = qparams(&scheme, &[8, 32], &burn::tensor::Device::flex());
        let scheme = scheme.with_granularity(Granularity::PerTensor);
        let first = |tensor: Tensor<1>| tensor.slice(0..1);
        let qparams = QuantParams { scale: first(qparams.scale), zero_point: first(qparams.zero_point) };
        let y = values(fake_quantize(flex(&x), &qparams, &scheme));
        prop_assert!(y.is_sorted(), "{}: {:?}", scheme, y);
    }

    /// Within the range, integers are off by half a step at most; a few roundings beside it.
    #[test]
    fn integers_are_off_by_half_a_step_at_most((x, scheme) in cases()) {
        let scheme = scheme.with_granularity(Granularity::PerTensor);
        prop_assume!(scheme.format.is_int() && scheme.mapping != Mapping::Symmetric);
        let qparams = QuantParams::of(&flex(&x), &scheme).unwrap();
        let scale = values(qparams.scale.clone())[0];
        let y = values(fake_quantize(flex(&x), &qparams, &scheme));
        for (x, y) in x.iter().zip(y) {
            // With a rounded zero point the ends of the range move by up to half a step too.
            let steps = if scheme.mapping == Mapping::Affine { 1.0 } else { 0.5 };
            let tolerance = (steps + 1e-4) * scale;
            prop_assert!((x - y).abs() <= tolerance, "{}: {} became {}", scheme, x, y);
        }
    }

    /// The narrow range is the one that gives the same scale again.
    #[test]
    fn narrow_scales_are_found_again((x, _) in cases()) {
        for bits in [8, 4, 2] {
            let scheme = Scheme::symmetric(NumberFormat::int(bits).narrow())
                .with_granularity(Granularity::PerChannel { axis: 0 });
            let once = QuantParams::of(&flex(&x), &scheme).unwrap();
            let y = fake_quantize(flex(&x), &once, &scheme);
            let again = QuantParams::of(&y, &scheme).unwrap();
            for (once, again) in values(once.scale).into_iter().zip(values(again.scale)) {
                // The largest number is n · scale, rounded, and divided by n.
                prop_assert!((once - again).abs() <= once * f32::EPSILON);
            }
        }
    }
}
