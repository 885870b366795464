//! Quantizers that learn their scales and zero points with the model.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, Learned, NumberFormat, QatConfig, QuantizedForward, Schedule,
    Scheme, WeightConfig, WeightQuantizer, advance, calibrate, module::learned_parameters,
};
use burn_lean::reparam::{PathMapper, Trail, map_with_path};

use crate::quantizers::{range, uint8};
use crate::support::{gradients, on_tracked, tensor, values, with_numbers};

fn lsq(learned: Learned, activation: FakeQuantizeConfig) -> QatConfig {
    let weight = WeightConfig::int(4).with_learned(Learned::Lsq);
    QatConfig::new()
        .with_weight(weight)
        .with_activation(Some(activation.with_learned(learned)))
}

/// Paths of the learned parameters that moved in one step of `optimizer`, and the model after it.
fn learned_that_move(
    model: Linear,
    optimizer: &mut ModuleOptimizer,
    x: Tensor<2>,
) -> (Vec<String>, Linear) {
    use crate::support::parameters;
    let loss = model.forward_q(x).square().mean();
    let before = parameters(&model);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let model = advance(optimizer.step(0.05, model, grads));
    let moved = before
        .into_iter()
        .zip(parameters(&model))
        .filter(|(before, after)| before.values != after.values)
        .map(|(before, _)| before.path)
        .filter(|path| path.contains("learned"));
    (moved.collect(), model)
}

#[test]
fn learned_scales_start_from_the_data_when_quantization_starts_and_are_trained() {
    on_tracked(|device| {
        let model = with_numbers(LinearConfig::new(6, 4).init(&device), 2);
        let schedule = Schedule::new().with_quantize_from(1);
        let config = lsq(Learned::LsqPlus, uint8()).with_schedule(schedule);
        let model = config.prepare(model).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let x = tensor::<2>(1, [8, 6], &device);

        let (moved, model) = learned_that_move(model, &mut optimizer, x.clone());
        assert_eq!(moved, [""; 0], "while it observes");
        let quantizer = WeightQuantizer::of(&model.weight).unwrap();
        assert!(!quantizer.weight.is_learning());
        let observed = quantizer.input.as_ref().unwrap().qparams().unwrap();

        let (moved, model) = learned_that_move(model, &mut optimizer, x);
        assert_eq!(
            moved,
            [
                "weight.quant.weight.learned_scale",
                "weight.quant.input.learned_scale",
            ],
            "no value is clipped yet, so that zero points have no gradient"
        );
        let quantizer = WeightQuantizer::of(&model.weight).unwrap();
        assert!(quantizer.weight.is_learning());
        let input = quantizer.input.as_ref().unwrap();
        let learned = input.qparams().unwrap();
        assert_eq!(values(learned.zero_point), values(observed.zero_point));
        let (learned, observed) = (values(learned.scale)[0], values(observed.scale)[0]);
        assert!(learned != observed && (learned / observed - 1.0).abs() < 0.2);
    });
}

/// Freezes a model, but not what its quantizers learn.
struct FreezeWeights;

impl PathMapper for FreezeWeights {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match at.is_attached() {
            true => param,
            false => param.set_require_grad(false),
        }
    }
}

/// As of a step that a loss scale made overflow, and that is skipped: the next one begins.
#[test]
fn scales_are_not_learned_from_what_is_infinite() {
    on_tracked(|device| {
        let symmetric = FakeQuantizeConfig::new(Scheme::symmetric(NumberFormat::int8()));
        for (learned, activation) in [(Learned::LsqPlus, uint8()), (Learned::Lsq, symmetric)] {
            let model = with_numbers(LinearConfig::new(6, 4).init(&device), 2);
            let model = lsq(learned, activation).prepare(model).unwrap();
            let x = tensor::<2>(1, [8, 6], &device);
            let input = || {
                let quantizer = WeightQuantizer::of(&model.weight).unwrap();
                quantizer.input.clone().unwrap()
            };
            for broken in [f32::INFINITY, f32::NAN] {
                model.forward_q(x.clone() * broken);
                assert!(!input().is_learning(), "{broken}");
            }
            model.forward_q(x.clone());
            assert!(input().is_learning());
            let scale = values(input().qparams().unwrap().scale)[0];
            assert!((1e-4..0.1).contains(&scale), "{scale}");
        }
    });
}

#[test]
fn scales_are_learned_around_frozen_weights_with_an_edit_and_without() {
    on_tracked(|device| {
        let build = || {
            let model = with_numbers(LinearConfig::new(6, 4).init(&device), 2);
            let model = lsq(Learned::Lsq, uint8()).prepare(model).unwrap();
            map_with_path(model, &mut FreezeWeights)
        };
        let x = tensor::<2>(1, [8, 6], &device);
        let learned = |model: &Linear, loss: Tensor<1>| {
            let grads = GradientsParams::from_grads(loss.backward(), model);
            let found = gradients(model, grads).into_iter();
            found.map(|(path, ..)| path).collect::<Vec<String>>()
        };
        let edited = build();
        let expected = learned(&edited, edited.forward_q(x.clone()).square().mean());
        assert_eq!(
            expected,
            [
                "weight.quant.weight.learned_scale",
                "weight.quant.input.learned_scale",
            ]
        );
        for quantized in [QuantizedForward::new(), QuantizedForward::new().cached()] {
            let model: Linear = build();
            for _ in 0..2 {
                let loss = quantized.run(&model, x.clone(), |model, x| {
                    model.forward(x).square().mean()
                });
                let loss = loss.unwrap();
                assert!(loss.is_tracked());
                assert_eq!(learned(&model, loss), expected);
            }
        }
    });
}

