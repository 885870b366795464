//! Random loss scales and configurations of mixed precision, storms of overflows.

use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType};
use burn_lean::amp::{
    Autocast, AutocastConfig, DynamicLossScale, Fallback, GradScaler, GradScalerConfig, LossScale,
    scaler::{GradScalerRecord, LossScaleState},
};
use proptest::prelude::*;

use crate::cases::{Tally, cases, count};
use crate::hostile::kind;
use crate::network::Net;
use crate::support::parameters;

fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => 1e-3f32..1e5,
        2 => 0f32..3.0,
        1 => prop_oneof![
            Just(0.0f32), Just(-1.0), Just(f32::NAN), Just(f32::INFINITY), Just(f32::MAX),
            Just(f32::MIN_POSITIVE), Just(1e-45),
        ],
    ]
}

fn count_of() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0u32..6, 1 => Just(u32::MAX), 1 => Just(1 << 31)]
}

fn loss_scale() -> impl Strategy<Value = LossScale> {
    let factors = (
        number(),
        prop_oneof![3 => Just(2.0), 2 => number().prop_map(f64::from)],
        prop_oneof![3 => Just(0.5), 2 => number().prop_map(f64::from)],
    );
    let bounds = (
        prop_oneof![3 => Just(f32::MIN_POSITIVE), 1 => number()],
        prop_oneof![3 => Just(f32::MAX), 1 => number()],
    );
    let dynamic = (factors, count_of(), count_of(), bounds).prop_map(
        |((init_scale, growth_factor, backoff_factor), growth_interval, hysteresis, bounds)| {
            LossScale::Dynamic(DynamicLossScale {
                init_scale,
                growth_factor,
                backoff_factor,
                growth_interval,
                hysteresis,
                min_scale: bounds.0,
                max_scale: bounds.1,
            })
        },
    );
    prop_oneof![
        1 => Just(LossScale::None),
        1 => number().prop_map(LossScale::Static),
        6 => dynamic,
    ]
}

fn state() -> impl Strategy<Value = LossScaleState> {
    let big = || prop_oneof![3 => 0u64..9, 1 => Just(u64::MAX), 1 => Just(u64::MAX / 2)];
    let left = prop_oneof![3 => -2i32..6, 1 => Just(i32::MIN), 1 => Just(i32::MAX)];
    (number(), count_of(), left, count_of(), big(), big()).prop_map(
        |(scale, growth_tracker, hysteresis_left, consecutive_skips, skipped_steps, steps)| {
            LossScaleState {
                scale,
                growth_tracker,
                hysteresis_left,
                consecutive_skips,
                skipped_steps,
                steps,
            }
        },
    )
}

/// Steps with these outcomes; what must hold after each.
fn run(
    rule: &LossScale,
    mut state: LossScaleState,
    outcomes: &[bool],
) -> Result<(), TestCaseError> {
    let first = state;
    for found_inf in outcomes {
        let before = state;
        state = rule.update(before, *found_inf);
        prop_assert!(state.scale.is_normal() && state.scale > 0.0);
        prop_assert!(state.inverse_scale().is_finite());
        match rule {
            LossScale::Dynamic(rule) => {
                prop_assert!((rule.min_scale..=rule.max_scale).contains(&state.scale));
                let falls = state.scale < before.scale;
                prop_assert!(!falls || *found_inf);
                // It tolerates as many overflows in a row as it says, the last of them excluded.
                prop_assert!(!falls || rule.hysteresis <= 1 + state.consecutive_skips);
            }
            _ => prop_assert_eq!(state.scale, first.scale),
        }
    }
    Ok(())
}

static LOSS_SCALES: Tally = Tally::new();
static STATES: Tally = Tally::new();
static TRAININGS: Tally = Tally::new();

#[test]
fn any_loss_scale_stays_in_its_bounds_or_is_refused() {
    loss_scales();
    LOSS_SCALES.assert_one_of(10);
}

#[test]
fn any_state_of_a_scaler_is_refused_or_goes_on() {
    states();
    STATES.assert_one_of(200);
}

#[test]
fn any_training_in_half_keeps_finite_weights() {
    trainings();
    TRAININGS.assert_one_of(60);
}

proptest! {
    #![proptest_config(cases(1000))]

    fn loss_scales(
        rule in loss_scale(), outcomes in proptest::collection::vec(any::<bool>(), 0..60),
    ) {
        LOSS_SCALES.case();
        if rule.validate().is_ok() {
            run(&rule, rule.init(), &outcomes)?;
            LOSS_SCALES.result();
        }
    }

    fn states(
        rule in loss_scale(), state in state(), version in 0u32..3,
        outcomes in proptest::collection::vec(any::<bool>(), 0..9),
    ) {
        STATES.case();
        let config = GradScalerConfig::new(rule);
        let record = GradScalerRecord { version, config, state };
        let Ok(scaler) = GradScaler::from_record(record) else { return Ok(()) };
        let mut state = scaler.state();
        for found_inf in outcomes {
            state = rule.update(state, found_inf);
            prop_assert!(state.scale.is_normal() && state.scale > 0.0);
        }
        // What a scaler comes to can be loaded again.
        let record = GradScalerRecord { state, ..scaler.to_record() };
        prop_assert!(GradScaler::from_record(record).is_ok(), "{:?}", state);
        STATES.result();
    }
}

