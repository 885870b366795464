//! Clipping by the global norm, also of gradients that are not finite or F64.

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_lean::amp::{AutocastConfig, Fallback, GradScalerConfig, LossScale, SkipCause};

use crate::model::{bits, gradients, one_gradient, prepared};
use crate::support::{each_device, values};

#[test]
fn clipping_bounds_the_global_norm_after_unscaling() {
    each_device(|target| {
        let (model, _) = prepared(1, FloatDType::F16, &target.device);
        let id = model.first.weight.id;
        let scaler = GradScalerConfig::new(LossScale::Static(8.0))
            .init()
            .unwrap();
        // Unscaled: 3 and 4, so the norm is 5.
        let unscaled = scaler
            .unscale(&model, one_gradient(&model, &[24.0, 32.0]))
            .unwrap();
        let clipped = unscaled.clip_norm(&model, 1.0).unwrap();
        let gradient = values(clipped.gradients().get::<2>(id).unwrap());
        // The factor is 1 / (5 + 1e-6).
        assert_near!(gradient[..2].iter(), [0.6, 0.8], 1e-6);
        // A norm below the bound is left alone, exactly.
        let unscaled = scaler
            .unscale(&model, one_gradient(&model, &[24.0, 32.0]))
            .unwrap();
        let same = unscaled.clip_norm(&model, 5.5).unwrap();
        assert_eq!(
            values(same.gradients().get::<2>(id).unwrap())[..2],
            [3.0, 4.0]
        );
    });
}

#[test]
fn a_norm_that_overflows_skips_the_step_instead_of_zeroing_the_gradients() {
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let weights = bits(&model);
    let mut scaler = GradScalerConfig::new(LossScale::Static(1.0))
        .with_max_norm(Some(1.0))
        .init()
        .unwrap();
    let grads = one_gradient(&model, &[f32::MAX]);
    let model = scaler
        .step(&mut SgdConfig::new().init(), 0.1, model, grads)
        .unwrap();
    let overflow = scaler.report().unwrap().overflow.clone().unwrap();
    assert_eq!(overflow.cause, SkipCause::NormNotFinite);
    assert_eq!(bits(&model), weights);
}

#[test]
fn clipping_leaves_what_there_is_to_say_of_an_overflow() {
    each_device(|target| {
        let (model, _) = prepared(1, FloatDType::F16, &target.device);
        for broken in [f32::INFINITY, f32::NAN] {
            let mut scaler = GradScalerConfig::for_dtype(FloatDType::F16)
                .with_max_norm(Some(1.0))
                .init()
                .unwrap();
            let grads = one_gradient(&model, &[broken, 65536.0 * 7.0]);
            let _ = scaler
                .step(&mut SgdConfig::new().init(), 0.1, model.clone(), grads)
                .unwrap();

            let report = scaler.report().unwrap();
            assert!(!report.grad_norm.unwrap().is_finite());
            let overflow = report.overflow.as_ref().unwrap();
            assert_eq!(overflow.paths().collect::<Vec<_>>(), ["first.weight"]);
            let details = overflow.inspect().unwrap();
            assert_eq!(details[0].non_finite, 1);
            assert_eq!(details[0].largest_finite, 7.0);
        }
    });
}

#[test]
fn without_a_loss_scale_a_broken_gradient_breaks_no_other() {
    each_device(|target| {
        for broken in [f32::INFINITY, f32::NAN] {
            let (model, _) = prepared(1, FloatDType::F32, &target.device);
            let before = values(model.first.weight.base());
            let bias = model.second.bias.as_ref().unwrap();
            let expected: Vec<f32> = values(bias.base()).iter().map(|b| b - 0.25).collect();
            let mut grads = one_gradient(&model, &[broken, 0.5]);
            grads.register::<1>(bias.id, Tensor::full([3], 0.25, &target.device));
            let mut scaler = GradScalerConfig::new(LossScale::None)
                .with_max_norm(Some(0.1))
                .init()
                .unwrap();

            let model = scaler
                .step(&mut SgdConfig::new().init(), 1.0, model, grads)
                .unwrap();

            let after = values(model.first.weight.base());
            assert!(!after[0].is_finite());
            assert_eq!(after[1], before[1] - 0.5);
            assert_eq!(after[2..], before[2..]);
            assert_eq!(values(model.second.bias.unwrap().base()), expected);
            let report = scaler.report().unwrap();
            assert_eq!((report.skipped, report.grad_norm), (false, None));
        }
    });
}

