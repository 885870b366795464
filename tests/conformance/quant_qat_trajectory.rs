//! Twenty steps of quantization-aware training against PyTorch's.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::Linear;
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, NumberFormat, ObserverConfig, Override, QatConfig, Schedule,
    Scheme, Site, WeightConfig, advance, quantizers,
};
use serde_json::Value;

use crate::support::{Target, each_device, values};
use crate::{cases, floats, matrix, near, vector};

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

/// What a case's name says.
fn config(case: &Value) -> Option<QatConfig> {
    let name = case["name"].as_str().unwrap();
    let average = |field: &str| ObserverConfig::MovingAverage {
        averaging_constant: case[field].as_f64().unwrap(),
    };
    if name == "float_baseline" {
        return None;
    }
    let mut schedule = Schedule::new();
    let mut weight_observer = average("weight_averaging");
    match name {
        "qat_fake_quant_from_step5_observer_frozen_at_10" => {
            schedule = schedule
                .with_quantize_from(5)
                .with_freeze_observers_at(Some(10));
        }
        // PyTorch's moving average with the constant 1; the difference is that it can be frozen.
        "qat_weights_memoryless_act_avg0.01" => weight_observer = ObserverConfig::Memoryless,
        _ => {}
    }
    let weight = WeightConfig::new()
        .with_format(NumberFormat::int8())
        .with_observer(weight_observer);
    let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()))
        .with_observer(average("act_averaging"));
    let outputs = match name {
        "qat_output_quantized" => {
            vec![Override::new("second".into()).with_outputs(Some(true))]
        }
        _ => Vec::new(),
    };
    let config = QatConfig::new()
        .with_weight(weight)
        .with_activation(Some(activation))
        .with_overrides(outputs)
        .with_schedule(schedule);
    Some(config)
}

/// The first steps, in which nothing but a tie may tell the two trainings apart.
const EXACT_STEPS: usize = 5;

#[test]
fn twenty_steps_follow_the_reference() {
    let cases = cases("quant_qat_trajectory.json");
    each_device(|target| {
        for case in &cases {
            follows(case, target);
        }
    });
}

/// A weight that is the largest of its channel lies exactly between two codes, 127.5 scales. If
/// its last bit is not PyTorch's, since a sum ran in another order, its code may flip, by one of
/// 255 steps, or its gradient may be cut off: from then on the trainings differ. So does an
/// activation that happens to lie next to a tie.
///
/// Until then they agree to 1e-5. Where they do not, one weight that is moved by one unit in the
/// last place before one of the steps must bring them together again.
fn follows(case: &Value, target: &Target) {
    let name = format!("{} on {}", case["name"], target.name);
    let losses = floats(&case["losses"]);
    let (steps, model) = train(case, target, losses.len(), None);
    let scales = case["act_scale_then_zero_point_per_step"].as_array();
    let scales = scales.expect("scales and zero points");
    let lengths = [steps.len(), scales.len()];
    assert_eq!(lengths, [losses.len(); 2], "{name}");
    for (step, expected) in steps.iter().zip(scales) {
        // The reference observes its float model, too.
        let quantizers = match config(case) {
            Some(_) => floats(expected).len() / 2,
            None => 0,
        };
        assert_eq!(step.activations.len(), quantizers, "{name}");
    }
    for (step, (found, expected)) in steps.iter().zip(&losses).enumerate() {
        assert!(
            (found.loss - expected).abs() <= 5e-3,
            "{name}, step {step}: {}, not {expected}",
            found.loss
        );
    }
    if !agrees(case, &steps) {
        let weights = [&model.first, &model.second].map(|layer| layer.weight.dims());
        let weights: usize = weights.iter().flatten().product();
        let mut nudges = (1..EXACT_STEPS).flat_map(|step| {
            let of_step = move |weight| [true, false].map(|up| Nudge { step, weight, up });
            (0..weights).flat_map(of_step)
        });
        let nudge = nudges.find(|nudge| {
            let (steps, _) = train(case, target, EXACT_STEPS, Some(*nudge));
            agrees(case, &steps)
        });
        println!("{name}: {nudge:?}");
        assert!(
            nudge.is_some(),
            "{name}: {:?}, not {losses:?}",
            steps.iter().map(|step| step.loss).collect::<Vec<_>>()
        );
    }
    match config(case) {
        Some(config) => keeps_to(&config.schedule, case, target, &steps),
        None => {
            let weight = values(model.first.weight.base().transpose());
            close(&name, "W1", weight, &case["final"]["W1"], 1e-6);
        }
    }
}

