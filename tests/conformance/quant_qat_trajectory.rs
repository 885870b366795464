//! Twenty steps of quantization-aware training against PyTorch's.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::Linear;
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, NumberFormat, ObserverConfig, Override, QatConfig, Schedule,
    Scheme, Site, WeightConfig, advance, quantizers,
};
use serde_json::Value;

use crate::quant_qat_reference::{H, Reference, Run, State, W1, W2, X, Y, close};
use crate::support::{Target, each_device, values};
use crate::{cases, matrix, vector};

/// Two linear layers.
#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn new(init: &Value, device: &Device) -> Self {
        let layer = |weight: &str, bias: &str| Linear {
            // PyTorch's layout is [out, in].
            weight: Param::from_tensor(matrix(&init[weight], device).transpose()),
            bias: Some(Param::from_tensor(vector(&init[bias], device))),
        };
        Self {
            first: layer("W1", "b1"),
            second: layer("W2", "b2"),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward_q(relu(self.first.forward_q(x)))
    }
}

/// What a case says; `None` for the float model.
fn config(case: &Value, run: &Run) -> Option<QatConfig> {
    let average = |field: &str| ObserverConfig::MovingAverage {
        averaging_constant: case[field].as_f64().unwrap(),
    };
    let weight_observer = match case["name"].as_str().unwrap() {
        "float_baseline" => return None,
        // PyTorch's moving average with the constant 1; the difference is that it can be frozen.
        "qat_weights_memoryless_act_avg0.01" => ObserverConfig::Memoryless,
        _ => average("weight_averaging"),
    };
    let weight = WeightConfig::new()
        .with_format(NumberFormat::int8())
        .with_observer(weight_observer);
    let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()))
        .with_observer(average("act_averaging"));
    let outputs = match run.output_is_quantized {
        true => vec![Override::new("second".into()).with_outputs(Some(true))],
        false => Vec::new(),
    };
    let schedule = Schedule::new()
        .with_quantize_from(run.quantize_from as u64)
        .with_freeze_observers_at(run.freeze_at.map(|step| step as u64));
    let config = QatConfig::new()
        .with_weight(weight)
        .with_activation(Some(activation))
        .with_overrides(outputs)
        .with_schedule(schedule);
    Some(config)
}

#[test]
fn twenty_steps_follow_the_reference() {
    let cases = cases("quant_qat_trajectory.json");
    let runs = cases.iter().map(|case| {
        let run = Run::of(case);
        let states = run.trajectory();
        (case, run, states)
    });
    let runs: Vec<_> = runs.collect();
    each_device(|target| {
        for (case, run, states) in &runs {
            follows(case, run, states, target);
        }
    });
}

/// Each step starts from the weights of the reference, bit by bit, and from the ranges that were observed
/// so far.
///
/// The largest weight of a channel lies exactly between two codes, 127.5 scales. On the CPU, where scales
/// and their reciprocals are rounded correctly, it must go the way of the reference. What comes out of a
/// sum, and on a GPU all, may go either way where it is as close to a tie as the sums of both sides are
/// to each other: the step must then be one of those that rounding each of them up or down gives.
fn follows(case: &Value, run: &Run, states: &[State], target: &Target) {
    let device = target.device.clone().autodiff();
    let mut model = Mlp::new(&case["init"], &device);
    let config = config(case, run);
    if let Some(config) = &config {
        model = config.prepare(model).unwrap();
    }
    let exact: &[usize] = match target.is_gpu() {
        true => &[],
        false => &[X, W1, W2],
    };
    let sites = match (&config, run.output_is_quantized) {
        (None, _) => 0,
        (_, false) => Y,
        (_, true) => Y + 1,
    };
    let memoryless = case["name"] == "qat_weights_memoryless_act_avg0.01";
    let x = matrix(&case["X"], &device);
    let wanted = matrix(&case["T"], &device);
    for (step, state) in states[..run.steps()].iter().enumerate() {
        let name = format!("{} on {}, step {step}", case["name"], target.name);
        let mut replace = Replace::with(&model, state);
        model = model.map(&mut replace);
        let start = State {
            ranges: observed(&model).ranges,
            ..state.clone()
        };
        let output = model.forward(x.clone());
        let loss = (output.clone() - wanted.clone()).square().mean();
        let found = Reference {
            loss: values(loss.clone())[0],
            output: values(output),
            gradients: gradients(
                &model,
                &GradientsParams::from_grads(loss.backward(), &model),
            ),
            state: observed(&model),
        };
        let count = quantizers(&model).len();
        assert_eq!(count, sites, "{name}");
        for site in 0..sites {
            let of_state = &found.state;
            assert!(!of_state.scales[site].is_empty(), "{name}");
            // The memoryless ones of weights keep no range.
            let kept = !(memoryless && [W1, W2].contains(&site));
            assert_eq!(!of_state.ranges[site].is_empty(), kept, "{name}");
        }

        let (plain, ties) = run.step(&start, step, exact, 0);
        assert!(ties <= 16, "{name}: {ties} ties");
        let ok = (0..1u64 << ties).any(|flipped| {
            let (expected, _) = run.step(&start, step, exact, flipped);
            is_near(&found, &expected)
        });
        assert!(ok, "{name}, {ties} ties: {found:?}, not {plain:?}");
        model = advance(model);
    }
}

