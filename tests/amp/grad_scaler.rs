//! Scaling, skipping, clipping, accumulating, failing.

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, DynamicLossScale, GradScaler, GradScalerConfig, LossScale, SkipCause,
    calibrate_scale, inspect_gradients,
};

use crate::model::{Mlp, bits, gradients, loss, one_gradient, prepared};
use crate::support::{cast, each_device, values, warnings};

fn dynamic() -> GradScaler {
    GradScalerConfig::for_dtype(FloatDType::F16).init().unwrap()
}

/// Gradients that are refused: half where the device has it, none where it has not.
fn half_gradients_or_none(model: &Mlp) -> GradientsParams {
    let device = model.second.weight.base().device().inner();
    match device.supports_dtype(FloatDType::F16) {
        true => half_gradients(model),
        false => GradientsParams::new(),
    }
}

fn half_gradients(model: &Mlp) -> GradientsParams {
    let mut grads = GradientsParams::new();
    let device = model.second.weight.base().device().inner();
    let half = Tensor::<2>::ones([8, 3], &device).cast(FloatDType::F16);
    grads.register::<2>(model.second.weight.id, half);
    grads
}

#[test]
fn f16_training_descends_on_every_device() {
    each_device(|target| {
        let (mut model, autocast) = prepared(1, FloatDType::F16, &target.device);
        let mut scaler = dynamic();
        let mut optim = AdamWConfig::new().init();
        let before = values(loss(&model, &autocast, 0, 1.0))[0];
        for _ in 0..20 {
            let grads = gradients(&model, &autocast, &mut scaler, 0, 1.0).unwrap();
            model = scaler.step(&mut optim, 0.01, model, grads).unwrap();
            let report = scaler.report().unwrap();
            assert!(report.loss.unwrap().is_finite());
        }
        let after = values(loss(&model, &autocast, 0, 1.0))[0];
        assert!(after < 0.5 * before, "{before} to {after}");
        assert_eq!(scaler.state().steps, 20);
    });
}

#[test]
fn an_overflowing_step_changes_nothing_but_the_scale() {
    each_device(|target| {
        let (model, autocast) = prepared(1, FloatDType::F16, &target.device);
        let mut scaler = dynamic();
        let mut optim = AdamWConfig::new().init();
        let grads = gradients(&model, &autocast, &mut scaler, 0, 1.0).unwrap();
        let model = scaler.step(&mut optim, 0.01, model, grads).unwrap();
        let (weights, moments) = (bits(&model), optim.into_bytes().unwrap());

        let grads = gradients(&model, &autocast, &mut scaler, 1, f32::INFINITY).unwrap();
        let model = scaler.step(&mut optim, 0.01, model, grads).unwrap();

        assert_eq!(bits(&model), weights);
        assert_eq!(optim.into_bytes().unwrap()[..], moments[..]);
        assert_eq!(scaler.loss_scale(), 32768.0);
        assert!(scaler.report().unwrap().skipped);
    });
}

/// As that of a batch without examples.
#[test]
fn a_step_whose_loss_alone_is_not_finite_is_skipped() {
    each_device(|target| {
        let (model, autocast) = prepared(1, FloatDType::F16, &target.device);
        let mut scaler = dynamic();
        let weights = bits(&model);
        let nan = loss(&model, &autocast, 0, 1.0) + f32::NAN;
        let scaled = scaler.scale(nan).unwrap();
        let grads = GradientsParams::from_grads(scaled.backward(), &model);

        let mut optim = AdamWConfig::new().init();
        let model = scaler.step(&mut optim, 0.01, model, grads).unwrap();

        assert_eq!(bits(&model), weights);
        let overflow = scaler.report().unwrap().overflow.as_ref().unwrap();
        assert_eq!(overflow.cause, SkipCause::LossNotFinite);
        assert_eq!(overflow.first(), None);

        // Replicas agree on it before they apply theirs.
        let nan = scaler.scale(loss(&model, &autocast, 0, 1.0) + f32::NAN);
        let grads = GradientsParams::from_grads(nan.unwrap().backward(), &model);
        let unscaled = scaler.unscale(&model, grads).unwrap();
        assert!(scaler.found_inf(&model, &unscaled).unwrap());
    });
}

