//! Float formats, scales of blocks and of tokens.

use burn::tensor::{Tensor, TensorData};
use burn_lean::quant::{
    Granularity, Mapping, NumberFormat, QuantParams, Scheme, fake_quantize, format::ScaleRounding,
};
use serde_json::Value;

use crate::support::{Target, each_device, values};
use crate::{cases_of, files, float, floats};

#[test]
fn low_bit_formats_round_and_scale_as_in_the_reference() {
    for file in files("quant_lowbit_formats.json") {
        let cases = cases_of(&file);
        // The file gives the input of the block formats once.
        let blocks = cases.iter().find(|case| case.get("tensor_scale").is_some());
        let blocks = blocks.map_or_else(Vec::new, |case| floats(&case["x"]));
        each_device(|target| {
            for case in cases {
                low_bit(case, &blocks, target);
            }
        });
    }
}

fn low_bit(case: &Value, blocks: &[f32], target: &Target) {
    let name = case["name"].as_str().unwrap();
    let table = match name {
        "e2m1_round_half_even_saturate" => Some(NumberFormat::E2M1),
        "e4m3_saturating_nearest_even" => Some(NumberFormat::E4M3),
        "e5m2_nearest_even" => Some(NumberFormat::E5M2),
        _ => None,
    };
    if let Some(format) = table {
        return rounds(case, format, target);
    }
    let group = |field: &str| Granularity::PerBlock {
        extents: vec![float(&case[field]) as usize],
    };
    let int4 = Scheme::symmetric(NumberFormat::int(4));
    let scheme = match name {
        "nvfp4_two_level_torchao_nearest_block_scale" => {
            Scheme::nvfp4(ScaleRounding::Standard).with_granularity(group("block"))
        }
        // Burn rounds scales up, PyTorch's libraries to nearest: both are choices here.
        "nvfp4_two_level_burn_round_up_block_scale" => {
            Scheme::nvfp4(ScaleRounding::Up).with_granularity(group("block"))
        }
        "mxfp4_floor_scale" => {
            Scheme::mxfp4(ScaleRounding::Standard).with_granularity(group("block"))
        }
        "mxfp4_rceil_scale_equals_burn_ue8m0_round_up" => {
            Scheme::mxfp4(ScaleRounding::Up).with_granularity(group("block"))
        }
        "int4_group8_symmetric_div_7.5" => int4.with_granularity(group("group")),
        "int4_group8_no_clipping_err" => int4
            .with_mapping(Mapping::SymmetricNoClipping)
            .with_granularity(group("group")),
        "int4_group8_narrow_div_7" => {
            Scheme::symmetric(NumberFormat::int(4).narrow()).with_granularity(group("group"))
        }
        "int8_per_token_dynamic_asymmetric" => {
            Scheme::affine(NumberFormat::int8()).with_granularity(Granularity::PerToken)
        }
        other => panic!("unknown case {other}"),
    };
    let shape = floats(&case["shape"]);
    let shape = [shape[0] as usize, shape[1] as usize];
    let inputs = case.get("x").map_or_else(|| blocks.to_vec(), floats);
    let x = Tensor::<2>::from_data(TensorData::new(inputs.clone(), shape), &target.device);
    let qparams = QuantParams::of(&x, &scheme).unwrap();

    let scales = match (case.get("scale"), case.get("shared_exp")) {
        (Some(scales), _) => floats(scales),
        (_, Some(exponents)) => floats(exponents).into_iter().map(f32::exp2).collect(),
        _ => {
            let scales = floats(&case["block_scale_e4m3"]).into_iter();
            scales
                .map(|scale| scale * float(&case["tensor_scale"]))
                .collect()
        }
    };
    let close = |what: &str, found: Vec<f32>, expected: Vec<f32>| {
        assert_eq!(found.len(), expected.len(), "{name}: {what}");
        for (found, expected) in found.into_iter().zip(expected) {
            // A few roundings: of a range, a quotient, a product.
            assert!(
                (found - expected).abs() <= 1e-6 * expected.abs(),
                "{name} on {}: {what} {found:e}, not {expected:e}",
                target.name
            );
        }
    };
    close("scale", values(qparams.scale.clone()), scales);
    if let Some(expected) = case.get("zero_point") {
        assert_eq!(
            values(qparams.zero_point.clone()),
            floats(expected),
            "{name}"
        );
    }
    let y = values(fake_quantize(x, &qparams, &scheme));
    close("y", y.clone(), floats(&case["y"]));
    if let Some(expected) = case.get("mse") {
        let squares = inputs.iter().zip(&y).map(|(x, y)| f64::from(x - y).powi(2));
        let found = squares.sum::<f64>() / y.len() as f64;
        // The mean of F32 squares, each twice as far off as its difference.
        let expected = f64::from(float(expected));
        assert!(
            (found - expected).abs() <= 1e-5 * expected,
            "{name} on {}: mean squared error {found:e}, not {expected:e}",
            target.name
        );
    }
}

/// Exact: these are tables.
fn rounds(case: &Value, format: NumberFormat, target: &Target) {
    let inputs = floats(&case["x"]);
    let x = Tensor::<1>::from_data(TensorData::from(&inputs[..]), &target.device);
    let scheme = Scheme::symmetric(format);
    let one = QuantParams::symmetric(Tensor::ones([1], &target.device), &scheme);
    let found = values(fake_quantize(x, &one, &scheme));
    for ((x, found), expected) in inputs.iter().zip(found).zip(floats(&case["y"])) {
        assert_eq!(found, expected, "{format} of {x:e} on {}", target.name);
        assert_eq!(format.round(*x), expected, "{format} of {x:e}");
    }
}