/// Whether a step is that of the reference, up to the order of sums.
///
/// Three sums of at most 17 terms in a chain, each rounded on both sides, and a few more roundings: 3 · 2 ·
/// 18 · 2⁻²⁴ = 6.4e-6 of the magnitudes of their terms, which add up to a few times the largest sum.
fn is_near(found: &Reference, expected: &Reference) -> bool {
    const TOLERANCE: f32 = 2e-5;
    let near = |found: &[f32], expected: &[f32]| close(found, expected, TOLERANCE);
    let state = |site: usize| {
        let (found, expected) = (&found.state, &expected.state);
        // The reference observes its float model, too, and a memoryless observer keeps no range.
        let range = &found.ranges[site];
        let mut scales = found.scales[site].iter().zip(&expected.scales[site]);
        (range.is_empty() || near(range.as_flattened(), expected.ranges[site].as_flattened()))
            && scales.all(|(found, expected)| crate::near(*found, *expected, TOLERANCE))
            && (found.scales[site].is_empty()
                || found.zero_points[site] == expected.zero_points[site])
    };
    let mut gradients = found.gradients.iter().zip(&expected.gradients);
    near(&[found.loss], &[expected.loss])
        && near(&found.output, &expected.output)
        && gradients.all(|(found, expected)| near(found, expected))
        && [X, W1, H, W2, Y].into_iter().all(state)
}

/// Sets weights and biases.
struct Replace(HashMap<ParamId, Vec<f32>>);

impl Replace {
    fn with(model: &Mlp, state: &State) -> Self {
        let [w1, b1, w2, b2] = &state.parameters;
        let mut all = HashMap::new();
        for (layer, weight, bias) in [(&model.first, w1, b1), (&model.second, w2, b2)] {
            let (outputs, inputs) = (bias.len(), weight.len() / bias.len());
            let by_input = (0..weight.len()).map(|i| weight[i % outputs * inputs + i / outputs]);
            all.insert(layer.weight.id, by_input.collect());
            all.insert(layer.bias.as_ref().unwrap().id, bias.clone());
        }
        Self(all)
    }
}

impl ModuleMapper for Replace {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(values) = self.0.remove(&param.id) else {
            return param;
        };
        param.map(|base| {
            let values = TensorData::new(values, base.dims());
            Tensor::from_data(values, &base.device()).require_grad()
        })
    }
}

/// Ranges, scales and zero points of the quantizers, where they have observed or need not.
fn observed(model: &Mlp) -> State {
    let mut state = State::default();
    let (mut activations, mut weights) = ([X, H, Y].into_iter(), [W1, W2].into_iter());
    for located in quantizers(model) {
        let quantizer = &located.quantizer;
        let site = match located.site {
            Site::Weight => weights.next(),
            _ => activations.next(),
        };
        let site = site.expect("two weights and at most three activations");
        if let Ok(range) = quantizer.range() {
            let (min, max) = (values(range.min), values(range.max));
            let pairs = min.into_iter().zip(max);
            state.ranges[site] = pairs.map(|(min, max)| [min, max]).collect();
        }
        let qparams = match site {
            W1 => quantizer.qparams_for(&model.first.weight.base()),
            W2 => quantizer.qparams_for(&model.second.weight.base()),
            _ => quantizer.qparams(),
        };
        if let Ok(qparams) = qparams {
            state.scales[site] = values(qparams.scale);
            state.zero_points[site] = values(qparams.zero_point);
        }
    }
    state
}

/// Of weights, as `[out, in]`, and biases.
fn gradients(model: &Mlp, grads: &GradientsParams) -> [Vec<f32>; 4] {
    let of = |layer: &Linear| {
        let weight: Tensor<2> = grads.get(layer.weight.id).unwrap();
        let bias: Tensor<1> = grads.get(layer.bias.as_ref().unwrap().id).unwrap();
        (values(weight.transpose()), values(bias))
    };
    let ((w1, b1), (w2, b2)) = (of(&model.first), of(&model.second));
    [w1, b1, w2, b2]
}