/// One of two batches whose gradients are added up is without examples: its statistics are NaN, too.
#[test]
fn a_step_of_several_losses_is_skipped_for_one_that_is_not_finite() {
    each_device(|target| {
        let (model, autocast) = prepared(1, FloatDType::F16, &target.device);
        let mut scaler = dynamic();
        let weights = bits(&model);
        let mut losses = |empty: f32| {
            let loss = loss(&model, &autocast, 0, 1.0) + empty;
            scaler.scale(loss).unwrap()
        };
        let sum = losses(0.0) + losses(f32::NAN);
        let grads = GradientsParams::from_grads(sum.backward(), &model);
        let model = scaler
            .step(&mut AdamWConfig::new().init(), 0.01, model, grads)
            .unwrap();
        assert_eq!(bits(&model), weights);
        let report = scaler.report().unwrap();
        let overflow = report.overflow.as_ref().unwrap();
        assert_eq!(overflow.cause, SkipCause::LossNotFinite);
    });
}

#[test]
fn the_report_names_the_first_parameter_the_count_and_the_largest_finite_gradient() {
    each_device(|target| {
        let (model, _) = prepared(1, FloatDType::F16, &target.device);
        let mut scaler = dynamic();
        scaler
            .scale(Tensor::<1>::ones([1], &target.device))
            .unwrap();
        let grads = one_gradient(&model, &[f32::INFINITY, 65536.0 * 7.0, f32::NAN]);
        let _ = scaler
            .step(&mut SgdConfig::new().init(), 0.1, model, grads)
            .unwrap();

        let overflow = scaler.report().unwrap().overflow.clone().unwrap();
        assert_eq!(overflow.cause, SkipCause::ScaleTooHigh);
        assert_eq!(overflow.first(), Some("first.weight"));
        assert_eq!(overflow.paths().count(), 1);
        let details = overflow.inspect().unwrap();
        assert_eq!(details[0].non_finite, 2);
        assert_eq!((details[0].elements, details[0].zeros), (48, 45));
        assert_eq!(details[0].largest_finite, 7.0);
    });
}

#[test]
fn the_largest_finite_gradients_are_no_overflow() {
    each_device(|target| {
        let (model, _) = prepared(1, FloatDType::F16, &target.device);
        // Their sum overflows F32; none of them does.
        let grads = one_gradient(&model, &[f32::MAX; 48]);
        let mut scaler = dynamic();
        let _ = scaler
            .step(&mut SgdConfig::new().init(), 0.0, model, grads)
            .unwrap();
        assert!(!scaler.report().unwrap().skipped);
    });
}

#[test]
fn a_broken_forward_pass_becomes_an_error_and_the_model_comes_back() {
    each_device(|target| {
        let (mut model, autocast) = prepared(1, FloatDType::F16, &target.device);
        let weights = bits(&model);
        let mut scaler = GradScalerConfig::for_dtype(FloatDType::F16)
            .with_max_consecutive_skips(Some(3))
            .init()
            .unwrap();
        let mut optim = SgdConfig::new().init();
        for _ in 0..2 {
            let grads = gradients(&model, &autocast, &mut scaler, 0, f32::NAN).unwrap();
            model = scaler.step(&mut optim, 0.1, model, grads).unwrap();
        }
        let grads = gradients(&model, &autocast, &mut scaler, 0, f32::NAN).unwrap();
        let rejected = scaler.step(&mut optim, 0.1, model, grads).unwrap_err();
        assert_eq!(
            *rejected.error(),
            AmpError::Diverged {
                consecutive: 3,
                loss_scale: 16384.0,
                cause: SkipCause::LossNotFinite,
                parameter: Some("first.weight".into()),
            }
        );
        assert_eq!(bits(rejected.value()), weights);
    });
}

