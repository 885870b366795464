//! Weight rounding, folding and integer inference of the `quant` crate, factors between layers of `oneshot`.

use burn::module::{Module, Param, RunningState};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, PaddingConfig2d};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::oneshot::{self, OneShot, Preset, Quantize, Scaling};
use burn_lean::quant::{
    GptqConfig, Granularity, NumberFormat, QuantParams, Scheme,
    fake::to_codes,
    fold,
    fold::FoldPair,
    integer::{Grid, IntegerLinear, Multiplier, Requantization},
    module::InputStatistics,
    rounding::{WeightGrid, gptq},
};
use serde_json::Value;

use crate::support::{Target, each_device, values};
use crate::{cases, cases_of, files, float, floats, matrix, near, nesting, vector};

fn ints(value: &Value) -> Vec<i32> {
    match value {
        Value::Array(list) => list.iter().flat_map(ints).collect(),
        number => vec![number.as_i64().expect("an integer") as i32],
    }
}

#[test]
fn integer_linear_gives_every_number_of_the_reference() {
    for (index, file) in files("quant_integer_linear.json").iter().enumerate() {
        let layers = cases_of(file)
            .iter()
            .filter(|case| case.get("w_q").is_some());
        assert!(layers.map(integer_linear).count() > 0 || index > 0);
    }
}

fn integer_linear(case: &Value) {
    let input = Grid {
        scale: float(&case["x_scale"]),
        zero_point: ints(&case["x_zero_point"])[0],
        quant_min: 0,
        quant_max: 255,
    };
    let output = Grid {
        scale: float(&case["out_scale"]),
        zero_point: ints(&case["out_zero_point"])[0],
        ..input
    };
    let x: Vec<i32> = floats(&case["x"])
        .into_iter()
        .map(|x| input.quantize(x).unwrap())
        .collect();
    assert_eq!(x, ints(&case["x_q"]));

    // The file has the weight as [out, in].
    let by_output = ints(&case["w_q"]);
    let [d_output, d_input] = nesting(&case["w_q"])[..] else {
        panic!("w_q is no matrix")
    };
    let codes: Vec<i8> = (0..d_input * d_output)
        .map(|i| by_output[i % d_output * d_input + i / d_output] as i8)
        .collect();
    let scales = floats(&case["w_scale"]);
    each_device(|target| {
        let w = matrix(&case["w"], &target.device);
        let scheme = Scheme::symmetric(NumberFormat::int8().narrow())
            .with_granularity(Granularity::PerChannel { axis: 0 });
        let qparams = QuantParams::of(&w, &scheme).unwrap();
        let codes = to_codes(w, &qparams, &scheme).into_data();
        assert_eq!(codes.iter::<i32>().collect::<Vec<_>>(), by_output);
        for (ours, theirs) in values(qparams.scale).into_iter().zip(&scales) {
            assert!(near(ours, *theirs, 1e-6), "{ours} {theirs}");
        }
    });
    let bias = floats(&case["b"]);
    let layer =
        IntegerLinear::new(codes, [d_input, d_output], &scales, Some(&bias), input).unwrap();
    // Of zeros only the bias is left.
    let zeros = vec![input.zero_point; d_input];
    assert_eq!(layer.accumulate(&zeros).unwrap(), ints(&case["b_q_int32"]));
    let units = layer.dequantize(&vec![1; d_output]);
    for (ours, theirs) in units.into_iter().zip(floats(&case["bias_scale"])) {
        // The file multiplies with the scale as F64, we with the F32 one.
        assert!(near(ours, theirs, 2.0 * f32::EPSILON), "{ours} {theirs}");
    }
    let accumulators = layer.accumulate(&x).unwrap();
    assert_eq!(accumulators, ints(&case["acc_int32"]));
    let real = layer.dequantize(&accumulators);
    for (ours, theirs) in real.iter().zip(floats(&case["dequantized"])) {
        // One F32 product of a number that is exact.
        assert!(near(*ours, theirs, f32::EPSILON), "{ours} {theirs}");
    }
    let multipliers = case["multiplier_q31_and_exponent"].as_array().unwrap();
    assert_eq!(multipliers.len(), d_output);
    for (scale, theirs) in scales.iter().zip(multipliers) {
        let real = f64::from(input.scale * scale) / f64::from(output.scale);
        let ours = Multiplier::new(real).unwrap();
        // The file divides by the scale as F64, we by the F32 one: 2⁻²⁴ of 2³¹ apart at most.
        assert!((ours.mantissa() - ints(theirs)[0]).abs() <= 128);
        assert_eq!(ours.exponent(), ints(theirs)[1]);
    }
    for (mode, name) in [
        (Requantization::FixedPoint, "out_q_gemmlowp"),
        (Requantization::Float, "out_q_float_requant"),
    ] {
        let codes = layer.requantize(&accumulators, output, mode).unwrap();
        assert_eq!(codes, ints(&case[name]), "{name}");
    }
}