/// It quantizes from the step on that the schedule names, and all ranges stay from the other one on.
fn keeps_to(schedule: &Schedule, case: &Value, target: &Target, steps: &[Step]) {
    let name = format!("{} on {}", case["name"], target.name);
    if let Some(at) = schedule.freeze_observers_at {
        let at = at as usize;
        let last = &steps[at - 1].scales;
        // Of two weights and two activations.
        assert_eq!(last.len(), 4, "{name}");
        assert_ne!(last, &steps[at - 2].scales, "{name}");
        for step in &steps[at..] {
            assert_eq!(&step.scales, last, "{name}");
        }
    }
    let start = schedule.quantize_from as usize;
    if start > 0 {
        let (_, model) = train(case, target, start, None);
        let losses = first_quantized_losses(case, &model, &steps[start].activations);
        for loss in [steps[start].loss, floats(&case["losses"])[start]] {
            // What they have without quantization is 1.4e-4 from the nearest.
            assert!(
                losses.iter().any(|one| (loss - one).abs() <= 1e-5),
                "{name}, step {start}: {loss} is none of {losses:?}"
            );
        }
    }
}

/// The losses that the first quantized step may have: the largest weight of a channel has the code 127,
/// or one of −127 and −128, between which it lies exactly.
fn first_quantized_losses(case: &Value, model: &Mlp, activations: &[(f32, f32)]) -> Vec<f32> {
    let layer = |layer: &Linear, input: (f32, f32)| {
        let weight = layer.weight.base().transpose();
        let inputs = weight.dims()[1];
        Layer {
            input,
            channels: values(weight).chunks(inputs).map(<[f32]>::to_vec).collect(),
            bias: values(layer.bias.as_ref().unwrap().val()),
        }
    };
    let first = layer(&model.first, activations[0]);
    let second = layer(&model.second, activations[1]);
    let examples = case["X"].as_array().unwrap();
    let wanted = floats(&case["T"]);
    let channels = first.channels.len() + second.channels.len();
    let losses = (0..1_u32 << channels).map(|lowest| {
        let outputs = examples.iter().flat_map(|x| {
            let h = first.forward(&floats(x), lowest);
            let h: Vec<f32> = h.into_iter().map(|h| h.max(0.0)).collect();
            second.forward(&h, lowest >> first.channels.len())
        });
        let squares = outputs.zip(&wanted).map(|(y, wanted)| (y - wanted).powi(2));
        squares.sum::<f32>() / wanted.len() as f32
    });
    losses.collect()
}

/// A layer as the first quantized step computes it.
struct Layer {
    /// Scale and zero point of what comes in.
    input: (f32, f32),
    /// The float weights of each output.
    channels: Vec<Vec<f32>>,
    bias: Vec<f32>,
}

impl Layer {
    /// `lowest`: a bit for each output whose negative largest weight has the lowest code.
    fn forward(&self, x: &[f32], lowest: u32) -> Vec<f32> {
        let (scale, zero_point) = self.input;
        let x = x.iter().map(|x| {
            let code = (x * (1.0 / scale)).round_ties_even() + zero_point;
            (code.clamp(0.0, 255.0) - zero_point) * scale
        });
        let x: Vec<f32> = x.collect();
        let output = |(index, weights): (usize, &Vec<f32>)| {
            let largest = weights.iter().fold(0f32, |most, w| most.max(w.abs()));
            let scale = largest / 127.5;
            let code = |w: f32| match w.abs() == largest {
                true if w > 0.0 => 127.0,
                true => -127.0 - ((lowest >> index) & 1) as f32,
                false => (w * (1.0 / scale)).round_ties_even(),
            };
            let products = weights.iter().zip(&x).map(|(w, x)| code(*w) * scale * x);
            products.sum::<f32>() + self.bias[index]
        };
        self.channels.iter().enumerate().map(output).collect()
    }
}

/// What a step gave.
struct Step {
    loss: f32,
    /// Scale and zero point of each activation.
    activations: Vec<(f32, f32)>,
    /// The scales of every quantizer that has a range.
    scales: Vec<Vec<f32>>,
}

/// Whether losses and activation scales of the first steps are those of the reference.
fn agrees(case: &Value, steps: &[Step]) -> bool {
    let losses = floats(&case["losses"]);
    let scales = &case["act_scale_then_zero_point_per_step"];
    let mut steps = steps.iter().zip(losses).enumerate().take(EXACT_STEPS);
    steps.all(|(index, (step, loss))| {
        let expected = floats(&scales[index]);
        let (scales, zero_points) = expected.split_at(expected.len() / 2);
        let expected = scales.iter().zip(zero_points);
        (step.loss - loss).abs() <= 1e-5
            && step.activations.iter().zip(expected).all(
                |((scale, zero_point), (expected, expected_zero_point))| {
                    near(*scale, *expected, 1e-5) && zero_point == expected_zero_point
                },
            )
    })
}