#[test]
fn overflow_at_the_floor_is_told_from_a_scale_that_is_too_high() {
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let mut scaler = GradScalerConfig::new(LossScale::Dynamic(DynamicLossScale {
        init_scale: 2.0,
        min_scale: 1.0,
        ..Default::default()
    }))
    .init()
    .unwrap();
    let mut optim = SgdConfig::new().init();
    let mut model = model;
    for expected in [SkipCause::ScaleTooHigh, SkipCause::ScaleAtFloor] {
        let grads = one_gradient(&model, &[f32::INFINITY]);
        model = scaler.step(&mut optim, 0.1, model, grads).unwrap();
        let overflow = scaler.report().unwrap().overflow.clone().unwrap();
        assert_eq!(overflow.cause, expected);
        assert_eq!(scaler.loss_scale(), 1.0);
    }
}

#[test]
fn a_half_loss_is_refused() {
    let loss = Tensor::<1>::ones([1], &Device::flex()).cast(FloatDType::F16);
    let error = dynamic().scale(loss).unwrap_err();
    assert_eq!(error, AmpError::LossDtype { dtype: DType::F16 });
}

#[test]
fn half_gradients_are_refused_with_the_parameter_path_and_what_to_do() {
    let refused = |model: Mlp| {
        let error = dynamic().unscale(&model, half_gradients(&model));
        error.unwrap_err()
    };
    let refusal = |parameter| AmpError::GradientDtype {
        path: "second.weight".into(),
        dtype: DType::F16,
        parameter,
    };
    // A GPU computes mixed dtypes without a word.
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let error = refused(model);
    assert_eq!(error, refusal(DType::F32));
    let text = error.to_string();
    assert_says!(
        text,
        "The parameter is F32: dtypes were mixed",
        "`full_precision`",
        "`audit`"
    );
    assert!(!text.contains("keep F32 parameters"), "{text}");

    let error = refused(cast(Mlp::new(1, &Device::flex()), FloatDType::F16));
    assert_eq!(error, refusal(DType::F16));
    assert_says!(error, "is half; keep F32 parameters");
}

#[test]
fn a_step_without_any_gradient_is_refused() {
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let weights = bits(&model);
    let mut scaler = dynamic();
    let rejected = scaler
        .step(
            &mut SgdConfig::new().init(),
            0.1,
            model,
            GradientsParams::new(),
        )
        .unwrap_err();
    assert_eq!(*rejected.error(), AmpError::NoGradients);
    assert_eq!(bits(rejected.value()), weights);
}

#[test]
fn an_update_without_gradients_is_refused() {
    assert_eq!(dynamic().update(), Err(AmpError::NothingToUpdate));
}

#[test]
fn the_scale_stops_at_its_ceiling_and_at_the_end_of_f32() {
    for (init_scale, max_scale) in [(2f32.powi(20), 2f32.powi(20)), (2f32.powi(127), f32::MAX)] {
        let rule = LossScale::Dynamic(DynamicLossScale {
            init_scale,
            max_scale,
            growth_interval: 1,
            ..Default::default()
        });
        let mut state = rule.init();
        for _ in 0..5 {
            state = rule.update(state, false);
        }
        assert_eq!((state.scale, state.growth_tracker), (init_scale, 0));
    }
}

#[test]
fn hysteresis_tolerates_single_overflows() {
    let rule = LossScale::Dynamic(DynamicLossScale {
        hysteresis: 2,
        ..Default::default()
    });
    let scales: Vec<f32> = [true, false, true, true, true, false, true]
        .into_iter()
        .scan(rule.init(), |state, found_inf| {
            *state = rule.update(*state, found_inf);
            Some(state.scale / 65536.0)
        })
        .collect();
    assert_eq!(scales, [1.0, 1.0, 1.0, 0.5, 0.25, 0.25, 0.25]);
}