proptest! {
    #![proptest_config(cases(60))]

    fn trainings(
        rule in loss_scale(), dtype in 0usize..3, region in any::<bool>(), fallback in 0usize..3,
        max_norm in proptest::option::of(number()), limit in proptest::option::of(0usize..4),
        kinds in proptest::collection::vec(kind(), 1..5), w in kind(), seed in 0u64..10_000,
    ) {
        // NaN in the weights themselves is not of the scaler's making.
        prop_assume!(w.is_finite() && rule != LossScale::None);
        TRAININGS.case();
        let device = Device::flex().autodiff();
        let dtype = [FloatDType::F16, FloatDType::BF16, FloatDType::F32][dtype];
        let fallback = [Fallback::Error, Fallback::F32, Fallback::Emulate][fallback];
        let config = GradScalerConfig::new(rule)
            .with_max_norm(max_norm)
            .with_max_consecutive_skips(limit);
        let Ok(mut scaler) = config.init() else { return Ok(()) };
        let mut net = Net::of(w, seed, &device);
        let autocast = match region {
            true => {
                let config = AutocastConfig::new(dtype).with_fallback(fallback);
                match config.prepare(net) {
                    Ok((prepared, autocast)) => {
                        net = prepared;
                        autocast
                    }
                    Err(_) => return Ok(()),
                }
            }
            false => {
                Autocast::new(dtype).with_fallback(fallback)
            }
        };
        let mut optim = SgdConfig::new().init();
        let mut taken = false;
        for (index, kind) in kinds.iter().enumerate() {
            let x = kind.tensor::<2>(seed + index as u64, [6, 8], &device);
            let loss = match region {
                true => autocast.forward(x, |x| net.forward(x)).cast(FloatDType::F32).square().mean(),
                false => match autocast.run(&net, x, |net: &Net, x| net.forward(x).square().mean()) {
                    Ok(loss) => loss,
                    Err(_) => return Ok(()),
                },
            };
            let Ok(loss) = scaler.scale(loss) else { return Ok(()) };
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            // A learning rate that cannot take a weight out of its range itself.
            net = match scaler.step(&mut optim, 1e-30, net, grads) {
                Ok(net) => {
                    taken |= scaler.report().is_some_and(|report| !report.skipped);
                    net
                }
                Err(rejected) => rejected.into_value(),
            };
            for parameter in parameters(&net) {
                let finite = parameter.values.iter().all(|value| value.is_finite());
                prop_assert!(finite, "{:?}: {:?}", kind, parameter);
            }
        }
        if taken {
            TRAININGS.result();
        }
    }
}

/// Storms of overflows, calms between them, and single ones.
fn outcome(step: u64) -> bool {
    let storm = step / 1000 % 10 == 7 && step % 1000 < 60;
    let rare = step.is_multiple_of(997);
    storm || rare
}

#[test]
fn a_hundred_thousand_steps_with_storms_of_overflows() {
    let rule = DynamicLossScale {
        growth_interval: 20,
        hysteresis: 2,
        min_scale: 1.0,
        max_scale: 2f32.powi(24),
        ..DynamicLossScale::default()
    };
    let scale = LossScale::Dynamic(rule);
    let mut state = scale.init();
    let (mut skipped, mut in_a_row, mut lowest, mut highest) = (0, 0, f32::MAX, 0f32);
    let steps = count(100_000) as u64;
    for step in 0..steps {
        let found_inf = outcome(step);
        skipped += u64::from(found_inf);
        in_a_row = if found_inf { in_a_row + 1 } else { 0 };
        state = scale.update(state, found_inf);
        assert!(
            (rule.min_scale..=rule.max_scale).contains(&state.scale),
            "{state:?}"
        );
        // A power of two times the first one, exactly.
        assert_eq!(state.scale.log2().fract(), 0.0);
        assert_eq!((state.steps, state.skipped_steps), (step + 1, skipped));
        assert_eq!(state.consecutive_skips, in_a_row);
        assert!(state.growth_tracker < rule.growth_interval);
        lowest = lowest.min(state.scale);
        highest = highest.max(state.scale);
    }
    // Storms reach the floor, calms the ceiling.
    assert_eq!((lowest, highest), (rule.min_scale, rule.max_scale));
}