#[test]
fn requantization_primitives_agree_with_gemmlowp() {
    for (index, file) in files("quant_integer_linear.json").iter().enumerate() {
        let tables = cases_of(file).iter();
        let tables = tables.filter_map(|case| case.get("cases_a_mult_exp_out"));
        assert!(tables.map(primitives).count() > 0 || index > 0);
    }
}

fn primitives(rows: &Value) {
    for row in rows.as_array().unwrap() {
        let [accumulator, mantissa, exponent, expected] = ints(row)[..] else {
            panic!("{row}")
        };
        let real = f64::from(mantissa) * f64::powi(2.0, exponent - 31);
        let multiplier = Multiplier::new(real).unwrap();
        assert_eq!(
            (multiplier.mantissa(), multiplier.exponent()),
            (mantissa, exponent)
        );
        assert_eq!(multiplier.apply(accumulator), expected, "{row}");
    }
}

#[derive(Module, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

#[test]
fn conv_and_batch_norm_fold_to_the_reference() {
    let cases = cases("quant_conv_bn_fold.json");
    each_device(|target| {
        for case in &cases {
            folds(case, target);
        }
    });
}

/// A tensor whose shape stands beside it.
fn images(case: &Value, name: &str, device: &Device) -> Tensor<4> {
    let shape = ints(&case[format!("{name}_shape")]);
    let shape: Vec<usize> = shape.iter().map(|d| *d as usize).collect();
    Tensor::from_data(TensorData::new(floats(&case[name]), shape), device)
}

fn folds(case: &Value, target: &Target) {
    let device = &target.device;
    let weight = images(case, "w", device);
    let x = images(case, "x", device);
    let [outputs, inputs, height, width] = weight.dims();
    // The output is as large as the input.
    let (top, left) = (height / 2, width / 2);
    let mut conv = Conv2dConfig::new([inputs, outputs], [height, width])
        .with_padding(PaddingConfig2d::Explicit(top, left, top, left))
        .init(device);
    conv.weight = Param::from_tensor(weight);
    conv.bias = Some(Param::from_tensor(vector(&case["b"], device)));
    let epsilon = case["eps"].as_f64().unwrap();
    let norm = BatchNormConfig::new(outputs).with_epsilon(epsilon);
    let mut norm = norm.init(device);
    norm.gamma = Param::from_tensor(vector(&case["gamma"], device));
    norm.beta = Param::from_tensor(vector(&case["beta"], device));
    norm.running_mean = RunningState::new(vector(&case["mean"], device));
    norm.running_var = RunningState::new(vector(&case["var"], device));
    let pair = FoldPair::new("conv", "norm", epsilon);
    let folded = fold(ConvNorm { conv, norm }, &[pair]).unwrap();

    // Ours is the F32 nearest to the F64 result, theirs is computed in F32: a root, a division and
    // a product, each off by half a unit in the last place; a difference before them and a sum
    // after them for the bias.
    for (ours, theirs) in values(folded.conv.weight.val())
        .into_iter()
        .zip(floats(&case["folded_w"]))
    {
        assert!(near(ours, theirs, 4.0 * f32::EPSILON), "{ours} {theirs}");
    }
    let largest = |name: &str| floats(&case[name]).iter().fold(0f32, |m, x| m.max(x.abs()));
    let least = floats(&case["var"]).into_iter().fold(f32::MAX, f32::min);
    let factor = largest("gamma") / (least + epsilon as f32).sqrt();
    let terms = factor * (largest("b") + largest("mean")) + largest("beta");
    let bias = values(folded.conv.bias.as_ref().unwrap().val());
    for (ours, theirs) in bias.into_iter().zip(floats(&case["folded_b"])) {
        let allowed = 4.0 * f32::EPSILON * terms;
        assert!((ours - theirs).abs() <= allowed, "{ours} {theirs}");
    }
    // What the terms of each output add up to without their signs.
    let mut magnitudes = folded.conv.clone();
    magnitudes.weight = magnitudes.weight.map(|weight| weight.abs());
    magnitudes.bias = magnitudes.bias.map(|bias| bias.map(|bias| bias.abs()));
    let magnitudes = values(magnitudes.forward(x.clone().abs()));
    let y = values(folded.norm.forward(folded.conv.forward(x)));
    let expected = floats(&case["y_conv_bn_eval"]);
    assert_eq!(y.len(), expected.len());
    // Sums of that many products, rounded each time, on both sides; a few roundings for the norm. And what
    // the reference itself is off by.
    let count = (inputs * height * width) as f32;
    let unit = (2.0 * count.sqrt() + 8.0) * f32::EPSILON / 2.0;
    let own = case.get("y_max_abs_diff_folded").map_or(0.0, float);
    for ((ours, theirs), magnitude) in y.into_iter().zip(expected).zip(magnitudes) {
        let allowed = unit * (magnitude + terms) + own;
        assert!(
            (ours - theirs).abs() < allowed,
            "{ours} {theirs} ± {allowed:e}"
        );
    }
}

