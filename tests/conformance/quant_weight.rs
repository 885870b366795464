//! Weight rounding, folding and integer inference of the `quant` crate.

use burn::module::{Module, Param, RunningState};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, PaddingConfig2d};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::quant::{
    FoldPair, GptqConfig, Grid, InputStatistics, IntegerLinear, Multiplier, NumberFormat,
    Requantization, Scheme, WeightGrid, awq, fold, gptq, smooth_quant,
};
use serde_json::Value;

use crate::support::{each_device, values};
use crate::{cases, float, floats};

fn ints(value: &Value) -> Vec<i32> {
    match value {
        Value::Array(list) => list.iter().flat_map(ints).collect(),
        number => vec![number.as_i64().expect("an integer") as i32],
    }
}

fn matrix(value: &Value, device: &Device) -> Tensor<2> {
    let rows = value.as_array().expect("rows").len();
    let values = floats(value);
    let columns = values.len() / rows;
    Tensor::from_data(TensorData::new(values, [rows, columns]), device)
}

#[test]
fn integer_linear_gives_every_number_of_the_reference() {
    let cases = cases("quant_integer_linear.json");
    let case = &cases[0];
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
    let (d_output, d_input) = (2, 4);
    let codes: Vec<i8> = (0..d_input * d_output)
        .map(|i| by_output[i % d_output * d_input + i / d_output] as i8)
        .collect();
    let layer = IntegerLinear::new(
        codes,
        [d_input, d_output],
        &floats(&case["w_scale"]),
        Some(&floats(&case["b"])),
        input,
    )
    .unwrap();
    let accumulators = layer.accumulate(&x).unwrap();
    assert_eq!(accumulators, ints(&case["acc_int32"]));
    let real = layer.dequantize(&accumulators);
    for (ours, theirs) in real.iter().zip(floats(&case["dequantized"])) {
        // One F32 product of a number that is exact.
        assert!(
            (ours - theirs).abs() <= theirs.abs() * f32::EPSILON,
            "{ours} {theirs}"
        );
    }
    let scales = floats(&case["w_scale"]);
    let multipliers = case["multiplier_q31_and_exponent"].as_array().unwrap();
    for (scale, theirs) in scales.iter().zip(multipliers) {
        let real = f64::from(input.scale * scale) / f64::from(output.scale);
        let ours = Multiplier::new(real).unwrap();
        // The file divides by the F64 0.03, we by the F32 one: 2⁻²⁴ of 2³¹ apart at most.
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
    let cases = cases("quant_integer_linear.json");
    for row in cases[1]["cases_a_mult_exp_out"].as_array().unwrap() {
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
            let device = &target.device;
            let vector = |name: &str| {
                let values = floats(&case[name]);
                let len = values.len();
                Tensor::<1>::from_data(TensorData::new(values, [len]), device)
            };
            let images = |name: &str, shape: &str| {
                let shape: Vec<usize> = ints(&case[shape]).iter().map(|d| *d as usize).collect();
                Tensor::<4>::from_data(TensorData::new(floats(&case[name]), shape), device)
            };
            let mut conv = Conv2dConfig::new([2, 3], [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device);
            conv.weight = Param::from_tensor(images("w", "w_shape"));
            conv.bias = Some(Param::from_tensor(vector("b")));
            let mut norm = BatchNormConfig::new(3).init(device);
            norm.gamma = Param::from_tensor(vector("gamma"));
            norm.beta = Param::from_tensor(vector("beta"));
            norm.running_mean = RunningState::new(vector("mean"));
            norm.running_var = RunningState::new(vector("var"));
            let epsilon = case["eps"].as_f64().unwrap();
            let pair = FoldPair::new("conv", "norm").with_epsilon(epsilon);
            let folded = fold(ConvNorm { conv, norm }, &[pair]).unwrap();

            // Ours is the F32 nearest to the F64 result, theirs is computed in F32: a root, a
            // division and a product, each off by half a unit in the last place.
            let close = |ours: Vec<f32>, theirs: Vec<f32>| {
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    let largest = theirs.abs().max(1.0);
                    assert!(
                        (ours - theirs).abs() <= 4.0 * f32::EPSILON * largest,
                        "{ours} {theirs}"
                    );
                }
            };
            close(values(folded.conv.weight.val()), floats(&case["folded_w"]));
            close(
                values(folded.conv.bias.as_ref().unwrap().val()),
                floats(&case["folded_b"]),
            );
            let x = images("x", "x_shape");
            let y = values(folded.norm.forward(folded.conv.forward(x)));
            for (ours, theirs) in y.iter().zip(floats(&case["y_conv_bn_eval"])) {
                // Sums of 18 products below 16: 18 roundings of 16 · 2⁻²⁴, on both sides.
                assert!((ours - theirs).abs() < 4e-5, "{ours} {theirs}");
            }
        }
    });
}

