//! What a scaler writes, and what it takes back.

use burn::optim::SgdConfig;
use burn::tensor::{Device, FloatDType};
use burn_lean::amp::{
    AmpError, DynamicLossScale, GradScaler, GradScalerConfig, LossScale,
    scaler::{GradScalerRecord, LossScaleState},
};

use crate::model::{one_gradient, prepared};

#[test]
fn a_record_restores_every_number() {
    let mut scaler = GradScalerConfig::new(LossScale::Dynamic(DynamicLossScale {
        init_scale: 3.0,
        growth_factor: 1.7,
        backoff_factor: 0.3,
        growth_interval: 7,
        hysteresis: 3,
        min_scale: 0.01,
        max_scale: 1e6,
    }))
    .with_max_norm(Some(0.7))
    .with_max_consecutive_skips(None)
    .init()
    .unwrap();
    let (mut model, _) = prepared(1, FloatDType::F16, &Device::flex());
    for value in [1.0, f32::NAN, f32::NAN, f32::NAN, 1.0, f32::NAN] {
        let grads = one_gradient(&model, &[value]);
        model = scaler
            .step(&mut SgdConfig::new().init(), 0.1, model, grads)
            .unwrap();
    }
    let json = serde_json::to_string(&scaler.to_record()).unwrap();
    let resumed = GradScaler::from_record(serde_json::from_str(&json).unwrap()).unwrap();
    assert_eq!(resumed.state(), scaler.state());
    assert_eq!(resumed.state().skipped_steps, 4);
    assert_eq!(resumed.config().to_string(), scaler.config().to_string());
}

#[test]
fn the_state_of_another_kind_of_loss_scale_is_refused() {
    let dynamic = LossScale::Dynamic(DynamicLossScale::default());
    let bounded = |min_scale, init_scale, max_scale| {
        LossScale::Dynamic(DynamicLossScale {
            min_scale,
            init_scale,
            max_scale,
            ..Default::default()
        })
    };
    let none = LossScale::None;
    for (rule, state) in [
        (dynamic, none.init()),
        (dynamic, none.update(none.init(), false)),
        (dynamic, LossScale::Static(1.0).init()),
        (bounded(1.0, 2.0, 4.0), dynamic.init()),
        (bounded(1e6, 1e6, 1e6), dynamic.init()),
        (LossScale::Static(128.0), dynamic.init()),
        (LossScale::Static(128.0), LossScale::Static(64.0).init()),
        (LossScale::Static(128.0), none.init()),
    ] {
        let mut scaler = GradScalerConfig::new(rule).init().unwrap();
        assert_matches!(scaler.load_state(state), Err(AmpError::Record { .. }));
        assert_eq!(scaler.state(), rule.init(), "{rule:?}");
    }

    let skipped = |rule: LossScale| rule.update(rule.init(), true);
    let taken = |rule: LossScale| rule.update(rule.init(), false);
    for rule in [dynamic, LossScale::Static(128.0)] {
        for state in [rule.init(), skipped(rule), taken(rule)] {
            let mut scaler = GradScalerConfig::new(rule).init().unwrap();
            scaler.load_state(state).unwrap();
            assert_eq!(scaler.state(), state);
        }
    }
    // A run without loss scale takes of any state what it has itself: the steps.
    let mut disabled = GradScalerConfig::new(none).init().unwrap();
    disabled.load_state(skipped(dynamic)).unwrap();
    let counted = LossScaleState {
        skipped_steps: 1,
        steps: 1,
        ..none.init()
    };
    assert_eq!(disabled.state(), counted);
}

#[test]
fn a_run_in_bf16_goes_on_from_the_state_of_one_in_f16() {
    let f16 = LossScale::for_dtype(FloatDType::F16);
    let bf16 = LossScale::for_dtype(FloatDType::BF16);
    // Three steps, of which the last two were skipped: the scale is 16384.
    let state = [false, true, true]
        .into_iter()
        .fold(f16.init(), |state, found_inf| f16.update(state, found_inf));
    assert_eq!((state.scale, state.consecutive_skips), (16384.0, 2));

    let mut scaler = GradScalerConfig::new(bf16).init().unwrap();
    scaler.load_state(state).unwrap();
    let resumed = scaler.state();
    assert_eq!((resumed.scale, resumed.consecutive_skips), (1.0, 0));
    assert_eq!((resumed.steps, resumed.skipped_steps), (3, 2));
    // What it writes then, it reads.
    let record = GradScaler::from_record(scaler.to_record()).unwrap();
    assert_eq!(record.state(), resumed);

    // No scaler is in such a state, and a record whose scale is not that of its configuration is damaged.
    let nonsense = LossScaleState {
        skipped_steps: 9,
        ..state
    };
    let error = scaler.load_state(nonsense).unwrap_err();
    assert_matches!(error, AmpError::Record { .. });
    assert_eq!(scaler.state(), resumed);
    let mut damaged = scaler.to_record();
    damaged.state.scale = 2.0;
    let error = GradScaler::from_record(damaged).unwrap_err();
    assert_matches!(error, AmpError::Record { .. });
}

#[test]
fn records_of_another_version_or_without_sense_are_refused() {
    let good = GradScalerConfig::for_dtype(FloatDType::F16)
        .init()
        .unwrap()
        .to_record();
    let mut other = good.clone();
    other.version = 99;
    let mut zero = good.clone();
    zero.state.scale = 0.0;
    let mut nan = good.clone();
    nan.state.scale = f32::NAN;
    let mut counts = good.clone();
    counts.state.skipped_steps = 5;
    for record in [other, zero, nan, counts] {
        let error = GradScaler::from_record(record).unwrap_err();
        assert_matches!(error, AmpError::Record { .. });
    }
    assert!(GradScaler::from_record(good).is_ok());
    assert!(serde_json::from_str::<GradScalerRecord>("{\"version\": 1}").is_err());
}

/// Its default would be taken, and nobody told.
#[test]
fn a_misspelt_number_of_a_loss_scale_is_refused_by_its_name() {
    let read = |text: &str| serde_json::from_str::<LossScale>(text);
    let rule = read(r#"{"Dynamic": {"growth_interval": 100}}"#).unwrap();
    let expected = DynamicLossScale {
        growth_interval: 100,
        ..Default::default()
    };
    assert_eq!(rule, LossScale::Dynamic(expected));
    let error = read(r#"{"Dynamic": {"growth_intervall": 100}}"#).unwrap_err();
    assert_says!(error, "growth_intervall");
}
