//! A training that ends because its steps are skipped says what helps.

use burn::optim::SgdConfig;
use burn::tensor::{Device, FloatDType};
use burn_lean::amp::{AmpError, DynamicLossScale, GradScalerConfig, LossScale, SkipCause};

use crate::model::{one_gradient, prepared};

#[test]
fn what_helps_follows_from_the_cause() {
    let between = |min_scale, init_scale| {
        LossScale::Dynamic(DynamicLossScale {
            init_scale,
            min_scale,
            ..Default::default()
        })
    };
    let too_patient = LossScale::Dynamic(DynamicLossScale {
        hysteresis: 3,
        ..Default::default()
    });
    let no_scale = "Lowering the loss scale further would not help";
    // Gradients that are finite in F32 may be too large for F16 at a scale of 1, and below.
    let smaller = "`calibrate_scale` says which smaller loss scale would help";
    let smallest = f32::MIN_POSITIVE;
    for (rule, expected, helps) in [
        (
            LossScale::Static(65536.0),
            SkipCause::ScaleIsStatic,
            "A smaller `LossScale::Static`, `LossScale::Dynamic` or BF16",
        ),
        (LossScale::Static(1.0), SkipCause::ScaleAtFloor, smaller),
        (
            LossScale::Static(2f32.powi(-24)),
            SkipCause::ScaleAtFloor,
            smaller,
        ),
        (
            between(1.0, 65536.0),
            SkipCause::ScaleTooHigh,
            "`max_consecutive_skips`",
        ),
        (too_patient, SkipCause::ScaleTooHigh, "`hysteresis`"),
        (
            between(4.0, 8.0),
            SkipCause::ScaleAtFloor,
            "A lower `min_scale`",
        ),
        (between(1.0, 1.0), SkipCause::ScaleAtFloor, smaller),
        (
            between(smallest, smallest),
            SkipCause::ScaleAtFloor,
            no_scale,
        ),
    ] {
        let config = GradScalerConfig::new(rule).with_max_consecutive_skips(Some(3));
        let mut scaler = config.init().unwrap();
        let mut optim = SgdConfig::new().init();
        let (mut model, _) = prepared(1, FloatDType::F16, &Device::flex());
        for _ in 0..2 {
            let grads = one_gradient(&model, &[f32::INFINITY]);
            model = scaler.step(&mut optim, 0.1, model, grads).unwrap();
        }
        let grads = one_gradient(&model, &[f32::INFINITY]);
        let rejected = scaler.step(&mut optim, 0.1, model, grads).unwrap_err();
        let AmpError::Diverged { cause, .. } = rejected.error() else {
            panic!("{}", rejected.error())
        };
        assert_eq!(*cause, expected, "{rule:?}");
        assert_says!(rejected, helps);
        let gives_up = rejected.to_string().contains(no_scale);
        assert_eq!(gives_up, helps == no_scale, "{rejected}");
    }
}
