//! Observers against `torch.ao.quantization.observer`.

use burn::tensor::{Tensor, TensorData};
use burn_lean::quant::{
    FakeQuantize, FakeQuantizeConfig, Granularity, Mapping, NumberFormat, ObserverConfig,
    QuantError, QuantParams, RangeMethod, Scheme, calibrate,
    range::{Histogram, search},
};
use serde_json::Value;

use crate::quant_fake_quantize::format;
use crate::support::{Target, each_device, values};
use crate::{cases_of, files, float, floats, near, nesting};

/// What a case is about.
#[derive(Debug, PartialEq)]
enum Kind {
    /// Ranges and quantization parameters of one observer.
    Range,
    /// PyTorch gives an infinite or undefined scale without a word, or raises: we refuse.
    NotFinite,
    /// An observer that saw nothing: PyTorch gives a scale of 1, we refuse.
    NoData,
    /// A histogram over the batches of the file.
    Histogram,
    /// A histogram over a batch with an infinity.
    Infinity,
    /// The file does not hold the data.
    NotStored,
}

fn kind(case: &Value) -> Kind {
    let name = case["name"].as_str().unwrap();
    let why = case.get("why").and_then(Value::as_str).unwrap_or("");
    let finite = |scale| floats(scale).iter().all(|scale| scale.is_finite());
    match () {
        _ if why.contains("not stored") => Kind::NotStored,
        _ if case.get("bins").is_some() => Kind::Histogram,
        _ if name.contains("input_histogram") => Kind::Infinity,
        _ if case.get("raises").is_some() => Kind::NotFinite,
        _ if case.get("quant_min").is_none() => Kind::NoData,
        _ if case.get("scale").is_some_and(|scale| !finite(scale)) => Kind::NotFinite,
        _ => Kind::Range,
    }
}

/// Runs `test` on the cases of that kind in each file, with the batches of the case and their
/// shape, which are its own or those of its file. The project's own file has all kinds.
fn each_case(wanted: Kind, mut test: impl FnMut(&Value, &[Batch])) {
    for (index, file) in files("quant_observers.json").iter().enumerate() {
        let mut checked = 0;
        for case in cases_of(file) {
            if kind(case) == wanted {
                let batches = case.get("batches").unwrap_or(&file["batches"]);
                let batches: Vec<Batch> = batches.as_array().unwrap().iter().map(batch).collect();
                test(case, &batches);
                checked += 1;
            }
        }
        assert!(checked > 0 || index > 0, "no case of kind {wanted:?}");
    }
}

/// Values and shape.
type Batch = (Vec<f32>, [usize; 2]);

fn batch(values: &Value) -> Batch {
    let shape = match nesting(values)[..] {
        [length] => [1, length],
        [rows, columns] => [rows, columns],
        ref other => panic!("a batch of shape {other:?}"),
    };
    (floats(values), shape)
}

fn tensor((values, shape): &Batch, target: &Target) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.clone(), *shape), &target.device)
}

