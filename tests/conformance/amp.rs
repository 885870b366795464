//! The rules of the `amp` crate.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::Linear;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_lean::amp::{
    AutocastConfig, DynamicLossScale, Fallback, GradScaler, GradScalerConfig, LossScale, round_to,
};
use serde_json::Value;

use crate::support::{Target, each_device, values};
use crate::{cases, flags, float, floats, matrix, nesting, same, vector};

/// One trainable vector.
#[derive(Module, Debug)]
struct Vector {
    values: Param<Tensor<1>>,
}

impl Vector {
    fn zeros(len: usize, device: &Device) -> Self {
        Self {
            values: Param::from_tensor(Tensor::zeros([len], device)),
        }
    }

    fn gradient(&self, values: &[f32]) -> GradientsParams {
        let mut grads = GradientsParams::new();
        let device = self.values.base().device().inner();
        grads.register::<1>(
            self.values.id,
            Tensor::from_data(TensorData::from(values), &device),
        );
        grads
    }
}

fn no_limit(loss_scale: LossScale) -> GradScaler {
    GradScalerConfig::new(loss_scale)
        .with_max_consecutive_skips(None)
        .init()
        .unwrap()
}

#[test]
fn loss_scale_follows_the_reference_schedule() {
    let cases = cases("grad_scaler_schedule.json");
    each_device(|target| {
        for case in &cases {
            schedule(case, &target.device.clone().autodiff());
        }
    });
}

fn schedule(case: &Value, device: &Device) {
    let mut scaler = no_limit(LossScale::Dynamic(DynamicLossScale {
        init_scale: float(&case["init_scale"]),
        growth_factor: float(&case["growth_factor"]),
        backoff_factor: float(&case["backoff_factor"]),
        growth_interval: case["growth_interval"].as_u64().unwrap() as u32,
        ..Default::default()
    }));
    let mut model = Vector::zeros(3, device);
    let mut optim = SgdConfig::new().init();
    for (step, found_inf) in flags(&case["found_inf"]).into_iter().enumerate() {
        let gradient = match (found_inf, step % 2) {
            (false, _) => [scaler.loss_scale(); 3],
            (true, 0) => [f32::INFINITY; 3],
            (true, _) => [0.0, f32::NAN, 1.0],
        };
        let grads = model.gradient(&gradient);
        model = scaler.step(&mut optim, 1.0, model, grads).unwrap();

        let name = format!("{} step {step}", case["name"]);
        let state = scaler.state();
        assert_eq!(state.scale, float(&case["scale_after"][step]), "{name}");
        assert_eq!(
            u64::from(state.growth_tracker),
            case["growth_tracker_after"][step].as_u64().unwrap(),
            "{name}"
        );
        let weight = values(model.values.val())[0];
        assert_eq!(weight, float(&case["sgd_param_after"][step]), "{name}");
    }
}

#[test]
fn gradients_are_unscaled_as_in_the_reference() {
    let cases = cases("unscale.json");
    each_device(|target| {
        for case in &cases {
            unscale(case, target);
        }
    });
}

fn unscale(case: &Value, target: &Target) {
    let scale = float(&case["scale"]);
    let gradient = floats(&case["grad"]);
    let model = Vector::zeros(gradient.len(), &target.device.clone().autodiff());
    let mut scaler = no_limit(LossScale::Static(scale));

    let grads = model.gradient(&gradient);
    let unscaled = scaler.unscale(&model, grads).unwrap();
    let found = values(unscaled.gradients().get::<1>(model.values.id).unwrap());
    for (index, (found, expected)) in found.iter().zip(floats(&case["unscaled"])).enumerate() {
        // Vulkan lets a device flush subnormal F32 numbers to zero.
        let flushed = target.name == "wgpu" && expected.abs() < f32::MIN_POSITIVE && *found == 0.0;
        assert!(
            same(*found, expected) || flushed,
            "{} [{index}] on {}: {found:e} instead of {expected:e}",
            case["name"],
            target.name
        );
    }

    let mut optim = SgdConfig::new().init();
    let _ = scaler.apply(&mut optim, 1.0, model, unscaled).unwrap();
    let skipped = scaler.report().unwrap().skipped;
    assert_eq!(
        skipped,
        case["found_inf"].as_bool().unwrap(),
        "{}",
        case["name"]
    );
}

fn dtype(case: &Value) -> FloatDType {
    match case["dtype"].as_str().unwrap() {
        "f32" => FloatDType::F32,
        "f16" => FloatDType::F16,
        "bf16" => FloatDType::BF16,
        other => panic!("unknown dtype {other}"),
    }
}

#[test]
fn numbers_are_rounded_as_in_the_reference() {
    for case in cases("rounding.json") {
        for (from, to) in [("x", "rounded"), ("dy", "dy_rounded")] {
            for (x, expected) in floats(&case[from]).into_iter().zip(floats(&case[to])) {
                let found = round_to(dtype(&case), x);
                assert!(
                    same(found, expected),
                    "{}: {x:e} gave {found:e}",
                    case["name"]
                );
            }
        }
    }
}

/// Values and gradients through the cast of a weight, native or emulated.
#[test]
fn values_and_gradients_through_the_cast_are_rounded_as_in_the_reference() {
    let cases = cases("rounding.json");
    each_device(|target| {
        for case in &cases {
            rounding(case, target);
        }
    });
}

