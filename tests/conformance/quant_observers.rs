//! Observers against `torch.ao.quantization.observer`.

use burn::tensor::{Tensor, TensorData};
use burn_lean::quant::{
    FakeQuantize, FakeQuantizeConfig, Granularity, Histogram, Mapping, ObserverConfig, QuantError,
    QuantParams, RangeMethod, Scheme, calibrate, search,
};
use serde_json::Value;

use crate::quant_fake_quantize::{format, ulps};
use crate::support::{Target, each_device, values};
use crate::{cases, files, float, floats, same};

/// The five batches of the file, `[4, 3]`.
fn batches() -> Vec<Vec<f32>> {
    let file = &files("quant_observers.json")[0];
    let batches = file["batches"].as_array().unwrap();
    batches.iter().map(floats).collect()
}

/// The batches of a case and the shape of each: its own, or those of the file.
fn batches_of(case: &Value) -> Vec<(Vec<f32>, [usize; 2])> {
    match case.get("batches").and_then(Value::as_array) {
        Some(own) => own
            .iter()
            .map(|batch| {
                let values = floats(batch);
                let shape = [1, values.len()];
                (values, shape)
            })
            .collect(),
        None => batches().into_iter().map(|batch| (batch, [4, 3])).collect(),
    }
}

/// What a case's name says of scheme and observer; none for other kinds of cases.
fn config(case: &Value) -> Option<FakeQuantizeConfig> {
    let name = case["name"].as_str().unwrap();
    let observer = match name {
        _ if name.starts_with("histogram") || name.contains("input_histogram") => return None,
        "edge_no_data" => return None,
        _ if name.starts_with("moving_average_0.1_") => ObserverConfig::MovingAverage {
            averaging_constant: 0.1,
        },
        _ if name.contains("0.01") => ObserverConfig::moving_average(),
        _ => ObserverConfig::MinMax,
    };
    let symmetric = name.contains("symmetric")
        || name == "edge_single_element"
        || name == "moving_average_per_channel_axis1_0.01";
    let mapping = match (symmetric, name.starts_with("fused")) {
        (false, _) => Mapping::Affine,
        (true, false) => Mapping::Symmetric,
        (true, true) => Mapping::SymmetricNoClipping,
    };
    let granularity = match name {
        _ if name.contains("axis0") => Granularity::PerChannel { axis: 0 },
        _ if name.contains("axis1") => Granularity::PerChannel { axis: 1 },
        _ => Granularity::PerTensor,
    };
    let scheme = Scheme::symmetric(format(case))
        .with_mapping(mapping)
        .with_granularity(granularity);
    Some(FakeQuantizeConfig::new(scheme).with_observer(observer))
}

/// The observer after each batch of a training.
fn observed(case: &Value, config: &FakeQuantizeConfig, target: &Target) -> FakeQuantize {
    let device = target.device.clone().autodiff();
    let batches = batches_of(case);
    let quantizer = config.init_for(&batches[0].1, &device).unwrap();
    let (steps_min, steps_max) = (&case["steps_min"], &case["steps_max"]);
    for (step, (batch, shape)) in batches.into_iter().enumerate() {
        let batch = Tensor::<2>::from_data(TensorData::new(batch, shape), &device);
        quantizer.forward(batch);
        let range = quantizer.range().unwrap();
        let found = [values(range.min), values(range.max)].concat();
        let expected = [floats(&steps_min[step]), floats(&steps_max[step])].concat();
        for (found, expected) in found.iter().zip(&expected) {
            // One multiplication and two additions a step, which wgpu may contract.
            assert!(
                same(*found, *expected) || ulps(*found, *expected) <= 2 * step as u32,
                "{} on {}, step {step}: {found:e}, not {expected:e}",
                case["name"],
                target.name
            );
        }
    }
    quantizer
}

/// Cases that we refuse on purpose: PyTorch gives an infinite or undefined scale without a word.
const REFUSED: [&str; 3] = [
    "edge_huge_range",
    "edge_inf_input_minmax",
    "edge_nan_input_minmax",
];

/// Cases of one value: PyTorch gives a scale, we say that nothing useful was observed.
const CONSTANT: [&str; 4] = [
    "edge_all_zero",
    "edge_constant_positive",
    "edge_constant_negative",
    "edge_single_element",
];

#[test]
fn ranges_and_quantization_parameters_are_those_of_the_reference() {
    let cases = cases("quant_observers.json");
    each_device(|target| {
        let mut checked = 0;
        for case in &cases {
            let name = case["name"].as_str().unwrap();
            let Some(config) = config(case) else { continue };
            if REFUSED.contains(&name) {
                continue;
            }
            let quantizer = observed(case, &config, target);
            let qparams = match quantizer.qparams() {
                Err(error) if CONSTANT.contains(&name) => {
                    assert!(
                        error.to_string().contains("all values observed are"),
                        "{error}"
                    );
                    QuantParams::from_range(quantizer.range().unwrap(), &config.scheme)
                }
                other => {
                    assert!(!CONSTANT.contains(&name), "{name} was accepted");
                    other.unwrap()
                }
            };
            let (scale, zero_point) = match case.get("steps_scale") {
                Some(scales) => (
                    vec![*floats(scales).last().unwrap()],
                    vec![*floats(&case["steps_zero_point"]).last().unwrap()],
                ),
                None => (floats(&case["scale"]), floats(&case["zero_point"])),
            };
            for (found, expected) in values(qparams.scale).into_iter().zip(scale) {
                // The fused kernel computes in F64; wgpu may divide with up to 2.5 ulp.
                let fused = u32::from(name.starts_with("fused"));
                let allowed = if target.name == "wgpu" { 3 } else { 0 } + fused;
                assert!(
                    ulps(found, expected) <= allowed,
                    "{name} on {}: scale {found:e}, not {expected:e}",
                    target.name
                );
            }
            assert_eq!(values(qparams.zero_point), zero_point, "{name}");
            checked += 1;
        }
        assert_eq!(checked, 23);
    });
}

