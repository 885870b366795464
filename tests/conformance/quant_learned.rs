//! Learned scales and zero points against PyTorch's operation and the paper's pseudocode.

use burn::tensor::{Tensor, TensorData};
use burn_lean::quant::{
    NumberFormat, QuantParams, Scheme,
    fake::{Clip, LearnedGradient, fake_quantize_learned},
};
use serde_json::Value;

use crate::quant_fake_quantize::{for_rank, scheme, shape, ulps};
use crate::support::{Target, each_device, values};
use crate::{cases, float, floats, near, vector};

#[test]
fn learned_scales_and_zero_points_have_the_gradients_of_the_reference() {
    let cases = cases("quant_learnable_lsq.json");
    each_device(|target| {
        for case in &cases {
            for_rank!(case, learns(target));
        }
    });
}

fn learns<const D: usize>(case: &Value, target: &Target) {
    let device = target.device.clone().autodiff();
    let scheme = scheme(case);
    let tensor = |field: &str| {
        let data = TensorData::new(floats(&case[field]), shape(case));
        Tensor::<D>::from_data(data, &device)
    };
    let qparam = |field: &str| {
        let values = floats(&case[field]);
        Tensor::<1>::from_data(TensorData::from(&values[..]), &device).require_grad()
    };
    let x = tensor("x").require_grad();
    let qparams = QuantParams {
        scale: qparam("scale"),
        zero_point: qparam("zero_point"),
    };
    let gradient = LearnedGradient {
        clip: match case.get("impl").and_then(Value::as_str) {
            None => Clip::AfterRounding,
            Some("paper_autograd") => Clip::BeforeRounding,
            Some(other) => panic!("unknown implementation {other}"),
        },
        factor: float(&case["grad_factor"]),
    };
    let y = fake_quantize_learned(x.clone(), &qparams, &scheme, gradient);
    let grads = (y.clone() * tensor("dy")).sum().backward();

    let name = format!("{} on {}", case["name"], target.name);
    for (found, expected) in values(y).into_iter().zip(floats(&case["y"])) {
        assert!(
            ulps(found, expected) <= 1,
            "{name}: y = {found:e}, not {expected:e}"
        );
    }
    // Exact, but for the paper's pseudocode, whose autograd multiplies by the scale and divides by
    // it again.
    let roundings = match gradient.clip {
        Clip::AfterRounding => 0,
        Clip::BeforeRounding => 2,
    };
    let found = values(x.grad(&grads).unwrap());
    for (found, expected) in found.into_iter().zip(floats(&case["dx"])) {
        let ok = found == expected || ulps(found, expected) <= roundings;
        assert!(ok, "{name}: dx = {found:e}, not {expected:e}");
    }

    // Sums of N terms: their order matters by about √N · 2⁻²⁴ of the sum of magnitudes, on both sides (a
    // GPU sums in F32, too). Those are |dy| times x / scale, or the widest code (or the scale), times the
    // factor; a few more roundings for each term.
    let widest = float(&case["quant_max"]) - float(&case["quant_min"]);
    let scales = floats(&case["scale"]);
    let least = scales.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = scales.into_iter().fold(0.0, f32::max);
    let (xs, dys) = (floats(&case["x"]), floats(&case["dy"]));
    let codes = xs.iter().map(|x| (x / least).abs().min(widest) + 1.0);
    let of_scale: f32 = codes.zip(&dys).map(|(code, dy)| code * dy.abs()).sum();
    let of_zero: f32 = dys.iter().map(|dy| largest * dy.abs()).sum();
    let roundings = gradient.factor * ((dys.len() as f32).sqrt() + 4.0);
    for (field, parameter, magnitude) in [
        ("dscale", &qparams.scale, of_scale),
        ("dzero_point", &qparams.zero_point, of_zero),
    ] {
        // The paper's pseudocode has no zero point.
        let Some(expected) = case.get(field) else {
            continue;
        };
        let tolerance = roundings * magnitude * f32::EPSILON;
        let found = values(parameter.grad(&grads).unwrap());
        for (found, expected) in found.into_iter().zip(floats(expected)) {
            assert!(
                (found - expected).abs() <= tolerance,
                "{name}: {field} = {found:e}, not {expected:e} ± {tolerance:e}"
            );
        }
    }
}

#[test]
fn learned_scales_start_as_in_the_reference() {
    let cases = cases("quant_lsq_init.json");
    each_device(|target| {
        for case in &cases {
            let x = vector(&case["x"], &target.device);
            let length = x.dims()[0] as f32;
            let lsq = |bits| {
                let scheme = Scheme::symmetric(NumberFormat::int(bits));
                QuantParams::lsq(&x, &scheme).unwrap().scale
            };
            let plus = Scheme::symmetric(NumberFormat::int(4));
            let plus = QuantParams::lsq_plus_weights(&x, &plus).unwrap().scale;
            for (field, found) in [
                ("scale_lsq_qp7", lsq(4)),
                ("scale_lsq_qp127", lsq(8)),
                ("scale_lsqplus_bits4", plus),
            ] {
                let (found, expected) = (values(found)[0], float(&case[field]));
                // Means of the numbers, summed in another order: at most a rounding for each.
                assert!(
                    near(found, expected, length * 2f32.powi(-24)),
                    "{field} on {}: {found:e}, not {expected:e}",
                    target.name
                );
            }
        }
    });
}