#[derive(Module, Debug)]
struct Mixed {
    wide: Param<Tensor<1>>,
    narrow: Param<Tensor<1>>,
}

#[test]
fn f64_gradients_are_clipped_with_the_f32_ones() {
    each_device(|target| {
        if !target.device.supports_dtype(FloatDType::F64) {
            return;
        }
        let device = target.device.clone().autodiff();
        let number = |dtype, value: f32, device: &Device| {
            Tensor::<1>::from_data([value], (device, DType::F32)).cast(dtype)
        };
        let model = Mixed {
            wide: Param::from_tensor(number(DType::F64, 1.0, &device).detach()),
            narrow: Param::from_tensor(number(DType::F32, 1.0, &device)),
        };
        let (model, _) = AutocastConfig::new(FloatDType::F16)
            .with_fallback(Fallback::Emulate)
            .prepare(model)
            .unwrap();
        let mut grads = GradientsParams::new();
        // Unscaled: 3 and 4, so the norm is 5.
        grads.register::<1>(model.wide.id, number(DType::F64, 24.0, &target.device));
        grads.register::<1>(model.narrow.id, number(DType::F32, 32.0, &target.device));
        let mut scaler = GradScalerConfig::new(LossScale::Static(8.0))
            .with_max_norm(Some(2.5))
            .init()
            .unwrap();

        let model = scaler
            .step(&mut SgdConfig::new().init(), 1.0, model, grads)
            .unwrap();

        assert_eq!(scaler.report().unwrap().grad_norm, Some(5.0));
        assert_eq!(model.wide.base().dtype(), DType::F64);
        assert_eq!(model.narrow.base().dtype(), DType::F32);
        // The factor is 2.5 / (5 + 1e-6).
        assert!((values(model.wide.base())[0] + 0.5).abs() < 1e-6);
        assert!((values(model.narrow.base())[0] + 1.0).abs() < 1e-6);
    });
}

/// The norm is one that F32 holds, and its square is not.
#[test]
fn large_f64_gradients_are_clipped() {
    each_device(|target| {
        if !target.device.supports_dtype(FloatDType::F64) {
            return;
        }
        let numbers = |numbers: [f64; 2], device: &Device| {
            Tensor::<1>::from_data(numbers, (device, DType::F64))
        };
        let model = Mixed {
            wide: Param::from_tensor(numbers([0.0, 0.0], &target.device.clone().autodiff())),
            narrow: Param::from_tensor(Tensor::zeros([1], &target.device.clone().autodiff())),
        };
        let mut grads = GradientsParams::new();
        // Unscaled: 3e29 and 4e29.
        let wide = numbers([2.4e30, -3.2e30], &target.device);
        grads.register::<1>(model.wide.id, wide);
        grads.register::<1>(model.narrow.id, Tensor::zeros([1], &target.device));
        let config = GradScalerConfig::new(LossScale::Static(8.0)).with_max_norm(Some(1.0));
        let mut scaler = config.init().unwrap();
        let model = scaler
            .step(&mut SgdConfig::new().init(), 1.0, model, grads)
            .unwrap();
        let report = scaler.report().unwrap();
        assert!(!report.skipped, "{:?}", report.overflow);
        assert!((report.grad_norm.unwrap() / 5e29 - 1.0).abs() < 1e-6);
        assert_near!(values(model.wide.val()).into_iter(), [-0.6, 0.8], 1e-6);
    });
}