/// What a case's name says of scheme and observer.
fn config(case: &Value) -> FakeQuantizeConfig {
    let name = case["name"].as_str().unwrap();
    let observer = match name {
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
    FakeQuantizeConfig::new(scheme).with_observer(observer)
}

/// The observer after each batch of a training.
fn observed(
    case: &Value,
    config: &FakeQuantizeConfig,
    batches: &[Batch],
    target: &Target,
) -> FakeQuantize {
    let device = target.device.clone().autodiff();
    let quantizer = config.init_for(&batches[0].1, &device).unwrap();
    let mut largest = 0f32;
    for (step, (batch, shape)) in batches.iter().enumerate() {
        largest = batch.iter().fold(largest, |max, x| max.max(x.abs()));
        let batch = Tensor::<2>::from_data(TensorData::new(batch.clone(), *shape), &device);
        let y = values(quantizer.forward(batch));
        if let (Some(expected), true) = (case.get("last_y"), step + 1 == batches.len()) {
            for (found, expected) in y.iter().zip(floats(expected)) {
                // A code times a scale that is off by as much as below.
                assert!(
                    (found - expected).abs() <= 1e-6 * expected.abs(),
                    "{} on {}: y = {found:e}, not {expected:e}",
                    case["name"],
                    target.name
                );
            }
        }
        if case.get("steps_scale").is_some() {
            let qparams = quantizer.qparams().unwrap();
            let (scale, zero_point) = (values(qparams.scale), values(qparams.zero_point));
            let expected = float(&case["steps_scale"][step]);
            assert!(
                near(scale[0], expected, 1e-6),
                "{} on {}, step {step}: scale {scale:?}, not {expected:e}",
                case["name"],
                target.name
            );
            assert_eq!(zero_point, floats(&case["steps_zero_point"][step]));
        }
        let range = quantizer.range().unwrap();
        let found = [values(range.min), values(range.max)].concat();
        let expected = [&case["steps_min"][step], &case["steps_max"][step]].map(floats);
        let expected = expected.concat();
        assert_eq!(found.len(), expected.len(), "{}", case["name"]);
        // A minimum is one of the values. An average takes a multiplication and two additions a
        // step, of numbers up to the largest, which a device may contract.
        let allowed = match config.observer {
            ObserverConfig::MinMax => 0.0,
            _ => 3.0 * step as f32 * f32::EPSILON * largest,
        };
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() <= allowed,
                "{} on {}, step {step}: {found:e}, not {expected:e}",
                case["name"],
                target.name
            );
        }
    }
    quantizer
}

#[test]
fn ranges_and_quantization_parameters_are_those_of_the_reference() {
    each_device(|target| each_case(Kind::Range, |case, batches| range(case, batches, target)));
}

fn range(case: &Value, batches: &[Batch], target: &Target) {
    let name = format!("{} on {}", case["name"], target.name);
    let config = config(case);
    let quantizer = observed(case, &config, batches, target);
    // One value: PyTorch gives a scale, we say that nothing useful was observed.
    let first = batches[0].0[0];
    let constant = batches.iter().flat_map(|(batch, _)| batch);
    let qparams = match constant.copied().all(|x| x == first) {
        false => quantizer.qparams().unwrap(),
        true => {
            let error = quantizer.qparams().unwrap_err().to_string();
            assert!(error.contains("all values observed are"), "{name}: {error}");
            QuantParams::from_range(quantizer.range().unwrap(), &config.scheme)
        }
    };
    // Those of each step were compared.
    let Some(scale) = case.get("scale").map(floats) else {
        return;
    };
    let zero_point = floats(&case["zero_point"]);
    let found = values(qparams.scale);
    assert_eq!(found.len(), scale.len(), "{name}");
    for (found, expected) in found.into_iter().zip(scale) {
        // The fused kernel computes in F64; a GPU may divide with up to 2.5 ulp.
        assert!(
            near(found, expected, 1e-6),
            "{name}: scale {found:e}, not {expected:e}"
        );
    }
    assert_eq!(values(qparams.zero_point), zero_point, "{name}");
}

#[test]
fn what_is_not_finite_is_an_error_where_the_reference_gives_an_infinite_scale() {
    each_device(|target| {
        each_case(Kind::NotFinite, |case, batches| {
            let quantizer = config(case).init(&target.device).unwrap();
            let rejected = calibrate(quantizer, |quantizer| {
                quantizer.forward(tensor(&batches[0], target));
            });
            let error = rejected.unwrap_err().into_error();
            let QuantError::Parameter { error, .. } = error else {
                panic!("{}: {error}", case["name"])
            };
            let expected = QuantError::NonFinite { what: "range" };
            assert_eq!(*error, expected, "{}", case["name"]);
        });
    });
}

#[test]
fn no_data_is_an_error_where_the_reference_gives_a_scale_of_one() {
    each_device(|target| {
        each_case(Kind::NoData, |case, _| {
            assert_eq!(floats(&case["scale"]), [1.0]);
            let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
            let quantizer = config.init(&target.device).unwrap();
            let error = quantizer.qparams().unwrap_err();
            assert_eq!(error, QuantError::NeverObserved.at(""));
        });
    });
}