#[test]
fn what_is_not_finite_is_an_error_where_the_reference_gives_an_infinite_scale() {
    let cases = cases("quant_observers.json");
    each_device(|target| {
        for case in &cases {
            let name = case["name"].as_str().unwrap();
            if !REFUSED.contains(&name) {
                continue;
            }
            let config = config(case).unwrap();
            let (batch, shape) = batches_of(case).remove(0);
            let batch = Tensor::<2>::from_data(TensorData::new(batch, shape), &target.device);
            let quantizer = config.init(&target.device).unwrap();
            let rejected = calibrate(quantizer, |quantizer| {
                quantizer.forward(batch);
            });
            let error = rejected.unwrap_err().into_error();
            let QuantError::Parameter { error, .. } = error else {
                panic!("{name}: {error}")
            };
            assert_eq!(*error, QuantError::NonFinite { what: "range" }, "{name}");
        }
    });
}

#[test]
fn no_data_is_an_error_where_the_reference_gives_a_scale_of_one() {
    let case = cases("quant_observers.json")
        .into_iter()
        .find(|case| case["name"] == "edge_no_data")
        .unwrap();
    assert_eq!(floats(&case["scale"]), [1.0]);
    each_device(|target| {
        let config =
            FakeQuantizeConfig::new(Scheme::affine(burn_lean::quant::NumberFormat::uint8()));
        let quantizer = config.init(&target.device).unwrap();
        let error = quantizer.qparams().unwrap_err();
        assert_eq!(error, QuantError::NeverObserved.at(""));
    });
}

#[test]
fn histograms_grow_and_are_searched_as_the_reference_does() {
    let batches = batches();
    let mut checked = 0;
    for case in cases("quant_observers.json") {
        let name = case["name"].as_str().unwrap();
        let (Some(bins), true) = (case.get("bins"), name != "histogram_2048_outlier") else {
            continue;
        };
        let mut histogram = Histogram::new(bins.as_u64().unwrap() as usize);
        for batch in &batches {
            histogram.observe(batch);
        }
        match case.get("histogram") {
            Some(counts) => {
                let found: Vec<f32> = histogram
                    .counts()
                    .iter()
                    .map(|count| *count as f32)
                    .collect();
                assert_eq!(found, floats(counts), "{name}");
            }
            None => assert_eq!(histogram.counts().iter().sum::<f64>(), 60.0),
        }
        let mapping = match name.contains("affine") {
            true => Mapping::Affine,
            false => Mapping::Symmetric,
        };
        let scheme = Scheme::symmetric(format(&case)).with_mapping(mapping);
        let (min, max) = search(&histogram, &scheme);
        for (found, field) in [(min, "search_min"), (max, "search_max")] {
            let expected = float(&case[field]);
            assert!(
                ulps(found, expected) <= 2,
                "{name}: {field} {found:e}, not {expected:e}"
            );
        }
        checked += 1;
    }
    assert_eq!(checked, 3);
}

#[test]
fn a_calibration_with_a_histogram_gives_the_quantization_parameters_of_the_reference() {
    let all = cases("quant_observers.json");
    each_device(|target| {
        for case in &all {
            let name = case["name"].as_str().unwrap();
            let (Some(bins), true) = (case.get("bins"), name != "histogram_2048_outlier") else {
                continue;
            };
            let mapping = match name.contains("affine") {
                true => Mapping::Affine,
                false => Mapping::Symmetric,
            };
            let config =
                FakeQuantizeConfig::new(Scheme::symmetric(format(case)).with_mapping(mapping))
                    .with_observer(ObserverConfig::Histogram {
                        bins: bins.as_u64().unwrap() as usize,
                        range: RangeMethod::Search,
                    });
            let quantizer = calibrate(config.init(&target.device).unwrap(), |quantizer| {
                for batch in batches() {
                    let batch = TensorData::new(batch, [4, 3]);
                    quantizer.forward(Tensor::<2>::from_data(batch, &target.device));
                }
            });
            let qparams = quantizer.unwrap().qparams().unwrap();
            let (scale, expected) = (values(qparams.scale)[0], float(&case["scale"]));
            assert!(
                ulps(scale, expected) <= 4,
                "{name}: {scale:e}, not {expected:e}"
            );
            assert_eq!(
                values(qparams.zero_point),
                floats(&case["zero_point"]),
                "{name}"
            );
        }
    });
}

#[test]
fn a_histogram_leaves_infinities_out_as_the_reference_does() {
    let case = cases("quant_observers.json")
        .into_iter()
        .find(|case| case["name"] == "edge_inf_input_histogram")
        .unwrap();
    let mut histogram = Histogram::new(16);
    histogram.observe(&floats(&case["batches"][0]));
    assert_eq!(histogram.min(), float(&case["steps_min"][0]));
    assert_eq!(histogram.max(), float(&case["steps_max"][0]));
    let scheme = Scheme::affine(format(&case));
    let (min, max) = search(&histogram, &scheme);
    assert!(ulps((max - min) / 255.0, float(&case["scale"])) <= 1);
}