#[test]
fn a_step_that_clips_is_unscaling_clipping_and_applying() {
    each_device(|target| {
        for scale in [48.0, 1024.0] {
            for max_norm in [0.01, 1e6] {
                let config = GradScalerConfig::new(LossScale::Static(scale));
                let clipping = config.clone().with_max_norm(Some(max_norm));
                let (mut whole, mut parts) = (clipping.init().unwrap(), config.init().unwrap());
                let optim = || SgdConfig::new().init();
                let (mut model, autocast) = prepared(1, FloatDType::F16, &target.device);
                let mut other = model.clone();
                for (step, factor) in [1.0, f32::INFINITY, 1.0].into_iter().enumerate() {
                    let grads = gradients(&model, &autocast, &mut whole, step as u64, factor);
                    model = whole
                        .step(&mut optim(), 0.1, model, grads.unwrap())
                        .unwrap();

                    let grads = gradients(&other, &autocast, &mut parts, step as u64, factor);
                    let unscaled = parts.unscale(&other, grads.unwrap()).unwrap();
                    let clipped = unscaled.clip_norm(&other, max_norm).unwrap();
                    other = parts.apply(&mut optim(), 0.1, other, clipped).unwrap();
                    parts.update().unwrap();

                    assert_eq!(bits(&model), bits(&other));
                    let [whole, parts] = [&whole, &parts].map(|scaler| scaler.report().unwrap());
                    assert_eq!(whole.skipped, factor != 1.0);
                    assert_eq!(
                        whole.grad_norm.map(f32::to_bits),
                        parts.grad_norm.map(f32::to_bits)
                    );
                    let paths = [whole, parts].map(|report| {
                        let overflow = report.overflow.as_ref();
                        overflow.map(|found| (found.cause, found.paths().count()))
                    });
                    assert_eq!(paths[0], paths[1]);
                    if let Some((cause, count)) = paths[0] {
                        assert_eq!((cause, count), (SkipCause::LossNotFinite, 4));
                    }
                }
            }
        }
    });
}

#[derive(Module, Debug)]
struct Table {
    values: Param<Tensor<2>>,
}

/// More than a GPU adds up in one row, and more than the rows hold.
#[test]
fn every_element_of_a_large_gradient_is_looked_at() {
    const SHAPE: [usize; 2] = [317, 409];
    const COUNT: usize = SHAPE[0] * SHAPE[1];
    each_device(|target| {
        let zeros = Tensor::zeros(SHAPE, &target.device.clone().autodiff());
        let model = Table {
            values: Param::from_tensor(zeros),
        };
        let gradient = |numbers: Vec<f32>| {
            let data = TensorData::new(numbers, SHAPE);
            let mut grads = GradientsParams::new();
            grads.register::<2>(model.values.id, Tensor::from_data(data, &target.device));
            grads
        };
        let step = |max_norm, numbers| {
            let config = GradScalerConfig::new(LossScale::Static(2.0));
            let mut scaler = config.with_max_norm(max_norm).init().unwrap();
            let mut optim = SgdConfig::new().init();
            let grads = gradient(numbers);
            let stepped = scaler.step(&mut optim, 1.0, model.clone(), grads).unwrap();
            (
                scaler.report().unwrap().clone(),
                values(stepped.values.val()),
            )
        };
        // Sums of whole numbers are exact.
        let (report, _) = step(Some(1e9), vec![2.0; COUNT]);
        assert_eq!(report.grad_norm, Some((COUNT as f32).sqrt()));
        for max_norm in [None, Some(1.0)] {
            for at in [0, 1023, 1024, COUNT / 1024 * 1024, COUNT - 1] {
                for number in [f32::INFINITY, f32::NAN] {
                    let mut numbers = vec![1.0; COUNT];
                    numbers[at] = number;
                    let (report, stepped) = step(max_norm, numbers);
                    assert!(report.skipped, "{at}");
                    assert!(stepped.iter().all(|value| *value == 0.0));
                }
            }
        }
    });
}