fn histogram_scheme(case: &Value) -> Scheme {
    let mapping = match case["name"].as_str().unwrap().contains("affine") {
        true => Mapping::Affine,
        false => Mapping::Symmetric,
    };
    Scheme::symmetric(format(case)).with_mapping(mapping)
}

fn bins(case: &Value) -> usize {
    case["bins"].as_u64().unwrap() as usize
}

#[test]
fn histograms_grow_and_are_searched_as_the_reference_does() {
    each_case(Kind::Histogram, |case, batches| {
        let name = case["name"].as_str().unwrap();
        let mut histogram = Histogram::new(bins(case));
        for (batch, _) in batches {
            histogram.observe(batch);
        }
        let counts = histogram.counts();
        match case.get("histogram") {
            Some(expected) => {
                // A value next to an edge, found by a quotient of F32, may be in the neighbouring bin.
                let (mut off, mut before) = (0.0_f64, 0.0_f64);
                let expected = floats(expected);
                assert_eq!(counts.len(), expected.len(), "{name}");
                for (found, expected) in counts.iter().zip(expected) {
                    off += found - f64::from(expected);
                    let moved = [off, before].map(|off| off.abs() > 1e-3);
                    let ok = off.abs() <= 1.001 && moved != [true, true];
                    assert!(ok, "{name}: {found}, not {expected}");
                    before = off;
                }
                assert!(off.abs() <= 1e-3, "{name}");
            }
            None => {
                let sum = case["histogram_sum"].as_f64().unwrap();
                assert_eq!(counts.iter().sum::<f64>(), sum);
            }
        }
        let (min, max) = search(&histogram, &histogram_scheme(case));
        let largest = histogram.min().abs().max(histogram.max());
        for (found, field) in [(min, "search_min"), (max, "search_max")] {
            let expected = float(&case[field]);
            // The end of the histogram and a number of bins, in F32.
            assert!(
                (found - expected).abs() <= 2.0 * f32::EPSILON * largest,
                "{name}: {field} {found:e}, not {expected:e}"
            );
        }
    });
}

#[test]
fn a_calibration_with_a_histogram_gives_the_quantization_parameters_of_the_reference() {
    each_device(|target| {
        each_case(Kind::Histogram, |case, batches| {
            let name = format!("{} on {}", case["name"], target.name);
            let config = FakeQuantizeConfig::new(histogram_scheme(case)).with_observer(
                ObserverConfig::Histogram {
                    bins: bins(case),
                    range: RangeMethod::Search,
                },
            );
            let quantizer = calibrate(config.init(&target.device).unwrap(), |quantizer| {
                for batch in batches {
                    quantizer.forward(tensor(batch, target));
                }
            });
            let qparams = quantizer.unwrap().qparams().unwrap();
            let (scale, expected) = (values(qparams.scale)[0], float(&case["scale"]));
            assert!(
                near(scale, expected, 1e-6),
                "{name}: {scale:e}, not {expected:e}"
            );
            let zero_point = floats(&case["zero_point"]);
            assert_eq!(values(qparams.zero_point), zero_point, "{name}");
        });
    });
}

#[test]
fn a_histogram_leaves_infinities_out_as_the_reference_does() {
    each_case(Kind::Infinity, |case, batches| {
        let mut histogram = Histogram::new(16);
        for (batch, _) in batches {
            histogram.observe(batch);
        }
        assert_eq!(vec![histogram.min()], floats(&case["steps_min"]));
        assert_eq!(vec![histogram.max()], floats(&case["steps_max"]));
        let scheme = Scheme::affine(format(case));
        let (min, max) = search(&histogram, &scheme);
        let codes = scheme.quant_max() - scheme.quant_min();
        assert!(near((max - min) / codes, float(&case["scale"]), 1e-6));
    });
}