#[test]
fn weight_rounding_and_factors_agree_with_the_reference() {
    let cases = cases("quant_weight_ptq.json");
    each_device(|target| {
        for case in &cases {
            let x = matrix(&case["X"], &target.device);
            let w = matrix(&case["W"], &target.device);
            let inputs = observed(x.clone());
            rounds(case, &w, &inputs);
            scales(case, x, w);
        }
    });
}

/// In two batches, as a loader would give them.
fn observed(x: Tensor<2>) -> InputStatistics {
    let [rows, features] = x.dims();
    let mut inputs = InputStatistics::new(features);
    let half = rows / 2;
    inputs.observe(x.clone().narrow(0, 0, half)).unwrap();
    inputs.observe(x.narrow(0, half, rows - half)).unwrap();
    inputs
}

/// Nearest codes and GPTQ.
fn rounds(case: &Value, w: &Tensor<2>, inputs: &InputStatistics) {
    let [outputs, features] = w.dims();
    let by_row = floats(&case["scale"]);
    let scale: Vec<f32> = (0..outputs * features)
        .map(|i| by_row[i / features])
        .collect();
    let grid = WeightGrid::new(
        [outputs, features],
        floats(&case["W"]),
        scale,
        vec![0.0; outputs * features],
        (-7, 7),
    )
    .unwrap();
    let codes = gptq(&grid, inputs, &GptqConfig::new()).unwrap();
    // Codes are integers: the values agree exactly (−0 and 0 count as equal).
    assert_eq!(grid.values(&grid.nearest()), floats(&case["rtn"]));
    assert_eq!(grid.values(&codes), floats(&case["gptq"]));
    for (codes, name) in [
        (&grid.nearest(), "output_mse_rtn"),
        (&codes, "output_mse_gptq"),
    ] {
        let ours = grid.output_error(codes, inputs).unwrap() as f32;
        let theirs = float(&case[name]);
        // They compute it in F32.
        assert!(near(ours, theirs, 1e-5), "{name}: {ours} {theirs}");
    }
}

/// A gain, out of which factors move into the weight behind it.
#[derive(Module, Debug)]
struct Scaled {
    gain: Param<Tensor<1>>,
    linear: Linear,
}

impl Scaled {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(x * self.gain.val().unsqueeze())
    }
}

/// SmoothQuant and AWQ: what a model of ones and the weight is divided by and rounded to.
fn scales(case: &Value, x: Tensor<2>, w: Tensor<2>) {
    let [rows, features] = x.dims();
    let model = Scaled {
        gain: Param::from_tensor(Tensor::ones([features], &x.device())),
        // Our layers hold [in, out].
        linear: Linear {
            weight: Param::from_tensor(w.transpose()),
            bias: None,
        },
    };
    let quantize = Quantize::new(4)
        .with_search_range(false)
        .with_rounding(oneshot::Rounding::Nearest);
    let compressed = |scaling| {
        let preset = Preset::new()
            .with_quantize(Some(quantize.clone()))
            .with_scaling(Some(scaling));
        let halves = x.clone().split(rows / 2, 0);
        let done = OneShot::new(preset).compress(model.clone(), halves, Scaled::forward);
        let model = done.unwrap().model;
        let factors = values(model.gain.val().recip());
        (model, factors)
    };
    let mut checked = 0;
    for (name, theirs) in case.as_object().unwrap() {
        let Some(alpha) = name.strip_prefix("smooth_alpha_") else {
            continue;
        };
        let alpha = alpha.parse().unwrap();
        let (_, ours) = compressed(Scaling::SmoothQuant { alpha });
        for (ours, theirs) in ours.into_iter().zip(floats(theirs)) {
            // Two powers and two quotients in F32.
            assert!(near(ours, theirs, 1e-5), "{name}: {ours} {theirs}");
        }
        checked += 1;
    }
    assert!(checked > 0);

    // f = mean|x|^ratio, and f /= √(max f · min f).
    let (scaled, ours) = compressed(Scaling::Awq);
    let ratio = float(&case["awq_best_ratio"]);
    let theirs = values(x.clone().abs().mean_dim(0).powf_scalar(ratio));
    let most = theirs.iter().copied().fold(0.0, f32::max);
    let middle = (most * theirs.iter().copied().fold(most, f32::min)).sqrt();
    for (ours, theirs) in ours.into_iter().zip(theirs) {
        let theirs = theirs / middle;
        assert!(near(ours, theirs, 1e-5), "AWQ: {ours} {theirs}");
    }
    let errors = floats(&case["awq_grid_output_mse"]);
    let theirs = errors.into_iter().fold(f32::INFINITY, f32::min);
    let off = scaled.forward(x.clone()) - model.forward(x);
    let ours = off.square().mean().into_scalar::<f32>();
    // Differences of outputs whose sums are rounded in F32.
    assert!(near(ours, theirs, 1e-4), "AWQ: {ours} {theirs}");
}