#[test]
fn numbers_out_of_range_are_refused_by_field() {
    type Set = fn(&mut DynamicLossScale);
    let bad: [(&str, Set); 8] = [
        ("init_scale", |rule| rule.init_scale = f32::NAN),
        ("init_scale", |rule| rule.init_scale = 0.0),
        ("growth_factor", |rule| rule.growth_factor = 1.0),
        ("backoff_factor", |rule| rule.backoff_factor = 1.0),
        ("growth_interval", |rule| rule.growth_interval = 0),
        ("hysteresis", |rule| rule.hysteresis = 0),
        ("min_scale", |rule| rule.min_scale = 0.0),
        ("max_scale", |rule| rule.max_scale = f32::INFINITY),
    ];
    for (expected, set) in bad {
        let mut rule = DynamicLossScale::default();
        set(&mut rule);
        let error = GradScalerConfig::new(LossScale::Dynamic(rule))
            .init()
            .unwrap_err();
        let AmpError::InvalidConfig { field, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(field, expected);
    }
    let fixed = GradScalerConfig::new(LossScale::Static(-1.0));
    let none = GradScalerConfig::new(LossScale::None);
    let bad = [
        ("static loss scale", fixed),
        ("max_norm", none.clone().with_max_norm(Some(0.0))),
        (
            "max_consecutive_skips",
            none.with_max_consecutive_skips(Some(0)),
        ),
    ];
    for (expected, config) in bad {
        let error = config.init().unwrap_err();
        let AmpError::InvalidConfig { field, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(field, expected);
    }
}

#[test]
fn accumulated_gradients_are_unscaled_once() {
    each_device(|target| {
        let train = |loss_scale| {
            let (model, autocast) = prepared(1, FloatDType::F32, &target.device);
            let mut scaler = GradScalerConfig::new(loss_scale).init().unwrap();
            let mut accumulator = GradientsAccumulator::new();
            for step in 0..3 {
                let grads = gradients(&model, &autocast, &mut scaler, step, 1.0).unwrap();
                accumulator.accumulate(&model, grads);
            }
            let mut optim = SgdConfig::new().init();
            let model = scaler
                .step(&mut optim, 0.1, model, accumulator.grads())
                .unwrap();
            (bits(&model), scaler)
        };
        let (expected, _) = train(LossScale::None);
        let (found, scaler) = train(LossScale::Static(1024.0));
        // A power of two is exact in F32.
        assert_eq!(found, expected);
        assert_eq!(scaler.state().steps, 1);
    });
}

#[test]
fn each_optimizer_skips_on_its_own_infinities_and_one_update_serves_all() {
    let (sound, _) = prepared(1, FloatDType::F16, &Device::flex());
    let (broken, _) = prepared(2, FloatDType::F16, &Device::flex());
    let (before_sound, before_broken) = (bits(&sound), bits(&broken));
    let mut scaler = dynamic();
    let mut optims = [SgdConfig::new().init(), SgdConfig::new().init()];

    let first = scaler
        .unscale(&sound, one_gradient(&sound, &[65536.0]))
        .unwrap();
    let second = scaler
        .unscale(&broken, one_gradient(&broken, &[f32::NAN]))
        .unwrap();
    let broken = scaler.apply(&mut optims[1], 0.5, broken, second).unwrap();
    let sound = scaler.apply(&mut optims[0], 0.5, sound, first).unwrap();
    scaler.update().unwrap();

    assert_ne!(bits(&sound), before_sound);
    assert_eq!(bits(&broken), before_broken);
    assert_eq!(scaler.loss_scale(), 32768.0);
    assert_eq!(scaler.state().steps, 1);
}

#[test]
fn a_disabled_scaler_does_nothing() {
    let (model, autocast) = prepared(1, FloatDType::BF16, &Device::flex());
    let mut scaler = GradScalerConfig::new(LossScale::None).init().unwrap();
    assert!(scaler.is_disabled());
    let plain = loss(&model, &autocast, 0, 1.0);
    let scaled = scaler.scale(plain.clone()).unwrap();
    assert_eq!(values(scaled.clone()), values(plain));
    let grads = GradientsParams::from_grads(scaled.backward(), &model);
    let before = bits(&model);
    let model = scaler
        .step(&mut SgdConfig::new().init(), 0.1, model, grads)
        .unwrap();
    assert_ne!(bits(&model), before);
    assert_eq!(scaler.loss_scale(), 1.0);
    assert_eq!(scaler.report().unwrap().loss, None);
}

/// With nothing chosen.
#[test]
fn bf16_trains_on_no_nan() {
    let (model, autocast) = prepared(1, FloatDType::BF16, &Device::flex());
    let config = GradScalerConfig::for_dtype(FloatDType::BF16);
    assert_eq!(config.loss_scale, LossScale::Static(1.0));
    let mut scaler = config.init().unwrap();
    let before = bits(&model);
    let loss = loss(&model, &autocast, 0, f32::NAN);
    let grads = GradientsParams::from_grads(scaler.scale(loss).unwrap().backward(), &model);
    let mut sgd = SgdConfig::new().init();
    let model = scaler.step(&mut sgd, 0.1, model, grads).unwrap();
    assert_eq!(bits(&model), before);
    assert!(scaler.report().unwrap().skipped);
}

#[test]
fn clones_do_not_share_state() {
    let rule = LossScale::Dynamic(DynamicLossScale::default());
    let mut scaler = GradScalerConfig::new(rule).init().unwrap();
    let copy = scaler.clone();
    let (model, _) = prepared(1, FloatDType::F16, &Device::flex());
    let grads = one_gradient(&model, &[f32::NAN]);
    let _ = scaler
        .step(&mut SgdConfig::new().init(), 0.1, model, grads)
        .unwrap();
    assert_eq!(scaler.loss_scale(), 32768.0);
    assert_eq!(copy.loss_scale(), 65536.0);
    assert_eq!(copy.state(), rule.init());
}

#[test]
fn the_losses_of_a_step_that_failed_are_not_those_of_the_next() {
    each_device(|target| {
        let loss = |value: f32| Tensor::<1>::full([1], value, &target.device);
        let (model, _) = prepared(1, FloatDType::F16, &target.device);
        let mut optim = SgdConfig::new().init();
        let mut scaler = dynamic();
        for broken in [GradientsParams::new(), half_gradients_or_none(&model)] {
            scaler.scale(loss(f32::NAN)).unwrap();
            let rejected = scaler.step(&mut optim, 0.1, model.clone(), broken);
            assert!(rejected.is_err());
        }
        scaler.scale(loss(3.0)).unwrap();
        let grads = one_gradient(&model, &[f32::INFINITY]);
        let _ = scaler.step(&mut optim, 0.1, model, grads).unwrap();
        let report = scaler.report().unwrap();
        assert_eq!(report.loss, Some(3.0));
        let overflow = report.overflow.as_ref().unwrap();
        assert_eq!(overflow.cause, SkipCause::ScaleTooHigh);
    });
}

#[test]
fn gradients_are_counted_per_parameter() {
    each_device(|target| {
        let (model, _) = prepared(1, FloatDType::F16, &target.device);
        let grads = one_gradient(&model, &[1.0, f32::INFINITY, -3.0]);
        let found = inspect_gradients(&model, &grads).unwrap();
        let paths: Vec<&str> = found.iter().map(|found| found.path.as_str()).collect();
        assert_eq!(paths, ["first.weight", "second.bias"]);
        assert_eq!((found[0].zeros, found[0].non_finite), (45, 1));
        assert_eq!(found[0].largest_finite, 3.0);
        assert_eq!(found[1].zeros, found[1].elements);
    });
}

#[derive(Module, Debug)]
struct WithEmpty {
    empty: Param<Tensor<2>>,
    full: Param<Tensor<1>>,
}

#[test]
fn zero_element_parameters_are_stepped_over() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let model = WithEmpty {
            empty: Param::from_tensor(Tensor::zeros([0, 3], &device)),
            full: Param::from_tensor(Tensor::ones([2], &device)),
        };
        let mut grads = GradientsParams::new();
        grads.register::<2>(model.empty.id, Tensor::zeros([0, 3], &target.device));
        grads.register::<1>(model.full.id, Tensor::ones([2], &target.device));
        assert_eq!(inspect_gradients(&model, &grads).unwrap().len(), 1);
        let unscaled = dynamic().unscale(&model, grads).unwrap();
        assert!(!dynamic().found_inf(&model, &unscaled).unwrap());
        let full = unscaled.gradients().get::<1>(model.full.id).unwrap();
        assert_eq!(values(full), [1.0 / 65536.0; 2]);
    });
}