/// Half a bell curve and one outlier: of the whole range two bits would have one level that is used.
#[test]
fn affine_scales_of_few_levels_start_where_the_error_is_small() {
    on_tracked(|device| {
        let bell = |i: usize| {
            let [a, b] = [0.6180, 0.7548].map(|step: f32| (i as f32 * step).fract().max(1e-4));
            ((-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos()).max(0.0)
        };
        let mut x: Vec<f32> = (0..1023).map(bell).collect();
        x.push(9.0);
        let error = |scale: f32| -> f64 {
            let rounded = |x: f32| f64::from((x / scale).round().min(3.0) * scale);
            x.iter().map(|&x| (f64::from(x) - rounded(x)).powi(2)).sum()
        };
        let best = (1..400)
            .map(|i| error(i as f32 * 0.01))
            .fold(f64::MAX, f64::min);
        assert!(error(3.0) > 2.0 * best, "the whole range");
        for learned in [Learned::Lsq, Learned::LsqPlus] {
            for observed in [0, 2] {
                let scheme = Scheme::affine(NumberFormat::uint(2));
                let config = FakeQuantizeConfig::new(scheme).with_learned(learned);
                let quantizer = config.init(&device).unwrap();
                let quantizer =
                    quantizer.with_schedule(Schedule::new().with_quantize_from(observed));
                let data = Tensor::<1>::from_floats(x.as_slice(), &device);
                let mut quantizer = quantizer;
                for _ in 0..=observed {
                    quantizer.forward(data.clone());
                    quantizer = advance(quantizer);
                }
                let scale = values(quantizer.qparams().unwrap().scale)[0];
                let share = error(scale) / best;
                assert!(share < 1.02, "{learned:?}, {observed}: {scale}, {share}");
            }
        }
    });
}

#[test]
fn after_a_calibration_learned_scales_start_from_its_ranges() {
    on_tracked(|device| {
        let model = with_numbers(LinearConfig::new(6, 4).init(&device), 2);
        let model = lsq(Learned::LsqPlus, uint8()).prepare(model).unwrap();
        let x = tensor::<2>(1, [8, 6], &device);
        let model = calibrate(model, |model| {
            model.forward_q(x.clone());
        })
        .unwrap();
        let quantizer = WeightQuantizer::of(&model.weight).unwrap();
        let input = quantizer.input.as_ref().unwrap();
        assert!(quantizer.weight.is_learning() && input.is_learning());
        let (low, high) = range(input);
        assert_eq!(
            values(input.qparams().unwrap().scale),
            [(high - low) / 255.0]
        );
        // A replica trains the same scale as the model.
        let replica = model.clone().fork(&device);
        let loss = replica.forward_q(x).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &replica);
        let model = SgdConfig::new().init().step(0.05, model, grads);
        let scale = |model: &Linear| {
            let quantizer = WeightQuantizer::of(&model.weight).unwrap();
            values(quantizer.weight.qparams().unwrap().scale)
        };
        assert_ne!(scale(&model), scale(&replica));
    });
}

#[test]
fn a_zero_point_is_learned_from_what_is_clipped() {
    on_tracked(|device| {
        let model = with_numbers(LinearConfig::new(6, 4).init(&device), 2);
        let model = lsq(Learned::LsqPlus, uint8()).prepare(model).unwrap();
        let x = tensor::<2>(1, [8, 6], &device);
        model.forward_q(x.clone());
        let zero_point = |x| {
            let loss = model.forward_q(x).square().mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let found = gradients(&model, grads);
            let path = "weight.quant.input.learned_zero_point";
            let found = found.into_iter().find(|(at, ..)| at == path).unwrap();
            found.2[0]
        };
        assert_eq!(zero_point(x.clone()), 0.0);
        assert_ne!(zero_point(x * 3.0), 0.0);
    });
}

#[test]
fn learned_parameters_can_have_an_optimizer_without_weight_decay() {
    on_tracked(|device| {
        let model = with_numbers(LinearConfig::new(6, 4).init(&device), 2);
        let model = lsq(Learned::Lsq, uint8()).prepare(model).unwrap();
        let x = tensor::<2>(1, [8, 6], &device);
        model.forward_q(x.clone());
        // A gradient of zero: only decay moves.
        let step = |optimizer: &mut ModuleOptimizer| {
            let loss = (model.forward_q(x.clone()) * 0.0).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let moved = optimizer.step(0.1, model.clone(), grads);
            let scale = |model: &Linear| {
                let quantizer = WeightQuantizer::of(&model.weight).unwrap();
                values(quantizer.weight.qparams().unwrap().scale)
            };
            let weight = |model: &Linear| values(model.weight.base());
            assert_ne!(weight(&moved), weight(&model), "the weights decay");
            scale(&moved) == scale(&model)
        };
        let decay = AdamWConfig::new().with_weight_decay(0.1);
        assert!(!step(&mut decay.init()), "scales decay with the rest");
        let without = AdamWConfig::new().with_weight_decay(0.0).build();
        let mut grouped = decay.init().with_group(learned_parameters(), without, None);
        assert!(step(&mut grouped));
    });
}