fn rounding(case: &Value, target: &Target) {
    let device = target.device.clone().autodiff();
    let x = floats(&case["x"]);
    let dy = floats(&case["dy"]);
    let mut model = Vector::zeros(x.len(), &device);
    model.values = model
        .values
        .map(|_| Tensor::from_data(TensorData::from(&x[..]), &device).require_grad());
    let (model, autocast) = AutocastConfig::new(dtype(case))
        .with_fallback(Fallback::Emulate)
        .prepare(model)
        .unwrap();

    let y = autocast.forward((), |()| model.values.val());
    let dy = Tensor::<1>::from_data(TensorData::from(&dy[..]), &device);
    let grads = (y.clone() * dy).sum().backward();

    let gradient = values(model.values.base().grad(&grads).unwrap());
    for (found, expected, from) in [
        (values(y), &case["rounded"], "x"),
        (gradient, &case["dy_rounded"], "dy"),
    ] {
        for (index, expected) in floats(expected).into_iter().enumerate() {
            let input = floats(&case[from])[index];
            // Vulkan lets a device flush subnormal numbers to zero, F32 inputs among them.
            let flushed =
                target.name == "wgpu" && input.abs() < f32::MIN_POSITIVE && found[index] == 0.0;
            assert!(
                same(found[index], expected) || flushed,
                "{} on {}: {from} {input:e} gave {:e} instead of {expected:e}",
                case["name"],
                target.name,
                found[index],
            );
        }
    }
}

#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn new(case: &Value, device: &Device) -> Self {
        let linear = |weight: &Value, bias: &Value| Linear {
            weight: Param::from_tensor(matrix(weight, device)),
            bias: Some(Param::from_tensor(vector(bias, device))),
        };
        Self {
            first: linear(&case["W1"], &case["b1"]),
            second: linear(&case["W2"], &case["b2"]),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(relu(self.first.forward(x)))
    }
}

/// All numbers of a model, in order.
struct Numbers(Vec<f32>);

impl ModuleVisitor for Numbers {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(values(param.base()));
    }
}

#[test]
fn training_follows_the_reference_trajectories() {
    let cases = cases("training.json");
    each_device(|target| {
        for case in &cases {
            training(case, target);
        }
    });
}

/// Tolerance, with u the unit roundoff of the dtype (2⁻¹¹, 2⁻⁸, 2⁻²⁴):
///
/// Both sides round the same operands to the same grid; they differ in how often they round in
/// between (a product and its bias once or twice, emulation not at all) and in the order of sums.
/// That is at most two roundings for each of the two layers, so a relative error of the logits of
/// 4u, and of 8u in the loss, whose derivative by a logit is at most 2; with |logit| up to 4 that
/// is 32u. Gradients have the same relative error. Step t starts from weights that are off by at
/// most t · lr · |g| · 8u, which the gradient |g| ≤ 2 turns into t · lr · 32u of loss.
///
/// Below the normal numbers of F16 the error is absolute: half the smallest subnormal, 2⁻²⁵, for
/// each gradient that arrives at a layer; a weight sums as many of them as there are examples, times
/// an activation of up to 2. It is divided by the loss scale and by the loss multiplier, so it matters only in
/// the cases that are there to underflow.
fn training(case: &Value, target: &Target) {
    let dtype = dtype(case);
    let unit = match dtype {
        FloatDType::F16 => 2f32.powi(-11),
        FloatDType::BF16 => 2f32.powi(-8),
        _ => 2f32.powi(-24),
    };
    let device = target.device.clone().autodiff();
    let (model, autocast) = AutocastConfig::new(dtype)
        .with_fallback(Fallback::Emulate)
        .prepare(Mlp::new(case, &device))
        .unwrap();
    let mut model = model;
    let multiplier = float(&case["loss_multiplier"]);
    let lr = float(&case["lr"]);
    let scale = float(&case["loss_scale"]);
    let examples = nesting(&case["X"])[0] as f32;
    let underflow = match dtype {
        FloatDType::F16 => examples * 2.0 * 2f32.powi(-25) / (scale * multiplier),
        _ => 0.0,
    };
    let mut scaler = no_limit(LossScale::Static(scale));
    let mut optim = SgdConfig::new().init();
    let loss_fn = CrossEntropyLossConfig::new().init(&device);
    let x = matrix(&case["X"], &device);
    let labels: Vec<i32> = floats(&case["Y"])
        .iter()
        .map(|label| *label as i32)
        .collect();
    let y = Tensor::<1, Int>::from_data(TensorData::from(&labels[..]), &device);

    for (step, expected) in floats(&case["losses"]).into_iter().enumerate() {
        let logits = autocast.forward(x.clone(), |x| model.forward(x));
        let loss = loss_fn.forward(logits, y.clone()).mul_scalar(multiplier);
        let found = values(loss.clone())[0];
        let name = format!("{} step {step} on {}", case["name"], target.name);
        let drift = lr * step as f32 * (32.0 * unit + 2.0 * underflow);
        let tolerance = (32.0 * unit + drift) * multiplier;
        assert!(
            (found - expected).abs() <= tolerance,
            "{name}: loss {found:e}, expected {expected:e} ± {tolerance:e}"
        );
        let grads = GradientsParams::from_grads(scaler.scale(loss).unwrap().backward(), &model);
        let rate = f64::from(lr) / f64::from(multiplier);
        model = scaler.step(&mut optim, rate, model, grads).unwrap();
        let skipped = scaler.report().unwrap().skipped;
        assert_eq!(skipped, case["skipped"][step].as_bool().unwrap(), "{name}");
    }

    let mut found = Numbers(Vec::new());
    model.visit(&mut found);
    let steps = case["losses"].as_array().unwrap().len() as f32;
    for (found, expected) in found.0.iter().zip(floats(&case["final"])) {
        // The weights' share of the bound above: steps · lr · |g| · 8u, and one F32 rounding each.
        let tolerance = steps * (lr * (2.0 * 8.0 * unit + underflow) + 2f32.powi(-24));
        assert!(
            (found - expected).abs() <= tolerance,
            "{}: weight {found}, expected {expected} ± {tolerance:e}",
            case["name"]
        );
    }
}
