//! Twenty steps of quantization-aware training against PyTorch's.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, NumberFormat, ObserverConfig, Override, QatConfig, Schedule,
    Scheme, Site, WeightConfig, WeightQuantizer, advance, quantizers,
};
use serde_json::Value;

use crate::quant_fake_quantize::ulps;
use crate::support::{Target, each_device, values};
use crate::{cases, floats, matrix, vector};

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
    let observer = match name {
        "float_baseline" => return None,
        "qat_weights_avg0.01_act_avg0.01" => average("weight_averaging"),
        // PyTorch's moving average with the constant 1.
        _ => ObserverConfig::Memoryless,
    };
    let schedule = match name {
        "qat_fake_quant_from_step5_observer_frozen_at_10" => Schedule::new()
            .with_quantize_from(5)
            .with_freeze_observers_at(Some(10)),
        _ => Schedule::new(),
    };
    let weight = WeightConfig::new()
        .with_format(NumberFormat::int8())
        .with_observer(observer);
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

#[test]
fn twenty_steps_follow_the_reference() {
    let cases = cases("quant_qat_trajectory.json");
    each_device(|target| {
        for case in &cases {
            follows(case, target);
        }
    });
}

fn follows(case: &Value, target: &Target) {
    let name = format!("{} on {}", case["name"], target.name);
    let device = target.device.clone().autodiff();
    let mut model = Mlp::new(&case["init"], &device);
    if let Some(config) = config(case) {
        model = config.prepare(model).unwrap();
    }
    let x = matrix(&case["X"], &device);
    let wanted = matrix(&case["T"], &device);
    let mut optimizer = SgdConfig::new().init();
    let rate = case["lr"].as_f64().unwrap();
    let losses = floats(&case["losses"]);
    let mut last = 0.0;
    for (step, expected) in losses.iter().enumerate() {
        let output = model.forward(x.clone());
        if step == 0 {
            // Sums of up to 8 products in another order; no code lies near enough to a tie.
            close(
                &name,
                "output",
                values(output.clone()),
                &case["first_output"],
                1e-6,
            );
        }
        let loss = (output - wanted.clone()).square().mean();
        last = values(loss.clone())[0];
        // The largest weight of a channel lies exactly between two codes: 127.5 scales. Once a sum
        // in another order than PyTorch's moves it by an ulp, its code flips, by one of 255 steps.
        let tolerance = if step < 2 { 1e-5 } else { 5e-3 };
        assert!(
            (last - expected).abs() <= tolerance,
            "{name}, step {step}: {last}, not {expected}"
        );
        scales(&name, case, step, &model);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        if step == 0 {
            first_gradients(&name, case, &model, &grads);
        }
        model = advance(optimizer.step(rate, model, grads));
    }
    let expected = losses[losses.len() - 1];
    assert!((last - expected).abs() <= 0.02 * expected, "{name}: {last}");
    if case["name"] == "float_baseline" {
        let weight = values(model.first.weight.base().transpose());
        close(&name, "W1", weight, &case["final"]["W1"], 1e-6);
    }
}

fn first_gradients(name: &str, case: &Value, model: &Mlp, grads: &GradientsParams) {
    let expected = &case["first_grads"];
    for (layer, weight, bias) in [(&model.first, "dW1", "db1"), (&model.second, "dW2", "db2")] {
        let found: Tensor<2> = grads.get(layer.weight.id).unwrap();
        close(
            name,
            weight,
            values(found.transpose()),
            &expected[weight],
            2e-6,
        );
        let found: Tensor<1> = grads.get(layer.bias.as_ref().unwrap().id).unwrap();
        close(name, bias, values(found), &expected[bias], 2e-6);
    }
}

/// The activations' scales, then their zero points, after the forward pass of a step.
fn scales(name: &str, case: &Value, step: usize, model: &Mlp) {
    let located = quantizers(model);
    let activations: Vec<_> = located
        .iter()
        .filter(|at| at.site != Site::Weight)
        .map(|at| at.quantizer.qparams().unwrap())
        .collect();
    if activations.is_empty() {
        assert!(WeightQuantizer::of(&model.first.weight).is_none());
        return;
    }
    let expected = floats(&case["act_scale_then_zero_point_per_step"][step]);
    let (scales, zero_points) = expected.split_at(activations.len());
    for (index, qparams) in activations.into_iter().enumerate() {
        let scale = values(qparams.scale)[0];
        // The first input is the data itself; the others follow weights that differ a little.
        let allowed = if index == 0 {
            8.0 * ulp(scales[0])
        } else {
            2e-3 * scales[index]
        };
        assert!(
            (scale - scales[index]).abs() <= allowed,
            "{name}, step {step}: scale {scale}, not {}",
            scales[index]
        );
        assert_eq!(
            values(qparams.zero_point)[0],
            zero_points[index],
            "{name}, step {step}"
        );
    }
}

fn ulp(x: f32) -> f32 {
    let next = f32::from_bits(x.to_bits() + 1);
    assert_eq!(ulps(x, next), 1);
    next - x
}

fn close(name: &str, what: &str, found: Vec<f32>, expected: &Value, tolerance: f32) {
    let expected = floats(expected);
    assert_eq!(found.len(), expected.len(), "{name}: {what}");
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            (found - expected).abs() <= tolerance,
            "{name}: {what} {found}, not {expected}"
        );
    }
}