#[test]
fn calibration_proposes_a_scale_at_which_no_gradient_is_lost() {
    each_device(|target| {
        let (model, autocast) = prepared(1, FloatDType::F32, &target.device);
        let calibration = calibrate_scale(&model, FloatDType::F16, |model| {
            loss(model, &autocast, 0, 1.0).mul_scalar(2f32.powi(-26))
        });
        let calibration = calibration.unwrap();
        let scale = calibration.loss_scale;
        assert_eq!(scale.log2().fract(), 0.0);
        assert!(calibration.largest * scale * 16.0 <= 65504.0);
        assert!(calibration.largest * scale * 32.0 > 65504.0);
        // Below 2⁻²⁵ F16 rounds to zero.
        assert!(calibration.underflow(1.0) > 0.5, "{calibration:?}");
        assert_eq!(calibration.underflow(scale), 0.0, "{calibration:?}");
    });
}

/// Gradients of a loss that is finite, but huge.
#[test]
fn calibration_proposes_a_scale_at_which_no_gradient_overflows() {
    each_device(|target| {
        let (model, autocast) = prepared(1, FloatDType::F32, &target.device);
        let calibration = calibrate_scale(&model, FloatDType::F16, |model| {
            loss(model, &autocast, 0, 1.0).mul_scalar(1e15)
        });
        let calibration = calibration.unwrap();
        assert!(calibration.largest > 1e12, "{calibration:?}");
        let scale = calibration.loss_scale;
        assert!(calibration.largest * scale * 16.0 <= 65504.0);
        assert!(calibration.largest * scale * 32.0 > 65504.0);
    });
}