/// A weight that is moved by one unit in the last place before a step.
#[derive(Debug, Clone, Copy)]
struct Nudge {
    step: usize,
    weight: usize,
    up: bool,
}

fn train(case: &Value, target: &Target, steps: usize, nudge: Option<Nudge>) -> (Vec<Step>, Mlp) {
    let name = format!("{} on {}", case["name"], target.name);
    let device = target.device.clone().autodiff();
    let mut model = Mlp::new(&case["init"], &device);
    if let Some(config) = config(case) {
        model = config.prepare(model).unwrap();
    }
    let x = matrix(&case["X"], &device);
    let wanted = matrix(&case["T"], &device);
    let mut trace = Vec::new();
    for step in 0..steps {
        let output = model.forward(x.clone());
        let loss = (output.clone() - wanted.clone()).square().mean();
        trace.push(Step {
            loss: values(loss.clone())[0],
            activations: activations(&model),
            scales: scales(&model),
        });
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        if step == 0 {
            // Sums of a few products in another order.
            let output = values(output);
            close(&name, "output", output, &case["first_output"], 1e-6);
            first_gradients(&name, case, &model, &grads);
        }
        let nudge = nudge.filter(|nudge| nudge.step == step + 1);
        model = advance(model.map(&mut Update {
            grads,
            rate: case["lr"].as_f64().unwrap() as f32,
            nudge: nudge.map(|nudge| (nudge.weight, nudge.up)),
        }));
    }
    (trace, model)
}

/// One step of SGD with one rounding, as PyTorch takes it: fused(−rate · gradient + weight).
struct Update {
    grads: GradientsParams,
    rate: f32,
    /// Index among the weights that are still to come, and direction.
    nudge: Option<(usize, bool)>,
}

impl ModuleMapper for Update {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(gradient) = self.grads.remove::<D>(param.id) else {
            return param;
        };
        let gradient = values(gradient);
        param.map(|base| {
            let mut updated: Vec<f32> = values(base.clone())
                .into_iter()
                .zip(gradient)
                .map(|(weight, gradient)| gradient.mul_add(-self.rate, weight))
                .collect();
            if let (2, Some((weight, up))) = (D, self.nudge) {
                self.nudge = match updated.get_mut(weight) {
                    Some(weight) => {
                        *weight = match up {
                            true => weight.next_up(),
                            false => weight.next_down(),
                        };
                        None
                    }
                    None => Some((weight - updated.len(), up)),
                };
            }
            let updated = TensorData::new(updated, base.dims());
            Tensor::from_data(updated, &base.device()).require_grad()
        })
    }
}

fn activations(model: &Mlp) -> Vec<(f32, f32)> {
    let located = quantizers(model).into_iter();
    let activations = located.filter(|located| located.site != Site::Weight);
    let qparams = activations.map(|located| located.quantizer.qparams().unwrap());
    qparams
        .map(|qparams| (values(qparams.scale)[0], values(qparams.zero_point)[0]))
        .collect()
}

fn scales(model: &Mlp) -> Vec<Vec<f32>> {
    let located = quantizers(model).into_iter();
    let qparams = located.filter_map(|located| located.quantizer.qparams().ok());
    qparams.map(|qparams| values(qparams.scale)).collect()
}

fn first_gradients(name: &str, case: &Value, model: &Mlp, grads: &GradientsParams) {
    let expected = &case["first_grads"];
    for (layer, weight, bias) in [(&model.first, "dW1", "db1"), (&model.second, "dW2", "db2")] {
        let found: Tensor<2> = grads.get(layer.weight.id).unwrap();
        let found = values(found.transpose());
        close(name, weight, found, &expected[weight], 2e-6);
        let found: Tensor<1> = grads.get(layer.bias.as_ref().unwrap().id).unwrap();
        close(name, bias, values(found), &expected[bias], 2e-6);
    }
}

/// Within `tolerance`, or that fraction of the largest number expected.
fn close(name: &str, what: &str, found: Vec<f32>, expected: &Value, tolerance: f32) {
    let expected = floats(expected);
    let largest = expected.iter().fold(1f32, |max, x| max.max(x.abs()));
    assert_eq!(found.len(), expected.len(), "{name}: {what}");
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            (found - expected).abs() <= tolerance * largest,
            "{name}: {what} {found}, not {expected}"
        );
    }
}