#[test]
fn weight_rounding_and_factors_agree_with_the_reference() {
    let cases = cases("quant_weight_ptq.json");
    each_device(|target| {
        for case in &cases {
            let device = &target.device;
            let x = matrix(&case["X"], device);
            let w = matrix(&case["W"], device);
            let [outputs, features] = w.dims();
            let mut inputs = InputStatistics::new(features);
            // In two batches, as a loader would give them.
            let half = x.dims()[0] / 2;
            inputs.observe(x.clone().narrow(0, 0, half)).unwrap();
            inputs
                .observe(x.clone().narrow(0, half, x.dims()[0] - half))
                .unwrap();

            let by_row = floats(&case["scale"]);
            let scale: Vec<f32> = (0..outputs * features)
                .map(|i| by_row[i / features])
                .collect();
            let grid = WeightGrid::new(
                [outputs, features],
                floats(&case["W"]),
                scale.clone(),
                vec![0.0; outputs * features],
                (-7, 7),
            )
            .unwrap();
            let codes = gptq(&grid, &inputs, &GptqConfig::new()).unwrap();
            // Codes are integers: the values agree exactly (−0 and 0 count as equal).
            assert_eq!(grid.values(&grid.nearest()), floats(&case["rtn"]));
            assert_eq!(grid.values(&codes), floats(&case["gptq"]));
            let close = |ours: f64, name: &str| {
                let theirs = case[name].as_f64().unwrap();
                // They compute it in F32.
                assert!(
                    (ours - theirs).abs() < 1e-5 * theirs,
                    "{name}: {ours} {theirs}"
                );
            };
            close(
                grid.output_error(&grid.nearest(), &inputs).unwrap(),
                "output_mse_rtn",
            );
            close(
                grid.output_error(&codes, &inputs).unwrap(),
                "output_mse_gptq",
            );

            // Our layers hold [in, out].
            let weight = w.transpose();
            for (alpha, name) in [(0.5, "smooth_alpha_0.5"), (0.75, "smooth_alpha_0.75")] {
                let factors = smooth_quant(&weight, &inputs, alpha).unwrap();
                for (ours, theirs) in factors.iter().zip(floats(&case[name])) {
                    // Two powers and a quotient in F32.
                    assert!(
                        (ours - theirs).abs() < 1e-5 * theirs,
                        "{name}: {ours} {theirs}"
                    );
                }
            }
            let scheme = Scheme::symmetric(NumberFormat::int(4).narrow())
                .with_granularity(burn_lean::quant::Granularity::PerChannel { axis: 1 });
            let search = awq(&weight, &inputs, &scheme).unwrap();
            assert_eq!(
                search.ratio,
                case["awq_best_ratio"].as_f64().unwrap() as f32
            );
            let theirs = floats(&case["awq_grid_output_mse"]);
            assert_eq!(search.output_errors.len(), theirs.len());
            for (ours, theirs) in search.output_errors.iter().zip(theirs) {
                assert!((ours - f64::from(theirs)).abs() < 1e-5, "{ours} {theirs}");
            }
        }
    });
}