#[test]
fn a_calibration_that_is_not_finite_in_f32_says_so() {
    each_device(|target| {
        let (model, autocast) = prepared(1, FloatDType::F32, &target.device);
        let error = calibrate_scale(&model, FloatDType::F16, |model| {
            loss(model, &autocast, 0, f32::NAN)
        })
        .unwrap_err();
        let AmpError::NotFiniteInF32 { parameter, loss } = &error else {
            panic!("{error}");
        };
        assert_eq!(parameter, "first.weight");
        assert!(loss.is_nan());

        // The loss is finite, its gradient overflows.
        let error = calibrate_scale(&model, FloatDType::F16, |model| {
            let bias = model.second.bias.as_ref().unwrap().val();
            let zero = bias.clone() - bias.detach();
            zero.mean().mul_scalar(1e30).mul_scalar(1e30)
        })
        .unwrap_err();
        let expected = AmpError::NotFiniteInF32 {
            parameter: "second.bias".into(),
            loss: 0.0,
        };
        assert_eq!(error, expected);
    });
}

#[test]
fn losses_of_two_steps_that_are_scaled_together_bring_no_warning() {
    let (model, autocast) = prepared(1, FloatDType::F16, &Device::flex());
    let config = GradScalerConfig::new(LossScale::Static(8.0));
    let mut scaler = config.init().unwrap();
    let of_both = [0, 1].map(|step| gradients(&model, &autocast, &mut scaler, step, 1.0).unwrap());
    let mut said = |grads: GradientsParams| {
        let mut optim = SgdConfig::new().init();
        let step = || drop(scaler.step(&mut optim, 0.1, model.clone(), grads).unwrap());
        warnings("burn_lean_amp", step).1.len()
    };
    assert_eq!(of_both.map(&mut said), [0, 0]);
    // Those of a loss that was not scaled do.
    let loss = loss(&model, &autocast, 0, 1.0);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    assert_eq!(said(grads), 1);
}
