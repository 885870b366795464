//! Fake quantization against `torch.fake_quantize_*`.

use burn::tensor::{Tensor, TensorData};
use burn_lean::quant::{
    Granularity, Mapping, NumberFormat, QuantParams, Scheme, fake::to_codes, fake_quantize,
};
use serde_json::Value;

use crate::support::{Target, each_device, values};
use crate::{cases, float, floats, same};

/// The integers from `quant_min` to `quant_max` of a case.
pub(crate) fn format(case: &Value) -> NumberFormat {
    let bounds = (float(&case["quant_min"]), float(&case["quant_max"]));
    if let Some(dtype) = case.get("dtype").and_then(Value::as_str) {
        let (name, kind) = dtype.split_once('_').unwrap_or((dtype, ""));
        let bits: u8 = name
            .trim_start_matches(char::is_alphabetic)
            .parse()
            .unwrap();
        let bits = bits - u8::from(kind == "reduced");
        let format = match name.starts_with('u') {
            true => NumberFormat::uint(bits),
            false => NumberFormat::int(bits),
        };
        let format = match kind {
            "narrow" | "ternary" => format.narrow(),
            _ => format,
        };
        let found = (format.quant_min(), format.quant_max());
        assert_eq!(found, bounds, "{dtype}");
        return format;
    }
    let mut formats = (2..=8).flat_map(|bits| {
        [
            NumberFormat::int(bits),
            NumberFormat::int(bits).narrow(),
            NumberFormat::uint(bits),
        ]
    });
    let found = formats.find(|format| (format.quant_min(), format.quant_max()) == bounds);
    found.unwrap_or_else(|| panic!("no format has the bounds {bounds:?}"))
}

/// The scheme of a case: affine, per tensor unless there is an axis.
pub(crate) fn scheme(case: &Value) -> Scheme {
    let granularity = match case.get("axis").and_then(Value::as_u64) {
        Some(axis) => Granularity::PerChannel {
            axis: axis as usize,
        },
        None => Granularity::PerTensor,
    };
    Scheme {
        mapping: Mapping::Affine,
        ..Scheme::symmetric(format(case)).with_granularity(granularity)
    }
}

pub(crate) fn shape(case: &Value) -> Vec<usize> {
    let shape = case["shape"].as_array().unwrap().iter();
    shape.map(|dim| dim.as_u64().unwrap() as usize).collect()
}

/// Runs `$test::<rank>` for the rank of the case's shape.
macro_rules! for_rank {
    ($case:expr, $test:ident($($argument:expr),*)) => {
        match $crate::quant_fake_quantize::shape($case).len() {
            1 => $test::<1>($case, $($argument),*),
            2 => $test::<2>($case, $($argument),*),
            3 => $test::<3>($case, $($argument),*),
            4 => $test::<4>($case, $($argument),*),
            rank => panic!("{}: rank {rank}", $case["name"]),
        }
    };
}
pub(crate) use for_rank;

/// Distance in units in the last place.
pub(crate) fn ulps(a: f32, b: f32) -> u32 {
    let ordered = |x: f32| match x.to_bits() {
        bits if bits >> 31 == 0 => i64::from(bits),
        bits => -i64::from(bits & 0x7fff_ffff),
    };
    (ordered(a) - ordered(b)).unsigned_abs() as u32
}

#[test]
fn values_and_gradients_per_tensor_are_those_of_the_reference() {
    let cases = cases("quant_fake_quantize_per_tensor.json");
    each_device(|target| {
        for case in &cases {
            for_rank!(case, fake_quantizes(target));
        }
    });
}

#[test]
fn values_and_gradients_per_channel_are_those_of_the_reference() {
    let cases = cases("quant_fake_quantize_per_channel.json");
    each_device(|target| {
        for case in &cases {
            for_rank!(case, fake_quantizes(target));
        }
    });
}

fn fake_quantizes<const D: usize>(case: &Value, target: &Target) {
    let device = target.device.clone().autodiff();
    let scheme = scheme(case);
    let tensor = |field: &str| {
        let data = TensorData::new(floats(&case[field]), shape(case));
        Tensor::<D>::from_data(data, &device)
    };
    let qparam = |field: &str| {
        let values = floats(&case[field]);
        Tensor::<1>::from_data(TensorData::from(&values[..]), &device)
    };
    let x = tensor("x").require_grad();
    let qparams = QuantParams {
        scale: qparam("scale"),
        zero_point: qparam("zero_point"),
    };
    let y = fake_quantize(x.clone(), &qparams, &scheme);
    let grads = (y.clone() * tensor("dy")).sum().backward();
    let codes = to_codes(x.clone(), &qparams, &scheme).into_data();
    let codes: Vec<i32> = codes.iter::<i32>().collect();

    let name = format!("{} on {}", case["name"], target.name);
    let inputs = floats(&case["x"]);
    let (found, expected) = (values(y), floats(&case["y"]));
    for (index, input) in inputs.iter().enumerate() {
        // PyTorch turns NaN into quant_min; here it stays NaN, so that a diverged model is seen.
        let ok = match input.is_nan() {
            true => found[index].is_nan(),
            false => ulps(found[index], expected[index]) <= 1,
        };
        let (found, expected) = (found[index], expected[index]);
        assert!(
            ok,
            "{name} [{index}]: y({input:e}) = {found:e}, not {expected:e}"
        );
    }
    let gradient = values(x.grad(&grads).unwrap());
    for ((found, expected), input) in gradient.iter().zip(floats(&case["dx"])).zip(&inputs) {
        // The sign of a zero has no meaning.
        let ok = same(*found, expected) || (*found == 0.0 && expected == 0.0);
        assert!(ok, "{name}: dx({input:e}) = {found:e}, not {expected:e}");
    }
    // The file gives 0 for the codes of what is not finite.
    // Those of the reciprocal are told apart from those of a division.
    let fields = ["q", "round_x_mul_recip"];
    for expected in fields.iter().filter_map(|field| case.get(*field)) {
        for ((found, expected), input) in codes.iter().zip(floats(expected)).zip(&inputs) {
            let ok = *found as f32 == expected || !input.is_finite();
            assert!(ok, "{name}: q({input:e}) = {found}, not {expected}");
        }
    }
}
